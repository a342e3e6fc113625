"""Every flag of every command, tied to the field of the schema it fills.

A flag exists only if the schema has its field. Knows no command line and no file format
(`load` does) and runs nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Final

from pdserve.config.bench import RESULT_SETTINGS, TARGET_SETTINGS, TRAFFIC_SETTINGS
from pdserve.config.boxed import BOXED
from pdserve.config.compare import COMPARE_SETTINGS
from pdserve.config.connectors import connector_settings
from pdserve.config.datasets import DATASET_SETTINGS, DatasetName
from pdserve.config.http import ProxyConfig, ServerConfig
from pdserve.config.idle import BENCH_ROWS, COMPARE_ROWS, PROXY_ROWS, engine_rows, up_rows
from pdserve.config.load import Table
from pdserve.config.log import LOG_SETTINGS
from pdserve.config.policies import POLICIES, PREDICTED, SHADOW, SPLIT_POLICIES
from pdserve.config.schema import EngineConfig, Role
from pdserve.config.setting import Setting, Shorthand, canonical, declare, parse_object
from pdserve.config.up import ROLES_OF_UP, UP_SETTINGS
from pdserve.config.vllm import translate
from pdserve.config.vllm.answers import absent_bench_flags, absent_flags
from pdserve.config.vllm.flags import SHORT as SHORT_FORMS

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
            ("dtype", "model.dtype", "auto|bfloat16|float16|float32", "dtype of weights and KV; auto takes the checkpoint's"),
            ("max-model-len", "model.max_model_len", "N", "tokens of prompt and output together; auto is the model's"),
            ("load-format", "model.load_format", "auto|safetensors|dummy", "dummy makes random weights from --seed"),
            ("seed", "model.seed", "N", "random seed for dummy weights, and for requests that set none"),
            ("generation-config", "model.generation_config", "auto|none", "where sampling defaults come from: the model's generation_config.json, or none"),
            ("chat-template", "model.chat_template", "FILE", "a Jinja file, if not the model's"),
            ("enforce-eager", "model.enforce_eager", "", "disable CUDA graphs and launch every step eagerly"),
            ("tool-call-parser", "model.tool_call_parser", "NAME", "tool call format: hermes, llama3_json, mistral, etc.; none disables parsing, auto detects it from the chat template"),
            ("enable-auto-tool-choice", "model.enable_auto_tool_choice", "", "let the model decide when to call tools (tool_choice auto)"),
            ("reasoning-parser", "model.reasoning_parser", "NAME", "reasoning format: qwen3, deepseek_r1, mistral, etc.; none disables parsing, auto detects it from the chat template"),
        ),
    ),
    *declare(
        "engine",
        EngineConfig,
        "engine",
        (
            ("device", "device", "auto|cpu|cuda", "where the model runs"),
            ("numerics", "numerics", "exact|fast", "exact: output does not depend on batch composition; fast: it may, for speed (CUDA)"),
            ("engine-id", "engine_id", "NAME", "stable name; empty derives one from role, host and port"),
            ("heartbeat-timeout", "liveness.heartbeat_timeout_s", "SECONDS", "fail the engine if a stopped core or rank, or an idle core, does not respond for this long"),
            ("step-timeout", "liveness.step_timeout_s", "SECONDS", "fail the engine if a step takes longer than this, or a busy core does not respond for this long"),
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
            ("enable-sequence-parallel", "parallel.enable_sequence_parallel", "", "split the tokens of norms and residuals across TP ranks"),
            ("enable-eplb", "parallel.enable_eplb", "", "rebalance experts by their load while serving"),
            ("eplb-config.num-redundant-experts", "parallel.eplb.num_redundant_experts", "N", "extra copies of the busiest experts in each layer"),
            ("eplb-config.window-size", "parallel.eplb.window_size", "STEPS", "number of recent steps over which expert load is measured"),
            ("eplb-config.step-interval", "parallel.eplb.step_interval", "STEPS", "steps between rebalancings"),
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
            ("gpu-memory-utilization", "cache.gpu_memory_utilization", "SHARE", "fraction of GPU memory to use for weights, activations, graphs and KV together (CUDA)"),
            ("enable-prefix-caching", "cache.enable_prefix_caching", "", "reuse the KV of shared prefixes"),
        ),
    ),
    *declare(
        "engine",
        EngineConfig,
        "scheduler",
        (
            ("max-num-seqs", "scheduler.max_num_seqs", "N", "maximum number of requests per step"),
            ("max-num-batched-tokens", "scheduler.max_num_batched_tokens", "N", "token budget of one step"),
            ("enable-chunked-prefill", "scheduler.enable_chunked_prefill", "", "split long prompts across steps"),
            ("long-prefill-token-threshold", "scheduler.long_prefill_token_threshold", "N", "maximum tokens of one prompt per step, so that shorter prompts can share the step; 0 sets no limit"),
            ("scheduling-policy", "scheduler.policy", "fcfs|priority", "order in which waiting requests are scheduled"),
            ("max-waiting", "scheduler.max_waiting", "N", "requests that may wait before new ones get 429"),
            ("max-waiting-tokens", "scheduler.max_waiting_tokens", "N", "prompt tokens that may wait before new requests get 429"),
            ("max-request-tokens", "scheduler.max_request_tokens", "N", "maximum tokens of one HTTP request, summed over its choices; never less than --max-num-seqs full contexts"),
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
            ("speculative-config.num-speculative-tokens", "speculative.num_speculative_tokens", "N", "maximum tokens per draft; fewer are drafted where they do not pay off"),
            ("speculative-config.prompt-lookup-max", "speculative.prompt_lookup_max", "N", "ngram: maximum number of trailing tokens to match; the minimum if only that is given, else 5"),
            ("speculative-config.prompt-lookup-min", "speculative.prompt_lookup_min", "N", "ngram: minimum number of trailing tokens that must match before drafting; the maximum if only that is given, else 3"),
            ("speculative-config.suffix-decoding-max-tree-depth", "speculative.suffix_decoding_max_tree_depth", "N", "suffix: maximum number of trailing tokens to match"),
            ("speculative-config.suffix-decoding-max-cached-requests", "speculative.suffix_decoding_max_cached_requests", "N", "maximum number of previous answers kept per cache salt"),
            ("speculative-config.suffix-decoding-max-spec-factor", "speculative.suffix_decoding_max_spec_factor", "X", "maximum draft tokens per matched token"),
            ("speculative-config.suffix-decoding-min-token-prob", "speculative.suffix_decoding_min_token_prob", "SHARE", "minimum estimated probability of a drafted token"),
        ),
    ),
    *declare(
        "engine",
        EngineConfig,
        "KV transfer",
        (
            ("secret", "transfer.secret", "TEXT", "the deployment's shared secret (prefer PDSERVE_SECRET)"),
            ("kv-transfer-config.kv-connector", "transfer.kv_connector", "NAME", "null, nixl, ucx, lmcache, or another package's; several with commas"),
            ("kv-transfer-config.host", "transfer.host", "ADDRESS", "address that the side channel binds and advertises; defaults to --host"),
            ("kv-transfer-config.port", "transfer.port", "PORT", "port of the side channel; 0 picks a free port"),
            ("kv-transfer-config.lease-s", "transfer.lease_s", "SECONDS", "time after its last heartbeat at which a lease expires"),
            ("kv-transfer-config.handshake-timeout-s", "transfer.handshake_timeout_s", "SECONDS", "timeout for the first response from a peer"),
            ("kv-transfer-config.transfer-timeout-s", "transfer.transfer_timeout_s", "SECONDS", "timeout of a transfer, from its first posted byte to its confirmation"),
            ("kv-transfer-config.quarantine-s", "transfer.quarantine_s", "SECONDS", "how long to withhold the blocks of a lost transfer before forcibly stopping it, which also ends other transfers"),
        ),
    ),
    *declare(
        "engine",
        EngineConfig,
        "KV events",
        (
            ("kv-events-config.enable-kv-cache-events", "cache.events.enable_kv_cache_events", "", "publish which prefixes the engine holds, for routers"),
            ("kv-events-config.publisher", "cache.events.publisher", "NAME", "zmq; null tells proxies of pdserve alone; auto: in vLLM's shape as well if there is an endpoint"),
            ("kv-events-config.endpoint", "cache.events.endpoint", "ENDPOINT", "endpoint for events in vLLM's format, unencrypted; engine cores use consecutive ports"),
            ("kv-events-config.replay-endpoint", "cache.events.replay_endpoint", "ENDPOINT", "endpoint where subscribers request events that they missed"),
            ("kv-events-config.buffer-steps", "cache.events.buffer_steps", "N", "number of batches kept for replay"),
            ("kv-events-config.hwm", "cache.events.hwm", "N", "maximum number of batches queued for a slow subscriber"),
            ("kv-events-config.max-queue-size", "cache.events.max_queue_size", "N", "maximum number of steps whose events are queued for publishing; further ones are dropped and counted"),
            ("kv-events-config.topic", "cache.events.topic", "TEXT", "topic (first frame) of each batch in vLLM's format"),
            ("kv-events-config.replay-topic", "cache.events.replay_topic", "", "send the topic with replayed batches as well; turn off for Dynamo and SGLang subscribers"),
            ("kv-events-config.port", "cache.events.port", "PORT", "first of two consecutive ports of the event stream for pdserve proxies; 0 picks free ports"),
        ),
    ),
)

_HTTP: Final = (
    ("host", "host", "ADDRESS", "address to bind"),
    ("port", "port", "PORT", "0 takes a free one"),
    ("api-key", "api_keys", "KEY", "API keys; clients must send one of them (prefer PDSERVE_API_KEY)"),
    ("operator-key", "operator_keys", "KEY", "keys for /debug, /dashboard, /drain and /reset_prefix_cache (prefer PDSERVE_OPERATOR_KEY); without any, only this host has access"),
    ("root-path", "root_path", "PATH", "path prefix that a reverse proxy does not strip, such as /llm"),
    ("ssl-keyfile", "tls.keyfile", "FILE", "private key, if it is not in --ssl-certfile"),
    ("ssl-certfile", "tls.certfile", "FILE", "certificate for HTTPS, also used as the client certificate"),
    ("ssl-ca-certs", "tls.ca_certs", "FILE", "CA certificates for verifying clients, engines and proxies, instead of the system's"),
    ("ssl-cert-reqs", "tls.cert_reqs", "N", "client certificates: 0 ignores them, 1 verifies one if presented, 2 requires one"),
    ("allowed-origins", "cors.allowed_origins", "JSON", "allowed CORS origins"),
    ("allowed-methods", "cors.allowed_methods", "JSON", "allowed CORS methods"),
    ("allowed-headers", "cors.allowed_headers", "JSON", "allowed CORS headers"),
    ("allow-credentials", "cors.allow_credentials", "", "allow CORS requests with credentials, such as cookies"),
    ("drain-delay", "drain_delay_s", "SECONDS", "how long to keep accepting requests after SIGTERM, while /readyz returns 503; Ctrl-C skips this"),
    ("shutdown-timeout", "shutdown_timeout_s", "SECONDS", "how long running requests may take to finish after that, or after Ctrl-C"),
    ("max-body-bytes", "limits.max_body_bytes", "BYTES", "larger request bodies get 413"),
    ("body-memory-bytes", "limits.body_memory_bytes", "BYTES", "memory for the bodies of all requests; what does not fit gets 429; auto is 256 MiB, or 8 x the largest body"),
    ("header-timeout", "limits.header_timeout_s", "SECONDS", "timeout for receiving the headers of a request"),
    ("body-timeout", "limits.body_timeout_s", "SECONDS", "how long a request body may make no progress"),
    ("send-timeout", "limits.send_timeout_s", "SECONDS", "how long a client may read nothing of its answer"),
)
_SERVER: Final = declare(
    "server",
    ServerConfig,
    "server",
    (
        *_HTTP,
        ("proxy", "proxy_urls", "URL", "proxies to register with"),
        ("advertise-url", "advertise_url", "URL", "URL to register with proxies; empty uses http(s)://host:port, with the address facing the proxy if the host is a wildcard"),
        ("reasoning-field", "reasoning_field", "reasoning|reasoning_content", "field that holds reasoning in responses; older clients expect reasoning_content"),
        ("accept-former-signatures", "accept_former_signatures", "", "accept lease releases signed by proxies of release 0.1; only during a rolling upgrade"),
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
            ("secret", "secret", "TEXT", "the deployment's shared secret (prefer PDSERVE_SECRET)"),
            ("accept-former-signatures", "accept_former_signatures", "", "accept engines of release 0.1, whose registrations can be replayed; only during a rolling upgrade"),
        ),
    ),
    *declare(
        "proxy",
        ProxyConfig,
        "routing",
        (
            ("prefill-policy", "prefill_policy", _POLICIES, "how a prefill engine is chosen"),
            ("decode-policy", "decode_policy", _POLICIES, "how a decode engine is chosen"),
            ("split-policy", "split_policy", "|".join((*SPLIT_POLICIES, SHADOW, PREDICTED)), "which requests are prefilled on a separate engine; the others run entirely on a decode engine"),
            ("ttft-slo", "ttft_slo_s", "SECONDS", "to the first token, at most, where a request does not say (slo): what predicted aims at; 0 is a second, or three times what the prompt takes alone"),
            ("itl-slo", "itl_slo_s", "SECONDS", "between two tokens, at most: the same"),
            ("model-slo", "model_slo", "MODEL=ttft:MS|itl:MS", "the same for requests that name a model, in milliseconds; several times for several"),
            ("early-rejection", "early_rejection", "", "with predicted: reject requests that would miss their objectives with 429 on arrival"),
            ("tenant-header", "tenant_header", "NAME", "header that identifies the tenant for fair sharing; use only behind a gateway that sets it; empty uses the API key"),
            ("tokenizer", "tokenizer", "DIR", "directory of the engines' tokenizer, or what they have for MODEL; for prefix-aware policies, which without it compare prompts as bytes"),
            ("chat-template", "chat_template", "FILE", "the engines' chat template, if it is not in the --tokenizer directory"),
            ("kv-mode", "kv_mode", "auto|push|pull", "who moves the KV: the prefill engine writes it, or the decode engine reads it"),
            ("max-concurrent-requests", "max_concurrent_requests", "N", "requests in flight; further ones queue"),
            ("queue-size", "queue_size", "N", "requests that may queue; further ones get 429"),
            ("queue-timeout-secs", "queue_timeout_s", "SECONDS", "maximum time in the queue; then a request gets 429 if it lacked a slot, 503 if it lacked an engine"),
            ("request-timeout-secs", "request_timeout_s", "SECONDS", "overall timeout of a request, from its arrival"),
            ("retry-max-retries", "retry_max_retries", "N", "further engines to try before the first byte"),
        ),
    ),
    *declare(
        "proxy",
        ProxyConfig,
        "health",
        (
            ("cb-failure-threshold", "cb_failure_threshold", "N", "consecutive failures that open an engine's circuit breaker"),
            ("cb-timeout-duration-secs", "cb_timeout_s", "SECONDS", "how long a circuit breaker stays open before one request may try again"),
            ("health-check-interval-secs", "health_check_interval_s", "SECONDS", "interval between health checks of an engine"),
            ("health-check-timeout-secs", "health_check_timeout_s", "SECONDS", "timeout of a health check"),
        ),
    ),
    *declare(
        "proxy",
        ProxyConfig,
        "gateways",
        (
            ("epp-port", "epp.port", "PORT", "port for gateways that relay the requests themselves (ext_proc); needs pdserve[epp]"),
            ("epp-ssl-certfile", "epp.certfile", "FILE", "certificate for the gateways"),
            ("epp-ssl-keyfile", "epp.keyfile", "FILE", "its key"),
        ),
    ),
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


def _elsewhere(flags: Iterable[str], whose: str) -> dict[str, str]:
    return {flag: f"--{flag} is a flag of {whose}" for flag in flags}


def engine_table(role: Role) -> Table:
    """The settings of `pdserve prefill`, `decode` and `serve`."""
    port, connector = {
        Role.PREFILL: (8100, "nixl"),
        Role.DECODE: (8200, "nixl"),
        Role.BOTH: (8000, "null"),
    }[role]
    settings = _engine_settings()
    known = {each.flag for each in settings}
    return Table(
        settings,
        _engine_shorthands(),
        {"model": "", "port": port, "kv-transfer-config.kv-connector": connector},
        translate.variable_readers(),
        _elsewhere({_POLICY.flag, *(each.flag for each in _PROXY)} - known, "`pdserve proxy`")
        | absent_flags(),
        engine_rows(),
    )


def proxy_table() -> Table:
    """The settings of `pdserve proxy`."""
    settings = (*_PROXY, *translate.with_words(LOG_SETTINGS))
    readers = translate.variable_readers({setting.flag for setting in settings})
    known = {each.flag for each in settings}
    absent = _elsewhere(engine_flags() - known, "engines")
    return Table(settings, (_POLICY,), other_variables=readers, absent=absent, idle=PROXY_ROWS)


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
        up_rows([setting.flag for setting in per_role]),
    )


def bench_serve_table() -> Table:
    """The settings of `pdserve bench serve`."""
    own = (*TARGET_SETTINGS, *DATASET_SETTINGS, *TRAFFIC_SETTINGS, *RESULT_SETTINGS)
    return Table(
        (*own, *translate.bench_settings("endpoint")),
        translate.bench_shorthands("endpoint"),
        absent=absent_bench_flags(),
        idle=BENCH_ROWS,
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
        idle=COMPARE_ROWS,
    )
