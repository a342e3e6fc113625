"""Data: every flag of `vllm serve`, without dashes, and its mapping.

A flag that has a setting of its own name is the same, whatever stands here. Each of the others
stands once: in `RENAMED`, `NO_EFFECT`, `ONLY` or `ABSENT`.
"""

from __future__ import annotations

from typing import Final

SAME: Final = """
    model served-model-name tokenizer dtype max-model-len load-format seed generation-config
    chat-template enforce-eager device
    tensor-parallel-size pipeline-parallel-size data-parallel-size
    enable-expert-parallel all2all-backend expert-placement-strategy enable-eplb eplb-config
    speculative-config
    distributed-executor-backend block-size kv-cache-memory-bytes num-gpu-blocks-override
    gpu-memory-utilization enable-prefix-caching max-num-seqs max-num-batched-tokens
    enable-chunked-prefill long-prefill-token-threshold scheduling-policy kv-transfer-config
    kv-events-config host port api-key shutdown-timeout config root-path
    ssl-keyfile ssl-certfile ssl-ca-certs ssl-cert-reqs log-level
    allowed-origins allowed-methods allowed-headers allow-credentials
    tool-call-parser enable-auto-tool-choice reasoning-parser
"""

DIFFERENCES: Final = {
    "api-key": "VLLM_API_KEY and PDSERVE_API_KEY work too",
    "all2all-backend": "all_gather or all_to_all; vLLM's allgather_reducescatter is all_gather",
    "enable-auto-tool-choice": "on by default if the model's format is known",
    "reasoning-parser": "auto by default: the format that the chat template uses, if it is certain",
    "tool-call-parser": "auto by default: the format that the chat template uses, if it is certain",
    "config": "YAML with the flags as keys",
    "distributed-executor-backend": "vLLM's mp is multiprocess, uni is inline",
    "dtype": "vLLM's half and float are float16 and float32",
    "gpu-memory-utilization": "0.9 by default; vLLM's default is 0.92",
    "host": "the default serves only this host (127.0.0.1); vLLM serves all",
    "kv-transfer-config": "connectors and keys: see below",
    "load-format": "auto, safetensors or dummy; vLLM's hf is auto",
    "log-level": "vLLM's CRITICAL is error, and NOTSET is debug",
    "max-model-len": "vLLM's -1 is auto",
    "max-num-batched-tokens": "2048 by default; vLLM's default depends on the GPU",
    "max-num-seqs": "128 by default; vLLM's default depends on the GPU",
    "ssl-ca-certs": "it also verifies proxies and engines",
    "shutdown-timeout": "starts after --drain-delay; default 30 seconds, while vLLM ends at once",
}
"""Differences of flags with the same name."""

SHORT: Final = {
    "ac": "attention-config",
    "asc": "api-server-count",
    "cc": "compilation-config",
    "dc": "diffusion-config",
    "dcp": "decode-context-parallel-size",
    "dp": "data-parallel-size",
    "dpa": "data-parallel-address",
    "dpb": "data-parallel-backend",
    "dpe": "data-parallel-external-lb",
    "dph": "data-parallel-hybrid-lb",
    "dpl": "data-parallel-size-local",
    "dpm": "data-parallel-multi-port-external-lb",
    "dpn": "data-parallel-rank",
    "dpp": "data-parallel-rpc-port",
    "dpr": "data-parallel-start-rank",
    "ep": "enable-expert-parallel",
    "n": "nnodes",
    "O": "optimization-level",
    "pcp": "prefill-context-parallel-size",
    "pp": "pipeline-parallel-size",
    "q": "quantization",
    "r": "node-rank",
    "sc": "speculative-config",
    "tp": "tensor-parallel-size",
}
"""vLLM's short forms, without the dash."""

WORDS: Final = {
    "all2all-backend": {"allgather_reducescatter": "all_gather", "naive": "all_gather"},
    "distributed-executor-backend": {"mp": "multiprocess", "uni": "inline"},
    "dtype": {"half": "float16", "float": "float32"},
    "load-format": {"hf": "auto"},
    "log-level": {
        "CRITICAL": "error",
        "DEBUG": "debug",
        "ERROR": "error",
        "INFO": "info",
        "NOTSET": "debug",
        "WARNING": "warning",
    },
    "max-model-len": {"-1": "auto"},
}
"""vLLM's words for values of settings, and ours."""

