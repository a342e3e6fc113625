"""A prefill and a decode engine under random loads, aborts, restarts and expiring leases.

Some requests are pulled, others pushed; the machine is the proxy, and takes the rungs that are a
proxy's. The toy worker reads every KV value it depends on, so a stale, freed, reused or half
loaded block fails the run at the step that reads it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from pdserve.connectors.memory.exchange import Exchange
from pdserve.observe.clock import ManualClock
from pdserve.wire.ids import RequestId
from pdserve.wire.request import EngineOutput, FinishReason, GenerateRequest
from pdserve.wire.transfer import KVHandoff, PushTicket
from tests.scheduler.invariants import assert_nothing_held, check
from tests.stateful.reaching import run_until_reached
from tests.toy import ToyEngine, sampling
from tests.toy_executor import expected_output

if TYPE_CHECKING:
    from pdserve.wire.sampling import SamplingParams

LEASE_S = 30.0
MAX_MODEL_LEN = 48
# Each push takes a few, and a D with six blocks takes them one by one.
MAX_ROUNDS_OF_TEARDOWN = 400


class Life:
    """One client request across both engines, as a proxy would see it."""

    def __init__(
        self, prompt: list[int], params: SamplingParams, *, is_eager: bool = False
    ) -> None:
        self.is_eager = is_eager
        self.is_pushed = False
        self.pushed: Life | None = None
        self.prompt = prompt
        self.params = params
        self.expected = expected_output(prompt, params)
        self.out: list[int] = []
        self.prefill_id: RequestId | None = None
        self.decode_id: RequestId | None = None
        self.handoff = None
        self.is_over = False


class PairMachine(RuleBasedStateMachine):
    """Two engines, one exchange, one clock; the proxy is the machine.

    Attributes:
        reached: How often the situations that matter came up, over all runs.
        num_stages: Of each engine's pipeline.
        new_exchange: Makes what its engines meet in.
    """

    reached: ClassVar[Counter[str]] = Counter()
    num_stages = 1
    new_exchange: ClassVar[type[Exchange]] = Exchange

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.exchange = self.new_exchange()
        self.prefill = self._engine("p", max_num_batched_tokens=4)
        self.decode = self._engine("d", num_blocks=6)
        self.lives: list[Life] = []
        self.by_prefill: dict[RequestId, Life] = {}
        self.by_decode: dict[RequestId, Life] = {}
        self.num_ids = 0

    def _engine(self, name: str, **fields: int) -> ToyEngine:
        return ToyEngine(name, self.exchange, self.clock, num_stages=self.num_stages, **fields)

    def _new_id(self) -> RequestId:
        self.num_ids += 1
        return RequestId(f"r{self.num_ids}")

    @rule(
        prefix=st.sampled_from([[1] * 8, [2] * 8, [1] * 16, [2] * 24]),
        tail=st.lists(st.integers(0, 2), min_size=0, max_size=9),
        max_tokens=st.integers(1, 24),
        sampling_seed=st.integers(0, 1),
        ignore_eos=st.booleans(),
        is_eager=st.sampled_from([True, True, False]),
        is_pushed=st.booleans(),
        has_deadline=st.sampled_from([False, False, False, True]),
    )
    def arrive(
        self,
        prefix: list[int],
        tail: list[int],
        max_tokens: int,
        sampling_seed: int,
        ignore_eos: bool,
        is_eager: bool,
        is_pushed: bool,
        has_deadline: bool,
    ) -> None:
        """An eager life goes on to D as soon as its handoff is there; a pushed one is there."""
        prompt = prefix + tail
        num_left = MAX_MODEL_LEN - len(prompt)
        params = sampling(min(max_tokens, num_left), seed=sampling_seed, ignore_eos=ignore_eos)
        life = Life(prompt, params, is_eager=is_eager)
        life.prefill_id = self._new_id()
        self.lives.append(life)
        self.by_prefill[life.prefill_id] = life
        ticket = None
        if is_pushed:
            ticket = PushTicket(
                nonce=f"push-{life.prefill_id}", prefill=self.prefill.ref, decode=self.decode.ref
            )
            life.pushed = self._start_decode(life, ticket=ticket)
        self.prefill.scheduler.add(
            GenerateRequest(
                request_id=life.prefill_id,
                prompt_token_ids=life.prompt,
                sampling=life.params,
                arrival_s=self.clock.wall_s(),
                deadline_s=self.clock.wall_s() + 10.0 if has_deadline else None,
                remote_decode=True,
                ticket=ticket,
            )
        )

    @rule(num_steps=st.integers(1, 4))
    def step_prefill(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._take_prefill(self.prefill.step())

    @rule(num_steps=st.integers(1, 3))
    def step_decode(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._take_decode(self.decode.step())

    @rule(seconds=st.sampled_from([0.1, 4.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def _handed_off(self) -> list[Life]:
        return [life for life in self.lives if life.handoff is not None]

    @precondition(lambda self: self._handed_off())
    @rule(data=st.data())
    def start_decode(self, data: st.DataObject) -> None:
        """Also twice for the same handoff: a retry whose first attempt goes on."""
        self._start_decode(data.draw(st.sampled_from(self._handed_off())))

    def _start_decode(self, life: Life, *, ticket: PushTicket | None = None) -> Life:
        copy = Life(life.prompt, life.params)
        copy.is_pushed = ticket is not None
        copy.decode_id = life.decode_id = self._new_id()
        self.lives.append(copy)
        life.is_over = ticket is None
        self.by_decode[copy.decode_id] = copy
        self.decode.scheduler.add(
            GenerateRequest(
                request_id=copy.decode_id,
                prompt_token_ids=life.prompt,
                sampling=life.params,
                arrival_s=self.clock.wall_s(),
                handoff=life.handoff if ticket is None else None,
                ticket=ticket,
            )
        )
        return copy

    @precondition(lambda self: self._handed_off())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        life = data.draw(st.sampled_from(self._handed_off()))
        assert life.handoff is not None
        self.prefill.scheduler.release_lease(life.handoff.nonce)

    @precondition(lambda self: self.by_prefill)
    @rule(data=st.data())
    def client_leaves_prefill(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.by_prefill)))
        self.by_prefill.pop(request_id).is_over = True
        self.prefill.scheduler.abort([request_id])
        if self.prefill.scheduler.stats().blocks["quarantined"]:
            self.reached["left while it was pushed"] += 1

    @precondition(lambda self: self.by_decode)
    @rule(data=st.data())
    def client_leaves_decode(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.by_decode)))
        self.by_decode.pop(request_id).is_over = True
        self.decode.scheduler.abort([request_id])
        if self.decode.scheduler.stats().blocks["quarantined"]:
            self.reached["left while KV was on its way"] += 1

    @precondition(lambda self: self.by_decode)
    @rule(num_steps=st.integers(0, 6), data=st.data())
    def move(self, num_steps: int, data: st.DataObject) -> None:
        """What is decoded is to go on at the prefill engine, wherever it stands; perhaps twice."""
        self.step_decode(num_steps)
        decoding = [each for each, life in self.by_decode.items() if len(life.out) > 1]
        if self.by_decode:
            request_id = data.draw(st.sampled_from(sorted(decoding or self.by_decode)))
            self.decode.scheduler.hand_over([request_id, RequestId("unknown"), request_id])

    def _go_on(self, life: Life, handoff: KVHandoff) -> None:
        copy = Life(life.prompt, life.params)
        copy.prefill_id = self._new_id()
        self.lives.append(copy)
        self.by_prefill[copy.prefill_id] = copy
        assert handoff.first_token_ids == life.out
        self.reached["moved"] += len(life.out) > 1
        self.prefill.scheduler.add(
            GenerateRequest(
                request_id=copy.prefill_id,
                prompt_token_ids=life.prompt,
                sampling=life.params,
                arrival_s=self.clock.wall_s(),
                handoff=handoff,
            )
        )

    @precondition(lambda self: self.num_ids >= 6)
    @rule()
    def prefill_restarts(self) -> None:
        """It loses everything; handoffs of its earlier life must never match."""
        self.prefill.close()
        for life in self.by_prefill.values():
            life.is_over = True
        self.by_prefill.clear()
        self.prefill = self._engine("p", max_num_batched_tokens=4)

    @rule()
    def forget_prefixes(self) -> None:
        self.decode.scheduler.kv.pool.forget_all()

    @invariant()
    def every_block_has_one_owner(self) -> None:
        check(self.prefill.scheduler)
        check(self.decode.scheduler)

    @invariant()
    def every_prompt_token_has_one_source(self) -> None:
        for engine in (self.prefill, self.decode):
            stats = engine.scheduler.stats()
            assert stats.prompt_tokens == (
                stats.local_compute_tokens + stats.local_cache_hit_tokens + stats.external_kv_tokens
            )

    def _take_prefill(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            life = self.by_prefill.get(output.request_id)
            if life is None:
                continue
            assert output.finish_reason is not FinishReason.ERROR, output.error
            life.out += output.new_token_ids
            assert life.out == life.expected[: len(life.out)]
            if output.finish_reason is FinishReason.HANDOFF:
                life.handoff = output.handoff
                assert life.handoff is not None
                if life.pushed is None and life.is_eager:
                    self._start_decode(life)
                elif life.pushed is not None and life.pushed.is_over and not life.pushed.out:
                    self._start_decode(life)  # the push has failed, what it was of has not
            if output.finish_reason is not None:
                life.is_over = life.handoff is None
                if output.finish_reason is FinishReason.ABORT:
                    self.reached["late"] += 1
                elif life.is_over:
                    assert life.out == life.expected
                del self.by_prefill[output.request_id]

    def _take_decode(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            life = self.by_decode.get(output.request_id)
            if life is None:
                continue
            if output.finish_reason is FinishReason.ERROR:
                assert life.is_pushed, output.error
                assert output.error_code == "kv_transfer_failed", output.error
                assert not life.out
                self.reached["failed pushes"] += 1
                life.is_over = True
                del self.by_decode[output.request_id]
                continue
            life.out += output.new_token_ids
            assert life.out == life.expected[: len(life.out)]
            if output.finish_reason is not None:
                if output.handoff is not None:
                    self._go_on(life, output.handoff)
                else:
                    assert life.out == life.expected
                life.is_over = True
                del self.by_decode[output.request_id]

    def teardown(self) -> None:
        engines = self.prefill.scheduler, self.decode.scheduler
        for _ in range(MAX_ROUNDS_OF_TEARDOWN):
            self._take_prefill(self.prefill.settle())
            self._take_decode(self.decode.settle())
            # Handoffs nobody took are still leased until their lives end by themselves.
            if all(scheduler.is_idle for scheduler in engines):
                break
            self.clock.advance(LEASE_S / 5)
        assert not self.by_prefill, "a prefill never ended"
        assert not self.by_decode, "a decode never ended"
        assert_nothing_held(self.prefill.scheduler)
        assert_nothing_held(self.decode.scheduler)
        stats = self.decode.scheduler.stats()
        self.reached["pulled"] += stats.kv_loads["pull"] > 0
        self.reached["pushed"] += stats.kv_loads["push"] > 0
        self.reached["failed loads"] += sum(stats.kv_load_failures.values()) > 0
        self.reached["expired"] += self.prefill.scheduler.stats().lease_ends["expired"] > 0
        self.prefill.close()
        self.decode.close()


class PipelinePairMachine(PairMachine):
    """The same with engines of two stages."""

    reached: ClassVar[Counter[str]] = Counter()
    num_stages = 2


SITUATIONS = (
    "pulled",
    "pushed",
    "failed loads",
    "failed pushes",
    "left while KV was on its way",
    "left while it was pushed",
    "expired",
    "late",
    "moved",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("machine", [PairMachine, PipelinePairMachine])
def test_a_pair_of_engines_gives_only_right_tokens_and_keeps_no_block(
    machine: type[PairMachine],
) -> None:
    run_until_reached(machine, SITUATIONS, max_examples=15, first_seed=22)
