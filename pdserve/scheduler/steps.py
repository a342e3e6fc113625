"""Builds steps, and keeps them until their results are back.

A step tells workers only what they do not know yet. A step in flight may still write the blocks of
every request in it, so a request that ends meanwhile keeps its blocks until the last such step has
retired. Decides nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from pdserve.errors import InternalError
from pdserve.wire.step import NewRequest, SchedulerOutput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.scheduler.request import Request
    from pdserve.wire.ids import BlockId, RequestId
    from pdserve.wire.transfer import ConnectorMetadata

_NUM_REMEMBERED = 64


@dataclass(slots=True)
class Filling:
    """Contents so far of a step being built.

    Attributes:
        num_tokens: Tokens that each request computes behind its computed ones.
        grown: New blocks for those tokens, by request that got some.
        num_draft_rows: Draft tokens that may be computed behind those, by request.
    """

    num_tokens: dict[RequestId, int] = field(default_factory=dict)
    grown: dict[RequestId, list[BlockId]] = field(default_factory=dict)
    num_draft_rows: dict[RequestId, int] = field(default_factory=dict)


class Step:
    """One submitted step.

    Attributes:
        num_computed_after: Tokens of each request that are computed once the step retires.
        num_tokens: Tokens of each request that the step computes, without drafts.
        num_prefill_tokens, num_decode_tokens: Prompt tokens it computes, and all others.
        num_draft_rows: Maximum draft tokens, as sent to the workers, by request.
        loading: Requests whose first tokens are loaded inside it.
        closing: Requests that are over, and wait for it to retire.
        void: Requests whose results in this step are discarded.
    """

    def __init__(
        self,
        step_id: int,
        num_computed_after: dict[RequestId, int],
        submitted_s: float,
        *,
        num_tokens: Mapping[RequestId, int],
        num_prefill_tokens: int = 0,
        num_draft_rows: Mapping[RequestId, int],
        loading: Sequence[RequestId] = (),
    ) -> None:
        self.step_id = step_id
        self.num_computed_after = num_computed_after
        self.submitted_s = submitted_s
        self.num_tokens = num_tokens
        self.num_prefill_tokens = num_prefill_tokens
        self.num_decode_tokens = sum(num_tokens.values()) - num_prefill_tokens
        self.num_draft_rows = num_draft_rows
        self.loading = loading
        self.closing: list[Request] = []
        self.void: set[RequestId] = set()


class StepQueue:
    """Builds steps and keeps them until they retire, in order.

    Args:
        is_pipelined: Whether there are stages that do not sample, and need the tokens sent.

    Attributes:
        num_built: Steps built so far; the next one's id.
        num_known: Number of requests that the workers know.
    """

    def __init__(self, *, is_pipelined: bool) -> None:
        self._is_pipelined = is_pipelined
        self.num_built = self.num_known = 0
        self._gone: list[RequestId] = []
        self._in_flight: deque[Step] = deque()
        self._past: deque[tuple[float, float]] = deque(maxlen=_NUM_REMEMBERED)

    def __len__(self) -> int:
        """Steps in flight."""
        return len(self._in_flight)

    @property
    def is_computing(self) -> bool:
        """Whether a step in flight has tokens, and so may write blocks."""
        return any(step.num_computed_after for step in self._in_flight)

    @property
    def has_drafts(self) -> bool:
        """Whether a step in flight has drafts, so that its number of new tokens is unknown."""
        return any(step.num_draft_rows for step in self._in_flight)

    @property
    def has_gone(self) -> bool:
        """Whether there are requests that the workers must still forget."""
        return bool(self._gone)

    # ---- making --------------------------------------------------------------------

    def submit(
        self,
        running: Mapping[RequestId, Request],
        filling: Filling,
        metadata: ConnectorMetadata | None,
        now_s: float,
    ) -> SchedulerOutput:
        """Build the next step and put it in flight.

        Args:
            running: Running requests, among them those of the step.
            metadata: The connector's message to the workers.
        """
        new: list[NewRequest] = []
        computed: list[int] = []
        new_block_ids: dict[RequestId, list[BlockId]] = {}
        sampled: list[list[int]] = []
        grown, num_draft_rows = filling.grown, filling.num_draft_rows
        after: dict[RequestId, int] = {}
        loading: list[RequestId] = []
        num_prefill = 0
        for request_id, num_tokens in filling.num_tokens.items():
            request = running[request_id]
            num_computed = request.num_computed_tokens
            if request.num_sent_tokens is not None:
                computed.append(num_computed)
                if request_id in grown:
                    new_block_ids[request_id] = grown[request_id]
                if self._is_pipelined:
                    sampled.append(request.tell_tokens())
            else:
                new.append(self._introduce(request))
            num_missing = len(request.prompt_token_ids) - num_computed
            if num_missing > 0:
                num_prefill += min(num_missing, num_tokens)
            if request.is_loading:
                loading.append(request_id)
            if request.times.first_step_at_s is None:
                self._begin_first(request, now_s)
            after[request_id] = request.advance(num_tokens)
        step_id, gone = self.num_built, self._gone
        self.num_built += 1
        self._gone = []
        if num_draft_rows:  # a request may have been taken out
            num_draft_rows = {i: n for i, n in num_draft_rows.items() if i in after}
        self._in_flight.append(
            Step(
                step_id,
                after,
                now_s,
                num_tokens=filling.num_tokens,
                num_prefill_tokens=num_prefill,
                num_draft_rows=num_draft_rows,
                loading=loading,
            )
        )
        return SchedulerOutput(
            step_id=step_id,
            num_scheduled_tokens=filling.num_tokens,
            new_requests=new,
            num_computed_tokens=computed,
            new_block_ids=new_block_ids,
            sampled_token_ids=sampled,
            num_draft_rows=num_draft_rows,
            gone_request_ids=gone,
            loading_request_ids=loading,
            connector_metadata=metadata,
        )

    def forget(self, request: Request) -> None:
        """Make the workers forget a request that is in no further step, or begins again."""
        if request.num_sent_tokens is not None:
            request.become_unknown()
            self.num_known -= 1
            self._gone.append(request.request_id)

    def _introduce(self, request: Request) -> NewRequest:
        holding = request.holding
        assert holding is not None
        request.tell_tokens()
        self.num_known += 1
        sampling = request.sampling
        if request.remote_decode and sampling.grammar is not None:
            # Ranks read it for masks alone, and another engine makes those behind the first token.
            sampling = msgspec.structs.replace(sampling, max_tokens=1)
        return NewRequest(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=list(request.output_token_ids),
            sampling=sampling,
            block_ids=list(holding.blocks),
            num_computed_tokens=request.num_computed_tokens,
            prediction_token_ids=request.wire.prediction_token_ids,
            cache_salt=request.cache_salt,
        )

    def _begin_first(self, request: Request, now_s: float) -> None:
        ready_s = request.times.load_ready_s
        waited_s = 0.0 if ready_s is None else self._step_wait_s(ready_s, now_s)
        request.times.begin_step(now_s, waited_s=waited_s)

    def _step_wait_s(self, since_s: float, now_s: float) -> float:
        """Return how long KV that came at `since_s` waited for the step that ran then.

        0.0 if no step ran; if the step still runs, the wait until `now_s`.
        """
        for submitted_s, retired_s in self._past:
            if submitted_s <= since_s <= retired_s:
                return min(retired_s, now_s) - since_s
        is_running = any(
            step.num_computed_after and step.submitted_s <= since_s for step in self._in_flight
        )
        return now_s - since_s if is_running else 0.0

    # ---- in flight -----------------------------------------------------------------

    def has(self, request: Request) -> bool:
        """Whether a step in flight computes this request, even if its results are discarded."""
        return any(request.request_id in step.num_computed_after for step in self._in_flight)

    def retire(self, step_id: int, now_s: float) -> Step:
        """Remove and return the oldest step, which must be `step_id`."""
        if not self._in_flight or self._in_flight[0].step_id != step_id:
            raise InternalError(f"step {step_id} retired out of order")
        step = self._in_flight.popleft()
        if step.num_computed_after:
            self._past.append((step.submitted_s, now_s))
        return step

    def void(self, request_id: RequestId) -> None:
        """Discard this request's results in the steps in flight."""
        for step in self._in_flight:
            if request_id in step.num_computed_after:
                step.void.add(request_id)

    def take_back(self, request: Request) -> None:
        """Note that a step has sampled nothing: those in flight are one token behind their plan."""
        request.take_back()
        for step in self._in_flight:
            if request.request_id in step.num_computed_after:
                step.num_computed_after[request.request_id] -= 1

    def close_after(self, request: Request) -> bool:
        """Make a request that is over wait for the last step that has it; False if none has."""
        for step in reversed(self._in_flight):
            if request.request_id in step.num_computed_after:
                step.closing.append(request)
                return True
        return False
