"""Fewer and larger pieces of a stream, for clients that ask for them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from pdserve.server.text_request import Delta


async def spaced(deltas: AsyncIterator[Delta], num_tokens: int) -> AsyncGenerator[Delta, None]:
    """Join the deltas of each choice until they have `num_tokens` tokens.

    A choice's first delta and its last one do not wait.
    """
    begun: set[int] = set()
    held: dict[int, Delta] = {}
    async for delta in deltas:
        index = delta.index
        first = held.pop(index, None)
        if first is not None and _is_turned_round(first, delta):
            yield first
        elif first is not None:
            delta = _joined(first, delta)
        if index in begun and delta.finish_reason is None and len(delta.token_ids) < num_tokens:
            held[index] = delta
            continue
        begun.add(index)
        yield delta


def _is_turned_round(first: Delta, second: Delta) -> bool:
    """Whether one event of both would tell reasoning, text and calls in another order."""
    is_after = bool(second.reasoning) and bool(first.text or first.calls)
    return is_after or (bool(second.text) and bool(first.calls))


def _joined(first: Delta, second: Delta) -> Delta:
    logprobs = second.logprobs
    if first.logprobs is not None and logprobs is not None:
        logprobs = first.logprobs + logprobs
    return replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        offsets=first.offsets + second.offsets,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs,
        reasoning=first.reasoning + second.reasoning,
        calls=[*first.calls, *second.calls],
    )
