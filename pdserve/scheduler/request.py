"""The scheduler's own request: its state, the legal moves, and its story."""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING

from pdserve.errors import InternalError
from pdserve.wire.request import RequestStages

if TYPE_CHECKING:
    from pdserve.kvcache.lease import Holding
    from pdserve.kvcache.manager import HashChain
    from pdserve.wire.outputs import TokenLogprobs
    from pdserve.wire.request import GenerateRequest


class State(enum.Enum):
    """Where a request stands.

    WAITING has no blocks. RECEIVING has blocks that a load fills. RUNNING is in the
    batch. LEASED has finished here, a peer may read its blocks. CLOSING is over for the
    client while a load or a step may still write its blocks. DONE holds nothing.
    """

    WAITING = "waiting"
    RECEIVING = "receiving"
    RUNNING = "running"
    LEASED = "leased"
    CLOSING = "closing"
    DONE = "done"


LEGAL_MOVES = frozenset(
    {
        (State.WAITING, State.RUNNING),
        (State.WAITING, State.RECEIVING),
        (State.WAITING, State.DONE),
        (State.RECEIVING, State.RUNNING),
        (State.RECEIVING, State.WAITING),
        (State.RECEIVING, State.CLOSING),
        (State.RUNNING, State.WAITING),
        (State.RUNNING, State.LEASED),
        (State.RUNNING, State.CLOSING),
        (State.RUNNING, State.DONE),
        (State.LEASED, State.DONE),
        (State.CLOSING, State.DONE),
    }
)


class Request:
    """One request inside one engine. Mutable; only the scheduler changes it.

    Attributes:
        num_computed_tokens: Tokens whose KV is, or will be once the steps in flight
            retire, in its blocks.
        num_pending_tokens: Tokens that steps in flight sample, one at most for each: they
            count as tokens, their ids are not known yet.
        num_told_tokens: Output tokens that the workers were told of, where they have to be.
        handoff: As in the wire request, until its KV is here or its load has failed.
    """

    def __init__(
        self, wire: GenerateRequest, chain: HashChain, *, order: int, now_s: float
    ) -> None:
        self.wire = wire
        # Read several times per step: attributes, not properties.
        self.request_id = wire.request_id
        self.prompt_token_ids = wire.prompt_token_ids
        self.sampling = wire.sampling
        self.chain = chain
        self.order = order
        self.state = State.WAITING
        self.output_token_ids: list[int] = []
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.num_told_tokens = 0
        self.holding: Holding | None = None
        self.handoff = wire.handoff
        self.remote_decode = wire.remote_decode
        self.first_logprobs: list[TokenLogprobs] | None = None
        self.num_cached_tokens = 0
        self.num_external_tokens = 0
        self.num_preemptions = 0
        self.load_failures: list[str] = []
        self.times = Times(queued_s=now_s)
        self._story: deque[tuple[float, str]] = deque(maxlen=64)
        self.note(now_s, f"queued prompt={len(wire.prompt_token_ids)}")

    @property
    def cache_salt(self) -> str:
        """What its cached prefixes are shared within."""
        return self.wire.cache_salt

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, pending ones included."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_pending_tokens

    @property
    def is_output_complete(self) -> bool:
        """Whether the tokens that are out or pending are all that may come."""
        num_output = len(self.output_token_ids) + self.num_pending_tokens
        return num_output >= self.sampling.max_tokens or (
            self.remote_decode and self.num_pending_tokens > 0
        )

    @property
    def is_decoding(self) -> bool:
        """Whether all but its last token is computed, and that one was sampled."""
        return self.num_pending_tokens > 0 or (
            bool(self.output_token_ids) and self.num_computed_tokens == self.num_tokens - 1
        )

    def move(self, state: State, now_s: float, why: str) -> None:
        """Change state.

        Raises:
            InternalError: The move is not legal; the message is the request's story.
        """
        if (self.state, state) not in LEGAL_MOVES:
            raise InternalError(
                f"illegal move {self.state.value} -> {state.value} ({why})\n{self.story()}"
            )
        self.state = state
        self.note(now_s, f"{state.value}: {why}")

    def note(self, now_s: float, event: str) -> None:
        """Add a line to the story; the oldest of more than 64 are forgotten."""
        self._story.append((now_s, event))

    def story(self) -> str:
        """What happened to this request, in order."""
        start_s = self.times.queued_s
        lines = [f"  +{(at - start_s) * 1e3:9.2f} ms  {event}" for at, event in self._story]
        return "\n".join([f"request {self.request_id}", *lines])


class Times:
    """Marks on the engine's monotonic clock, in seconds, from which the stages follow."""

    def __init__(self, *, queued_s: float) -> None:
        self.queued_s = queued_s
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.load_ready_s: float | None = None
        self.load_wait_s = 0.0
        self.load_transfer_s = 0.0
        self.load_bytes = 0
        self.first_step_at_s: float | None = None
        self.first_step_end_s: float | None = None

    def stages(self) -> RequestStages:
        """Durations between the marks that exist."""
        started = self.started_s if self.started_s is not None else self.queued_s
        first_step_at = self.first_step_at_s
        is_loaded = self.load_ready_s is not None
        prefill_end = self.first_token_s
        return RequestStages(
            queue_s=started - self.queued_s,
            prefill_s=0.0 if is_loaded or prefill_end is None else prefill_end - started,
            kv_wait_s=self.load_wait_s,
            kv_transfer_s=self.load_transfer_s,
            handover_s=(
                first_step_at - self.load_ready_s
                if self.load_ready_s is not None and first_step_at is not None
                else 0.0
            ),
            first_step_s=(
                self.first_step_end_s - first_step_at
                if is_loaded and first_step_at is not None and self.first_step_end_s is not None
                else 0.0
            ),
            kv_bytes=self.load_bytes,
        )
