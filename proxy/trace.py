"""Traces of a whole deployment: this proxy's requests and every engine's records.

All engines are asked at once. Each engine's clock is compared to this one's first: of several round
trips the quickest counts, its midpoint is when the engine read its clock, and half its duration
bounds the error (D. Mills, RFC 5905). If both are on one machine, the clock is the same, and the
measurement is only a check.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from pdserve.observe.trace import CLOCK_ID, Dump, encoded
from pdserve.observe.trace_query import gathered
from pdserve.proxy.errors import WorkerError
from pdserve.proxy.live import finished
from pdserve.proxy.story import Mode
from pdserve.wire.finished import Finished, FinishedRequests
from pdserve.wire.seal import UNREADABLE
from pdserve.wire.trace import (
    Alignment,
    ClockReading,
    Collected,
    Collection,
    FrontRequest,
    Missing,
    Part,
    Term,
    Window,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pdserve.observe.clock import Clock
    from pdserve.proxy.client import EngineHttp
    from pdserve.proxy.story import Story
    from pdserve.wire.trace import ProcessTrace

NUM_ROUND_TRIPS = 7
CLOCK_TIMEOUT_S = 2.0
TRACE_TIMEOUT_S = 20.0
_SECONDS_PER_MS = 1e-3
_BATCH = 64

_STAGES_OF_TERMS = {
    "queue": ["queue"],
    "reserve": ["kv_wait"],
    "prefill": ["prefill"],
    "decode_queue": ["queue"],
    "kv": ["kv_wait", "kv_transfer"],
    "recompute": ["prefill"],
    "first_step": ["first_step"],
}
"""Terms of a story that an engine accounts for, and its stages that they stand for."""


class Tracer:
    """Collects traces for one proxy."""

    def __init__(self, http: EngineHttp, clock: Clock, recent: FinishedRequests) -> None:
        self._http = http
        self._clock = clock
        self._recent = recent

    async def collect(
        self,
        seconds: float,
        *,
        engines: Sequence[str],
        running: Iterable[Story],
        headers: Mapping[str, str],
    ) -> Collection:
        """Collect the last `seconds`, until now.

        Args:
            engines: Base URLs.
            headers: Headers for the engines.
        """
        until_s, wall_s = self._clock.monotonic_s(), self._clock.wall_s()
        own = await self._own(seconds, until_s, running)
        asked = await asyncio.gather(*(self._ask(url, seconds, headers) for url in engines))
        processes = [Collected(trace=own, alignment=Alignment())]
        missing: list[Missing] = []
        for url, answer in zip(engines, asked, strict=True):
            if isinstance(answer, WorkerError):
                missing.append(Missing(who=url, reason=str(answer)))
                continue
            of_engine, alignment = answer
            missing += of_engine.missing
            for each in of_engine.processes:
                is_ours = each.trace.process.clock_id == CLOCK_ID
                shared = same_clock(alignment) if is_ours else alignment
                processes.append(Collected(trace=each.trace, alignment=shared))
        return Collection(
            seconds=seconds, until_s=until_s, wall_s=wall_s, processes=processes, missing=missing
        )

    async def _ask(
        self, url: str, seconds: float, headers: Mapping[str, str]
    ) -> tuple[Collection, Alignment] | WorkerError:
        try:
            alignment = await self._align(url, headers)
            body = await self._get(
                f"{url}/debug/trace?seconds={seconds!r}", TRACE_TIMEOUT_S, headers
            )
        except WorkerError as error:
            return error
        try:
            # Its events are not read here, so this takes no longer than finding their end.
            return await asyncio.to_thread(_COLLECTION.decode, body), alignment
        except UNREADABLE as error:
            return WorkerError(f"{url}: its trace cannot be read: {error}", reason="garbled")

    async def _align(self, url: str, headers: Mapping[str, str]) -> Alignment:
        """Return the offset from our clock of an engine's processes, which share one machine."""
        found: list[Alignment] = []
        for _ in range(NUM_ROUND_TRIPS):
            sent_s = self._clock.monotonic_s()
            body = await self._get(f"{url}/debug/clock", CLOCK_TIMEOUT_S, headers)
            back_s = self._clock.monotonic_s()
            found.append(aligned(sent_s, back_s, _reading(url, body).monotonic_s))
        return min(found, key=lambda alignment: alignment.uncertainty_s)

    async def _get(self, url: str, timeout_s: float, headers: Mapping[str, str]) -> bytes:
        status, body = await self._http.get_json(url, timeout_s, headers)
        if status != 200:
            raise WorkerError(f"{url}: status {status}", reason="status")
        return body

    async def _own(self, seconds: float, until_s: float, running: Iterable[Story]) -> ProcessTrace:
        stories = [front_request(finished(story, "", seq=0), is_over=False) for story in running]
        ended = self._recent.json_since(until_s - seconds)
        events: list[FrontRequest] = []
        for start in range(0, len(ended), _BATCH):
            batch = map(_FINISHED.decode, ended[start : start + _BATCH])
            events += [front_request(each, is_over=True) for each in batch]
            await asyncio.sleep(0)  # streams go on between two batches
        dump = Dump(
            encoded([*events, *stories]),
            since_s=self._recent.complete_since_s(until_s - seconds),
            num_dropped=0,
            clock=self._clock,
            part=Part.PROXY,
        )
        return await gathered(dump)


