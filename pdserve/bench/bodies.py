"""Builds the body of a planned request and the next turn of a conversation. Knows no connection."""

from __future__ import annotations

from typing import Any

import msgspec

from pdserve.bench.records import Message, Planned, Prompt
from pdserve.bench.target import ApiEndpoint, Target
from pdserve.errors import ConfigError

_encoder = msgspec.json.Encoder()


class Asking(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that all requests of a run share.

    Attributes:
        ignore_eos: Whether to ask for exactly `max_tokens` tokens.
        temperature: None leaves it to the server.
        extra_body: Additional fields, which override ours.
    """

    target: Target
    ignore_eos: bool = False
    temperature: float | None = None
    extra_body: dict[str, Any] = {}

    def body(self, prompt: Prompt, max_tokens: int, *, tell_ids: bool = False) -> bytes:
        """Return the JSON of a request.

        Args:
            prompt: The prompt as returned by `adapt`.
            max_tokens: Output tokens to ask for.
            tell_ids: Whether to ask for token ids (vLLM's and our `return_token_ids`).
        """
        fields: dict[str, Any] = {"model": self.target.model} if self.target.model else {}
        match self.target.endpoint:
            case ApiEndpoint.CHAT:
                fields |= {"messages": prompt, "max_completion_tokens": max_tokens}
            case ApiEndpoint.COMPLETIONS:
                fields |= {"prompt": prompt, "max_tokens": max_tokens}
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.temperature is not None:
            fields["temperature"] = self.temperature
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if tell_ids:
            fields["return_token_ids"] = True
        return _encoder.encode(fields | self.extra_body)


def adapt(prompt: Prompt, endpoint: ApiEndpoint) -> Prompt:
    """Return a prompt in the form that its endpoint accepts.

    Raises:
        ConfigError: The endpoint does not accept it.
    """
    if endpoint is ApiEndpoint.CHAT:
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        if prompt and isinstance(prompt[0], int):
            raise ConfigError(
                "the data set has token ids, which only completions accept: use --endpoint "
                "/v1/completions",
                param="endpoint",
            )
        return prompt
    if not isinstance(prompt, str) and prompt and isinstance(prompt[0], dict):
        raise ConfigError(
            "the data set has chat messages, which completions do not accept: use --endpoint "
            "/v1/chat/completions",
            param="endpoint",
        )
    return prompt


def needs_ids(planned: Planned) -> bool:
    """Whether the request after this one needs its answer's token ids."""
    prompt = planned.prompt
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], int)


def follow(before: Prompt, text: str, token_ids: list[int], prompt: Prompt) -> Prompt:
    """Return the prompt of a conversation's next turn: everything said so far, and then `prompt`.

    Args:
        before: The full prompt of the previous turn.
        text: Its answer.
        token_ids: The same; needed if the prompts are token ids.
        prompt: The new turn, in the same form as `before`.

    Raises:
        ValueError: The forms differ, or token ids are needed and there are none.
    """
    if isinstance(before, str) and isinstance(prompt, str):
        return before + text + prompt
    if isinstance(before, str) or isinstance(prompt, str):
        raise ValueError("its turns have different forms")
    first, second = list(before), list(prompt)
    if first and isinstance(first[0], dict):
        answer: Message = {"role": "assistant", "content": text}
        return [*first, answer, *second]
    if not token_ids:
        raise ValueError("the server does not return token ids (return_token_ids)")
    return [*first, *token_ids, *second]


def unlike(prompt: Prompt) -> Prompt:
    """Return this prompt backwards: equally long, but without a common prefix for caches."""
    if isinstance(prompt, str):
        return " ".join(reversed(prompt.split(" ")))
    items = list(prompt)
    if items and isinstance(items[0], dict):
        return [
            {**message, "content": str(unlike(message["content"]))}
            for message in items
            if isinstance(message, dict)
        ]
    return [each for each in reversed(items) if isinstance(each, int)]
