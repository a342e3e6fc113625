"""Chooses which connector loads what comes next of a prompt. Pure, but for what it has measured.

Who has a token of a prompt has all before it. So what comes next is loaded by the cheapest of those
that have it, as far as that one goes; then it is asked again who is the cheapest. That is the
quickest way to all that is anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pdserve.connectors.base import Match

_NEWEST: Final = 0.2
"""The share that the newest measurement has in what is believed."""


class LoadPlan(NamedTuple):
    """What is loaded next.

    Attributes:
        parts: Connectors, by name, and how many tokens each loads, one behind the other. There are
            several only inside a step.
        is_async: They are loaded beside the steps.
    """

    parts: list[tuple[str, int]]
    is_async: bool

    @property
    def num_tokens(self) -> int:
        """Of all parts."""
        return sum(num_tokens for _, num_tokens in self.parts)


class Costs:
    """Seconds per token of each source, as measured; 0 of what was not measured yet."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def observe(self, name: str, num_tokens: int, seconds: float) -> None:
        """Take a load's time."""
        if num_tokens > 0:
            new = seconds / num_tokens
            self._seconds[name] = new + (1 - _NEWEST) * (self._seconds.get(name, new) - new)

    def cheapest(self, names: Iterable[str]) -> str:
        """The cheapest of these, the first if several are."""
        return min(names, key=lambda name: self._seconds.get(name, 0.0))


def choose(
    matches: Mapping[str, Match], num_behind: Callable[[str, int], int], costs: Costs
) -> LoadPlan:
    """Choose what is loaded next.

    A peer that writes into our blocks is about to bring everything. Else, loads beside the steps
    come first, as a step cannot wait for them; if only a load inside the step goes further, it
    brings all that they have, too.

    Args:
        matches: What each source has behind what is here.
        num_behind: Tokens that a source loads inside a step, behind so many more than are here.
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
    """Parts that are loaded inside one step.

    Args:
        ends: How far each source goes.
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
