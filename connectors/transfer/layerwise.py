"""Whether a pushed chunk is written layer by layer inside its step, or whole after it.

Layer by layer, almost nothing is left to write when the step ends, but each layer costs a post
beside the computation, which short steps cannot hide. Where the one overtakes the other depends
on the machine, the transport and the model; so it is learned, per doubling of the step's tokens,
from what is measured: seconds of the step plus seconds until its last byte was written.

Pure: it knows no clock, no tensor and no thread. It is deterministic: what it has seen, in
order, decides what it answers.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

# Where nothing was measured yet: about the length at which it pays on machines that were tried.
_FIRST_GUESS_TOKENS = 256
# Both ways are tried so often before they are compared, and the worse one now and then after.
_MIN_SAMPLES = 3
_EXPLORE_EVERY = 16
_REMEMBERED = 9


@dataclass(slots=True)
class _Bucket:
    """Steps of about one length: seconds per token by whether it went layer by layer."""

    num_chosen: int = 0
    costs: dict[bool, deque[float]] = field(
        default_factory=lambda: {way: deque(maxlen=_REMEMBERED) for way in (True, False)}
    )


class LayerwiseChoice:
    """The learned threshold."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}

    def choose(self, num_step_tokens: int) -> bool:
        """Whether the next step of so many tokens is to be written layer by layer.

        Until both ways were measured it takes them in turn; then the cheaper one, and the
        other one in every sixteenth step, because machines change.

        Args:
            num_step_tokens: Of all requests together; at least 1.
        """
        bucket = self._bucket(num_step_tokens)
        bucket.num_chosen += 1
        best = self.is_better(num_step_tokens)
        if any(len(costs) < _MIN_SAMPLES for costs in bucket.costs.values()):
            return best if bucket.num_chosen % 2 else not best
        return best if bucket.num_chosen % _EXPLORE_EVERY else not best

    def observe(
        self, num_step_tokens: int, *, layerwise: bool, step_s: float, exposed_s: float
    ) -> None:
        """Learn what a step has cost.

        Args:
            step_s: From the step's begin to the end of its computation.
            exposed_s: From there to the last byte written.
        """
        costs = self._bucket(num_step_tokens).costs[layerwise]
        costs.append((step_s + exposed_s) / max(1, num_step_tokens))

    def is_better(self, num_step_tokens: int) -> bool:
        """Whether layer by layer is the cheaper way at this length, as far as is known."""
        costs = self._bucket(num_step_tokens).costs
        if min(len(seen) for seen in costs.values()) == 0:
            return num_step_tokens >= _FIRST_GUESS_TOKENS
        # The median: one step in which the machine was busy elsewhere must not decide.
        return statistics.median(costs[True]) < statistics.median(costs[False])

    def _bucket(self, num_step_tokens: int) -> _Bucket:
        return self._buckets.setdefault(max(1, num_step_tokens).bit_length(), _Bucket())
