"""Chooses which connector loads the next part of a prompt. Pure, except for measured rates.

A source that has a token of a prompt has all tokens before it. So the cheapest source of the next
token loads as far as it can; then the next one is chosen in the same way. That is the fastest way
to load everything that any source has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pdserve.connectors.base import Match

_NEWEST: Final = 0.2
"""The weight of the newest measurement in the moving average."""


class LoadPlan(NamedTuple):
    """The next load.

    Attributes:
        parts: Names of connectors and the number of tokens that each loads, in prompt order. There
            are several only inside a step.
        is_async: Whether they are loaded beside the steps.
    """

    parts: list[tuple[str, int]]
    is_async: bool

    @property
    def num_tokens(self) -> int:
        """Tokens of all parts."""
        return sum(num_tokens for _, num_tokens in self.parts)


class Costs:
    """Measured seconds per token of each source; 0 for sources without a measurement."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def observe(self, name: str, num_tokens: int, seconds: float) -> None:
        """Record the time of a load."""
        if num_tokens > 0:
            new = seconds / num_tokens
            self._seconds[name] = new + (1 - _NEWEST) * (self._seconds.get(name, new) - new)

    def cheapest(self, names: Iterable[str]) -> str:
        """Return the cheapest of these; the first one in case of a tie."""
        return min(names, key=lambda name: self._seconds.get(name, 0.0))


def choose(
    matches: Mapping[str, Match], num_behind: Callable[[str, int], int], costs: Costs
) -> LoadPlan:
    """Choose the next load.

    A peer that writes into our blocks will bring everything. Otherwise loads beside the steps come
    first, as a step cannot wait for them. If a load inside the step goes further than they do, it
    covers all of their tokens as well.

    Args:
        matches: What each source has after the tokens that are here.
        num_behind: Returns how many tokens a source can load inside a step after the given number
            of tokens beyond those here.
    """
    found = {name: each for name, each in matches.items() if each.num_tokens > 0}
    for name, each in found.items():
        if each.is_pinned:
            return LoadPlan([(name, each.num_tokens)], is_async=True)
    beside = {name: each.num_tokens for name, each in found.items() if each.is_async}
    inside = {name: each.num_tokens for name, each in found.items() if not each.is_async}
    if beside and max(beside.values()) >= max(inside.values(), default=0):
        name = costs.cheapest(beside)
        return LoadPlan([(name, beside[name])], is_async=True)
    return LoadPlan(_chain(inside, num_behind, costs), is_async=False)


def _chain(
    ends: dict[str, int], num_behind: Callable[[str, int], int], costs: Costs
) -> list[tuple[str, int]]:
    """Return the parts to load inside one step.

    Args:
        ends: How many tokens each source has.
    """
    parts: list[tuple[str, int]] = []
    num_tokens = 0
    while left := [name for name, end in ends.items() if end > num_tokens]:
        name = costs.cheapest(left)
        end = ends.pop(name)
        num_more = num_behind(name, num_tokens) if parts else end
        if num_more > 0:
            parts.append((name, num_more))
            num_tokens += num_more
    return parts
