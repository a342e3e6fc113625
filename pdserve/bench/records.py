"""Planned requests and their outcomes: the values that all parts of the benchmark share.

A data set makes `Planned` requests, arrivals set their due times, the client sends them and writes
an `Outcome` for each; figures, tables and plots are made from a `Run`. All times inside a run are
seconds since its start. Knows no endpoint, no clock and no figure.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import msgspec

Message = dict[str, str]
Prompt = str | Sequence[int | Message]
"""Text, token ids, or chat messages."""


class Planned(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request, before it is sent.

    Attributes:
        index: Its place in the run; unique.
        max_tokens: Output tokens to ask for.
        num_prompt_tokens: Prompt tokens, if the data set knows.
        at_s: When it is due; None before arrivals were drawn. With `after`: never before this.
        group: The data set's name for its kind ("steady" and "burst" of `pd-interference`); each
            group also has its own figures.
        after: The request whose prompt and answer come before this prompt (a turn of a
            conversation); this one is due `delay_s` after the other's end.
        delay_s: The user's pause between two turns.
        cancel_after_s: When the client cancels it, counted from its sending.
        cancel_after_tokens: Number of chunks with tokens after which it does; 0 cancels before the
            first one.
    """

    index: int
    prompt: Prompt
    max_tokens: int
    num_prompt_tokens: int | None = None
    at_s: float | None = None
    group: str = ""
    after: int | None = None
    delay_s: float = 0.0
    cancel_after_s: float | None = None
    cancel_after_tokens: int | None = None


class RequestPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a data set produces: the requests of a run before arrivals are drawn.

    Attributes:
        requests: Requests by `index`. Those of a data set with its own times have `at_s`.
        description: The data set and its parameters in words, for `Run.dataset`.
        notes: Sentences for readers of the figures: what was left out and how much, and what was
            repeated.
    """

    requests: list[Planned]
    description: str
    notes: list[str] = []


class Outcome(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The outcome of one request, as its client saw it.

    Attributes:
        request_id: Sent as `X-Request-Id`.
        scheduled_s: When it was due: by the schedule, by the end of the previous turn, and by a
            free place if places are limited, whichever came last. The difference to `sent_s` is the
            client's own lag.
        sent_s: When the request was about to be written.
        chunk_s: When each chunk with at least one token arrived, in order.
        chunk_tokens: Tokens of each such chunk as the server reports them, else 1.
        end_s: When the answer ended or the error came.
        num_prompt_tokens, num_output_tokens: By the server's own count (`usage`), else by the
            data set's and the chunks'.
        num_cached_tokens: Cached prompt tokens by the server's count (`usage`); None if not
            reported. The others were computed.
        status: HTTP status; 0 if none came.
        error: Why it failed; empty if it did not.
        is_cancelled: Whether the client cancelled it on purpose, which is not a failure.
        finish_reason: As the server reported it.
        text: Generated text, if the run keeps it.
        stages: Milliseconds of each stage up to the first token, as the server reports them, in
            order of time; they add up to its TTFT. Empty if the server reports none.
        second_stages: The same from the first to the second token.
        kv_mode: How its KV was transferred ("push", "pull"), if it was and the server reports it.
    """

    index: int
    request_id: str
    group: str = ""
    scheduled_s: float = 0.0
    sent_s: float = 0.0
    chunk_s: list[float] = []
    chunk_tokens: list[int] = []
    end_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None
    status: int = 0
    error: str = ""
    is_cancelled: bool = False
    finish_reason: str = ""
    text: str = ""
    stages: dict[str, float] = {}
    second_stages: dict[str, float] = {}
    kv_mode: str = ""

    @property
    def is_good(self) -> bool:
        """Whether it was answered to the end, with at least one token."""
        return not self.error and not self.is_cancelled and bool(self.chunk_s)

    @property
    def has_failed(self) -> bool:
        """Whether it was neither answered nor cancelled on purpose."""
        return not self.is_good and not self.is_cancelled

    @property
    def ttft_s(self) -> float:
        """Seconds from its sending to the first chunk with a token.

        Raises:
            IndexError: No token came.
        """
        return self.chunk_s[0] - self.sent_s

    @property
    def e2el_s(self) -> float:
        """Seconds from its sending to the last chunk with a token."""
        return self.chunk_s[-1] - self.sent_s

    @property
    def itl_s(self) -> list[float]:
        """Gaps between chunks."""
        return [after - before for before, after in itertools.pairwise(self.chunk_s)]

    @property
    def tpot_s(self) -> float | None:
        """(E2EL - TTFT) / (output tokens - 1); None below two tokens."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.num_output_tokens - 1)


MIN_SHOWN: Final = 0.005
"""Share of a core below which nothing is shown."""


class CoresUsed(msgspec.Struct, frozen=True, kw_only=True):
    """Average number of busy cores in a run whose server is on the client's machine.

    Attributes:
        num_cores: Cores that server and client may use.
        parts: Busy cores by part of benchmark and server.
        others: Busy cores of other programs and the kernel.
        hypervisor: Cores that other machines used of the same processor (steal).
        greediest: Id and name of the other program that used the most.
        greediest_cores: The cores that it used.
    """

    num_cores: int
    parts: dict[str, float]
    others: float = 0.0
    hypervisor: float = 0.0
    greediest: str = ""
    greediest_cores: float = 0.0

    @property
    def total(self) -> float:
        """All busy cores."""
        return sum(self.by_name.values())

    @property
    def by_name(self) -> dict[str, float]:
        """All parts, in words."""
        stolen = {"the hypervisor": self.hypervisor} if self.hypervisor >= MIN_SHOWN else {}
        return {**self.parts, "other programs and the kernel": self.others, **stolen}


class RunHealth(msgspec.Struct, kw_only=True):
    """Whether the figures are valid: the client kept up, and no other program took its cores.

    Attributes:
        num_processes: Client processes.
        send_lag_p50_s, send_lag_p99_s: Time from when requests were due until they were sent.
        loop_lag_p99_s: Delay of the client's own timers.
        cpu_share: CPU time of the busiest client process, as a share of one core.
        priority: How the client processes were scheduled: "real-time", "raised" or "usual".
        valid: Whether the figures are valid.
        why_not: Sentences; empty if `valid`.
        notes: Sentences on the accuracy of the figures of a valid run.
    """

    num_processes: int = 1
    send_lag_p50_s: float = 0.0
    send_lag_p99_s: float = 0.0
    loop_lag_p99_s: float = 0.0
    cpu_share: float = 0.0
    priority: str = "usual"
    valid: bool = True
    why_not: list[str] = []
    notes: list[str] = []


class Run(msgspec.Struct, kw_only=True):
    """One run of one plan against one endpoint.

    Attributes:
        label: Its name in tables.
        base_url, model: The endpoint and its model.
        dataset, arrivals: In words, with their parameters, as `random in=512 out=64`,
            `poisson rate=4`.
        seed: Seed of data set and arrivals.
        sampling: Sampling settings of the requests, in words.
        started_wall_s: Unix time of its start.
        duration_s: Seconds until the last answer's end.
        num_unfinished: Planned requests without an outcome, because the run was cut short.
        outcomes: Outcomes by `index`.
        engines: The deployment's engines, as `/pdserve/v1/info` or the proxy reports them.
        cores: None if the server's processes are not on this machine, or cannot be seen.
    """

    label: str
    base_url: str
    model: str
    dataset: str
    arrivals: str
    seed: int
    sampling: str = ""
    started_wall_s: float
    duration_s: float
    outcomes: list[Outcome]
    health: RunHealth
    num_unfinished: int = 0
    engines: list[dict[str, str]] = []
    cores: CoresUsed | None = None

    @property
    def answered(self) -> list[Outcome]:
        """Outcomes of the requests that were answered to the end."""
        return [each for each in self.outcomes if each.is_good]
