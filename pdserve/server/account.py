"""A server's records of its requests: counts, log lines, `/debug/requests`, traces.

The keys are those of a proxy's `/debug/requests`, so that one reader fits both;
fields that only a proxy knows are empty. Times are measured here: the term `server` is this
server's part, all others are the engine core's.
"""

from __future__ import annotations

import statistics
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from pdserve.errors import KvTransferError, PdserveError
from pdserve.http.answers import IS_LOGGED
from pdserve.observe.request_log import (
    CLIENT_LEFT,
    MovedKV,
    StoredKV,
    kv_path,
    log_request,
    outcome_of,
    times_of,
    with_line,
)
from pdserve.observe.stats_log import share
from pdserve.server.metrics import STAGES
from pdserve.server.service import SERVICE
from pdserve.server.text_request import PARTS_OF_STAGES
from pdserve.wire.finished import Finished
from pdserve.wire.request import FinishReason
from pdserve.wire.trace import FrontRequest, Term, Window
from pdserve.wire.transfer import KVMode, LoadFailure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp import web

    from pdserve.engine.client import EngineClient
    from pdserve.observe.clock import Clock
    from pdserve.server.service import Service
    from pdserve.server.text_request import TextRequest
    from pdserve.wire.request import EngineStats

_ANSWERED = (LoadFailure.ABORTED.value,)
"""The first token of a pushed request was its last. The proxy leaves too, sooner or later."""


@asynccontextmanager
async def serving(request: web.Request, text_request: TextRequest) -> AsyncIterator[None]:
    """Run a text request for the duration of the block; account for it at the end."""
    service = request.app[SERVICE]
    service.text_requests[id(text_request)] = text_request
    request[IS_LOGGED] = True
    try:
        async with text_request:
            try:
                yield
            except BaseException as error:
                _account(service, text_request, error)
                raise
            _account(service, text_request, None)
    finally:
        del service.text_requests[id(text_request)]
        # An error's traceback refers to it: the cycle would wait for the garbage collector.
        text_request.failure = None


def _account(service: Service, text_request: TextRequest, error: BaseException | None) -> None:
    """Count a finished text request, log its line, and keep it for `/debug/requests`.

    Args:
        error: The error that ended its block; one that ends a stream already begun does not.
    """
    ending = _ending(service, text_request, text_request.failure or error, has_begun=error is None)
    fields = text_request.stages()
    kv_bytes, store_tokens, store_bytes = (
        int(fields.pop(name)) for name in ("kv_bytes", "store_tokens", "store_bytes")
    )
    ttft_s = fields.pop("ttft_s")
    digest_s, step_wait_s, store_s = (fields.pop(name) for name in PARTS_OF_STAGES)
    seconds = {name.removesuffix("_s"): value for name, value in fields.items()}
    timed = text_request.ttft_s is not None
    if timed:
        core = text_request.leader().core
        service.metrics.stages(core, seconds, kv_bytes=kv_bytes, step_wait_s=step_wait_s)
    _count_prompts(service, text_request)
    shown = {
        "server": seconds["server"],
        "queue": seconds["queue"],
        "prefill": seconds["prefill"],
        "kv": seconds["kv_wait"] + seconds["kv_transfer"],
        "handover": seconds["handover"],
        "first_step": seconds["first_step"],
    }
    times = times_of(
        ttft_s if timed else None,
        {name: value for name, value in shown.items() if value},
        num_prompt_tokens=text_request.num_prompt_tokens,
        kv=MovedKV(
            kv_bytes,
            seconds["kv_transfer"],
            digest_s,
            StoredKV(store_tokens, store_bytes, store_s),
        ),
        gaps_s=text_request.gaps_s,
        tokens_per_step=text_request.tokens_per_step,
    )
    ended = with_line(_finished(text_request, service.recent.next_seq, ending), times)
    log_request(ended)
    service.recent.add(ended)
    service.recorder.add(traced(service, text_request, ending.outcome))


def _count_prompts(service: Service, text_request: TextRequest) -> None:
    of_prompts: dict[int, list[int]] = {}
    for choice in text_request.choices:
        of_prompts.setdefault(choice.prompt_index, []).append(choice.num_tokens)
    observer = service.metrics.of_core[text_request.leader().core]
    for tokens in of_prompts.values():
        observer.ended_together(num_choices=len(tokens), num_longest=max(tokens))


