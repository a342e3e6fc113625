"""A user's own JSONL file: vLLM's `custom` format, slightly extended.

Each line is an object with one of
- `"prompt"`: text, or an array of token ids (completions only), or
- `"messages"`: chat messages (chat only), each with `"role"` and `"content"` as text;
and optionally `"output_tokens"` (vLLM's name) or `"max_tokens"`. Without either, requests ask for
256 tokens; `--custom-output-len` overrides all of them. Other fields are ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pdserve.bench.datasets.prompts import PromptMaker
from pdserve.bench.datasets.reading import Entry, json_lines
from pdserve.bench.datasets.sampling import Asked, plan_of
from pdserve.bench.records import Message, Prompt, RequestPlan
from pdserve.bench.target import ApiEndpoint
from pdserve.config.datasets import DatasetConfig

DEFAULT_OUTPUT_TOKENS: Final = 256
_OUTPUT_FIELDS: Final = ("output_tokens", "max_tokens")


def make(config: DatasetConfig, prompts: PromptMaker) -> RequestPlan:
    """Make the plan.

    Raises:
        ConfigError: A line is not as described, or does not fit the endpoint.
    """
    path = Path(config.path)

    def accept(entry: Entry) -> Asked | str:
        prompt = _prompt(entry, prompts)
        num_output = config.custom.output_len or _num_output(entry)
        num_prompt = prompts.count(prompt)
        if num_prompt is not None and not prompts.fits(num_prompt, num_output):
            return f"over the model's {prompts.max_model_len} tokens"
        return prompt, num_prompt, num_output

    out = config.custom.output_len
    words = f"custom {path.name}" + ("" if out is None else f" out={out}")
    return plan_of(config, prompts, lambda: json_lines(path), accept, description=words)


def _num_output(entry: Entry) -> int:
    given = [name for name in _OUTPUT_FIELDS if entry.fields.get(name) is not None]
    if len(given) > 1:
        entry.refuse(f"the fields {given[0]!r} and {given[1]!r} mean the same", "leave one out")
    return entry.integer(given[0]) if given else DEFAULT_OUTPUT_TOKENS


def _prompt(entry: Entry, prompts: PromptMaker) -> Prompt:
    fields = entry.fields
    if ("prompt" in fields) == ("messages" in fields):
        entry.refuse(
            "exactly one of the fields 'prompt' and 'messages' is needed",
            'write {"prompt": "..."}, or {"messages": [{"role": "user", "content": "..."}]}',
        )
    if "messages" in fields:
        if prompts.endpoint is not ApiEndpoint.CHAT:
            entry.refuse("the field 'messages' is for chat", "use --endpoint chat")
        return _messages(entry)
    prompt = fields["prompt"]
    if isinstance(prompt, str):
        if not prompt:
            entry.refuse("the field 'prompt' is empty", "write a prompt")
        return prompts.for_text(prompt)
    if (
        isinstance(prompt, list)
        and prompt
        and all(type(token_id) is int and token_id >= 0 for token_id in prompt)
    ):
        if prompts.endpoint is not ApiEndpoint.COMPLETIONS:
            entry.refuse(
                "the field 'prompt' has token ids, which chat does not accept",
                "use --endpoint completions",
            )
        return prompt
    return entry.refuse(
        "the field 'prompt' is neither a string nor an array of token ids",
        'write {"prompt": "..."} or {"prompt": [1, 2, 3]}',
    )


def _messages(entry: Entry) -> list[Message]:
    messages = entry.fields["messages"]
    if not isinstance(messages, list) or not messages:
        entry.refuse(
            "the field 'messages' is not an array of messages",
            'write {"messages": [{"role": "user", "content": "..."}]}',
        )
    result = []
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not all(
            isinstance(message.get(name), str) for name in ("role", "content")
        ):
            entry.refuse(
                f"the field 'messages[{place}]' lacks 'role', or a 'content' that is a string",
                'write each message as {"role": "user", "content": "..."}',
            )
        result.append({"role": message["role"], "content": message["content"]})
    return result
