"""Settings every test shares, and fixtures that files of several folders do.

The others live beside the tests that use them.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from hypothesis.internal.conjecture import engine
from xdist.scheduler import LoadScopeScheduling

import tests.interpreted_triton  # noqa: F401  # imports Triton before a test does
from tests.lmcache_server import LMCacheServer
from tests.ranks import never_compare_dtensors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator, Iterator
    from types import ModuleType

    from tests.browser import Browser, Chromium

# check: a few; dev: quick; ci: the same examples at every run, so that red means a change;
# nightly: a search.
hypothesis.settings.register_profile("check", max_examples=7, deadline=None)
hypothesis.settings.register_profile("dev", max_examples=35, deadline=None)
hypothesis.settings.register_profile("ci", max_examples=20, deadline=None, derandomize=True)
hypothesis.settings.register_profile("nightly", max_examples=2000, deadline=None)
_PROFILE = os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
hypothesis.settings.load_profile(_PROFILE)
# A state machine's example is made shorter for five minutes, as a rule; most is gained at once.
if _PROFILE != "nightly":
    engine.MAX_SHRINKING_SECONDS = 15

# What a shell starts in its background ignores Ctrl-C, and so would every process that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect tests, but no garbage: nothing that is imported here is ever any."""
    gc.disable()
    try:
        return (yield)
    finally:
        if "torch" in sys.modules:
            never_compare_dtensors()
        gc.freeze()
        # Little of what tests make is garbage that only this finds.
        gc.set_threshold(20_000, 10, 10)
        gc.enable()


_HERE = Path(__file__).parent


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Have each of several processes begin with other folders.

    In a fresh clone, each file is compiled by the one that comes to it first, and the others read
    what it has written. In step from the first file on, each would compile all.
    """
    report = yield
    if collector.path == _HERE and (worker := getattr(collector.config, "workerinput", None)):
        nodes = report.result
        first = len(nodes) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        report.result = [*nodes[first:], *nodes[:first]]
    return report


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over a file in which `-m` leaves no test, before its imports are paid for."""
    if not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text()
    of_all_tests = re.findall(r"mark\.(\w+)", "".join(_MARKS_OF_ALL.findall(text)))
    for term in config.option.markexpr.split(" and "):
        if left_out := re.fullmatch(r"not (\w+)", term):
            if left_out[1] in of_all_tests:
                return True
        elif not re.fullmatch(r"\w+|\(\w+( or \w+)*\)", term):
            return None
        # `tests/chaos/conftest.py` gives this one to files in which it does not stand.
        elif "matrix" not in term and not any(
            f"mark.{word}" in text for word in re.findall(r"\w+", term)
        ):
            return True
    return None


