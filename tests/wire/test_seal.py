"""Sealed values: the bytes that travel are what is believed, or nothing of them is."""

from __future__ import annotations

import base64

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import BadRequestError, HandoffRefusedError
from pdserve.wire.seal import PROTOCOL, Purpose, Seal, key_for


class Note(msgspec.Struct, frozen=True):
    text: str
    count: int = 0


class NoteOfALaterPeer(Note, frozen=True):
    reason: str = "a field that this engine does not know"


NOTES: Seal[Note] = Seal(Note, Purpose.HANDOFF, what="note")
LATER: Seal[NoteOfALaterPeer] = Seal(NoteOfALaterPeer, Purpose.HANDOFF, what="note")
TEXT = NOTES.seal(Note("read", 3), "s3cret")


def test_a_value_of_a_peer_with_one_more_field_is_believed() -> None:
    text = LATER.seal(NoteOfALaterPeer("read", 3, "more"), "s3cret")
    assert NOTES.open(text, "s3cret") == Note("read", 3)


def test_a_value_of_a_peer_with_one_field_less_is_believed() -> None:
    assert LATER.open(TEXT, "s3cret").text == "read"


def test_another_secret_or_another_purpose_opens_nothing() -> None:
    tickets: Seal[Note] = Seal(Note, Purpose.TICKET, what="note")
    for seal, secret in ((NOTES, "other"), (NOTES, ""), (tickets, "s3cret")):
        with pytest.raises(HandoffRefusedError, match="signature does not match"):
            seal.open(TEXT, secret)


@given(index=st.integers(0, len(base64.b64decode(TEXT)) - 1), flip=st.integers(1, 255))
def test_one_changed_byte_is_refused(index: int, flip: int) -> None:
    data = bytearray(base64.b64decode(TEXT))
    data[index] ^= flip
    with pytest.raises(HandoffRefusedError):
        NOTES.open(base64.b64encode(data).decode(), "s3cret")


def test_a_value_of_another_protocol_is_refused_with_both_versions() -> None:
    data = bytearray(base64.b64decode(TEXT))
    for first_byte, theirs in ((PROTOCOL + 1, PROTOCOL + 1), (0x85, 1)):
        data[0] = first_byte
        with pytest.raises(HandoffRefusedError) as caught:
            NOTES.open(base64.b64encode(data).decode(), "s3cret")
        assert f"uses protocol {theirs} and this engine uses protocol {PROTOCOL}" in str(
            caught.value
        )


def test_who_carries_a_value_reads_it_without_the_secret_whatever_its_protocol() -> None:
    bare = base64.b64encode(msgspec.msgpack.encode(NoteOfALaterPeer("read", 3))).decode()
    assert NOTES.peek(TEXT) == NOTES.peek(bare) == Note("read", 3)


@given(text=st.text() | st.binary().map(lambda data: base64.b64encode(data).decode()))
def test_nothing_but_a_refusal_comes_of_any_text(text: str) -> None:
    for read in (lambda: NOTES.open(text, "s3cret"), lambda: NOTES.peek(text)):
        with pytest.raises((BadRequestError, HandoffRefusedError)):
            read()


def test_each_purpose_has_a_key_of_its_own() -> None:
    keys = {key_for("s3cret", purpose) for purpose in Purpose}
    assert len(keys) == len(Purpose)
    assert all(len(key) == 32 for key in keys)
    assert key_for("s3cret", Purpose.CONTROL) == key_for(b"s3cret", Purpose.CONTROL)
