"""The transfer thread: runs the transfer protocol of one rank beside its steps.

It owns the side channel and the mover, and is the only thread that touches them, or the protocol.
The worker's thread hands it instructions and takes facts, through two small locked boxes. While a
peer's transport needs help it drives its mover; else it sleeps in the kernel until a socket, a
deadline, the mover or an instruction wakes it, and costs nothing.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch

from pdserve.connectors.digests import BlockDigests
from pdserve.connectors.handover.instructions import Instructions
from pdserve.connectors.side_channel.channel import Listener, SideChannel
from pdserve.connectors.side_channel.reactor import Reactor
from pdserve.connectors.slicing import routes_to
from pdserve.connectors.transfer.machine import TransferMachine
from pdserve.connectors.transfer.seams import Mover, Seams
from pdserve.errors import InternalError
from pdserve.observe.log import log_event
from pdserve.observe.trace import CLOCK_ID
from pdserve.wire.ids import BlockId
from pdserve.wire.trace import RankSlice
from pdserve.wire.transfer import ConnectorReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.connectors.base import ConnectorContext
    from pdserve.connectors.transfer.pushes import ChunkStep, Observation
    from pdserve.connectors.transfer.seams import Processes
    from pdserve.observe.clock import Clock
    from pdserve.wire.transfer import ConnectorMetadata, Endpoint

_log = logging.getLogger(__name__)

# Small enough to be in the last-level cache when digested, and for all lanes to work on one
# load; large enough to hide the 50 us of a post.
PIECE_BYTES = 8 << 20
# A GPU digests this in 30 us; the launch takes the host ten times as long.
DEVICE_PIECE_BYTES = 64 << 20

# Kept for the next report: some seconds of pieces, about 2 MB.
_MAX_SLICES = 8192
_POLL_S = 0.0003
_START_TIMEOUT_S = 60.0
_HELPERS_CLOSE_S = 2.0
# A load takes the interpreter lock some eight times. A main thread that is busy in Python
# gives it up only after the switch interval: at 5 ms, Python's own, a hand-over takes 43 ms.
_SWITCH_INTERVAL_S = 0.0005
_PAGE_BYTES = 4096


class ThreadMover(Mover, Protocol):
    """A mover that a transfer thread drives; its methods belong to that thread."""

    @property
    def due_s(self) -> float:
        """When `tick` has to be called next; inf = never."""
        ...

    @property
    def why_fence(self) -> str:
        """Why all peers must be cut off now; empty if they need not be."""
        ...

    @property
    def processes(self) -> Processes:
        """Peers' processes, as far as its transports matter."""
        ...

    def start(self) -> None:
        """Start, in the thread that the mover will belong to.

        Raises:
            ConfigError: Something that it depends on cannot be loaded.
        """

    def tick(self) -> None:
        """Do what is due."""

    def drive(self) -> None:
        """Make progress for what peers do here."""

    def may_wait(self) -> bool:
        """Whether nothing is left to do until the reactor has something."""
        ...

    def deliver(self) -> bool:
        """Call back for what happened; return whether anything did."""
        ...

    def take_faults(self) -> Counter[str]:
        """What should stay rare, by name, since the last call."""
        ...

    def close(self, timeout_s: float) -> bool:
        """End everything; return whether that was done in time."""
        ...


