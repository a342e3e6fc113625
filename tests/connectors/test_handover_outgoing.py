"""P's share of the scheduler half: its leases, the chunks of its pushes, and how these end."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from pdserve.connectors.handover.instructions import (
    Chunk,
    PushNews,
    Registered,
    Withdrawn,
    read_chunks,
)
from pdserve.connectors.handover.scheduler import HandoverScheduler
from pdserve.connectors.views import ScheduledRequest, StepView
from pdserve.errors import InternalError
from pdserve.observe.clock import ManualClock
from pdserve.wire.ids import BlockId, RequestId
from pdserve.wire.request import FinishReason
from pdserve.wire.transfer import (
    TICKET_S,
    ConnectorReport,
    LeaseEnd,
    Settled,
)
from tests.connectors.engines import FakeRequest
from tests.connectors.halves import (
    NOTHING,
    PINNED,
    PROMPT,
    aborted,
    blocks,
    end_of,
    give_up,
    handed_off,
    handed_over,
    prefill_of,
    pushed,
    registered,
    scheduler,
    staged,
    ticket,
)


def chunks(
    half: HandoverScheduler,
    *tokens: tuple[str, int, int],
    table: tuple[list[BlockId], list[int]] = ([], []),
) -> list[Chunk]:
    """Of a step of requests with (id, computed tokens, tokens to compute)."""
    scheduled = {
        RequestId(name): ScheduledRequest(
            FakeRequest(RequestId(name), PROMPT), *table, first, first + num
        )
        for name, first, num in tokens
    }
    step = StepView({RequestId(name): num for name, _, num in tokens}, scheduled.__getitem__)
    metadata = half.build_connector_meta(step)
    return [] if metadata is None else read_chunks(metadata.payload)


def withdraw(p: HandoverScheduler, nonce: str = "push") -> None:
    p.update_connector_output(ConnectorReport(payloads=pushed(withdrawn=nonce)))


def test_a_lease_is_released_by_its_nonce_until_it_has_settled() -> None:
    p = scheduler()
    handoff = handed_off(p)
    staged(p)
    give_up(p, "no such nonce")
    assert p.take_instructions() is None
    give_up(p, handoff.nonce)
    assert staged(p).ends == [handoff.nonce]
    settled = Settled(request_id=RequestId("p"), end=LeaseEnd.RELEASED, nonce=handoff.nonce)
    p.update_connector_output(ConnectorReport(settled=[settled]))
    give_up(p, handoff.nonce)
    assert p.take_instructions() is None


def test_chunks_of_a_prompt_that_will_be_pulled_go_with_their_step_and_no_other() -> None:
    p = scheduler("P")
    request = FakeRequest(RequestId("p"), PROMPT, remote_decode=True)
    p.request_arrived(request)
    (chunk,) = chunks(p, ("p", 0, 20), table=(blocks(3, 4), [7, 8]))
    assert (chunk.nonce, chunk.request_id) == ("", request.request_id)
    assert (chunk.block_ids, chunk.generations) == (blocks(3, 4), [7, 8])
    assert (chunk.start_token, chunk.end_token, chunk.num_tokens) == (0, 20, 40)
    assert chunks(p, ("p", 20, 20)) == []


def test_a_live_push_has_each_chunk_once_and_one_that_was_withdrawn_is_as_if_pulled() -> None:
    p = scheduler("P")
    request = registered(p)
    (chunk,) = chunks(p, (request.request_id, 0, 20))
    assert chunk.nonce == "push"
    withdraw(p)
    (chunk,) = chunks(p, (request.request_id, 20, 10))
    assert (chunk.nonce, chunk.end_token) == ("", 30)


def test_a_pushed_request_waits_at_p_until_d_has_registered() -> None:
    p = scheduler()
    request = prefill_of(ticket())
    p.request_arrived(request)
    assert [(e.nonce, e.request_id, e.decode) for e in staged(p).expects] == [
        ("push", "p", end_of("D"))
    ]
    assert p.get_num_new_matched_tokens(request, 0) is None
    news = p.update_connector_output(ConnectorReport(payloads=pushed(registered="push")))
    assert [request_id for request_id, _ in news.ready] == ["p"]
    assert p.get_num_new_matched_tokens(request, 0) == PINNED


def test_news_is_read_as_it_was_written_and_none_is_no_payload() -> None:
    registered, withdrawn = Registered(nonce="n"), Withdrawn(nonce="m", reason="why")
    news = PushNews(rank=3, registered=[registered], withdrawn=[withdrawn])
    assert [PushNews.from_payload(each) for each in news.to_payloads()] == [news]
    assert PushNews(rank=3).to_payloads() == []


def expecting(num_ranks: int) -> tuple[HandoverScheduler, FakeRequest]:
    """A P of several ranks, and its request that waits for D."""
    p, d = scheduler(num_ranks=num_ranks), end_of("D")
    shape = msgspec.structs.replace(d.shape, num_kv_heads=2 * num_ranks)
    request = prefill_of(ticket(decode=msgspec.structs.replace(d, shape=shape)))
    p.request_arrived(request)
    return p, request


def told_by(p: HandoverScheduler, rank: int, **news: str) -> list[str]:
    """What a rank's news of a push mean: why its request may go on."""
    report = ConnectorReport(payloads=pushed(rank=rank, **news))
    return [why for _, why in p.update_connector_output(report).ready]