RENAMED_SWITCHES: Final = {
    "disable-log-requests": ("log-requests", False),
    "disable-log-stats": ("log-stats", False),
    "enable-log-requests": ("log-requests", True),
}
"""Switches with another name here: our switch, and its value when theirs is on."""

RENAMED: Final = {
    "device-memory-utilization": "gpu-memory-utilization",
    "distributed-timeout-seconds": "step-timeout",
    "max-num-queued-reqs": "max-waiting",
    "max-num-queued-tokens": "max-waiting-tokens",
    "max-num-scheduled-tokens": "max-num-batched-tokens",
    "model-tag": "model",
    "ngram-prompt-lookup-max": "speculative-config.prompt-lookup-max",
    "ngram-prompt-lookup-min": "speculative-config.prompt-lookup-min",
    "num-speculative-tokens": "speculative-config.num-speculative-tokens",
    "spec-method": "speculative-config.method",
    "spec-model": "speculative-config.model",
    "speculative-model": "speculative-config.model",
    "spec-tokens": "speculative-config.num-speculative-tokens",
}
"""Flags that have another name here."""

NO_EFFECT: Final = {
    "aggregate-engine-logging": "the engine cores of one server are always counted together",
    "async-scheduling": "steps of CUDA devices and of pipeline stages overlap by themselves",
    "disable-access-log-for-endpoints": "there is no access log; each request has a log line",
    "disable-cascade-attn": "there is no cascade attention",
    "disable-chunked-mm-input": "only text is served",
    "disable-custom-all-reduce": "there is no such all-reduce",
    "disable-hybrid-kv-cache-manager": "there is no hybrid KV cache manager",
    "disable-nccl-for-dp-synchronization": "data-parallel engine cores meet without NCCL",
    "disable-uvicorn-access-log": "there is no access log",
    "enable-log-deltas": "outputs are never logged",
    "enable-prompt-tokens-details": "usage always includes the cached prompt tokens",
    "enable-reasoning": "reasoning is parsed if --reasoning-parser or the template sets it",
    "enable-request-id-headers": "X-Request-Id is always read, returned and passed on",
    "enable-server-load-tracking": "/load always reports the running requests",
    "enable-shm-tensor-arena": "only text is served",
    "exclude-tools-when-tool-choice-none": "tools are then always left out of the prompt",
    "fail-on-environ-validation": "unknown variables are reported at the start",
    "language-model-only": "only text is served",
    "skip-mm-profiling": "only text is served",
    "trust-remote-code": "code that comes with a checkpoint is never run",
    "trust-request-mm-kwargs": "only text is served",
    "use-tqdm-on-load": "the log shows the progress of loading",
    "use-v2-block-manager": "there is one block manager",
}
"""Switches that are accepted and change nothing, and what is true instead."""

