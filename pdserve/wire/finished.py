"""Requests that have ended, as `/debug/requests` shows them at proxies and at engines alike.

Each is kept as the JSON to serve, so that it costs no more memory than its bytes and thousands can
be served without further work.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pdserve.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

NUM_KEPT = 4096
"""Finished requests that a process keeps."""


class StoryEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a finished request's story, `at_ms` after its arrival."""

    at_ms: float
    event: str


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request. Its fields are the keys of its JSON; ms are milliseconds.

    Attributes:
        seq: Number of the finished request in this process's life, from 1.
        outcome: ok, client_error (4xx), shed (429, 503), error or disconnected; at an engine also
            handed_over, or reported: the proxy was told that KV did not come.
        status: HTTP status of the answer; 499 if the client left.
        reason: The error's code; empty if it ended well.
        stage: The stage at which it failed, if it did not end well.
        path: Path of the endpoint.
        model: Name that the client used, or else the name it is served under.
        mode: Whether the prompt and the rest were computed apart ("disaggregated") or on one
            engine ("local", as always at an engine).
        arrived_wall_s: Unix time of its arrival; `arrived_s` is the same in monotonic seconds.
        total_ms: From its arrival to its end.
        ttft_ms, ttft_terms: Time to the first token (at an engine: the first computed here),
            and its parts, which add up to it; None and empty if none came. If a proxy's answer
            is not streamed (`streamed` is false): until the proxy received the first token.
        second_token_ms, second_token_terms: From the first to the second token, likewise; None
            and empty at an engine, which no other one follows.
        itl_p50_ms, itl_max_ms, num_gaps: Statistics of the gaps between output tokens; at a proxy,
            between chunks from the decode engine on.
        tokens_per_step: Reported where drafts are verified, which is at engines.
        kv_mode, kv_bytes: Who moved the KV, if anyone did, and how much.
        kv_path: How its KV reached the engine that used it: push, pull or local, followed by
            `+store` if a store had some; empty if no engine was asked.
        cached_tokens: Prompt tokens that a prefix cache had.
        store_tokens: Further prompt tokens that a store had.
        rungs, rung_reasons: Rungs of the proxy's ladder, and why each was taken.
        prefill, decode: Base URLs of the engines of the last attempt; where `prefill` is
            empty, `decode` did everything. Both are empty at an engine.
        times_ms: When it was queued, admitted, first sent to an engine, sent to the engine that
            gave the first token, and when the first and second token were written; since
            arrival. Steps that it did not reach are left out.
        line: Its line in the log.
        story: Events of the request; empty at an engine, whose core records them in its trace.
    """

    seq: int = 0
    request_id: str
    outcome: str
    status: int
    reason: str = ""
    stage: str = ""
    path: str
    model: str = ""
    mode: str = "local"
    streamed: bool = False
    arrived_wall_s: float = 0.0
    arrived_s: float = 0.0
    total_ms: float = 0.0
    ttft_ms: float | None = None
    ttft_terms: dict[str, float] = {}
    second_token_ms: float | None = None
    second_token_terms: dict[str, float] = {}
    itl_p50_ms: float | None = None
    itl_max_ms: float | None = None
    num_gaps: int = 0
    tokens_per_step: float | None = None
    kv_mode: str | None = None
    kv_bytes: int = 0
    kv_path: str = ""
    rungs: list[str] = []
    rung_reasons: list[str] = []
    prompt_tokens: int = 0
    cached_tokens: int = 0
    store_tokens: int = 0
    output_tokens: int = 0
    prefill: str = ""
    decode: str = ""
    times_ms: dict[str, float] = {}
    line: str = ""
    story: list[StoryEvent] = []


class _Kept(NamedTuple):
    seq: int
    ended_s: float
    rank_ms: float
    json: bytes


_decoder = msgspec.json.Decoder(Finished)


class FinishedRequests:
    """A ring of the requests that ended last. Times are monotonic seconds."""

    def __init__(self, num_kept: int = NUM_KEPT) -> None:
        self._kept: deque[_Kept] = deque(maxlen=num_kept)
        self._complete_since_s = float("-inf")
        self.next_seq = 1

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, finished: Finished) -> None:
        """Keep a request that has just ended as number `next_seq`; the oldest one makes room."""
        self.next_seq = finished.seq + 1
        # People look for slow first tokens; without a first token, the whole time counts.
        rank_ms = finished.ttft_ms if finished.ttft_ms is not None else finished.total_ms
        if len(self._kept) == self._kept.maxlen:
            self._complete_since_s = self._kept[0].ended_s
        ended_s = finished.arrived_s + finished.total_ms / 1e3
        self._kept.append(_Kept(finished.seq, ended_s, rank_ms, msgspec.json.encode(finished)))

    def as_json(self, number: int, *, after_seq: int = 0) -> bytes:
        """Return the newest `number` that came after `after_seq`, as a JSON list, newest first."""
        newest = itertools.islice(reversed(self._kept), number)
        later = itertools.takewhile(lambda kept: kept.seq > after_seq, newest)
        return b"[" + b",".join(kept.json for kept in later) + b"]"

    def asked_for(self, query: Mapping[str, str]) -> bytes:
        """Return the same for a query of `finished=N` and `after=SEQ`, each 0 if it is left out.

        Raises:
            BadRequestError: One of them is not a whole number, or is negative.
        """
        number = min(number_in(query, "finished"), NUM_KEPT)
        return self.as_json(number, after_seq=number_in(query, "after"))

    def since(self, monotonic_s: float) -> list[Finished]:
        """Return those that ended at `monotonic_s` or later, newest first."""
        return [_decoder.decode(kept.json) for kept in self._since(monotonic_s)]

    def json_since(self, monotonic_s: float) -> list[bytes]:
        """Return the same, each as the JSON of a `Finished`, oldest first."""
        return [kept.json for kept in self._since(monotonic_s)][::-1]

    def complete_since_s(self, monotonic_s: float) -> float:
        """Return the earliest time, `monotonic_s` or later, from which nothing is missing."""
        return max(monotonic_s, self._complete_since_s)

    def slowest(self, number: int, *, since_s: float) -> list[Finished]:
        """Return the `number` slowest to their first token of those that ended since then."""
        later = self._since(since_s)
        longest = heapq.nlargest(number, later, key=lambda kept: (kept.rank_ms, kept.seq))
        return [_decoder.decode(kept.json) for kept in longest]

    def _since(self, monotonic_s: float) -> Iterator[_Kept]:
        return itertools.takewhile(lambda kept: kept.ended_s >= monotonic_s, reversed(self._kept))


def number_in(query: Mapping[str, str], name: str) -> int:
    """Return a number of a query, 0 if it is left out.

    Raises:
        BadRequestError: It is not a whole number, or is negative.
    """
    given = query.get(name, "0")
    if not (given.isascii() and given.isdecimal() and len(given) <= 18):
        raise BadRequestError(f"{name} is {given!r}: it must be a whole number", param=name)
    return int(given)