def test_a_push_begins_when_every_rank_has_its_registration() -> None:
    p, _ = expecting(3)
    assert not told_by(p, 1, registered="push")
    assert not told_by(p, 1, registered="push")
    assert +p.faults == {"report_repeated": 1}
    assert not told_by(p, 0, registered="push")
    assert told_by(p, 2, registered="push")
    assert not told_by(p, 2, registered="push")
    assert +p.faults == {"report_repeated": 2}


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_the_engine_does_not_have_begins_no_push(rank: int) -> None:
    p, _ = expecting(2)
    assert not told_by(p, 0, registered="push")
    assert not told_by(p, rank, registered="push")
    assert not told_by(p, rank, withdrawn="push")
    assert +p.faults == {"report_of_unknown_rank": 2}
    assert told_by(p, 1, registered="push")


def test_a_push_is_withdrawn_once_and_with_the_first_rank() -> None:
    p, _ = expecting(3)
    assert not told_by(p, 0, registered="push")
    assert told_by(p, 1, withdrawn="push")
    assert not told_by(p, 2, withdrawn="push")
    assert not +p.faults
    assert not told_by(p, 2, withdrawn="push")
    assert +p.faults == {"report_repeated": 1}
    for rank in (1, 2):  # too late to matter
        assert not told_by(p, rank, registered="push")


def test_what_comes_of_a_push_that_is_over_is_known_and_changes_nothing() -> None:
    p, request = expecting(2)
    assert not told_by(p, 0, registered="push")
    aborted(p, request)
    settled = Settled(request_id=request.request_id, end=LeaseEnd.ABORTED, nonce="push")
    p.update_connector_output(ConnectorReport(settled=[settled]))
    assert not told_by(p, 1, registered="push")
    assert not p.faults["report_unknown"]
    assert not told_by(p, 1, registered="another")
    assert p.faults["report_unknown"] == 1


def test_a_pushed_request_that_d_gave_up_is_prefilled_and_leased_under_another_nonce() -> None:
    p = scheduler()
    request = prefill_of(ticket())
    p.request_arrived(request)
    withdraw(p)
    p.update_connector_output(ConnectorReport(payloads=pushed(registered="push")))
    assert p.get_num_new_matched_tokens(request, 0) == NOTHING
    p.update_state_after_alloc(request, blocks(3, 4, 5), 0)
    assert chunks(p, ("p", 0, 40)) == []
    request.output_token_ids = [7]
    handoff = handed_over(p, request, blocks(3, 4, 5), [7, 8, 9])
    assert handoff.nonce == "nonce-0"
    assert [grant.handoff for grant in staged(p).grants] == [None]


def test_the_chunks_of_a_push_begin_with_token_0_and_end_with_the_prompt() -> None:
    p = scheduler()
    registered(p)
    # 16 tokens were cached; two other requests run beside it.
    first = chunks(p, ("p", 16, 10), ("x", 0, 3))
    assert first == [Chunk("push", RequestId("p"), blocks(3, 4, 5), [7, 8, 9], 0, 26, 40, 13)]
    second = chunks(p, ("p", 26, 14), ("x", 3, 1))
    assert [(c.start_token, c.end_token, c.num_step_tokens) for c in second] == [(26, 40, 15)]
    assert chunks(p, ("x", 4, 1)) == []
    assert chunks(p, ("p", 40, 1)) == []


def test_a_withdrawn_push_has_no_further_chunks_and_keeps_its_blocks() -> None:
    p = scheduler()
    request = registered(p)
    assert len(chunks(p, ("p", 0, 16))) == 1
    withdraw(p)
    assert chunks(p, ("p", 16, 24)) == []
    assert p.get_num_new_matched_tokens(request, 0) == PINNED
    assert aborted(p, request)


@pytest.mark.parametrize(
    ("table", "generations"), [((3, 4), [1, 1]), ((3, 4, 5), [1, 1]), ((3, 4, 5), [])]
)
def test_a_pushed_request_without_its_whole_table_is_an_error(
    table: tuple[int, ...], generations: list[int]
) -> None:
    p = scheduler()
    request = prefill_of(ticket())
    p.request_arrived(request)
    p.update_connector_output(ConnectorReport(payloads=pushed(registered="push")))
    with pytest.raises(InternalError, match="blocks with their generations at once"):
        p.update_state_after_alloc(request, blocks(*table), 0, generations=generations)


