"""Whether engines that are to exchange KV reach one another's side channels.

Asked of the engines themselves, for they and not the proxy are to connect, and once per pair of
lives: when the later one registers.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.errors import HandshakeError
from pdserve.proxy.errors import WorkerError
from pdserve.wire.hop import REACH_PATH, ReachReport, ReachRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.config.schema import Role
    from pdserve.proxy.backends import Backends
    from pdserve.proxy.client import EngineHttp
    from pdserve.wire.request import EngineInfo
    from pdserve.wire.transfer import Endpoint

_TIMEOUT_S: Final = 1.5
_MAX_PEERS: Final = 8
"""Of the counterparts that are asked: the ways to further ones are like theirs, and after a proxy's
restart a large fleet comes at once."""


class Reach:
    """Asks engines about one another."""

    def __init__(self, backends: Backends, http: EngineHttp) -> None:
        self._backends = backends
        self._http = http

    async def require(self, url: str, role: Role, engine: EngineInfo) -> None:
        """Refuse an engine that one of its counterparts cannot reach, or that cannot reach one.

        An engine that does not answer, having ended or being of another make, proves nothing.

        Raises:
            HandshakeError: The message names both, the address and the remedy.
        """
        peers = [
            (other.url, other.info)
            for other in self._backends.counterparts(url, role)
            if other.info is not None and other.info.endpoints
        ][:_MAX_PEERS]
        if not peers or not engine.endpoints:
            return
        theirs = [info.endpoints[0] for _, info in peers]
        ours, *answers = await asyncio.gather(
            self._ask(url, theirs),
            *(self._ask(peer, engine.endpoints[:1]) for peer, _ in peers),
        )
        for (peer, _), endpoint, answer, reason in zip(
            peers, theirs, answers, ours or [None] * len(peers), strict=True
        ):
            if answer is not None and answer[0] is not None:
                raise HandshakeError(_cannot_reach(peer, url, engine.endpoints[0], answer[0]))
            if answer is not None and reason is not None:  # who answers is alive
                raise HandshakeError(_cannot_reach(url, peer, endpoint, reason))

    async def _ask(self, url: str, endpoints: Sequence[Endpoint]) -> list[str | None] | None:
        """Return why the engine at `url` cannot reach each endpoint; None if it does not say."""
        body = ReachRequest(endpoints=list(endpoints))
        try:
            status, answer = await self._http.order(url, REACH_PATH, body, _TIMEOUT_S)
            reasons = msgspec.json.decode(answer, type=ReachReport).reasons
        except (WorkerError, msgspec.MsgspecError, ValueError):
            return None
        return reasons if status == 200 and len(reasons) == len(endpoints) else None


def _cannot_reach(who: str, whom: str, endpoint: Endpoint, reason: str) -> str:
    return (
        f"{who} cannot reach the address for KV of {whom}, {endpoint.host}:{endpoint.port} "
        f"({reason}): start {whom} with --kv-transfer-config.host and an address that other hosts "
        "reach (left out, it follows --host), and let nothing between them refuse its ports"
    )
