"""A request that has ended, as `/debug/requests` shows it at proxies and at engines alike."""

from __future__ import annotations

import msgspec

NUM_KEPT = 4096
"""How many of them a process keeps."""


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a finished request's story, `at_ms` after its arrival."""

    at_ms: float
    event: str


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request. Its fields are the keys of its JSON; ms are milliseconds.

    Attributes:
        seq: Counts the finished requests of this process's life, from 1.
        outcome: At a proxy one of `OUTCOMES` of its metrics; at an engine "ok", "handed_over",
            "client_left" or an error's code.
        mode: Whether the prompt and the rest were computed apart ("disaggregated") or on one
            engine ("local", as always at an engine).
        arrived_wall_s: Unix time of its arrival; `arrived_s` is the same in monotonic seconds.
        total_ms: From its arrival to its end.
        ttft_ms, ttft_terms: Time to the first token (at an engine: the first computed here),
            and its parts, which add up to it; None and empty if none came. Where a proxy's
            answer came in one piece (`streamed` is false): until the first token had come to it.
        second_token_ms, second_token_terms: From the first to the second token, likewise; None
            and empty at an engine, which no other one follows.
        itl_p50_ms, itl_max_ms, num_gaps: Of the gaps between output tokens; at a proxy between
            chunks from the decode engine on.
        kv_mode, kv_bytes: Who moved the KV, if anyone did, and how much.
        rungs, rung_reasons: Of the ladder, which is a proxy's, and why each was taken.
        prefill, decode: Base URLs of the engines of the last attempt; where `prefill` is
            empty, `decode` did everything. Both are empty at an engine.
        times_ms: When it was queued, admitted, first sent to an engine, sent to the engine that
            gave the first token, and when the first and second token were written; since
            arrival. Steps that it did not come to are left out.
        line: Its line of the log.
        story: Empty at an engine, whose core's is in its trace.
    """

    seq: int
    request_id: str
    outcome: str
    path: str
    mode: str
    streamed: bool
    arrived_wall_s: float
    arrived_s: float
    total_ms: float
    ttft_ms: float | None
    ttft_terms: dict[str, float]
    second_token_ms: float | None
    second_token_terms: dict[str, float]
    itl_p50_ms: float | None
    itl_max_ms: float | None
    num_gaps: int
    kv_mode: str | None
    kv_bytes: int
    rungs: list[str]
    rung_reasons: list[str] = []
    prompt_tokens: int
    output_tokens: int
    prefill: str
    decode: str
    times_ms: dict[str, float]
    line: str
    story: list[Told]