class _Ending(NamedTuple):
    """How a text request ended; see `Finished`."""

    outcome: str
    status: int = 200
    reason: str = ""


def _ending(
    service: Service, text_request: TextRequest, failure: BaseException | None, *, has_begun: bool
) -> _Ending:
    """Return how a text request ended, and end its unfinished choices.

    Args:
        has_begun: Whether the client already has a status, which is a success.
    """
    is_failed = isinstance(failure, Exception) and not isinstance(failure, ConnectionError)
    num_cut = text_request.end_unfinished(FinishReason.ERROR if is_failed else FinishReason.ABORT)
    if isinstance(failure, PdserveError):
        if isinstance(failure, KvTransferError) and failure.load_failures == _ANSWERED:
            service.metrics.disconnected("queue")
            return _Ending("disconnected", CLIENT_LEFT, "client_left")
        if isinstance(failure, KvTransferError) and text_request.tells_of_lost_kv:
            return _Ending("reported", failure.status, ",".join(failure.load_failures))
        if has_begun:
            return _Ending("error", reason=failure.error_code)
        return _Ending(outcome_of(failure.status), failure.status, failure.error_code)
    if is_failed:
        return _Ending("error", 200 if has_begun else 500, PdserveError.code)
    if num_cut or failure is not None:  # cancelled
        has_tokens = any(choice.first_token_s is not None for choice in text_request.choices)
        service.metrics.disconnected("decode" if has_tokens else "queue")
        return _Ending("disconnected", CLIENT_LEFT, "client_left")
    is_handoff = any(each.finish_reason is FinishReason.HANDOFF for each in text_request.choices)
    failures = dict.fromkeys(label for each in text_request.choices for label in each.load_failures)
    return _Ending("handed_over" if is_handoff else "ok", reason=",".join(failures))


def running(text_request: TextRequest) -> dict[str, object]:
    """Return the entry in `/debug/requests` for a running request."""
    return {
        "request_id": text_request.request_id,
        "path": text_request.path,
        "stage": "decode" if text_request.ttft_s is not None else "queued",
        "kv_mode": text_request.leader().kv_mode or None,
        "age_s": round(text_request.clock.monotonic_s() - text_request.start_s, 3),
        "output_tokens": text_request.num_output_tokens,
        "story": [],
    }


def traced(service: Service, text_request: TextRequest, outcome: str) -> FrontRequest:
    """Return the intervals of a request's time until now, for traces."""
    now_s, ttft_s = text_request.clock.monotonic_s(), text_request.ttft_s
    if ttft_s is None:
        windows = [Window("server", text_request.start_s, now_s, [], "")]
    else:
        first_s = text_request.start_s + ttft_s
        terms = _terms(text_request)
        del terms["server"]
        parts = [Term(name, seconds, [name]) for name, seconds in terms.items()]
        role = service.engine_config.role.value
        windows = [Window("server", text_request.start_s, first_s, parts, role)]
        rest = "reply" if outcome == "handed_over" else "decode"
        windows.append(Window(rest, first_s, now_s, [], ""))
    return FrontRequest(
        at_s=now_s,
        request_id=text_request.request_id,
        outcome=outcome,
        ttft_s=ttft_s or 0.0,
        windows=windows,
        notes=[],
        facts={
            "prompt_tokens": text_request.num_prompt_tokens,
            "output_tokens": text_request.num_output_tokens,
            "choices": len(text_request.choices),
        },
    )


def _terms(text_request: TextRequest) -> dict[str, float]:
    """Return the seconds to the first token computed here, by term; they add up to it."""
    stages = text_request.stages()
    terms = {"server": float(stages["server_s"])}
    left_s = float(stages["ttft_s"]) - terms["server"]
    for name in STAGES[1:]:  # the engine core's
        seconds = min(float(stages[f"{name}_s"]), left_s)
        left_s -= seconds
        if seconds > 0:
            terms[name] = seconds
    return terms


