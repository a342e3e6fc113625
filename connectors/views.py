"""The view that connectors have of the scheduler's requests and steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from pdserve.wire.ids import BlockHash, BlockId, RequestId
    from pdserve.wire.request import FinishReason, OnLoadFailure
    from pdserve.wire.sampling import TokenLogprobs
    from pdserve.wire.transfer import KVHandoff, PushTicket


class ConnectorParams(Protocol):
    """Parameters of a request that only its connector reads."""

    @property
    def ticket(self) -> PushTicket | None:
        """The push that the request is part of, at either end; None if none."""
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
        """Tokens generated so far."""
        ...

    @property
    def arrival_s(self) -> float:
        """When this engine's server accepted it, in monotonic seconds."""
        ...

    @property
    def first_logprobs(self) -> list[TokenLogprobs] | None:
        """The first token's logprobs, if the request asked for any."""
        ...

    @property
    def num_cached_prompt_tokens(self) -> int:
        """Prompt tokens that came from a prefix cache when it was prefilled."""
        ...

    @property
    def cache_salt(self) -> str:
        """Salt of its block hashes: only requests with an equal salt share prefixes."""
        ...

    @property
    def prompt_block_hashes(self) -> Sequence[BlockHash]:
        """Hashes of the blocks its prompt fills; each covers the salt and all tokens to its end."""
        ...

    @property
    def is_unproven(self) -> bool:
        """Whether a load inside a step in flight, or in the one being built, may still fail.

        Until that is known, the contents of its blocks must not be saved or sent.
        """
        ...

    @property
    def remote_decode(self) -> bool:
        """Whether another engine will decode it, so that its KV must be leased."""
        ...

    @property
    def handoff(self) -> KVHandoff | None:
        """The handoff of the engine that prefilled it; None if none did."""
        ...

    @property
    def kv_transfer_params(self) -> ConnectorParams:
        """Parameters that only its connector reads."""
        ...

    @property
    def on_load_failure(self) -> OnLoadFailure:
        """What to do with it if its KV does not arrive."""
        ...

    @property
    def finish_reason(self) -> FinishReason | None:
        """How it ended; HANDOFF if another engine continues it, None if it has not ended."""
        ...


class ScheduledRequest(NamedTuple):
    """What a step computes for one request: the tokens `start_token` to `end_token`.

    The KV of an output token is final once a token has been sampled behind it: until then a draft
    may have made it NaN, and it is computed again.

    `block_ids` is its table so far, `generations` how often each block has been handed out. The
    request may be preempted or end before the step has run; once its blocks are reused, they have
    other generations.
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
        look_up: Returns what the step computes for a request.

    Attributes:
        asked_about: The request that was looked up last, to which an error is attributed.
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
        """Tokens that the step computes, over all requests."""
        return sum(self._num_scheduled_tokens.values())

    def __iter__(self) -> Iterator[RequestId]:
        """Iterate over the ids of its requests, in the step's order."""
        return iter(self._num_scheduled_tokens)

    def without(self, request_ids: Collection[RequestId]) -> StepView:
        """Return the same step without some of its requests."""
        left = {
            name: n for name, n in self._num_scheduled_tokens.items() if name not in request_ids
        }
        return StepView(left, self.get)

    def get(self, request_id: RequestId) -> ScheduledRequest:
        """Return what the step computes for one request."""
        self.asked_about = request_id
        return self._look_up(request_id)
