"""What a connector may see of the scheduler's requests and steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from pdserve.wire.ids import BlockHash, BlockId, RequestId
    from pdserve.wire.request import FinishReason, OnLoadFailure
    from pdserve.wire.sampling import TokenLogprobs
    from pdserve.wire.transfer import KVHandoff, PushTicket


class ConnectorParams(Protocol):
    """What came with a request, and nobody reads but its connector."""

    @property
    def ticket(self) -> PushTicket | None:
        """The push that it is part of, at either end, if it is."""
        ...


class RequestView(Protocol):
    """What a connector may see of the scheduler's request."""

    @property
    def request_id(self) -> RequestId:
        """Engine-level id."""
        ...

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt."""
        ...

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens out so far."""
        ...

    @property
    def arrival_s(self) -> float:
        """When this engine's server took it, in monotonic seconds."""
        ...

    @property
    def first_logprobs(self) -> list[TokenLogprobs] | None:
        """The first token's logprobs, if the request asked for any."""
        ...

    @property
    def num_cached_prompt_tokens(self) -> int:
        """Prompt tokens that a prefix cache had when it was prefilled."""
        ...

    @property
    def cache_salt(self) -> str:
        """What its prefixes are shared within."""
        ...

    @property
    def prompt_block_hashes(self) -> Sequence[BlockHash]:
        """Of the blocks that its prompt fills: each names all tokens up to there, and the salt."""
        ...

    @property
    def is_unproven(self) -> bool:
        """Whether a load inside a step in flight, or in the one that is built, may still fail.

        What is in its blocks is nothing to be saved or sent until that is known.
        """
        ...

    @property
    def remote_decode(self) -> bool:
        """Whether its KV is to be leased out."""
        ...

    @property
    def handoff(self) -> KVHandoff | None:
        """Where another engine has prefilled it, if one has."""
        ...

    @property
    def kv_transfer_params(self) -> ConnectorParams:
        """What came with it for its connector alone."""
        ...

    @property
    def on_load_failure(self) -> OnLoadFailure:
        """What becomes of it if its KV does not arrive."""
        ...

    @property
    def finish_reason(self) -> FinishReason | None:
        """How it has ended; HANDOFF if another engine is to go on from here, None if it has not."""
        ...


class ScheduledRequest(NamedTuple):
    """What a step computes of one request: the tokens `start_token` to `end_token`.

    `block_ids` is its table so far, `generations` how often each block had been handed out. It may
    be preempted or gone before the step has run; the blocks then have other generations once they
    are used again.
    """

    view: RequestView
    block_ids: Sequence[BlockId]
    generations: Sequence[int]
    start_token: int
    end_token: int


class StepView:
    """The step that is being built.

    Args:
        num_scheduled_tokens: Tokens to compute, by request.
        look_up: Makes the rest of what a connector may ask for.

    Attributes:
        asked_about: The request that was looked at last, which is whose fault an error is.
    """

    def __init__(
        self,
        num_scheduled_tokens: Mapping[RequestId, int],
        look_up: Callable[[RequestId], ScheduledRequest],
    ) -> None:
        self._num_scheduled_tokens = num_scheduled_tokens
        self._look_up = look_up
        self.asked_about: RequestId | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that it computes, of all requests."""
        return sum(self._num_scheduled_tokens.values())

    def __iter__(self) -> Iterator[RequestId]:
        """Ids of its requests, in its order."""
        return iter(self._num_scheduled_tokens)

    def without(self, request_ids: Collection[RequestId]) -> StepView:
        """The same step, but for some of its requests."""
        left = {
            name: n for name, n in self._num_scheduled_tokens.items() if name not in request_ids
        }
        return StepView(left, self.get)

    def get(self, request_id: RequestId) -> ScheduledRequest:
        """What it computes of one of them."""
        self.asked_about = request_id
        return self._look_up(request_id)
