"""Transfers as the scheduler half sees them, from the request's arrival to the end.

An `Incoming` transfer at D, by what was staged for it last:

    (none) --queued--> WATCHED --begun--> LOADING --received--> (none), lease released as read
                          |               |  |  `--failed--> (none), its lease perhaps left alive
                          |               |  `--failed, `again`--> LOADING, once, if pulled
                          |               `--aborted--> LOADING (its report settles it)
                          `--aborted, nothing to load--> (none), lease released

An `Outgoing` transfer at P, by its stage:

    (none) --queued--> PULLED --finished--> LEASED under a nonce of its own --settled--> (none)
    (none) --queued with a ticket--> EXPECTED --registered--> LIVE --finished--> LEASED as the push
                                        |                      |
                                        `------withdrawn-------+--> WITHDRAWN, goes on as PULLED
    EXPECTED, LIVE, WITHDRAWN --aborted--> STOPPED --settled--> (none)

A push whose ticket comes too late is STOPPED at once, and its request PULLED. A withdrawn push
that was never live has nothing to settle: it is forgotten when it is aborted.

Transfers decide; their owner stages what they return. They know neither tensors, sockets nor time.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.connectors.base import Match
from pdserve.connectors.handover.instructions import Chunk, Load, Reserve, Withdrawn
from pdserve.errors import InternalError
from pdserve.wire.request import OnLoadFailure
from pdserve.wire.transfer import LoadFailure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.connectors.handover.instructions import Registered
    from pdserve.connectors.views import RequestView, ScheduledRequest
    from pdserve.wire.ids import BlockId, RequestId
    from pdserve.wire.transfer import EngineRef, Failed, KVHandoff

# After these the lease may still hold, and a second try may succeed.
_TRIED_AGAIN: Final = (LoadFailure.DIGEST, LoadFailure.TIMEOUT, LoadFailure.PEER_LOST)


@dataclass(slots=True, eq=False)
class Incoming:
    """A request whose KV another engine has, or will write here.

    Attributes:
        block_size: Tokens per block of this engine.
        handoff: None if the KV is pushed.
        load: The load that was staged last; None while it only waits.
        tried: Id of the load that was tried again.
    """

    request: RequestView
    block_size: int
    nonce: str
    owner: EngineRef
    handoff: KVHandoff | None
    load: Load | Reserve | None = None
    tried: int | None = None
    is_aborted: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose KV the other engine has, or will have."""
        handoff = self.handoff
        return len(self.request.prompt_token_ids) if handoff is None else handoff.num_tokens

    def match(self, num_computed_tokens: int) -> Match:
        """Return what can be loaded after `num_computed_tokens`; nothing once a load has begun."""
        num_tokens = self.num_tokens - num_computed_tokens
        if self.load is not None or num_tokens <= 0:
            return Match(0, is_async=False)
        return Match(num_tokens, is_async=True, is_pinned=self.handoff is None)

    def begin(
        self, load_id: int, block_ids: Sequence[BlockId], num_external_tokens: int
    ) -> Load | Reserve:
        """Load the last `num_external_tokens` into a table.

        Raises:
            InternalError: They do not start at a block's edge, or do not fit into the table.
        """
        num_blocks = -(-self.num_tokens // self.block_size)
        first_token = self.num_tokens - num_external_tokens
        if first_token % self.block_size or first_token < 0 or len(block_ids) < num_blocks:
            raise InternalError(
                f"request {self.request.request_id}: cannot load {num_external_tokens} of "
                f"{self.num_tokens} tokens into {len(block_ids)} blocks of "
                f"{self.block_size}: they must start at a block's edge and fit"
            )
        named = (load_id, self.request.request_id, self.nonce, self.owner)
        local = list(block_ids[:num_blocks])
        if self.handoff is None:
            self.load = Reserve(*named, local, first_token, self.num_tokens)
        else:
            there = self.handoff.block_ids
            self.load = Load(*named, there, local, first_token, self.num_tokens)
        return self.load

    def is_loading(self, load_id: int) -> bool:
        """Whether this is the load in flight."""
        return self.load is not None and self.load.load_id == load_id

    def again(self, failed: Failed, load_id: int) -> Load | None:
        """Retry the unconfirmed part from the same P; None if that is not worth it."""
        if (
            not isinstance(self.load, Load)
            or not self.is_loading(failed.load_id)
            or self.tried is not None
            or self.is_aborted
            or failed.reason not in _TRIED_AGAIN
        ):
            return None
        num_valid_tokens = min(failed.num_valid_tokens, self.num_tokens - 1)
        edge = num_valid_tokens - num_valid_tokens % self.block_size
        first_token = max(self.load.first_token, edge)
        self.tried = failed.load_id
        self.load = again = msgspec.structs.replace(
            self.load, load_id=load_id, first_token=first_token
        )
        return again

    @property
    def leaves_lease(self) -> bool:
        """Whether a failure leaves the lease alive.

        The recipient of the failure may have the same KV pulled under the same lease, by this
        engine or another: this engine only stops renewing it.
        """
        is_reported = self.request.on_load_failure is OnLoadFailure.REPORT
        return not self.is_aborted and (is_reported or self.handoff is None)


class PushStage(enum.Enum):
    """Whether an outgoing transfer is pushed, and its progress; see the module."""

    PULLED = enum.auto()
    EXPECTED = enum.auto()
    LIVE = enum.auto()
    WITHDRAWN = enum.auto()
    LEASED = enum.auto()
    STOPPED = enum.auto()


@dataclass(slots=True, eq=False)
class Outgoing:
    """A request whose KV goes to another engine.

    Attributes:
        num_tokens: Tokens of its prompt.
        nonce: Nonce of its push or of its lease; empty if it has neither.
        was_live: Whether its push has ever been live, so that its blocks may be written from.
        registered_by: Ranks that have D's registration, which counts once every rank has it.
        withdrawn_by: Ranks at which the push was withdrawn. One rank is enough.
        block_ids, generations: The blocks of its whole prompt, while it is pushed.
        num_announced: Tokens announced to the workers, without unproven ones.
    """

    request_id: RequestId
    num_tokens: int
    nonce: str = ""
    stage: PushStage = PushStage.PULLED
    was_live: bool = False
    registered_by: set[int] = field(default_factory=set)
    withdrawn_by: set[int] = field(default_factory=set)
    block_ids: list[BlockId] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    num_announced: int = 0

    def hear(
        self, fact: Registered | Withdrawn, rank: int, num_ranks: int
    ) -> tuple[str | None, bool]:
        """Take a rank's news of its push.

        Returns:
            The reason if its request may go on now; and whether the rank repeats itself.
        """
        said_by = self.withdrawn_by if isinstance(fact, Withdrawn) else self.registered_by
        is_repeated = rank in said_by
        said_by.add(rank)
        if isinstance(fact, Withdrawn) and self.stage in (PushStage.EXPECTED, PushStage.LIVE):
            self.stage = PushStage.WITHDRAWN
            return f"push withdrawn: {fact.reason}", is_repeated
        if self.stage is PushStage.EXPECTED and len(self.registered_by) == num_ranks:
            self.stage, self.was_live = PushStage.LIVE, True
            return "its blocks at D are registered", is_repeated
        return None, is_repeated

    def begin(
        self, block_ids: Sequence[BlockId], generations: Sequence[int], block_size: int
    ) -> None:
        """Take the blocks that are held for the request.

        Raises:
            InternalError: It will be pushed, and they do not cover its whole prompt.
        """
        if self.stage is not PushStage.LIVE:
            return
        num_blocks = -(-self.num_tokens // block_size)
        if not len(generations) == len(block_ids) >= num_blocks:
            raise InternalError(
                f"request {self.request_id} is pushed: its {self.num_tokens} tokens need "
                f"{num_blocks} blocks with their generations at once, not {len(block_ids)} with "
                f"{len(generations)}"
            )
        self.block_ids = list(block_ids[:num_blocks])
        self.generations = list(generations[:num_blocks])

    def take_chunk(self, scheduled: ScheduledRequest, num_step_tokens: int) -> Chunk | None:
        """Return what a step computes of it, for the workers; None = nothing.

        The first chunk of a push begins with token 0, whatever the prefix cache had: D needs that
        as well. The last part of a prompt that will be pulled is covered by its lease.
        """
        is_unproven, end_token = scheduled.view.is_unproven, scheduled.end_token
        if self.stage is PushStage.LIVE:
            nonce, block_ids, generations = self.nonce, self.block_ids, self.generations
            start_token, end_token = self.num_announced, min(end_token, self.num_tokens)
            if start_token >= self.num_tokens:
                return None
            if not is_unproven:
                self.num_announced = end_token
        else:
            nonce, start_token = "", scheduled.start_token
            block_ids, generations = list(scheduled.block_ids), list(scheduled.generations)
            if end_token >= self.num_tokens or is_unproven:
                return None
        return Chunk(
            nonce=nonce,
            request_id=self.request_id,
            block_ids=block_ids,
            generations=generations,
            start_token=start_token,
            end_token=end_token,
            num_tokens=self.num_tokens,
            num_step_tokens=num_step_tokens,
            is_unproven=is_unproven,
        )
