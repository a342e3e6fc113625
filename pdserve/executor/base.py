"""The interfaces of an executor: to the engine core, and to what carries frames to its ranks.

The core submits steps, and their results come back in the same order. What connectors say to
one another goes beside the steps and waits for none. How many ranks there are, and where, is
the executor's own matter.

A `Hub` is the engine core's end, a `Link` is one rank's. Both carry bytes and know nothing of
what they say. Who starts a rank, and who notices that it has ended, is another seam:
`pdserve.executor.ranked.Ranks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pdserve.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.executor.channel import Waiter
    from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput
    from pdserve.wire.transfer import ConnectorMetadata, ConnectorReport
    from pdserve.worker.info import WorkerInfo


class RankDiedError(InternalError):
    """A rank has failed or ended; the message says which, how, and what it was doing."""


class Executor(Protocol):
    """Runs steps on the ranks of one engine."""

    @property
    def max_in_flight(self) -> int:
        """Steps that may be submitted before the oldest has come back; may change with each."""
        ...

    @property
    def wake_fds(self) -> list[int]:
        """File descriptors that become readable when `poll_result` or `poll_report` has news."""
        ...

    def start(self) -> list[WorkerInfo]:
        """Load the model on every rank and return what each says of itself, in rank order.

        Raises:
            ConfigError: The model, the device or the memory cannot be used as asked.
            RankDiedError: A rank ended for another reason.
        """
        ...

    def submit(self, step: SchedulerOutput) -> None:
        """Hand a step to the ranks. Work that its answer need not wait for is done after it.

        Raises:
            RankDiedError: A rank ended; nothing more will come.
        """
        ...

    def post(self, metadata: ConnectorMetadata) -> None:
        """Give every rank's connector instructions at once, also while steps run.

        A step that is submitted later does not begin before they were taken.

        Raises:
            RankDiedError: A rank ended; nothing more will come.
        """
        ...

    def ask_for_slices(self) -> bool:
        """Have the ranks report soon what they did, for a trace.

        Returns:
            Whether they have anything to say: one rank alone has not.

        Raises:
            RankDiedError: A rank ended; nothing more will come.
        """
        ...

    def poll_result(self) -> ModelRunnerOutput | None:
        """Return the result of the oldest submitted step, if it has come back. Never blocks.

        Raises:
            RankDiedError: A rank ended; nothing more will come.
        """
        ...

    def poll_report(self) -> ConnectorReport | None:
        """Return what the connectors of all ranks have reported, if anything. Never blocks.

        Raises:
            RankDiedError: A rank ended; nothing more will come.
        """
        ...

    def close(self, timeout_s: float) -> None:
        """End every rank within `timeout_s`; what is left then is killed. Idempotent."""
        ...


class Hub(Protocol):
    """The core's end of the links to all ranks of an engine."""

    def wake_on(self, waiter: Waiter) -> None:
        """Let `waiter` wake when `receive` or `lost` has something."""
        ...

    def broadcast(self, frame: bytes, *, on_full: Callable[[], None]) -> None:
        """Send a frame to every rank.

        Args:
            on_full: Called again and again while a rank has no room; it must `receive`, and
                may raise to give up.
        """
        ...

    def receive(self) -> tuple[int, bytes] | None:
        """The next frame of any rank, and whose it is. Never blocks."""
        ...

    def lost(self) -> dict[int, str]:
        """Ranks that can no longer be reached, as far as the transport knows, and why."""
        ...

    def has_heard_out(self, rank: int) -> bool:
        """Whether everything that a rank sent before it ended can be received by now."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class Link(Protocol):
    """A rank's end. One thread calls it, but for `interrupt`."""

    def recv(self) -> bytes | None:
        """Wait for the next frame. None = `interrupt` was called, and no frame was there.

        Raises:
            ChannelClosedError: The core cannot be reached any more.
        """
        ...

    def send(self, frame: bytes) -> None:
        """Send a frame to the core."""
        ...

    def interrupt(self) -> None:
        """Let `recv` return. From any thread, also after `close`."""
        ...

    def close(self) -> None:
        """Let go of everything once what was sent is on its way."""
        ...