def _finished(text_request: TextRequest, seq: int, ending: _Ending) -> Finished:
    now_s, gaps_s = text_request.clock.monotonic_s(), text_request.gaps_s
    terms = _terms(text_request) if text_request.ttft_s is not None else {}
    terms_ms = {name: round(seconds * 1e3, 3) for name, seconds in terms.items()}
    ttft_ms = round(sum(terms_ms.values()), 3) if terms_ms else None
    kv_mode, stages = _kv_mode(text_request, ending.outcome), text_request.stages()
    per_step = text_request.tokens_per_step
    return Finished(
        seq=seq,
        request_id=text_request.request_id,
        outcome=ending.outcome,
        status=ending.status,
        reason=ending.reason,
        path=text_request.path,
        model=text_request.model,
        streamed=text_request.is_streamed,
        arrived_wall_s=round(text_request.clock.wall_s() - (now_s - text_request.start_s), 6),
        arrived_s=round(text_request.start_s, 6),
        total_ms=round((now_s - text_request.start_s) * 1e3, 3),
        ttft_ms=ttft_ms,
        ttft_terms=terms_ms,
        itl_p50_ms=round(statistics.median_high(gaps_s) * 1e3, 3) if gaps_s else None,
        itl_max_ms=round(max(gaps_s) * 1e3, 3) if gaps_s else None,
        num_gaps=len(gaps_s),
        tokens_per_step=None if per_step is None else round(per_step, 3),
        kv_mode=kv_mode or None,
        kv_bytes=int(stages["kv_bytes"]),
        kv_path=kv_path(kv_mode or "local", has_store=stages["store_tokens"] > 0),
        prompt_tokens=text_request.num_prompt_tokens,
        cached_tokens=text_request.num_cached_tokens,
        store_tokens=int(stages["store_tokens"]),
        output_tokens=text_request.num_output_tokens,
        times_ms={} if ttft_ms is None else {"first_token": ttft_ms},
    )


def _kv_mode(text_request: TextRequest, outcome: str) -> str:
    """Return how its KV moves between engines: push, pull, or empty if it does not."""
    leader = text_request.leader()
    if leader.kv_mode or leader.request is None:
        return leader.kv_mode
    if leader.request.remote_decode and outcome == "ok":  # it ended here, so no KV had to move
        return ""
    if leader.request.ticket is not None:
        return KVMode.PUSH.value
    is_split = leader.request.remote_decode or leader.request.handoff is not None
    return KVMode.PULL.value if is_split else ""


class EngineStatsLog:
    """Compares an engine's newest snapshot with the one before."""

    def __init__(self, client: EngineClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._before: EngineStats | None = None
        self._since_s = clock.monotonic_s()

    def read(self) -> dict[str, object] | None:
        """Return the work done since the last call; None if the engine is idle.

        Work that an engine may never do (hand KV over, preempt) is left out if there was none.
        """
        now, before, now_s = self._client.stats, self._before, self._clock.monotonic_s()
        seconds, self._since_s = max(now_s - self._since_s, 1e-3), now_s
        self._before = now
        if now is None or before is None:
            return None
        num_computed = now.local_compute_tokens - before.local_compute_tokens
        num_generated = now.generation_tokens - before.generation_tokens
        num_open = now.in_brief().num_requests
        if not (num_open or num_computed or num_generated):
            return None
        return {
            "prompt_tokens_per_s": round(num_computed / seconds, 1),
            "output_tokens_per_s": round(num_generated / seconds, 1),
            "running": now.num_running,
            "waiting": now.num_waiting,
            "receiving": now.num_receiving or None,
            "kv_usage": round(now.kv_usage, 3),
            "prefix_hit_rate": share(
                now.prefix_cache_hits - before.prefix_cache_hits,
                now.prefix_cache_queries - before.prefix_cache_queries,
            ),
            "handed_over": _added(now.lease_ends, before.lease_ends),
            "taken_over": _added(now.kv_loads, before.kv_loads),
            "not_taken_over": _added(now.kv_load_failures, before.kv_load_failures),
            "preempted": now.num_preemptions - before.num_preemptions or None,
        }


def _added(now: dict[str, int], before: dict[str, int]) -> int | None:
    return sum(now.values()) - sum(before.values()) or None
