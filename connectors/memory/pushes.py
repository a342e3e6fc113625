"""P's side of pushes: what is computed is written to the ranks of D that have registered for it.

What D says is noted when it is said and acted on in the next poll. Each poll lets a part of
every write arrive; what was begun goes on arriving whatever happens to the push, and only then
is D told that it is over, and are P's own blocks let go of.

    (none) --expected, or registered by D--> open --all ranks of D have taken it--> (none)
                                              |
                                              `--given up by D, or stopped, or D is not heard
                                                 of--> ended --nothing in flight--> (none)
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pdserve.connectors.handover.news import PushNews, Registered, Withdrawn
from pdserve.connectors.memory.copying import Copy
from pdserve.connectors.memory.reserves import Written
from pdserve.connectors.slicing import pieces, routes_from
from pdserve.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.connectors.handover.instructions import Chunk, Expect, Grant, Reserve, Stop
    from pdserve.connectors.memory.worker import MemoryWorker
    from pdserve.connectors.slicing import Route
    from pdserve.wire.ids import BlockId, RequestId
    from pdserve.wire.transfer import Endpoint, EngineRef, KVHandoff

_MAX_REMEMBERED: Final = 1 << 14


@dataclass(slots=True, eq=False)
class _Registration:
    """What one rank of D wants."""

    endpoint: Endpoint
    reserve: Reserve
    route: Route
    num_posted: int
    num_in_flight: int = 0
    num_bytes: int = 0
    num_descriptors: int = 0
    is_said: bool = False
    is_taken: bool = False
    is_wrong: bool = False
    is_aborted: bool = False


@dataclass(slots=True, eq=False)
class _Push:
    nonce: str
    heard_s: float
    waits_since_s: float = float("inf")
    incomplete_since_s: float = float("inf")
    request_id: RequestId | None = None
    decode: EngineRef | None = None
    registrations: dict[int, _Registration] = field(default_factory=dict)
    block_ids: list[BlockId] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    num_complete: int = 0
    num_tokens: int = -1
    complete_s: float = 0.0
    handoff: KVHandoff | None = None
    is_reported: bool = False
    ended: str | None = None
    is_end_reported: bool = False

    @property
    def num_in_flight(self) -> int:
        return sum(each.num_in_flight for each in self.registrations.values())


@dataclass(slots=True, eq=False)
class _Write:
    push: _Push
    registration: _Registration
    copy: Copy
    generations: dict[BlockId, int]


class Pushes:
    """All pushes of one rank of P, by nonce.

    Attributes:
        last_step_s: When this rank last ran a step.
    """

    def __init__(self, here: MemoryWorker, now_s: float) -> None:
        self._here = here
        self.last_step_s = now_s
        self._pushes: dict[str, _Push] = {}
        self._writes: list[_Write] = []
        self._over: OrderedDict[str, None] = OrderedDict()
        self._withdrawn: list[Withdrawn] = []

    def __len__(self) -> int:
        """Number of pushes that are not over."""
        return len(self._pushes)

    # ---- what the engine says --------------------------------------------------------

    def expect(self, expect: Expect, now_s: float) -> None:
        """A request waits for D; a registration may have come before."""
        if expect.nonce in self._over:
            self._withdrawn.append(Withdrawn(nonce=expect.nonce, reason="it is over already"))
            return
        push = self._push(expect.nonce, now_s)
        push.request_id, push.decode, push.heard_s = expect.request_id, expect.decode, now_s
        for rank, each in list(push.registrations.items()):
            why = self._why_not(push, each.endpoint, rank)
            if why is not None:
                self._refuse(each, why)
                del push.registrations[rank]
        self._note_incomplete(push, now_s)

    def complete(self, chunks: Sequence[Chunk], now_s: float) -> None:
        """A step has run: what it computed of these may be written, or its digests be taken."""
        for chunk in chunks:
            self.hand_out(chunk.block_ids, chunk.generations)
            size = self._here.context.layout.block_size
            if not chunk.nonce:  # it will be pulled
                num_whole = chunk.end_token - chunk.end_token % size
                self._here.digests.take(chunk.block_ids, chunk.generations, num_whole)
                continue
            push = self._pushes.get(chunk.nonce)
            if push is None or push.ended is not None:
                continue
            push.waits_since_s = float("inf")
            push.block_ids, push.generations = chunk.block_ids, chunk.generations
            push.num_tokens, push.complete_s = chunk.num_tokens, now_s
            end = chunk.end_token
            push.num_complete = end if end == chunk.num_tokens else end - end % size
            self._here.digests.take(chunk.block_ids, chunk.generations, push.num_complete)
            for each in push.registrations.values():
                self._write(push, each)

    def grant(self, grant: Grant) -> None:
        """The request has finished: D gets this with the last byte."""
        push = self._pushes.get(grant.nonce)
        if push is not None:
            push.handoff = grant.handoff

    def stop(self, stop: Stop) -> None:
        """Write nothing more, and tell D so."""
        push = self._pushes.get(stop.nonce)
        if push is None:
            self._remember(stop.nonce)
        else:
            push.ended, push.is_end_reported = push.ended or stop.reason, True

    def hand_out(self, block_ids: Sequence[BlockId], generations: Sequence[int]) -> None:
        """These blocks are somebody's in these generations: nobody may be writing from others."""
        known = dict(zip(block_ids, generations, strict=True))
        self._here.leases.hand_out(block_ids, generations)
        for write in self._writes:
            for block_id, generation in write.generations.items():
                self._here.fault("block_reused_under_write", known.get(block_id, 0) > generation)

    # ---- what D says -----------------------------------------------------------------

    def heard(self, nonce: str, now_s: float) -> None:
        """D has it queued, or waits for its bytes."""
        push = self._pushes.get(nonce)
        if push is not None:
            push.heard_s = now_s

    def register(self, dest: MemoryWorker, reserve: Reserve, route: Route, now_s: float) -> None:
        """Rank `route.dest_rank` of D has reserved blocks."""
        assert dest.endpoint is not None
        each = _Registration(dest.endpoint, reserve, route, reserve.first_token)
        if reserve.nonce in self._over:
            self._refuse(each, "there is no such push any more")
            return
        push = self._push(reserve.nonce, now_s)
        why = self._why_not(push, dest.endpoint, route.dest_rank)
        if why is None and route.dest_rank in push.registrations:
            why = "it was registered before"
        if why is None and push.ended is not None:
            why = push.ended
        if why is not None:
            self._refuse(each, why)
            return
        push.heard_s = now_s
        push.registrations[route.dest_rank] = each
        self._note_incomplete(push, now_s)

    def taken(self, nonce: str, dest_rank: int, *, is_valid: bool) -> None:
        """Whether what was written was found to be so; if not, write it once more."""
        push = self._pushes.get(nonce)
        if push is not None and dest_rank in push.registrations:
            each = push.registrations[dest_rank]
            each.is_taken, each.is_wrong = is_valid, not is_valid

    def abort(self, nonce: str, dest_rank: int) -> None:
        """D does not want it any more."""
        push = self._pushes.get(nonce)
        if push is not None and dest_rank in push.registrations:
            push.registrations[dest_rank].is_aborted = True

    # ---- what follows ----------------------------------------------------------------

    @property
    def is_moving(self) -> bool:
        """Whether another poll is worth it although nobody has said anything."""
        return bool(self._writes) or any(
            push.ended is not None or any(each.is_wrong for each in push.registrations.values())
            for push in self._pushes.values()
        )

    def poll(self, now_s: float) -> PushNews:
        """Let a part of each write arrive and do what is due."""
        self._writes = [write for write in self._writes if not self._land(write, now_s)]
        registered: list[Registered] = []
        withdrawn, self._withdrawn = self._withdrawn, []
        for push in list(self._pushes.values()):
            self._end_if_due(push, now_s)
            if push.ended is None and not push.is_reported and self._is_registered(push):
                push.is_reported = True
                push.waits_since_s = now_s
                registered.append(Registered(nonce=push.nonce))
                # For as long as anything may be written, once more too, and not only while it is.
                assert push.request_id is not None
                self._here.leases.begin_write(push.request_id, push)
            if push.ended is None:
                self._go_on(push, now_s)
            if push.ended is not None and push.decode is not None and not push.is_end_reported:
                push.is_end_reported = True
                withdrawn.append(Withdrawn(nonce=push.nonce, reason=push.ended))
            self._forget_if_over(push)
        rank = self._here.context.rank
        return PushNews(rank=rank, registered=registered, withdrawn=withdrawn)

    def close(self) -> None:
        """Nothing is written any more."""
        self._writes.clear()
        self._pushes.clear()

    def _land(self, write: _Write, now_s: float) -> bool:
        """Let a part of a write arrive; True if it is over."""
        push, each, here = write.push, write.registration, self._here
        dest, rank = here.exchange.find(each.endpoint), here.context.rank
        if (
            dest is None
            or dest.kv is None
            or here.kv is None
            or not dest.reserves.may_write(each.reserve.load_id, rank, now_s)
        ):
            push.ended = push.ended or "the decode engine is gone"
        elif not write.copy.land(here.kv, dest.kv):
            return False
        each.num_in_flight -= 1
        return True

    def _end_if_due(self, push: _Push, now_s: float) -> None:
        lease_s = self._here.context.config.transfer.lease_s
        if push.ended is not None:
            return
        if any(each.is_aborted for each in push.registrations.values()):
            push.ended = "given up by the decode engine"
        elif push.heard_s + lease_s <= now_s:
            push.ended = f"nothing was heard from the decode engine for {lease_s} s"
        elif push.incomplete_since_s + lease_s <= now_s:
            # One of them has given up, perhaps, and another that was not told so waits on.
            push.ended = f"only some of the decode engine's ranks have registered for {lease_s} s"
        elif max(push.waits_since_s, self.last_step_s) + lease_s <= now_s:
            # The pool may be full of what D would read, had it the blocks that wait for this.
            push.ended = f"the decode engine's blocks wait, and no step has run for {lease_s} s"

    def _note_incomplete(self, push: _Push, now_s: float) -> None:
        """Note since when some ranks of D have registered, and others have not."""
        if push.decode is None or not push.registrations or self._is_registered(push):
            push.incomplete_since_s = float("inf")
        else:
            push.incomplete_since_s = min(push.incomplete_since_s, now_s)

    def _is_registered(self, push: _Push) -> bool:
        return push.decode is not None and len(push.registrations) == len(
            routes_from(self._here.context.shape, push.decode.shape, self._here.context.rank)
        )

    def _go_on(self, push: _Push, now_s: float) -> None:
        for each in push.registrations.values():
            dest = self._here.exchange.find(each.endpoint)
            if dest is None:
                push.ended = "the decode engine is gone"
                return
            if push.decode is not None:
                dest.reserves.heard(each.reserve.load_id, now_s)
            if each.is_wrong:
                each.num_posted, each.is_wrong, each.is_said = (
                    each.reserve.first_token,
                    False,
                    False,
                )
                self._write(push, each)
            is_written = each.num_posted >= push.num_tokens >= 0 and not each.num_in_flight
            if is_written and push.handoff is not None and not each.is_said:
                each.is_said = True
                dest.reserves.written(
                    each.reserve.load_id,
                    self._here.context.rank,
                    Written(
                        handoff=push.handoff,
                        digests=self._here.digests.of(
                            push.block_ids,
                            push.generations,
                            push.num_tokens,
                            each.route,
                            first_token=each.reserve.first_token,
                        ),
                        exposed_s=now_s - push.complete_s,
                        num_bytes=each.num_bytes,
                        num_descriptors=each.num_descriptors,
                    ),
                )

    def _write(self, push: _Push, each: _Registration) -> None:
        """Post what is complete and was not posted; it arrives over the next polls."""
        start, end = each.num_posted, push.num_complete
        if end <= start:
            return
        assert push.decode is not None
        size = self._here.context.layout.block_size
        try:
            what = pieces(
                self._here.context.shape,
                push.decode.shape,
                each.route,
                push.block_ids,
                each.reserve.local_block_ids,
                first_token=start,
                num_tokens=end,
            )
        except PeerError as error:
            push.ended = str(error)
            return
        copy = Copy(what)
        used = slice(start // size, -(-end // size))
        generations = dict(zip(push.block_ids[used], push.generations[used], strict=True))
        write = _Write(push, each, copy, generations)
        each.num_posted = end
        each.num_in_flight += 1
        each.num_bytes += copy.num_bytes
        each.num_descriptors += copy.num_descriptors
        self._writes.append(write)

    def _forget_if_over(self, push: _Push) -> None:
        """Say so to D, unless it knows."""
        registrations = push.registrations.values()
        if push.ended is None:
            if not registrations or not all(each.is_taken for each in registrations):
                return
        elif push.num_in_flight:
            return
        for each in registrations:
            if not each.is_taken:
                self._refuse(each, push.ended or "")
        del self._pushes[push.nonce]
        self._remember(push.nonce)
        if push.request_id is not None:
            self._here.leases.end_write(push.request_id, push)

    def _refuse(self, each: _Registration, why: str) -> None:
        dest = self._here.exchange.find(each.endpoint)
        if dest is not None:
            dest.reserves.fail(each.reserve.load_id, self._here.context.rank, why)

    def _why_not(self, push: _Push, endpoint: Endpoint, dest_rank: int) -> str | None:
        """Why who listens at `endpoint` cannot be that rank of the push's D."""
        if push.decode is None:
            return None  # asked again once it is expected
        endpoints = push.decode.endpoints
        if dest_rank < len(endpoints) and endpoints[dest_rank] == endpoint:
            return None
        return f"it is planned for {push.decode.engine_id} incarnation {push.decode.incarnation}"

    def _push(self, nonce: str, now_s: float) -> _Push:
        return self._pushes.setdefault(nonce, _Push(nonce, now_s))

    def _remember(self, nonce: str) -> None:
        self._over[nonce] = None
        if len(self._over) > _MAX_REMEMBERED:
            self._over.popitem(last=False)