ONLY: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "anthropic-disabled-thinking-effort": (
        ("auto", "none"),
        "a template is told enable_thinking false",
    ),
    "api-server-count": (("1",), "one process serves HTTP; start engines behind `pdserve proxy`"),
    "chat-template-content-format": (("auto", "string"), "templates receive a string"),
    "code-revision": ((), "code that comes with a checkpoint is never run"),
    "collect-detailed-traces": (("none",), "`pdserve trace` has every step, without a collector"),
    "compilation-config": ((), "nothing is compiled while serving; kernels are built beforehand"),
    "config-format": (("auto", "hf"), "config.json in Hugging Face's format is read"),
    "convert": (("auto", "none"), "only models that generate text are served"),
    "cpu-offload-gb": (("0", "0.0"), "weights stay on the device"),
    "data-parallel-backend": (("mp",), "engine cores are processes on this host"),
    "decode-context-parallel-size": (("1",), "a sequence's KV is not split over ranks"),
    "dp-sync-interval": ((), "a coordinator ends the steps of cores that share experts"),
    "guided-decoding-backend": (("auto",), "llguidance is the only backend"),
    "kv-cache-dtype": (("auto",), "KV has the dtype of the weights: see --dtype"),
    "logprobs-mode": (("raw_logprobs",), "logprobs are the model's own, as in vLLM's default"),
    "mamba-cache-dtype": (("auto",), "there are no Mamba models"),
    "max-log-len": ((), "prompts and answers are never logged"),
    "max-logprobs": (("20",), "a request may ask for 20 tokens at each position"),
    "max-parallel-loading-workers": ((), "each rank reads its own part of the files"),
    "max-seq-len-to-capture": ((), "graphs do not depend on the length of sequences"),
    "mm-processor-cache-gb": ((), "only text is served"),
    "model-impl": (("auto", "vllm"), "the models are pdserve's own"),
    "nnodes": (("1",), "one command starts all ranks: use --distributed-executor-backend ray"),
    "node-rank": (("0",), "one command starts all ranks: use --distributed-executor-backend ray"),
    "optimization-level": ((), "nothing is compiled while serving; kernels are built beforehand"),
    "performance-mode": (
        ("balanced",),
        "--max-num-seqs and --max-num-batched-tokens set the balance",
    ),
    "prefill-context-parallel-size": (("1",), "a sequence is not split over ranks"),
    "prefix-caching-hash-algo": ((), "pdserve has its own hash of prefixes"),
    "preemption-mode": (("recompute",), "preempted requests are recomputed"),
    "renderer-num-workers": ((), "two threads tokenize prompts"),
    "response-role": (("assistant",), "answers have the role assistant"),
    "runner": (("auto", "generate"), "only models that generate text are served"),
    "sse-keep-alive-interval": (("0",), "nothing is sent between tokens"),
    "stream-interval": (("1",), "every token is streamed at once"),
    "swap-space": ((), "preempted requests are recomputed, as in vLLM's V1"),
    "task": (("auto", "generate"), "only models that generate text are served"),
    "tokenizer-mode": (("auto", "hf"), "tokenizer.json is read"),
    "tool-strict-level": (("auto",), "`strict` of a tool decides"),
    "uvicorn-log-level": ((), "there is no uvicorn; --log-level sets what is logged"),
    "worker-cls": (("auto",), "the worker is pdserve's own"),
}
"""Flags that change nothing, with their accepted values (any value if none is named)."""

ONLY_SPECULATIVE: Final = {
    "draft-tensor-parallel-size": (("1",), "a draft model is not spread over ranks"),
}
"""Keys of `--speculative-config` that change nothing, with their accepted values."""

ABSENT_SPECULATIVE_KEYS: Final = {
    "a draft model is a directory; it is used as it is, greedily, and whole on the first rank": """
        quantization max-model-len revision code-revision
        draft-load-config moe-backend attention-backend draft-sample-method
    """,
    "a draft model needs the model's tokenizer": "use-heterogeneous-vocab",
    "a head's config.json names its type": "eagle-config",
    "drafts never change the tokens": """
        rejection-sample-method synthetic-acceptance-rate synthetic-acceptance-rates
        posterior-threshold posterior-alpha acceptance-method
    """,
    "the length of each draft adapts to what pays off in its batch": """
        disable-by-batch-size disable-padded-drafter-batch enable-adaptive-draft-length
        parallel-drafting
    """,
}
"""Keys of `--speculative-config` that are not supported."""