class TransferThread:
    """Moves KV for one rank. A `Runner`.

    Args:
        kv: `[num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]`, contiguous.
        wake: Called from the thread when `take_report` has news.
        make_mover: Called with the numeric address that the side channel is bound to, and with the
            thread's event loop.

    It lowers the interpreter's switch interval, for the whole process.

    Raises:
        ConfigError: The mover cannot be loaded, or the side channel cannot be bound.
    """

    def __init__(
        self,
        context: ConnectorContext,
        *,
        kv: torch.Tensor,
        wake: Callable[[], None],
        clock: Clock,
        make_mover: Callable[[str, Reactor], ThreadMover],
    ) -> None:
        layout = context.layout
        if not kv.is_contiguous() or kv.numel() * kv.element_size() != (
            layout.num_blocks * layout.block_bytes
        ):
            raise InternalError(f"KV memory of shape {tuple(kv.shape)} is not laid out as {layout}")
        _touch(kv)
        digests = BlockDigests(kv, context.shape, context.rank)
        _take_one(digests, context)
        transfer = context.config.transfer
        self._context = context
        self._wake = wake
        self._clock = clock
        self._inbox: deque[ConnectorMetadata] = deque()
        self._steps: deque[ChunkStep] = deque()
        self._lock = threading.Lock()
        self._report = ConnectorReport()
        self._stop_at_s: float | None = None
        self._death: BaseException | None = None
        self._is_closed = False
        self._listener = Listener(
            transfer.host, transfer.port + context.rank if transfer.port else 0
        )
        self._reactor = Reactor()
        self._side_channel = SideChannel(self._reactor, transfer.secret.encode())
        self._mover = make_mover(self._listener.endpoint.host, self._reactor)
        self._slices: deque[RankSlice] = deque(maxlen=_MAX_SLICES)
        self._background = BackgroundThread("kv-digests", self._reactor.wake, clock, self._slices)
        self._machine = TransferMachine(
            Seams(
                context=context,
                clock=clock,
                connect=self._side_channel.connect,
                mover=self._mover,
                digests=digests,
                background=self._background,
                processes=self._mover.processes,
                piece_bytes=DEVICE_PIECE_BYTES if kv.is_cuda else PIECE_BYTES,
                slices=self._slices,
            )
        )
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._main, name="kv-transfer", daemon=True)
        self._thread.start()
        if not self._started.wait(_START_TIMEOUT_S):
            raise InternalError(f"the KV transfer thread did not start in {_START_TIMEOUT_S} s")
        self._raise_start_error()

    @property
    def endpoint(self) -> Endpoint:
        """Where the side channel listens."""
        return self._listener.endpoint

    def submit(self, metadata: ConnectorMetadata) -> None:
        """Hand over one step's instructions. Never blocks.

        Raises:
            InternalError: The thread has died, or was closed.
        """
        self._check_alive()
        if self._is_closed:
            raise InternalError("instructions came after the KV transfer thread was closed")
        self._inbox.append(metadata)
        self._reactor.wake()

    def submit_step(self, step: ChunkStep) -> None:
        """Say that KV of a chunk is complete. Never blocks."""
        self._steps.append(step)
        self._reactor.wake()

    def note_step(self, now_s: float) -> None:
        """Say that a step has run."""
        self._machine.server.pushing.last_step_s = now_s

    @property
    def observations(self) -> deque[Observation]:
        """Costs of pushed chunks; the thread that runs the steps removes them."""
        return self._machine.server.pushing.observations

    def take_report(self) -> ConnectorReport:
        """Facts since the last call.

        Raises:
            InternalError: The thread has died.
        """
        self._check_alive()
        with self._lock:
            report, self._report = self._report, ConnectorReport()
        return report

    def close(self, timeout_s: float) -> None:
        """Let loads end, say goodbye, and join the thread.

        If the thread is stuck inside its transport after the time, it is left behind; it is a
        daemon and keeps KV memory alive for as long as it runs. May be repeated.
        """
        if self._is_closed:
            return
        if self._stop_at_s is None:
            self._stop_at_s = self._clock.monotonic_s() + timeout_s / 2
        self._reactor.wake()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log_event(
                _log, "kv transfer thread left behind", level=logging.ERROR, timeout_s=timeout_s
            )
            return
        self._is_closed = True
        self._reactor.close()
        self._listener.close()

    # ---- the thread ------------------------------------------------------------------------

    def _main(self) -> None:
        """Run; if the thread dies, release everyone who waits for it."""
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - told to the engine by `_check_alive`
            self._death = error
            if self._started.is_set():
                _log.exception("kv transfer thread died")
                self._wake()
        finally:
            self._started.set()

    def _run(self) -> None:
        """Start, loop until told to stop, end."""
        self._mover.start()
        try:
            self._side_channel.listen(self._listener, self._machine.server.accept)
            self._started.set()
            while not self._is_over():
                self._turn()
            self._machine.close()
        finally:
            for helpers in (self._mover, self._background):
                if not helpers.close(_HELPERS_CLOSE_S):
                    log_event(_log, "kv transfer helper left behind", level=logging.ERROR)

    def _turn(self) -> None:
        """Wait for an event, or the next time to drive the target; then do all pending work."""
        machine, mover = self._machine, self._mover
        is_driving = machine.needs_progress
        may_wait = mover.may_wait() and not is_driving
        was_ready = self._reactor.wait(self._timeout_s() if may_wait else 0)
        while self._inbox:
            machine.apply(Instructions.from_metadata(self._inbox.popleft()))
        while self._steps:
            machine.server.add_step(self._steps.popleft())
        mover.tick()
        if is_driving:
            mover.drive()
        if mover.why_fence:
            machine.receiving.stop_all(mover.why_fence)
        moved = mover.deliver() | self._background.deliver()
        moved |= machine.tick()
        self._publish()
        if is_driving and not (was_ready or moved):
            time.sleep(_POLL_S)

    def _publish(self) -> None:
        """Make facts visible, then wake their reader."""
        faults = self._mover.take_faults()
        if not (faults or self._machine.has_news):
            return
        news = self._machine.take_report()
        with self._lock:
            report = self._report
            self._report = ConnectorReport(
                settled=report.settled + news.settled,
                received=report.received + news.received,
                failed=report.failed + news.failed,
                faults=dict(Counter(report.faults) + Counter(news.faults) + faults),
                payloads=report.payloads + news.payloads,
                slices=report.slices + self._take_slices(),
                clock_id=CLOCK_ID,
            )
        self._wake()

    def _take_slices(self) -> list[RankSlice]:
        """Return the slices since the last report, each on a track of this rank."""
        rank = f"rank {self._context.rank} " if self._context.num_ranks > 1 else ""
        # By count, because a helper may add more meanwhile.
        taken = [self._slices.popleft() for _ in range(len(self._slices))]
        if rank:
            return [msgspec.structs.replace(each, track=rank + each.track) for each in taken]
        return taken

    def _timeout_s(self) -> float:
        due_s = min(self._machine.due_s(), self._mover.due_s)
        if self._stop_at_s is not None:
            due_s = min(due_s, self._stop_at_s)
        return max(0.0, due_s - self._clock.monotonic_s())

    def _is_over(self) -> bool:
        if self._stop_at_s is None:
            return False
        # What was submitted before `close` (releases, aborts) is carried out.
        if not self._inbox:
            self._machine.end_all("this engine closes")
        is_idle = not (self._inbox or self._machine.num_open)
        return is_idle or self._clock.monotonic_s() >= self._stop_at_s

    def _raise_start_error(self) -> None:
        if self._death is not None:
            self.close(timeout_s=1.0)
            raise self._death

    def _check_alive(self) -> None:
        if self._death is not None:
            raise InternalError(f"the KV transfer thread died: {self._death!r}") from self._death


