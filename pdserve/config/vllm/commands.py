"""Data: vLLM's commands beside pdserve's, and the flags of `vllm bench serve`."""

from __future__ import annotations

from typing import Final

ABSENT_COMMANDS: Final = {
    "chat": "use any client of OpenAI's API, or `pdserve up --prompt TEXT`",
    "complete": "use any client of OpenAI's API, or `pdserve up --prompt TEXT`",
    "launch": "the engines' own servers tokenize",
    "download-kernels": "the kernels are part of the package",
    "preload": "each engine reads its own weights, and digests of them are cached",
    "snapshot": "an engine starts from its checkpoint",
    "collect-env": "use `pdserve doctor`, which checks this machine",
    "run-batch": "requests come over HTTP: `pdserve bench serve` sends them from files",
    "bench latency": "`pdserve bench serve --max-concurrency 1` measures a running server",
    "bench throughput": "`pdserve bench serve` without --request-rate measures a running server",
    "bench mm-processor": "only text is served",
    "bench startup": "an engine's log shows the time of each part of its start",
}
"""Commands that are not supported, and what to use instead."""


BENCH_NO_EFFECT: Final = {
    "skip-chat-template": "prompts from files are sent as they are",
    "trust-remote-code": "code that comes with a tokenizer is never run",
    "no-stream": "data sets are read as a whole",
}

BENCH_RENAMED: Final = {
    "endpoint-type": "backend",
    "input-len": "random-input-len",
    "output-len": (
        "random-output-len sharegpt-output-len custom-output-len prefix-repetition-output-len"
    ),
    "served-model-name": "model",
}

BENCH_ABSENT: Final = {
    "set it as a field of the request with --extra-body '{\"top_p\": 0.75}'": """
        top-p top-k min-p frequency-penalty presence-penalty repetition-penalty best-of logprobs
        use-beam-search chat-template-kwargs
    """,
    "only --dataset-name random, sharegpt, custom, prefix_repetition and trace are as in vLLM": """
        hf-name hf-subset hf-split hf-output-len random-mm-base-items-per-request
        random-mm-num-mm-items-range-ratio random-mm-limit-mm-per-prompt random-mm-bucket-config
        random-batch-size random-num-prompts no-reranker sonnet-input-len sonnet-output-len
        sonnet-prefix-len spec-bench-output-len spec-bench-category speed-bench-category
        blazedit-min-distance blazedit-max-distance asr-min-audio-len-sec asr-max-audio-len-sec
        enable-multimodal-chat custom-ensure-client-side-data common-prefix-len
        bfcl-categories speed-bench-dataset-subset speed-bench-output-len
    """,
    "--dataset-name trace reads a timed trace in Mooncake's or Azure's format": """
        self-timed timed-trace-chunk-hash-size timed-trace-label-hash-ids
        timed-trace-label-input-length timed-trace-label-output-length timed-trace-label-timestamp
        timed-trace-sec-multiplier
    """,
    "--dataset-name pd-interference plays steady requests beside bursts": """
        probe-request-rate
    """,
    "--no-progress hides the progress bar": """
        disable-tqdm
    """,
    "`pdserve bench plot` makes a report of saved runs": """
        plot-timeline plot-dataset-stats timeline-itl-thresholds
    """,
    "each run has its own file": """
        append-result
    """,
    "`pdserve trace` shows what the engines do": """
        profile profile-batches profile-num-steps
    """,
    "certificates are always checked": """
        insecure
    """,
    "tokenizer.json is read": """
        tokenizer-mode skip-tokenizer-init
    """,
    "--label names a run": """
        request-id-prefix
    """,
    "there are no LoRA adapters": """
        lora-modules lora-assignment
    """,
}
"""Reasons, with the flags of `vllm bench serve` that are not supported for each."""
