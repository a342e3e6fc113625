"""Every setting of an engine core and its workers: one frozen struct per subsystem.

Names carry their units. A struct refuses impossible values on construction, with a
`ConfigError` that names the flag, the value and the remedy. Nothing here knows where a
value came from (`load` does).
"""

from __future__ import annotations

import enum
from typing import Any, Final

import msgspec

from pdserve.config.checks import (
    is_loopback,
    require,
    require_not_negative,
    require_one_of,
    require_port,
    require_positive,
    require_text,
)
from pdserve.config.kv_events import KVEventsConfig
from pdserve.config.numerics import NumericsMode
from pdserve.config.speculative import SpeculativeConfig
from pdserve.wire.transfer import MAX_LEASE_S, MIN_LEASE_S

_MAX_RANKS: Final = 1024
"""Of each axis, and threads of a rank: a host would run out of processes or threads first."""
_MAX_ROWS: Final = 1 << 20
_MAX_STEP_TOKENS: Final = 1 << 24
"""Steps have buffers of these sizes."""


class Role(enum.Enum):
    """What an engine is for. It sets defaults; every engine can prefill and decode."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class SchedulingPolicy(enum.Enum):
    """Which waiting request comes first."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which model, and how it is loaded.

    Attributes:
        model: Directory in Hugging Face format.
        served_model_name: Names the HTTP API answers to; the first is reported.
        tokenizer: Directory of the tokenizer; empty means the model's.
        dtype: auto (the checkpoint's), bfloat16, float16 or float32.
        max_model_len: Tokens of prompt and output together; None means the model's own.
        load_format: auto, safetensors, or dummy (random weights from `seed`).
        generation_config: auto (the model's generation_config.json) or none.
        chat_template: A file; empty means the model's.
        enforce_eager: Whether every step is launched; else decode steps, and steps with prompts of
            up to 1,024 tokens, are replayed as graphs if the device has them.
        tool_call_parser, reasoning_parser: Names of formats, none, or auto: what the chat template
            teaches, if that is sure.
        enable_auto_tool_choice: Whether a model may be asked to choose tools by itself.
    """

    model: str
    served_model_name: tuple[str, ...] = ()
    tokenizer: str = ""
    dtype: str = "auto"
    max_model_len: int | None = None
    load_format: str = "auto"
    seed: int = 0
    generation_config: str = "auto"
    chat_template: str = ""
    enforce_eager: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    enable_auto_tool_choice: bool = True

    def __post_init__(self) -> None:
        require_one_of("dtype", self.dtype, "auto", "bfloat16", "float16", "float32")
        require_one_of("load-format", self.load_format, "auto", "safetensors", "dummy")
        require(
            self.max_model_len is None or self.max_model_len > 1,
            "max-model-len",
            self.max_model_len,
            "it must be at least 2",
        )
        require(
            self.generation_config in ("auto", "none", "vllm"),
            "generation-config",
            self.generation_config,
            "use auto or none",
        )
        for name in self.served_model_name:
            require(bool(name.strip()), "served-model-name", name, "a name must not be empty")
            require_text("served-model-name", name)
        require(-(2**63) <= self.seed < 2**63, "seed", self.seed, "it must be of 64 bits")


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """KV memory.

    Attributes:
        block_size: Tokens per block; None takes what suits the device.
        kv_cache_memory_bytes: Size of the pool; None derives it from the device.
        num_gpu_blocks_override: Exact number of blocks, whatever the device.
        gpu_memory_utilization: Share of a device's memory that a rank takes at most (CUDA), with
            weights, what steps need beside them, graphs and KV.
        events: Whether and where it publishes what it holds.
    """

    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    events: KVEventsConfig = KVEventsConfig()

    def __post_init__(self) -> None:
        require(
            self.block_size in (None, 8, 16, 32, 64, 128),
            "block-size",
            self.block_size,
            "use 8, 16, 32, 64 or 128",
        )
        require(
            0 < self.gpu_memory_utilization <= 1,
            "gpu-memory-utilization",
            self.gpu_memory_utilization,
            "it must be above 0 and at most 1",
        )
        require_positive("num-gpu-blocks-override", self.num_gpu_blocks_override)
        require_positive("kv-cache-memory-bytes", self.kv_cache_memory_bytes)
        self.events.require_prefix_caching(is_on=self.enable_prefix_caching)


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How steps are filled.

    Attributes:
        max_num_seqs: Requests in one step at most.
        max_num_batched_tokens: Token budget of one step.
        enable_chunked_prefill: Whether a prompt may be spread over steps.
        long_prefill_token_threshold: Tokens of one prompt in a step, at most, so that shorter
            prompts share the step with it instead of waiting for its end; 0 sets no limit.
        max_waiting: Requests that may wait before new ones are refused with 429.
        max_waiting_tokens: Prompt tokens that may wait, of requests without a token yet; a
            request that finds others waiting and would exceed it is refused with 429.
        max_request_tokens: Tokens of prompt and output that one HTTP request may ask for, over
            all its choices; more is refused with 400. Never less than `max_num_seqs` requests
            of the maximum context length.
        recompute_tokens_per_s: Prompt tokens per second that may be computed here because
            another engine, or the transfer from it, failed; 0 allows none.
    """

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    max_waiting: int = 4096
    max_waiting_tokens: int = 1 << 24
    max_request_tokens: int = 1 << 20
    recompute_tokens_per_s: int = 8192

    def __post_init__(self) -> None:
        require_not_negative("recompute-tokens-per-second", self.recompute_tokens_per_s)
        require_not_negative("max-waiting", self.max_waiting)
        require_not_negative("max-waiting-tokens", self.max_waiting_tokens)
        require_not_negative("max-request-tokens", self.max_request_tokens)
        for flag, number, most in (
            ("max-num-seqs", self.max_num_seqs, _MAX_ROWS),
            ("max-num-batched-tokens", self.max_num_batched_tokens, _MAX_STEP_TOKENS),
        ):
            require(0 < number <= most, flag, number, f"use 1 to {most}")
        require(
            self.max_num_batched_tokens >= self.max_num_seqs or self.enable_chunked_prefill,
            "max-num-batched-tokens",
            self.max_num_batched_tokens,
            f"it must be at least --max-num-seqs ({self.max_num_seqs})",
        )
        require_not_negative("long-prefill-token-threshold", self.long_prefill_token_threshold)
        require(
            self.long_prefill_token_threshold == 0 or self.enable_chunked_prefill,
            "long-prefill-token-threshold",
            self.long_prefill_token_threshold,
            "it spreads a prompt over several steps: leave --enable-chunked-prefill on, or use 0",
        )


class EplbConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Balancing the load of experts over ranks while serving (EPLB).

    Attributes:
        num_redundant_experts: Further copies per layer, of the most used experts.
        window_size: Steps whose load is counted.
        step_interval: Steps from one rebalancing to the next.
    """

    num_redundant_experts: int = 0
    window_size: int = 1000
    step_interval: int = 3000

    def __post_init__(self) -> None:
        require_not_negative("eplb-config.num-redundant-experts", self.num_redundant_experts)
        require_positive("eplb-config.window-size", self.window_size)
        require_positive("eplb-config.step-interval", self.step_interval)


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How many ranks an engine spans, and what runs them.

    Attributes:
        tensor_parallel_size: Ranks that share each matrix.
        pipeline_parallel_size: Stages that share the layers.
        pipeline_layers: Layers of each stage; empty splits them evenly.
        data_parallel_size: Engine cores behind one API server, each with its own requests.
        enable_expert_parallel: Place whole experts on ranks instead of slicing each.
        all2all_backend: How tokens reach experts: all_gather (every rank sees every token) or
            all_to_all (a token goes to its experts' ranks alone). The ranks of one engine core
            have all of its tokens, and send none.
        expert_placement_strategy: linear (runs of experts) or round_robin.
        enable_sequence_parallel: Norms and residuals hold a share of the tokens per TP rank, in
            steps of many tokens.
        enable_eplb: Rebalance experts by their load while serving.
        distributed_executor_backend: inline (worker inside the engine core's process),
            multiprocess (ranks in processes of their own, behind shared-memory rings), ray
            (ranks as actors, over several nodes), or auto: inline for one rank, else
            multiprocess.
        num_threads: CPU threads for one rank's compute; None shares the cores it may use
            among the ranks of this machine.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pipeline_layers: tuple[int, ...] = ()
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    all2all_backend: str = "all_gather"
    expert_placement_strategy: str = "linear"
    enable_sequence_parallel: bool = False
    enable_eplb: bool = False
    eplb: EplbConfig = EplbConfig()
    distributed_executor_backend: str = "auto"
    num_threads: int | None = None

    @property
    def num_ranks(self) -> int:
        """Ranks of one engine core."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def executor_backend(self) -> str:
        """The backend, with auto resolved."""
        if self.distributed_executor_backend == "auto":
            return "inline" if self.num_ranks == 1 else "multiprocess"
        return self.distributed_executor_backend

    def __post_init__(self) -> None:
        for flag, number in (
            ("tensor-parallel-size", self.tensor_parallel_size),
            ("pipeline-parallel-size", self.pipeline_parallel_size),
            ("data-parallel-size", self.data_parallel_size),
            ("num-threads", self.num_threads),
        ):
            is_possible = number is None or 0 < number <= _MAX_RANKS
            require(is_possible, flag, number, f"use 1 to {_MAX_RANKS}")
        stages = self.pipeline_layers
        require(
            not stages or (len(stages) == self.pipeline_parallel_size and min(stages) > 0),
            "pipeline-layers",
            list(stages),
            f"give one positive number for each of {self.pipeline_parallel_size} stages",
        )
        require_one_of("all2all-backend", self.all2all_backend, "all_gather", "all_to_all")
        require(
            self.enable_expert_parallel or self.all2all_backend == "all_gather",
            "all2all-backend",
            self.all2all_backend,
            "it needs --enable-expert-parallel",
        )
        require(
            self.enable_expert_parallel or self.expert_placement_strategy == "linear",
            "expert-placement-strategy",
            self.expert_placement_strategy,
            "it needs --enable-expert-parallel",
        )
        require_one_of(
            "expert-placement-strategy", self.expert_placement_strategy, "linear", "round_robin"
        )
        require(
            not self.enable_sequence_parallel or self.tensor_parallel_size > 1,
            "enable-sequence-parallel",
            self.enable_sequence_parallel,
            "it needs --tensor-parallel-size above 1",
        )
        require(
            not self.enable_eplb or self.enable_expert_parallel,
            "enable-eplb",
            self.enable_eplb,
            "it needs --enable-expert-parallel",
        )
        require(
            not self.eplb.num_redundant_experts or self.enable_eplb,
            "eplb-config.num-redundant-experts",
            self.eplb.num_redundant_experts,
            "it needs --enable-eplb",
        )
        backend = self.distributed_executor_backend
        flag = "distributed-executor-backend"
        require_one_of(flag, backend, "auto", "inline", "multiprocess", "ray")
        require(
            backend != "inline" or self.num_ranks == 1,
            flag,
            backend,
            f"{self.num_ranks} ranks need their own processes: use multiprocess or ray",
        )


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How KV leaves and enters this engine (`--kv-transfer-config`).

    Attributes:
        kv_connector: Names from `config.connectors`, with commas between several; a store whose
            `url` is set is one of them without being named.
        host: Address the side channel binds and announces.
        port: Side channel port of rank 0; rank i takes the i-th after it. 0 takes free ones.
        secret: The deployment's shared secret; handoffs and side channel frames are
            signed with it. Engines with different secrets refuse one another.
        lease_s: A lease ends so many seconds after its last heartbeat.
        handshake_timeout_s: For a peer's first answer.
        transfer_timeout_s: From the first posted byte to the confirmation.
        quarantine_s: How long blocks that a lost transfer may still write stay out of use
            before it is stopped for certain, which ends others, too; at once if nothing else is
            in flight.
        settings: Settings of single connectors, by `NAME.FIELD`; each checks its own.
    """

    kv_connector: str = "null"
    host: str = "127.0.0.1"
    port: int = 0
    secret: str = ""
    lease_s: float = 30.0
    handshake_timeout_s: float = 5.0
    transfer_timeout_s: float = 20.0
    quarantine_s: float = 30.0
    settings: dict[str, Any] = {}

    def __post_init__(self) -> None:
        require_port(self.port, "kv-transfer-config.port")
        for flag, value in (
            ("handshake_timeout_s", self.handshake_timeout_s),
            ("transfer_timeout_s", self.transfer_timeout_s),
            ("quarantine_s", self.quarantine_s),
        ):
            require(value > 0, f"kv-transfer-config.{flag}", value, "it must be above 0 seconds")
        require(
            MIN_LEASE_S <= self.lease_s <= MAX_LEASE_S,
            "kv-transfer-config.lease_s",
            self.lease_s,
            f"it must be from {MIN_LEASE_S} to {MAX_LEASE_S:g} seconds",
        )
        self.require_secret("kv-transfer-config.host", self.host)

    def require_secret(self, flag: str, host: str) -> None:
        """Refuse to be reached from elsewhere by whoever can write a handoff.

        Raises:
            ConfigError: KV is handed over, there is no secret, and `host` is no loopback one.
        """
        require(
            bool(self.secret) or self.kv_connector == "null" or is_loopback(host),
            flag,
            host,
            "there is no secret: give every engine and proxy the same one as PDSERVE_SECRET, or "
            "use a loopback host",
        )


class LivenessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """When a part of an engine that does not go on is given up. The engine ends with it.

    Attributes:
        heartbeat_timeout_s: For an engine core or a rank that is stopped (SIGSTOP), or a core
            that does nothing at all and answers nothing.
        step_timeout_s: For a step that does not come back, and a core that is busy and answers
            nothing. As long as ranks wait for one another in a collective.
    """

    heartbeat_timeout_s: float = 5.0
    step_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        require_positive("heartbeat-timeout", self.heartbeat_timeout_s)
        require_positive("step-timeout", self.step_timeout_s)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine core and its workers need.

    Attributes:
        engine_id: Stable name; empty derives one from role, host and port.
        device, numerics: Where it computes (auto, cpu or cuda), and how it may round.
    """

    model: ModelConfig
    role: Role = Role.BOTH
    engine_id: str = ""
    device: str = "auto"
    numerics: NumericsMode = NumericsMode.EXACT
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    transfer: TransferConfig = TransferConfig()
    liveness: LivenessConfig = LivenessConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()

    def __post_init__(self) -> None:
        require_one_of("device", self.device, "auto", "cpu", "cuda")
        require_text("engine-id", self.engine_id)
        self.speculative.require_stages(self.parallel.pipeline_parallel_size)
        self.cache.events.require_secret(self.transfer.secret, self.transfer.host)
