"""Log-probabilities in the three shapes the API has for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.server.hop import PromptLogprobs
    from pdserve.text.tokenizer import Tokenizer
    from pdserve.wire.outputs import TokenLogprobs


class TokenNames:
    """What tokens are called where their log-probabilities are told.

    Args:
        as_ids: By their ids: several tokens may have one text, and some have none.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        """Return a token's name."""
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def bytes(self, token_id: int) -> bytes:
        """Return what a token stands for."""
        return self._tokenizer.token_bytes(token_id)


def completion_logprobs(
    names: TokenNames, entries: Sequence[TokenLogprobs], offsets: Sequence[int]
) -> dict[str, list[Any]]:
    """Return the object of `/v1/completions`: one column per fact."""
    return {
        "text_offset": list(offsets),
        "token_logprobs": [entry.logprob for entry in entries],
        "tokens": [names.text(entry.token_id) for entry in entries],
        "top_logprobs": [_alternatives(names, entry) for entry in entries],
    }


def echoed_logprobs(
    names: TokenNames, token_ids: Sequence[int], entries: PromptLogprobs, echo: str
) -> dict[str, list[Any]]:
    """Return the prompt's part of the object of `/v1/completions` when it is echoed.

    Offsets are into `echo`; a token that is not in it (a beginning-of-sequence token that
    was added) has no width.
    """
    columns: dict[str, list[Any]] = {
        "text_offset": [],
        "token_logprobs": [],
        "tokens": [],
        "top_logprobs": [],
    }
    data, position, num_chars = echo.encode(), 0, 0
    for token_id, entry in zip(token_ids, entries, strict=True):
        columns["text_offset"].append(num_chars)
        columns["token_logprobs"].append(None if entry is None else entry.logprob)
        columns["tokens"].append(names.text(token_id))
        columns["top_logprobs"].append(None if entry is None else _alternatives(names, entry))
        spelling = names.bytes(token_id)
        for found in (spelling, spelling.lstrip(b" ")):  # a first word may have no space
            if data.startswith(found, position):
                position += len(found)
                num_chars += sum(byte & 0xC0 != 0x80 for byte in found)
                break
    return columns


def joined(first: dict[str, list[Any]], second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the columns of two objects of `/v1/completions`, one after the other."""
    return {name: first[name] + second[name] for name in first}


def chat_logprobs(
    names: TokenNames, entries: Sequence[TokenLogprobs], num_top: int
) -> dict[str, Any]:
    """Return the object of `/v1/chat/completions`: one row per token."""
    return {
        "content": [
            _row(names, entry.token_id, entry.logprob)
            | {
                "top_logprobs": [
                    _row(names, token_id, logprob) for token_id, logprob in entry.top[:num_top]
                ]
            }
            for entry in entries
        ]
    }


def prompt_logprobs(
    names: TokenNames, entries: PromptLogprobs
) -> list[dict[str, dict[str, Any]] | None]:
    """Return vLLM's object: per prompt token, alternatives by token id."""
    return [None if entry is None else _by_id(names, entry) for entry in entries]


def _by_id(names: TokenNames, entry: TokenLogprobs) -> dict[str, dict[str, Any]]:
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [
        (token_id, logprob, rank)
        for rank, (token_id, logprob) in enumerate(entry.top, 1)
        if token_id != entry.token_id
    ]
    return {
        str(token_id): {
            "logprob": logprob,
            "rank": rank,
            "decoded_token": names.text(token_id),
        }
        for token_id, logprob, rank in ranked
    }


def _alternatives(names: TokenNames, entry: TokenLogprobs) -> dict[str, float]:
    """The likeliest tokens, and the one that stands there; the likelier of equal spellings."""
    found: dict[str, float] = {}
    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        found.setdefault(names.text(token_id), logprob)
    return found


def _row(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": names.text(token_id),
        "logprob": logprob,
        "bytes": list(names.bytes(token_id)),
    }
