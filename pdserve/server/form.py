"""What the answers of completions and chat share, and how they are streamed.

Log-probabilities are in the three shapes that the API has for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from pdserve.server.reply import EventStream, hop_events

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from aiohttp import web

    from pdserve.http.protocol import SamplingFields
    from pdserve.server.hop import PromptLogprobs
    from pdserve.server.text_request import Delta, TextRequest
    from pdserve.text.tokenizer import Tokenizer
    from pdserve.wire.sampling import TokenLogprobs


class TokenNames:
    """Names of tokens in log-probabilities.

    Args:
        as_ids: Whether to use ids: several tokens may share a text, and some have none.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        """Return a token's name."""
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token."""
        return self._tokenizer.token_bytes(token_id)


class AnswerForm(ABC):
    """Puts deltas into an endpoint's JSON. Keeps which choices were begun.

    Args:
        may_be_plain: Whether chunks of a choice may differ only in their text.

    Attributes:
        prefix: Prefix of an answer's id.
        kind: Name of a stream's events.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]

    def __init__(
        self,
        body: SamplingFields,
        text_request: TextRequest,
        tokenizer: Tokenizer,
        *,
        may_be_plain: bool,
    ) -> None:
        self._text_request = text_request
        self._tokens = TokenNames(tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._begun = {choice.index for choice in text_request.choices if choice.num_to_swallow}
        self._may_be_plain = may_be_plain and not (body.return_token_ids or body.continuous_usage)

    @abstractmethod
    def chunk(self, delta: Delta) -> dict[str, Any]:
        """Return the stream's event for `delta`."""

    def usage(self, choice_index: int | None = None) -> dict[str, Any]:
        """Return the usage, of one choice if it is given."""
        return self._text_request.usage(choice_index)

    def envelope(self, choices: list[dict[str, Any]], kind: str | None = None) -> dict[str, Any]:
        """Return the object around `choices`; an event of a stream if its kind is not given."""
        return {
            "id": f"{self.prefix}-{self._text_request.request_id}",
            "object": kind or self.kind,
            "created": self._text_request.created,
            "model": self._text_request.model,
            "choices": choices,
        }

    def is_plain(self, delta: Delta) -> bool:
        """Whether its chunk differs from others of its choice only in the text."""
        return self._may_be_plain and delta.is_text_only and delta.index in self._begun


async def stream_answer(
    request: web.Request, body: SamplingFields, text_request: TextRequest, form: AnswerForm
) -> web.StreamResponse:
    """Run the text request to its end, and send its deltas as they come."""
    stream = EventStream(request, text_request)
    async with stream:
        async for delta in spaced(text_request.deltas(), body.stream_interval or 1):
            if form.is_plain(delta):
                await stream.send_text(delta, form.chunk)
                continue
            chunk = form.chunk(delta)
            if body.continuous_usage:
                chunk["usage"] = form.usage(delta.index)
            await stream.send(chunk)
        last = hop_events(request, text_request)
        if body.include_usage and not any(text_request.handoffs):
            last.insert(0, form.envelope([]) | {"usage": form.usage()})
        await stream.end(last)
        text_request.delivered = True
    return stream.response


async def spaced(deltas: AsyncIterator[Delta], num_tokens: int) -> AsyncGenerator[Delta, None]:
    """Join the deltas of each choice until they have `num_tokens` tokens.

    A choice's first delta and its last one do not wait.
    """
    begun: set[int] = set()
    held: dict[int, Delta] = {}
    async for delta in deltas:
        index = delta.index
        if not held and index in begun and len(delta.token_ids) >= num_tokens:
            yield delta
            continue
        first = held.pop(index, None)
        if first is not None and _is_before(delta, first):
            yield first
        elif first is not None:
            delta = as_one([first, delta])
        if index in begun and delta.finish_reason is None and len(delta.token_ids) < num_tokens:
            held[index] = delta
            continue
        begun.add(index)
        yield delta


def _is_before(delta: Delta, other: Delta) -> bool:
    """Whether a choice has a delta's reasoning, text or calls before another's, once joined."""
    return 0 < _place(delta) < _place(other)


def _place(delta: Delta) -> int:
    """Return the place of a delta's last part in a choice; 0 if it has none."""
    return 3 if delta.calls else 2 if delta.text else 1 if delta.reasoning else 0


async def whole_choices(text_request: TextRequest) -> list[list[Delta]]:
    """Run the text request to its end; return all that each choice has, in order of index.

    It is one delta, or more where one would change the order of reasoning, text and calls, or would
    no longer say whose log-probabilities it has.
    """
    deltas: dict[int, list[Delta]] = {}
    async for delta in text_request.deltas():
        deltas.setdefault(delta.index, []).append(delta)
    return [_joined(deltas[index]) for index in sorted(deltas)]


def _joined(deltas: Sequence[Delta]) -> list[Delta]:
    """Return consecutive deltas of a choice; see `whole_choices`."""
    parts: list[list[Delta]] = [[]]
    last = 0
    for delta in deltas:
        place = _place(delta) or last
        if last and (place < last or (place > last and delta.logprobs is not None)):
            parts.append([])
        parts[-1].append(delta)
        last = place
    return [as_one(part) for part in parts]


def as_one(deltas: Sequence[Delta]) -> Delta:
    """Return consecutive deltas of a choice as one."""
    scored = [each.logprobs for each in deltas if each.logprobs is not None]
    return msgspec.structs.replace(
        deltas[-1],
        text="".join([each.text for each in deltas]),
        token_ids=[token_id for each in deltas for token_id in each.token_ids],
        offsets=[offset for each in deltas for offset in each.offsets],
        logprobs=[entry for entries in scored for entry in entries] if scored else None,
        prompt_logprobs=deltas[0].prompt_logprobs,
        reasoning="".join([each.reasoning for each in deltas]),
        calls=[call for each in deltas for call in each.calls],
    )


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


def likeliest(entries: PromptLogprobs, num_top: int) -> PromptLogprobs:
    """Return `entries` with at most `num_top` alternatives each."""
    return [
        None if entry is None else msgspec.structs.replace(entry, top=entry.top[:num_top])
        for entry in entries
    ]


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
            "decoded_token": names.bytes(token_id).decode(errors="replace"),
        }
        for token_id, logprob, rank in ranked
    }


def _alternatives(names: TokenNames, entry: TokenLogprobs) -> dict[str, float]:
    """Return the likeliest tokens and the actual one; the likelier of equal spellings."""
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
