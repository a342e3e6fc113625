"""One report out of many: each fact once, when the last rank has it, and never before."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.connectors import quorum as quorum_module
from pdserve.connectors.quorum import Quorum
from pdserve.wire.ids import EngineId, Incarnation, RequestId
from pdserve.wire.trace import RankSlice
from pdserve.wire.transfer import (
    ConnectorReport,
    Failed,
    KVHandoff,
    KVMode,
    LeaseEnd,
    LoadFailure,
    Received,
    Settled,
)
from tests.connectors.engines import layout

R = RequestId("r")
HANDOFF = KVHandoff(
    engine_id=EngineId("P"),
    incarnation=Incarnation("i"),
    nonce="n",
    request_id=R,
    endpoints=[],
    block_ids=[],
    shape=layout().shape_of_one_rank(),
    num_tokens=1,
    layout_digest="d",
    lease_s=1.0,
    prompt_digest="p",
    first_token_ids=[7],
)


def settled(end: LeaseEnd, *, nonce: str = "n", request: str = R) -> ConnectorReport:
    fact = Settled(request_id=RequestId(request), end=end, nonce=nonce)
    return ConnectorReport(settled=[fact])


def received(load_id: int = 1, request: str = R, scale: int = 1) -> ConnectorReport:
    fact = Received(
        request_id=RequestId(request),
        num_bytes=100 * scale,
        num_descriptors=3 * scale,
        wait_s=0.5 * scale,
        transfer_s=0.25 / scale,
        load_id=load_id,
    )
    return ConnectorReport(received=[fact])


def failed(
    reason: LoadFailure, *, load_id: int = 1, detail: str = "", num_valid_tokens: int = 0
) -> ConnectorReport:
    fact = Failed(
        request_id=R,
        reason=reason,
        detail=detail,
        load_id=load_id,
        num_valid_tokens=num_valid_tokens,
    )
    return ConnectorReport(failed=[fact])


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (LeaseEnd.READ, LeaseEnd.RELEASED),
        (LeaseEnd.RELEASED, LeaseEnd.ABORTED),
        (LeaseEnd.ABORTED, LeaseEnd.EXPIRED),
        (LeaseEnd.READ, LeaseEnd.EXPIRED),
    ],
)
def test_a_lease_ended_as_its_worst_rank_says(better: LeaseEnd, worse: LeaseEnd) -> None:
    for first, second in ((better, worse), (worse, better)):
        quorum = Quorum(2)
        quorum.add(0, settled(first))
        assert quorum.add(1, settled(second)) == settled(worse)


def test_every_end_of_a_lease_has_its_place_in_the_order() -> None:
    for end in LeaseEnd:
        quorum = Quorum(2)
        quorum.add(0, settled(end))
        assert quorum.add(1, settled(end)) == settled(end)


def test_a_load_that_all_have_is_the_sum_of_bytes_and_the_longest_of_times() -> None:
    quorum = Quorum(2)
    assert not quorum.add(0, received(scale=1))
    (whole,) = quorum.add(1, received(scale=2)).received
    assert (whole.num_bytes, whole.num_descriptors) == (300, 9)
    assert (whole.wait_s, whole.transfer_s) == (1.0, 0.25)


def test_a_load_that_one_rank_lacks_has_failed_once_all_have_reported() -> None:
    quorum = Quorum(3)
    assert not quorum.add(2, failed(LoadFailure.TIMEOUT, detail="P is mute")).failed
    assert not quorum.add(0, received())
    report = quorum.add(1, failed(LoadFailure.PEER_LOST, detail="P is gone"))
    assert not report.received
    (whole,) = report.failed
    assert whole.reason is LoadFailure.PEER_LOST
    assert whole.detail == "rank 2: timeout P is mute; rank 1: peer_lost P is gone"


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (LoadFailure.WITHDRAWN, LoadFailure.DIGEST),
        (LoadFailure.ABORTED, LoadFailure.TIMEOUT),
        (LoadFailure.TIMEOUT, LoadFailure.PEER_LOST),
        (LoadFailure.PEER_LOST, LoadFailure.LEASE_LOST),
        (LoadFailure.LEASE_LOST, LoadFailure.DIGEST),
    ],
)
def test_a_load_has_failed_for_the_reason_that_says_most_whoever_comes_first(
    better: LoadFailure, worse: LoadFailure
) -> None:
    for first, second in ((better, worse), (worse, better)):
        quorum = Quorum(2)
        quorum.add(0, failed(first))
        (whole,) = quorum.add(1, failed(second)).failed
        assert whole.reason is worse
        assert whole.detail == f"rank 0: {first.value}; rank 1: {second.value}"


@pytest.mark.parametrize("first", [LoadFailure.ABORTED, LoadFailure.WITHDRAWN])
def test_of_two_engines_that_take_a_load_back_the_first_is_the_reason(first: LoadFailure) -> None:
    (second,) = {LoadFailure.ABORTED, LoadFailure.WITHDRAWN} - {first}
    quorum = Quorum(3)
    quorum.add(1, failed(first))
    quorum.add(0, failed(second))
    (whole,) = quorum.add(2, failed(second)).failed
    assert whole.reason is first


def test_every_reason_of_a_failure_has_its_place_in_the_order() -> None:
    for reason in LoadFailure:
        quorum = Quorum(2)
        quorum.add(0, failed(reason))
        (whole,) = quorum.add(1, failed(reason)).failed
        assert whole.reason is reason


def test_that_a_load_is_failing_is_said_once_while_others_have_not_reported() -> None:
    quorum = Quorum(3)
    first = failed(LoadFailure.TIMEOUT, detail="P is mute")
    assert quorum.add(2, first).failing == first.failed
    assert not quorum.add(2, first).failing
    assert not quorum.add(0, failed(LoadFailure.ABORTED)).failing
    assert not quorum.add(1, failed(LoadFailure.ABORTED)).failing


def test_faults_of_a_rank_are_not_held_back() -> None:
    report = ConnectorReport(
        settled=settled(LeaseEnd.READ).settled, faults={"agent_reset": 2, "frame_slow": 1}
    )
    assert Quorum(2).add(1, report) == ConnectorReport(faults={"agent_reset": 2, "frame_slow": 1})


def test_a_repeated_report_is_a_fault_and_no_vote() -> None:
    quorum = Quorum(2)
    quorum.add(0, received())
    assert quorum.add(0, received()) == ConnectorReport(faults={"report_repeated": 1})
    contradiction = quorum.add(0, failed(LoadFailure.TIMEOUT))
    assert contradiction == ConnectorReport(faults={"report_repeated": 1})
    assert quorum.add(1, received()).received
    late = quorum.add(1, received())
    assert late == ConnectorReport(faults={"report_repeated": 1})
    assert quorum.num_open == 0


def test_a_rank_the_engine_does_not_have_has_no_vote() -> None:
    quorum = Quorum(2)
    for rank in (-1, 2):
        report = quorum.add(rank, received())
        assert report == ConnectorReport(faults={"report_of_unknown_rank": 1})
    assert quorum.num_open == 0


def test_another_load_of_the_same_request_has_a_vote_of_its_own() -> None:
    quorum = Quorum(2)
    quorum.add(0, received(load_id=1))
    quorum.add(1, failed(LoadFailure.TIMEOUT, load_id=1))
    assert not quorum.add(1, received(load_id=2))
    assert quorum.add(1, failed(LoadFailure.TIMEOUT, load_id=1)).faults  # it comes too late
    assert [whole.load_id for whole in quorum.add(0, received(load_id=2)).received] == [2]


def test_loads_without_a_number_are_told_apart_by_being_over() -> None:
    quorum = Quorum(2)
    for _ in range(3):
        assert not quorum.add(0, received(load_id=0))
        assert quorum.add(1, received(load_id=0)).received


def test_what_one_connector_says_is_no_vote_for_what_another_says_under_the_same_names() -> None:
    quorum = Quorum(2)
    facts = (
        received().received[0],
        settled(LeaseEnd.READ).settled[0],
        failed(LoadFailure.TIMEOUT).failed[0],
    )
    for rank in range(2):
        for name in ("a", "b"):
            load, lease, lost = (msgspec.structs.replace(each, connector=name) for each in facts)
            first = quorum.add(rank, ConnectorReport(received=[load], settled=[lease]))
            second = quorum.add(
                rank, ConnectorReport(failed=[msgspec.structs.replace(lost, load_id=2)])
            )
            assert len(first.received) == len(first.settled) == len(second.failed) == rank
            assert all(
                each.connector == name for each in (*first.received, *first.settled, *second.failed)
            )
    assert not quorum.num_open


def test_what_only_the_connector_can_read_is_passed_on_from_each_rank() -> None:
    quorum = Quorum(2)
    for rank in (1, 0, 0):
        report = ConnectorReport(payloads=[b"one", b"two"])
        assert quorum.add(rank, report) == report


def pushed(handoff: KVHandoff | None, **changes: Any) -> ConnectorReport:
    (fact,) = received().received
    changes = {"mode": KVMode.PUSH, **changes}
    fact = msgspec.structs.replace(fact, handoff=handoff, **changes)
    return ConnectorReport(received=[fact])


def test_a_push_that_all_ranks_have_comes_with_its_handoff_and_the_longest_check() -> None:
    quorum = Quorum(2)
    quorum.add(0, pushed(HANDOFF, digest_s=0.25))
    (whole,) = quorum.add(1, pushed(HANDOFF, digest_s=0.5)).received
    assert (whole.mode, whole.handoff, whole.digest_s) == (KVMode.PUSH, HANDOFF, 0.5)


@pytest.mark.parametrize(
    "other",
    [
        pushed(None),
        pushed(msgspec.structs.replace(HANDOFF, first_token_ids=[8])),
        pushed(HANDOFF, mode=KVMode.PULL),
    ],
    ids=["none", "another", "mode"],
)
def test_a_load_whose_ranks_were_told_different_things_has_failed(other: ConnectorReport) -> None:
    quorum = Quorum(2)
    quorum.add(0, pushed(HANDOFF))
    report = quorum.add(1, other)
    assert not report.received
    assert [whole.reason for whole in report.failed] == [LoadFailure.DIGEST]


def test_what_is_valid_of_a_load_is_what_the_worst_rank_has() -> None:
    quorum = Quorum(3)
    quorum.add(0, failed(LoadFailure.DIGEST, num_valid_tokens=48))
    quorum.add(1, received())
    (whole,) = quorum.add(2, failed(LoadFailure.DIGEST, num_valid_tokens=16)).failed
    assert whole.num_valid_tokens == 16


def test_votes_that_are_never_complete_and_those_that_are_over_are_forgotten_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quorum_module, "MAX_OPEN", 4)
    monkeypatch.setattr(quorum_module, "MAX_REMEMBERED", 4)
    quorum = Quorum(2)
    faults: Counter[str] = Counter()
    for load_id in range(1, 11):
        faults.update(quorum.add(0, received(load_id=load_id)).faults)
    assert quorum.num_open == 4
    assert faults == {"report_incomplete": 6}
    for load_id in range(7, 11):
        assert quorum.add(1, received(load_id=load_id)).received
    for load_id in range(11, 21):
        quorum.add(0, received(load_id=load_id))
        quorum.add(1, received(load_id=load_id))
    assert len(quorum._over) == 4


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[tuple[int, bool, int, bool]]]:
    """Ranks, and what they say: (rank, whether of a load, its number, whether it went well)."""
    num_ranks = draw(st.integers(1, 4))
    num_facts = draw(st.integers(1, 4))
    said = [
        (rank, is_load, number, draw(st.booleans()))
        for rank in range(num_ranks)
        for is_load in (False, True)
        for number in range(1, num_facts + 1)
    ]
    again = draw(st.lists(st.sampled_from(said), max_size=8))
    return num_ranks, draw(st.permutations(said + again))


@given(history=histories())
def test_each_fact_comes_out_once_with_its_last_rank_however_reports_are_mixed_and_repeated(
    history: tuple[int, list[tuple[int, bool, int, bool]]],
) -> None:
    num_ranks, said = history
    quorum = Quorum(num_ranks)
    voted: dict[tuple[bool, int], dict[int, bool]] = {}
    faults: Counter[str] = Counter()
    for rank, is_load, number, is_well in said:
        if not is_load:
            end = LeaseEnd.READ if is_well else LeaseEnd.EXPIRED
            out = quorum.add(rank, settled(end, nonce=f"n{number}"))
        elif is_well:
            out = quorum.add(rank, received(number))
        else:
            out = quorum.add(rank, failed(LoadFailure.TIMEOUT, load_id=number))
        faults.update(out.faults)
        votes = voted.setdefault((is_load, number), {})
        is_last = rank not in votes and len(votes) == num_ranks - 1
        votes.setdefault(rank, is_well)
        well = all(votes.values())
        assert [(fact.nonce, fact.end is LeaseEnd.READ) for fact in out.settled] == (
            [(f"n{number}", well)] if is_last and not is_load else []
        )
        assert [fact.load_id for fact in out.received] == (
            [number] if is_last and is_load and well else []
        )
        assert [fact.load_id for fact in out.failed] == (
            [number] if is_last and is_load and not well else []
        )
    assert quorum.num_open == 0
    assert faults["report_repeated"] == len(said) - sum(len(votes) for votes in voted.values())


def test_what_a_rank_did_is_passed_on_at_once_beside_facts_that_wait():
    did = RankSlice(1.0, 2.0, "rank 0", "forward", {})
    quorum = Quorum(2)
    report = msgspec.structs.replace(received(), slices=[did], clock_id="c")
    told = quorum.add(0, report)
    assert (told.received, told.slices, told.clock_id) == ([], [did], "c")
    alone = ConnectorReport(slices=[did], clock_id="c")
    assert quorum.add(1, alone) == alone
