"""When which fault strikes: drawn from a seed, or written down.

Pure. It knows the kinds of faults and counts opportunities; what a fault does is `worker`'s.
"""

from __future__ import annotations

import enum
import random
from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

MAX_POLLS_LATE: Final = 6


class FaultKind(enum.Enum):
    """What can go wrong; the table of what each one does is the package's."""

    DROP = "drop"
    DELAY = "delay"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    TRUNCATE = "truncate"
    CORRUPT = "corrupt"
    REPLAY = "replay"
    LATE_REPORT = "late_report"
    REPEAT_REPORT = "repeat_report"
    REPLAY_REPORT = "replay_report"
    LATE_FRAME = "late_frame"
    LOST_LINK = "lost_link"
    LATE_COPY = "late_copy"


class Plan:
    """Says at each opportunity whether a fault strikes.

    The same seed and the same order of questions give the same answers.

    Args:
        rates: Share of the opportunities of a kind at which it strikes, 0 to 1.
        script: Further opportunities at which it does, counted from 0 for each kind.

    Attributes:
        num_struck: Faults so far.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        rates: Mapping[FaultKind, float] | None = None,
        script: Mapping[FaultKind, Collection[int]] | None = None,
    ) -> None:
        self._rng = random.Random(seed)
        self._rates = dict(rates or {})
        self._script = {kind: frozenset(places) for kind, places in (script or {}).items()}
        self._asked: Counter[FaultKind] = Counter()
        self.num_struck: Counter[FaultKind] = Counter()

    def strikes(self, kind: FaultKind) -> bool:
        """Whether `kind` strikes now; an opportunity is over once it was asked about."""
        place = self._asked[kind]
        self._asked[kind] += 1
        rate = self._rates.get(kind, 0.0)
        struck = place in self._script.get(kind, ()) or (rate > 0 and self._rng.random() < rate)
        self.num_struck[kind] += struck
        return struck

    def below(self, number: int) -> int:
        """A choice among `number` things."""
        return self._rng.randrange(number)

    def shuffled(self, number: int) -> list[int]:
        """An order of `number` things."""
        return self._rng.sample(range(number), number)

    def quiet(self) -> None:
        """Let nothing strike any more, drawn or written down."""
        self._rates.clear()
        self._script.clear()
