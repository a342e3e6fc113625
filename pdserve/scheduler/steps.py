"""What the workers are told of a step: a difference to what they know. Decides nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.wire.step import KnownRequests, NewRequest, SchedulerOutput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.scheduler.request import Request
    from pdserve.wire.ids import BlockId, RequestId


class StepBuilder:
    """Remembers which requests the workers know, and words the steps.

    Args:
        is_pipelined: Whether there are stages that do not sample, and must be told the tokens.

    Attributes:
        num_built: Steps so far; the next one's id.
        known: Ids of the requests that the workers know.
    """

    def __init__(self, *, is_pipelined: bool) -> None:
        self._is_pipelined = is_pipelined
        self.num_built = 0
        self.known: set[RequestId] = set()
        self._gone: list[RequestId] = []

    @property
    def has_gone(self) -> bool:
        """Whether there are requests that the workers are still to forget."""
        return bool(self._gone)

    def forget(self, request_id: RequestId) -> None:
        """The request is in no further step, or begins from the start."""
        if request_id in self.known:
            self.known.discard(request_id)
            self._gone.append(request_id)

    def build(
        self, scheduled: Sequence[tuple[Request, int]], grown: Mapping[RequestId, list[BlockId]]
    ) -> SchedulerOutput:
        """The next step.

        Args:
            scheduled: Requests that compute so many tokens behind their computed ones.
            grown: Blocks that some of them got for it.
        """
        new: list[NewRequest] = []
        known_ids: list[RequestId] = []
        known_blocks: list[list[BlockId]] = []
        known_computed: list[int] = []
        known_sampled: list[list[int]] = []
        for request, _ in scheduled:
            request_id = request.request_id
            if request_id in self.known:
                known_ids.append(request_id)
                known_blocks.append(grown.get(request_id, []))
                known_computed.append(request.num_computed_tokens)
                if self._is_pipelined:
                    known_sampled.append(request.output_token_ids[request.num_told_tokens :])
                    request.num_told_tokens = len(request.output_token_ids)
            else:
                new.append(self._introduce(request))
        step = SchedulerOutput(
            step_id=self.num_built,
            new_requests=new,
            known_requests=KnownRequests(
                request_ids=known_ids,
                new_block_ids=known_blocks,
                num_computed_tokens=known_computed,
                sampled_token_ids=known_sampled,
            ),
            num_scheduled_tokens={request.request_id: num for request, num in scheduled},
            gone_request_ids=self._gone,
        )
        self._gone = []
        self.num_built += 1
        return step

    def _introduce(self, request: Request) -> NewRequest:
        holding = request.holding
        assert holding is not None
        self.known.add(request.request_id)
        request.num_told_tokens = len(request.output_token_ids)
        return NewRequest(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=list(request.output_token_ids),
            sampling=request.sampling,
            block_ids=list(holding.blocks),
            num_computed_tokens=request.num_computed_tokens,
        )
