"""What the protocol of one rank stands on. All of it is passed in, and nothing is patched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config.schema import TransferConfig
    from pdserve.connectors.base import ConnectorContext
    from pdserve.connectors.digests import BlockDigests
    from pdserve.connectors.transfer.link import Dialer
    from pdserve.connectors.transfer.mover import Mover
    from pdserve.connectors.transfer.protocol import Process
    from pdserve.observe.clock import Clock


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
    digests: BlockDigests
    background: Background
    processes: Processes
    quarantine_s: float
    piece_bytes: int

    @property
    def transfer(self) -> TransferConfig:
        """The settings of transfers."""
        return self.context.config.transfer
