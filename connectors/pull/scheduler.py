"""The scheduler half of every connector that pulls: decides, counts, moves nothing.

It makes and checks handoffs, and stages what the worker half shall do. It knows neither
tensors nor sockets nor time; the randomness of nonces is passed in.

A request's entry at D, by what was staged for it last:

    (none) --queued--> WATCHED --alloc--> LOADING --report--> (none)
                          |                  `--aborted--> LOADING (its report settles it)
                          `--aborted, nothing to load--> (none), lease released
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.connectors.base import KVConnectorScheduler, Match
from pdserve.connectors.pull.instructions import (
    End,
    Grant,
    Load,
    Owner,
    PullInstructions,
    Release,
    Watch,
)
from pdserve.connectors.pull.secret import check_secret
from pdserve.errors import InternalError
from pdserve.wire.hashing import prompt_digest
from pdserve.wire.ids import EngineId, RequestId
from pdserve.wire.transfer import KVHandoff, LeaseEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.connectors.base import ConnectorContext, RequestView
    from pdserve.wire.ids import BlockId
    from pdserve.wire.step import SchedulerOutput
    from pdserve.wire.transfer import ConnectorMetadata, ConnectorReport, Endpoint


_MAX_BLOCKS = 1 << 31


@dataclass(slots=True)
class _Incoming:
    handoff: KVHandoff
    loading: bool = False


class PullScheduler(KVConnectorScheduler):
    """See `KVConnectorScheduler`.

    Args:
        endpoints: Where this engine's worker halves listen, in rank order; they go into the
            handoffs.
        new_nonce: Returns a string never returned before; unguessable outside of tests.

    Attributes:
        num_unknown_reports: Reports about requests that have no entry; they are ignored.
    """

    def __init__(
        self,
        context: ConnectorContext,
        endpoints: Sequence[Endpoint],
        *,
        new_nonce: Callable[[], str],
    ) -> None:
        if len(endpoints) != context.num_ranks:
            raise InternalError(
                f"{len(endpoints)} side channels for {context.num_ranks} ranks: each rank has one"
            )
        transfer = context.config.transfer
        self._context = context
        self._endpoints = list(endpoints)
        self._new_nonce = new_nonce
        self._block_size = context.layout.block_size
        self._secret = check_secret(host=transfer.host, secret=transfer.secret)
        self._incoming: dict[RequestId, _Incoming] = {}
        self._leased: dict[RequestId, str] = {}
        self._leased_by_nonce: dict[str, RequestId] = {}
        self._staged = PullInstructions()
        self._load_ids = itertools.count(1)
        self.num_unknown_reports = 0

    def check_handoff(self, request: RequestView) -> str | None:
        """See `KVConnectorScheduler`."""
        handoff = request.handoff
        if handoff is None:
            return None
        owner, mine = handoff.engine_id, self._context
        if not handoff.is_authentic(self._secret):
            return (
                "its signature is not this deployment's: engines need the same secret, given to "
                f"each as PDSERVE_SECRET (it says it is from {owner})"
            )
        prompt = request.prompt_token_ids
        for what, theirs, ours in (
            ("number of ranks", len(handoff.endpoints), mine.num_ranks),
            ("layout digest", handoff.layout_digest, mine.layout_digest),
            ("block size", handoff.block_size, self._block_size),
            ("prompt tokens", handoff.num_tokens, len(prompt)),
            ("prompt digest", handoff.prompt_digest, prompt_digest(prompt, request.cache_salt)),
            ("number of blocks", len(handoff.block_ids), self._blocks_of(len(prompt))),
        ):
            if theirs != ours:
                return f"{what} is {theirs} at {owner} and {ours} at {mine.engine_id}"
        # Without a secret anybody on this machine can sign, and block ids become addresses.
        if not all(0 <= block_id < _MAX_BLOCKS for block_id in handoff.block_ids):
            return f"it names blocks that {owner} cannot have"
        return None

    def request_queued(self, request: RequestView) -> None:
        """See `KVConnectorScheduler`."""
        handoff = request.handoff
        if handoff is not None:
            self._incoming[request.request_id] = _Incoming(handoff)
            self._staged.watches.append(Watch(handoff.nonce, Owner.of(handoff), handoff.lease_s))

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> Match | None:
        """See `KVConnectorScheduler`."""
        entry = self._incoming.get(request.request_id)
        if entry is None or entry.loading:
            return Match(0, is_async=False)
        num_tokens = entry.handoff.num_tokens - num_computed_tokens
        return Match(num_tokens, is_async=True) if num_tokens > 0 else Match(0, is_async=False)

    def update_state_after_alloc(
        self, request: RequestView, block_ids: Sequence[BlockId], num_external_tokens: int
    ) -> None:
        """See `KVConnectorScheduler`.

        Raises:
            InternalError: The tokens to load do not start at a block's edge, the table is
                too short for them, or nothing was offered.
        """
        entry = self._incoming.get(request.request_id)
        if num_external_tokens == 0:
            if entry is not None and not entry.loading:
                self._forget_unloaded(request.request_id, entry)
            return
        if entry is None or entry.loading:
            raise InternalError(
                f"request {request.request_id}: {num_external_tokens} external tokens were "
                "planned, but no load was offered"
            )
        handoff = entry.handoff
        start, offset = divmod(handoff.num_tokens - num_external_tokens, self._block_size)
        remote = handoff.block_ids[start:]
        local = list(block_ids[start : start + len(remote)])
        if offset or start < 0 or len(local) != len(remote):
            raise InternalError(
                f"request {request.request_id}: cannot load {num_external_tokens} of "
                f"{handoff.num_tokens} tokens into {len(block_ids)} blocks of "
                f"{self._block_size}: they must start at a block's edge and fit"
            )
        entry.loading = True
        self._staged.loads.append(
            Load(
                next(self._load_ids),
                request.request_id,
                handoff.nonce,
                Owner.of(handoff),
                remote,
                local,
            )
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ConnectorMetadata | None:
        """See `KVConnectorScheduler`."""
        staged, self._staged = self._staged, PullInstructions()
        return staged.to_metadata() if staged else None

    def request_finished(
        self, request: RequestView, block_ids: Sequence[BlockId]
    ) -> KVHandoff | None:
        """See `KVConnectorScheduler`.

        A handoff is made of a `remote_decode` request that has its first token. It names
        as many blocks as the prompt fills, the last one perhaps in part.
        """
        if not request.remote_decode or not request.output_token_ids:
            return None
        num_tokens = len(request.prompt_token_ids)
        blocks = list(block_ids[: self._blocks_of(num_tokens)])
        nonce = self._new_nonce()
        self._leased[request.request_id] = nonce
        self._leased_by_nonce[nonce] = request.request_id
        self._staged.grants.append(Grant(nonce, request.request_id, blocks))
        return KVHandoff(
            engine_id=EngineId(self._context.engine_id),
            incarnation=self._context.incarnation,
            nonce=nonce,
            request_id=request.request_id,
            endpoints=self._endpoints,
            block_ids=blocks,
            num_tokens=num_tokens,
            block_size=self._block_size,
            layout_digest=self._context.layout_digest,
            lease_s=self._context.config.transfer.lease_s,
            prompt_digest=prompt_digest(request.prompt_token_ids, request.cache_salt),
            first_token_ids=list(request.output_token_ids),
            first_logprobs=request.first_logprobs,
        ).signed(self._secret)

    def request_aborted(self, request: RequestView) -> None:
        """See `KVConnectorScheduler`."""
        entry = self._incoming.get(request.request_id)
        if entry is not None:
            if entry.loading:
                self._staged.aborts.append(request.request_id)
            else:
                self._forget_unloaded(request.request_id, entry)
        nonce = self._leased.get(request.request_id)
        if nonce is not None:
            self._staged.ends.append(End(nonce, LeaseEnd.ABORTED))

    def release_lease(self, nonce: str) -> None:
        """See `KVConnectorScheduler`."""
        if nonce in self._leased_by_nonce:
            self._staged.ends.append(End(nonce, LeaseEnd.RELEASED))

    def update_connector_output(self, report: ConnectorReport) -> None:
        """See `KVConnectorScheduler`."""
        for settled in report.settled:
            nonce = self._leased.pop(settled.request_id, None)
            if nonce is None:
                self.num_unknown_reports += 1
            else:
                del self._leased_by_nonce[nonce]
        ended = [r.request_id for r in report.received] + [f.request_id for f in report.failed]
        for request_id in ended:
            if self._incoming.pop(request_id, None) is None:
                self.num_unknown_reports += 1

    def has_staged(self) -> bool:
        """See `KVConnectorScheduler`."""
        return bool(self._staged)

    def _forget_unloaded(self, request_id: RequestId, entry: _Incoming) -> None:
        del self._incoming[request_id]
        self._staged.releases.append(Release(entry.handoff.nonce, Owner.of(entry.handoff)))

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