_MARKS_OF_ALL = re.compile(r"^pytestmark = (?:\[[^\]]*\]|.*)", re.MULTILINE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to longer runs the cases that the others can do without.

    Of a test marked `covering`, they are the night's; of one with several `parametrize`, whatever
    only combines their rows anew is not the quick loop's.
    """
    items.sort(key=lambda item: item.path)  # see `pytest_make_collect_report`
    alike: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            alike.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in alike.values():
        if mark := cases[0].get_closest_marker("covering"):
            for case in _dispensable({case: _combinations(case, *mark.args) for case in cases}):
                case.add_marker(pytest.mark.matrix)
        quick = [case for case in cases if not any(map(case.get_closest_marker, _NOT_QUICK))]
        for case in _dispensable({case: _rows(case) for case in quick}):
            case.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Let torch's forty loggers tell the root what they tell, as others do.

    pytest hangs its handlers on each that does not, and takes them off, three times a test.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.partition(".")[0] == "torch":
            logger.propagate = True


_NOT_QUICK = ("gpu", "matrix", "e2e", "chaos", "alone", "slow")


def _dispensable(told: dict[pytest.Function, set[Any]]) -> list[pytest.Function]:
    """The cases without which the others tell as much."""
    told = dict(told)
    left = set().union(*told.values())
    used: Counter[Any] = Counter()
    while left:
        # Of those that bring as much, the one whose values have been seldom.
        best = max(told, key=lambda case: (len(told[case] & left), -_times(case, used)))
        left -= told.pop(best)
        used.update(_combinations(best, 1))
    return list(told)


def _rows(case: pytest.Function) -> set[Any]:
    """What a case has of each of its `parametrize`, and of each fixture with parameters."""
    ids = {name: id(value) for name, value in case.callspec.params.items()}
    rows = set()
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        rows.add(tuple((name.strip(), ids.pop(name.strip())) for name in names))
    return rows | set(ids.items())


def _combinations(case: pytest.Function, num: int) -> set[tuple[tuple[str, str], ...]]:
    """All combinations of `num` of a case's parameters, with their values."""
    values = sorted((name, repr(value)) for name, value in case.callspec.params.items())
    return set(itertools.combinations(values, num))


def _times(case: pytest.Function, used: Counter[Any]) -> int:
    """How often a case's values stand in the cases chosen so far."""
    return sum(used[value] for value in _combinations(case, 1))


# Deployments that files share, by the names of the tests. Groups of xdist 3.8 are no help: under
# pytest 9.2 the names that it sorts by are without them.
_SHARED = {
    "chaos over TCP": r"tests/chaos/.*\[TCP-",
    "chaos over UCX": r"tests/chaos/.*\[UCX-",
    "chaos over shared memory": r"tests/chaos/.*\[shared memory-",
    "OpenAI's clients": (
        r"tests/e2e/test_(openai_|grammars|cancellation|equality\.py::test_(in_bf16|sampled))"
    ),
    "a model of sharp answers": r"tests/e2e/test_(equality|golden)",
    "the boxed model": r"tests/e2e/test_(bench|monitoring|speculation|web_dashboard)",
    "two ranks": r"tests/e2e/test_(trace|two_ranks)",
}


class _ByDeployment(LoadScopeScheduling):
    """Has one of the processes side by side run what shares a deployment: mostly, a file."""

    def _split_scope(self, nodeid: str) -> str:
        shared = (name for name, tests in _SHARED.items() if re.match(tests, nodeid))
        return next(shared, nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByDeployment | None:
    """How `--dist loadscope` shares tests out."""
    return _ByDeployment(config, log) if config.getvalue("dist") == "loadscope" else None


# Importing these clients takes seconds: only a process that uses one pays for it.


@pytest.fixture(scope="session")
def anthropic() -> ModuleType:
    import anthropic

    return anthropic


@pytest.fixture(scope="session")
def openai() -> ModuleType:
    import openai

    return openai


@pytest.fixture(autouse=True)
def _no_device_for_kv_is_left_in_the_environment() -> Iterator[None]:
    """The first NIXL agent of a process sets it for good; processes of tests outlast engines."""
    before = os.environ.get("UCX_NET_DEVICES")
    yield
    if before is None:
        os.environ.pop("UCX_NET_DEVICES", None)
    else:
        os.environ["UCX_NET_DEVICES"] = before


@pytest.fixture(autouse=True)
def _servers_leave_nothing_to_collect() -> Iterator[None]:
    """aiohttp remembers 1,024 handlers with all that they belong to; one of ours collects often."""
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    if web_app := sys.modules.get("aiohttp.web_app"):
        web_app._cached_build_middleware.cache_clear()


@pytest.fixture(scope="session")
def lmcache_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCacheServer]:
    """One with chunks of 16 tokens and no disk, for all tests that start none of their own."""
    folder = tmp_path_factory.mktemp("lmcache")
    with LMCacheServer(folder / "server.log") as server:
        yield server


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """One browser for all tests."""
    from tests.browser import start_chromium

    with start_chromium(tmp_path_factory.mktemp("browser")) as process:
        yield process


@pytest.fixture
async def browser(chromium: Chromium) -> AsyncIterator[Browser]:
    """The test's own context of it."""
    async with chromium.connect() as connected:
        yield connected
