"""What a server tells of its requests: counts, a line of the log, `/debug/requests`, traces.

The keys are those of a proxy's `/debug/requests`, so that one reader fits both;
what only a proxy knows of is empty. Times are this server's own account: `server` is its part, all
other terms are the engine core's.
"""

from __future__ import annotations

import logging
import statistics
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from pdserve.errors import PdserveError
from pdserve.observe.log import MovedKV, StoredKV, request_line
from pdserve.server.text_request import PARTS_OF_STAGES
from pdserve.wire.finished import Finished
from pdserve.wire.request import FinishReason
from pdserve.wire.trace import FrontRequest, Term, Window

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.server.service import Service
    from pdserve.server.text_request import TextRequest

_log = logging.getLogger(__name__)

ENGINE_STAGES = ("queue", "prefill", "kv_wait", "kv_transfer", "handover", "first_step")
"""The engine core's terms of the time to the first token, in order."""


@asynccontextmanager
async def serving(service: Service, job: TextRequest) -> AsyncIterator[None]:
    """Let a job run while the block does; when that is over, account for it."""
    service.jobs[id(job)] = job
    try:
        async with job:
            try:
                yield
            except BaseException as error:
                _account(service, job, error)
                raise
            _account(service, job, None)
    finally:
        del service.jobs[id(job)]
        # An error's traceback has the job: together they would wait for the garbage collector.
        job.failure = None


def _account(service: Service, job: TextRequest, error: BaseException | None) -> None:
    """Count a job that is over, log its line, and keep it for who asks.

    Args:
        error: What ended the block that it ran in.
    """
    outcome = _outcome(service, job, job.failure or error)
    fields = job.stages()
    kv_bytes, store_tokens, store_bytes = (
        int(fields.pop(name)) for name in ("kv_bytes", "store_tokens", "store_bytes")
    )
    ttft_s = fields.pop("ttft_s")
    digest_s, step_wait_s, store_s = (fields.pop(name) for name in PARTS_OF_STAGES)
    seconds = {name.removesuffix("_s"): value for name, value in fields.items()}
    timed = job.ttft_s is not None
    if timed:
        service.metrics.stages(seconds, loaded_kv=kv_bytes > 0, step_wait_s=step_wait_s)
    shown = {
        "server": seconds["server"],
        "queue": seconds["queue"],
        "prefill": seconds["prefill"],
        "kv": seconds["kv_wait"] + seconds["kv_transfer"],
        "handover": seconds["handover"],
        "first_step": seconds["first_step"],
    }
    line = request_line(
        job.request_id,
        outcome,
        num_tokens=(job.num_prompt_tokens, job.num_output_tokens),
        ttft_s=ttft_s if timed else None,
        stages={name: value for name, value in shown.items() if value},
        kv=MovedKV(
            kv_bytes,
            seconds["kv_transfer"],
            digest_s,
            job.leader().kv_mode,
            StoredKV(store_tokens, store_bytes, store_s),
        ),
        gaps_s=job.gaps_s,
    )
    _log.info("%s", line)
    service.recent.add(_finished(job, service.recent.next_seq, outcome, line))
    service.recorder.add(traced(service, job, outcome))


def _outcome(service: Service, job: TextRequest, failure: BaseException | None) -> str:
    """Name how a job ended, and end those of its choices that have not."""
    is_failed = isinstance(failure, Exception)
    num_cut = job.end_unfinished(FinishReason.ERROR if is_failed else FinishReason.ABORT)
    if isinstance(failure, PdserveError):
        return failure.error_code
    if is_failed:
        return "internal_error"
    if num_cut or failure is not None:  # cancelled
        has_begun = any(choice.first_token_s is not None for choice in job.choices)
        service.metrics.disconnected("decode" if has_begun else "queue")
        return "client_left"
    is_handoff = any(choice.finish_reason is FinishReason.HANDOFF for choice in job.choices)
    return "handed_over" if is_handoff else "ok"


def running(job: TextRequest) -> dict[str, object]:
    """Return what `/debug/requests` shows of a request that runs."""
    return {
        "request_id": job.request_id,
        "path": job.path,
        "stage": "decode" if job.ttft_s is not None else "queued",
        "kv_mode": job.leader().kv_mode or None,
        "age_s": round(job.clock.monotonic_s() - job.start_s, 3),
        "output_tokens": job.num_output_tokens,
        "story": [],
    }


def traced(service: Service, job: TextRequest, outcome: str) -> FrontRequest:
    """Return the stretches of a request's time until now, for traces."""
    now_s, ttft_s = job.clock.monotonic_s(), job.ttft_s
    if ttft_s is None:
        windows = [Window("server", job.start_s, now_s, [], "")]
    else:
        first_s = job.start_s + ttft_s
        terms = _terms(job)
        del terms["server"]
        parts = [Term(name, seconds, [name]) for name, seconds in terms.items()]
        role = service.engine_config.role.value
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
            "prompt_tokens": job.num_prompt_tokens,
            "output_tokens": job.num_output_tokens,
            "choices": len(job.choices),
        },
    )


def _terms(job: TextRequest) -> dict[str, float]:
    """Return the seconds to the first token computed here, by term; they add up to it."""
    stages = job.stages()
    terms = {"server": float(stages["server_s"])}
    left_s = float(stages["ttft_s"]) - terms["server"]
    for name in ENGINE_STAGES:
        seconds = min(float(stages[f"{name}_s"]), left_s)
        left_s -= seconds
        if seconds > 0:
            terms[name] = seconds
    return terms


def _finished(job: TextRequest, seq: int, outcome: str, line: str) -> Finished:
    now_s, gaps_s = job.clock.monotonic_s(), job.gaps_s
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
        arrived_wall_s=round(job.clock.wall_s() - (now_s - job.start_s), 6),
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
        prompt_tokens=job.num_prompt_tokens,
        output_tokens=job.num_output_tokens,
        prefill="",
        decode="",
        times_ms={} if ttft_ms is None else {"first_token": ttft_ms},
        line=line,
        story=[],
    )
