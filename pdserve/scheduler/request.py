"""The scheduler's view of a request: its tokens, state and history."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.connectors.base import KVSource
from pdserve.errors import InternalError
from pdserve.scheduler.life import LEGAL_MOVES, OVER, State, Timeline
from pdserve.wire.request import FinishReason
from pdserve.wire.trace import EngineRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.connectors.base import Hold, HoldKey
    from pdserve.kvcache.lease import Holding
    from pdserve.kvcache.manager import HashChain, SharedPrompt
    from pdserve.scheduler.drafts import DraftRecord
    from pdserve.scheduler.life import Wait
    from pdserve.scheduler.plan import Rank
    from pdserve.wire.ids import BlockHash
    from pdserve.wire.request import GenerateRequest, OnLoadFailure
    from pdserve.wire.sampling import TokenLogprobs
    from pdserve.wire.transfer import Failed, KVMode, Received, Settled


class Request:
    """One request inside one engine. Only its own methods write its fields.

    Args:
        rank: See `plan.Rank`. Smaller is served first; the largest is preempted.

    Attributes:
        num_computed_tokens: Tokens whose KV its blocks have, or will once steps in flight retire.
        num_pending_tokens: Tokens that steps in flight sample without drafts, at most one in each
            step: they count as tokens, although their ids are not known yet.
        num_sent_tokens: Output tokens that the workers know; None: they do not know the request.
        handoff: Handoff from the wire request, or the one that came with its KV, until the KV is
            here or its load has failed; at P, the one that its connector made.
        source: Location of its KV, until the KV is here or its load has failed.
        is_pinned: Whether it may not be preempted: a peer's transfer writes or reads its blocks.
        is_loading: Whether the step being built loads its first tokens.
        is_unproven: Whether a load inside a step may still fail.
        may_load: Whether KV that its connector has may be loaded; if not, it is computed.
        holds: Keys of the holds that keep its blocks after its end.
        finish_reason: Reason of its end.
        waits_for: Events that it awaits while it is CLOSING.
        num_overtaken: Requests with KV that started in its place, while its own was planned.
        num_budgeted: Prompt tokens charged to the recompute budget until it starts; None: none are.
        kv_mode: Way in which its KV came from another engine, if it did.
        source_id: Its id at that engine; empty if its KV came from none.
        prompt_logprobs: From the second prompt token on; they leave with the first output token.
        drafts: Success of its drafts; None where nothing is drafted.
        queue_entry: Its entry in the waiting queue, while it is in line there.
    """

    # Without slots, more than thirty attributes would each be slow to access.
    __slots__ = (
        "_shared",
        "chain",
        "drafts",
        "finish_reason",
        "first_logprobs",
        "handoff",
        "holding",
        "holds",
        "is_loading",
        "is_pinned",
        "is_unproven",
        "kv_mode",
        "load_failures",
        "may_load",
        "num_budgeted",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_external_tokens",
        "num_overtaken",
        "num_pending_tokens",
        "num_preemptions",
        "num_sent_tokens",
        "output_token_ids",
        "prompt_logprobs",
        "prompt_token_ids",
        "queue_entry",
        "rank",
        "remote_decode",
        "request_id",
        "sampling",
        "source",
        "source_id",
        "state",
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
        drafts: DraftRecord | None = None,
        rank: Rank,
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
        self.rank = rank
        self.state = State.WAITING
        self.output_token_ids = chain.output
        self.num_computed_tokens = self.num_pending_tokens = self.num_overtaken = 0
        self.num_sent_tokens: int | None = None
        self.holding: Holding | None = None
        self.handoff = wire.handoff
        self.remote_decode = wire.remote_decode
        self.source = KVSource.LOCAL
        self.is_pinned = self.is_loading = self.is_unproven = False
        self.may_load = not wire.sampling.needs_whole_prompt
        self.holds: set[HoldKey] = set()
        self.finish_reason: FinishReason | None = None
        self.waits_for: set[Wait] = set()
        self.queue_entry: int | None = None
        self.num_budgeted: int | None = None
        self.kv_mode: KVMode | None = None
        self.source_id = "" if wire.handoff is None else wire.handoff.request_id
        self.first_logprobs: list[TokenLogprobs] | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.num_cached_tokens = self.num_external_tokens = self.num_preemptions = 0
        self.drafts = drafts
        self.load_failures: list[str] = []
        self.times = Timeline(queued_s=now_s)
        self.times.note(now_s, f"queued prompt={len(wire.prompt_token_ids)}")

    @property
    def arrival_s(self) -> float:
        """Arrival at the server, in monotonic seconds."""
        return self.wire.arrival_s

    @property
    def num_cached_prompt_tokens(self) -> int:
        """See `SharedPrompt.num_cached_tokens`."""
        return self._shared.num_cached_tokens or 0

    @property
    def cache_salt(self) -> str:
        """Salt of its cache: only requests of the same salt share cached prefixes."""
        return self.wire.cache_salt

    @property
    def prompt_block_hashes(self) -> Sequence[BlockHash]:
        """Hashes of the blocks that its prompt fills."""
        return self.chain.of_prompt()

    @property
    def kv_transfer_params(self) -> GenerateRequest:
        """The wire request, with its transfer parameters."""
        return self.wire

    @property
    def on_load_failure(self) -> OnLoadFailure:
        """Response if its KV does not arrive."""
        return self.wire.on_load_failure

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, pending ones included."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_pending_tokens

    @property
    def is_output_complete(self) -> bool:
        """Whether its sampled and pending tokens are all that it may have here."""
        num_output = len(self.output_token_ids) + self.num_pending_tokens
        is_given_away = self.remote_decode and self.num_pending_tokens > 0
        return is_given_away or num_output >= self.sampling.max_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether all tokens but the last are computed, and the last was sampled."""
        return self.num_pending_tokens > 0 or (
            bool(self.output_token_ids) and self.num_computed_tokens == self.num_tokens - 1
        )

    def finish_of_last_token(self, max_model_len: int) -> tuple[FinishReason | None, int | None]:
        """Return why the newest output token is the last, and which of the user's stop ids it is.

        (None, None) if it is not the last. Stop strings are text, which the server handles.
        """
        sampling = self.sampling
        num_output, token_id = len(self.output_token_ids), self.output_token_ids[-1]
        # Under a grammar, an early end was the only token allowed.
        if num_output >= sampling.min_tokens or sampling.grammar is not None:
            if not sampling.ignore_eos and token_id in sampling.eos_token_ids:
                return FinishReason.STOP, None
            if token_id in sampling.stop_token_ids:
                return FinishReason.STOP, token_id
        is_full = len(self.prompt_token_ids) + num_output >= max_model_len
        is_full = is_full or num_output >= sampling.max_tokens
        return FinishReason.LENGTH if is_full else None, None

    def accept(self, source: KVSource, *, hands_over: bool) -> None:
        """Note where the connector says its KV is, and whether it may be decoded elsewhere."""
        self.source = source
        self.remote_decode = self.remote_decode and hands_over

    def give_away(self) -> None:
        """Note that another engine will continue it."""
        self.remote_decode = True

    def note_cached(self, num_tokens: int) -> None:
        """Note how much of its prompt was cached when it was prefilled, here or elsewhere."""
        if self._shared.num_cached_tokens is None:
            self._shared.num_cached_tokens = num_tokens

    def overtaken(self) -> None:
        """Count a request that started in its place."""
        self.num_overtaken += 1

    def line_up(self, entry: int | None) -> None:
        """Note its entry in the waiting queue; None = it has left the line."""
        self.queue_entry = entry

    def charge(self, num_tokens: int | None) -> None:
        """Note its charge to the recompute budget; None = the charge is settled."""
        self.num_budgeted = num_tokens

    def open(self, holding: Holding, num_computed_tokens: int, *, is_pinned: bool) -> None:
        """Take its blocks, which have, or will be loaded with, `num_computed_tokens` tokens."""
        self.holding = holding
        self.num_computed_tokens = num_computed_tokens
        self.is_pinned = is_pinned

    def let_go(self) -> Holding | None:
        """Give up its blocks, if it has any; the caller has to end them."""
        holding, self.holding = self.holding, None
        return holding

    def expect(self, num_hit: int, num_external: int, *, in_step: bool = False) -> None:
        """Note that a load, perhaps inside the next step, brings tokens behind cached ones."""
        self.num_cached_tokens, self.num_external_tokens = num_hit, num_external
        self.is_loading = self.is_unproven = in_step

    def expect_more(self, num_tokens: int, now_s: float) -> None:
        """Note another load, which brings tokens behind those already loaded."""
        self.num_external_tokens += num_tokens
        self.num_computed_tokens = self.num_cached_tokens + self.num_external_tokens
        self.times.begin_load_again(now_s)

    def prove(self) -> None:
        """Note that the outcome of its load inside a step is known."""
        self.is_unproven = False

    def count_prompt(self, num_hit: int, num_external: int) -> None:
        """Note how much of its prompt's KV was cached here, and how much came from elsewhere."""
        self.num_cached_tokens = num_hit + num_external
        self.num_external_tokens = num_external
        self.note_cached(num_hit + num_external)  # already known if a peer has prefilled it

    def receive(self, received: Received, now_s: float) -> None:
        """Note that its KV has arrived, perhaps with a handoff."""
        num_tokens, brought = self.num_tokens, received.handoff
        if brought is not None:
            num_tokens += len(brought.first_token_ids)
            self.source_id = brought.request_id
            self.note_cached(brought.num_cached_tokens)
        # Without a token behind them, the last one must be computed again to sample the next.
        self.num_computed_tokens = min(self.num_computed_tokens, num_tokens - 1)
        self.kv_mode = received.mode
        self.times.receive(received, now_s)

    def note_failure(self, failed: Failed, now_s: float, *, may_load: bool = False) -> None:
        """Note that a load has failed, and whether another source may be asked."""
        self.load_failures.append(failed.reason.value)
        self.may_load = self.may_load and may_load
        self.times.note(now_s, f"load failed: {failed.reason.value} {failed.detail}".rstrip())

    def lose_load(self) -> None:
        """Forget the expected load."""
        self.num_computed_tokens = 0
        self.num_cached_tokens = self.num_external_tokens = 0

    def forget_source(self, *, is_pinned: bool = False) -> None:
        """Note that no KV will come from elsewhere any more."""
        self.handoff, self.source, self.is_pinned = None, KVSource.LOCAL, is_pinned

    def begin_again(self, num_computed_tokens: int) -> None:
        """Continue from `num_computed_tokens` tokens; nothing is pending."""
        self.num_computed_tokens = num_computed_tokens
        self.num_pending_tokens = 0
        self.prompt_logprobs = []

    def preempt(self) -> None:
        """Lose everything computed so far."""
        self.num_preemptions += 1
        self.begin_again(0)

    def advance(self, num_tokens: int) -> int:
        """Count the tokens of a step being built; return the tokens computed once it retires."""
        self.is_loading = False
        self.num_computed_tokens = num_computed = self.num_computed_tokens + num_tokens
        # `num_tokens` of the request, spelled out: this runs for each request in each step.
        num_output = len(self.output_token_ids) + self.num_pending_tokens
        if num_computed == len(self.prompt_token_ids) + num_output:
            self.num_pending_tokens += 1  # the step samples behind its last token
        return num_computed

    def tell_tokens(self) -> list[int]:
        """Return, once, the output tokens that the workers do not know yet."""
        untold = self.output_token_ids[self.num_sent_tokens :]
        self.num_sent_tokens = len(self.output_token_ids)
        return untold

    def become_unknown(self) -> None:
        """Note that the workers forget it."""
        self.num_sent_tokens = None

    def sample(
        self,
        token_ids: Sequence[int],
        logprobs: list[TokenLogprobs] | None,
        now_s: float,
        *,
        max_model_len: int,
    ) -> tuple[int, FinishReason | None, int | None]:
        """Take a step's tokens up to its end; return their number, and `finish_of_last_token`."""
        self.num_pending_tokens -= 1
        outputs = self.output_token_ids
        if not outputs and logprobs is not None:
            self.first_logprobs = logprobs[:1]
        if self.times.first_token_s is None:
            self.times.sample(now_s)
        num_before = len(outputs)
        for token_id in token_ids:
            outputs.append(token_id)
            finish, stop_reason = self.finish_of_last_token(max_model_len)
            if finish is not None:
                break
        num_taken = len(outputs) - num_before
        self.num_computed_tokens += num_taken - 1  # the others were drafts that proved right
        return num_taken, finish, stop_reason

    def take_back(self) -> None:
        """Note that a step has sampled nothing: the last token is computed again."""
        self.num_pending_tokens -= 1
        self.num_computed_tokens -= 1

    def take_over(self, token_id: int) -> None:
        """Take an output token that another engine sampled."""
        self.output_token_ids.append(token_id)

    def add_prompt_logprobs(self, entries: Sequence[TokenLogprobs]) -> None:
        """Keep a step's prompt logprobs, unless they were sent before a preemption."""
        if not self.output_token_ids:
            self.prompt_logprobs.extend(entries)

    def take_prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Return, once, the logprobs of the whole prompt; None if they are not wanted."""
        if self.sampling.prompt_logprobs is None:
            return None
        entries, self.prompt_logprobs = self.prompt_logprobs, []
        return [None, *entries]  # the first token has none

    def finish(self, reason: FinishReason) -> None:
        """Note why it ends, for its connector to see."""
        self.finish_reason = reason

    def hold(self, hold: Hold | None) -> None:
        """Note the holds that keep its blocks after its end, and its handoff if any."""
        self.holds = set() if hold is None else hold.keys
        if hold is not None and hold.handoff is not None:
            self.handoff = hold.handoff

    def settle(self, settled: Settled) -> bool:
        """Note that a hold (without a nonce, all of that connector) is over; False if none was.

        Its blocks stay kept for the remaining `holds`.
        """
        is_named = bool(settled.nonce)
        over = {
            key
            for key in self.holds
            if key[0] == settled.connector and (key[1] == settled.nonce or not is_named)
        }
        self.holds -= over
        return bool(over)

    def wait_for(self, waits: set[Wait]) -> None:
        """Note the events that must happen before its blocks may be freed."""
        self.waits_for = waits

    def stop_waiting(self, wait: Wait) -> bool:
        """Note that `wait` is over; return False if the request did not wait for it."""
        is_waited_for = wait in self.waits_for
        self.waits_for.discard(wait)
        return is_waited_for

    def move(self, state: State, now_s: float, why: str) -> None:
        """Change state.

        Raises:
            InternalError: The move is not legal; the message is the request's story.
        """
        if (self.state, state) not in LEGAL_MOVES:
            what = f"{self.state.value} -> {state.value} ({why})"
            raise InternalError(f"illegal move {what}\n{self.story()}")
        if state in OVER:
            self.times.end(now_s)
        self.state = state
        self.times.note(now_s, f"{state.value}: {why}")

    def story(self) -> str:
        """Return this request's events, in order."""
        start_s = self.times.queued_s
        lines = [f"  +{(at - start_s) * 1e3:9.2f} ms  {event}" for at, event in self.times.notes]
        return "\n".join([f"request {self.request_id}", *lines])

    def traced(self, now_s: float) -> EngineRequest:
        """Return its time here, for a trace; its current span ends at `now_s`."""
        # Anyone who knows the nonce can release the blocks, so it is not shown.
        nonce = "" if self.handoff is None else self.handoff.nonce
        notes = [(at, text.replace(nonce, "*") if nonce else text) for at, text in self.times.notes]
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
