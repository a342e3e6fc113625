"""Goes on with a stream that its engine has ended with a handoff, on another engine.

The handoff has all tokens so far, and a lease on their KV: whoever reads that goes on where the
stream stopped, and sends nothing that the client has. If nobody can read it, the stream is begun
again elsewhere (`replay`), as if its engine had been drained without being asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from aiohttp import web

from pdserve.proxy.errors import DrainedError, MovedError, WorkerError
from pdserve.proxy.handoff import Handoff
from pdserve.proxy.leg_failure import LegFailure
from pdserve.proxy.strategies import read

if TYPE_CHECKING:
    from pdserve.proxy.legs import Legs
    from pdserve.proxy.services import Services
    from pdserve.proxy.setbacks import Setbacks

T = TypeVar("T")


class Moves:
    """The moves of one request from engine to engine."""

    def __init__(self, services: Services, legs: Legs, setbacks: Setbacks) -> None:
        self._http = services.http
        self._router = services.router
        self._metrics = services.metrics
        self._legs = legs
        self._setbacks = setbacks

    async def follow(self, outcome: T) -> T | web.StreamResponse | LegFailure:
        """Go on for as long as an engine gives the stream away.

        Args:
            outcome: Of a leg; one that tells of no handoff is returned as it is.

        Returns:
            What became of it at last: the failure of a drained engine if nobody could go on.
        """
        found: T | web.StreamResponse | LegFailure = outcome
        while isinstance(found, LegFailure) and isinstance(found.error, MovedError):
            found = await self._follow(found, found.error.handoff)
        return found

    async def _follow(self, moved: LegFailure, data: bytes) -> web.StreamResponse | LegFailure:
        source, failed = moved.backend, self._setbacks.failed
        given_up = LegFailure(moved.leg, source, DrainedError(source.url))
        with Handoff(source, self._http, self._metrics, self._legs.story) as handoff:
            try:
                handoff.read(data)
            except WorkerError as error:
                return LegFailure(moved.leg, source, error)
            handoff.complete()
            prompt, without = self._legs.prompt, {source, *failed}
            target = self._router.decode_for(source, prompt, failed, without=without)
            outcome = given_up if target is None else await read(self._legs, target, handoff)
            if not isinstance(outcome, LegFailure) or outcome.is_moved:
                handoff.spend()
                self._metrics.migrations.labels("drain", "moved").inc()
                return outcome
        self._metrics.migrations.labels("drain", "failed").inc()
        if outcome is not given_up:
            await self._setbacks.add(outcome)
        return given_up
