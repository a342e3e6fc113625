"""A client's stream, packet by packet."""

from __future__ import annotations

from asyncio import selector_events

from tests.proxy.hooks import decodes, prefills


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
