"""What a NIXL agent knows of its peers: when it is loaded, loaded again, and forgotten.

It knows no blocks, leases or transfers; its caller says with whom something is in flight.
"""

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
    """An agent's data about a peer.

    Attributes:
        users: Those that have used it and are not forgotten.
    """

    name: str
    users: set[Remote] = field(default_factory=set)
    pool: dict[Region, Prepared] = field(default_factory=dict)


@dataclass(slots=True)
class _Trouble:
    """The last failure of a peer.

    Attributes:
        is_over: Whether its metadata was loaded again since.
    """

    error: AgentError
    since_s: float
    rests_until_s: float
    is_over: bool = False


class KnownPeers:
    """One agent's data about peers: loaded once, and again after failures.

    A peer that is met as P and as D has two `Remote`s of equal metadata, but is one to NIXL. If it
    were removed with the first of them, NIXL would call what is in flight with the other failed,
    and go on moving it.

    Args:
        has_posted: Whether a transfer with a peer is in flight on the agent.
    """

    def __init__(
        self, agent: NixlAgent, has_posted: Callable[[Remote], bool], clock: Clock
    ) -> None:
        self._agent = agent
        self._has_posted = has_posted
        self._clock = clock
        self._known: dict[bytes, _Known] = {}
        self._troubles: dict[bytes, _Trouble] = {}

    def prepared(self, remote: Remote, unit_bytes: int) -> Prepared:
        """The peer's pool, unit by unit, ready for transfers.

        Raises:
            AgentError: It cannot be learned, or rests.
        """
        known = self.learn(remote)
        region = in_units(remote.pool, unit_bytes)
        prepared = known.pool.get(region)
        if prepared is None:
            prepared = known.pool[region] = self._agent.prepare(region, known.name)
        return prepared

    def learn(self, remote: Remote) -> _Known:
        """Return the data about a peer; after a failure it is loaded again.

        Raises:
            AgentError: It cannot be learned, or rests.
        """
        trouble = self._troubles.get(remote.metadata)
        if trouble is not None and not trouble.is_over:
            if self._clock.monotonic_s() < trouble.rests_until_s:
                raise trouble.error
            if not self._has_posted(remote):
                trouble.is_over = True
                self._unlearn(remote)
        known = self._known.get(remote.metadata)
        if known is None:
            known = self._known[remote.metadata] = _Known(self._agent.add_peer(remote.metadata))
        known.users.add(remote)
        return known

    def note_trouble(self, remote: Remote, error: AgentError) -> None:
        """Note a failure with this peer."""
        now_s = self._clock.monotonic_s()
        before = self._troubles.get(remote.metadata)
        if before is not None and not before.is_over:
            return
        rest_s = REST_S if before is not None and now_s - before.since_s < _SOON_S else 0.0
        self._troubles[remote.metadata] = _Trouble(
            error, since_s=now_s, rests_until_s=now_s + rest_s
        )

    def forget(self, remote: Remote) -> None:
        """Forget this peer, which will not be used again."""
        known = self._known.get(remote.metadata)
        if known is not None:
            known.users.discard(remote)
            if known.users:
                return
        self._troubles.pop(remote.metadata, None)
        self._unlearn(remote)

    def _unlearn(self, remote: Remote) -> None:
        """Release everything in the order that NIXL needs: prepared regions, then the agent.

        A refused step does not stop those after it, because an agent that is not removed could
        never be loaded again.
        """
        known = self._known.pop(remote.metadata, None)
        if known is None:
            return
        for forget in (
            *(functools.partial(self._agent.unprepare, each) for each in known.pool.values()),
            functools.partial(self._agent.remove_peer, known.name),
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
    """Return the same memory as a row of units of another size, which divides it."""
    return msgspec.structs.replace(
        pool, stride_bytes=unit_bytes, num_units=pool.num_bytes // unit_bytes
    )
