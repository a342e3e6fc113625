"""The side channel against people who should not speak to it, and against silence."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from pdserve.connectors.conformance.engines import prompt_of
from pdserve.connectors.nixl import NixlConnector
from pdserve.connectors.side_channel.channel import Listener
from pdserve.connectors.side_channel.frames import MAX_PAYLOAD_BYTES, FrameSession
from pdserve.connectors.transfer.protocol import (
    Abort,
    Begin,
    Done,
    EndRead,
    Fail,
    Heartbeat,
    Hello,
    LeaseRelease,
    Region,
    Register,
)
from pdserve.errors import ConfigError
from pdserve.wire.ids import BlockId, EngineId, Incarnation, RequestId
from pdserve.wire.transfer import Endpoint, LoadFailure
from tests.connectors.engines import Engine

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

PROMPT = prompt_of(40)
SECRET = "deployment"


@pytest.fixture
def p() -> Iterator[Engine]:
    engine = Engine(NixlConnector(), "P", secret=SECRET, handshake_timeout_s=1.0)
    yield engine
    engine.close()


@pytest.fixture
def d() -> Iterator[Engine]:
    engine = Engine(NixlConnector(), "D", secret=SECRET, handshake_timeout_s=2.0)
    yield engine
    engine.close()


class Caller:
    """Somebody who connects to a side channel and speaks by hand."""

    def __init__(self, endpoint: Endpoint, secret: str = SECRET) -> None:
        self.sock = socket.create_connection((endpoint.host, endpoint.port), timeout=5.0)
        self.session = FrameSession(secret.encode(), is_client=True, nonce=os.urandom(32))

    def meet(self) -> Caller:
        self.session.receive(self.sock.recv(40, socket.MSG_WAITALL))
        return self

    def say(self, message: msgspec.Struct | bytes) -> bytes:
        data = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        self.session.send(data)
        frame = self.session.take_unsent()
        self.sock.sendall(frame)
        return frame

    def hear(self) -> bytes:
        """The next thing that is said."""
        while not (heard := self.session.receive(self.sock.recv(65536))):
            pass
        return heard[0]

    def is_hung_up_on(self) -> bool:
        """Whether the other side closes; what it says before does not matter."""
        try:
            while self.sock.recv(65536):
                pass
        except ConnectionResetError:
            pass
        except TimeoutError:
            return False
        finally:
            self.sock.close()
        return True


def hello(engine: Engine) -> Hello:
    return Hello(
        engine_id=EngineId("X"),
        incarnation=Incarnation("x"),
        rank=0,
        wants_engine_id=EngineId(engine.context.engine_id),
        wants_incarnation=engine.context.incarnation,
        wants_rank=0,
        layout_digest=engine.context.layout_digest,
        layout_fields=engine.context.layout_fields,
        shape=engine.context.shape,
        agent_metadata=b"nobody",
        pool=Region(0, engine.context.layout.block_bytes, 32, "DRAM", 0),
    )


def counted(engine: Engine, fault: str, times: int) -> bool:
    """Whether the fault is counted so many times; the counting may trail the hanging up."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        engine.step()
        if engine.faults[f"frame_{fault}"] == times:
            return True
        time.sleep(0.01)
    return False


def still_serves(p: Engine, d: Engine) -> bool:
    d.load(d.queue(PROMPT, p.prefill(PROMPT, [1, 2, 3]), "r"), [4, 5, 6])
    d.until(lambda: d.received)
    return d.holds([4, 5, 6], [1, 2, 3])


def test_bytes_that_are_no_frames_are_refused_counted_and_survived(p: Engine, d: Engine) -> None:
    caller = Caller(p.endpoint)
    caller.sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert caller.is_hung_up_on()
    assert counted(p, "magic", 1)
    assert still_serves(p, d)


def test_an_oversized_frame_is_refused_counted_and_survived(p: Engine, d: Engine) -> None:
    caller = Caller(p.endpoint).meet()
    caller.sock.sendall(caller.session.take_unsent() + struct.pack(">I", MAX_PAYLOAD_BYTES + 1))
    caller.sock.sendall(b"m" * 32)
    assert caller.is_hung_up_on()
    assert counted(p, "oversize", 1)
    assert still_serves(p, d)


def test_a_caller_without_the_secret_is_refused_counted_and_survived(p: Engine, d: Engine) -> None:
    caller = Caller(p.endpoint, secret="guess").meet()
    caller.say(hello(p))
    assert caller.is_hung_up_on()
    assert counted(p, "unauthentic", 1)
    assert still_serves(p, d)


