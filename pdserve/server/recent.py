"""The requests that ended last at this server, and those that run: what `/debug/requests` shows.

The keys are those of a proxy's `/debug/requests`, so that whoever reads the one can read the other;
what only a proxy knows of is empty. For traces the same is an event of the recorder. Times are
this server's own account: `server` is its part, all other terms are the engine core's.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from pdserve.wire.finished import NUM_KEPT, Finished
from pdserve.wire.trace import FrontRequest, Term, Window

if TYPE_CHECKING:
    from pdserve.server.job import Job

ENGINE_STAGES = ("queue", "prefill", "kv_wait", "kv_transfer", "handover", "first_step")
"""The engine core's terms of the time to the first token, in order."""


class Recent:
    """A ring of the last `num_kept` finished requests, each as the JSON that is served."""

    def __init__(self, num_kept: int = NUM_KEPT) -> None:
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=num_kept)
        self._seqs = itertools.count(1)

    def add(self, job: Job, outcome: str, line: str) -> None:
        """Keep a request that has just ended."""
        seq = next(self._seqs)
        self._kept.append((seq, msgspec.json.encode(_finished(job, seq, outcome, line))))

    def as_json(self, number: int, *, after_seq: int = 0) -> bytes:
        """The newest `number` that came after `after_seq`, as a JSON list, newest first."""
        newest = itertools.islice(reversed(self._kept), number)
        return b"[" + b",".join(json for seq, json in newest if seq > after_seq) + b"]"


def running(job: Job) -> dict[str, object]:
    """What `/debug/requests` shows of a request that runs."""
    age_s = job.service.clock.monotonic_s() - job.start_s
    num_tokens = sum(choice.num_tokens for choice in job.choices)
    return {
        "request_id": job.request_id,
        "path": job.path,
        "stage": "decode" if job.ttft_s is not None else "queued",
        "kv_mode": job.leader().kv_mode or None,
        "age_s": round(age_s, 3),
        "output_tokens": num_tokens,
        "story": [],
    }


def traced(job: Job, outcome: str) -> FrontRequest:
    """A request's time as this server saw it, until now."""
    now_s = job.service.clock.monotonic_s()
    role = job.service.engine_config.role.value
    ttft_s = job.ttft_s
    if ttft_s is None:
        windows = [Window("server", job.start_s, now_s, [], "")]
    else:
        first_s = job.start_s + ttft_s
        terms = _terms(job)
        del terms["server"]
        parts = [Term(name, seconds, [name]) for name, seconds in terms.items()]
        windows = [Window("server", job.start_s, first_s, parts, role)]
        rest = "reply" if outcome == "handed_over" else "decode"
        windows.append(Window(rest, first_s, now_s, [], ""))
    return FrontRequest(
        at_s=now_s,
        request_id=job.request_id,
        outcome=outcome,
        ttft_s=ttft_s or 0.0,
        windows=windows,
        notes=[],
        facts={
            "prompt_tokens": sum(map(len, job.prompts)),
            "output_tokens": sum(choice.num_tokens for choice in job.choices),
            "choices": len(job.choices),
        },
    )


def _terms(job: Job) -> dict[str, float]:
    """Seconds to the first token computed here, by term; they add up to it."""
    stages = job.stages()
    terms = {"server": float(stages["server_s"])}
    left_s = float(stages["ttft_s"]) - terms["server"]
    for name in ENGINE_STAGES:
        seconds = min(float(stages[f"{name}_s"]), left_s)
        left_s -= seconds
        if seconds > 0:
            terms[name] = seconds
    return terms


def _finished(job: Job, seq: int, outcome: str, line: str) -> Finished:
    clock = job.service.clock
    now_s = clock.monotonic_s()
    gaps_s = job.gaps_s
    terms = _terms(job) if job.ttft_s is not None else {}
    terms_ms = {name: round(seconds * 1e3, 3) for name, seconds in terms.items()}
    ttft_ms = round(sum(terms_ms.values()), 3) if terms_ms else None
    return Finished(
        seq=seq,
        request_id=job.request_id,
        outcome=outcome,
        path=job.path,
        mode="local",
        streamed=job.is_streamed,
        arrived_wall_s=round(clock.wall_s() - (now_s - job.start_s), 6),
        arrived_s=round(job.start_s, 6),
        total_ms=round((now_s - job.start_s) * 1e3, 3),
        ttft_ms=ttft_ms,
        ttft_terms=terms_ms,
        second_token_ms=None,
        second_token_terms={},
        itl_p50_ms=round(statistics.median_high(gaps_s) * 1e3, 3) if gaps_s else None,
        itl_max_ms=round(max(gaps_s) * 1e3, 3) if gaps_s else None,
        num_gaps=len(gaps_s),
        kv_mode=job.leader().kv_mode or None,
        kv_bytes=int(job.stages()["kv_bytes"]),
        rungs=[],
        prompt_tokens=sum(map(len, job.prompts)),
        output_tokens=sum(choice.num_tokens for choice in job.choices),
        prefill="",
        decode="",
        times_ms={} if ttft_ms is None else {"first_token": ttft_ms},
        line=line,
        story=[],
    )
