"""Runs a plan against an endpoint: starts the client processes and collects the outcomes.

The clients (`client`, in their own processes) do the timed work; this module splits the plan among
them, starts all of them at once, and asks a pdserve deployment for each request's stages. Knows no
data set and no figure.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import aiohttp
import msgspec

from pdserve.bench.bodies import Asking, adapt, unlike
from pdserve.bench.client import Sending
from pdserve.bench.clients import ClientProcess, client_processes
from pdserve.bench.cores import CpuReading, Watched, read_cpu, serving, used_cores
from pdserve.bench.endpoint import ask_served, until_answers
from pdserve.bench.histogram import Histogram
from pdserve.bench.job import BeginJob, ClientJob, Ended, JobNews, JobReady
from pdserve.bench.records import CoresUsed, Outcome, Planned, Run
from pdserve.bench.stages import FETCH_EVERY, Stages
from pdserve.bench.target import Target
from pdserve.bench.validity import judge
from pdserve.errors import ConfigError, PeerError

_BEGIN_IN_S: Final = 0.05
_PROGRESS_EVERY_S: Final = 0.2
_RATE_OF_A_PROCESS: Final = 400.0
"""Requests per second for one client process by default."""
_PLACES_OF_A_PROCESS: Final = 512
_ASKING_AGAIN_S: Final = 0.05
_NUM_ASKED_AGAIN: Final = 10


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options for carrying out a plan.

    Attributes:
        max_concurrency: Maximum requests in flight; None sets no limit. A request that is due waits
            for a place, and counts as scheduled when it gets one.
        num_processes: Client processes; 0 chooses by the requests due per second.
        num_warmups: Uncounted requests before the run. They are the plan's first ones, read
            backwards, so that no prefix cache can use them for the run.
        request_timeout_s: For one request, from when it is sent.
        ready_timeout_s: Time limit until the endpoint answers a request for one token; 0 asks once.
        ignore_eos: Whether to ask for exactly `max_tokens` tokens (vLLM's and our `ignore_eos`).
        temperature: None leaves it to the server.
        extra_body: Additional fields for every request.
        keep_text: Whether to keep generated text in the outcomes.
        with_stages: Whether to ask a pdserve deployment for the stages of each request.
        ends_early: Whether a run that is cancelled once its first request was due returns what had
            ended.
    """

    max_concurrency: int | None = None
    num_processes: int = 0
    num_warmups: int = 0
    request_timeout_s: float = 1800.0
    ready_timeout_s: float = 0.0
    ignore_eos: bool = False
    temperature: float | None = None
    extra_body: dict[str, object] = {}
    keep_text: bool = False
    with_stages: bool = True
    ends_early: bool = False


class RunProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a run.

    Attributes:
        elapsed_s: Since its start.
        total, done, in_flight, failed: Requests; `done` includes failed and cancelled ones.
        num_output_tokens: Output tokens of all requests that have ended.
        last_due_s: When the last request with a due time is due.
        ttft_p50_s, itl_p99_s: Over the requests that have ended; None before the first.
    """

    elapsed_s: float
    total: int
    done: int
    in_flight: int
    failed: int
    num_output_tokens: int
    last_due_s: float
    ttft_p50_s: float | None
    itl_p99_s: float | None


class PlanOrigin(NamedTuple):
    """The origin of a plan, in words, with parameters; see `Run`."""

    dataset: str = ""
    arrivals: str = ""
    sampling: str = ""
    seed: int = 0


_AS_USUAL: Final = Options()
_BY_HAND: Final = PlanOrigin()


async def run_plan(
    plan: Sequence[Planned],
    target: Target,
    options: Options = _AS_USUAL,
    *,
    origin: PlanOrigin = _BY_HAND,
    on_progress: Callable[[RunProgress], None] | None = None,
    environ: Mapping[str, str] | None = None,
    watched: Watched | None = None,
) -> Run:
    """Send every request of `plan` when it is due, and return the outcomes.

    Args:
        plan: The requests, each with `at_s` or `after` (set by `arrivals.schedule`).
        target: The endpoint.
        options: How to send them.
        origin: Copied into the run.
        on_progress: Called about five times a second, in the caller's loop.
        environ: Environment of the client processes; None is this process's.
        watched: The server's processes; None looks for them at its URLs.

    Raises:
        ConfigError: The plan does not fit the endpoint (token ids for chat), or has no due time.
        PeerError: The endpoint does not answer, or refuses the model or the key.
    """
    _check(plan, target)
    timeout = aiohttp.ClientTimeout(total=30.0)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        if not target.model:
            served = await ask_served(target, options.ready_timeout_s)
            target = msgspec.structs.replace(target, model=served.model)
        asking = Asking(
            target=target,
            ignore_eos=options.ignore_eos,
            temperature=options.temperature,
            extra_body=options.extra_body,
        )
        await until_answers(session, asking, plan, options.ready_timeout_s)
        stages = Stages(session, target.base_url, target.headers)
        if options.with_stages:
            await stages.begin()
        course = _Course(plan, on_progress)
        jobs = _share_out(plan, asking, options)
        async with client_processes(len(jobs), environ) as clients:
            ended = await _carry_out(clients, jobs, course, stages, options.ends_early)
        for _ in range(_NUM_ASKED_AGAIN if stages.is_reporting else 0):
            await stages.fetch()
            if not stages.lacks(course.outcomes):
                break
            await asyncio.sleep(_ASKING_AGAIN_S)
        stages.fill_in(course.outcomes)
        engines = await stages.engines()
    urls = [each["url"] for each in engines]
    cores = await asyncio.to_thread(course.cores_used, watched, target.base_url, urls)
    outcomes = sorted(course.outcomes, key=lambda outcome: outcome.index)
    lags = [lag for each in ended for lag in each.loop_lags_s]
    num_unfinished = len(plan) - len(outcomes)
    return Run(
        label=target.label or target.base_url,
        base_url=target.base_url,
        model=target.model,
        dataset=origin.dataset,
        arrivals=origin.arrivals,
        seed=origin.seed,
        sampling=origin.sampling,
        started_wall_s=course.started_wall_s,
        duration_s=max((each.end_s for each in outcomes), default=0.0),
        outcomes=outcomes,
        num_unfinished=num_unfinished,
        health=judge(
            outcomes,
            lags,
            [each.cpu_share for each in ended],
            priority=ended[0].priority,
            cores=cores,
            num_unfinished=num_unfinished,
        ),
        engines=engines,
        cores=cores,
    )


def _check(plan: Sequence[Planned], target: Target) -> None:
    if not plan:
        raise ConfigError(
            "the plan has no requests, so there is nothing to send: raise --num-prompts",
            param="num-prompts",
        )
    indexes = {each.index for each in plan}
    if len(indexes) < len(plan):
        raise ConfigError("two requests of the plan have the same index")
    for each in plan:
        if each.at_s is None and each.after is None:
            raise ConfigError(f"request {each.index} has no due time: schedule the plan first")
        if each.after is not None and each.after not in indexes:
            raise ConfigError(f"request {each.index} follows {each.after}, which is not planned")
        adapt(each.prompt, target.endpoint)


class _Course:
    """Tracks a run in progress."""

    def __init__(
        self, plan: Sequence[Planned], on_progress: Callable[[RunProgress], None] | None
    ) -> None:
        self.outcomes: list[Outcome] = []
        self.started_wall_s = 0.0
        self._total = len(plan)
        self._last_due_s = max((each.at_s or 0.0 for each in plan), default=0.0)
        self._on_progress = on_progress
        self._start_s = 0.0
        self._cpu_before = self._cpu_after = CpuReading(0.0, {}, {})
        self._in_flight: dict[int, int] = {}
        self._failed = 0
        self._tokens = 0
        self._ttft = Histogram()
        self._itl = Histogram()

    def begin(self) -> float:
        """Return the start of the run."""
        self._cpu_before = read_cpu()
        self._start_s = time.monotonic() + _BEGIN_IN_S
        self.started_wall_s = time.time() + _BEGIN_IN_S
        return self._start_s

    def end(self) -> None:
        self._cpu_after = read_cpu()
        self.tell()

    def cores_used(
        self, watched: Watched | None, base_url: str, engine_urls: Sequence[str]
    ) -> CoresUsed | None:
        watched = watched or serving(base_url, engine_urls, self._cpu_after)
        return used_cores(self._cpu_before, self._cpu_after, watched) if watched else None

    def take(self, process: int, news: JobNews) -> None:
        self._in_flight[process] = news.num_in_flight
        for outcome in news.outcomes:
            self.outcomes.append(outcome)
            self._failed += bool(outcome.error)
            self._tokens += outcome.num_output_tokens
            if self._on_progress is not None and outcome.is_good:
                self._ttft.add(outcome.ttft_s)
                for gap_s in outcome.itl_s:
                    self._itl.add(gap_s)

    def tell(self) -> None:
        if self._on_progress is None:
            return
        self._on_progress(
            RunProgress(
                elapsed_s=max(0.0, time.monotonic() - self._start_s),
                total=self._total,
                done=len(self.outcomes),
                in_flight=sum(self._in_flight.values()),
                failed=self._failed,
                num_output_tokens=self._tokens,
                last_due_s=self._last_due_s,
                ttft_p50_s=self._ttft.percentile(50),
                itl_p99_s=self._itl.percentile(99),
            )
        )


def _share_out(plan: Sequence[Planned], asking: Asking, options: Options) -> list[ClientJob]:
    """Distribute the plan in order of due time; a conversation stays together."""
    number = options.num_processes or _num_processes(plan, options.max_concurrency)
    number = min(number, options.max_concurrency or number, len(plan))
    shares: list[list[Planned]] = [[] for _ in range(number)]
    owner: dict[int, int] = {}
    turn = 0
    by_index = {each.index: each for each in plan}

    def place(each: Planned) -> int:
        nonlocal turn
        chain = [each]
        while chain[-1].index not in owner and (after := chain[-1].after) is not None:
            chain.append(by_index[after])
            if len(chain) > len(plan):
                raise ConfigError(f"request {each.index} follows itself")
        if chain[-1].index in owner:
            process = owner[chain[-1].index]
        else:
            process, turn = turn % number, turn + 1
        owner.update((link.index, process) for link in chain)
        return process

    for each in sorted(plan, key=lambda planned: (planned.at_s or 0.0, planned.index)):
        shares[place(each)].append(each)
    run_id = uuid.uuid4().hex[:8]
    warmups = _warmups(plan, options.num_warmups)
    return [
        ClientJob(
            asking=asking,
            sending=Sending(
                max_concurrency=_part(options.max_concurrency, number, process),
                request_timeout_s=options.request_timeout_s,
                keep_text=options.keep_text,
                id_prefix=f"bench-{run_id}-",
            ),
            plan=share,
            warmups=warmups[process::number],
        )
        for process, share in enumerate(shares)
    ]


def _part(whole: int | None, number: int, which: int) -> int | None:
    return None if whole is None else whole // number + (which < whole % number)


def _num_processes(plan: Sequence[Planned], max_concurrency: int | None) -> int:
    """Return the number of client processes for a plan; at most one per core."""
    last_s = max(each.at_s or 0.0 for each in plan)
    in_flight = max_concurrency or len(plan)
    if last_s > 0:
        needed = len(plan) / last_s / _RATE_OF_A_PROCESS
    else:
        needed = in_flight / _PLACES_OF_A_PROCESS
    return max(1, min(math.ceil(needed), os.cpu_count() or 1))


def _warmups(plan: Sequence[Planned], number: int) -> list[Planned]:
    openings = [each for each in plan if each.after is None]
    return [
        Planned(
            index=place,
            prompt=unlike(openings[place % len(openings)].prompt),
            max_tokens=openings[place % len(openings)].max_tokens,
            at_s=0.0,
        )
        for place in range(number)
    ]


async def _carry_out(
    clients: Sequence[ClientProcess],
    jobs: Sequence[ClientJob],
    course: _Course,
    stages: Stages,
    ends_early: bool,
) -> list[Ended]:
    """Give each client its job, start all at once, and collect until all have ended.

    Args:
        ends_early: See `Options`.
    """
    for client, job in zip(clients, jobs, strict=True):
        await client.tell(job)
    for client in clients:
        ready = await client.hear()
        assert isinstance(ready, JobReady)
        if ready.warmup_errors:
            raise PeerError(f"a warm-up request failed: {ready.warmup_errors[0]}")
    start_s = course.begin()
    for client in clients:
        await client.tell(BeginJob(start_s=start_s))

    async def listen(which: int) -> Ended:
        while True:
            message = await clients[which].hear()
            if isinstance(message, Ended):
                return message
            assert isinstance(message, JobNews)
            course.take(which, message)

    async def look() -> None:
        fetched = 0
        while True:
            await asyncio.sleep(_PROGRESS_EVERY_S)
            course.tell()
            if len(course.outcomes) - fetched >= FETCH_EVERY:
                fetched = len(course.outcomes)
                await stages.fetch()

    async def hear_all() -> list[Ended]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(listen(which)) for which in range(len(clients))]
        except BaseExceptionGroup as error:
            raise error.exceptions[0] from None
        return [task.result() for task in tasks]

    looking, hearing = asyncio.create_task(look()), asyncio.create_task(hear_all())
    try:
        await asyncio.wait([hearing])
    except asyncio.CancelledError:
        if not ends_early:
            hearing.cancel()
            raise
        for client in clients:
            client.stop()
    finally:
        looking.cancel()
    ended = await hearing
    course.end()
    return ended
