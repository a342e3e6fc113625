"""How long a peer that could not be met is left alone: twice as long each time. Pure."""

from __future__ import annotations

from pdserve.wire.transfer import LoadFailure

MIN_REST_S, MAX_REST_S = 1.0, 60.0


class BackOff:
    """One peer's.

    Attributes:
        until_s: It is not tried before this time (monotonic seconds).
    """

    def __init__(self) -> None:
        self.until_s = 0.0
        self._rest_s = 0.0
        self._why = (LoadFailure.PEER_LOST, "")

    def begin(self, reason: LoadFailure, detail: str, now_s: float) -> None:
        """Leave it alone; who comes meanwhile is turned away for this reason."""
        self._why = (reason, detail)
        self._rest_s = min(MAX_REST_S, max(MIN_REST_S, 2 * self._rest_s))
        self.until_s = now_s + self._rest_s

    def why(self, now_s: float) -> tuple[LoadFailure, str] | None:
        """Why it is left alone now, and for how long; None = it is not."""
        wait_s = self.until_s - now_s
        reason, detail = self._why
        return (reason, f"{detail}; next try in {wait_s:.1f} s") if wait_s > 0 else None

    def reset(self) -> None:
        """It was met: the next time it rests for the shortest time again."""
        self._rest_s = 0.0
