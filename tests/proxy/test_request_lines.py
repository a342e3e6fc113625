"""The line of a request says how it ended, whoever ended it."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pdserve.proxy.metrics import OUTCOMES
from tests.proxy.hooks import answers
from tests.proxy.scripted import ScriptedEngine


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture):
    """Each line of a request: its level, and its fields as words."""
    caplog.set_level(logging.INFO, "pdserve.requests")

    def told() -> list[tuple[str, dict[str, str]]]:
        records = [each for each in caplog.records if each.name == "pdserve.requests"]
        found = []
        for each in records:
            req, _, outcome, *words = each.getMessage().split(" | ")[0].split()
            assert req == "req"
            assert outcome in OUTCOMES
            fields = dict(word.split("=", 1) for word in words if "=" in word)
            found.append((each.levelname, {"outcome": outcome, **fields}))
        return found

    return told


def subset(fields: dict[str, str], names: str) -> dict[str, str | None]:
    return {name: fields.get(name) for name in names.split()}


def pair(**parameters) -> tuple[list[ScriptedEngine], list[ScriptedEngine]]:
    return [ScriptedEngine("prefill", **parameters)], [ScriptedEngine("decode", **parameters)]


@pytest.mark.parametrize(("can_push", "path"), [(True, "push"), (False, "pull")])
async def test_a_served_request_tells_its_path_its_model_and_its_sizes(
    make_stack, lines, can_push, path
):
    prefill, decode = pair(can_push=can_push)
    prefill[0].stages = {"cached_tokens": 3}
    stack = await make_stack(prefill, decode)
    await stack.stream({"model": "mine"})
    [(level, told)] = lines()
    assert level == "INFO"
    assert subset(told, "outcome status reason path model in cached out endpoint") == {
        "outcome": "ok",
        "status": "200",
        "reason": None,
        "path": path,
        "model": "mine",
        "in": "7",
        "cached": "3",
        "out": "4",
        "endpoint": "/v1/completions",
    }
    assert float(told["total"].removesuffix("ms")) >= float(told["ttft"].removesuffix("ms"))


@pytest.mark.parametrize("can_push", [True, False])
async def test_a_request_that_ends_at_its_prefill_engine_has_a_local_path(
    make_stack, lines, can_push
):
    prefill, decode = pair(can_push=can_push)
    prefill[0].finish_at_prefill = True
    stack = await make_stack(prefill, decode)
    await stack.stream()
    async with stack.post() as response:
        assert response.status == 200
    assert [subset(told, "outcome path") for _, told in lines()] == [
        {"outcome": "ok", "path": "local"}
    ] * 2


@pytest.mark.parametrize("server", ["prefill", "decode", "both"])
async def test_the_engine_that_ends_a_stream_says_how_many_tokens_its_events_have(
    make_stack, lines, server
):
    prefill, decode = pair()
    if server == "both":
        prefill = decode = [ScriptedEngine("both")]
    prefill[0].finish_at_prefill = server == "prefill"
    (prefill if server == "prefill" else decode)[0].stages = {"output_tokens": 9}
    stack = await make_stack(prefill, decode)
    await stack.stream()
    [(_, told)] = lines()
    assert told["out"] == "9"


async def test_without_a_pair_the_path_is_local_and_the_model_is_the_one_that_serves(
    make_stack, lines
):
    engine = ScriptedEngine("both")
    stack = await make_stack([engine], [engine])
    async with stack.post() as response:
        assert response.status == 200
    [(_, told)] = lines()
    assert subset(told, "path model") == {"path": "local", "model": "tiny"}


@pytest.mark.parametrize(
    ("status", "code", "outcome"),
    [(400, "context_length_exceeded", "client_error"), (429, "overloaded", "shed")],
)
async def test_what_an_engine_refuses_tells_the_engines_reason_and_is_no_warning(
    make_stack, lines, status, code, outcome
):
    prefill, decode = pair()
    for engine in (*prefill, *decode):
        engine.hook = answers(status, b'{"error":{"message":"no","code":"%b"}}' % code.encode())
    stack = await make_stack(prefill, decode)
    assert await stack.refused() == (status, code)
    [(level, told)] = lines()
    assert level == "INFO"
    assert subset(told, "outcome status reason path") == {
        "outcome": outcome,
        "status": str(status),
        "reason": code,
        "path": "pull",
    }


async def test_what_no_engine_can_serve_is_a_warning_with_its_reason(make_stack, lines):
    stack = await make_stack(queue_timeout_s=0.05)
    status, code = await stack.refused({"model": "mine", "prompt": "x"})
    [(level, told)] = lines()
    assert level == "WARNING"
    assert subset(told, "outcome status reason stage path model in") == {
        "outcome": "shed",
        "status": str(status),
        "reason": code,
        "stage": "queued",
        "path": None,
        "model": "mine",
        "in": None,
    }


@pytest.mark.parametrize(
    ("send", "status", "reason"),
    [
        ({"body": ["no object"]}, 400, "invalid_json"),
        ({"headers": {"Authorization": "Bearer wrong"}}, 401, "invalid_api_key"),
        ({"path": "/v1/nothing"}, 404, "not_found"),
    ],
)
async def test_what_the_proxy_refuses_by_itself_has_one_line(
    make_stack, lines, send, status, reason
):
    stack = await make_stack([ScriptedEngine("both")], api_keys=("k",))
    headers = {"Authorization": "Bearer k"}
    await stack.refused(**{"headers": headers, **send})
    [(level, told)] = lines()
    assert level == "INFO"
    assert subset(told, "outcome status reason") == {
        "outcome": "client_error",
        "status": str(status),
        "reason": reason,
    }


async def test_a_client_that_leaves_is_told_as_that(make_stack, lines):
    prefill, decode = pair()
    decode[0].gate.clear()
    stack = await make_stack(prefill, decode)
    async with stack.post({"prompt": "hi", "stream": True}) as response:
        await response.content.readany()
    async with asyncio.timeout(30):
        while not lines():
            await asyncio.sleep(0.005)
    [(level, told)] = lines()
    assert level == "INFO"
    assert subset(told, "outcome status reason") == {
        "outcome": "disconnected",
        "status": "499",
        "reason": "client_left",
    }


async def test_requests_that_nobody_asks_work_of_have_no_line(make_stack, lines):
    stack = await make_stack()
    for path in ("/readyz", "/v1/models", "/nothing"):
        async with stack.client.get(stack.url + path) as response:
            await response.read()
    assert lines() == []
