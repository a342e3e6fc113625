"""Conversations in ShareGPT's format, pruned as vLLM prunes them.

The file is one JSON array: `[{"conversations": [{"from": "human", "value": "..."}, ...]}, ...]`.
Conversations of fewer than two turns are skipped. The first turn is the prompt, whoever the
speaker; the second sets the number of output tokens, unless `--sharegpt-output-len` does. As in
vLLM's `is_valid_sequence`, prompts under 4 or over 1024 tokens, outputs under 4 (if the file
decides), and both together over 2048 are left out; so are those that exceed the model's context. If
a file has too few, entries are repeated, with a note.

The order is this module's own, so the sample differs from vLLM's with the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pdserve.bench.datasets.prompts import PromptMaker
from pdserve.bench.datasets.reading import Entry, json_array
from pdserve.bench.datasets.sampling import Asked, plan_of
from pdserve.bench.records import RequestPlan
from pdserve.config.datasets import DatasetConfig

MIN_TOKENS: Final = 4
MAX_PROMPT_TOKENS: Final = 1024
MAX_TOTAL_TOKENS: Final = 2048


def make(config: DatasetConfig, prompts: PromptMaker) -> RequestPlan:
    """Make the plan.

    Raises:
        ConfigError: The file is not in ShareGPT's format, or there is no tokenizer.
    """
    path = Path(config.path)

    def read() -> Iterator[Entry]:
        return (entry for entry in json_array(path) if len(_turns(entry)) >= 2)

    def accept(entry: Entry) -> Asked | str:
        question, answer = (_value(entry, place) for place in (0, 1))
        num_prompt = prompts.count_words(question)
        num_output = config.sharegpt.output_len or prompts.count_words(answer)
        reason = _pruned(num_prompt, num_output, by_file=config.sharegpt.output_len is None)
        if reason is not None:
            return reason
        prompt = prompts.for_text(question)
        num_seen = prompts.count(prompt) or num_prompt
        if not prompts.fits(num_seen, num_output):
            return f"over the model's {prompts.max_model_len} tokens"
        return prompt, num_seen, num_output

    out = config.sharegpt.output_len
    words = f"sharegpt {path.name}" + ("" if out is None else f" out={out}")
    return plan_of(config, prompts, read, accept, description=words)


def _turns(entry: Entry) -> list[Any]:
    turns = entry.fields.get("conversations")
    if not isinstance(turns, list):
        found = "is missing" if turns is None else "is not an array"
        entry.refuse(
            f"the field 'conversations' {found}",
            "ShareGPT's format is "
            '[{"conversations": [{"from": "human", "value": "..."}, ...]}, ...]',
        )
    return turns


def _value(entry: Entry, place: int) -> str:
    turn = _turns(entry)[place]
    value = turn.get("value") if isinstance(turn, dict) else None
    if not isinstance(value, str):
        entry.refuse(
            f"the field 'conversations[{place}].value' is missing or not a string",
            'write each turn as {"from": "human", "value": "..."}',
        )
    return value


def _pruned(num_prompt: int, num_output: int, *, by_file: bool) -> str | None:
    """Return why vLLM leaves this out, if it does."""
    if num_prompt < MIN_TOKENS:
        return f"with a prompt under {MIN_TOKENS} tokens"
    if by_file and num_output < MIN_TOKENS:
        return f"with an output under {MIN_TOKENS} tokens"
    if num_prompt > MAX_PROMPT_TOKENS:
        return f"with a prompt over {MAX_PROMPT_TOKENS} tokens"
    if num_prompt + num_output > MAX_TOTAL_TOKENS:
        return f"over {MAX_TOTAL_TOKENS} tokens together"
    return None
