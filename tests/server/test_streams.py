"""Recorded bytes, and clients that leave."""

from __future__ import annotations

import asyncio
from asyncio import selector_events
from pathlib import Path

import pytest

from tests.server.conftest import events, scripted, serving, until

GOLDEN = Path(__file__).parent / "golden"
MESSAGES = [{"role": "user", "content": "hi"}]
ANSWER = "Once upon a time 🙂 END"
REQUESTS = {
    "completions": ("/v1/completions", {"prompt": "The quick", "max_tokens": 50}),
    "completions_usage_logprobs": (
        "/v1/completions",
        {
            "prompt": "The",
            "max_tokens": 3,
            "logprobs": 1,
            "stream_options": {"include_usage": True},
        },
    ),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "chat_stop": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "stop": [" EN"], "stream_options": {"include_usage": True}},
    ),
    "chat_prefill_hop": (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True, "pdserve": {"final_length": True}},
        },
    ),
}


async def record(text, clock, name: str) -> bytes:
    path, body = REQUESTS[name]
    async with serving(text, scripted(text, ANSWER), clock=clock) as server:
        return await server.stream(path, body, X_Request_Id="golden")


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_stream_is_what_was_recorded(text, clock, name):
    recorded = await asyncio.to_thread((GOLDEN / f"{name}.txt").read_bytes)
    assert await record(text, clock, name) == recorded


@pytest.fixture
def packets(monkeypatch) -> list[bytes]:
    """What any transport was given to send, in order."""
    sent: list[bytes] = []
    write = selector_events._SelectorSocketTransport.write

    def spy(transport, data):
        sent.append(bytes(data))
        write(transport, data)

    monkeypatch.setattr(selector_events._SelectorSocketTransport, "write", spy)
    return sent


@pytest.mark.parametrize("name", ["completions", "chat"])
async def test_the_headers_leave_with_the_first_event(text, clock, packets, name):
    await record(text, clock, name)
    (first,) = [packet for packet in packets if packet.startswith(b"HTTP/1.1 200")]
    assert first.count(b"data: ") == 1


@pytest.mark.parametrize("name", ["completions_usage_logprobs", "chat_stop"])
async def test_all_that_follows_the_last_token_leaves_at_once(text, clock, packets, name):
    recorded = await record(text, clock, name)
    events_at_the_end = recorded.split(b"\n\n")[-3:-1]
    assert [event in packets[-1] for event in events_at_the_end] == [True, True]
    assert packets[-1].endswith(b"\r\n0\r\n\r\n")


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_chunks_that_differ_in_their_text_alone_are_as_any_other(text, clock, path, n):
    """With the usage in each of them every chunk is encoded as a whole."""
    body = {"prompt": "x", "messages": MESSAGES, "n": n, "seed": 1, "max_tokens": 40}
    if "chat" not in path:
        body["echo"] = True
    usage = {"stream_options": {"continuous_usage_stats": True}}
    answer = '"Quoted" \\ \n\x00 🙂 end'
    chunks = []
    for extra in ({}, usage):
        async with serving(text, scripted(text, answer), clock=clock) as server:
            stream = events(await server.stream(path, body | extra, X_Request_Id="one"))
        for chunk in stream:
            chunk.pop("usage", None)
        chunks.append(sorted(stream, key=lambda chunk: chunk["choices"][0]["index"]))
    assert chunks[0] == chunks[1]
    assert len(chunks[0]) > 10 * n


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_first_token_aborts(text, n, stream):
    engine = scripted(text, ANSWER, prefill_s=30.0)
    async with serving(text, engine) as server:
        body = {"prompt": "x", "n": n, "stream": stream}
        task = asyncio.create_task(server.post("/v1/completions", body))
        await until(lambda: len(engine.running) == n)
        task.cancel()
        await until(lambda: not engine.running)
        assert len(engine.aborted) == n
        await disconnects(server, "queue")


@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_in_mid_stream_aborts(text, n):
    engine = scripted(text, ANSWER * 10, step_s=0.02)
    async with serving(text, engine) as server:
        body = {"prompt": "x", "n": n, "stream": True, "max_tokens": 100}
        async with server.session.post(server.url + "/v1/completions", json=body) as response:
            await response.content.readline()
            response.close()
        await until(lambda: not engine.running)
        assert len(engine.aborted) == n
        await disconnects(server, "decode")


async def disconnects(server, stage: str) -> None:
    """Wait until the metric has counted one, and every request has an outcome."""
    async with asyncio.timeout(30.0):
        while True:
            _, metrics = await server.get("/metrics")
            if f'pdserve_client_disconnects_total{{stage="{stage}"}} 1.0' in metrics:
                return
            await asyncio.sleep(0.01)


async def test_no_status_is_sent_before_the_engine_has_spoken(text):
    engine = scripted(text, ANSWER, prefill_s=60.0)
    async with serving(text, engine) as server:
        body = {"prompt": "x", "stream": True}
        task = asyncio.create_task(server.session.post(server.url + "/v1/completions", json=body))
        await until(lambda: bool(engine.running))
        engine.die("on purpose")
        response = await task
        assert response.status == 503
        response.close()


async def test_two_hundred_streams_end_and_leave_nothing(text):
    engine = scripted(text, ANSWER, step_s=0.001)
    async with serving(text, engine) as server:
        body = {"prompt": "x", "max_tokens": 50}
        streams = await asyncio.gather(
            *(server.stream("/v1/completions", body) for _ in range(200))
        )
    assert all(stream.endswith(b"data: [DONE]\n\n") for stream in streams)
    assert not engine.running
    assert not engine.aborted