def test_a_replayed_release_is_refused_and_the_lease_lives(p: Engine, d: Engine) -> None:
    handoff = p.prefill(PROMPT, [1, 2, 3])
    caller = Caller(p.endpoint).meet()
    caller.say(hello(p))
    frame = caller.say(Heartbeat([handoff.nonce]))
    caller.sock.sendall(frame)
    assert caller.is_hung_up_on()
    assert counted(p, "unauthentic", 1)

    # The same words, recorded from a whole conversation and played in another connection.
    recorded = Caller(p.endpoint).meet()
    said = recorded.say(hello(p)) + recorded.say(LeaseRelease("no lease of this name"))
    recorded.sock.close()
    replay = Caller(p.endpoint)
    replay.sock.sendall(said)
    assert replay.is_hung_up_on()
    assert counted(p, "unauthentic", 2)
    d.load(d.queue(PROMPT, handoff, "r"), [4, 5, 6])
    d.until(lambda: d.received)


@pytest.mark.parametrize(
    ("payload", "fault"),
    [
        (b"\xc1", "malformed"),
        (msgspec.msgpack.encode({"type": "no such message"}), "malformed"),
        (msgspec.msgpack.encode({"type": "heartbeat", "nonces": 5}), "malformed"),
        (msgspec.msgpack.encode(Done("n", 1, 0)), "unexpected"),
        (msgspec.msgpack.encode(LeaseRelease("n" * 513)), "malformed"),
        (msgspec.msgpack.encode(LeaseRelease("value")).replace(b"value", b"\xff" * 5), "malformed"),
        (
            msgspec.msgpack.encode({"type": "release", "nonce": "n", "more": 0})[:-1]
            + b"\x91" * 100_000,
            "malformed",
        ),
    ],
    ids=[
        "no msgpack",
        "no such message",
        "another type",
        "before hello",
        "long",
        "no text",
        "too deep",
    ],
)
def test_an_authentic_frame_without_sense_is_refused_counted_and_survived(
    p: Engine, d: Engine, payload: bytes, fault: str
) -> None:
    caller = Caller(p.endpoint).meet()
    caller.say(payload)
    assert caller.is_hung_up_on()
    assert counted(p, fault, 1)
    assert still_serves(p, d)


def test_a_second_hello_is_refused(p: Engine) -> None:
    caller = Caller(p.endpoint).meet()
    caller.say(hello(p))
    caller.say(hello(p))
    assert caller.is_hung_up_on()
    assert counted(p, "unexpected", 1)


def test_a_d_that_was_refused_and_speaks_on_is_hung_up_on(p: Engine) -> None:
    caller = Caller(p.endpoint).meet()
    caller.say(msgspec.structs.replace(hello(p), layout_digest="another"))
    caller.say(Heartbeat(["n"]))
    assert caller.is_hung_up_on()
    assert counted(p, "unexpected", 1)


@pytest.mark.parametrize(
    "said",
    [
        [Done("n", 1, 0)],
        [Begin("n", 1), Done("other", 1, 0)],
        [Begin("n", 1), Done("n", 1, 0), Done("n", 1, 0)],
        [Begin("n", 1), Begin("n", 1)],
        [Begin("n", number) for number in range((1 << 14) + 1)],
    ],
    ids=["not begun", "of another lease", "twice", "begun twice", "too many"],
)
def test_reads_that_no_d_can_have_are_refused_counted_and_survived(
    p: Engine, d: Engine, said: list[Begin | Done]
) -> None:
    caller = Caller(p.endpoint).meet()
    caller.say(hello(p))
    with contextlib.suppress(ConnectionError):  # it hangs up before it has heard all
        for message in said:
            caller.say(message)
    assert caller.is_hung_up_on()
    assert counted(p, "unexpected", 1)
    assert still_serves(p, d)


def test_a_registration_of_more_blocks_than_its_tokens_fill_is_refused(p: Engine) -> None:
    caller = Caller(p.endpoint).meet()
    caller.say(hello(p))
    caller.hear()
    caller.say(Register("n", 1, RequestId("r"), [BlockId(0)] * 3, 0, 20))
    fail = msgspec.msgpack.decode(caller.hear(), type=Fail)
    assert fail.reason == "20 tokens do not match 3 blocks"
    caller.sock.close()


def test_a_hello_whose_refusal_fits_no_frame_is_refused_counted_and_survived(
    p: Engine, d: Engine
) -> None:
    caller = Caller(p.endpoint).meet()
    fields = {f"field {number}": "" for number in range(40_000)}
    caller.say(msgspec.structs.replace(hello(p), layout_digest="another", layout_fields=fields))
    assert caller.is_hung_up_on()
    assert counted(p, "oversize", 1)
    assert still_serves(p, d)


def test_a_hello_of_more_ranks_than_can_be_is_refused_at_once(p: Engine, d: Engine) -> None:
    caller = Caller(p.endpoint).meet()
    shape = msgspec.structs.replace(p.context.shape, tp_size=1 << 40)
    caller.say(msgspec.structs.replace(hello(p), shape=shape))
    assert still_serves(p, d)
    caller.sock.close()


