"""Two engines whose blocks are all leased to the other, or reserved for it."""

from __future__ import annotations

import msgspec

from pdserve.connectors.memory.exchange import Exchange
from pdserve.observe.clock import ManualClock
from pdserve.scheduler.stuck import RESERVED_S, STUCK_AFTER_S
from pdserve.wire.ids import RequestId
from pdserve.wire.request import EngineOutput, FinishReason, GenerateRequest
from pdserve.wire.transfer import KVHandoff, PushTicket
from tests.scheduler.invariants import assert_nothing_held
from tests.toy import ToyEngine, sampling
from tests.toy_executor import expected_output

PARAMS = sampling(6, ignore_eos=True)


def request_of(owner: str, number: int, handoff: KVHandoff | None = None) -> GenerateRequest:
    """Return the request that is to be leased or, with its handoff, the one that reads it."""
    return GenerateRequest(
        request_id=RequestId(f"{owner}{number}" if handoff is None else f"{owner}{number}-there"),
        prompt_token_ids=[ord(owner) % 8, number] * 8,
        sampling=PARAMS,
        arrival_s=0.0,
        handoff=handoff,
        remote_decode=handoff is None,
    )


def lease_all(engine: ToyEngine, owner: str) -> list[GenerateRequest]:
    """Fill an engine with leases; return what reads them."""
    for number in range(3):
        engine.scheduler.add(request_of(owner, number))
    handoffs = [output.handoff for output in engine.settle() if output.handoff is not None]
    assert len(handoffs) == 3
    assert engine.blocks("free") == 0
    return [request_of(owner, number, handoff) for number, handoff in enumerate(handoffs)]


class Pair:
    """Two engines, each of which is to decode what the other has leased to it."""

    def __init__(self) -> None:
        self.clock, exchange = ManualClock(), Exchange()
        a, b = [ToyEngine(name, exchange, self.clock, num_blocks=6) for name in "ab"]
        self.engines = (a, b)
        self.outputs: dict[RequestId, list[EngineOutput]] = {}
        self.wanted: dict[RequestId, list[int]] = {}
        for wires, reader in ((lease_all(a, "a"), b), (lease_all(b, "b"), a)):
            for wire in wires:
                self.wanted[wire.request_id] = expected_output(wire.prompt_token_ids, PARAMS)
                self.outputs[wire.request_id] = []
                reader.scheduler.add(wire)

    def settle(self) -> None:
        for engine in self.engines:
            for output in engine.settle():
                self.outputs[output.request_id].append(output)

    def pass_time(self, seconds: float) -> None:
        """Advance in steps so short that heartbeats keep the leases."""
        for _ in range(int(seconds)):
            self.settle()
            self.clock.advance(1.0)

    @property
    def ended(self) -> dict[RequestId, EngineOutput]:
        lasts = {each: told[-1] for each, told in self.outputs.items() if told}
        return {each: last for each, last in lasts.items() if last.finish_reason is not None}


def test_a_push_that_has_no_blocks_at_p_gives_back_those_at_d_which_ps_leases_wait_for() -> None:
    clock, exchange = ManualClock(), Exchange()
    p = ToyEngine("p", exchange, clock, num_blocks=6)
    d = ToyEngine("d", exchange, clock, num_blocks=5, max_model_len=40)
    ticket = PushTicket(nonce="n", prefill=p.ref, decode=d.ref)
    pushed = msgspec.structs.replace(
        request_of("q", 0), ticket=ticket, arrival_s=clock.monotonic_s()
    )
    there = RequestId("q0-there")
    d.scheduler.add(msgspec.structs.replace(pushed, request_id=there, remote_decode=False))
    d.settle()
    ready = lease_all(p, "p")
    p.scheduler.add(pushed)
    for wire in ready:
        d.scheduler.add(wire)
    ends: dict[str, FinishReason] = {}
    for _ in range(12):
        outputs = [*p.settle(), *d.settle()]
        ends |= {each.request_id: each.finish_reason for each in outputs if each.finish_reason}
        clock.advance(RESERVED_S / 4)
    assert ends.pop(there) is FinishReason.ERROR
    assert ends.pop("q0") is FinishReason.HANDOFF
    assert ends == {each.request_id: FinishReason.LENGTH for each in ready}
    assert_nothing_held(d.scheduler)


def test_engines_that_wait_for_one_another_let_go_of_kv_until_they_can_go_on() -> None:
    pair = Pair()
    pair.pass_time(STUCK_AFTER_S)
    assert not pair.ended
    pair.pass_time(10.0)  # one each makes no room for the next
    assert len(pair.ended) == 6
    failed = [last for last in pair.ended.values() if last.finish_reason is FinishReason.ERROR]
    assert 0 < len(failed) <= 4
    assert {each.error_code for each in failed} == {"kv_transfer_failed"}
    for request_id, last in pair.ended.items():
        if last not in failed:
            told = [token for each in pair.outputs[request_id] for token in each.new_token_ids]
            assert told == pair.wanted[request_id]
    for engine in pair.engines:
        assert engine.scheduler.stats().kv_load_failures["timeout"] <= 2
        assert_nothing_held(engine.scheduler)