def aligned(sent_s: float, back_s: float, theirs_s: float) -> Alignment:
    """Return another clock's alignment with ours, if it was read between two of our times."""
    trip_s = back_s - sent_s
    offset_s = (sent_s + back_s) / 2 - theirs_s
    return Alignment(
        offset_s=offset_s,
        uncertainty_s=trip_s / 2,
        measured_offset_s=offset_s,
        round_trip_s=trip_s,
    )


def same_clock(measured: Alignment) -> Alignment:
    """Return the alignment of a process that shares our clock; keep the measurement as a check."""
    return msgspec.structs.replace(measured, offset_s=0.0, uncertainty_s=0.0)


def front_request(request: Finished, *, is_over: bool) -> FrontRequest:
    """Return a story as windows of time, whose terms are the story's own."""
    start_s = request.arrived_s
    end_s = start_s + request.total_ms * _SECONDS_PER_MS
    marks = {name: start_s + at_ms * _SECONDS_PER_MS for name, at_ms in request.times_ms.items()}
    role = "prefill" if request.prefill else ""
    is_apart = request.mode == Mode.DISAGGREGATED.value
    # The end mark, its window's name, and the name if the mark did not come.
    stretches: list[tuple[str, str, str, dict[str, float], str]] = [
        ("queued", "proxy", "", {}, "proxy"),
        ("admitted", "admission", "", {}, "admission"),
        ("first_leg", "proxy", "", {}, "proxy"),
        ("leg", "retry", "", {}, "retry"),
        ("first_token", "relay", role, request.ttft_terms, "until the first token"),
    ]
    if is_apart:
        rest = "until the second token" if not is_over else "decode"
        second = request.second_token_terms
        stretches.append(("second_token", "handover", "decode", second, rest))
    windows: list[Window] = []
    at_s = start_s
    rest = "decode"
    for mark, name, of_role, terms_ms, unfinished in stretches:
        until_s = marks.get(mark)
        if until_s is None:
            rest = unfinished
            break
        terms = [
            Term(term.replace("_", " "), ms * _SECONDS_PER_MS, _STAGES_OF_TERMS[term])
            for term, ms in terms_ms.items()
            if term in _STAGES_OF_TERMS and ms > 0
        ]
        windows.append(Window(name, at_s, until_s, terms, of_role))
        at_s = until_s
    if at_s < end_s:
        windows.append(Window(rest, at_s, end_s, [], ""))
    facts: dict[str, int | float | str] = {
        "mode": request.mode,
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "prefill_engine": request.prefill,
        "decode_engine": request.decode,
        "kv_mode": request.kv_mode or "none",
        "kv_bytes": request.kv_bytes,
        "ladder": ",".join(request.rungs) or "none",
    }
    if is_over:
        facts["line"] = request.line
    measured = {
        "second_token_ms": request.second_token_ms,
        "itl_p50_ms": request.itl_p50_ms,
        "itl_max_ms": request.itl_max_ms,
    }
    facts |= {name: ms for name, ms in measured.items() if ms is not None}
    return FrontRequest(
        at_s=end_s,
        request_id=request.request_id,
        outcome=request.outcome if is_over else "",
        ttft_s=marks.get("first_token", start_s) - start_s,
        windows=windows,
        notes=[(start_s + each.at_ms * _SECONDS_PER_MS, each.event) for each in request.story],
        facts=facts,
    )


def _reading(url: str, body: bytes) -> ClockReading:
    try:
        return _CLOCK.decode(body)
    except UNREADABLE as error:
        raise WorkerError(f"{url}: its clock cannot be read: {error}", reason="garbled") from error


_COLLECTION: msgspec.json.Decoder[Collection] = msgspec.json.Decoder(Collection)
_CLOCK: msgspec.json.Decoder[ClockReading] = msgspec.json.Decoder(ClockReading)
_FINISHED: msgspec.json.Decoder[Finished] = msgspec.json.Decoder(Finished)
