"""Tests for every connector whose P writes into D's memory; skipped if it does not push."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from pdserve.connectors.conformance.bench import NUM_TOKENS, PROMPT, Bench
from pdserve.connectors.conformance.engines import FIRST_TOKEN
from pdserve.wire.ids import Incarnation
from pdserve.wire.transfer import KVMode, LeaseEnd, LoadFailure

if TYPE_CHECKING:
    from pdserve.connectors.conformance.engines import Engine, KitRequest

_CHUNK = 16


class PushConformance(Bench):
    """D reserves and registers, P writes as it computes, D checks and releases."""

    def test_the_tokens_arrive_with_the_handoff_and_the_lease_settles_as_read(self) -> None:
        p, d = self.pair()
        ours, theirs = self._registered(p, d)
        others = [b for b in range(d.context.shape.num_blocks) if b not in self.d_blocks(0)]
        d.fill(others, seed=9)
        before = d.snapshot(others)
        self._prefill(p, ours)
        d.until(lambda: d.received, others=[p])
        (received,) = d.received
        assert received.request_id == theirs.request_id
        assert received.mode is KVMode.PUSH
        assert received.handoff is not None
        assert received.handoff.first_token_ids == [FIRST_TOKEN]
        assert theirs.ticket is not None
        assert received.handoff.nonce == theirs.ticket.nonce
        assert d.holds(self.d_blocks(0), 1, 0, NUM_TOKENS)
        assert self.same(before, d.snapshot(others)), "another block was written"
        p.until(lambda: p.settled, others=[d])
        assert [each.end for each in p.settled] == [LeaseEnd.READ]
        assert not d.failed
        assert [request_id for request_id, _ in p.ready] == [ours.request_id]

    def test_p_waits_until_every_rank_of_d_has_registered(self) -> None:
        p, d = self.pair()
        ours, theirs = self._queued(p, d)
        for _ in range(5):
            p.step()
            assert p.is_asked_to_wait(ours)
        d.load(theirs, self.d_blocks(0))
        p.until(lambda: not p.is_asked_to_wait(ours), others=[d])
        assert [request_id for request_id, _ in p.ready] == [ours.request_id]

    def test_a_registration_that_comes_before_p_expects_it_counts(self) -> None:
        p, d = self.pair()
        ticket = self.ticket(p, d)
        theirs = d.take(d.new_request(PROMPT, ticket=ticket))
        d.load(theirs, self.d_blocks(0))
        for _ in range(10):
            d.step()
            p.step()
            time.sleep(0.002)
        ours = p.take(p.new_request(PROMPT, remote_decode=True, ticket=ticket))
        p.until(lambda: not p.is_asked_to_wait(ours), others=[d])
        self._prefill(p, ours)
        d.until(lambda: d.received, others=[p])
        assert d.holds(self.d_blocks(0), 1, 0, NUM_TOKENS)

    def test_what_d_has_already_is_not_written(self) -> None:
        p, d = self.pair()
        first = d.block_size * ((NUM_TOKENS - 1) // d.block_size)
        # Different KV proves that nothing was copied; no digest of P's blocks may cover it, though.
        own = 9 if first % p.block_size == 0 else 1
        d.write(self.d_blocks(0), own, 0, first)
        ours, _ = self._registered(p, d, num_computed=first)
        self._prefill(p, ours)
        d.until(lambda: d.received, others=[p])
        assert d.holds(self.d_blocks(0), own, 0, first)
        assert d.holds(self.d_blocks(0), 1, first, NUM_TOKENS)

    def test_many_pushes_at_once_all_arrive_and_each_is_reported_once(self) -> None:
        num_jobs = 16
        p, d = self.pair(num_jobs=num_jobs)
        jobs = [self._registered(p, d, job=job)[0] for job in range(num_jobs)]
        for job, ours in enumerate(jobs):
            self._prefill(p, ours, job=job, seed=job)
        d.until(lambda: len(d.received) == num_jobs, others=[p])
        for job in range(num_jobs):
            assert d.holds(self.d_blocks(job), job, 0, NUM_TOKENS)
        p.until(lambda: len(p.settled) == num_jobs, others=[d])
        assert {each.end for each in p.settled} == {LeaseEnd.READ}
        assert not d.failed

    # --- given up

    def test_an_abort_at_d_before_p_begins_withdraws_the_push(self) -> None:
        p, d = self.pair()
        ours, theirs = self._registered(p, d)
        d.abort(theirs)
        d.step()
        d.until(lambda: d.failed, others=[p])
        p.until(lambda: len(p.ready) == 2, others=[d])
        assert {each.reason for each in d.failed} == {LoadFailure.ABORTED}
        self._still_goes_on(p, ours)
        assert len(d.failed) == 1
        assert not d.received

    def test_an_abort_at_d_during_the_write_ends_in_one_report_and_no_later_write(self) -> None:
        p, d = self.pair()
        ours, theirs = self._registered(p, d)
        blocks = self._start(p, ours)
        p.compute(ours, blocks, 0, _CHUNK)
        d.abort(theirs)
        d.step()
        d.until(lambda: d.failed, others=[p])
        d.fill(self.d_blocks(0), seed=9)  # they have another owner now
        before = d.snapshot(self.d_blocks(0))
        p.compute(ours, blocks, _CHUNK, NUM_TOKENS)
        p.finish(ours, blocks)
        self._let_pass(p, d)
        assert self.same(before, d.snapshot(self.d_blocks(0))), "written after the report"
        assert len(d.failed) == 1
        assert not d.received

    def test_an_abort_at_p_is_settled_and_d_is_told(self) -> None:
        p, d = self.pair()
        ours, _ = self._registered(p, d)
        blocks = self._start(p, ours)
        p.compute(ours, blocks, 0, _CHUNK)
        assert p.abort(ours), "P's blocks must be kept until nothing is written from them"
        p.step()
        p.until(lambda: p.settled, others=[d])
        assert [each.request_id for each in p.settled] == [ours.request_id]
        d.until(lambda: d.failed, others=[p])
        assert {each.reason for each in d.failed} == {LoadFailure.WITHDRAWN}
        d.fill(self.d_blocks(0), seed=9)
        before = d.snapshot(self.d_blocks(0))
        p.fill(blocks, seed=5)
        self._let_pass(p, d)
        assert self.same(before, d.snapshot(self.d_blocks(0))), "written after the report"
        assert len(p.settled) == 1
        assert len(d.failed) == 1

    def test_an_abort_at_p_before_d_registers_ends_ds_reservation(self) -> None:
        p, d = self.pair()
        ours, theirs = self._queued(p, d)
        p.abort(ours)
        p.step()
        d.load(theirs, self.d_blocks(0))
        d.until(lambda: d.failed, others=[p])
        assert {each.reason for each in d.failed} == {LoadFailure.WITHDRAWN}

    def test_a_d_that_is_gone_is_noticed_and_p_goes_on(self) -> None:
        p, d = self.new("P", lease_s=2.0), self.new("D", lease_s=2.0)
        ours, _ = self._registered(p, d)
        d.close()
        p.until(lambda: len(p.ready) == 2)
        self._still_goes_on(p, ours)

    def test_a_d_that_never_comes_is_waited_for_no_longer_than_a_lease(self) -> None:
        p, d = self.new("P", lease_s=1.0), self.new("D", lease_s=1.0)
        ticket = self.ticket(p, d)
        ours = p.take(p.new_request(PROMPT, remote_decode=True, ticket=ticket))
        assert p.is_asked_to_wait(ours)
        p.until(lambda: p.ready)
        self._still_goes_on(p, ours)

    def test_a_p_that_is_gone_is_noticed_and_the_load_has_failed(self) -> None:
        p, d = self.new("P", lease_s=1.0), self.new("D", lease_s=1.0)
        self._registered(p, d)
        p.close()
        d.until(lambda: d.failed)
        assert not d.received

    def test_a_p_that_never_hears_of_the_request_fails_it_at_d(self) -> None:
        p, d = self.new("P", lease_s=0.3), self.new("D", lease_s=0.3)
        theirs = d.take(d.new_request(PROMPT, ticket=self.ticket(p, d)))
        d.load(theirs, self.d_blocks(0))
        deadline_s = time.monotonic() + 1.0
        while time.monotonic() < deadline_s and not d.failed:
            p.step()
            d.step()
            time.sleep(0.01)
        d.abort(theirs)  # the client gives up, though D would still wait
        d.until(lambda: d.failed, others=[p])
        assert len(d.failed) == 1

    # --- tickets that must not be trusted

    def test_a_ticket_serves_one_push(self) -> None:
        p, d = self.pair()
        ours, theirs = self._registered(p, d)
        self._prefill(p, ours)
        d.until(lambda: d.received, others=[p])
        p.until(lambda: p.settled, others=[d])
        again = d.new_request(PROMPT, ticket=theirs.ticket)
        if d.refusal(again) is None:
            d.load(again, self.d_blocks(1))
            d.until(lambda: d.failed, others=[p])
        assert len(d.received) == 1
        assert len(p.settled) == 1

    def test_a_ticket_for_another_life_is_refused(self) -> None:
        p, d = self.pair()
        for side, engine in (("prefill", p), ("decode", d)):
            former = msgspec.structs.replace(engine.ref, incarnation=Incarnation("former"))
            ticket = self.ticket(p, d, **{side: former})
            request = engine.new_request(PROMPT, remote_decode=engine is p, ticket=ticket)
            assert engine.refusal(request) is not None

    # --- digests

    def test_a_block_that_is_not_what_its_digest_was_taken_of_is_never_received(self) -> None:
        """Two requests share a prefix with known digests; its KV at P is corrupted in between."""
        p, d = self.pair(num_jobs=2)
        self._prefill(p, self._registered(p, d)[0])
        d.until(lambda: d.received, others=[p])
        ours, theirs = self._registered(p, d, job=1)
        blocks = self._start(p, ours)
        p.compute(ours, blocks, 0, NUM_TOKENS, seed=9)
        p.finish(ours, blocks)
        d.until(lambda: d.failed or len(d.received) > 1, others=[p])
        assert len(d.received) == 1
        assert [each.request_id for each in d.failed] == [theirs.request_id]
        assert d.failed[0].reason is LoadFailure.DIGEST

    # --- loads inside P's steps

    def test_what_was_to_be_loaded_and_has_not_come_is_not_written_but_what_is_computed_then(
        self,
    ) -> None:
        p, d = self.pair()
        ours, _ = self._registered(p, d)
        blocks = self._start(p, ours)
        ours.is_unproven = True
        p.compute(ours, blocks, 0, NUM_TOKENS, seed=9)
        self._let_pass(p, d)
        assert not d.holds(self.d_blocks(0), 9, 0, 1)
        ours.is_unproven = False
        p.compute(ours, blocks, 0, NUM_TOKENS)
        p.finish(ours, blocks)
        d.until(lambda: d.received or d.failed, others=[p])
        assert not d.failed
        assert d.holds(self.d_blocks(0), 1, 0, NUM_TOKENS)

    def test_what_was_loaded_in_the_only_step_of_a_prompt_is_written_once_it_has_come(self) -> None:
        p, d = self.pair()
        ours, _ = self._registered(p, d)
        blocks = self._start(p, ours)
        ours.is_unproven = True
        p.compute(ours, blocks, 0, NUM_TOKENS)
        self._let_pass(p, d)
        assert not d.holds(self.d_blocks(0), 1, 0, 1)
        ours.is_unproven = False
        p.finish(ours, blocks)
        d.until(lambda: d.received or d.failed, others=[p])
        assert not d.failed
        assert d.holds(self.d_blocks(0), 1, 0, NUM_TOKENS)

    # --- parts

    def _queued(self, p: Engine, d: Engine) -> tuple[KitRequest, KitRequest]:
        """Start P's and D's requests under one ticket."""
        ticket = self.ticket(p, d)
        ours = p.take(p.new_request(PROMPT, remote_decode=True, ticket=ticket))
        return ours, d.take(d.new_request(PROMPT, ticket=ticket))

    def _registered(
        self, p: Engine, d: Engine, *, job: int = 0, num_computed: int = 0
    ) -> tuple[KitRequest, KitRequest]:
        """Start P's and D's requests and wait for the registration."""
        ours, theirs = self._queued(p, d)
        d.load(theirs, self.d_blocks(job), num_computed=num_computed)
        p.until(lambda: not p.is_asked_to_wait(ours), others=[d])
        return ours, theirs

    def _start(self, p: Engine, ours: KitRequest, *, job: int = 0) -> list[int]:
        """Give P's request its blocks; return them."""
        blocks = self.p_blocks(job)
        p.start(ours, blocks)
        return blocks

    def _prefill(self, p: Engine, ours: KitRequest, *, job: int = 0, seed: int = 1) -> None:
        """Run all of P's steps."""
        blocks = self._start(p, ours, job=job)
        for first in range(0, NUM_TOKENS, _CHUNK):
            p.compute(ours, blocks, first, min(first + _CHUNK, NUM_TOKENS), seed=seed)
        p.finish(ours, blocks)

    def _still_goes_on(self, p: Engine, ours: KitRequest) -> None:
        """Check that a request whose push was withdrawn is still computed, and may be pulled."""
        assert not p.is_asked_to_wait(ours)
        blocks = self._start(p, ours)
        p.compute(ours, blocks, 0, NUM_TOKENS)
        handoff = p.finish(ours, blocks)
        d = self.new("D-other")
        d.load(d.queue(PROMPT, handoff), self.d_blocks(0))
        d.until(lambda: d.received, others=[p])
        assert d.holds(self.d_blocks(0), 1, 0, NUM_TOKENS)
        p.until(lambda: p.settled, others=[d])
        assert [each.end for each in p.settled] == [LeaseEnd.READ]

    @staticmethod
    def _let_pass(*engines: Engine) -> None:
        """Let everything in flight finish."""
        for _ in range(30):
            for engine in engines:
                engine.step()
            time.sleep(0.003)
