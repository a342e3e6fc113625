"""`POST /reset_prefix_cache`: all engines, or an error that names those that did not."""

from __future__ import annotations

import pytest

from tests.proxy.scripted import ScriptedEngine


@pytest.fixture
def engines() -> tuple[ScriptedEngine, ScriptedEngine]:
    return ScriptedEngine("prefill"), ScriptedEngine("decode")


async def test_every_engine_is_asked_and_the_answer_is_empty(make_stack, engines):
    prefill, decode = engines
    stack = await make_stack([prefill], [decode])
    async with stack.client.post(f"{stack.url}/reset_prefix_cache") as response:
        assert (response.status, await response.read()) == (200, b"")
    assert [len(each.resets) for each in engines] == [1, 1]


async def test_engines_get_the_deployments_key_and_what_was_asked_for(make_stack, engines):
    prefill, decode = engines
    stack = await make_stack([prefill], [decode], api_keys=("k",))
    url = f"{stack.url}/reset_prefix_cache?reset_external=true"
    async with stack.client.post(url, headers={"Authorization": "Bearer k"}) as response:
        assert response.status == 200
    for each in engines:
        [asked] = each.resets
        assert asked.headers["Authorization"] == "Bearer k"
        assert asked.query_string == "reset_external=true"


async def test_without_the_key_no_engine_is_asked(make_stack, engines):
    prefill, decode = engines
    stack = await make_stack([prefill], [decode], api_keys=("k",))
    async with stack.client.post(f"{stack.url}/reset_prefix_cache") as response:
        assert response.status == 401
    assert [each.resets for each in engines] == [[], []]


async def test_an_engine_that_does_not_do_it_is_named_and_the_others_are_asked(make_stack, engines):
    prefill, decode = engines
    prefill.reset_status = 404
    stack = await make_stack([prefill], [decode])
    async with stack.client.post(f"{stack.url}/reset_prefix_cache") as response:
        assert response.status == 502
        message = (await response.json())["error"]["message"]
    assert f"{prefill.url}/reset_prefix_cache answered 404" in message
    assert decode.url not in message
    assert len(decode.resets) == 1


async def test_an_engine_that_is_gone_is_named(make_stack, engines):
    prefill, decode = engines
    stack = await make_stack([prefill], [decode])
    await decode.stop()
    async with stack.client.post(f"{stack.url}/reset_prefix_cache") as response:
        assert response.status == 502
        assert decode.url in (await response.json())["error"]["message"]
    assert len(prefill.resets) == 1


async def test_without_engines_there_is_nothing_to_reset(make_stack):
    stack = await make_stack([], [])
    async with stack.client.post(f"{stack.url}/reset_prefix_cache") as response:
        assert response.status == 503
