"""What the protocol of one rank stands on. All of it is passed in, and nothing is patched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.config.schema import TransferConfig
    from pdserve.connectors.base import ConnectorContext
    from pdserve.connectors.slicing import Route
    from pdserve.connectors.transfer.link import Dialer
    from pdserve.connectors.transfer.mover import Mover
    from pdserve.connectors.transfer.protocol import Process
    from pdserve.observe.clock import Clock
    from pdserve.wire.ids import BlockId
    from pdserve.wire.transfer import KVShape


class Digests(Protocol):
    """What this rank's blocks hold, in numbers that both sides can take (`connectors.digests`)."""

    def take(
        self,
        block_ids: Sequence[BlockId],
        generations: Sequence[int],
        num_tokens: int,
        *,
        first_token: int = 0,
        num_layers: int | None = None,
    ) -> None:
        """At P: compute what is not known. For any thread; heavy."""

    def of(
        self,
        block_ids: Sequence[BlockId],
        generations: Sequence[int],
        num_tokens: int,
        route: Route,
        *,
        first_token: int = 0,
    ) -> bytes:
        """At P: what D must find on a route."""
        ...

    def found(
        self,
        source: KVShape,
        route: Route,
        block_ids: Sequence[BlockId],
        *,
        first_token: int,
        num_tokens: int,
    ) -> bytes:
        """At D: what has come over a route. For any thread; heavy."""
        ...


class Background(Protocol):
    """Does heavy work beside the protocol, in its order."""

    def submit(self, work: Callable[[], Callable[[], None]], request_id: str) -> None:
        """Do `work` for a request; later call what it returns, in the protocol's thread."""


class Processes(Protocol):
    """Peers' processes, as far as this one can see them."""

    @property
    def this(self) -> Process:
        """How this one introduces itself."""
        ...

    def writes_directly(self, process: Process) -> bool:
        """Whether it may write here whatever this side's mover does, a fence included."""
        ...

    def is_alive(self, process: Process) -> bool:
        """Whether it still runs, in any of its threads, or cannot be seen to."""
        ...


@dataclass(frozen=True, slots=True)
class Seams:
    """See the module.

    Attributes:
        context: This engine and rank.
        quarantine_s: How long what may still land waits for others that a fence would end, too.
        piece_bytes: Transfers are cut into jobs of about so many bytes.
    """

    context: ConnectorContext
    clock: Clock
    dialer: Dialer
    mover: Mover
    digests: Digests
    background: Background
    processes: Processes
    quarantine_s: float
    piece_bytes: int

    @property
    def transfer(self) -> TransferConfig:
        """The settings of transfers."""
        return self.context.config.transfer
