"""The ranks of D that this rank of P writes to: whose memory it is, met and warmed up once.

A `Destination` is one link to one rank of D. What the mover knows of that rank's memory is kept
between pushes, for wiring up takes milliseconds, and outlives the link until nothing is written to
it any more. It knows neither pushes nor blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.connectors.transfer.protocol import MoverFrame
from pdserve.connectors.transfer.seams import MoverLink

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    import msgspec

    from pdserve.connectors.transfer.protocol import Hello, Region
    from pdserve.connectors.transfer.seams import Mover, Remote


@dataclass(slots=True, eq=False)
class Destination:
    """One rank of D, by its connection.

    Attributes:
        send: Sends it a message; after the connection is lost it does nothing.
        link: The same for the mover.
    """

    hello: Hello
    send: Callable[[msgspec.Struct], None]
    link: MoverLink = field(init=False)

    def __post_init__(self) -> None:
        self.link = MoverLink(
            self.hello.agent_metadata,
            say=lambda body: self.send(MoverFrame(body)),
            exposed=frozenset,  # a D writes nothing
        )

    @property
    def life(self) -> tuple[str, str, int]:
        """Which rank of which life of which engine; equal for all of its connections."""
        return self.hello.engine_id, self.hello.incarnation, self.hello.rank


@dataclass(slots=True, eq=False)
class _Memory:
    """One agent's.

    Attributes:
        connections: Who may write to it again.
        users: Who writes to it.
        waiting: Those of them that were not told yet that they may.
    """

    remote: Remote
    pool: Region
    is_warm: bool = False
    is_warming: bool = False
    connections: set[Destination] = field(default_factory=set)
    users: set[Hashable] = field(default_factory=set)
    waiting: dict[Hashable, Callable[[str | None], None]] = field(default_factory=dict)


class Destinations:
    """What is known of the memory of Ds, by their agents.

    Args:
        mover: What will write there.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._memories: dict[bytes, _Memory] = {}

    def use(
        self,
        destination: Destination,
        user: Hashable,
        on_ready: Callable[[str | None], None],
    ) -> Remote:
        """Meet its memory, and have the mover warm up to it.

        Args:
            user: Until it is `let_go`, and `destination` is `lost`, the memory stays known.
            on_ready: Called once, now or later: None, or why it cannot be written. Not called
                for a user that has let go.
        """
        hello = destination.hello
        memory = self._memories.get(hello.agent_metadata)
        if memory is None:
            remote = self._mover.meet(hello.agent_metadata, hello.pool)
            memory = self._memories[hello.agent_metadata] = _Memory(remote, hello.pool)
        memory.connections.add(destination)
        memory.remote.link = destination.link
        memory.users.add(user)
        if memory.is_warm:
            on_ready(None)
            return memory.remote
        memory.waiting[user] = on_ready
        if not memory.is_warming:
            self._warm_up(memory)
        return memory.remote

    def let_go(self, user: Hashable) -> None:
        """`user` writes nothing more, and nothing of it is in flight. O(memories).

        Its D may have another agent, and so another memory, by now.
        """
        memory = next((each for each in self._memories.values() if user in each.users), None)
        if memory is None:
            return
        memory.users.discard(user)
        memory.waiting.pop(user, None)
        self._forget_if_unused(memory)

    def lost(self, destination: Destination) -> None:
        """A connection is gone: its memory is forgotten, now or when nobody writes to it."""
        memory = self._memories.get(destination.hello.agent_metadata)
        if memory is not None:
            memory.connections.discard(destination)
            self._forget_if_unused(memory)

    def _warm_up(self, memory: _Memory) -> None:
        """Read a little of the pool itself: any of its bytes will do, and nothing is changed."""
        memory.is_warming = True
        self._mover.warm_up(
            memory.remote,
            memory.pool,
            tag=memory,
            on_settled=lambda failure: self._on_warm(memory, failure),
        )

    def _on_warm(self, memory: _Memory, failure: str | None) -> None:
        memory.is_warming = False
        memory.is_warm = failure is None
        waiting, memory.waiting = memory.waiting, {}
        for on_ready in waiting.values():
            on_ready(failure)
        self._forget_if_unused(memory)

    def _forget_if_unused(self, memory: _Memory) -> None:
        key = memory.remote.metadata
        if memory.users or memory.connections or self._memories.get(key) is not memory:
            return
        if memory.is_warming:
            self._mover.abandon(memory)  # it is forgotten when that has been told
            return
        del self._memories[key]
        self._mover.forget(memory.remote)
