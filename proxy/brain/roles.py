"""Decides how many engines for both prefer prompts, from the mix of the load. Pure.

A home role is a bias: an engine takes other work where that costs less (`decision`), so a change
needs no drain. Prompts keep prefill engines busy for a share of the time, and output tokens have
decode engines step at a pace that follows from their streams:

    share = prompts' seconds per second / prefill engines
    itl   = d0 / (1 - r (d1 + d2 k)),  with r tokens per second and engine, k of KV per stream

An engine changes its home if that lowers the worse of both, each relative to its limit, by 15 %,
three times in a row. One engine changes at a time; each role keeps one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from pdserve.proxy.brain.work import ServiceTimes

INTERVAL_S: Final = 10.0
DWELL_S: Final = 60.0
"""For how long an engine that has changed its home keeps it."""
NUM_INTERVALS: Final = 3
_MIN_GAIN: Final = 0.15
_MAX_SHARE: Final = 0.8
"""Of the time that prefill engines may be busy: beyond that prompts wait for one another."""
_FULL: Final = 0.99
"""Of what engines can give at most: the pace is taken to grow in proportion from there on."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """The demand on engines in an interval.

    Attributes:
        prompt_engines: Number of engines that the arriving prompts would keep busy.
        tokens_per_s: Output tokens per second.
        kv_tokens: Mean KV of a stream, in tokens.
    """

    prompt_engines: float
    tokens_per_s: float
    kv_tokens: float


class HomeBounds(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of engines.

    Attributes:
        num_both: Engines that do both; the others have a fixed role.
    """

    num_prefill: int
    num_decode: int
    num_both: int

    @property
    def lowest(self) -> int:
        """The minimum of engines for both that prefer prompts."""
        return min(self.num_both, 0 if self.num_prefill else 1)

    @property
    def highest(self) -> int:
        """The maximum of them; below `lowest` if there is only one engine."""
        return self.num_both if self.num_decode else self.num_both - 1

    @property
    def has_choice(self) -> bool:
        """Whether engines can have homes, as there is one for each role."""
        return self.num_both > 0 and self.lowest <= self.highest

    def nearest(self, share: float) -> int:
        """Return the number of engines for both that is nearest to a share, within bounds."""
        return min(self.highest, max(self.lowest, round(share * self.num_both)))


class HomeLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load that a demand means for given numbers of engines of each home.

    Attributes:
        prefill_share: Share of the time that prefill engines compute prompts.
        itl_s: Time between two tokens of a stream.
        worst: The worse of both, relative to its limit.
    """

    num_prefill: int
    num_decode: int
    prefill_share: float
    itl_s: float
    worst: float

    def in_words(self) -> str:
        """Return it in words."""
        return (
            f"{self.num_prefill}P+{self.num_decode}D: prefill {self.prefill_share:.0%} busy, "
            f"itl {self.itl_s * 1e3:.1f} ms"
        )


class HomeLook(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a look at an interval.

    Attributes:
        at_s: Unix time.
        better: Load with one more or one fewer engine for prompts; None: neither is better.
        num_in_row: Looks in a row that found this change better; it is made at the third.
        is_made: Whether the change is made.
    """

    at_s: float
    demand: Demand
    now: HomeLoad
    better: HomeLoad | None
    num_in_row: int
    is_made: bool


class HomesShown(msgspec.Struct, frozen=True, kw_only=True):
    """The engines' home roles.

    Attributes:
        engines: Their home roles, by URL.
        looks: The last looks, the newest first.
    """

    engines: dict[str, str] = {}
    looks: list[HomeLook] = []


def load_of(
    demand: Demand, times: ServiceTimes, bounds: HomeBounds, num_home: int, itl_slo_s: float
) -> HomeLoad:
    """Return the load that engines would have.

    Args:
        num_home: Engines for both that prefer prompts.
    """
    num_prefill = bounds.num_prefill + num_home
    num_decode = bounds.num_decode + bounds.num_both - num_home
    share = demand.prompt_engines / num_prefill
    constant, each_stream, each_token = times.step
    each_s = each_stream + each_token * demand.kv_tokens
    busy = demand.tokens_per_s / num_decode * each_s
    itl_s = constant / (1 - min(busy, _FULL)) * max(1.0, busy / _FULL)
    return HomeLoad(
        num_prefill=num_prefill,
        num_decode=num_decode,
        prefill_share=share,
        itl_s=itl_s,
        worst=max(share / _MAX_SHARE, itl_s / itl_slo_s),
    )


class HomeControl:
    """Decides at the end of each interval.

    Args:
        itl_slo_s: Limit on the time between tokens.

    Attributes:
        share: Share of the engines for both that prefer prompts.
    """

    def __init__(self, itl_slo_s: float) -> None:
        self._itl_slo_s = itl_slo_s
        self._direction = self._num_in_row = 0
        self._last = 0, float("-inf")
        self.share = 0.5

    def look(
        self, demand: Demand, times: ServiceTimes, bounds: HomeBounds, *, now_s: float, at_s: float
    ) -> HomeLook:
        """Judge an interval; make a change that was better for long enough.

        Args:
            now_s: Monotonic seconds.
            at_s: Unix time.
        """
        num = bounds.nearest(self.share)
        now = load_of(demand, times, bounds, num, self._itl_slo_s)
        better: HomeLoad | None = None
        direction = 0
        for step in (-1, 1):
            if bounds.lowest <= num + step <= bounds.highest and not self._dwells(step, now_s):
                load = load_of(demand, times, bounds, num + step, self._itl_slo_s)
                if load.worst < (better or now).worst * (1 if better else 1 - _MIN_GAIN):
                    better, direction = load, step
        if better is None or direction != self._direction:
            self._num_in_row = 0
        if better is not None:
            self._num_in_row += 1
        self._direction = direction
        num_in_row, is_made = self._num_in_row, self._num_in_row >= NUM_INTERVALS
        if is_made:
            self.share = (num + direction) / bounds.num_both
            self._last, self._num_in_row = (direction, now_s), 0
        return HomeLook(
            at_s=at_s,
            demand=demand,
            now=now,
            better=better,
            num_in_row=num_in_row,
            is_made=is_made,
        )

    def interrupt(self) -> None:
        """Forget earlier findings, as an interval passed without evidence."""
        self._direction = self._num_in_row = 0

    def _dwells(self, step: int, now_s: float) -> bool:
        """Return whether this would undo a change that was just made."""
        direction, made_s = self._last
        return step == -direction and now_s - made_s < DWELL_S
