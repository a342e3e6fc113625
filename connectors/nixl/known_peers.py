"""What the agent of one lane knows of peers: learned once, learned again after trouble."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from pdserve.connectors.nixl.agent import AgentError
from pdserve.observe.log import log_event

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.connectors.nixl.agent import NixlAgent, Prepared
    from pdserve.connectors.transfer.protocol import Region
    from pdserve.connectors.transfer.seams import Remote
    from pdserve.observe.clock import Clock

_log = logging.getLogger(__name__)

# A peer that fails again within the one rests for the other: each try leaks descriptors in UCX.
_SOON_S = 1.0
REST_S = 0.2


@dataclass(slots=True)
class _Known:
    """What a lane's agent has learned of a peer.

    Attributes:
        pool: Prepared, by size of a unit.
    """

    name: str
    pool: dict[int, Prepared] = field(default_factory=dict)


@dataclass(slots=True)
class _Trouble:
    """How a peer has failed last.

    Attributes:
        is_over: It was learned again since.
    """

    error: AgentError
    since_s: float
    rests_until_s: float
    is_over: bool = False


class KnownPeers:
    """All peers of one lane.

    Args:
        agent: Returns the lane's agent; raises `AgentError` if it has none.
        has_posted: Whether something of a peer is in flight on the lane.
    """

    def __init__(
        self, agent: Callable[[], NixlAgent], has_posted: Callable[[Remote], bool], clock: Clock
    ) -> None:
        self._agent = agent
        self._has_posted = has_posted
        self._clock = clock
        self._known: dict[Remote, _Known] = {}
        self._troubles: dict[Remote, _Trouble] = {}

    def clear(self) -> None:
        """Its agent is gone, and with it all that it knew."""
        self._known.clear()
        self._troubles.clear()

    def prepared(self, remote: Remote, unit_bytes: int) -> Prepared:
        """The peer's pool, unit by unit, ready for transfers.

        Raises:
            AgentError: It cannot be learned, or rests.
        """
        known = self.learn(remote)
        prepared = known.pool.get(unit_bytes)
        if prepared is None:
            region = in_units(remote.pool, unit_bytes)
            prepared = self._agent().prepare_remote(known.name, region)
            known.pool[unit_bytes] = prepared
        return prepared

    def learn(self, remote: Remote) -> _Known:
        """What the agent knows of a peer; one that has failed is learned again.

        Raises:
            AgentError: It cannot be learned, or rests.
        """
        trouble = self._troubles.get(remote)
        if trouble is not None and not trouble.is_over:
            if self._clock.monotonic_s() < trouble.rests_until_s:
                raise trouble.error
            if not self._has_posted(remote):
                trouble.is_over = True
                self._unlearn(remote)
        known = self._known.get(remote)
        if known is None:
            known = self._known[remote] = _Known(self._agent().add_peer(remote.metadata))
        return known

    def note_trouble(self, remote: Remote, error: AgentError) -> None:
        """Something has failed with this peer."""
        now_s = self._clock.monotonic_s()
        before = self._troubles.get(remote)
        if before is not None and not before.is_over:
            return
        rest_s = REST_S if before is not None and now_s - before.since_s < _SOON_S else 0.0
        self._troubles[remote] = _Trouble(error, since_s=now_s, rests_until_s=now_s + rest_s)

    def forget(self, remote: Remote) -> None:
        """Nobody will ask for it again."""
        self._troubles.pop(remote, None)
        self._unlearn(remote)

    def _unlearn(self, remote: Remote) -> None:
        """In the order NIXL needs: prepared regions, the agent.

        A step that is refused stops none after it: an agent that is not removed could never
        be met again.
        """
        known = self._known.pop(remote, None)
        if known is None:
            return
        agent = self._agent()
        for forget in (
            *(functools.partial(agent.unprepare, region) for region in known.pool.values()),
            functools.partial(agent.remove_peer, known.name),
        ):
            try:
                forget()
            except AgentError as error:
                log_event(
                    _log,
                    "kv peer not forgotten",
                    level=logging.WARNING,
                    peer=known.name,
                    reason=error,
                )


def in_units(pool: Region, unit_bytes: int) -> Region:
    """The same memory as a row of units of another size."""
    if pool.num_bytes % unit_bytes:
        raise AgentError(f"units of {unit_bytes} bytes do not fill {pool}")
    return msgspec.structs.replace(
        pool, stride_bytes=unit_bytes, num_units=pool.num_bytes // unit_bytes
    )
