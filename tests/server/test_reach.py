from __future__ import annotations

import socket

import msgspec
import pytest

from pdserve.http.control import proof_headers
from tests.server.conftest import make_engine, serving

PATH = "/pdserve/reach"


async def test_an_engine_says_which_side_channels_it_cannot_reach(text):
    with socket.create_server(("127.0.0.1", 0)) as open_, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        asked = [{"host": "127.0.0.1", "port": each.getsockname()[1]} for each in (open_, closed)]
        asked.append({"host": "memory", "port": 1})  # KV that stays within one process
        async with serving(text, make_engine(text)) as server:
            answer = await server.ok(PATH, {"endpoints": asked})
    reached, refused, within = answer["reasons"]
    assert reached is None
    assert "refused" in refused.lower()
    assert within is None


async def test_who_does_not_know_the_secret_has_it_connect_nowhere(text):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        body = {"endpoints": [{"host": "127.0.0.1", "port": listener.getsockname()[1]}]}
        async with serving(text, make_engine(text), secret="s3cret") as server:
            status, error = await server.refused(PATH, body)
            assert (status, error["code"]) == (401, "invalid_signature")
            with pytest.raises(BlockingIOError):
                listener.accept()
            data = msgspec.json.encode(body)
            headers = {
                "Content-Type": "application/json",
                **proof_headers("s3cret", "POST", PATH, data),
            }
            url = server.url + PATH
            async with server.session.post(url, data=data, headers=headers) as response:
                assert await response.json() == {"reasons": [None]}
