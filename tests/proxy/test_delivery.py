"""A client's stream, packet by packet."""

from __future__ import annotations

import asyncio
from asyncio import selector_events

import pytest

from pdserve.proxy.replay import Transcript
from tests.proxy.hooks import DONE, decodes, prefills, streaming
from tests.proxy.scripted import sse, text_in, text_of

_NUM, _LENGTH = 320, 100_000  # events that sockets do not hold, and characters of each


async def test_the_headers_leave_with_the_first_token(make_stack, monkeypatch):
    packets: list[bytes] = []
    write = selector_events._SelectorSocketTransport.write

    def spy(transport, data):
        packets.append(bytes(data))
        write(transport, data)

    monkeypatch.setattr(selector_events._SelectorSocketTransport, "write", spy)
    stack = await make_stack(prefills(), decodes())
    await stack.stream()
    (first,) = [packet for packet in packets if b"X-Accel-Buffering" in packet]
    assert first.count(b"data: ") == 1


async def test_a_client_of_http_1_0_gets_events_without_chunks_around_them(make_stack):
    stack = await make_stack(prefills(), decodes())
    reader, writer = await asyncio.open_connection(*stack.url.removeprefix("http://").split(":"))
    body = b'{"prompt": "hi", "seed": 3, "max_tokens": 4, "stream": true}'
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    head, _, stream = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b" 200 OK" in head
    assert stream.startswith(b"data: ")
    assert stream.endswith(DONE)
    assert text_in(stream) == text_of(3, 4)


async def test_an_answer_that_a_bug_of_the_proxy_ends_is_cut(make_stack, monkeypatch, logged):
    (decode,) = decodes()
    decode.gate.clear()
    stack = await make_stack(prefills(), [decode])
    reader, writer = await asyncio.open_connection(*stack.url.removeprefix("http://").split(":"))
    body = b'{"prompt": "hi", "seed": 3, "max_tokens": 4, "stream": true}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    begun = await reader.readuntil(b"data: ")
    monkeypatch.setattr(Transcript, "add", lambda *_: 1 / 0)
    decode.gate.set()
    rest = await asyncio.wait_for(reader.read(), timeout=10.0)
    writer.close()
    assert (begun + rest).count(b"HTTP/1.1 ") == 1
    assert not rest.endswith(b"0\r\n\r\n")
    assert any("request failed" in line for line in logged)


@pytest.mark.slow
async def test_of_a_client_that_does_not_read_the_proxy_keeps_little(make_stack):
    (decode,) = decodes()
    events = [sse({"choices": [{"index": 0, "text": f"{i}{'x' * _LENGTH}"}]}) for i in range(_NUM)]
    num_taken = 0

    async def speak(call, request):
        nonlocal num_taken
        response = await streaming(request)
        for event in [*events, DONE]:
            await response.write(event)
            num_taken += 1
        return response

    decode.hook = speak
    stack = await make_stack(prefills(), [decode])
    async with stack.post({"prompt": "hi", "stream": True}) as response:
        before = -1
        while num_taken != before:  # what the sockets hold
            before = num_taken
            await asyncio.sleep(0.3)
        assert 0 < num_taken < _NUM
        _, _, rest = (await response.read()).partition(b"\n\n")
    assert rest == b"".join(events) + DONE
