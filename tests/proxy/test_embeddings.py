"""Vectors through the proxy: a prefill engine makes them, alone."""

from __future__ import annotations

import aiohttp
import pytest

from pdserve.config.schema import ModelConfig
from pdserve.text.load import load_text
from tests.proxy.test_with_server import deployed
from tests.text.tiny import write_model_files

BODIES = {
    "/v1/embeddings": {"input": ["a dog", "the fox"]},
    "/v1/score": {"text_1": "a dog", "text_2": ["a dog", "the fox"]},
    "/v1/rerank": {"query": "a dog", "documents": ["the fox", "a dog"]},
}
BODIES |= {path.removeprefix("/v1"): BODIES[path] for path in ("/v1/score", "/v1/rerank")}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return load_text(ModelConfig(model=str(write_model_files(tmp_path_factory.mktemp("model")))))


async def ask(url, path, body, status=200):
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def test_a_prefill_engine_makes_them_and_nothing_is_handed_over(text, caplog):
    caplog.set_level("INFO")
    async with deployed(text, prefill=[{}], decode=[{}]) as deployment:
        prefill, decode = deployment.servers
        for path, body in BODIES.items():
            through = await ask(deployment.url, path, body)
            direct = await ask(prefill.url, path, body)
            for name in ("id", "created"):
                del through[name], direct[name]
            assert through == direct
        assert not decode.engine.requests
        assert not any(r.remote_decode for r in prefill.engine.requests)
    lines = [line for line in caplog.messages if "endpoint=/v1/embeddings" in line]
    assert sum("path=local" in line and " ok " in f" {line}" for line in lines) >= 1


async def test_another_prefill_engine_makes_them_when_one_has_gone(text):
    async with deployed(text, prefill=[{"die_after": 0}, {}], decode=[{}]) as deployment:
        for _ in range(2):
            await ask(deployment.url, "/v1/embeddings", BODIES["/v1/embeddings"])
        assert not deployment.servers[2].engine.requests


async def test_a_decode_engine_makes_them_where_no_other_is_there(text):
    async with deployed(text, prefill=[], decode=[{}]) as deployment:
        answer = await ask(deployment.url, "/v1/embeddings", BODIES["/v1/embeddings"])
    assert len(answer["data"]) == 2


async def test_what_an_engine_refuses_is_passed_on(text):
    async with deployed(text, prefill=[{}], decode=[{}]) as deployment:
        for body, param in (({"input": "a", "stream": True}, "stream"), ({"input": []}, "input")):
            answer = await ask(deployment.url, "/v1/embeddings", body, status=400)
            assert answer["error"]["param"] == param
