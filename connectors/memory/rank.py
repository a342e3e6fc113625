"""One rank that runs the transfer protocol inside the calls of its engine, without a thread.

Everything else is the protocol's: what a peer sees of it is what it would see over NIXL.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from typing import TYPE_CHECKING

import msgspec

from pdserve.connectors.digests import BlockDigests
from pdserve.connectors.handover.instructions import Instructions
from pdserve.connectors.memory.mover import MemoryMover
from pdserve.connectors.transfer.machine import TransferMachine
from pdserve.connectors.transfer.protocol import Process
from pdserve.connectors.transfer.seams import Seams
from pdserve.wire.transfer import ConnectorReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pdserve.connectors.base import ConnectorContext
    from pdserve.connectors.handover.instructions import Load, Reserve
    from pdserve.connectors.memory.exchange import Exchange
    from pdserve.connectors.memory.trouble import Trouble
    from pdserve.connectors.transfer.pushes import ChunkStep, Observation
    from pdserve.connectors.transfer.seams import PeerLink
    from pdserve.observe.clock import Clock
    from pdserve.wire.ids import BlockId
    from pdserve.wire.transfer import ConnectorMetadata, Endpoint

_lives = itertools.count()


class MemoryRank:
    """See `Runner`. Thread-safe by the exchange's lock. A `ExchangeMember` of the exchange.

    It counts blocks that an engine uses again too early: while something lands in them
    (`block_reused_under_load`), or is read from them (`block_reused_under_write`).

    Args:
        wake: Called when `take_report` has news, or something to move.
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
        self._clock = clock
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
                    dialer=self,
                    mover=self.mover,
                    digests=BlockDigests(kv, context.shape, context.rank),
                    background=self._later,
                    processes=self,
                    quarantine_s=context.config.transfer.quarantine_s,
                    piece_bytes=piece_bytes,
                    slices=deque(maxlen=0),  # for traces of nobody
                )
            )

    # ---- what the engine asks for (`Runner`) ---------------------------------------------

    @property
    def observations(self) -> deque[Observation]:
        """See `Runner`."""
        return self.machine.observations

    def submit(self, metadata: ConnectorMetadata) -> None:
        """See `Runner`."""
        todo = Instructions.from_metadata(metadata)
        with self._exchange.lock:
            filled: list[Load | Reserve] = [*todo.reserves, *todo.loads]
            for each in filled:
                self._note_written(each.local_block_ids, each.first_token)
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
            self.machine.add_step(step)
            self.has_heard = True
            self._exchange.turn()
        self._wake()

    def note_step(self, now_s: float) -> None:
        """See `Runner`."""
        self.machine.note_step(now_s)

    def take_report(self) -> ConnectorReport:
        """See `Runner`. It is here that bytes move."""
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
        """See `Runner`. Nothing is said to anybody: its links end, as those of a process would."""
        with self._exchange.lock:
            if not self._is_closed:
                self._is_closed = True
                self._exchange.leave(self)

    # ---- seams of the protocol -------------------------------------------------------------

    def connect(self, endpoint: Endpoint, peer: str) -> PeerLink:
        """See `Dialer`."""
        return self._exchange.connect(self, endpoint, peer)

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

    @property
    def needs_progress(self) -> bool:
        """See `ExchangeMember`."""
        return self.machine.needs_progress

    def now_s(self) -> float:
        """See `ExchangeMember`."""
        return self._clock.monotonic_s()

    def accept(self, link: PeerLink) -> None:
        """See `ExchangeMember`."""
        self.machine.accept(link)

    def turn(self) -> bool:
        """See `ExchangeMember`."""
        has_moved = self._later.run() | self.mover.deliver()
        if has_moved or self.has_heard or self.machine.due_s() <= self.now_s():
            self.has_heard = False
            has_moved |= self.machine.tick()
        return has_moved

    def tell(self) -> None:
        """See `ExchangeMember`."""
        if self.machine.has_news or self._reused:
            self._wake()

    # ---- engines that use blocks again too early -------------------------------------------

    def _note_written(self, block_ids: Sequence[BlockId], first_token: int) -> None:
        """A transfer is to write these blocks: no other one may, then."""
        theirs = block_ids[first_token // self.context.shape.block_size :]
        if not set(self.machine.written_blocks()).isdisjoint(theirs):
            self._reused["block_reused_under_load"] += 1

    def _note_handed_out(self, block_ids: Sequence[BlockId], generations: Sequence[int]) -> None:
        """These blocks are somebody's in these generations: no push may read from earlier ones."""
        known = dict(zip(block_ids, generations, strict=True))
        for block_id, generation in self.machine.read_blocks():
            if known.get(block_id, 0) > generation:
                self._reused["block_reused_under_write"] += 1


class _Later:
    """See `Background`: what is to be done is done in the next turn."""

    def __init__(self) -> None:
        self._todo: deque[Callable[[], Callable[[], None]]] = deque()

    def submit(self, work: Callable[[], Callable[[], None]], request_id: str) -> None:
        """See `Background`."""
        self._todo.append(work)

    def run(self) -> bool:
        """Do it all; return whether there was any."""
        has_moved = bool(self._todo)
        while self._todo:
            self._todo.popleft()()()
        return has_moved
