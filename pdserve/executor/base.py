"""The interfaces of an executor: to the engine core, and to what carries frames to its ranks.

The core submits steps, and their results come back in the same order. Messages between the
halves of connectors travel beside the steps and wait for none. Only the executor knows how many
ranks there are, and where.

A `Hub` is the engine core's end, a `Link` is one rank's. Both carry bytes without knowing their
meaning. Starting ranks, and noticing that one has ended, is another interface:
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
    """A rank has failed or ended; the message names the rank, the cause and the current work."""


class Executor(Protocol):
    """Runs steps on the ranks of one engine."""

    @property
    def max_in_flight(self) -> int:
        """Steps that may be submitted before the oldest has come back; may vary between steps."""
        ...

    @property
    def wake_fds(self) -> list[int]:
        """File descriptors that become readable when `poll_result` or `poll_report` has news."""
        ...

    def start(self) -> list[WorkerInfo]:
        """Load the model on every rank and return the ranks' infos, in rank order.

        Raises:
            ConfigError: The model, the device or the memory cannot be used as configured.
            RankDiedError: A rank ended for another reason.
        """
        ...

    def submit(self, step: SchedulerOutput) -> None:
        """Hand a step to the ranks. Work that need not delay its answer is done after it.

        Raises:
            RankDiedError: A rank ended; nothing more will come.
        """
        ...

    def post(self, metadata: ConnectorMetadata) -> None:
        """Give every rank's connector instructions at once, also while steps run.

        A step submitted later does not begin before they have been taken.

        Raises:
            RankDiedError: A rank ended; nothing more will come.
        """
        ...

    def ask_for_slices(self) -> bool:
        """Ask the ranks to report their recent work soon, for a trace.

        Returns:
            Whether they will report: a single rank in the core's process does not.

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
        """Return a report of the connectors of all ranks, if there is one. Never blocks.

        Raises:
            RankDiedError: A rank ended; nothing more will come.
        """
        ...

    def close(self, timeout_s: float) -> None:
        """End every rank within `timeout_s`; kill those left after that. Idempotent."""
        ...


class Hub(Protocol):
    """The core's end of the links to all ranks of an engine."""

    def wake_on(self, waiter: Waiter) -> None:
        """Make `waiter` wake when `receive` or `lost` has something."""
        ...

    def broadcast(self, frame: bytes, *, on_full: Callable[[], None]) -> None:
        """Send a frame to every rank.

        Args:
            on_full: Called repeatedly while a rank has no room; it must `receive`, and
                may raise to give up.
        """
        ...

    def receive(self) -> tuple[int, bytes] | None:
        """Return the next frame of any rank, with that rank. Never blocks."""
        ...

    def lost(self) -> dict[int, str]:
        """Return ranks that the transport can no longer reach, with the reasons."""
        ...

    def has_heard_out(self, rank: int) -> bool:
        """Return whether everything that a rank sent before it ended can be received now."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class Link(Protocol):
    """A rank's end. One thread calls it, except for `interrupt`."""

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
        """Make `recv` return. From any thread, also after `close`."""
        ...

    def close(self) -> None:
        """Release everything once all sent frames are on their way."""
        ...
