"""Every flag of every command, tied to the field of the schema it fills.

A flag exists only if the schema has its field. Knows no command line and no file format
(`load` does) and runs nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Final

from pdserve.config.bench import RESULT_SETTINGS, TARGET_SETTINGS, TRAFFIC_SETTINGS
from pdserve.config.boxed import BOXED
from pdserve.config.compare import COMPARE_SETTINGS, PLOT_SETTINGS
from pdserve.config.connectors import connector_settings
from pdserve.config.datasets import DATASET_SETTINGS, DatasetName
from pdserve.config.doctor import DOCTOR_SETTINGS
from pdserve.config.epp import EPP_FLAGS
from pdserve.config.http import ProxyConfig, ServerConfig
from pdserve.config.kv_events_reader import KV_EVENTS_READER_SETTINGS
from pdserve.config.load import Table
from pdserve.config.log import LOG_FORM_SETTINGS, LOG_SETTINGS
from pdserve.config.policies import POLICIES, PREDICTED, SHADOW, SPLIT_POLICIES
from pdserve.config.schema import EngineConfig, Role
from pdserve.config.setting import Setting, Shorthand, canonical, declare, parse_object
from pdserve.config.tiers import KV_SERVER_SETTINGS
from pdserve.config.trace import TRACE_SETTINGS
from pdserve.config.up import ROLES_OF_UP, UP_SETTINGS
from pdserve.config.vllm import translate
from pdserve.config.vllm.answers import absent_bench_flags, absent_flags
from pdserve.config.vllm.flags import SHORT as SHORT_FORMS
from pdserve.config.vllm_flags import VLLM_FLAGS_SETTINGS

# fmt: off
_ENGINE: Final = (
    *declare(
        "engine",
        EngineConfig,
        "model",
        (
            ("model", "model.model", "MODEL", "a directory in Hugging Face format, a name of the hub, or boxed"),
            ("served-model-name", "model.served_model_name", "NAME", "names the API answers to; the first is reported"),
            ("tokenizer", "model.tokenizer", "DIR", "directory of the tokenizer, if not the model's"),
            ("dtype", "model.dtype", "auto|bfloat16|float16|float32", "type of weights and KV; auto is the checkpoint's"),
            ("max-model-len", "model.max_model_len", "N", "tokens of prompt and output together; auto is the model's"),
            ("load-format", "model.load_format", "auto|safetensors|dummy", "dummy makes random weights from --seed"),
            ("seed", "model.seed", "N", "of dummy weights and of requests without one"),
            ("generation-config", "model.generation_config", "auto|none", "defaults of sampling: the model's generation_config.json, or none"),
            ("chat-template", "model.chat_template", "FILE", "a Jinja file, if not the model's"),
            ("enforce-eager", "model.enforce_eager", "", "launch every step (CUDA: decode steps are replayed as graphs without it)"),
            ("tool-call-parser", "model.tool_call_parser", "NAME", "how the model writes tool calls: hermes, llama3_json, mistral and so on, none, or auto, which reads the chat template"),
            ("enable-auto-tool-choice", "model.enable_auto_tool_choice", "", "models choose tools by themselves (tool_choice auto)"),
            ("reasoning-parser", "model.reasoning_parser", "NAME", "how the model marks reasoning: qwen3, deepseek_r1, mistral and so on, none, or auto"),
        ),
    ),
    *declare(
        "engine",
        EngineConfig,
        "engine",
        (
            ("device", "device", "auto|cpu|cuda", "where the model runs"),
            ("numerics", "numerics", "exact|fast", "whether tokens must not depend on the batch, or may where that is faster (CUDA)"),
            ("engine-id", "engine_id", "NAME", "stable name; empty derives one from role, host and port"),
            ("heartbeat-timeout", "liveness.heartbeat_timeout_s", "SECONDS", "an engine core or rank that is stopped, or a core that sleeps and does not answer, is given up"),
            ("step-timeout", "liveness.step_timeout_s", "SECONDS", "a step that does not come back, or a busy core that does not answer, is given up"),
        ),
    ),
    *declare(
        "engine",
        EngineConfig,
        "parallelism",
        (
            ("tensor-parallel-size", "parallel.tensor_parallel_size", "N", "ranks that share each matrix"),
            ("pipeline-parallel-size", "parallel.pipeline_parallel_size", "N", "stages that share the layers"),
            ("pipeline-layers", "parallel.pipeline_layers", "N", "layers of each stage, as 10,11,11; empty splits them evenly"),
            ("data-parallel-size", "parallel.data_parallel_size", "N", "engine cores behind this server"),
            ("enable-expert-parallel", "parallel.enable_expert_parallel", "", "place whole experts on ranks instead of slicing each"),
            ("all2all-backend", "parallel.all2all_backend", "all_gather|all_to_all", "how tokens reach experts on other ranks"),
            ("expert-placement-strategy", "parallel.expert_placement_strategy", "linear|round_robin", "which experts lie on which rank"),
            ("enable-sequence-parallel", "parallel.enable_sequence_parallel", "", "norms and residuals hold a share of the tokens per TP rank"),
            ("enable-eplb", "parallel.enable_eplb", "", "rebalance experts by their load while serving"),
            ("eplb-config.num-redundant-experts", "parallel.eplb.num_redundant_experts", "N", "further copies per layer, of the most used experts"),
            ("eplb-config.window-size", "parallel.eplb.window_size", "STEPS", "steps whose load is counted"),
            ("eplb-config.step-interval", "parallel.eplb.step_interval", "STEPS", "steps from one rebalancing to the next"),
            ("distributed-executor-backend", "parallel.distributed_executor_backend", "auto|inline|multiprocess|ray", "ranks in the engine core's process, in processes of their own, or as Ray actors"),
            ("num-threads", "parallel.num_threads", "N", "CPU threads of a rank; auto shares the cores among the ranks here"),
        ),
    ),
    *declare(
        "engine",
        EngineConfig,
        "KV cache",
        (
            ("block-size", "cache.block_size", "N", "tokens per KV block; auto is 64 on CUDA, 16 on a CPU"),
            ("kv-cache-memory-bytes", "cache.kv_cache_memory_bytes", "BYTES", "size of the KV pool, as 512M or 2GiB; auto derives it from the device"),
            ("num-gpu-blocks-override", "cache.num_gpu_blocks_override", "N", "exact number of KV blocks, whatever the device"),
            ("gpu-memory-utilization", "cache.gpu_memory_utilization", "SHARE", "of the device's memory, for weights, steps, graphs and KV together (CUDA)"),
            ("enable-prefix-caching", "cache.enable_prefix_caching", "", "reuse the KV of equal prefixes"),
        ),
    ),
    *declare(
        "engine",
        EngineConfig,
        "scheduler",
        (
            ("max-num-seqs", "scheduler.max_num_seqs", "N", "requests in one step at most"),
            ("max-num-batched-tokens", "scheduler.max_num_batched_tokens", "N", "token budget of one step"),
            ("enable-chunked-prefill", "scheduler.enable_chunked_prefill", "", "spread a prompt over steps"),
            ("long-prefill-token-threshold", "scheduler.long_prefill_token_threshold", "N", "tokens of one prompt in a step at most, so that shorter ones share it; 0 is no limit"),
            ("scheduling-policy", "scheduler.policy", "fcfs|priority", "which waiting request comes first"),
            ("max-waiting", "scheduler.max_waiting", "N", "requests that may wait before new ones get 429"),
            ("max-waiting-tokens", "scheduler.max_waiting_tokens", "N", "prompt tokens that may wait before new requests get 429"),
            ("max-request-tokens", "scheduler.max_request_tokens", "N", "tokens that one request may ask for over all choices; never below --max-num-seqs whole contexts"),
            ("recompute-tokens-per-second", "scheduler.recompute_tokens_per_s", "N", "prompt tokens computed here per second after failed transfers; 0 allows none"),
        ),
    ),
    *declare(
        "engine",
        EngineConfig,
        "speculation",
        (
            ("speculative-config.method", "speculative.method", "ngram|suffix|draft_model|medusa|eagle|eagle3|mtp", "draft what followed the last tokens where they stood before, with suffix also in former answers of the same salt, or what a smaller model, heads or a layer of the checkpoint guesses; empty drafts nothing"),
            ("speculative-config.model", "speculative.model", "DIR", "of draft_model, a smaller model with the same tokenizer; of eagle and eagle3, a head; of medusa, heads"),
            ("speculative-config.num-speculative-tokens", "speculative.num_speculative_tokens", "N", "tokens of a draft at most; fewer where they do not pay"),
            ("speculative-config.prompt-lookup-max", "speculative.prompt_lookup_max", "N", "last tokens that are looked up, at most"),
            ("speculative-config.prompt-lookup-min", "speculative.prompt_lookup_min", "N", "tokens that must be alike before a draft"),
            ("speculative-config.suffix-decoding-max-tree-depth", "speculative.suffix_decoding_max_tree_depth", "N", "of suffix: last tokens that are looked up, at most"),
            ("speculative-config.suffix-decoding-max-cached-requests", "speculative.suffix_decoding_max_cached_requests", "N", "former answers of a salt that are kept, at most"),
            ("speculative-config.suffix-decoding-max-spec-factor", "speculative.suffix_decoding_max_spec_factor", "X", "tokens of a draft for each that is alike, at most"),
            ("speculative-config.suffix-decoding-min-token-prob", "speculative.suffix_decoding_min_token_prob", "SHARE", "how often a draft must have followed"),
        ),
    ),
    *declare(
        "engine",
        EngineConfig,
        "KV transfer",
        (
            ("secret", "transfer.secret", "TEXT", "the deployment's shared secret (rather as PDSERVE_SECRET)"),
            ("kv-transfer-config.kv-connector", "transfer.kv_connector", "NAME", "null, memory, nixl, ucx, or another package's; several with commas"),
            ("kv-transfer-config.host", "transfer.host", "ADDRESS", "the side channel binds and announces it; follows --host unless given"),
            ("kv-transfer-config.port", "transfer.port", "PORT", "of the side channel; 0 takes a free one"),
            ("kv-transfer-config.lease-s", "transfer.lease_s", "SECONDS", "a lease ends so long after its last heartbeat"),
            ("kv-transfer-config.handshake-timeout-s", "transfer.handshake_timeout_s", "SECONDS", "for a peer's first answer"),
            ("kv-transfer-config.transfer-timeout-s", "transfer.transfer_timeout_s", "SECONDS", "from the first posted byte to the confirmation"),
            ("kv-transfer-config.quarantine-s", "transfer.quarantine_s", "SECONDS", "blocks of a lost transfer out of use before it is stopped, with others"),
        ),
    ),
    *declare(
        "engine",
        EngineConfig,
        "KV events",
        (
            ("kv-events-config.enable-kv-cache-events", "cache.events.enable_kv_cache_events", "", "tell routers which prefixes the engine holds"),
            ("kv-events-config.publisher", "cache.events.publisher", "NAME", "zmq; null tells proxies of pdserve alone; auto: in vLLM's shape as well if there is an endpoint"),
            ("kv-events-config.endpoint", "cache.events.endpoint", "ENDPOINT", "of vLLM's shape, unencrypted; one port behind the other for engine cores"),
            ("kv-events-config.replay-endpoint", "cache.events.replay_endpoint", "ENDPOINT", "where its readers ask for what they missed"),
            ("kv-events-config.buffer-steps", "cache.events.buffer_steps", "N", "batches kept for them"),
            ("kv-events-config.hwm", "cache.events.hwm", "N", "batches that wait for one slow reader at most"),
            ("kv-events-config.max-queue-size", "cache.events.max_queue_size", "N", "steps whose events wait to be published at most; more are lost, and counted"),
            ("kv-events-config.topic", "cache.events.topic", "TEXT", "first frame of each batch in vLLM's shape"),
            ("kv-events-config.replay-topic", "cache.events.replay_topic", "", "replayed batches have it, too; off for Dynamo and SGLang's readers"),
            ("kv-events-config.port", "cache.events.port", "PORT", "of the stream for proxies of pdserve, and the next one; 0 takes free ones"),
        ),
    ),
)

_HTTP: Final = (
    ("host", "host", "ADDRESS", "address to bind"),
    ("port", "port", "PORT", "0 takes a free one"),
    ("api-key", "api_keys", "KEY", "keys that clients must send one of (rather as PDSERVE_API_KEY)"),
    ("operator-key", "operator_keys", "KEY", "keys for /debug, /dashboard and /reset_prefix_cache (rather as PDSERVE_OPERATOR_KEY); without any, only this host may ask"),
    ("root-path", "root_path", "PATH", "what a reverse proxy leaves at the front of paths, as /llm"),
    ("ssl-keyfile", "tls.keyfile", "FILE", "key of the certificate, if it is not in --ssl-certfile"),
    ("ssl-certfile", "tls.certfile", "FILE", "certificate to serve HTTPS with, and to show to servers that ask for one"),
    ("ssl-ca-certs", "tls.ca_certs", "FILE", "CAs of clients, engines and proxies, in place of the system's"),
    ("ssl-cert-reqs", "tls.cert_reqs", "N", "certificates of clients: 0 none, 1 checked if one is shown, 2 needed"),
    ("allowed-origins", "cors.allowed_origins", "JSON", "origins whose pages may ask (CORS)"),
    ("allowed-methods", "cors.allowed_methods", "JSON", "methods that they may use"),
    ("allowed-headers", "cors.allowed_headers", "JSON", "headers that they may send"),
    ("allow-credentials", "cors.allow_credentials", "", "browsers may send cookies along"),
    ("drain-delay", "drain_delay_s", "SECONDS", "how long requests are still taken after SIGTERM, while /readyz says 503; Ctrl-C does not wait"),
    ("shutdown-timeout", "shutdown_timeout_s", "SECONDS", "how long running requests may go on then, or after Ctrl-C"),
    ("max-body-bytes", "limits.max_body_bytes", "BYTES", "larger request bodies get 413"),
    ("body-memory-bytes", "limits.body_memory_bytes", "BYTES", "memory for the bodies of all requests; what does not fit gets 429; auto is 256 MiB, or 8 x the largest body"),
    ("header-timeout", "limits.header_timeout_s", "SECONDS", "for the headers of a request to arrive"),
    ("body-timeout", "limits.body_timeout_s", "SECONDS", "how long a request body may go without progress"),
)
_SERVER: Final = declare(
    "server",
    ServerConfig,
    "server",
    (
        *_HTTP,
        ("proxy", "proxy_urls", "URL", "proxies to register with"),
        ("advertise-url", "advertise_url", "URL", "what to register as; empty is http(s)://host:port, of a wildcard the address that leads to the proxy"),
        ("reasoning-field", "reasoning_field", "reasoning|reasoning_content", "what answers call the reasoning; older clients know reasoning_content"),
        ("accept-former-signatures", "accept_former_signatures", "", "believe proxies of release 0.1 that give leases back; while rolling only"),
    ),
)

_POLICIES: Final = "|".join(POLICIES)
_PROXY: Final = (
    *declare(
        "proxy",
        ProxyConfig,
        "engines",
        (
            ("prefill", "prefill", "URL", "prefill engines known from the start; others register themselves"),
            ("decode", "decode", "URL", "decode engines known from the start"),
            ("secret", "secret", "TEXT", "the deployment's shared secret (rather as PDSERVE_SECRET)"),
            ("accept-former-signatures", "accept_former_signatures", "", "believe engines of release 0.1, whose registrations can be replayed; while rolling only"),
        ),
    ),
    *declare(
        "proxy",
        ProxyConfig,
        "routing",
        (
            ("prefill-policy", "prefill_policy", _POLICIES, "how a prefill engine is chosen"),
            ("decode-policy", "decode_policy", _POLICIES, "how a decode engine is chosen"),
            ("split-policy", "split_policy", "|".join((*SPLIT_POLICIES, SHADOW, PREDICTED)), "which requests get a prefill engine for their prompt; others are a decode engine's alone"),
            ("ttft-slo", "ttft_slo_s", "SECONDS", "to the first token, at most, where a request does not say (slo): what predicted aims at; 0 is a second, or three times what the prompt takes alone"),
            ("itl-slo", "itl_slo_s", "SECONDS", "between two tokens, at most: the same"),
            ("model-slo", "model_slo", "MODEL=ttft:MS|itl:MS", "the same for requests that name a model, in milliseconds; several times for several"),
            ("early-rejection", "early_rejection", "", "with predicted: requests that would miss their objectives get 429 as they come"),
            ("tenant-header", "tenant_header", "NAME", "header that says whose share a request is of; only behind a gateway that sets it; empty: its API key"),
            ("tokenizer", "tokenizer", "DIR", "the engines', for policies that look at prefixes; without one they go by a prompt's bytes"),
            ("chat-template", "chat_template", "FILE", "the engines', if it is not in that directory"),
            ("kv-mode", "kv_mode", "auto|push|pull", "who moves the KV: the prefill engine writes it, or the decode engine reads it"),
            ("max-concurrent-requests", "max_concurrent_requests", "N", "requests in flight; further ones queue"),
            ("queue-size", "queue_size", "N", "requests that may queue; further ones get 429"),
            ("queue-timeout-secs", "queue_timeout_s", "SECONDS", "a request that waited so long for a place gets 429, for an engine 503"),
            ("request-timeout-secs", "request_timeout_s", "SECONDS", "one absolute limit for a request, from its arrival"),
            ("retry-max-retries", "retry_max_retries", "N", "further engines to try before the first byte"),
        ),
    ),
    *declare(
        "proxy",
        ProxyConfig,
        "health",
        (
            ("cb-failure-threshold", "cb_failure_threshold", "N", "failures in a row that open an engine's breaker"),
            ("cb-timeout-duration-secs", "cb_timeout_s", "SECONDS", "how long it stays open before one request may try again"),
            ("health-check-interval-secs", "health_check_interval_s", "SECONDS", "between two looks at an engine"),
            ("health-check-timeout-secs", "health_check_timeout_s", "SECONDS", "for its answer"),
        ),
    ),
    *declare("proxy", ProxyConfig, "gateways", EPP_FLAGS),
    *declare("proxy", ProxyConfig, "server", _HTTP),
)

# fmt: on


def _object(flag: str, text: str, group: str) -> Shorthand:
    """A JSON object whose keys may also be given as `--flag.key value`."""

    def expand(raw: object) -> Mapping[str, object]:
        return {f"{flag}.{canonical(key)}": value for key, value in parse_object(raw).items()}

    return Shorthand(flag, expand, text, "JSON", group)


_EPLB: Final = _object("eplb-config", "the settings below as one object", "parallelism")
_SPECULATIVE: Final = _object(
    "speculative-config", "the settings below as one object", "speculation"
)
_EVENTS: Final = _object("kv-events-config", "the settings below as one object", "KV events")
_TRANSFER: Final = Shorthand(
    "kv-transfer-config",
    translate.transfer_config,
    "the settings below as one object",
    "JSON",
    "KV transfer",
)


def _both_policies(raw: object) -> Mapping[str, object]:
    return {"prefill-policy": raw, "decode-policy": raw}


_POLICY: Final = Shorthand("policy", _both_policies, "both policies at once", _POLICIES, "routing")


def _below(role: str, shorthand: Shorthand) -> Shorthand:
    """The same shorthand for the settings under `role`."""

    def expand(raw: object) -> Mapping[str, object]:
        return {f"{role}.{flag}": value for flag, value in shorthand.expand(raw).items()}

    flag = f"{role}.{shorthand.flag}"
    return dataclasses.replace(shorthand, flag=flag, expand=expand, hidden=True)


def _own_settings() -> tuple[Setting, ...]:
    return (*_ENGINE, *itertools.chain(*connector_settings().values()), *_SERVER, *LOG_SETTINGS)


def _engine_settings() -> tuple[Setting, ...]:
    own = translate.with_words(_own_settings())
    return (*own, *translate.settings("engine", engine_flags()))


def engine_flags() -> frozenset[str]:
    """The flags that engines' commands have of their own, and not for vLLM's sake."""
    items: list[Setting | Shorthand] = [
        *_own_settings(),
        _TRANSFER,
        _EVENTS,
        _EPLB,
        _SPECULATIVE,
    ]
    return frozenset(item.flag for item in items)


def _engine_shorthands() -> tuple[Shorthand, ...]:
    own = [
        _object(
            f"kv-transfer-config.{canonical(name)}",
            f"what only {name} is told, as one object",
            "KV transfer",
        )
        for name in connector_settings()
    ]
    renamed = translate.shorthands("engine", engine_flags())
    return (_TRANSFER, *own, _EVENTS, _EPLB, _SPECULATIVE, *renamed)


def engine_table(role: Role) -> Table:
    """The settings of `pdserve prefill`, `decode` and `serve`."""
    port, connector = {
        Role.PREFILL: (8100, "nixl"),
        Role.DECODE: (8200, "nixl"),
        Role.BOTH: (8000, "null"),
    }[role]
    return Table(
        _engine_settings(),
        _engine_shorthands(),
        {"model": "", "port": port, "kv-transfer-config.kv-connector": connector},
        translate.variable_readers(),
        absent_flags(),
    )


def proxy_table() -> Table:
    """The settings of `pdserve proxy`."""
    settings = (*_PROXY, *LOG_SETTINGS)
    readers = translate.variable_readers({setting.flag for setting in settings})
    return Table(settings, (_POLICY,), other_variables=readers)


SHORT: Final = {"output": "-o"} | {flag: f"-{short}" for short, flag in SHORT_FORMS.items()}
"""Flags that have a short name too, on the command line only."""


def up_table() -> Table:
    """The settings of `pdserve up`: its own, the engines', and one command's under its name."""
    own = {setting.flag for setting in UP_SETTINGS}
    own |= {"engine-id", "proxy", "advertise-url"}  # one per engine, chosen by the supervisor
    shared = tuple(s for s in _engine_settings() if s.flag not in own)
    below = {
        role: proxy_table() if role == "proxy" else engine_table(Role.BOTH) for role in ROLES_OF_UP
    }
    per_role = tuple(
        dataclasses.replace(setting, flag=f"{role}.{setting.flag}", default=None, hidden=True)
        for role, table in below.items()
        for setting in table.settings
        if setting.flag not in own | {"model"}  # all roles serve the same one
    )
    return Table(
        (*UP_SETTINGS, *shared, *per_role),
        (
            *_engine_shorthands(),
            *(
                _object(role, f"settings for {whom} only; also --{role}.FLAG VALUE", "deployment")
                for role, whom in ROLES_OF_UP.items()
            ),
            *(_below(role, item) for role, table in below.items() for item in table.shorthands),
        ),
        # Who sends requests to children stops before they do.
        {"model": BOXED, "kv-transfer-config.kv-connector": "nixl", "drain-delay": 0.0},
        translate.variable_readers(),
        absent_flags(),
    )


def kv_server_table() -> Table:
    """The settings of `pdserve kv-server`."""
    return Table((*KV_SERVER_SETTINGS, *LOG_FORM_SETTINGS))


def trace_table() -> Table:
    """The settings of `pdserve trace`."""
    return Table(TRACE_SETTINGS)


def kv_events_table() -> Table:
    """The settings of `pdserve kv-events`."""
    return Table(KV_EVENTS_READER_SETTINGS)


def doctor_table() -> Table:
    """The settings of `pdserve doctor`."""
    return Table(DOCTOR_SETTINGS)


def vllm_flags_table() -> Table:
    """The settings of `pdserve vllm-flags`; its words stand behind it without a flag."""
    return Table(tuple(dataclasses.replace(s, hidden=True) for s in VLLM_FLAGS_SETTINGS))


def bench_serve_table() -> Table:
    """The settings of `pdserve bench serve`."""
    own = (*TARGET_SETTINGS, *DATASET_SETTINGS, *TRAFFIC_SETTINGS, *RESULT_SETTINGS)
    return Table(
        (*own, *translate.bench_settings("endpoint")),
        translate.bench_shorthands("endpoint"),
        absent=absent_bench_flags(),
    )


def bench_compare_table() -> Table:
    """The settings of `pdserve bench compare`: its own, and those of a run that it needs.

    Every side generates as many tokens, the likeliest ones, else they would not have the same work.
    """
    result = tuple(s for s in RESULT_SETTINGS if s.flag in ("goodput", "progress", "allow-invalid"))
    return Table(
        (*COMPARE_SETTINGS, *DATASET_SETTINGS, *TRAFFIC_SETTINGS, *result),
        defaults={
            "num-warmups": 8,
            "ignore-eos": True,
            "temperature": 0.0,
            "dataset-name": DatasetName.PD_INTERFERENCE,
        },
    )


def bench_plot_table() -> Table:
    """The settings of `pdserve bench plot`; its files stand behind it without a flag."""
    return Table(
        tuple(
            dataclasses.replace(setting, hidden=True) if setting.flag == "files" else setting
            for setting in PLOT_SETTINGS
        )
    )
