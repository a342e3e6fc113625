"""One thread beside the transfer thread for work on memory: digests.

Work is done in its order; what comes of it is told in the transfer thread, which is woken for
it. It knows nothing of blocks. The work must let go of the interpreter lock while it computes.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import TYPE_CHECKING

from pdserve.connectors.transfer_thread.slices import MAX_SLICES
from pdserve.errors import InternalError
from pdserve.wire.trace import RankSlice

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.observe.clock import Clock


class BackgroundThread:
    """See `Background`. It begins with its first work; all methods belong to one other thread.

    Args:
        name: The thread's, for debuggers.
        wake: Called from it when `deliver` has something to say.

    Attributes:
        slices: What it did last, for traces; whoever reports it takes it out, from any thread.
    """

    def __init__(self, name: str, wake: Callable[[], None], clock: Clock) -> None:
        self._name = name
        self._wake = wake
        self._clock = clock
        self.slices: deque[RankSlice] = deque(maxlen=MAX_SLICES)
        self._todo: queue.SimpleQueue[tuple[Callable[[], Callable[[], None]], str] | None] = (
            queue.SimpleQueue()
        )
        self._done: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._death: BaseException | None = None

    def submit(self, work: Callable[[], Callable[[], None]], request_id: str) -> None:
        """Do `work` for a request in the thread, and in a later `deliver` what it returns."""
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
        """Finish what is at work, drop the rest; return whether the thread has ended in time."""
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
                self.slices.append(
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
