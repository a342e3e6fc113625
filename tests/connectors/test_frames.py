"""Framing: what is not from this deployment, or not in order, never becomes a message."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.connectors.side_channel.frames import (
    MAX_PAYLOAD_BYTES,
    Fault,
    FrameError,
    FrameSession,
)
from pdserve.wire.seal import PROTOCOL

PREAMBLE_BYTES = 40
MAGIC = b"pdserve" + bytes([PROTOCOL])


def pair(
    *, client_secret: bytes = b"s", server_secret: bytes = b"s", salt: bytes = b"0"
) -> tuple[FrameSession, FrameSession]:
    client = FrameSession(client_secret, is_client=True, nonce=(b"c" + salt) * 16)
    server = FrameSession(server_secret, is_client=False, nonce=(b"s" + salt) * 16)
    client.receive(server.take_unsent())
    server.receive(client.take_unsent())
    return client, server


def fault_of(session: FrameSession, data: bytes) -> Fault:
    with pytest.raises(FrameError) as caught:
        session.receive(data)
    return caught.value.fault


@given(payloads=st.lists(st.binary(max_size=300), max_size=8), cuts=st.lists(st.integers(1, 50)))
def test_payloads_arrive_whole_and_in_order_however_the_stream_is_cut(
    payloads: list[bytes], cuts: list[int]
) -> None:
    client = FrameSession(b"s", is_client=True, nonce=b"c" * 32)
    server = FrameSession(b"s", is_client=False, nonce=b"s" * 32)
    for payload in payloads:
        client.send(payload)  # before the server's preamble is there: it waits
    assert len(client.take_unsent()) == PREAMBLE_BYTES
    client.receive(server.take_unsent())
    stream, received = client.take_unsent(), []
    server.receive(MAGIC + b"c" * 32)
    for cut in [*cuts, len(stream)]:
        received += server.receive(stream[:cut])
        stream = stream[cut:]
    assert received == payloads
    assert server.is_authenticated == bool(payloads)


@given(data=st.data())
def test_one_changed_byte_is_noticed(data: st.DataObject) -> None:
    client, server = pair()
    client.send(b"heartbeat")
    frame = bytearray(client.take_unsent())
    index = data.draw(st.integers(0, len(frame) - 1))
    frame[index] ^= data.draw(st.integers(1, 255))
    try:
        received = server.receive(bytes(frame))
    except FrameError as error:
        fault = error.fault
        assert fault in (Fault.UNAUTHENTIC, Fault.OVERSIZE)
    else:
        assert received == []
        assert index < 4  # the length says that more is to come
    assert not server.is_authenticated


@given(garbage=st.binary(min_size=8, max_size=200))
def test_garbage_is_refused_at_the_magic(garbage: bytes) -> None:
    server = FrameSession(b"s", is_client=False, nonce=b"s" * 32)
    if not garbage.startswith(MAGIC):
        assert fault_of(server, garbage) is Fault.MAGIC


def test_a_peer_of_another_protocol_is_told_which_the_two_speak() -> None:
    server = FrameSession(b"s", is_client=False, nonce=b"s" * 32)
    with pytest.raises(FrameError, match=f"speaks protocol 1 and this engine speaks {PROTOCOL}"):
        server.receive(b"pdserve\x01" + b"c" * 32)


def test_a_replayed_frame_is_refused() -> None:
    client, server = pair()
    client.send(b"release")
    frame = client.take_unsent()
    assert server.receive(frame) == [b"release"]
    assert fault_of(server, frame) is Fault.UNAUTHENTIC


def test_a_frame_of_another_connection_is_refused() -> None:
    client, _ = pair(salt=b"1")
    _, other_server = pair(salt=b"2")
    client.send(b"release")
    assert fault_of(other_server, client.take_unsent()) is Fault.UNAUTHENTIC


def test_a_frame_sent_back_to_its_sender_is_refused() -> None:
    client, _ = pair()
    client.send(b"release")
    assert fault_of(client, client.take_unsent()) is Fault.UNAUTHENTIC


def test_a_dropped_frame_is_noticed() -> None:
    client, server = pair()
    client.send(b"first")
    client.take_unsent()
    client.send(b"second")
    assert fault_of(server, client.take_unsent()) is Fault.UNAUTHENTIC


def test_another_secret_is_refused() -> None:
    client, server = pair(client_secret=b"other")
    client.send(b"hello")
    assert fault_of(server, client.take_unsent()) is Fault.UNAUTHENTIC


def test_an_oversized_frame_is_refused_before_its_payload_is_read() -> None:
    _, server = pair()
    assert fault_of(server, struct.pack(">I", MAX_PAYLOAD_BYTES + 1) + b"m" * 32) is Fault.OVERSIZE


def test_the_largest_frame_passes() -> None:
    client, server = pair()
    client.send(b"x" * MAX_PAYLOAD_BYTES)
    assert server.receive(client.take_unsent()) == [b"x" * MAX_PAYLOAD_BYTES]
