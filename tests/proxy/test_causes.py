"""Every 5xx has a cause of its own: its code is in docs/errors.md, and was seen in a test."""

from __future__ import annotations

import ast
import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

import pdserve
from pdserve.errors import (
    ConfigError,
    PdserveError,
    PeerError,
    UnavailableError,
    UpstreamError,
)
from pdserve.proxy import replay
from pdserve.proxy.errors import CAUSES, WorkerError
from tests.proxy.conftest import until
from tests.proxy.hooks import answers, drops, error, first_chunk, hangs
from tests.proxy.scripted import ScriptedEngine, events_of
from tests.proxy.test_ladder import budget_spent

ROOT = Path(pdserve.__file__).parents[1]
ROW = re.compile(r"\| `(\w+)` \| ([\d, ]+) \| ([\w, ]+) \| [^|]+ \| [^|]+ \|")
SOURCES = sorted([*ROOT.glob("proxy/**/*.py"), *ROOT.glob("pdserve/server/*.py")])
SOURCES += [*ROOT.glob("pdserve/engine/*.py"), *ROOT.glob("pdserve/http/*.py")]
NEVER_HTTP = (ConfigError, PeerError)
GENERIC = (UnavailableError, UpstreamError)
"""Their own code says nothing: whoever raises one gives it another."""


def documented() -> dict[str, tuple[set[int], set[str]]]:
    """Statuses and senders by code."""
    rows = ROW.findall((ROOT / "docs" / "errors.md").read_text())
    return {code: (set(map(int, s.split(", "))), set(who.split(", "))) for code, s, who in rows}


def failing(kind: type[PdserveError] = PdserveError) -> dict[str, type[PdserveError]]:
    """All errors by name that end in a 5xx."""
    assert replay.DivergedError in UpstreamError.__subclasses__()
    found = {kind.__name__: kind} if kind.status >= 500 else {}
    for each in kind.__subclasses__():
        if each not in NEVER_HTTP:
            found |= failing(each)
    return found


def raised() -> set[str]:
    """The codes of all 5xx that the sources can construct."""
    kinds, codes = failing(), {code for code, _ in CAUSES.values()}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in kinds:
                continue
            kind = kinds[node.func.id]
            given = [ast.walk(k.value) for k in node.keywords if k.arg == "code"]
            literals = {n.value for walk in given for n in walk if isinstance(n, ast.Constant)}
            codes |= {word for word in literals if isinstance(word, str) and "_" in word}
            assert given or kind not in GENERIC, f"{path}:{node.lineno} gives no code"
            if not given and not issubclass(kind, WorkerError):
                codes.add(kind.code)
    return codes | {kind.code for kind in kinds.values() if kind not in GENERIC} - {
        UpstreamError.code
    }


def test_every_5xx_is_in_the_table_and_the_table_has_no_other() -> None:
    assert raised() == set(documented())


def test_every_code_of_the_table_is_expected_by_a_test() -> None:
    tests = [*ROOT.glob("tests/proxy/test_*.py"), *ROOT.glob("tests/server/test_*.py")]
    text = "".join(path.read_text() for path in tests)
    assert [code for code in documented() if f'"{code}"' not in text] == []


PROVOKED: dict[str, tuple[int, Any]] = {
    "engine_not_ready": (503, answers(503, b"starting")),
    "engine_dropped": (502, drops()),
    "engine_failed": (502, answers(500, b"http://10.1.2.3/ fell over")),
    "engine_garbled": (502, answers(200, b"http://10.1.2.3/ is no JSON")),
    "kv_transfer_failed": (502, answers(503, error("kv_transfer_failed"))),
    "recompute_budget_exhausted": (503, budget_spent()),
    "deadline_exceeded": (504, answers(504, error("deadline_exceeded"))),
}


@pytest.mark.parametrize("code", PROVOKED)
async def test_what_an_engine_does_is_told_by_its_own_code(make_stack, code):
    status, hook = PROVOKED[code]
    engine = ScriptedEngine("decode")
    engine.hook = hook
    stack = await make_stack([], [engine], retry_max_retries=0)
    async with stack.post() as response:
        told = (await response.json())["error"]
        assert (response.status, told["code"]) == (status, code)
        assert ("Retry-After" in response.headers) is (status == 503)
    assert status in documented()[code][0]
    assert "10.1.2.3" not in told["message"]
    assert engine.url not in told["message"]


async def test_an_engine_that_nobody_listens_for_any_more_is_unreachable(make_stack):
    engine = ScriptedEngine("decode")
    stack = await make_stack([], [engine], retry_max_retries=0, queue_timeout_s=0.1)
    await stack.proxy.checks.stop()  # nobody looks whether it is there but who asks
    await engine.stop()
    await asyncio.sleep(0.05)  # no connection of before is open any more
    assert await stack.refused() == (502, "engine_unreachable")


async def test_an_engine_that_stops_answering_is_lost(make_stack):
    engine = ScriptedEngine("decode")
    engine.hook = hangs()
    stack = await make_stack([], [engine], retry_max_retries=0)

    async def ask() -> tuple[int, str]:
        async with stack.post() as response:
            return response.status, (await response.json())["error"]["code"]

    request = asyncio.create_task(ask())
    await until(lambda: len(engine.calls) == 1)
    engine.incarnation = "life-2"
    assert await request == (502, "engine_lost")


async def test_a_stream_that_comes_out_as_another_text_has_diverged(make_stack):
    engine = ScriptedEngine("decode")
    engine.hook = drops(1, after=first_chunk())
    engine.seed_offset = 1
    stack = await make_stack([], [engine], retry_max_retries=1)
    last = events_of(await stack.stream())[-1]
    assert last["error"]["code"] == "replay_diverged"
    assert "same version" in last["error"]["message"]


async def test_an_order_for_engines_that_are_not_there_or_do_not_obey_says_so(make_stack):
    stack = await make_stack()
    async with stack.client.post(f"{stack.url}/reset_prefix_cache") as response:
        told = (await response.json())["error"]
        assert (response.status, told["code"]) == (503, "no_engine_known")
    engine = ScriptedEngine("decode")
    engine.reset_status = 500
    stack = await make_stack([], [engine])
    async with stack.client.post(f"{stack.url}/reset_prefix_cache") as response:
        told = (await response.json())["error"]
        assert (response.status, told["code"]) == (502, "prefix_cache_not_reset")


async def test_a_proxy_that_shuts_down_says_so_and_one_that_fails_too(make_stack, monkeypatch):
    stack = await make_stack([], [ScriptedEngine("decode")])

    def broken(*args: object, **more: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(stack.proxy.admission, "place", broken)
    assert await stack.refused() == (500, "internal_error")
    stack.proxy.live.is_leaving = True
    async with stack.client.get(f"{stack.url}/readyz") as response:
        told = (await response.json())["error"]
    assert (response.status, told["code"]) == (503, "shutting_down")
