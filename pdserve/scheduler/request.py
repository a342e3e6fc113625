"""The scheduler's own request: its state, the legal moves, and its story."""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING

from pdserve.connectors.base import KVSource
from pdserve.errors import InternalError
from pdserve.wire.request import RequestStages
from pdserve.wire.trace import EngineRequest, Span
from pdserve.wire.transfer import KVMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.kvcache.lease import Holding
    from pdserve.kvcache.manager import HashChain, SharedPrompt
    from pdserve.wire.ids import BlockHash
    from pdserve.wire.outputs import TokenLogprobs
    from pdserve.wire.request import FinishReason, GenerateRequest, OnLoadFailure
    from pdserve.wire.transfer import Received


class State(enum.Enum):
    """Where a request stands.

    WAITING has no blocks. RECEIVING has blocks that a load, or a peer that pushes, fills.
    RUNNING is in the batch; its connector may have its blocks read meanwhile. LEASED has
    finished here, a peer may read its blocks. CLOSING is over for the client while a transfer
    or a step may still touch its blocks. DONE holds nothing.
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
        (State.RECEIVING, State.DONE),
        (State.RUNNING, State.WAITING),
        (State.RUNNING, State.LEASED),
        (State.RUNNING, State.CLOSING),
        (State.RUNNING, State.DONE),
        (State.LEASED, State.DONE),
        (State.CLOSING, State.DONE),
    }
)


_OVER = frozenset({State.LEASED, State.CLOSING, State.DONE})
"""Its client gets nothing more from here."""


class Wait(enum.Enum):
    """What a CLOSING request waits for before its blocks may be given back.

    STEP: the last step in flight that has it. LOAD: the report of what writes its blocks.
    HOLD: nothing that its connector began reads its blocks any more.
    """

    STEP = "step"
    LOAD = "load"
    HOLD = "hold"


class Request:
    """One request inside one engine. Mutable; only the scheduler changes it.

    Attributes:
        num_computed_tokens: Tokens whose KV is, or will be once the steps in flight
            retire, in its blocks.
        num_pending_tokens: Tokens that steps in flight sample, one at most for each: they
            count as tokens, their ids are not known yet.
        num_told_tokens: Output tokens that the workers were told of, where they have to be.
        handoff: As in the wire request, or as a push brought it, until its KV is here or its
            load has failed; at P, what it was leased as.
        source: Where its KV is, until that is here or its load has failed.
        is_pinned: It may not be preempted: a peer writes its blocks, or is written from them.
        is_loading: The step that is being built loads its first tokens.
        hold_id: What its blocks are leased as, or held for behind its end.
        finish_reason: How it has ended.
        waits_for: While it is CLOSING.
        num_overtaken: Requests whose KV lies ready that started in its place, while its own was
            only planned.
        num_budgeted: Prompt tokens that the recompute budget was charged for it, until it
            starts; None if it is none of that budget's requests.
        kv_mode: How its KV came from another engine, if it did.
        source_id: What that engine called it; empty if its KV came from none.
        prompt_logprobs: Those behind the first prompt token, until the first output token takes
            them along.
    """

    # More than thirty attributes would make each of them slow in an ordinary object.
    __slots__ = (
        "_shared",
        "_story",
        "chain",
        "finish_reason",
        "first_logprobs",
        "handoff",
        "hold_id",
        "holding",
        "is_loading",
        "is_pinned",
        "kv_mode",
        "load_failures",
        "num_budgeted",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_external_tokens",
        "num_overtaken",
        "num_pending_tokens",
        "num_preemptions",
        "num_told_tokens",
        "order",
        "output_token_ids",
        "prompt_logprobs",
        "prompt_token_ids",
        "remote_decode",
        "request_id",
        "sampling",
        "source",
        "source_id",
        "state",
        "ticket",
        "times",
        "waits_for",
        "wire",
    )

    def __init__(
        self,
        wire: GenerateRequest,
        chain: HashChain,
        shared: SharedPrompt,
        *,
        order: int,
        now_s: float,
    ) -> None:
        self.wire = wire
        self._shared = shared
        if wire.handoff is not None:
            self.note_cached(wire.handoff.num_cached_tokens)
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
        self.ticket = wire.ticket
        self.remote_decode = wire.remote_decode
        self.source = KVSource.LOCAL
        self.is_pinned = False
        self.is_loading = False
        self.hold_id = ""
        self.finish_reason: FinishReason | None = None
        self.waits_for: set[Wait] = set()
        self.num_overtaken = 0
        self.num_budgeted: int | None = None
        self.kv_mode: KVMode | None = None
        self.source_id = "" if wire.handoff is None else wire.handoff.request_id
        self.first_logprobs: list[TokenLogprobs] | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.num_cached_tokens = 0
        self.num_external_tokens = 0
        self.num_preemptions = 0
        self.load_failures: list[str] = []
        self.times = Times(queued_s=now_s)
        self._story: deque[tuple[float, str]] = deque(maxlen=64)
        self.note(now_s, f"queued prompt={len(wire.prompt_token_ids)}")

    @property
    def arrival_s(self) -> float:
        """When the server took it, in monotonic seconds."""
        return self.wire.arrival_s

    @property
    def num_cached_prompt_tokens(self) -> int:
        """See `SharedPrompt.num_cached_tokens`."""
        return self._shared.num_cached_tokens or 0

    def note_cached(self, num_tokens: int) -> None:
        """It is prefilled, here or elsewhere, and so much of it was cached."""
        if self._shared.num_cached_tokens is None:
            self._shared.num_cached_tokens = num_tokens

    @property
    def cache_salt(self) -> str:
        """What its cached prefixes are shared within."""
        return self.wire.cache_salt

    @property
    def prompt_block_hashes(self) -> Sequence[BlockHash]:
        """Of the blocks that its prompt fills."""
        return self.chain.of_prompt(self.prompt_token_ids)

    @property
    def on_load_failure(self) -> OnLoadFailure:
        """What becomes of it if its KV does not arrive."""
        return self.wire.on_load_failure

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

    def begin_again(self, num_computed_tokens: int) -> None:
        """It has its blocks, and so many tokens in them; nothing is pending."""
        self.num_computed_tokens = num_computed_tokens
        self.num_pending_tokens = 0
        self.prompt_logprobs = []

    def move(self, state: State, now_s: float, why: str) -> None:
        """Change state.

        Raises:
            InternalError: The move is not legal; the message is the request's story.
        """
        if (self.state, state) not in LEGAL_MOVES:
            raise InternalError(
                f"illegal move {self.state.value} -> {state.value} ({why})\n{self.story()}"
            )
        if self.times.over_s is None and state in _OVER:
            self.times.over_s = now_s
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

    def traced(self, now_s: float) -> EngineRequest:
        """Its time here, for a trace; what it is in at `now_s` ends there."""
        nonce = "" if self.handoff is None else self.handoff.nonce
        # A nonce ends a lease: it stays here.
        notes = [(at_s, text.replace(nonce, "*") if nonce else text) for at_s, text in self._story]
        facts: dict[str, int | float | str] = {
            "prompt_tokens": len(self.prompt_token_ids),
            "output_tokens": len(self.output_token_ids),
            "cached_tokens": self.num_cached_tokens,
            "external_tokens": self.num_external_tokens,
            "preemptions": self.num_preemptions,
        }
        if self.kv_mode is not None:
            facts["kv_mode"] = self.kv_mode.value
            facts["kv_bytes"] = self.times.load_bytes
            facts["kv_digest_ms"] = round(self.times.load_digest_s * 1e3, 3)
        was_leased = self.remote_decode and self.handoff is not None
        return EngineRequest(
            at_s=now_s,
            request_id=self.request_id,
            source_id=self.source_id,
            outcome=notes[-1][1] if self.state is State.DONE else "",
            spans=self.times.spans(now_s, after="leased" if was_leased else "closing"),
            notes=notes,
            facts=facts,
        )


class Times:
    """Marks on the engine's monotonic clock, in seconds, from which the stages follow.

    The stages follow one another without a gap: their sum is the time from the arrival to the
    end of the step that gave the first token, or at D the one behind the first.
    """

    def __init__(self, *, queued_s: float) -> None:
        self.queued_s = queued_s
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.load_ready_s: float | None = None
        self.load_transfer_s = 0.0
        self.load_digest_s = 0.0
        self.load_bytes = 0
        self.first_step_at_s: float | None = None
        self.first_step_end_s: float | None = None
        self.step_wait_s = 0.0
        self.over_s: float | None = None
        self._spans: list[Span] = []
        self._waits_since_s = queued_s
        self._load_began_s = queued_s
        self._queue_s = 0.0
        self._peer_wait_s = 0.0
        self._is_aside = False

    def start(self, now_s: float) -> None:
        """It leaves the queue: a step runs it, or its load begins."""
        if self.started_s is None:
            self.started_s = self._load_began_s = now_s
            self._queue_s += now_s - self._waits_since_s
            self._spans.append(Span("queue", self._waits_since_s, now_s))

    def begin_load_again(self, now_s: float) -> None:
        """What was lost on the first attempt counts as waiting for the peer."""
        self._load_began_s = now_s

    def wait_for_peer(self, now_s: float) -> None:
        """It stands aside until its peer has done something."""
        self._queue_s += now_s - self._waits_since_s
        self._spans.append(Span("queue", self._waits_since_s, now_s))
        self._waits_since_s = now_s
        self._is_aside = True

    def queue_again(self, now_s: float) -> None:
        """It waited for a peer, or its load has failed, and stands in the queue from now on."""
        since_s = self._waits_since_s if self.started_s is None else self.started_s
        self._peer_wait_s += now_s - since_s
        self._spans.append(Span("kv_wait", since_s, now_s))
        self._waits_since_s, self.started_s, self._is_aside = now_s, None, False

    def receive(self, received: Received, now_s: float) -> None:
        """Its KV is here since some time before `now_s`."""
        took_s = received.elapsed_s
        if not took_s:
            took_s = (
                received.wait_s + received.transfer_s
                if received.mode is KVMode.PULL
                else now_s - self._load_began_s
            )
        # What lies between the last byte and this report is part of the hand-over.
        ready_s = min(now_s, self._load_began_s + took_s)
        self.load_ready_s = ready_s
        self.load_transfer_s = min(received.transfer_s, ready_s - self._load_began_s)
        self.load_digest_s = min(received.digest_s, self.load_transfer_s)
        self.load_bytes = received.num_bytes

    def stages(self) -> RequestStages:
        """Durations between the marks that exist."""
        started, ready = self.started_s, self.load_ready_s
        first_step_at, first_token = self.first_step_at_s, self.first_token_s
        peer_wait_s, handover_s, prefill_s, first_step_s = self._peer_wait_s, 0.0, 0.0, 0.0
        if started is not None and ready is not None:
            peer_wait_s += ready - started - self.load_transfer_s
            if first_step_at is not None:
                handover_s = first_step_at - ready
                if self.first_step_end_s is not None:
                    first_step_s = self.first_step_end_s - first_step_at
        elif started is not None and first_token is not None:
            prefill_s = first_token - started
        return RequestStages(
            queue_s=self._queue_s,
            prefill_s=prefill_s,
            kv_wait_s=peer_wait_s,
            kv_transfer_s=self.load_transfer_s,
            handover_s=handover_s,
            first_step_s=first_step_s,
            kv_bytes=self.load_bytes,
            kv_digest_s=self.load_digest_s,
            step_wait_s=self.step_wait_s,
        )

    def spans(self, now_s: float, *, after: str) -> list[Span]:
        """The same as stretches of time, in order and without a gap, until `now_s`.

        What has no end yet is in its last stretch. Where a request was preempted, its wait for
        another turn lies inside `prefill` or `decode`.

        Args:
            after: What the time is called in which it is over here and not forgotten.
        """
        end_s = now_s if self.over_s is None else self.over_s
        spans = list(self._spans)
        started, ready = self.started_s, self.load_ready_s
        marks: list[tuple[str, float | None]]
        if started is None:
            marks = [("kv_wait" if self._is_aside else "queue", None)]
            begin_s = self._waits_since_s
        elif ready is not None:
            begin_s = started
            marks = [
                ("kv_wait", ready - self.load_transfer_s),
                ("kv_transfer", ready),
                ("handover", self.first_step_at_s),
                ("first_step", self.first_step_end_s),
                ("decode", None),
            ]
        else:
            begin_s = started
            marks = [("prefill", self.first_token_s), ("decode", None)]
            if self.first_step_at_s is None:
                marks = [("kv_wait", None)]  # its KV is on its way
        for name, mark_s in marks:
            until_s = end_s if mark_s is None else min(mark_s, end_s)
            spans.append(Span(name, begin_s, until_s))
            begin_s = until_s
            if mark_s is None:
                break
        if self.over_s is not None and now_s > self.over_s:
            spans.append(Span(after, self.over_s, now_s))
        return [span for span in spans if span.end_s > span.start_s]