@pytest.mark.parametrize("field", ["address", "device"])
def test_memory_that_cannot_be_is_refused_counted_and_survived(
    p: Engine, d: Engine, field: str
) -> None:
    caller = Caller(p.endpoint).meet()
    pool = msgspec.structs.replace(hello(p).pool, **{field: -1})
    caller.say(msgspec.structs.replace(hello(p), pool=pool))
    assert caller.is_hung_up_on()
    assert counted(p, "malformed", 1)
    assert still_serves(p, d)


def test_callers_that_say_nothing_are_hung_up_on_and_do_not_crowd_others_out(
    p: Engine, d: Engine
) -> None:
    silent = [Caller(p.endpoint) for _ in range(80)]
    assert still_serves(p, d)
    assert all(caller.is_hung_up_on() for caller in silent)
    assert counted(p, "slow", 80)


def test_engines_with_different_secrets_refuse_one_another_and_say_so(p: Engine) -> None:
    d = Engine(NixlConnector(), "D", secret="another", handshake_timeout_s=0.5)
    try:
        handoff = p.prefill(PROMPT, [1, 2, 3])
        d.load(d.queue(PROMPT, handoff, "r"), [4, 5, 6])
        d.until(lambda: d.failed)
        assert [f.reason for f in d.failed] == [LoadFailure.HANDSHAKE]
    finally:
        d.close()


def test_a_peer_that_accepts_and_says_nothing_costs_the_handshake_timeout_and_no_more(
    p: Engine, d: Engine
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        elsewhere = Endpoint(host="127.0.0.1", port=mute.getsockname()[1])
        handoff = msgspec.structs.replace(p.prefill(PROMPT, [1, 2, 3]), endpoints=[elsewhere])
        started = time.monotonic()
        d.load(d.queue(PROMPT, handoff, "r1"), [4, 5, 6])
        d.until(lambda: d.failed)
        assert [f.reason for f in d.failed] == [LoadFailure.HANDSHAKE]
        assert time.monotonic() - started < 10.0
    assert still_serves(p, d)


def test_a_read_that_is_never_confirmed_times_out(p: Engine) -> None:
    d = Engine(NixlConnector(), "D", secret=SECRET, transfer_timeout_s=0.3)
    try:
        # P has no such lease, and waits for its grant longer than D waits for P.
        handoff = msgspec.structs.replace(p.prefill(PROMPT, [1, 2, 3]), nonce="not granted")
        d.load(d.queue(PROMPT, handoff, "r"), [4, 5, 6])
        d.until(lambda: d.failed)
        assert [f.reason for f in d.failed] == [LoadFailure.TIMEOUT]
    finally:
        d.close()


def test_a_read_that_ends_before_its_grant_is_known_is_confirmed_by_it(
    p: Engine, d: Engine
) -> None:
    handoff = p.prefill(PROMPT, [1, 2, 3], step=False)  # the step beside it still runs
    d.load(d.queue(PROMPT, handoff, "r"), [4, 5, 6])
    time.sleep(0.3)
    d.step()
    assert not d.received
    assert not d.failed
    p.step()
    d.until(lambda: d.received)


def test_a_read_that_begins_before_its_grant_is_known_holds_the_blocks(p: Engine) -> None:
    handoff = p.prefill(PROMPT, [1, 2, 3], step=False)
    caller = Caller(p.endpoint).meet()
    caller.say(hello(p))
    caller.hear()
    caller.say(Begin(handoff.nonce, 1))
    caller.say(Abort(99))
    caller.hear()  # what was said before has been heard
    p.step()
    p.give_up(handoff.nonce)
    p.step()
    time.sleep(0.2)
    p.step()
    assert not p.settled
    caller.say(EndRead(handoff.nonce, 1))
    p.until(lambda: p.settled)
    caller.sock.close()


def test_a_release_that_overtakes_its_grant_frees_the_blocks_at_once(p: Engine, d: Engine) -> None:
    handoff = p.prefill(PROMPT, [1, 2, 3], step=False)
    d.abort(d.queue(PROMPT, handoff, "r"))
    d.step()
    time.sleep(0.3)
    p.step()
    p.until(lambda: p.settled)


def test_a_wildcard_cannot_be_announced_and_a_taken_port_is_named() -> None:
    with pytest.raises(ConfigError, match="wildcard"):
        Listener("0.0.0.0", 0)
    taken = Listener("127.0.0.1", 0)
    try:
        with pytest.raises(ConfigError, match=str(taken.endpoint.port)):
            Listener("127.0.0.1", taken.endpoint.port)
    finally:
        taken.close()