def test_a_live_push_is_leased_under_its_nonce_and_d_gets_the_handoff() -> None:
    p = scheduler()
    request = registered(p)
    request.output_token_ids = [7]
    handoff = handed_over(p, request, blocks(3, 4, 5), [7, 8, 9])
    assert (handoff.nonce, handoff.generations) == ("push", [7, 8, 9])
    (grant,) = staged(p).grants
    assert (grant.nonce, grant.handoff) == ("push", handoff)
    withdraw(p)  # by a D that died behind it: the lease is for another
    give_up(p, "push")
    assert staged(p).ends == ["push"]
    settled = Settled(request_id=RequestId("p"), end=LeaseEnd.READ, nonce="push")
    p.update_connector_output(ConnectorReport(settled=[settled]))
    give_up(p, "push")
    assert p.take_instructions() is None
    assert p.faults["report_unknown"] == 0


def test_an_abort_during_a_push_holds_the_blocks_until_it_has_settled() -> None:
    p = scheduler()
    request = registered(p)
    assert aborted(p, request)
    assert [(s.nonce, s.request_id) for s in staged(p).stops] == [("push", "p")]
    assert chunks(p, ("p", 0, 16)) == []
    settled = Settled(request_id=RequestId("p"), end=LeaseEnd.ABORTED, nonce="push")
    p.update_connector_output(ConnectorReport(settled=[settled]))
    assert p.faults["report_unknown"] == 0
    p.update_connector_output(ConnectorReport(settled=[settled]))
    assert p.faults["report_unknown"] == 1


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (FinishReason.STOP, "the request ended with its first token"),
        (FinishReason.LENGTH, "the request ended with its first token"),
        (FinishReason.ERROR, "aborted at its owner"),
    ],
)
def test_d_is_told_whether_a_pushed_request_needs_it_no_more(
    reason: FinishReason, told: str
) -> None:
    p = scheduler()
    request = registered(p)
    request.finish_reason = reason
    assert p.request_finished(request, (), ()) is not None
    (stop,) = staged(p).stops
    assert (stop.reason, stop.is_answered) == (told, reason is not FinishReason.ERROR)


def test_an_abort_before_d_has_registered_holds_nothing_and_stops_the_push() -> None:
    p = scheduler()
    request = prefill_of(ticket())
    p.request_arrived(request)
    staged(p)
    assert not aborted(p, request)
    assert [s.nonce for s in staged(p).stops] == ["push"]
    p.update_connector_output(ConnectorReport(payloads=pushed(registered="push")))
    withdraw(p)
    settled = Settled(request_id=RequestId("p"), end=LeaseEnd.ABORTED, nonce="push")
    p.update_connector_output(ConnectorReport(settled=[settled]))
    assert p.faults["report_unknown"] == 0


def test_an_abort_of_a_push_that_never_was_has_nothing_to_settle() -> None:
    p = scheduler()
    request = prefill_of(ticket())
    p.request_arrived(request)
    withdraw(p)
    staged(p)
    assert not aborted(p, request)
    assert p.take_instructions() is None


@pytest.mark.parametrize("ahead_s", [-300.0, 0.0, 300.0])
def test_a_ticket_is_pushed_however_far_the_clocks_of_two_hosts_differ(ahead_s: float) -> None:
    p = scheduler(clock=ManualClock(1000.0, ahead_s=ahead_s))
    p.request_arrived(prefill_of(ticket()))
    assert [expect.nonce for expect in staged(p).expects] == ["push"]
    assert not +p.faults


def test_a_ticket_that_comes_too_late_is_pulled_and_d_is_told_at_once() -> None:
    clock = ManualClock(1000.0)
    p = scheduler(clock=clock)
    clock.advance(TICKET_S)
    late = prefill_of(ticket(), "late", arrival_s=1000.0)
    p.request_arrived(late)
    assert p.faults == Counter(ticket_expired=1)
    (stop,) = staged(p).stops
    assert (stop.nonce, stop.reason) == ("push", "its ticket has expired")
    assert p.get_num_new_matched_tokens(late, 0) == NOTHING
    aborted = Settled(request_id=late.request_id, end=LeaseEnd.ABORTED, nonce="push")
    p.update_connector_output(ConnectorReport(settled=[aborted]))
    assert p.faults == Counter(ticket_expired=1)
    p.update_connector_output(ConnectorReport(settled=[aborted]))
    assert p.faults["report_unknown"] == 1


@pytest.mark.parametrize("later_s", [1.0, TICKET_S, 1e6])
def test_a_ticket_is_of_one_push_however_late_it_comes_again(later_s: float) -> None:
    clock = ManualClock(1000.0)
    p = scheduler(clock=clock)
    p.request_arrived(prefill_of(ticket()))
    clock.advance(later_s)
    again = prefill_of(ticket(), "again", arrival_s=clock.monotonic_s())
    p.request_arrived(again)
    assert p.faults == Counter(ticket_replayed=1)
    assert [expect.request_id for expect in staged(p).expects] == ["p"]
    assert p.get_num_new_matched_tokens(again, 0) == NOTHING
