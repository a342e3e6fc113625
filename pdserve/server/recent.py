"""The requests that ended last at this server, and those that run: what `/debug/requests` shows.

The keys are those of a proxy's `/debug/requests`, so that whoever reads the one can read the other;
what only a proxy knows of is empty. For traces the same is an event of the recorder. Times are
this server's own account: `server` is its part, all other terms are the engine core's.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque

import msgspec

from pdserve.wire.finished import NUM_KEPT, Finished
from pdserve.wire.trace import FrontRequest, Term, Window

ENGINE_STAGES = ("queue", "prefill", "kv_wait", "kv_transfer", "handover", "first_step")
"""The engine core's terms of the time to the first token, in order."""


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A request as its server saw it until `now_s`. Monotonic seconds.

    Attributes:
        now_wall_s: The same moment in Unix time.
        role: Its engine's.
        ttft_s: To the first token computed here; None if there is none yet.
        stages: Where that time went, by field of `EngineStages`.
        kv_mode: How its KV came; empty if none did.
        num_output_tokens: Of all its choices.
        gaps_s: Between output tokens.
    """

    request_id: str
    path: str
    role: str
    is_streamed: bool
    start_s: float
    now_s: float
    now_wall_s: float
    ttft_s: float | None
    stages: dict[str, float | int]
    kv_mode: str
    num_choices: int
    num_prompt_tokens: int
    num_output_tokens: int
    gaps_s: list[float]


class Recent:
    """A ring of the last `num_kept` finished requests, each as the JSON that is served."""

    def __init__(self, num_kept: int = NUM_KEPT) -> None:
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=num_kept)
        self._seqs = itertools.count(1)

    def add(self, served: Served, outcome: str, line: str) -> None:
        """Keep a request that has just ended."""
        seq = next(self._seqs)
        self._kept.append((seq, msgspec.json.encode(_finished(served, seq, outcome, line))))

    def as_json(self, number: int, *, after_seq: int = 0) -> bytes:
        """The newest `number` that came after `after_seq`, as a JSON list, newest first."""
        newest = itertools.islice(reversed(self._kept), number)
        return b"[" + b",".join(json for seq, json in newest if seq > after_seq) + b"]"


def running(served: Served) -> dict[str, object]:
    """What `/debug/requests` shows of a request that runs."""
    return {
        "request_id": served.request_id,
        "path": served.path,
        "stage": "decode" if served.ttft_s is not None else "queued",
        "kv_mode": served.kv_mode or None,
        "age_s": round(served.now_s - served.start_s, 3),
        "output_tokens": served.num_output_tokens,
        "story": [],
    }


def traced(served: Served, outcome: str) -> FrontRequest:
    """The stretches of a request's time, for traces."""
    now_s, ttft_s = served.now_s, served.ttft_s
    if ttft_s is None:
        windows = [Window("server", served.start_s, now_s, [], "")]
    else:
        first_s = served.start_s + ttft_s
        terms = _terms(served)
        del terms["server"]
        parts = [Term(name, seconds, [name]) for name, seconds in terms.items()]
        windows = [Window("server", served.start_s, first_s, parts, served.role)]
        rest = "reply" if outcome == "handed_over" else "decode"
        windows.append(Window(rest, first_s, now_s, [], ""))
    return FrontRequest(
        at_s=now_s,
        request_id=served.request_id,
        outcome=outcome,
        ttft_s=ttft_s or 0.0,
        windows=windows,
        notes=[],
        facts={
            "prompt_tokens": served.num_prompt_tokens,
            "output_tokens": served.num_output_tokens,
            "choices": served.num_choices,
        },
    )


def _terms(served: Served) -> dict[str, float]:
    """Seconds to the first token computed here, by term; they add up to it."""
    stages = served.stages
    terms = {"server": float(stages["server_s"])}
    left_s = float(stages["ttft_s"]) - terms["server"]
    for name in ENGINE_STAGES:
        seconds = min(float(stages[f"{name}_s"]), left_s)
        left_s -= seconds
        if seconds > 0:
            terms[name] = seconds
    return terms


def _finished(served: Served, seq: int, outcome: str, line: str) -> Finished:
    now_s, gaps_s = served.now_s, served.gaps_s
    terms = _terms(served) if served.ttft_s is not None else {}
    terms_ms = {name: round(seconds * 1e3, 3) for name, seconds in terms.items()}
    ttft_ms = round(sum(terms_ms.values()), 3) if terms_ms else None
    return Finished(
        seq=seq,
        request_id=served.request_id,
        outcome=outcome,
        path=served.path,
        mode="local",
        streamed=served.is_streamed,
        arrived_wall_s=round(served.now_wall_s - (now_s - served.start_s), 6),
        arrived_s=round(served.start_s, 6),
        total_ms=round((now_s - served.start_s) * 1e3, 3),
        ttft_ms=ttft_ms,
        ttft_terms=terms_ms,
        second_token_ms=None,
        second_token_terms={},
        itl_p50_ms=round(statistics.median_high(gaps_s) * 1e3, 3) if gaps_s else None,
        itl_max_ms=round(max(gaps_s) * 1e3, 3) if gaps_s else None,
        num_gaps=len(gaps_s),
        kv_mode=served.kv_mode or None,
        kv_bytes=int(served.stages["kv_bytes"]),
        rungs=[],
        prompt_tokens=served.num_prompt_tokens,
        output_tokens=served.num_output_tokens,
        prefill="",
        decode="",
        times_ms={} if ttft_ms is None else {"first_token": ttft_ms},
        line=line,
        story=[],
    )
