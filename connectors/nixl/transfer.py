"""The transfer thread: one per rank, off the step clock.

It owns the NIXL agent, the side channel and the leases, and is the only thread that
touches them. The worker's thread hands it instructions and takes facts, through two small
locked boxes. While a transfer is in flight it polls; else it sleeps in the kernel until a
socket, a deadline or an instruction wakes it, and costs nothing.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
import uuid
from collections import Counter, deque
from typing import TYPE_CHECKING

import torch

from pdserve.connectors.nixl.agent import AgentError, NixlAgent
from pdserve.connectors.nixl.channel import Listener
from pdserve.connectors.nixl.peers import Local, Peers
from pdserve.connectors.nixl.protocol import Region, Welcome
from pdserve.connectors.nixl.reactor import Reactor
from pdserve.connectors.nixl.serving import Server
from pdserve.connectors.pull.instructions import PullInstructions
from pdserve.errors import InternalError
from pdserve.observe.log import log_event
from pdserve.wire.transfer import ConnectorReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.connectors.base import ConnectorContext, KVLayout
    from pdserve.observe.clock import Clock
    from pdserve.wire.transfer import ConnectorMetadata, Endpoint

_log = logging.getLogger(__name__)

_POLL_S = 0.0003
_START_TIMEOUT_S = 60.0
# A load takes the interpreter lock some eight times. A main thread that is busy in Python
# gives it up only after the switch interval: at 5 ms, Python's own, a hand-over takes 43 ms.
_SWITCH_INTERVAL_S = 0.0005
_SCRATCH_UNIT_BYTES = 4096
_SCRATCH_UNITS = 16
_PAGE_BYTES = 4096


class TransferThread:
    """Moves KV for one rank.

    Args:
        kv: `[num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]`, contiguous.
        wake: Called from the thread when `take_report` has news.
        quarantine_s: How long a lost transfer may stay in flight before the agent is
            destroyed and made again. That ends every transfer of this rank, and is the
            only thing that certainly stops one.

    It lowers the interpreter's switch interval, for the whole process.

    Raises:
        ConfigError: NIXL cannot be loaded, or the side channel cannot be bound.
    """

    def __init__(
        self,
        context: ConnectorContext,
        *,
        kv: torch.Tensor,
        layout: KVLayout,
        secret: bytes,
        wake: Callable[[], None],
        clock: Clock,
        quarantine_s: float,
    ) -> None:
        if not kv.is_contiguous() or kv.numel() * kv.element_size() != (
            layout.num_blocks * layout.block_bytes
        ):
            raise InternalError(f"KV memory of shape {tuple(kv.shape)} is not laid out as {layout}")
        _touch(kv)
        self._context = context
        self._kv = kv
        self._scratch = torch.zeros(
            _SCRATCH_UNITS * _SCRATCH_UNIT_BYTES, dtype=torch.uint8, device=kv.device
        )
        self._pool_region = _region(kv, layout.block_bytes)
        self._scratch_region = _region(self._scratch, _SCRATCH_UNIT_BYTES)
        self._secret = secret
        self._wake = wake
        self._clock = clock
        self._quarantine_s = quarantine_s
        self._inbox: deque[ConnectorMetadata] = deque()
        self._lock = threading.Lock()
        self._report = ConnectorReport()
        self._stop_at_s: float | None = None
        self._death: BaseException | None = None
        self._is_closed = False
        host, port = context.config.transfer.host, context.config.transfer.port
        self._listener = Listener(host, port + context.rank if port else 0)
        self._reactor = Reactor()
        self._server = Server(
            context, secret=secret, reactor=self._reactor, clock=clock, welcome=self._make_welcome
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

        If the thread is stuck inside NIXL after the time, it is left behind; it is a
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
        """Run, and let nobody wait for a thread that has died."""
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
        if self._kv.is_cuda:
            torch.cuda.set_device(self._kv.device)  # UCX uses the thread's current context
        self._peers = Peers(
            self._context,
            secret=self._secret,
            reactor=self._reactor,
            clock=self._clock,
            local=self._make_local(),
        )
        try:
            self._reactor.listen(self._listener, self._server.accept)
            self._started.set()
            while not self._is_over():
                self._turn()
            self._peers.close()
            self._server.drop_all("closing")
        finally:
            self._peers.local.agent.close()

    def _turn(self) -> None:
        """Wait for something, or for the next poll; then do all there is to do."""
        peers, server = self._peers, self._server
        is_polling = peers.is_polling or server.needs_progress
        if is_polling or peers.has_more_to_post:
            was_ready = self._reactor.wait(0)
        else:
            was_ready = self._reactor.wait(self._timeout_s())
        while self._inbox:
            self._apply(PullInstructions.from_metadata(self._inbox.popleft()))
        if server.needs_progress:
            self._assist()
        server.tick()
        moved = peers.tick()
        self._publish()
        if self._clock.monotonic_s() - peers.oldest_quarantine_s() > self._quarantine_s:
            self._reset_agent()
        elif is_polling and not (was_ready or moved or peers.has_more_to_post):
            time.sleep(_POLL_S)

    def _assist(self) -> None:
        """Drive what Ds do here. That one of them has died is for its own end to report."""
        try:
            self._peers.local.agent.progress()
        except AgentError as error:
            log_event(_log, "kv peer's transfer failed here", level=logging.WARNING, reason=error)

    def _apply(self, todo: PullInstructions) -> None:
        for grant in todo.grants:
            self._server.grant(grant)
        for watch in todo.watches:
            self._peers.watch(watch)
        for load in todo.loads:
            self._peers.load(load)
        for release in todo.releases:
            self._peers.release(release.nonce, release.owner)
        for request_id in todo.aborts:
            self._peers.abort(request_id)
        for end in todo.ends:
            self._server.end(end.nonce, end.end)

    def _publish(self) -> None:
        """Make facts visible, then wake whoever waits for them."""
        peers, faults = self._peers, self._server.faults
        settled = self._server.take_settled()
        if not (settled or peers.received or peers.failed or faults):
            return
        with self._lock:
            report = self._report
            self._report = ConnectorReport(
                settled=report.settled + settled,
                received=report.received + peers.received,
                failed=report.failed + peers.failed,
                faults=dict(Counter(report.faults) + faults),
            )
        peers.received, peers.failed = [], []
        faults.clear()
        self._wake()

    def _timeout_s(self) -> float | None:
        due_s = min(self._peers.due_s(), self._server.due_s())
        if self._stop_at_s is not None:
            due_s = min(due_s, self._stop_at_s)
        return None if due_s == float("inf") else max(0.0, due_s - self._clock.monotonic_s())

    def _is_over(self) -> bool:
        if self._stop_at_s is None:
            return False
        # What was submitted before `close` (releases, aborts) is carried out.
        is_idle = not (self._inbox or self._peers.num_loads)
        return is_idle or self._clock.monotonic_s() >= self._stop_at_s

    def _reset_agent(self) -> None:
        """Destroy the agent, so that nothing it posted is in flight, and make another."""
        reason = f"a transfer was stuck for {self._quarantine_s} s: the NIXL agent was reset"
        log_event(_log, "kv agent reset", level=logging.ERROR, quarantine_s=self._quarantine_s)
        self._server.faults["agent_reset"] += 1
        self._server.drop_all(reason)  # peers hold metadata of the agent that goes
        self._peers.local.agent.close()
        self._peers.local = self._make_local()
        self._peers.fence(reason)
        self._publish()

    def _make_local(self) -> Local:
        role, rank = self._context.config.role.value, self._context.rank
        name = f"{role}-{socket.gethostname()}-{rank}-{uuid.uuid4().hex}"
        agent = NixlAgent(name, self._context.config.transfer.backends)
        for region in (self._pool_region, self._scratch_region):
            agent.register(region)
        return Local(
            agent=agent,
            pool=agent.prepare_local(self._pool_region),
            scratch=agent.prepare_local(self._scratch_region),
            num_scratch_units=_SCRATCH_UNITS,
        )

    def _make_welcome(self) -> Welcome:
        return Welcome(
            agent_metadata=self._peers.local.agent.metadata(),
            pool=self._pool_region,
            scratch=self._scratch_region,
        )

    def _raise_start_error(self) -> None:
        if self._death is not None:
            self.close(timeout_s=1.0)
            raise self._death

    def _check_alive(self) -> None:
        if self._death is not None:
            raise InternalError(f"the KV transfer thread died: {self._death!r}") from self._death


def _region(tensor: torch.Tensor, stride_bytes: int) -> Region:
    return Region(
        address=tensor.data_ptr(),
        stride_bytes=stride_bytes,
        num_units=tensor.numel() * tensor.element_size() // stride_bytes,
        memory="VRAM" if tensor.is_cuda else "DRAM",
        device=tensor.device.index or 0,
    )


def _touch(kv: torch.Tensor) -> None:
    """Have the kernel back every page now: a first READ into untouched memory is 10 x slower."""
    if kv.is_cuda:
        return
    with torch.inference_mode():
        kv.view(-1).view(torch.uint8)[::_PAGE_BYTES].add_(0)
