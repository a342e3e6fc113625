"""Data: vLLM's commands beside pdserve's, and the flags of `vllm bench serve`."""

from __future__ import annotations

from typing import Final

ABSENT_COMMANDS: Final = {
    "chat": "any client of OpenAI's API talks to the proxy; `pdserve up --prompt TEXT` asks it",
    "complete": "any client of OpenAI's API talks to the proxy; `pdserve up --prompt TEXT` asks it",
    "launch": "tokens are made by the engines' own servers",
    "collect-env": "`pdserve doctor` looks at this machine",
    "run-batch": "requests come over HTTP: `pdserve bench serve` sends files of them",
    "bench latency": "`pdserve bench serve --max-concurrency 1` measures a running server",
    "bench throughput": "`pdserve bench serve` without --request-rate measures a running server",
    "bench mm-processor": "only text is served",
    "bench startup": "an engine's log says how long each part of its start takes",
}
"""Commands that are not supported, and what to use instead."""


BENCH_NO_EFFECT: Final = {
    "skip-chat-template": "prompts of files are sent as they are",
    "trust-remote-code": "code that comes with a tokenizer is never run",
    "no-stream": "data sets are read as a whole",
}

BENCH_RENAMED: Final = {"endpoint-type": "backend", "served-model-name": "model"}

BENCH_ABSENT: Final = {
    "give it as a field of the request, by --extra-body '{\"top_p\": 0.75}'": """
        top-p top-k min-p frequency-penalty presence-penalty repetition-penalty best-of logprobs
        use-beam-search
    """,
    "--dataset-name random, sharegpt, custom, prefix_repetition and trace are here as in vLLM": """
        hf-name hf-subset hf-split hf-output-len random-mm-base-items-per-request
        random-mm-num-mm-items-range-ratio random-mm-limit-mm-per-prompt random-mm-bucket-config
        random-batch-size random-num-prompts no-reranker sonnet-input-len sonnet-output-len
        sonnet-prefix-len spec-bench-output-len spec-bench-category speed-bench-category
        blazedit-min-distance blazedit-max-distance asr-min-audio-len-sec asr-max-audio-len-sec
        enable-multimodal-chat custom-ensure-client-side-data common-prefix-len
    """,
    "--no-progress leaves the progress bar out": """
        disable-tqdm
    """,
    "`pdserve bench plot` draws the report of saved runs": """
        plot-timeline plot-dataset-stats timeline-itl-thresholds
    """,
    "each run has a file of its own": """
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
