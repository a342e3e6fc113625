"""An engine core, and messages with every field of the right type and of any size."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.wire.core_messages import Add, ToEngine, ids_in_unreadable
from pdserve.wire.ids import RequestId
from pdserve.wire.request import FinishReason, Sibling
from pdserve.wire.seal import UNREADABLE
from tests.fuzz.core import CoreTarget, Pair
from tests.fuzz.values import bent


@given(data=st.data())
def test_no_request_ends_an_engine_or_leaves_anything_behind(data: st.DataObject) -> None:
    target = CoreTarget()
    target.try_one(data)
    target.check_service()


@pytest.mark.parametrize("signature", ["é", "0" * 64, ""])
def test_a_handoff_or_a_ticket_with_any_signature_ends_alone(signature: str) -> None:
    """The core of a release that compared signatures as text ended over the first of them."""
    pair = Pair()
    for name in ("handoff", "ticket"):
        value = msgspec.to_builtins(getattr(pair, name)()) | {"signature": signature}
        request: dict[str, Any] = msgspec.to_builtins(pair.request()) | {name: value}
        add = {"type": "add", "request": request}
        pair.send(pair.d, msgspec.msgpack.encode(add))
    pair.settle()
    pair.check_service()


def test_who_gets_its_own_handoff_back_has_no_prompt_to_compute() -> None:
    pair = Pair()
    pair.p.scheduler.add(pair.request(handoff=pair.handoff(), remote_decode=True))
    while pair.step(pair.p):
        pass
    assert pair.p.scheduler.stats().num_prompts == 0
    pair.settle()
    pair.check_service()


FRAME = msgspec.msgpack.encode(Add(Pair().request()))


@given(frame=bent(FRAME) | st.binary(max_size=40))
def test_a_frame_of_any_bytes_is_a_message_or_is_told_to_be_none(frame: bytes) -> None:
    try:
        msgspec.msgpack.decode(frame, type=ToEngine)
    except UNREADABLE:
        ids_in_unreadable(frame)


def test_every_choice_of_a_request_that_cannot_be_read_is_refused() -> None:
    """Its server waits for the end of each."""
    pair = Pair()
    request = pair.request()
    names = [RequestId("second"), RequestId("third")]
    add = msgspec.to_builtins(Add(request, [Sibling(name, seed=1) for name in names]))
    add["request"]["prompt_token_ids"] = "text"
    pair.send(pair.p, msgspec.msgpack.encode(add))
    told = pair.p.scheduler.drain_outputs()
    assert [output.request_id for output in told] == [request.request_id, *names]
    assert all(output.finish_reason is FinishReason.ERROR for output in told)
    add["siblings"] = "text"
    pair.send(pair.p, msgspec.msgpack.encode(add))
    assert [output.request_id for output in pair.p.scheduler.drain_outputs()] == [
        request.request_id
    ]
