"""A rank that runs the transfer protocol inside its engine's calls, without a thread.

Everything else belongs to the protocol: peers see what they would see over NIXL.

Its mover copies between the memories of one process, a part of the bytes at each poll. A copy
takes several polls of its rank, as it takes time on a wire, and an abandoned one still arrives
before it is reported as over. A copy that makes no progress (a cut, a side that is not driven)
is stuck; once it is abandoned it is ended, as by a fence.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import torch

from pdserve.connectors.digests import BlockDigests
from pdserve.connectors.handover.instructions import Instructions
from pdserve.connectors.memory.exchange import Spoil
from pdserve.connectors.pieces import count_runs
from pdserve.connectors.transfer.machine import TransferMachine
from pdserve.connectors.transfer.protocol import Process, Region
from pdserve.connectors.transfer.seams import (
    Direction,
    ExposedMemory,
    OneSided,
    Remote,
    Seams,
)
from pdserve.wire.transfer import ConnectorReport

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from pdserve.connectors.base import ConnectorContext
    from pdserve.connectors.handover.instructions import Load, Reserve
    from pdserve.connectors.memory.exchange import Exchange, ExchangeMember, Trouble
    from pdserve.connectors.transfer.pushes import ChunkStep, Observation
    from pdserve.connectors.transfer.seams import Job, JobEnd, WarmUp
    from pdserve.observe.clock import Clock
    from pdserve.wire.ids import BlockId
    from pdserve.wire.transfer import ConnectorMetadata, Endpoint

POLLS_ON_THE_WIRE: Final = 3
_MAX_POSTED: Final = 16
# A stuck copy is ended this long after it was abandoned.
_SETTLE_S: Final = 0.5
_lives = itertools.count()


class MemoryRank:
    """See `Runner`. Thread-safe by the exchange's lock. An `ExchangeMember` of the exchange.

    It counts blocks that an engine reuses too early: while a transfer writes to them
    (`block_reused_under_load`) or reads from them (`block_reused_under_write`).

    Args:
        wake: Called when `take_report` has news, or bytes to move.
    """

    def __init__(
        self,
        context: ConnectorContext,
        *,
        kv: torch.Tensor,
        exchange: Exchange,
        wake: Callable[[], None],
        clock: Clock,
        trouble: Trouble,
        piece_bytes: int,
    ) -> None:
        self.context = context
        self.kv = kv
        self.num_polls = 0
        self.num_fences = 0
        self.has_heard = False
        self.trouble = trouble
        self.clock = clock
        self._exchange = exchange
        self._wake = wake
        self._later = _Later()
        self._is_closed = False
        self._reused: Counter[str] = Counter()
        with exchange.lock:
            self.endpoint: Endpoint = exchange.join(self)
            self.process = Process(self.endpoint.host, self.endpoint.port, next(_lives))
            self.mover = MemoryMover(self, exchange)
            self.machine = TransferMachine(
                Seams(
                    context=context,
                    clock=clock,
                    connect=functools.partial(exchange.connect, self),
                    mover=self.mover,
                    digests=BlockDigests(kv, context.shape, context.rank),
                    background=self._later,
                    processes=self,
                    piece_bytes=piece_bytes,
                    slices=deque(maxlen=0),  # nothing is traced
                )
            )

    # ---- what the engine asks for (`Runner`) ---------------------------------------------

    @property
    def observations(self) -> deque[Observation]:
        """See `Runner`."""
        return self.machine.server.pushing.observations

    def submit(self, metadata: ConnectorMetadata) -> None:
        """See `Runner`."""
        todo = Instructions.from_metadata(metadata)
        with self._exchange.lock:
            filled: list[Load | Reserve] = [*todo.reserves, *todo.loads]
            for each in filled:
                self._note_written(each)
            for grant in todo.grants:
                self._note_handed_out(grant.block_ids, grant.generations)
            self.machine.apply(todo)
            self.has_heard = True
            self._exchange.turn()
        self._wake()

    def submit_step(self, step: ChunkStep) -> None:
        """See `Runner`."""
        with self._exchange.lock:
            self._note_handed_out(step.chunk.block_ids, step.chunk.generations)
            self.machine.server.add_step(step)
            self.has_heard = True
            self._exchange.turn()
        self._wake()

    def note_step(self, now_s: float) -> None:
        """See `Runner`."""
        self.machine.server.pushing.last_step_s = now_s

    def take_report(self) -> ConnectorReport:
        """See `Runner`. This call moves bytes."""
        with self._exchange.lock:
            if self._is_closed:
                return ConnectorReport()
            self.num_polls += 1
            self.mover.advance()
            self._exchange.turn()
            report = self.machine.take_report()
            faults = Counter(report.faults) + self._reused
            self._reused.clear()
            if self.mover.is_moving or self._exchange.is_waiting(self):
                self._wake()
        return msgspec.structs.replace(report, faults=faults)

    def close(self, timeout_s: float) -> None:
        """See `Runner`. Peers get no message: its links end, as those of a process would."""
        with self._exchange.lock:
            if not self._is_closed:
                self._is_closed = True
                self._exchange.leave(self)

    # ---- seams of the protocol -------------------------------------------------------------

    @property
    def this(self) -> Process:
        """See `Processes`."""
        return self.process

    def writes_directly(self, process: Process) -> bool:
        """See `Processes`."""
        return self._exchange.is_direct

    def is_alive(self, process: Process) -> bool:
        """See `Processes`."""
        return self._exchange.find_process(process) is not None

    # ---- what the exchange asks for (`ExchangeMember`) -----------------------------------

    def turn(self) -> bool:
        """See `ExchangeMember`."""
        has_moved = self._later.run() | self.mover.deliver()
        if has_moved or self.has_heard or self.machine.due_s() <= self.clock.monotonic_s():
            self.has_heard = False
            has_moved |= self.machine.tick()
        return has_moved

    def tell(self) -> None:
        """See `ExchangeMember`."""
        if self.machine.has_news or self._reused:
            self._wake()

    # ---- engines that reuse blocks too early -----------------------------------------------

    def _note_written(self, filled: Load | Reserve) -> None:
        """Count a fault if blocks for a new transfer are still written by another one."""
        others: list[Load | Reserve] = [*self.machine.loads.open, *self.machine.receiving.open]
        blocks = self._written(filled)
        if not all(blocks.isdisjoint(self._written(each)) for each in others):
            self._reused["block_reused_under_load"] += 1

    def _written(self, filled: Load | Reserve) -> set[BlockId]:
        return set(filled.local_block_ids[filled.first_token // self.context.shape.block_size :])

    def _note_handed_out(self, block_ids: Sequence[BlockId], generations: Sequence[int]) -> None:
        """Count a fault for each block that a push still reads in an earlier generation."""
        known = dict(zip(block_ids, generations, strict=True))
        for push in self.machine.server.pushing.reading:
            for block_id, generation in zip(*push.table, strict=True):
                if known.get(block_id, 0) > generation:
                    self._reused["block_reused_under_write"] += 1


class _Later:
    """See `Background`: work is done in the next turn."""

    def __init__(self) -> None:
        self._todo: deque[Callable[[], Callable[[], None]]] = deque()

    def submit(self, work: Callable[[], Callable[[], None]], request_id: str) -> None:
        """See `Background`."""
        self._todo.append(work)

    def run(self) -> bool:
        """Do all work; return whether there was any."""
        has_moved = bool(self._todo)
        while self._todo:
            self._todo.popleft()()()
        return has_moved


@dataclass(slots=True, eq=False)
class _Copy:
    """A posted job.

    Attributes:
        num_polls_left: Polls left until its first part arrives.
        num_landed: Parts that have arrived, out of `POLLS_ON_THE_WIRE`.
    """

    job: Job
    num_polls_left: int = 0
    num_landed: int = 0
    end: JobEnd | None = None

    def land(self, mine: ExchangeMember, theirs: ExchangeMember) -> bool:
        """Let the next part arrive; return whether it was the last."""
        job, part = self.job, self.num_landed
        here, there = _units(mine.kv, job.unit_bytes), _units(theirs.kv, job.unit_bytes)
        local, remote = (torch.from_numpy(u).long() for u in (job.local_units, job.remote_units))
        is_read = job.direction is Direction.READ
        source, dest = (
            ((there, remote), (here, local)) if is_read else ((here, local), (there, remote))
        )
        edges = (job.unit_bytes * each // POLLS_ON_THE_WIRE for each in (part, part + 1))
        columns = slice(*edges)
        with torch.inference_mode():
            dest[0][dest[1], columns] = source[0][source[1], columns]
        self.num_landed += 1
        if self.num_landed < POLLS_ON_THE_WIRE:
            return False
        match (mine if is_read else theirs).trouble.spoils():
            case Spoil.CORRUPT:
                dest[0][dest[1][-1:], 0] ^= 0x41
            case Spoil.TRUNCATE:
                dest[0][dest[1]] = 0
            case None:
                pass
        return True


class MemoryMover(OneSided):
    """See `Mover`."""

    num_lanes = 1

    def __init__(self, rank: ExchangeMember, exchange: Exchange) -> None:
        self._rank = rank
        self._exchange = exchange
        layout = rank.context.layout
        self._pool = Region(rank.kv.data_ptr(), layout.block_bytes, layout.num_blocks, "DRAM", 0)
        self._waiting: deque[Job] = deque()
        self._posted: list[_Copy] = []
        self._ended: list[_Copy] = []
        self._slow: deque[Callable[[], None]] = deque()
        self._warm_ups: list[WarmUp] = []

    @property
    def is_moving(self) -> bool:
        """Whether `advance` has anything to do."""
        return bool(self._waiting or self._posted)

    @property
    def target(self) -> ExposedMemory:
        """See `Mover`."""
        name = f"{self._rank.process.started} {self._rank.endpoint.port} {self._rank.num_fences}"
        return ExposedMemory(name.encode(), self._pool, self._pool)

    def meet(self, metadata: bytes, pool: Region) -> Remote:
        """See `Mover`."""
        return Remote(metadata, pool)

    def forget(self, remote: Remote) -> None:
        """See `Mover`."""

    def warm_up(self, warm_up: WarmUp) -> None:
        """See `Mover`."""
        self._warm_ups.append(warm_up)

    def submit(self, job: Job) -> None:
        """See `Mover`."""
        self._waiting.append(job)
        self._post()

    def abandon(self, tag: Hashable) -> int:
        """See `Mover`."""
        self._waiting = deque(job for job in self._waiting if job.tag != tag)
        for warm_up in self._warm_ups:
            warm_up.is_abandoned |= warm_up.tag == tag
        in_flight = [copy.job for copy in (*self._posted, *self._ended) if copy.job.tag == tag]
        for job in in_flight:
            job.abandoned_s = min(job.abandoned_s, self._now_s())
        return len(in_flight)

    def fence(self) -> None:
        """See `Mover`."""
        self._rank.num_fences += 1

    def advance(self) -> None:
        """Let the next part of each copy arrive."""
        self._post()
        for copy in list(self._posted):
            self._move(copy)

    def deliver(self) -> bool:
        """Report the jobs that have ended; return whether there were any."""
        has_moved = bool(self._slow)
        while self._slow:
            self._slow.popleft()()
        while self._ended:
            copy = self._ended.pop(0)
            assert copy.end is not None
            copy.job.on_settled(copy.end)
            has_moved = True
        for warm_up in list(self._warm_ups):
            peer = self._owner_of(warm_up.remote)
            if warm_up.is_abandoned or peer is None or not self._is_stuck(peer):
                self._warm_ups.remove(warm_up)
                warm_up.on_settled(None if peer is not None else "its memory is gone")
                has_moved = True
        return has_moved

    def _post(self) -> None:
        while self._waiting and len(self._posted) < _MAX_POSTED:
            job = self._waiting.popleft()
            job.posted_s = self._now_s()
            self._posted.append(_Copy(job, self._rank.trouble.copy_polls()))
            if job.on_slow is not None:
                self._slow.append(job.on_slow)

    def _move(self, copy: _Copy) -> None:
        job = copy.job
        peer = self._owner_of(job.remote)
        if peer is None:
            self._end(copy, "its memory is gone")
        elif self._is_stuck(peer):
            if self._now_s() - job.abandoned_s >= _SETTLE_S:
                self._end(copy, "it was stuck")
        elif copy.num_polls_left:
            copy.num_polls_left -= 1
        elif copy.land(self._rank, peer):
            self._end(copy, None)

    def _end(self, copy: _Copy, failure: str | None) -> None:
        num_descriptors = count_runs(copy.job.remote_units, copy.job.local_units)
        copy.end = copy.job.ended(failure, self._now_s, num_descriptors)
        self._posted.remove(copy)
        self._ended.append(copy)

    def _owner_of(self, remote: Remote) -> ExchangeMember | None:
        """Return the rank whose memory it is; None if this name no longer reaches it."""
        started, port, num_fences = (int(part) for part in remote.metadata.split())
        exchange = self._exchange
        rank = exchange.find_process(Process(self._rank.endpoint.host, port, started))
        if rank is None or not (exchange.is_direct or num_fences == rank.num_fences):
            return None
        return rank

    def _is_stuck(self, peer: ExchangeMember) -> bool:
        exchange = self._exchange
        return exchange.is_cut(self._rank, peer) or (
            exchange.is_driven and not peer.machine.needs_progress
        )

    def _now_s(self) -> float:
        return self._rank.clock.monotonic_s()


def _units(kv: torch.Tensor, unit_bytes: int) -> torch.Tensor:
    """Return a view of the memory as `[num_units, unit_bytes]`."""
    return kv.view(-1).view(torch.uint8).view(-1, unit_bytes)
