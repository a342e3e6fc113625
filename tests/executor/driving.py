"""Waits for what an executor has to say as an engine core does: asleep on its descriptors."""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.executor.base import Executor
    from pdserve.wire.step import ModelRunnerOutput
    from pdserve.wire.transfer import ConnectorReport


def collect(executor: Executor, timeout_s: float = 40.0) -> ModelRunnerOutput:
    """The next result."""
    deadline = time.monotonic() + timeout_s
    while (result := executor.poll_result()) is None:
        assert time.monotonic() < deadline, "no result came"
        sleep_until_woken(executor, deadline)
    return result


def wait_report(executor: Executor, timeout_s: float = 30.0) -> ConnectorReport:
    """The next report."""
    deadline = time.monotonic() + timeout_s
    while (report := executor.poll_report()) is None:
        assert time.monotonic() < deadline, "no report came"
        sleep_until_woken(executor, deadline)
    return report


def sleep_until_woken(executor: Executor, deadline: float) -> None:
    """Until there is news, or the time is up."""
    poller = select.poll()
    for fd in executor.wake_fds:
        poller.register(fd, select.POLLIN)
    poller.poll(max(0.0, deadline - time.monotonic()) * 1e3)


def names(report: ConnectorReport) -> list[str]:
    """The requests that have settled."""
    return [settled.request_id for settled in report.settled]
