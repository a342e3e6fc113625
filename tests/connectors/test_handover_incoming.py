"""D's share of the scheduler half: what it loads, tries again, gives up and lets go of."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdserve.connectors.base import Match
from pdserve.connectors.handover.instructions import Load
from pdserve.connectors.handover.scheduler import HandoverScheduler
from pdserve.errors import InternalError
from pdserve.wire.ids import EngineId, Incarnation, RequestId
from pdserve.wire.request import OnLoadFailure
from pdserve.wire.transfer import ConnectorReport, Failed, LeaseEnd, LoadFailure
from tests.connectors.engines import FakeRequest
from tests.connectors.halves import (
    NOTHING,
    PROMPT,
    aborted,
    arrival,
    blocks,
    decode_of,
    end_of,
    failure,
    handed_off,
    queued,
    retries,
    scheduler,
    staged,
    ticket,
)


def test_no_two_loads_have_the_same_id() -> None:
    d = scheduler("D")
    ids = []
    for _ in range(3):
        d.update_state_after_alloc(queued(d), blocks(10, 11, 12), 40)
        (load,) = staged(d).loads
        ids.append(load.load_id)
        failed = Failed(request_id=load.request_id, reason=LoadFailure.TIMEOUT)
        d.update_connector_output(ConnectorReport(failed=[failed]))
    assert len(set(ids)) == 3
    assert min(ids) > 0


def test_a_good_handoff_is_watched_from_the_queue_on() -> None:
    d = scheduler("D")
    request = FakeRequest(RequestId("d"), PROMPT, handoff=handed_off())
    d.request_arrived(request)
    assert [w.nonce for w in staged(d).watches] == ["nonce-0"]


@pytest.mark.parametrize(
    ("num_computed", "match"),
    [
        (0, Match(40, is_async=True)),
        (16, Match(24, is_async=True)),
        (32, Match(8, is_async=True)),
    ],
)
def test_only_the_suffix_is_loaded(num_computed: int, match: Match) -> None:
    d = scheduler("D")
    request = queued(d)
    assert d.get_num_new_matched_tokens(request, num_computed) == match
    d.update_state_after_alloc(request, blocks(10, 11, 12, 13), match.num_tokens)
    (load,) = staged(d).loads
    assert (load.first_token, load.num_tokens) == (num_computed, 40)
    assert (load.remote_block_ids, load.local_block_ids) == ([3, 4, 5], [10, 11, 12])


def test_a_prefix_hit_that_covers_the_prompt_loads_nothing_and_releases_the_lease() -> None:
    d = scheduler("D")
    request = queued(d)
    staged(d)
    assert d.get_num_new_matched_tokens(request, 40) == NOTHING
    d.update_state_after_alloc(request, blocks(10, 11, 12), 0)
    assert [r.nonce for r in staged(d).releases] == ["nonce-0"]


def test_a_load_is_offered_once_whatever_came_of_it() -> None:
    d = scheduler("D")
    request = queued(d)
    d.update_state_after_alloc(request, blocks(10, 11, 12), 40)
    assert d.get_num_new_matched_tokens(request, 0) == NOTHING
    failed = Failed(request_id=request.request_id, reason=LoadFailure.TIMEOUT)
    d.update_connector_output(ConnectorReport(failed=[failed]))
    assert d.get_num_new_matched_tokens(request, 0) == NOTHING
    staged(d)
    d.update_state_after_alloc(request, blocks(10, 11, 12), 0)
    assert d.take_instructions() is None


@pytest.mark.parametrize(
    ("num_external", "num_blocks"), [(25, 3), (41, 3), (40, 2)], ids=["mid-block", "more", "short"]
)
def test_an_impossible_load_is_an_error_instead_of_a_write_elsewhere(
    num_external: int, num_blocks: int
) -> None:
    d = scheduler("D")
    request = queued(d)
    with pytest.raises(InternalError, match="cannot load"):
        d.update_state_after_alloc(request, blocks(*range(num_blocks)), num_external)


def test_the_owner_of_a_load_is_the_life_that_made_the_handoff() -> None:
    d = scheduler("D")
    request = queued(d)
    d.update_state_after_alloc(request, blocks(10, 11, 12), 40)
    (load,) = staged(d).loads
    assert load.owner.engine_id == EngineId("P")
    assert load.owner.incarnation == Incarnation("life of P")


# ---- a load that is tried again ------------------------------------------------------------------


def loading(d: HandoverScheduler, num_external: int = 40, **changes: Any) -> Load:
    d.update_state_after_alloc(queued(d, **changes), blocks(10, 11, 12), num_external)
    (load,) = staged(d).loads
    return load


@pytest.mark.parametrize("reason", [LoadFailure.DIGEST, LoadFailure.TIMEOUT, LoadFailure.PEER_LOST])
def test_a_load_is_tried_once_more_under_its_lease(reason: LoadFailure) -> None:
    d = scheduler("D")
    first = loading(d)
    assert retries(d, failure(first, reason))
    todo = staged(d)
    (second,) = todo.loads
    assert msgspec.structs.replace(second, load_id=first.load_id) == first
    assert second.load_id not in (0, first.load_id)
    assert (todo.releases, todo.unwatches) == ([], [])
    assert not retries(d, failure(second, reason))
    assert [(r.nonce, r.end) for r in staged(d).releases] == [("nonce-0", LeaseEnd.RELEASED)]
    assert d.faults["report_unknown"] == 0


@pytest.mark.parametrize(
    ("num_external", "num_valid", "first_token"),
    [(40, 0, 0), (40, 31, 16), (40, 32, 32), (40, 40, 32), (24, 0, 16), (24, 47, 32)],
)
def test_what_was_valid_of_a_load_is_not_read_again(
    num_external: int, num_valid: int, first_token: int
) -> None:
    d = scheduler("D")
    assert retries(d, failure(loading(d, num_external), num_valid_tokens=num_valid))
    (second,) = staged(d).loads
    assert second.first_token == first_token


@pytest.mark.parametrize(
    "reason", [LoadFailure.LEASE_LOST, LoadFailure.INCOMPATIBLE, LoadFailure.HANDSHAKE]
)
def test_a_load_that_would_fail_again_is_not_tried_again(reason: LoadFailure) -> None:
    d = scheduler("D")
    assert not retries(d, failure(loading(d), reason))
    assert staged(d).loads == []


def test_a_load_that_was_aborted_or_is_unknown_is_not_tried_again() -> None:
    d = scheduler("D")
    request = queued(d)
    d.update_state_after_alloc(request, blocks(10, 11, 12), 40)
    (load,) = staged(d).loads
    stale = msgspec.structs.replace(failure(load), load_id=load.load_id + 1)
    assert not retries(d, stale)
    aborted(d, request)
    staged(d)
    assert not retries(d, failure(load))
    assert staged(d).loads == []


def test_what_one_rank_has_given_up_the_others_stop_and_one_try_more_is_not_stopped() -> None:
    d = scheduler("D")
    load = loading(d)
    stale = msgspec.structs.replace(failure(load), load_id=load.load_id + 1)
    d.update_connector_output(ConnectorReport(failing=[stale]))
    assert d.take_instructions() is None
    d.update_connector_output(ConnectorReport(failing=[failure(load)]))
    assert staged(d).aborts == [load.request_id]
    d.update_connector_output(ConnectorReport(failing=[failure(load)]))
    assert retries(d, failure(load))
    todo = staged(d)
    assert (todo.aborts, len(todo.loads)) == ([], 1)


def test_a_lease_is_released_as_read_once_the_load_is_complete() -> None:
    d = scheduler("D")
    load = loading(d)
    d.update_connector_output(ConnectorReport(received=[arrival(load)]))
    assert [(r.nonce, r.end) for r in staged(d).releases] == [("nonce-0", LeaseEnd.READ)]


def test_a_lease_is_left_to_whoever_the_failure_is_reported_to() -> None:
    d = scheduler("D")
    load = loading(d, on_load_failure=OnLoadFailure.REPORT)
    d.update_connector_output(ConnectorReport(failed=[failure(load, LoadFailure.LEASE_LOST)]))
    todo = staged(d)
    assert (todo.releases, todo.unwatches) == ([], ["nonce-0"])


# ---- pushes --------------------------------------------------------------------------------------


def test_d_reserves_for_a_push_before_p_has_begun() -> None:
    d = scheduler("D", lease_s=12.0)
    request = decode_of(ticket())
    d.request_arrived(request)
    assert [(w.nonce, w.owner, w.lease_s) for w in staged(d).watches] == [
        ("push", end_of("P"), 12.0)
    ]
    assert d.get_num_new_matched_tokens(request, 16) == Match(24, is_async=True, is_pinned=True)
    d.update_state_after_alloc(request, blocks(10, 11, 12, 13), 24)
    todo = staged(d)
    (reserve,) = todo.reserves
    assert todo.loads == []
    assert (reserve.nonce, reserve.owner, reserve.local_block_ids) == (
        "push",
        end_of("P"),
        [10, 11, 12],
    )
    assert (reserve.first_token, reserve.num_tokens) == (16, 40)
    assert d.get_num_new_matched_tokens(request, 16) == NOTHING
    pushed = msgspec.structs.replace(handed_off(), nonce="push")
    d.update_connector_output(ConnectorReport(received=[arrival(reserve, pushed)]))
    assert [(r.nonce, r.end) for r in staged(d).releases] == [("push", LeaseEnd.READ)]


@pytest.mark.parametrize("reason", [LoadFailure.WITHDRAWN, LoadFailure.DIGEST, LoadFailure.TIMEOUT])
def test_a_failed_push_is_not_tried_again_and_leaves_its_lease_to_a_pull(
    reason: LoadFailure,
) -> None:
    d = scheduler("D")
    request = decode_of(ticket())
    d.request_arrived(request)
    d.update_state_after_alloc(request, blocks(10, 11, 12), 40)
    (reserve,) = staged(d).reserves
    assert not retries(d, failure(reserve, reason))
    todo = staged(d)
    assert (todo.releases, todo.unwatches) == ([], ["push"])


def test_an_aborted_reservation_is_released_once_it_has_settled() -> None:
    d = scheduler("D")
    request = decode_of(ticket())
    d.request_arrived(request)
    d.update_state_after_alloc(request, blocks(10, 11, 12), 40)
    (reserve,) = staged(d).reserves
    assert not aborted(d, request)
    aborted(d, request)
    todo = staged(d)
    assert (todo.aborts, todo.releases) == (["d"], [])
    d.update_connector_output(ConnectorReport(failed=[failure(reserve, LoadFailure.ABORTED)]))
    assert [(r.nonce, r.end) for r in staged(d).releases] == [("push", LeaseEnd.RELEASED)]