class BackgroundThread:
    """See `Background`: one thread beside the transfer thread. It knows nothing of blocks.

    It starts with its first work; all methods belong to one other thread. Work is done in order,
    and must release the interpreter lock while it computes.

    Args:
        wake: Called from the thread when `deliver` has something to do.
        slices: See `Seams`.
    """

    def __init__(
        self, name: str, wake: Callable[[], None], clock: Clock, slices: deque[RankSlice]
    ) -> None:
        self._name = name
        self._wake = wake
        self._clock = clock
        self._slices = slices
        self._todo: queue.SimpleQueue[tuple[Callable[[], Callable[[], None]], str] | None] = (
            queue.SimpleQueue()
        )
        self._done: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._death: BaseException | None = None

    def submit(self, work: Callable[[], Callable[[], None]], request_id: str) -> None:
        """Do `work` for a request in the thread; a later `deliver` calls its return value."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._todo.put((work, request_id))

    def deliver(self) -> bool:
        """Call what finished work returned; return whether there was any.

        Raises:
            InternalError: Work has raised; the thread has ended with it.
        """
        if self._death is not None:
            raise InternalError(f"the thread {self._name} died: {self._death!r}") from self._death
        did = False
        while self._done:
            did = True
            self._done.popleft()()
        return did

    def close(self, timeout_s: float) -> bool:
        """Finish the current work, drop the rest; return whether the thread ended in time."""
        if self._thread is None:
            return True
        while not self._todo.empty():
            try:
                self._todo.get_nowait()
            except queue.Empty:  # the thread was quicker
                break
        self._todo.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (todo := self._todo.get()) is not None:
                work, request_id = todo
                began_s = self._clock.monotonic_s()
                self._done.append(work())
                self._slices.append(
                    RankSlice(
                        began_s,
                        self._clock.monotonic_s(),
                        "KV digests",
                        "digest",
                        {"request": request_id},
                    )
                )
                self._wake()
        except Exception as error:  # noqa: BLE001 - told to the transfer thread by `deliver`
            self._death = error
            self._wake()


def _touch(kv: torch.Tensor) -> None:
    """Have the OS back every page now: a first READ into untouched memory is 10 x slower."""
    if kv.is_cuda:
        return
    with torch.inference_mode():
        kv.view(-1).view(torch.uint8)[::_PAGE_BYTES].add_(0)


def _take_one(digests: BlockDigests, context: ConnectorContext) -> None:
    """Compile and load the digest kernel now, so that the first load does not wait for it."""
    route = routes_to(context.shape, context.shape, context.rank)[0]
    digests.found(context.shape, route, [BlockId(0)], first_token=0, num_tokens=1)
