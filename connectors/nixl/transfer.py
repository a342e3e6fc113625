"""The transfer thread: one per rank, off the step clock.

It owns the side channel, the leases and the NIXL agent that peers reach this rank's memory by
(the target), and is the only thread that touches them. Where NIXL cannot make that agent again it
tries now and then; until it can, nobody is met, and what needs a peer fails with that reason.

What this side moves is posted by lanes, so this thread never waits inside NIXL. The worker's
thread hands it instructions and takes facts, through two small locked boxes. While a peer's
transport needs help it drives the target; else it sleeps in the kernel until a socket, a deadline,
a lane or an instruction wakes it, or a second has passed (`descriptors`), and costs nothing.
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

import msgspec
import torch

from pdserve.connectors.digests import BlockDigests, digests_of
from pdserve.connectors.handover.instructions import Instructions
from pdserve.connectors.nixl.agent import AgentError, NixlAgent
from pdserve.connectors.nixl.background import Background
from pdserve.connectors.nixl.channel import Listener
from pdserve.connectors.nixl.descriptors import (
    DescriptorWatch,
    TaintedNumbers,
    max_descriptors,
    num_open_descriptors,
    num_silent_connections,
)
from pdserve.connectors.nixl.devices import net_devices
from pdserve.connectors.nixl.lanes import Lanes
from pdserve.connectors.nixl.peers import Peers
from pdserve.connectors.nixl.processes import this_process
from pdserve.connectors.nixl.protocol import Region, Welcome
from pdserve.connectors.nixl.reactor import Reactor
from pdserve.connectors.nixl.receiving import Receiving
from pdserve.connectors.nixl.serving import Server
from pdserve.connectors.slicing import routes_to
from pdserve.errors import InternalError
from pdserve.observe.log import log_event
from pdserve.observe.trace import CLOCK_ID
from pdserve.wire.ids import BlockId
from pdserve.wire.transfer import ConnectorReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.connectors.base import ConnectorContext, KVLayout
    from pdserve.connectors.nixl.pushes import ChunkStep, Observation
    from pdserve.connectors.nixl.settings import NixlSettings
    from pdserve.observe.clock import Clock
    from pdserve.wire.trace import RankSlice
    from pdserve.wire.transfer import ConnectorMetadata, Endpoint

_log = logging.getLogger(__name__)

_POLL_S = 0.0003
_START_TIMEOUT_S = 60.0
_HELPERS_CLOSE_S = 2.0
_TARGET_AGAIN_S = 0.5
_NEVER = float("inf")
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
        quarantine_s: How long a lost transfer may stay in flight beside others before the
            agent that posted it is destroyed and made again, which is the only thing that
            certainly stops one, and ends those others, too.

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
        wake: Callable[[], None],
        clock: Clock,
        quarantine_s: float,
        settings: NixlSettings,
    ) -> None:
        if not kv.is_contiguous() or kv.numel() * kv.element_size() != (
            layout.num_blocks * layout.block_bytes
        ):
            raise InternalError(f"KV memory of shape {tuple(kv.shape)} is not laid out as {layout}")
        _touch(kv)
        _take_a_digest(kv, context)
        self._context = context
        self._kv = kv
        self._scratch = torch.zeros(
            _SCRATCH_UNITS * _SCRATCH_UNIT_BYTES, dtype=torch.uint8, device=kv.device
        )
        self._pool_region = _region(kv, layout.block_bytes)
        self._scratch_region = _region(self._scratch, _SCRATCH_UNIT_BYTES)
        secret = self._secret = context.config.transfer.secret.encode()
        self._backends = settings.backends
        self._wake = wake
        self._clock = clock
        self._inbox: deque[ConnectorMetadata] = deque()
        self._steps: deque[ChunkStep] = deque()
        self._lock = threading.Lock()
        self._report = ConnectorReport()
        self._stop_at_s: float | None = None
        self._death: BaseException | None = None
        self._is_closed = False
        self._target: NixlAgent | None = None
        self._target_due_s = _NEVER
        host, port = context.config.transfer.host, context.config.transfer.port
        self._listener = Listener(host, port + context.rank if port else 0)
        self._net_devices = net_devices(self._listener.endpoint.host)
        self._reactor = Reactor()
        self._lanes = Lanes(
            num_lanes=settings.lanes,
            make_agent=self._make_lane_agent,
            pool=self._pool_region,
            scratch=self._scratch_region,
            wake=self._reactor.wake,
            clock=clock,
            quarantine_s=quarantine_s,
        )
        self._peers = Peers(
            context,
            kv=kv,
            secret=secret,
            reactor=self._reactor,
            clock=clock,
            lanes=self._lanes,
            target=self._describe_target,
        )
        self._background = Background("kv-digests", self._reactor.wake, clock)
        self._server = Server(
            context,
            secret=secret,
            reactor=self._reactor,
            clock=clock,
            welcome=self._make_welcome,
            lanes=self._lanes,
            digests=BlockDigests(kv, context.shape, context.rank),
            background=self._background,
        )
        self._receiving = self._peers.receiver = Receiving(
            context,
            kv=kv,
            line=self._peers,
            fence=self._reset_target,
            is_alone=lambda: not (len(self._peers.loads) or self._server.pushing.num_live),
            background=self._background,
            clock=clock,
            quarantine_s=quarantine_s,
        )
        self._numbers = TaintedNumbers()
        self._watch = DescriptorWatch(
            tidy=self._tidy,
            renew=self._renew_agents,
            faults=self._server.faults,
            clock=clock,
            num_open=num_open_descriptors,
            num_silent=num_silent_connections,
            limit=max_descriptors,
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
        self._server.pushing.last_step_s = now_s

    @property
    def observations(self) -> deque[Observation]:
        """What pushed chunks have cost; whoever runs the steps takes them out."""
        return self._server.pushing.observations

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
        self._use_device()
        self._target = self._make_target()
        try:
            self._reactor.listen(self._listener, self._server.accept)
            self._started.set()
            while not self._is_over():
                self._turn()
            self._peers.close()
            self._server.drop_all("closing")
        finally:
            for helpers in (self._lanes, self._background):
                if not helpers.close(_HELPERS_CLOSE_S):
                    log_event(_log, "kv transfer helper left behind", level=logging.ERROR)
            self._end_target()

    def _turn(self) -> None:
        """Wait for something, or for the next time to drive the target; then do all there is."""
        peers, server, lanes = self._peers, self._server, self._lanes
        is_driving = (
            server.needs_progress or self._receiving.needs_progress or server.steps.is_polling
        )
        was_ready = self._reactor.wait(0 if is_driving else self._timeout_s())
        while self._inbox:
            self._apply(Instructions.from_metadata(self._inbox.popleft()))
        while self._steps:
            server.steps.add(self._steps.popleft())
        if self._clock.monotonic_s() >= self._target_due_s:
            self._renew_target()
        if is_driving and self._target is not None:
            self._drive(self._target)
        self._watch.tick()
        moved = lanes.deliver() | self._background.deliver()
        server.tick()
        moved |= peers.tick()
        self._receiving.tick()
        self._publish()
        if is_driving and not (was_ready or moved):
            time.sleep(_POLL_S)

    def _drive(self, target: NixlAgent) -> None:
        """Help what peers do here. That one of them has died is for its own end to report."""
        try:
            target.progress()
        except AgentError as error:
            log_event(_log, "kv peer's transfer failed here", level=logging.WARNING, reason=error)

    def _tidy(self) -> None:
        """Close the connections to any agent here whose other sides have ended."""
        if self._target is not None:
            self._drive(self._target)
        self._lanes.tidy()

    def _renew_agents(self, reason: str) -> None:
        """Make all agents here again: the target now, each lane's when it has nothing to do."""
        self._lanes.renew(reason)
        self._receiving.stop_all(reason)

    def _apply(self, todo: Instructions) -> None:
        for expect in todo.expects:
            self._server.pushing.expect(expect)
        for grant in todo.grants:
            self._server.grant(grant)
        for watch in todo.watches:
            self._peers.watch(watch)
        for reserve in todo.reserves:
            self._receiving.reserve(reserve)
        for load in todo.loads:
            self._peers.loads.begin(load)
        for nonce in todo.unwatches:
            self._peers.unwatch(nonce)
        for release in todo.releases:
            self._peers.release(release.nonce, release.owner, release.end)
        for request_id in todo.aborts:
            self._peers.loads.abort(request_id)
            self._receiving.abort(request_id)
        for stop in todo.stops:
            self._server.stop(stop)
        for end in todo.ends:
            self._server.end(end.nonce, end.end)

    def _publish(self) -> None:
        """Make facts visible, then wake whoever waits for them."""
        loads, faults = self._peers.loads, Counter[str]()
        receiving, pushing = self._receiving, self._server.pushing
        for each in (self._server.faults, loads.faults, receiving.faults, pushing.faults):
            faults.update(each)
            each.clear()
        num_resets = self._lanes.take_num_resets()
        if num_resets:
            faults["agent_reset"] += num_resets
        news = ConnectorReport(
            settled=self._server.take_settled(),
            received=loads.received + receiving.received,
            failed=loads.failed + receiving.failed,
            faults=faults,
            registered=pushing.registered,
            withdrawn=pushing.withdrawn,
        )
        if not news:
            return
        loads.received, loads.failed = [], []
        receiving.received, receiving.failed = [], []
        pushing.registered, pushing.withdrawn = [], []
        with self._lock:
            report = self._report
            self._report = ConnectorReport(
                settled=report.settled + news.settled,
                received=report.received + news.received,
                failed=report.failed + news.failed,
                faults=dict(Counter(report.faults) + faults),
                registered=report.registered + news.registered,
                withdrawn=report.withdrawn + news.withdrawn,
                slices=report.slices + self._take_slices(),
                clock_id=CLOCK_ID,
            )
        self._wake()

    def _take_slices(self) -> list[RankSlice]:
        """What the helpers did since they were asked last, each on a track of this rank."""
        rank = f"rank {self._context.rank} " if self._context.num_ranks > 1 else ""
        helpers = (self._lanes.slices, self._background.slices)
        # By number: a helper may add more meanwhile.
        taken = [slices.popleft() for slices in helpers for _ in range(len(slices))]
        if rank:
            return [msgspec.structs.replace(each, track=rank + each.track) for each in taken]
        return taken

    def _timeout_s(self) -> float:
        due_s = min(
            self._peers.due_s(),
            self._server.due_s(),
            self._receiving.due_s(),
            self._target_due_s,
            self._watch.due_s,
        )
        if self._stop_at_s is not None:
            due_s = min(due_s, self._stop_at_s)
        return max(0.0, due_s - self._clock.monotonic_s())

    def _is_over(self) -> bool:
        if self._stop_at_s is None:
            return False
        # What was submitted before `close` (releases, aborts) is carried out.
        if not self._inbox:
            self._receiving.abort_all("this engine closes")
            self._server.pushing.end_all("this engine closes")
        num_open = self._receiving.num_open + self._server.pushing.num_live
        is_idle = not (self._inbox or len(self._peers.loads) or num_open)
        return is_idle or self._clock.monotonic_s() >= self._stop_at_s

    def _reset_target(self, reason: str) -> None:
        """Destroy the agent that peers reach this memory by, and make another, or do so later.

        On return, nothing that a peer posted to this side by way of the network moves any more.
        Peers hold metadata of the agent that is gone: all of them have to meet this rank again.
        """
        log_event(_log, "kv target reset", level=logging.ERROR, reason=reason)
        self._server.faults["agent_reset"] += 1
        self._server.drop_all(reason)
        self._peers.drop_all(reason)
        self._end_target()
        self._renew_target()

    def _end_target(self) -> None:
        target, self._target = self._target, None
        if target is not None:
            target.close()

    def _renew_target(self) -> None:
        try:
            self._target = self._make_target()
        except AgentError as error:
            self._server.faults["agent_not_made"] += 1
            self._target_due_s = self._clock.monotonic_s() + _TARGET_AGAIN_S
            log_event(_log, "kv target cannot be made", level=logging.ERROR, reason=error)
        else:
            self._target_due_s = _NEVER

    def _make_target(self) -> NixlAgent:
        return self._make_agent("")

    def _make_lane_agent(self, number: int) -> NixlAgent:
        self._use_device()
        return self._make_agent(f"lane{number}-")

    def _make_agent(self, part: str) -> NixlAgent:
        role, rank = self._context.config.role.value, self._context.rank
        name = f"{role}-{socket.gethostname()}-{rank}-{part}{uuid.uuid4().hex}"
        try:
            agent = NixlAgent(name, self._backends, net_devices=self._net_devices)
        except AgentError:
            self._numbers.take_out()
            raise
        try:
            for region in (self._pool_region, self._scratch_region):
                agent.register(region)
        except AgentError:
            agent.close()
            raise
        return agent

    def _use_device(self) -> None:
        """UCX uses the calling thread's current context."""
        if self._kv.is_cuda:
            torch.cuda.set_device(self._kv.device)

    def _describe_target(self) -> tuple[bytes, Region] | None:
        return None if self._target is None else (self._target.metadata(), self._pool_region)

    def _make_welcome(self) -> Welcome | None:
        target = self._describe_target()
        if target is None:
            return None
        metadata, pool = target
        return Welcome(
            agent_metadata=metadata,
            pool=pool,
            scratch=self._scratch_region,
            shape=self._context.shape,
            process=this_process(),
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


def _take_a_digest(kv: torch.Tensor, context: ConnectorContext) -> None:
    """Have the kernel compiled and loaded now: the first load would wait for that."""
    shape = context.shape
    route = routes_to(shape, shape, context.rank)[0]
    digests_of(kv, shape, shape, route, [BlockId(0)], first_token=0, num_tokens=1)
