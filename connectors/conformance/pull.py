"""Tests for every connector whose D reads from P's memory."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from pdserve.connectors.conformance.bench import NUM_TOKENS, PROMPT, Bench
from pdserve.wire.ids import Incarnation
from pdserve.wire.transfer import ConnectorReport, LeaseEnd, LoadFailure

if TYPE_CHECKING:
    from pdserve.connectors.conformance.engines import Engine


class PullConformance(Bench):
    """P leases, D reads, P confirms, D releases."""

    def test_the_tokens_arrive_and_the_lease_settles_as_read(self) -> None:
        p, d = self.pair()
        source, target = self.p_blocks(0), self.d_blocks(0)
        request = d.queue(PROMPT, p.prefill(PROMPT, source))
        d.fill(range(d.context.shape.num_blocks), seed=9)
        others = [b for b in range(d.context.shape.num_blocks) if b not in target]
        before = d.snapshot(others)
        d.load(request, [*target, others[-1]])  # one more block than the prompt needs
        d.until(lambda: d.received, others=[p])
        assert d.holds(target, 1, 0, NUM_TOKENS)
        assert self.same(before, d.snapshot(others)), "another block was written"
        assert [each.request_id for each in d.received] == [request.request_id]
        assert d.received[0].num_bytes >= d.num_bytes(NUM_TOKENS)
        p.until(lambda: p.settled, others=[d])
        assert [each.end for each in p.settled] == [LeaseEnd.READ]
        assert not d.failed

    def test_a_confirmed_read_alone_does_not_end_the_lease(self) -> None:
        p, d = self.pair()
        d.load(d.queue(PROMPT, p.prefill(PROMPT, self.p_blocks(0))), self.d_blocks(0))
        # D's worker halves read and confirm; its scheduler half gets no report of it.
        waiting = set(range(len(d.ranks)))
        deadline_s = time.monotonic() + 30.0
        reports: list[tuple[int, ConnectorReport]] = []
        while waiting:
            assert time.monotonic() < deadline_s
            p.step()
            for number in list(waiting):
                report = d.ranks[number].worker.get_finished()
                if report:
                    reports.append((number, report))
                if report.received or report.failed:
                    assert report.received, report
                    waiting.discard(number)
            time.sleep(0.001)
        for _ in range(10):
            p.step()
            time.sleep(0.002)
        assert not p.settled
        for number, report in reports:
            d.scheduler.update_connector_output(d.quorum.add(number, report))
        p.until(lambda: p.settled, others=[d])
        assert [each.end for each in p.settled] == [LeaseEnd.READ]

    def test_what_d_has_already_is_not_moved(self) -> None:
        p, d = self.pair()
        target = self.d_blocks(0)
        first = d.block_size * ((NUM_TOKENS - 1) // d.block_size)
        request = d.queue(PROMPT, p.prefill(PROMPT, self.p_blocks(0)))
        # Different KV proves that nothing was copied; no digest of P's blocks may cover it, though.
        own = 9 if first % p.block_size == 0 else 1
        d.write(target, own, 0, first)
        d.load(request, target, num_computed=first)
        d.until(lambda: d.received, others=[p])
        assert d.holds(target, own, 0, first)
        assert d.holds(target, 1, first, NUM_TOKENS)
        assert d.received[0].num_bytes < d.num_bytes(NUM_TOKENS) or not first

    def test_a_lease_nobody_reads_expires_and_a_late_read_is_refused(self) -> None:
        p, d = self.new("P", lease_s=0.05), self.new("D")
        source = self.p_blocks(0)
        handoff = p.prefill(PROMPT, source)
        p.until(lambda: p.settled)
        assert [each.end for each in p.settled] == [LeaseEnd.EXPIRED]
        p.fill(source, seed=5)  # the blocks have another owner now
        d.load(d.queue(PROMPT, handoff), self.d_blocks(0))
        d.until(lambda: d.failed, others=[p])
        assert {each.reason for each in d.failed} == {LoadFailure.LEASE_LOST}
        assert not d.received
        p.step()
        assert len(p.settled) == 1

    def test_heartbeats_keep_a_lease_alive_while_its_request_waits(self) -> None:
        p, d = self.new("P", lease_s=1.0), self.new("D")
        request = d.queue(PROMPT, p.prefill(PROMPT, self.p_blocks(0)))
        for _ in range(28):
            d.news.wait(0.05)
            d.step()
            p.step()
        assert not p.settled
        d.load(request, self.d_blocks(0))
        d.until(lambda: d.received, others=[p])

    def test_a_lease_outlives_its_release_while_it_is_read(self) -> None:
        p, d = self.pair()
        handoff = p.prefill(PROMPT, self.p_blocks(0))
        d.load(d.queue(PROMPT, handoff), self.d_blocks(0))
        p.give_up(handoff.nonce)
        d.until(lambda: d.received or d.failed, others=[p])
        if d.received:
            assert d.holds(self.d_blocks(0), 1, 0, NUM_TOKENS)
        p.until(lambda: p.settled, others=[d])
        assert len(p.settled) == 1

    def test_a_release_by_the_owner_frees_the_blocks_at_once(self) -> None:
        p = self.new("P")
        handoff = p.prefill(PROMPT, self.p_blocks(0))
        p.give_up(handoff.nonce)
        instructions = p.scheduler.take_instructions()
        assert instructions is not None  # no step has to be built for it
        for rank in p.ranks:
            rank.worker.post(instructions)
        p.until(lambda: p.settled)
        assert [each.end for each in p.settled] == [LeaseEnd.RELEASED]

    def test_an_abort_before_the_load_releases_the_lease_at_its_owner(self) -> None:
        p, d = self.pair()
        request = d.queue(PROMPT, p.prefill(PROMPT, self.p_blocks(0)))
        assert not d.abort(request)
        d.step()
        p.until(lambda: p.settled, others=[d])
        assert [each.end for each in p.settled] == [LeaseEnd.RELEASED]
        assert not d.received
        assert not d.failed

    def test_a_request_that_needs_nothing_gives_its_lease_back(self) -> None:
        p, d = self.pair()
        request = d.queue(PROMPT, p.prefill(PROMPT, self.p_blocks(0)))
        d.scheduler.update_state_after_alloc(request, self.ids(self.d_blocks(0)), 0)
        d.step()
        p.until(lambda: p.settled, others=[d])
        assert [each.end for each in p.settled] == [LeaseEnd.RELEASED]

    def test_an_abort_during_the_load_is_settled_by_exactly_one_report(self) -> None:
        p, d = self.pair()
        request = d.queue(PROMPT, p.prefill(PROMPT, self.p_blocks(0)))
        d.stage_load(request, self.d_blocks(0))
        d.abort(request)
        d.step()
        d.until(lambda: d.failed or d.received, others=[p])
        p.until(lambda: p.settled, others=[d])
        d.step()
        assert len(d.failed) + len(d.received) == 1
        assert {each.reason for each in d.failed} <= {LoadFailure.ABORTED}
        # A load that was complete before the abort counts as read; there is no third outcome.
        ends = {each.end for each in p.settled}
        assert ends == {LeaseEnd.RELEASED if d.failed else LeaseEnd.READ}

    def test_a_handoff_of_an_earlier_life_is_never_loaded(self) -> None:
        p, d = self.pair()
        handoff = p.prefill(PROMPT, self.p_blocks(0))
        stale = msgspec.structs.replace(handoff, incarnation=Incarnation("an earlier life"))
        d.load(d.queue(PROMPT, stale), self.d_blocks(0))
        d.until(lambda: d.failed or d.received, others=[p])
        assert {each.reason for each in d.failed} == {LoadFailure.LEASE_LOST}
        assert "an earlier life" in d.failed[0].detail
        assert not d.received

    def test_giving_back_a_handoff_of_an_earlier_life_ends_no_lease_of_this_one(self) -> None:
        p, d = self.pair()
        handoff = p.prefill(PROMPT, self.p_blocks(0))
        stale = msgspec.structs.replace(handoff, incarnation=Incarnation("an earlier life"))
        d.abort(d.queue(PROMPT, stale))
        d.step()
        d.load(d.queue(PROMPT, handoff), self.d_blocks(0))
        d.until(lambda: d.received, others=[p])
        p.until(lambda: p.settled, others=[d])
        assert [each.end for each in p.settled] == [LeaseEnd.READ]

    def test_a_nonce_that_was_never_granted_is_never_loaded(self) -> None:
        p, d = self.new("P", lease_s=0.5), self.new("D")
        handoff = p.prefill(PROMPT, self.p_blocks(0))
        unknown = msgspec.structs.replace(handoff, nonce="never granted")
        d.load(d.queue(PROMPT, unknown), self.d_blocks(0))
        d.until(lambda: d.failed, others=[p])
        assert {each.reason for each in d.failed} == {LoadFailure.LEASE_LOST}
        assert not d.received

    def test_a_handoff_that_was_read_before_is_not_read_again(self) -> None:
        p, d = self.pair()
        source = self.p_blocks(0)
        handoff = p.prefill(PROMPT, source)
        d.load(d.queue(PROMPT, handoff), self.d_blocks(0))
        d.until(lambda: d.received, others=[p])
        p.until(lambda: p.settled, others=[d])
        p.fill(source, seed=5)
        d.load(d.queue(PROMPT, handoff), self.d_blocks(1))
        d.until(lambda: d.failed, others=[p])
        assert {each.reason for each in d.failed} == {LoadFailure.LEASE_LOST}
        assert len(d.received) == 1
        assert len(p.settled) == 1

    def test_a_handoff_of_another_prompt_is_refused(self) -> None:
        p, d = self.pair()
        handoff = p.prefill(PROMPT, self.p_blocks(0))
        other = [*PROMPT[:-1], 3]
        for prompt in (other, PROMPT[:-1], [*PROMPT, 3]):
            refusal = d.refusal(d.new_request(prompt, handoff=handoff))
            assert refusal is not None
            assert ("prompt digest" if len(prompt) == len(PROMPT) else "tokens") in refusal

    def test_a_peer_with_another_layout_is_refused_and_both_values_are_named(self) -> None:
        p, d = self.new("P", dtype="bfloat16"), self.new("D", dtype="float16")
        handoff = p.prefill(PROMPT, self.p_blocks(0))
        refusal = d.refusal(d.new_request(PROMPT, handoff=handoff))
        assert refusal is not None
        lying = msgspec.structs.replace(handoff, layout_digest=d.context.layout_digest)
        d.load(d.queue(PROMPT, lying), self.d_blocks(0))
        d.until(lambda: d.failed, others=[p])
        assert {each.reason for each in d.failed} == {LoadFailure.INCOMPATIBLE}
        assert "bfloat16" in d.failed[0].detail
        assert "float16" in d.failed[0].detail.replace("bfloat16", "")
        assert not d.received

    def test_a_peer_that_is_not_there_is_lost_soon(self) -> None:
        p, d = self.pair()
        handoff = p.prefill(PROMPT, self.p_blocks(0))
        p.close()
        d.load(d.queue(PROMPT, handoff), self.d_blocks(0))
        d.until(lambda: d.failed)
        assert {each.reason for each in d.failed} == {LoadFailure.PEER_LOST}

    def test_a_p_whose_ds_are_gone_gets_its_blocks_back_by_the_leases_end(self) -> None:
        p, d = self.new("P", lease_s=0.3), self.new("D")
        d.queue(PROMPT, p.prefill(PROMPT, self.p_blocks(0)))
        d.close()
        p.until(lambda: p.settled)
        assert [each.end for each in p.settled] == [LeaseEnd.EXPIRED]

    def test_two_ds_read_from_one_p_at_the_same_time(self) -> None:
        p, readers = self.new("P"), [self.new("D1"), self.new("D2")]
        for turn, d in enumerate(readers):
            source = self.p_blocks(turn)
            d.load(d.queue(PROMPT, p.prefill(PROMPT, source, seed=turn)), self.d_blocks(0))
        for turn, d in enumerate(readers):
            d.until(partial(_is_over, d), others=[p])
            assert d.holds(self.d_blocks(0), turn, 0, NUM_TOKENS)
        p.until(lambda: len(p.settled) == 2, others=readers)

    def test_of_two_ds_that_read_one_lease_each_gets_it_whole_or_not_at_all(self) -> None:
        p, readers = self.new("P"), [self.new("D1"), self.new("D2")]
        source = self.p_blocks(0)
        handoff = p.prefill(PROMPT, source)
        for d in readers:
            d.load(d.queue(PROMPT, handoff), self.d_blocks(0))
        for d in readers:
            d.until(partial(_is_over, d), others=[p, *readers])
        assert any(d.received for d in readers)
        assert {each.reason for d in readers for each in d.failed} <= {LoadFailure.LEASE_LOST}
        for d in readers:
            assert not d.received or d.holds(self.d_blocks(0), 1, 0, NUM_TOKENS)
        p.until(lambda: p.settled, others=readers)
        assert [each.end for each in p.settled] == [LeaseEnd.READ]

    def test_many_loads_at_once_all_arrive_and_each_is_reported_once(self) -> None:
        num_jobs = 40
        p, d = self.pair(num_jobs=num_jobs)
        requests = [
            d.queue(PROMPT, p.prefill(PROMPT, self.p_blocks(job), seed=job), step=False)
            for job in range(num_jobs)
        ]
        targets = [self.d_blocks(num_jobs - 1 - job) for job in range(num_jobs)]
        for request, target in zip(requests, targets, strict=True):
            d.load(request, target)
        d.until(lambda: len(d.received) == num_jobs, others=[p])
        assert sorted(r.request_id for r in d.received) == sorted(r.request_id for r in requests)
        for job, target in enumerate(targets):
            assert d.holds(target, job, 0, NUM_TOKENS)
        p.until(lambda: len(p.settled) == num_jobs, others=[d])
        assert {each.end for each in p.settled} == {LeaseEnd.READ}
        assert not d.step()
        assert not p.step()

    def test_the_engine_is_woken_when_there_is_news(self) -> None:
        p, d = self.pair()
        request = d.queue(PROMPT, p.prefill(PROMPT, self.p_blocks(0)))
        p.step()
        p.news.clear()
        d.stage_load(request, self.d_blocks(0))
        d.step()
        self.until_woken(d, lambda: d.received)
        d.step()  # its scheduler half gives the lease back
        self.until_woken(p, lambda: p.settled)

    def test_close_may_come_twice(self) -> None:
        p, d = self.pair()
        d.load(d.queue(PROMPT, p.prefill(PROMPT, self.p_blocks(0))), self.d_blocks(0))
        d.until(lambda: d.received, others=[p])
        for engine in (d, p):
            engine.close()
            engine.close()

    def test_close_during_a_load_never_hangs(self) -> None:
        p, d = self.pair()
        d.load(d.queue(PROMPT, p.prefill(PROMPT, self.p_blocks(0))), self.d_blocks(0))
        start_s = time.monotonic()
        for engine in (d, p):
            engine.close()
        assert time.monotonic() - start_s < 10.0


def _is_over(engine: Engine) -> bool:
    return bool(engine.received or engine.failed)
