"""Stages for the failure table: one deployment per transport, whose KV either side moves.

What is marked `short_form` runs in `make test`; all of it runs in `make chaos`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.chaos.stage import Stage, started
from tests.e2e.conftest import model_of
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from typing import Any

__all__ = ["model_of"]
LOG_LINES = 30


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to `make chaos` what is not in the short form for its transport and mode."""
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        chosen = item.get_closest_marker("short_form")
        if chosen is None or not any(_has_id(item, each) for each in chosen.args):
            item.add_marker(pytest.mark.matrix)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, Any]:
    """Show with a failure how the logs of all processes end: one of them may have caused it."""
    report = yield
    for stage in getattr(item, "funcargs", {}).values() if report.failed else ():
        if isinstance(stage, Stage):
            for name, process in stage.deployment.processes.items():
                end = "\n".join(process.log.splitlines()[-LOG_LINES:])
                report.sections.append((f"{name}, exit code {process.popen.poll()}", end))
            break
    return report


def _has_id(item: pytest.Item, parameters: str) -> bool:
    return not parameters or f"[{parameters}" in item.name


@pytest.fixture(scope="package", params=["shared memory", "TCP", "UCX"])
def transport(request: pytest.FixtureRequest) -> str:
    """How KV travels: NIXL's transports, or UCX's over TCP."""
    if request.param == "UCX" and importlib.util.find_spec("ucxx") is None:
        pytest.skip("pdserve[ucx] is not here")
    return str(request.param)


@pytest.fixture(scope="package", params=["pull", "push"])
def mode(request: pytest.FixtureRequest) -> str:
    """Who moves it."""
    return str(request.param)


@pytest.fixture(scope="package")
def stage_of_transport(
    transport: str,
    model_of: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stage]:
    """One deployment for all faults of a transport."""
    with started(tmp_path_factory.mktemp("chaos"), model_of("llama"), transport) as stage:
        yield stage


@pytest.fixture
def stage(stage_of_transport: Stage, mode: str) -> Stage:
    """The deployment, whole and empty."""
    stage_of_transport.restore(mode)
    return stage_of_transport


@pytest.fixture
def slow_stage(stage: Stage) -> Stage:
    """The same, over a link that can be so slow that a transfer takes more than a second."""
    network = stage.network
    if network is None:
        pytest.skip("a copy through shared memory is over before a fault can fall into it")
    wait_until(lambda: not network.has_leftovers(), 60.0)  # which would share the slow link
    return stage
