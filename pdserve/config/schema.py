"""Every setting of an engine and of the proxy: one frozen struct per subsystem.

Names carry their units. A struct refuses impossible values on construction, with a
`ConfigError` that names the flag, the value and the remedy. Nothing here knows where a
value came from (`load` does).
"""

from __future__ import annotations

import enum
import ipaddress
from typing import Any

import msgspec

from pdserve.errors import ConfigError
from pdserve.wire.transfer import MAX_LEASE_S, MIN_LEASE_S


class Role(enum.Enum):
    """What an engine is for. It sets defaults; every engine can prefill and decode."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class KVTransfer(enum.Enum):
    """How KV gets from a prefill to a decode engine.

    AUTO: written by the prefill engine where both engines can and the pair's recent pushes
    arrived, else read by the decode engine. PUSH: the same whatever became of former pushes. PULL:
    always read.
    """

    AUTO = "auto"
    PUSH = "push"
    PULL = "pull"


class SchedulingPolicy(enum.Enum):
    """Which waiting request comes first."""

    FCFS = "fcfs"
    PRIORITY = "priority"


def _require(condition: bool, flag: str, value: object, remedy: str) -> None:
    if not condition:
        raise ConfigError(f"--{flag} is {value!r}: {remedy}", param=flag)


def _require_port(port: int, flag: str = "port") -> None:
    _require(0 <= port <= 65535, flag, port, "use 1 to 65535, or 0 for a free one")


def _require_url(url: str, flag: str) -> None:
    _require(
        url.startswith(("http://", "https://")), flag, url, "write it as http://127.0.0.1:8100"
    )


def _require_not_negative(flag: str, value: float) -> None:
    _require(value >= 0, flag, value, "it must not be negative")


def _require_keys(flag: str, keys: tuple[str, ...]) -> None:
    """An empty key, of a variable that was not set, is one that every client could send."""
    for key in keys:
        _require(bool(key.strip()), flag, key, "give a key, or leave the flag out")


_POSITIVE = "it must be positive"


def is_loopback(host: str) -> bool:
    """Whether an address, or the name localhost, is reached from this host alone."""
    try:
        return (
            host == "localhost" or ipaddress.ip_address(host.split("%", maxsplit=1)[0]).is_loopback
        )
    except ValueError:
        return False


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

    def __post_init__(self) -> None:
        _require(
            self.dtype in ("auto", "bfloat16", "float16", "float32"),
            "dtype",
            self.dtype,
            "use auto, bfloat16, float16 or float32",
        )
        _require(
            self.load_format in ("auto", "safetensors", "dummy"),
            "load-format",
            self.load_format,
            "use auto, safetensors or dummy",
        )
        _require(
            self.max_model_len is None or self.max_model_len > 1,
            "max-model-len",
            self.max_model_len,
            "it must be at least 2",
        )
        _require(
            self.generation_config in ("auto", "none", "vllm"),
            "generation-config",
            self.generation_config,
            "use auto or none",
        )
        for name in self.served_model_name:
            _require(bool(name.strip()), "served-model-name", name, "a name must not be empty")
        _require(-(2**63) <= self.seed < 2**63, "seed", self.seed, "it must be of 64 bits")


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """KV memory.

    Attributes:
        block_size: Tokens per block.
        kv_cache_memory_bytes: Size of the pool; None derives it from the device.
        num_gpu_blocks_override: Exact number of blocks, whatever the device.
        gpu_memory_utilization: Share of the device's memory for weights and KV (CUDA).
    """

    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        _require(
            self.block_size in (8, 16, 32, 64, 128),
            "block-size",
            self.block_size,
            "use 8, 16, 32, 64 or 128",
        )
        _require(
            0 < self.gpu_memory_utilization <= 1,
            "gpu-memory-utilization",
            self.gpu_memory_utilization,
            "it must be above 0 and at most 1",
        )
        blocks = self.num_gpu_blocks_override
        _require(
            blocks is None or blocks > 0, "num-gpu-blocks-override", blocks, "it must be positive"
        )
        size = self.kv_cache_memory_bytes
        _require(size is None or size > 0, "kv-cache-memory-bytes", size, _POSITIVE)


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
        _require_not_negative("recompute-tokens-per-second", self.recompute_tokens_per_s)
        _require_not_negative("max-waiting", self.max_waiting)
        _require_not_negative("max-waiting-tokens", self.max_waiting_tokens)
        _require_not_negative("max-request-tokens", self.max_request_tokens)
        _require(self.max_num_seqs > 0, "max-num-seqs", self.max_num_seqs, "it must be positive")
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs or self.enable_chunked_prefill,
            "max-num-batched-tokens",
            self.max_num_batched_tokens,
            f"it must be at least --max-num-seqs ({self.max_num_seqs})",
        )
        _require(
            self.max_num_batched_tokens > 0,
            "max-num-batched-tokens",
            self.max_num_batched_tokens,
            "it must be positive",
        )
        _require_not_negative("long-prefill-token-threshold", self.long_prefill_token_threshold)
        _require(
            self.long_prefill_token_threshold == 0 or self.enable_chunked_prefill,
            "long-prefill-token-threshold",
            self.long_prefill_token_threshold,
            "it spreads a prompt over steps: leave --enable-chunked-prefill on, or give 0",
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
        _require_not_negative("eplb-config.num-redundant-experts", self.num_redundant_experts)
        for flag, number in (
            ("eplb-config.window-size", self.window_size),
            ("eplb-config.step-interval", self.step_interval),
        ):
            _require(number > 0, flag, number, _POSITIVE)


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
        ):
            _require(number > 0, flag, number, _POSITIVE)
        stages = self.pipeline_layers
        _require(
            not stages or (len(stages) == self.pipeline_parallel_size and min(stages) > 0),
            "pipeline-layers",
            list(stages),
            f"give one positive number for each of {self.pipeline_parallel_size} stages",
        )
        _require(
            self.all2all_backend in ("all_gather", "all_to_all"),
            "all2all-backend",
            self.all2all_backend,
            "use all_gather or all_to_all",
        )
        _require(
            self.enable_expert_parallel or self.all2all_backend == "all_gather",
            "all2all-backend",
            self.all2all_backend,
            "it needs --enable-expert-parallel",
        )
        _require(
            self.enable_expert_parallel or self.expert_placement_strategy == "linear",
            "expert-placement-strategy",
            self.expert_placement_strategy,
            "it needs --enable-expert-parallel",
        )
        _require(
            self.expert_placement_strategy in ("linear", "round_robin"),
            "expert-placement-strategy",
            self.expert_placement_strategy,
            "use linear or round_robin",
        )
        _require(
            not self.enable_sequence_parallel or self.tensor_parallel_size > 1,
            "enable-sequence-parallel",
            self.enable_sequence_parallel,
            "it needs --tensor-parallel-size above 1",
        )
        _require(
            not self.enable_eplb or self.enable_expert_parallel,
            "enable-eplb",
            self.enable_eplb,
            "it needs --enable-expert-parallel",
        )
        _require(
            not self.eplb.num_redundant_experts or self.enable_eplb,
            "eplb-config.num-redundant-experts",
            self.eplb.num_redundant_experts,
            "it needs --enable-eplb",
        )
        _require(
            self.distributed_executor_backend in ("auto", "inline", "multiprocess", "ray"),
            "distributed-executor-backend",
            self.distributed_executor_backend,
            "use auto, inline, multiprocess or ray",
        )
        _require(
            self.distributed_executor_backend != "inline" or self.num_ranks == 1,
            "distributed-executor-backend",
            self.distributed_executor_backend,
            f"{self.num_ranks} ranks need processes of their own: use multiprocess or ray",
        )
        _require(
            self.num_threads is None or self.num_threads > 0,
            "num-threads",
            self.num_threads,
            "it must be positive",
        )


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How KV leaves and enters this engine (`--kv-transfer-config`).

    Attributes:
        kv_connector: One of `config.connectors`: null, memory, nixl, or another package's.
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
        settings: What single connectors are told, by `NAME.FIELD`; each checks its own.
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
        _require_port(self.port, "kv-transfer-config.port")
        for flag, value in (
            ("handshake_timeout_s", self.handshake_timeout_s),
            ("transfer_timeout_s", self.transfer_timeout_s),
            ("quarantine_s", self.quarantine_s),
        ):
            _require(value > 0, f"kv-transfer-config.{flag}", value, "it must be above 0 seconds")
        _require(
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
        _require(
            bool(self.secret) or self.kv_connector == "null" or is_loopback(host),
            flag,
            host,
            "and there is no secret: give every engine and proxy the same one as PDSERVE_SECRET, "
            "or use a loopback host",
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
        for flag, seconds in (
            ("heartbeat-timeout", self.heartbeat_timeout_s),
            ("step-timeout", self.step_timeout_s),
        ):
            _require(seconds > 0, flag, seconds, _POSITIVE)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine core and its workers need.

    Attributes:
        engine_id: Stable name; empty derives one from role, host and port.
        device: auto, cpu or cuda.
    """

    model: ModelConfig
    role: Role = Role.BOTH
    engine_id: str = ""
    device: str = "auto"
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    transfer: TransferConfig = TransferConfig()
    liveness: LivenessConfig = LivenessConfig()

    def __post_init__(self) -> None:
        _require(
            self.device in ("auto", "cpu", "cuda"), "device", self.device, "use auto, cpu or cuda"
        )


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a client may take of an HTTP server: bytes and time.

    Attributes:
        max_body_bytes: Of one request.
        body_memory_bytes: For the bodies of all requests that run, with the copies that are made
            of them; None is 256 MiB, or eight of the largest bodies if that is more.
        header_timeout_s: From the first byte of a request's headers to their last, and from a
            new connection to its first request.
        body_timeout_s: How long a body may go without progress.
    """

    max_body_bytes: int = 16 << 20
    body_memory_bytes: int | None = None
    header_timeout_s: float = 30.0
    body_timeout_s: float = 30.0

    @property
    def body_memory(self) -> int:
        """Bytes for all bodies together."""
        if self.body_memory_bytes is not None:
            return self.body_memory_bytes
        return max(256 << 20, 8 * self.max_body_bytes)

    def __post_init__(self) -> None:
        for flag, number in (
            ("max-body-bytes", self.max_body_bytes),
            ("header-timeout", self.header_timeout_s),
            ("body-timeout", self.body_timeout_s),
        ):
            _require(number > 0, flag, number, _POSITIVE)
        _require(
            self.body_memory >= 6 * self.max_body_bytes,
            "body-memory-bytes",
            self.body_memory,
            "it must be at least six times --max-body-bytes: a body is held with two copies, and "
            "leaves as much room for others",
        )


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP side of one engine.

    Attributes:
        port: 0 takes a free one.
        proxy_urls: Proxies to register with, and to leave on shutdown.
        advertise_url: What to register as; empty means http://host:port.
        shutdown_timeout_s: How long running requests may go on after SIGTERM.
        operator_keys: Open what only operators may ask; without any only this host may.
        limits: What its clients may take.
        accept_former_signatures: Whether engines and proxies of release 0.1 are believed, whose
            words may be sent again by whoever has heard them.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    operator_keys: tuple[str, ...] = ()
    proxy_urls: tuple[str, ...] = ()
    advertise_url: str = ""
    shutdown_timeout_s: float = 30.0
    limits: HttpLimits = HttpLimits()
    accept_former_signatures: bool = False

    def __post_init__(self) -> None:
        _require_port(self.port)
        for url in self.proxy_urls:
            _require_url(url, "proxy")
        if self.advertise_url:
            _require_url(self.advertise_url, "advertise-url")
        _require_keys("api-key", self.api_keys)
        _require_keys("operator-key", self.operator_keys)
        _require_not_negative("shutdown-timeout", self.shutdown_timeout_s)


class ProxyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The routing proxy. It holds no state that a restart would miss.

    Attributes:
        prefill, decode: Base URLs of engines known from the start.
        prefill_policy, decode_policy: Names of routing policies: see `policies`.
        kv_mode: Who moves the KV. A request of several prompts or choices is always pulled.
        max_concurrent_requests: Requests in flight at most; further ones queue.
        queue_size: Requests that may queue; further ones get 429.
        request_timeout_s: One absolute limit for a request, from arrival.
        retry_max_retries: Further engines to try before the first byte.
        cb_failure_threshold: Failures in a row that open an engine's breaker.
        cb_timeout_s: How long it stays open before one request may try again.
        secret: The deployment's secret; engines that register must know it.
        operator_keys: Open what only operators may ask; without any only this host may.
        limits: What its clients may take.
        accept_former_signatures: Whether engines and proxies of release 0.1 are believed, whose
            words may be sent again by whoever has heard them.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    prefill_policy: str = "least_loaded"
    decode_policy: str = "least_loaded"
    kv_mode: KVTransfer = KVTransfer.AUTO
    api_keys: tuple[str, ...] = ()
    operator_keys: tuple[str, ...] = ()
    secret: str = ""
    max_concurrent_requests: int = 1024
    queue_size: int = 4096
    queue_timeout_s: float = 60.0
    request_timeout_s: float = 1800.0
    retry_max_retries: int = 3
    cb_failure_threshold: int = 3
    cb_timeout_s: float = 5.0
    health_check_interval_s: float = 1.0
    health_check_timeout_s: float = 2.0
    shutdown_timeout_s: float = 30.0
    limits: HttpLimits = HttpLimits()
    accept_former_signatures: bool = False

    def __post_init__(self) -> None:
        _require_port(self.port)
        _require_keys("api-key", self.api_keys)
        _require_keys("operator-key", self.operator_keys)
        for flag, urls in (("prefill", self.prefill), ("decode", self.decode)):
            for url in urls:
                _require_url(url, flag)
        for flag, number in (
            ("max-concurrent-requests", self.max_concurrent_requests),
            ("queue-timeout-secs", self.queue_timeout_s),
            ("request-timeout-secs", self.request_timeout_s),
            ("cb-failure-threshold", self.cb_failure_threshold),
            ("health-check-interval-secs", self.health_check_interval_s),
            ("health-check-timeout-secs", self.health_check_timeout_s),
        ):
            _require(number > 0, flag, number, _POSITIVE)
        for flag, number in (
            ("queue-size", self.queue_size),
            ("retry-max-retries", self.retry_max_retries),
            ("cb-timeout-duration-secs", self.cb_timeout_s),
            ("shutdown-timeout", self.shutdown_timeout_s),
        ):
            _require_not_negative(flag, number)
