"""lm-evaluation-harness, likelihoods and chats, against an endpoint: `URL MODEL TOKENIZER`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import lm_eval
from lm_eval.tasks import TaskManager

DOCUMENTS = [
    {"question": "A fox is", "choices": [" an animal", " a number"], "answer": 0},
    {"question": "Two and two are", "choices": [" green", " four", " a lake"], "answer": 1},
    {"question": "The bird flew over the", "choices": [" tree", " idea"], "answer": 0},
]
TASKS = {
    "chosen": """
task: chosen
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "said": """
task: said
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 16}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


def main() -> None:
    """Print what was measured, and what it was measured of, as one JSON object."""
    url, model, tokenizer = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        data = directory / "data.jsonl"
        data.write_text("\n".join(map(json.dumps, DOCUMENTS)))
        for task, text in TASKS.items():
            (directory / f"{task}.yaml").write_text(text.replace("DATA", str(data)))
        manager = TaskManager(include_path=name, include_defaults=False)
        common = {"model": model, "tokenizer": tokenizer, "num_concurrent": 2, "max_length": 1024}
        completions = {**common, "base_url": f"{url}/completions"}
        completions |= {"tokenizer_backend": "huggingface"}
        chats = {**common, "base_url": f"{url}/chat/completions", "tokenizer_backend": None}
        asked = {"task_manager": manager, "bootstrap_iters": 0, "log_samples": True}
        found = [
            lm_eval.simple_evaluate("local-completions", completions, tasks=["chosen"], **asked),
            lm_eval.simple_evaluate(
                "local-chat-completions", chats, tasks=["said"], apply_chat_template=True, **asked
            ),
        ]
    told = [
        [task, [sample["resps"] for sample in samples]]
        for result in found
        for task, samples in result["samples"].items()
    ]
    assert [len(samples) for _, samples in told] == [len(DOCUMENTS)] * 2
    print(json.dumps(told))


if __name__ == "__main__":
    main()
