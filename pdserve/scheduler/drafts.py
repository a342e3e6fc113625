"""Decides how many draft tokens of each request a step verifies.

One more row makes a step longer for all requests in it, and brings one of them a token if its draft
is right so far. The row pays if the logarithm of that request's tokens per step grows by more than
the logarithm of the step's time, summed over all requests (proportional fairness, Kelly 1997): a
request alone takes every row that raises its speed, a request in a batch only a few.

Knows neither drafts nor tokens: the cost of a row was measured, and the acceptance of a request's
drafts is counted.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_MEMORY: Final = 0.9
"""Factor by which a record decays with each draft: about the last ten count."""
_LONG_MEMORY: Final = 0.97
"""The same for all requests of an engine together: about the last thirty count."""
_HOPE: Final = 0.75
"""Assumed acceptance of drafts until some have been verified."""
_FOUND_WEIGHT: Final = 0.125
_LEVELS: Final = 32
"""Number of acceptance levels."""
TRIAL_INTERVAL: Final = 32
"""Steps between two trials: rows given to a request that would otherwise get none."""
_MAX_TRIAL_INTERVAL: Final = 1024
RARELY: Final = 0.1
"""A request rarely has a draft if it had one in at most this share of its steps."""
_MAX_TABLE: Final = 1 << 14
"""Number of entries in the table of step times by rows."""
DEFAULT_COSTS: Final = ((1, 1.0), (4, 1.05), (16, 1.14), (32, 1.39), (64, 2.0))
"""Default times by rows: bf16 with AMX, measured by `benchmarks/engine`."""


class DraftRecord:
    """Success of a request's drafts. Lasts as long as the request.

    Args:
        acceptance: Expected acceptance before any draft has been verified.
        memory: Factor by which earlier drafts' weight decays with each draft.
        is_predicted: Whether the drafts come from the client's prediction.

    Attributes:
        is_predicted: As given.
        found: Running share of the steps with rows that had a draft.
        num_drafted, num_accepted: Draft tokens verified; those of them that were right.
        level: `acceptance` as a whole number of `_LEVELS`.
        trial_interval: Steps between two trials, in which the request is given a row although that
            does not pay. It doubles with each trial that fails, and is reset by a draft that was
            right.
        spoiled_at: Number of the request's tokens behind which it has no draft, as one may have
            made its values NaN or infinite.
    """

    __slots__ = (
        "_is_on_trial",
        "_memory",
        "_right",
        "_tried",
        "found",
        "is_predicted",
        "level",
        "num_accepted",
        "num_drafted",
        "spoiled_at",
        "trial_interval",
    )

    def __init__(
        self, acceptance: float = _HOPE, memory: float = _MEMORY, *, is_predicted: bool = False
    ) -> None:
        self.is_predicted = is_predicted
        self.found = 1.0
        self.num_drafted = self.num_accepted = 0
        self.spoiled_at: int | None = None
        self.trial_interval = TRIAL_INTERVAL
        self._is_on_trial = False
        self._memory = memory
        self._right, self._tried = 2.0 * acceptance, 2.0
        self.level = round(acceptance * _LEVELS)

    @property
    def acceptance(self) -> float:
        """Recent share of draft tokens that were right, given that those before them were."""
        return self._right / self._tried

    def begin_trial(self) -> None:
        """Note that the next step is a trial."""
        self._is_on_trial = True

    def spoil(self, num_tokens: int) -> None:
        """Note that the request may have no token behind `num_tokens` because of its draft."""
        self.spoiled_at = num_tokens

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """Note a step in which it had rows; one without a draft leaves `acceptance` unchanged."""
        was_on_trial, self._is_on_trial = self._is_on_trial, False
        if not num_drafted:
            self.found -= self.found * _FOUND_WEIGHT
            return
        self.found += (1.0 - self.found) * _FOUND_WEIGHT
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self._right = self._right * self._memory + num_accepted
        self._tried = self._tried * self._memory + num_accepted + (num_accepted < num_drafted)
        self.level = round(self.acceptance * _LEVELS)
        if num_accepted:
            self.trial_interval = TRIAL_INTERVAL
        elif was_on_trial:
            self.trial_interval = min(2 * self.trial_interval, _MAX_TRIAL_INTERVAL)


class DraftHistory:
    """Recent acceptance of an engine's drafts, with which each request begins.

    Drafts from clients' predictions are left out: they say nothing about others.
    """

    def __init__(self) -> None:
        self._record = DraftRecord(memory=_LONG_MEMORY)

    def begin(self, *, has_prediction: bool) -> DraftRecord:
        """Return the record of a request."""
        expected = _HOPE if has_prediction else self._record.acceptance
        return DraftRecord(expected, is_predicted=has_prediction)

    def note(self, record: DraftRecord, num_drafted: int, num_accepted: int) -> None:
        """Note a step in which the request of `record` had rows."""
        record.note(num_drafted, num_accepted)
        if num_drafted and not record.is_predicted:
            self._record.note(num_drafted, num_accepted)


class DraftWish(NamedTuple):
    """A request that could have a draft verified.

    Attributes:
        acceptance, found: See `DraftRecord`.
        max_rows: Maximum tokens of a draft.
    """

    acceptance: float
    found: float
    max_rows: int


class RowBudget:
    """Divides a step's rows among its requests.

    Args:
        costs: Points (number of rows, time of a step in any unit), by rising rows; between and
            beyond them the time is interpolated linearly.
        draft_cost: Time to draft one more token for all requests together, relative to that of a
            step without drafts. 0: drafts cost no time.

    Attributes:
        hopeless: Highest `DraftRecord.level` at which no step has a row for a request.
    """

    def __init__(self, costs: Sequence[tuple[int, float]], draft_cost: float = 0.0) -> None:
        self._logs = _log_costs(costs or DEFAULT_COSTS)
        self._draft_cost = draft_cost
        growths = (after - before for before, after in pairwise(self._logs))
        least = math.log1p(draft_cost) + min(growths)
        self.hopeless = max(
            level for level in range(_LEVELS + 1) if not level or _gains(level, 1)[0] <= least
        )

    def share(self, wishes: Sequence[DraftWish], *, num_rows: int, num_requests: int) -> list[int]:
        """Return how many rows each request gets.

        Args:
            num_rows: Rows of the step without drafts.
            num_requests: Requests in the step, which all wait for its end.
        """
        shares = [0] * len(wishes)
        rows = float(num_rows)
        # Each request adds its share of the time to make all drafts one token longer.
        making = num_requests * math.log1p(self._draft_cost / max(1, num_requests))
        least = making + num_requests * self._growth(rows)
        # A request's gains fall from row to row, so that sorting keeps its rows in order.
        gains = [
            (gain, index)
            for index, wish in enumerate(wishes)
            for gain in _gains(round(wish.acceptance * _LEVELS), wish.max_rows)
            if gain > least
        ]
        gains.sort(reverse=True)
        for gain, index in gains:
            if gain <= making + num_requests * self._growth(rows):
                break
            shares[index] += 1
            rows += wishes[index].found
        return shares

    def _growth(self, rows: float) -> float:
        """Return what one more row adds to the logarithm of the step's time."""
        at = min(int(rows), len(self._logs) - 2)
        return self._logs[at + 1] - self._logs[at]


@lru_cache(maxsize=4096)
def _gains(level: int, max_rows: int) -> tuple[float, ...]:
    """Return what each row adds to the logarithm of a request's expected tokens per step."""
    acceptance = level / _LEVELS
    gains = []
    expected = chance = 1.0
    for _ in range(max_rows):
        chance *= acceptance
        gains.append(math.log1p(chance / expected))
        expected += chance
    return tuple(gains)


def _log_costs(points: Sequence[tuple[int, float]]) -> list[float]:
    """Return the logarithms of the times of steps of 0, 1, 2 ... rows; they never fall."""
    logs: list[float] = []
    (first, cost), *others = points
    logs += [math.log(cost)] * (first + 1)
    slope = 0.0
    for rows, measured in others:
        start, higher = len(logs) - 1, max(cost, measured)
        slope = (higher - cost) / (rows - start)
        logs += [math.log(cost + slope * step) for step in range(1, rows - start + 1)]
        cost = higher
    num_left = max(1, _MAX_TABLE - len(logs))
    logs += [math.log(cost + slope * step) for step in range(1, num_left + 1)]
    return logs
