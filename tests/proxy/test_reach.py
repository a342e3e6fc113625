"""Engines that cannot reach one another's KV are not taken in together."""

from __future__ import annotations

import pytest

from tests.proxy.conftest import until
from tests.proxy.scripted import ScriptedEngine
from tests.proxy.test_registration import is_ready, register

HOSTS = {"10.0.0.1", "10.0.0.2"}


async def pair(started):
    """A prefill and a decode engine on two hosts that reach one another."""
    engines = [await started(role) for role in ("prefill", "decode")]
    for engine, host in zip(engines, sorted(HOSTS), strict=True):
        engine.kv_host, engine.reaches = host, HOSTS
    return engines


async def test_engines_that_reach_one_another_are_asked_once(make_stack, started):
    stack = await make_stack()
    prefill, decode = await pair(started)
    for engine in (prefill, decode, prefill, decode):
        assert (await register(stack, engine))[0] == 200
    assert (prefill.asked_to_reach, decode.asked_to_reach) == (["10.0.0.2"], ["10.0.0.1"])


@pytest.mark.parametrize("later", ["prefill", "decode"])
async def test_an_engine_that_its_peer_cannot_reach_is_refused_with_the_remedy(
    make_stack, started, later
):
    stack = await make_stack(secret="s")
    prefill, decode = engines = await pair(started)
    prefill.kv_host = "127.0.0.1"  # what KV was left at, while HTTP is on 10.0.0.1
    for engine in engines:
        engine.secret = "s"
    first, second = reversed(engines) if later == "prefill" else engines
    assert (await register(stack, first, secret="s"))[0] == 200
    status, answer = await register(stack, second, secret="s")
    assert status == 409
    message = answer["error"]["message"]
    assert f"{decode.url} cannot reach the address for KV of {prefill.url}" in message
    assert "127.0.0.1:1 (Connection refused)" in message
    assert "--kv-transfer-config.host" in message
    assert stack.proxy.backends.get(second.url) is None
    prefill.kv_host = "10.0.0.1"
    prefill.incarnation = "life-2"
    for engine in engines:
        assert (await register(stack, engine, secret="s"))[0] == 200


async def test_of_many_counterparts_some_are_asked(make_stack, started):
    stack = await make_stack()
    for _ in range(11):
        await register(stack, await started("prefill"))
    decode = await started("decode")
    assert (await register(stack, decode))[0] == 200
    assert len(decode.asked_to_reach) == 8


async def test_an_engine_that_is_not_asked_or_not_there_is_no_witness(make_stack, started):
    stack = await make_stack()
    prefill, decode = await pair(started)
    gone = await started("prefill")
    gone.kv_host = "10.9.9.9"
    for engine in (prefill, gone):
        assert (await register(stack, engine))[0] == 200
    await gone.stop()  # it was killed: the proxy has not noticed yet
    prefill.reaches = None
    decode.kv_host = "127.0.0.9"
    assert (await register(stack, decode))[0] == 200
    assert set(decode.asked_to_reach) == {"10.0.0.1", "10.9.9.9"}
    await until(lambda: is_ready(stack, decode))


async def test_engines_of_one_role_need_not_reach_one_another(make_stack, started):
    stack = await make_stack()
    for host in HOSTS:
        engine = await started("decode")
        engine.kv_host, engine.reaches = host, set()
        assert (await register(stack, engine))[0] == 200


async def test_engines_that_the_proxy_was_told_of_are_asked_too_and_the_log_says_it(
    make_stack, logged
):
    prefill, decode = ScriptedEngine("prefill"), ScriptedEngine("decode")
    prefill.kv_host = "10.0.0.1"
    await make_stack([prefill], [decode])
    await until(lambda: any("KV cannot be handed over" in line for line in logged))
    for line in [line for line in logged if "KV cannot be handed over" in line]:
        assert f"{decode.url} cannot reach the address for KV of {prefill.url}" in line
