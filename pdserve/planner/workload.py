"""Turns a benchmark's plan into requests for engines in virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import ConfigError
from pdserve.planner.work import Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.bench.records import Planned
    from pdserve.text.tokenizer import Tokenizer


def workload_of(requests: Sequence[Planned], tokenizer: Tokenizer) -> list[Work]:
    """Return scheduled requests as work: as long, as alike, at the same times.

    Raises:
        ConfigError: All of them are due at once, which is no load that lasts.
    """
    place_of = {each.index: place for place, each in enumerate(requests)}
    if len(requests) > 1 and not any(each.at_s for each in requests):
        raise ConfigError(
            "all requests arrive at once: give --request-rate RPS, or use a data set that has "
            "arrival times (--dataset-name trace)",
            param="request-rate",
        )
    return [
        Work(
            at_s=each.at_s or 0.0,
            prompt=_tokens(each, tokenizer),
            num_output=each.max_tokens,
            after=None if each.after is None else place_of[each.after],
            delay_s=each.delay_s,
        )
        for each in requests
    ]


def _tokens(request: Planned, tokenizer: Tokenizer) -> list[int]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return [token for token in prompt if isinstance(token, int)]
