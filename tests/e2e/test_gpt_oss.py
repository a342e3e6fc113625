"""gpt-oss over P and D: transformers' tokens, and calls in its format, which have their own end."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tokenizers import pre_tokenizers

from tests.e2e.conftest import pd_deployment
from tests.e2e.test_equality import assert_kv_moved, complete_all
from tests.tiny_models import VOCAB_SIZE, greedy_by_transformers, write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

PROMPTS = [[3 + (17 * i + 5 * n) % 311 for i in range(n)] for n in (1, 17, 64, 150)]
MARKERS = ["start", "end", "message", "channel", "constrain", "return", "call"]
IDS = {f"<|{name}|>": VOCAB_SIZE - len(MARKERS) + i for i, name in enumerate(MARKERS)}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TEMPLATE = (
    "{# <|channel|>, by which the format is known #}{% for m in messages %}<|start|>{{ m.role }}"
    "<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def write_model(directory: Path) -> Path:
    """A tiny model whose last tokens are harmony's markers, and that has two ends, as gpt-oss."""
    write_tiny_model(directory, "gpt_oss")
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {w: i for w, i in vocab.items() if i not in IDS.values()}
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    tokenizer["added_tokens"] += [
        {"id": i, "content": text, **dict.fromkeys(flags, False), "special": True}
        for text, i in IDS.items()
    ]
    path.write_text(json.dumps(tokenizer))
    path = directory / "tokenizer_config.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | {"chat_template": TEMPLATE, "eos_token": "<|return|>"}))
    ends = [IDS["<|return|>"], IDS["<|call|>"]]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return directory


def test_tokens_are_those_of_transformers_and_required_calls_end_as_calls(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    expected = greedy_by_transformers(model, PROMPTS, 24)
    flags = ("--dtype", "float32", "--kv-cache-memory-bytes", "32MiB")
    with pd_deployment(tmp_path, model, *flags) as deployment:
        assert complete_all(deployment.url("proxy"), PROMPTS, max_tokens=24) == expected
        assert_kv_moved(deployment, sum(map(len, PROMPTS)))
        for seed in range(3):
            choice = _call(deployment.url("proxy"), seed)
            assert choice["finish_reason"] == "tool_calls", choice
            assert choice["token_ids"][-1] == IDS["<|call|>"]
            [call] = choice["message"]["tool_calls"]
            assert call["function"]["name"] == "forecast"
            arguments = json.loads(call["function"]["arguments"])
            assert arguments["city"] in ("Rome", "Oslo")
            assert arguments["days"] in (1, 2, 3)


def _byte(word: str) -> int:
    return ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())].index(word)


def _call(url: str, seed: int) -> Any:
    body = {
        "messages": [{"role": "user", "content": "Will it rain?"}],
        "tools": [{"type": "function", "function": {"name": "forecast", "parameters": SCHEMA}}],
        "tool_choice": {"type": "function", "function": {"name": "forecast"}},
        "max_tokens": 200,
        "seed": seed,
        # Else it thinks to the limit: a channel is commentary, whose header goes on to a name.
        "logit_bias": {str(_byte(each)): 60 for each in "Ġc"},
        "return_token_ids": True,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    return choice
