"""When blocks change hands, moment by moment."""

from __future__ import annotations

import pytest

from pdserve.connectors.memory.exchange import Exchange
from pdserve.errors import InternalError
from pdserve.observe.clock import ManualClock
from pdserve.scheduler.request import Request, State
from pdserve.wire.ids import RequestId
from pdserve.wire.request import FinishReason, GenerateRequest
from pdserve.wire.transfer import KVHandoff
from tests.stateful.toy import expected_output, sampling
from tests.stateful.toy_engine import ToyEngine

PROMPT = [1] * 20


class Pair:
    """Two toy engines that reach one another."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        exchange = Exchange()
        self.prefill = ToyEngine("p", exchange, self.clock)
        self.decode = ToyEngine("d", exchange, self.clock)

    def hand_off(self, max_tokens: int = 8) -> KVHandoff:
        """Prefill `PROMPT` and return what P gives."""
        self.prefill.scheduler.add(make_request("p", max_tokens, remote_decode=True))
        (output,) = [o for o in self.prefill.settle() if o.finish_reason]
        assert output.finish_reason is FinishReason.HANDOFF
        assert output.handoff is not None
        return output.handoff


def make_request(
    request_id: str,
    max_tokens: int,
    *,
    remote_decode: bool = False,
    handoff: KVHandoff | None = None,
    deadline_s: float | None = None,
) -> GenerateRequest:
    """A request for `PROMPT`."""
    return GenerateRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=PROMPT,
        sampling=sampling(max_tokens, ignore_eos=True),
        arrival_s=0.0,
        remote_decode=remote_decode,
        handoff=handoff,
        deadline_s=deadline_s,
    )


def blocks(engine: ToyEngine, state: str) -> int:
    """Number of blocks in a state."""
    return engine.scheduler.stats().blocks[state]


def test_leased_blocks_stay_until_the_reader_has_settled() -> None:
    pair = Pair()
    handoff = pair.hand_off()
    assert blocks(pair.prefill, "leased") == 3
    pair.decode.scheduler.add(make_request("d", 8, handoff=handoff))
    tokens = [t for o in pair.decode.settle() for t in o.new_token_ids]
    assert tokens == expected_output(PROMPT, sampling(8, ignore_eos=True))
    assert blocks(pair.prefill, "leased") == 3  # read, but P has not heard of it yet
    pair.prefill.settle()
    pair.prefill.scheduler.assert_nothing_held()
    pair.decode.scheduler.assert_nothing_held()
    assert pair.decode.scheduler.stats().local_compute_tokens == 0


def test_an_aborted_load_keeps_its_blocks_until_it_has_settled() -> None:
    pair = Pair()
    pair.decode.scheduler.add(make_request("d", 8, handoff=pair.hand_off()))
    pair.decode.submit()
    assert blocks(pair.decode, "receiving") == 3
    pair.decode.scheduler.abort([RequestId("d")])
    assert blocks(pair.decode, "receiving") == 3
    pair.decode.settle()
    pair.decode.scheduler.assert_nothing_held()


def test_a_request_that_ends_keeps_its_blocks_while_a_step_in_flight_may_write_them() -> None:
    engine = Pair().decode
    engine.scheduler.add(make_request("r", 8))
    engine.submit()
    engine.collect()  # the first chunk of 16 tokens
    engine.submit()  # the other 4
    engine.submit()  # the first output token, planned before it is known
    assert len(engine.in_flight) == 2
    engine.scheduler.abort([RequestId("r")])
    assert blocks(engine, "held") > 0
    engine.collect()
    assert blocks(engine, "held") > 0
    engine.collect()
    assert blocks(engine, "held") == 0


def test_a_failed_load_is_computed_here_and_the_first_token_stays() -> None:
    pair = Pair()
    handoff = pair.hand_off()
    pair.prefill.connector.close(0.0)
    pair.decode.scheduler.add(make_request("d", 8, handoff=handoff))
    outputs = pair.decode.settle()
    tokens = [t for o in outputs for t in o.new_token_ids]
    assert tokens == expected_output(PROMPT, sampling(8, ignore_eos=True))
    assert tokens[0] == handoff.first_token_ids[0]
    assert outputs[-1].load_failures == ["peer_lost"]
    assert pair.decode.scheduler.stats().local_compute_tokens == len(PROMPT)


def test_a_handoff_with_its_last_token_already_out_needs_no_kv() -> None:
    pair = Pair()
    pair.decode.scheduler.add(make_request("d", 1, handoff=pair.hand_off()))
    (output,) = pair.decode.settle()
    assert output.finish_reason is FinishReason.LENGTH
    assert len(output.new_token_ids) == 1
    pair.prefill.settle()
    pair.prefill.scheduler.assert_nothing_held()
    assert pair.prefill.scheduler.stats().lease_ends["released"] == 1


def test_work_that_is_already_late_is_not_started() -> None:
    pair = Pair()
    late = make_request("r", 8, deadline_s=pair.clock.wall_s() - 1)
    pair.decode.scheduler.add(late)
    (output,) = pair.decode.settle()
    assert output.finish_reason is FinishReason.ERROR
    assert "deadline" in str(output.error)
    assert pair.decode.scheduler.stats().local_compute_tokens == 0


def test_an_illegal_move_is_refused_with_the_story() -> None:
    pair = Pair()
    chain = pair.decode.scheduler.kv.chain("")
    request = Request(make_request("r", 8), chain, order=0, now_s=0.0)
    with pytest.raises(InternalError, match=r"waiting -> leased(.|\n)*queued prompt=20"):
        request.move(State.LEASED, 1.0, "by mistake")
    assert request.state is State.WAITING
