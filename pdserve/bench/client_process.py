"""A client process: `python -m pdserve.bench.client_process PARENT_PID`, a `ClientJob` on stdin.

It only sends and reads; the process that started it computes figures and draws progress. It ends
with that process; on SIGTERM it tells what has ended. Knows no other client.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import time
from collections.abc import Callable
from typing import Final

from pdserve.bench.client import Client, Sending
from pdserve.bench.job import (
    LENGTH_BYTES,
    BeginJob,
    Broken,
    ClientJob,
    Ended,
    JobNews,
    JobReady,
    Says,
    decode_orders,
    frame,
    length,
)
from pdserve.bench.precise_loop import new_precise_loop
from pdserve.bench.priority import Priority, raise_priority
from pdserve.bench.records import Outcome
from pdserve.errors import ConfigError
from pdserve.lifeline import end_with_parent

_NEWS_EVERY_S: Final = 0.2
_LOOK_EVERY_S: Final = 0.02


def main() -> None:
    """Do one job."""
    end_with_parent(int(sys.argv[1]))
    priority = raise_priority()
    job = decode_orders(_read_frame())
    assert isinstance(job, ClientJob)
    with asyncio.Runner(loop_factory=new_precise_loop) as runner:
        runner.run(_work(job, priority))


def _read_frame() -> bytes:
    return sys.stdin.buffer.read(length(sys.stdin.buffer.read(LENGTH_BYTES)))


async def _work(job: ClientJob, priority: Priority) -> None:
    loop = asyncio.get_running_loop()
    transport, pipe = await loop.connect_write_pipe(_Pipe, sys.stdout.buffer)

    def say(message: Says) -> None:
        transport.write(frame(message))

    ended: list[Outcome] = []
    try:
        client = Client(job.asking, job.sending, on_outcome=ended.append)
        warmup_errors = await _warm_up(job)
        await client.connect(job.plan)
        loop.add_signal_handler(signal.SIGTERM, client.stop)
        say(JobReady(warmup_errors=warmup_errors))
        begin = decode_orders(await loop.run_in_executor(None, _read_frame))
        assert isinstance(begin, BeginJob)
        await _run(job, client, ended, begin.start_s, priority, say)
    except ConfigError as error:
        say(Broken(message=error.message, param=error.param))
    transport.close()
    await pipe.closed.wait()


class _Pipe(asyncio.BaseProtocol):
    """The standard output; closed after all is written."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


async def _warm_up(job: ClientJob) -> list[str]:
    """Send the warm-ups; their connections are not kept for the run."""
    errors: list[str] = []

    def note(outcome: Outcome) -> None:
        if outcome.error:
            errors.append(outcome.error)

    sending = Sending(
        max_concurrency=job.sending.max_concurrency,
        request_timeout_s=job.sending.request_timeout_s,
        id_prefix=f"{job.sending.id_prefix}warmup-",
    )
    client = Client(job.asking, sending, on_outcome=note)
    await client.run(job.warmups, time.monotonic())
    client.close()
    return errors


async def _run(
    job: ClientJob,
    client: Client,
    ended: list[Outcome],
    start_s: float,
    priority: Priority,
    say: Callable[[Says], None],
) -> None:
    """Carry out the plan; `client` adds finished requests to `ended`."""
    lags: list[float] = []

    def news() -> None:
        say(JobNews(outcomes=list(ended), num_in_flight=client.num_in_flight))
        ended.clear()

    # The plan lives to the end: nobody needs to look through it for garbage.
    gc.collect()
    gc.freeze()
    watch = asyncio.create_task(_watch(start_s, lags, news))
    cpu_s, since_s = time.process_time(), time.monotonic()
    try:
        await client.run(job.plan, start_s)
    finally:
        watch.cancel()
        client.close()
    share = (time.process_time() - cpu_s) / max(time.monotonic() - since_s, 1e-9)
    news()
    say(Ended(loop_lags_s=lags, cpu_share=share, priority=priority))


async def _watch(start_s: float, lags: list[float], news: Callable[[], None]) -> None:
    """Check every 20 ms how late this process's timers are; send news now and then."""
    loop = asyncio.get_running_loop()
    shift_s = loop.time() - time.monotonic()
    due_s = max(time.monotonic(), start_s)
    news_due_s = due_s + _NEWS_EVERY_S
    woken = asyncio.Event()
    while True:
        due_s += _LOOK_EVERY_S
        woken.clear()
        loop.call_at(due_s + shift_s, woken.set)
        await woken.wait()
        now_s = time.monotonic()
        lags.append(now_s - due_s)
        due_s = max(due_s, now_s - _LOOK_EVERY_S)
        if now_s >= news_due_s:
            news_due_s = now_s + _NEWS_EVERY_S
            news()


if __name__ == "__main__":
    main()