ABSENT: Final = {
    "config.json says how weights are quantised; kernels compute in the dtype of the others": """
        quantization quantization-config allow-deprecated-quantization quantization-param-path
        kv-cache-dtype-skip-layers calculate-kv-scales
    """,
    "there are no LoRA adapters: merge them into the checkpoint": """
        enable-lora enable-lora-bias lora-modules max-loras max-lora-rank lora-dtype
        max-cpu-loras fully-sharded-loras lora-target-modules default-mm-loras
        specialize-active-lora enable-mixed-moe-lora-format enable-moe-shared-loras
        enable-tower-connector-lora lora-extra-vocab-size long-lora-scaling-factors
        enable-prompt-adapter max-prompt-adapters max-prompt-adapter-token prompt-adapters
        qlora-adapter-name-or-path max-lora-cls-labels
    """,
    "a draft model is a directory; it is used as it is, whole on the first rank": """
        speculative-draft-tensor-parallel-size speculative-max-model-len
    """,
    "drafts never change the tokens": """
        spec-decoding-acceptance-method
    """,
    "the length of each draft adapts to what pays off in its batch": """
        speculative-disable-by-batch-size num-lookahead-slots
    """,
    "a request's log line reports its drafts": """
        per-request-spec-decode-metrics
    """,
    "only text is served": """
        limit-mm-per-prompt enable-mm-embeds media-io-kwargs mm-processor-kwargs
        mm-processor-cache-type mm-hasher-algorithm mm-shm-cache-max-object-size-mb
        mm-encoder-only mm-encoder-tp-mode mm-encoder-attn-backend mm-encoder-attn-dtype
        mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-path
        mm-encoder-fp8-scale-save-margin interleave-mm-strings video-pruning-rate
        video-pruning-method mm-tensor-ipc mm-processor-device mm-ipc-gpu-memory-gb
        mm-device-do-normalize allowed-local-media-path allowed-media-domains
        disable-mm-preprocessor-cache ec-transfer-config ec-manager-config
        enable-flash-late-interaction
    """,
    "no model with such layers is served": """
        enable-hc-sp engram-config swa-bounded-replay
    """,
    "Cohere's models and API are not served": """
        cohere-format cohere-is-reasoning-model
    """,
    "--max-num-seqs limits the requests of a step": "max-num-active-seqs",
    "the buckets of `/metrics` are fixed": "custom-histogram-buckets",
    "there are no Mamba models": """
        mamba-ssm-cache-dtype mamba-block-size mamba-cache-mode mamba-backend
        mamba-ssu-algorithm enable-mamba-cache-stochastic-rounding mamba-cache-philox-rounds
        use-replayssm enable-mamba-fine-grained-prefix-cache replayssm-buffer-len
        gdn-prefill-backend kda-prefill-backend kda-decode-backend prefix-match-unit
        enable-mamba-shared-prefix-checkpoint
    """,
    "only models that generate text are served": """
        pooler-config override-pooler-config diffusion-config io-processor-plugin
    """,
    "only built-in parsers exist: --tool-call-parser, --reasoning-parser": """
        tool-parser-plugin reasoning-parser-plugin
    """,
    "clients call tools; the server does not": "tool-server",
    "there is no budget for reasoning tokens": "reasoning-config",
    "llguidance is the only backend; requests set JSON's spacing in structured_outputs": """
        structured-outputs-config disable-any-whitespace guided-decoding-disable-fallback
        guided-decoding-disable-any-whitespace guided-decoding-disable-additional-properties
    """,
    "code in requests is never run": "logits-processor-pattern",
    "each engine is a separate server: start several behind `pdserve proxy`": """
        data-parallel-rank data-parallel-start-rank data-parallel-size-local
        data-parallel-address data-parallel-rpc-port data-parallel-hybrid-lb
        data-parallel-external-lb data-parallel-multi-port-external-lb
        data-parallel-supervisor-port dp-supervisor-probe-interval-s
        dp-supervisor-probe-timeout-s dp-supervisor-probe-failure-threshold headless
    """,
    "one command starts all ranks: use --distributed-executor-backend ray for several hosts": """
        master-addr master-port cpu-distributed-timeout-seconds
    """,
    "set it for the process with CUDA_VISIBLE_DEVICES, taskset or numactl": """
        device-ids numa-bind numa-bind-nodes numa-bind-cpus
    """,
    "a sequence's KV is not split over ranks": """
        dcp-comm-backend dcp-q-replicate dcp-kv-cache-interleave-size
        cp-kv-cache-interleave-size
    """,
    "steps are not split into micro-batches": """
        enable-dbo ubatch-size dbo-decode-token-threshold dbo-prefill-token-threshold
    """,
    "the number of ranks is fixed at the start": """
        enable-elastic-ep elastic-ep-max-dp-size enable-fault-tolerance fault-tolerance-config
    """,
    "each rank reads only its part of the files": """
        enable-ep-weight-filter safetensors-load-strategy safetensors-prefetch-num-threads
        safetensors-prefetch-block-size model-loader-extra-config ignore-patterns
        pt-load-map-location
    """,
    "the worker and the scheduler are pdserve's own": """
        worker-extension-cls scheduler-cls additional-config ray-workers-use-nsight
        enable-batch-sharded-sampling logits-processors override-neuron-config
        scheduler-reserve-full-isl
    """,
    "pdserve chooses the kernels for each device: `pdserve doctor` names them": """
        attention-backend attention-config kernel-config moe-backend linear-backend
        sparse-indexer-topk-backend ir-op-priority enable-flashinfer-autotune
        enable-bf16x3-router-gemm enable-cutedsl-warmup override-attention-dtype use-fp64-gumbel
        jit-monitor-mode jit-monitor-verbose
    """,
    "graphs are captured for up to --max-num-seqs requests and, with prompts, 1,024 tokens": """
        cudagraph-capture-sizes max-cudagraph-capture-size cuda-graph-sizes cudagraph-metrics
    """,
    "keep KV in a store: `pdserve up --kv-tiers`, or `pdserve kv-server`": """
        kv-offloading-size kv-offloading-backend
    """,
    "unused KV blocks are evicted, least recently used first": """
        prefix-cache-retention-interval watermark kv-sharing-fast-prefill kv-cache-metrics
        kv-cache-metrics-sample
    """,
    "weights stay on the device": """
        offload-backend cpu-offload-params offload-group-size offload-num-in-group
        offload-prefetch-step offload-params enable-sleep-mode enable-cumem-allocator
        weight-transfer-config enable-nccl-comm-suspend sleep-mode-offload-cudagraph
        sleep-preserve-parameter-names
    """,
    "--max-num-batched-tokens and --long-prefill-token-threshold limit a step": """
        prefill-schedule-interval max-num-partial-prefills max-long-partial-prefills
        scheduler-delay-factor num-scheduler-steps multi-step-stream-outputs
        long-prefill-token-threshold-adaptive
    """,
    "name a directory with that revision, as huggingface_hub downloads it": """
        revision tokenizer-revision hf-config-path model-weights
    """,
    "the hub's client reads HF_TOKEN": """
        hf-token
    """,
    "the hub's client reads HF_HOME": """
        download-dir
    """,
    "config.json is read as it is: edit a copy of it": """
        hf-overrides model-class-overrides rope-scaling rope-theta
    """,
    "set them in requests, and their defaults in generation_config.json": """
        override-generation-config
    """,
    "set it in requests: return_token_ids, stream_options, chat_template_kwargs": """
        return-tokens-as-token-ids enable-force-include-usage default-chat-template-kwargs
    """,
    "config.json sets the window of each layer": """
        disable-sliding-window
    """,
    "templates in requests are never used": """
        trust-request-chat-template
    """,
    "prompts are tokenized here, because the proxy splits requests by their tokens": """
        skip-tokenizer-init enable-prompt-embeds tokens-only enable-scale-out tokenizer-pool-size
        tokenizer-pool-type tokenizer-pool-extra-config
    """,
    "there is no such output": """
        enable-return-routed-experts return-sampling-mask enable-trace-replay
        enable-per-request-metrics fingerprint-mode fingerprint-value aux-output-config
        watermark-config
    """,
    "`pdserve trace` and `/metrics` show it without a collector": """
        otlp-traces-endpoint show-hidden-metrics-for-version enable-layerwise-nvtx-tracing
        enable-mfu-metrics enable-logging-iteration-details profiler-config
    """,
    "prompts and answers are never logged; --log-level sets what is logged": """
        enable-log-outputs log-config-file log-error-stack logging-config
    """,
    "the proxy's dashboard is the only page; /openapi.json describes the API": """
        disable-fastapi-docs enable-offline-docs enable-tokenizer-info-endpoint
    """,
    "--max-body-bytes and --header-, --body- and --send-timeout limit what clients may use": """
        h11-max-incomplete-event-size h11-max-header-count
    """,
    "HTTP is served over TCP": """
        uds grpc grpc-port
    """,
    "no foreign code handles requests: put a gateway in front": """
        middleware
    """,
    "TLS uses OpenSSL's ciphers and reads its files at start: restart, which loses no request": """
        ssl-ciphers enable-ssl-refresh
    """,
}
"""Reasons, with the flags that are not supported for each."""
