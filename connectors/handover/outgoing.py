"""P's share of the scheduler half: pushes to other engines, and leases.

Stages what the worker halves shall do about them, and takes what became of it. It makes no
handoffs, and knows neither tensors nor sockets; time is asked for when a ticket comes.

A push's entry, by its nonce:

    (none) --queued--> EXPECTED --registered--> LIVE --finished--> (none), leased under the nonce
                          |                      |`--aborted--> STOPPED --settled--> (none)
                          |                      `--withdrawn--> WITHDRAWN --finished--> (none),
                          |                                         |       leased under another
                          |                                         `--aborted--> STOPPED
                          |--withdrawn--> WITHDRAWN
                          `--aborted--> STOPPED

One whose ticket comes too late is STOPPED at once. A withdrawn push that was never live has
nothing to settle: it is forgotten when it is aborted.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pdserve.connectors.handover.instructions import Chunk, End, Expect, Stop
from pdserve.connectors.remembered import Remembered
from pdserve.errors import InternalError
from pdserve.wire.transfer import LeaseEnd

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Sequence

    from pdserve.connectors.handover.instructions import Instructions
    from pdserve.connectors.handover.news import Registered, Withdrawn
    from pdserve.connectors.views import RequestView, ScheduledRequest, StepView
    from pdserve.observe.clock import Clock
    from pdserve.wire.ids import BlockId, RequestId
    from pdserve.wire.transfer import PushTicket, Settled

_TICKETS_REMEMBERED: Final = 1 << 13
"""More than a quorum remembers pushes: of one that is over for it, nothing would come any more."""


class _Stage(enum.Enum):
    EXPECTED = enum.auto()
    LIVE = enum.auto()
    WITHDRAWN = enum.auto()
    STOPPED = enum.auto()


@dataclass(slots=True)
class _Push:
    """`num_told` tokens of the prompt were announced to the workers, unproven ones not counted."""

    nonce: str
    request_id: RequestId
    num_tokens: int
    stage: _Stage = _Stage.EXPECTED
    was_live: bool = False
    block_ids: list[BlockId] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    num_told: int = 0


class Outgoing:
    """Every request of this engine whose KV another one is to have.

    Args:
        block_size: Of this engine.
        staged: Where instructions go.
        faults: Where `report_unknown`, `ticket_replayed` and `ticket_expired` are counted.
        clock: Tells which tickets have expired.
    """

    def __init__(
        self, block_size: int, *, staged: Instructions, faults: Counter[str], clock: Clock
    ) -> None:
        self._block_size = block_size
        self._staged = staged
        self._faults = faults
        self._clock = clock
        self._pushes: dict[str, _Push] = {}
        self._push_of: dict[RequestId, _Push] = {}
        self._tickets: Remembered[None] = Remembered(_TICKETS_REMEMBERED)
        self._leased: dict[RequestId, str] = {}
        self._leased_by_nonce: dict[str, RequestId] = {}
        self._prefills: set[RequestId] = set()

    def __len__(self) -> int:
        """Pushes that are not over, and leases that have not settled."""
        return len(self._pushes) + len(self._leased)

    # ---- what the scheduler asks and says ----------------------------------------------

    def arrived(self, request: RequestView) -> None:
        """A request whose KV another engine is to have."""
        self._prefills.add(request.request_id)
        ticket = request.kv_transfer_params.ticket
        if ticket is not None:
            self._expect(request, ticket)

    def _expect(self, request: RequestView, ticket: PushTicket) -> None:
        """Let D's registration be known.

        One whose ticket has expired, or was seen before, is no push: it will be pulled. D is
        told so at once.
        """
        nonce, now_s = ticket.nonce, self._clock.monotonic_s()
        expires_s = request.arrival_s + ticket.valid_s
        if nonce in self._tickets:
            self._faults["ticket_replayed"] += 1
            return
        self._tickets.add(nonce, None, now_s=now_s, until_s=math.inf)
        push = _Push(nonce, request.request_id, len(request.prompt_token_ids))
        self._pushes[nonce] = push
        if expires_s <= now_s:
            self._faults["ticket_expired"] += 1
            self._end(push, "its ticket has expired")
            return
        self._push_of[request.request_id] = push
        self._staged.expects.append(Expect(nonce, request.request_id, ticket.decode))

    def is_expected(self, request: RequestView) -> bool:
        """Whether D has neither registered its blocks for this request nor said it will not."""
        push = self._push_of.get(request.request_id)
        return push is not None and push.stage is _Stage.EXPECTED

    def holds_blocks(self, request: RequestView) -> bool:
        """Whether D may be written from the request's blocks."""
        push = self._push_of.get(request.request_id)
        return push is not None and push.was_live

    def begin(
        self, request: RequestView, block_ids: Sequence[BlockId], generations: Sequence[int]
    ) -> None:
        """`block_ids` are held for the request.

        Raises:
            InternalError: It is to be pushed, and they are not those of its whole prompt.
        """
        push = self._push_of.get(request.request_id)
        if push is None or push.stage is not _Stage.LIVE:
            return
        num_blocks = -(-push.num_tokens // self._block_size)
        if not len(generations) == len(block_ids) >= num_blocks:
            raise InternalError(
                f"request {push.request_id} is pushed: its {push.num_tokens} tokens need "
                f"{num_blocks} blocks with their generations at once, not {len(block_ids)} with "
                f"{len(generations)}"
            )
        push.block_ids = list(block_ids[:num_blocks])
        push.generations = list(generations[:num_blocks])

    def plan_chunks(self, step: StepView) -> list[Chunk]:
        """What a step computes. O(requests of the step) if any here is for another engine.

        The first chunk of a push begins with token 0, whatever it found in the prefix cache:
        D needs that, too. Of a prompt that will be pulled the last chunk is its lease's.
        """
        if not self._prefills:
            return []
        scheduled = [step.get(request_id) for request_id in step if request_id in self._prefills]
        planned = [(each, self._chunk_of(each, step)) for each in scheduled]
        for each, chunk in planned:
            push = self._push_of.get(each.view.request_id)
            if push is not None and chunk is not None and chunk.nonce and not chunk.is_unproven:
                push.num_told = chunk.end_token
        return [chunk for _, chunk in planned if chunk is not None]

    def _chunk_of(self, scheduled: ScheduledRequest, step: StepView) -> Chunk | None:
        request_id, num_tokens = scheduled.view.request_id, len(scheduled.view.prompt_token_ids)
        push = self._push_of.get(request_id)
        if push is None or push.stage is not _Stage.LIVE:
            if scheduled.end_token >= num_tokens or scheduled.view.is_unproven:
                return None
            return Chunk(
                nonce="",
                request_id=request_id,
                block_ids=list(scheduled.block_ids),
                generations=list(scheduled.generations),
                start_token=scheduled.start_token,
                end_token=scheduled.end_token,
                num_tokens=num_tokens,
                num_step_tokens=0,
            )
        if push.num_told >= num_tokens:
            return None
        return Chunk(
            nonce=push.nonce,
            request_id=request_id,
            block_ids=push.block_ids,
            generations=push.generations,
            start_token=push.num_told,
            end_token=min(scheduled.end_token, num_tokens),
            num_tokens=num_tokens,
            num_step_tokens=step.num_tokens,
            is_unproven=scheduled.view.is_unproven,
        )

    def finish(self, request_id: RequestId) -> tuple[str | None, bool]:
        """The request has its first token.

        Returns:
            The nonce of its push, if that is live: one that was withdrawn does not give the lease
            its nonce, because its D may have released that already. And whether its last chunk
            was unproven.
        """
        self._prefills.discard(request_id)
        push = self._push_of.get(request_id)
        if push is None:
            return None, False
        self._forget(push)
        is_unproven = push.num_told < push.num_tokens
        return (push.nonce, is_unproven) if push.stage is _Stage.LIVE else (None, False)

    def lease(self, request_id: RequestId, nonce: str) -> None:
        """The request's blocks are leased as `nonce` until that has settled."""
        self._leased[request_id] = nonce
        self._leased_by_nonce[nonce] = request_id

    def release(self, nonce: str) -> None:
        """Nobody will read this lease. Unknown nonces are ignored."""
        if nonce in self._leased_by_nonce:
            self._staged.ends.append(End(nonce, LeaseEnd.RELEASED))

    def keep(self, nonces: Iterable[str]) -> None:
        """Nobody can read these leases yet. Unknown nonces are ignored."""
        self._staged.keeps.extend(nonce for nonce in nonces if nonce in self._leased_by_nonce)

    def abort(self, request_id: RequestId) -> str | None:
        """The request has ended without a lease: stop its push.

        Returns:
            The push's nonce, if its blocks may be in use until that has settled.
        """
        self._prefills.discard(request_id)
        push = self._push_of.get(request_id)
        return push.nonce if push is not None and self._stop(push) else None

    # ---- what the workers say ------------------------------------------------------------

    def settled(self, settled: Settled) -> None:
        """A lease, or a push that was stopped, is over."""
        nonce = settled.nonce
        stopped = self._pushes.get(nonce)
        if stopped is not None:
            self._forget(stopped)
            return
        nonce = nonce or self._leased.get(settled.request_id, "")
        if self._leased.get(settled.request_id) != nonce or not nonce:
            self._faults["report_unknown"] += 1
            return
        del self._leased[settled.request_id], self._leased_by_nonce[nonce]

    def registered(self, registered: Registered) -> RequestId | None:
        """D has reserved blocks; return whose KV it waits for."""
        push = self._pushes.get(registered.nonce)
        if push is None:
            self._faults["report_unknown"] += registered.nonce not in self._tickets
            return None
        if push.stage is _Stage.EXPECTED:
            push.stage, push.was_live = _Stage.LIVE, True
        return push.request_id

    def withdrawn(self, withdrawn: Withdrawn) -> RequestId | None:
        """There will be no push, or no more of it; return of which request."""
        push = self._pushes.get(withdrawn.nonce)
        if push is None:
            # A push that is over here may be pulled: its lease is for anybody.
            self._faults["report_unknown"] += withdrawn.nonce not in self._tickets
            return None
        if push.stage is not _Stage.STOPPED:
            push.stage = _Stage.WITHDRAWN
        return push.request_id

    def _stop(self, push: _Push) -> bool:
        """Stop a push; return whether its blocks may be in use until it has settled."""
        if push.stage is _Stage.WITHDRAWN and not push.was_live:
            self._forget(push)
            return False
        if push.stage is not _Stage.STOPPED:
            del self._push_of[push.request_id]
            self._end(push, "aborted at its owner")
        return push.was_live

    def _end(self, push: _Push, why: str) -> None:
        push.stage = _Stage.STOPPED
        self._staged.stops.append(Stop(push.nonce, push.request_id, why))

    def _forget(self, push: _Push) -> None:
        del self._pushes[push.nonce]
        if self._push_of.get(push.request_id) is push:
            del self._push_of[push.request_id]
