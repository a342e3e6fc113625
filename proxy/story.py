"""What happened to one request, and when.

The first token comes from the prefill engine and the second from the decode engine, so there are
two sums: the wait for the first token, and the wait for the second. Each closes with a measured
remainder, so that its terms add up to what the client saw.

`proxy` is the time in this process before it asks an engine, without the wait for a place and for
an engine that can be asked (`admission`); `retry` is the time lost to engines that failed; `queue`
and `prefill` are the engine's own account, and so is `reserve`, its wait for room at the decode
engine before a push; `relay` is the rest of the time to the first byte written to the client: two
HTTP hops and the wait for a free moment. In the second token's wait, `decode queue` lasts until the
decode engine begins to move the KV, `recompute` is for a prompt whose KV did not arrive, and
`handover` is the rest: HTTP, and KV that lies ready while a step runs (in a push possibly before
the first token).
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.proxy.brain.decision import taken
from pdserve.wire.transfer import KVMode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.observe.clock import Clock
    from pdserve.proxy.brain.ledger import LedgerEntry
    from pdserve.proxy.brain.prompt import KnownPrefix, RoutePrompt
    from pdserve.proxy.brain.question import PairCost, PairDecision
    from pdserve.wire.hop import EngineStages


class Stage(enum.Enum):
    """Where a request is; also where it was when its client left."""

    QUEUED = "queued"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"
    LOCAL = "local"


class Mode(enum.Enum):
    """How the engines served a request."""

    DISAGGREGATED = "disaggregated"
    LOCAL = "local"


class LadderRung(enum.Enum):
    """The response to a failed hand-over, in the order of the ladder.

    RETRY_DECODE: the same decode engine once more. OTHER_DECODE: another one. OTHER_PREFILL: it
    was prefilled again, on another engine if there is one. LOCAL: one engine did everything.
    SHED: no engine may compute it now; the client should come back.
    """

    RETRY_DECODE = "retry_decode"
    OTHER_DECODE = "other_decode"
    OTHER_PREFILL = "other_prefill"
    LOCAL = "local"
    SHED = "shed"


TTFT_TERMS = ("admission", "proxy", "retry", "queue", "reserve", "prefill", "relay")
SECOND_TERMS = ("decode_queue", "kv", "recompute", "handover", "first_step")


_FINISHED = ("stop", "length", "abort", "error")


class NotPushed(enum.Enum):
    """The reason why the decode engine reads a request's KV, although it might have been pushed.

    REQUEST: it has several prompts or choices, or gets one token, or scores of its prompt. FAILED:
    a push of it has failed. ENGINES: no decode engine can take a push from its prefill engine, for
    example if one has several data-parallel cores. DISTRUSTED: recent pushes of the pair failed.
    """

    REQUEST = "request"
    FAILED = "failed"
    ENGINES = "engines"
    DISTRUSTED = "distrusted"


class Gaps:
    """A histogram of gaps, exact to one part in 250, whose size does not grow with their number.

    Attributes:
        max_s: The longest gap; exact.
    """

    __slots__ = ("_counts", "_num", "max_s")

    def __init__(self) -> None:
        self.max_s = 0.0
        self._num = 0
        self._counts: Counter[int] = Counter()  # by exponent and the first 8 bits of the mantissa

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[tuple[float, int]]:
        """Yield (seconds, count), the shortest first."""
        for key in sorted(self._counts):
            yield math.ldexp((key & 255) + 0.5, (key >> 8) - 8), self._counts[key]

    @property
    def median_s(self) -> float:
        """The median, the longer of two in the middle; 0 if there are none."""
        left = self._num // 2
        for gap_s, number in self:
            left -= number
            if left < 0:
                return min(gap_s, self.max_s)
        return 0.0

    def add(self, gap_s: float) -> None:
        """Count one gap."""
        mantissa, exponent = math.frexp(max(gap_s, 1e-6))
        self._counts[exponent << 8 | int(mantissa * 256)] += 1
        self._num += 1
        self.max_s = max(self.max_s, gap_s)


@dataclass(slots=True)
class Story:
    """The record of one request. Times are monotonic seconds of `clock`.

    Attributes:
        model: The client's name for it; if none, at the end the model that serves it.
        status: HTTP status of the answer.
        reason: Code of the error that ended it; empty if it ended well.
        queued_s, admitted_s: When it asked for a place; when it had one and an engine could serve.
        first_leg_s: When the first leg was sent to an engine.
        leg_s: When the leg that gave the first token was sent.
        first_token_s: When the first token's bytes were written to the client (or, if the
            answer is one piece, had come from the engine).
        second_token_s: When the decode engine's first bytes were written.
        token_gaps: Gaps between chunks, starting with the decode engine's first.
        prefill_stages, decode_stages: The engines' own accounts; `fallback_stages` is that of one
            that did everything after another had begun, or that continued.
        is_stalled: Whether such an engine has sent nothing yet.
        is_moved: Whether another engine continued it during decode.
        is_refused: Whether an engine refused it as its client's mistake.
        kv_mode: Which engine moved the KV in the last attempt.
        not_pushed: Reason for a pull where a push was allowed.
        prompt, known: Its prompt as routing knew it and, by leg, the engine's part of it, as of the
            last attempt; None and empty unless a policy looks at that.
        decision: The joint decision that chose its engines, if any; in shadow, the one that
            would have.
        prompt_entry, stream_entry: Its part of the work of the engine that computes its prompt,
            and of the one that gives its tokens; None unless that is counted.
        rungs: Of the ladder, as they were taken, each with its reason.
        prefill_url, decode_url: The engine that only computes its prompt, and the one for the rest
            (or all of it), as of the last attempt; empty if none was asked.
        events: Events for people to read: (seconds since arrival, text).
    """

    request_id: str
    path: str
    clock: Clock
    arrived_s: float = 0.0
    stage: Stage = Stage.QUEUED
    mode: Mode = Mode.LOCAL
    streamed: bool = False
    model: str = ""
    status: int = 500
    reason: str = "internal_error"
    queued_s: float | None = None
    admitted_s: float | None = None
    first_leg_s: float | None = None
    leg_s: float | None = None
    first_token_s: float | None = None
    second_token_s: float | None = None
    last_chunk_s: float = 0.0
    token_gaps: Gaps = field(default_factory=Gaps)
    prefill_stages: EngineStages | None = None
    decode_stages: EngineStages | None = None
    fallback_stages: EngineStages | None = None
    is_moved: bool = False
    is_refused: bool = False
    is_stalled: bool = False
    kv_mode: KVMode | None = None
    not_pushed: NotPushed | None = None
    prompt: RoutePrompt | None = None
    known: dict[str, KnownPrefix] = field(default_factory=dict)
    decision: PairDecision | None = None
    prompt_entry: LedgerEntry | None = None
    stream_entry: LedgerEntry | None = None
    rungs: list[tuple[LadderRung, str]] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    prefill_url: str = ""
    decode_url: str = ""
    events: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arrived_s = self.clock.monotonic_s()

    @property
    def num_known_prompt_tokens(self) -> int:
        """Tokens of its prompts, as reported by an engine; 0 before that."""
        stages = self.prefill_stages
        return self.num_prompt_tokens or (0 if stages is None else stages.prompt_tokens)

    @property
    def finish_reasons(self) -> list[str]:
        """The reasons why its choices ended, as far as engines report; a handoff is no end."""
        reasons = (reason for account in self.accounts for reason in account.finish_reasons)
        return [reason for reason in reasons if reason in _FINISHED]

    @property
    def accounts(self) -> list[EngineStages]:
        """The engines' accounts of it, one each."""
        stages = (self.prefill_stages, self.decode_stages, self.fallback_stages)
        return [each for each in stages if each is not None]

    @property
    def has_one_choice(self) -> bool:
        """Whether it has one choice of one prompt, as far as engines report."""
        return all(each.num_choices == 1 >= len(each.finish_reasons) for each in self.accounts)

    def tell(self, text: str) -> None:
        """Add an event."""
        self.events.append((self.clock.monotonic_s() - self.arrived_s, text))

    def queued(self) -> None:
        """Note that the request asks for a place."""
        self.queued_s = self.clock.monotonic_s()

    def admitted(self) -> None:
        """Note that the request got a place."""
        self.admitted_s = self.clock.monotonic_s()

    def leg_sent(self, stage: Stage, url: str) -> None:
        """Note that a leg is on its way to an engine."""
        now = self.clock.monotonic_s()
        if self.first_leg_s is None:
            self.first_leg_s = now
        if self.first_token_s is None:
            self.leg_s = now
        self.stage = stage
        if stage is Stage.PREFILL:
            self.prefill_url = url
        else:
            self.decode_url = url
        if stage is Stage.LOCAL and self.first_token_s is None:
            self.prefill_url = ""
        self.tell(f"{stage.value} at {url}")

    def looked_up(self, leg: str, prompt: RoutePrompt, known: KnownPrefix) -> None:
        """Note the assumed cached part of a prompt at the engine it is about to be sent to."""
        if prompt.grains:
            self.prompt, self.known[leg] = prompt, known

    def receiver_sent(self, url: str) -> None:
        """Note that a push's receiving leg is on its way to an engine, beside the prefill leg."""
        self.decode_url = url
        self.tell(f"receiving at {url}")

    def climbed(self, rung: LadderRung, reason: str) -> None:
        """Note that a rung of the ladder was taken."""
        self.rungs.append((rung, reason))
        self.tell(f"ladder: {rung.value} ({reason})")

    def moved_from(self, stages: EngineStages | None) -> None:
        """Note that an engine ended its part, with this account, and another must continue."""
        if self.is_moved:
            self.fallback_stages = stages
        elif self.mode is Mode.LOCAL:
            self.prefill_stages = stages
        else:
            self.decode_stages = stages
        self.is_moved = self.is_stalled = True
        self.tell(f"moved from {self.decode_url}")

    def goes_on(self, sent_s: float) -> float | None:
        """Return how long the client got nothing, if another engine has just taken over.

        None except for the first output of such an engine.
        """
        was_stalled, self.is_stalled = self.is_stalled, False
        return sent_s - self.last_chunk_s if was_stalled else None

    def stands_by(self, why: str) -> None:
        """Note that the request waits, as no engine can serve it now."""
        self.stage = Stage.QUEUED
        self.tell(f"waiting for an engine: {why}")

    def stood_by(self) -> None:
        """Note that the wait for an engine is over."""
        if self.first_leg_s is None:
            self.admitted()

    def first_token(self, sent_s: float) -> None:
        """Note that the client gets its first token.

        Args:
            sent_s: Just before it was written, by `clock`: no client can have had it earlier.
        """
        self.first_token_s = self.last_chunk_s = sent_s

    def chunk(self, sent_s: float) -> None:
        """Note that the client gets another chunk of tokens; the argument as in `first_token`."""
        if self.first_token_s is None:
            self.first_token(sent_s)
            return
        if self.second_token_s is None and self.mode is Mode.DISAGGREGATED:
            self.second_token_s = sent_s
        else:
            self.token_gaps.add(sent_s - self.last_chunk_s)
        self.last_chunk_s = sent_s

    def ttft_terms(self) -> dict[str, float]:
        """Seconds by `TTFT_TERMS`; they add up to the time to first token.

        Empty without a first token.
        """
        if (
            self.queued_s is None
            or self.admitted_s is None
            or self.first_leg_s is None
            or self.leg_s is None
            or self.first_token_s is None
        ):
            return {}
        stages = self.prefill_stages
        window = self.first_token_s - self.leg_s
        queue = min(stages.queue_s, window) if stages else 0.0
        reserve = min(stages.kv_wait_s, window - queue) if stages else 0.0
        prefill = min(stages.prefill_s, window - queue - reserve) if stages else 0.0
        return {
            "admission": self.admitted_s - self.queued_s,
            "proxy": self.queued_s - self.arrived_s + self.first_leg_s - self.admitted_s,
            "retry": self.leg_s - self.first_leg_s,
            "queue": queue,
            "reserve": reserve,
            "prefill": prefill,
            "relay": window - queue - reserve - prefill,
        }

    def second_token_terms(self) -> dict[str, float]:
        """Seconds by `SECOND_TERMS`; they add up to the second token's wait after the first."""
        stages = self.decode_stages
        if self.second_token_s is None or self.first_token_s is None or stages is None:
            return {}
        wait = self.second_token_s - self.first_token_s
        if stages.kv_mode == KVMode.PUSH.value:
            # It began before the first token came. What of it can lie behind that is what the
            # stages after it leave of the wait.
            after = stages.handover_s + stages.prefill_s + stages.first_step_s
            queue, kv = 0.0, min(stages.kv_transfer_s, max(0.0, wait - after))
        else:
            queue, kv = stages.queue_s, stages.kv_wait_s + stages.kv_transfer_s
        terms = {
            "decode_queue": queue,
            "kv": kv,
            "recompute": stages.prefill_s,
            "first_step": stages.first_step_s,
        }
        left = wait
        for name, seconds in terms.items():
            terms[name] = min(seconds, left)
            left -= terms[name]
        return {name: terms.get(name, left) for name in SECOND_TERMS}

    @property
    def taken(self) -> PairCost | None:
        """The prediction for the engines that served it, if the decision was a shadow."""
        if self.decision is None or self.rungs:
            return None
        return taken(self.decision, self.prefill_url, self.decode_url)

    @property
    def served_s(self) -> float | None:
        """Time from the first leg to the first token, as decisions predict it; None without one."""
        if self.first_leg_s is None or self.first_token_s is None or self.rungs:
            return None
        return self.first_token_s - self.first_leg_s

    def as_json(self) -> dict[str, object]:
        """Return its entry in `/debug/requests`."""
        return {
            "request_id": self.request_id,
            "path": self.path,
            "stage": self.stage.value,
            "kv_mode": self.kv_mode.value if self.kv_mode is not None else None,
            "age_s": round(self.clock.monotonic_s() - self.arrived_s, 3),
            "output_tokens": self.num_output_tokens,
            "story": [{"at_s": round(at_s, 4), "event": text} for at_s, text in self.events],
        }
