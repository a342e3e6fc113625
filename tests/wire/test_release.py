"""What release 0.1 wrote, byte by byte, and what this version makes of it.

`release_0_1.json` was recorded from its processes (commit d0043bb): a prefill engine that
registered, was sent a request, and left; a proxy that sent requests by push and by pull and gave a
lease back; the first bytes of its side channel.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request

from pdserve.connectors.side_channel.frames import Fault, FrameError, FrameSession
from pdserve.errors import HandoffRefusedError, UnauthorizedError
from pdserve.http.control import Verifier
from pdserve.proxy.relay import SseParser
from pdserve.wire.hop import Deregistration, Registration
from pdserve.wire.transfer import HANDOFFS, TICKETS
from tests.proxy.handoffs import empty_handoff

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parent / "release_0_1.json").read_text(encoding="utf-8")
)
SECRET: str = RECORDED["secret"]


def check(verifier: Verifier, name: str) -> bytes:
    """Check a recorded request as the path that takes it does; return its body."""
    said = RECORDED[name]
    body: bytes = said["body"].encode()
    verifier.check(make_mocked_request(said["method"], said["path"], said["headers"]), body)
    return body


def ticket_in(name: str) -> str:
    text: str = json.loads(RECORDED[name]["body"])["kv_transfer_params"]["pdserve"]["ticket"]
    return text


def test_its_registration_is_read_and_says_nothing_of_its_protocol() -> None:
    body = RECORDED["registration"]["body"]
    registration = msgspec.json.decode(body, type=Registration)
    assert registration.engine.protocol == 1
    assert registration.engine.can_push
    assert registration.engine.layout["schema"] == "1"
    left = msgspec.json.decode(RECORDED["leave"]["body"], type=Deregistration)
    assert left.url == registration.url


@pytest.mark.parametrize("name", ["registration", "leave", "release"])
def test_its_signatures_are_believed_only_while_a_deployment_is_rolled(name: str) -> None:
    check(Verifier(SECRET, accept_former=True), name)
    with pytest.raises(UnauthorizedError):
        check(Verifier(SECRET, accept_former=False), name)
    with pytest.raises(UnauthorizedError):
        check(Verifier("another", accept_former=True), name)


def test_its_handoff_is_carried_to_its_like_as_it_came() -> None:
    events = SseParser().feed(RECORDED["handoff"]["body"].encode())
    handoff = empty_handoff("http://p")
    assert [handoff.read(event.data) for event in events].count(True) == 1
    text = handoff.params["pdserve"]["handoffs"][0]
    assert text in RECORDED["handoff"]["body"]


def test_its_handoff_and_its_ticket_are_refused_here_by_their_protocol() -> None:
    events = SseParser().feed(RECORDED["handoff"]["body"].encode())
    (params,) = [json.loads(e.data)["pdserve_handoff"] for e in events if b"_handoff" in e.data]
    with pytest.raises(HandoffRefusedError, match="uses protocol 1 and this engine uses"):
        HANDOFFS.open(params["pdserve"]["handoffs"][0], SECRET)
    for name in ("prefill with ticket", "decode with ticket"):
        with pytest.raises(HandoffRefusedError, match="uses protocol 1 and this engine uses"):
            TICKETS.open(ticket_in(name), SECRET)


def test_its_side_channel_is_refused_by_its_protocol() -> None:
    session = FrameSession(SECRET.encode(), is_client=False, nonce=bytes(32))
    with pytest.raises(FrameError, match="the peer speaks protocol 1") as caught:
        session.receive(bytes.fromhex(RECORDED["side channel"]["hex"]))
    assert caught.value.fault is Fault.MAGIC
