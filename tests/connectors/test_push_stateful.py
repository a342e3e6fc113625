"""P's writer and D's reservations against each other, over a network and a NIC that misbehave.

What is between the two, and what must hold however it comes, is in `push_world`.
"""

from __future__ import annotations

from collections import Counter, deque

import msgspec
import pytest

from pdserve.connectors.transfer.protocol import Abort, Progress, Pushed, Taken
from pdserve.wire.transfer import Failed, LeaseEnd, LoadFailure, Received
from tests.connectors.push_parts import EDGES, NONCES, N
from tests.connectors.push_world import World

NUM_LIVES = 200


@pytest.mark.parametrize("is_direct", [False, True], ids=["network", "one host"])
def test_whatever_happens_nothing_is_written_or_read_too_late_and_all_ends_once(
    is_direct: bool,
) -> None:
    outcomes: Counter[str] = Counter()
    num_early = 0
    for seed in range(NUM_LIVES):
        world = World(seed, is_direct=is_direct)
        try:
            for _ in range(150):
                world.one_event()
            world.let_all_end()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        num_early += world.num_early
        for request in world.requests.values():
            outcomes.update(
                report.reason.value if isinstance(report, Failed) else "received"
                for report in request.reports
            )
    # Not one of these ways may be missing from what was tried.
    ways = {"received", "peer_lost", "aborted", "withdrawn", "digest", "timeout"}
    assert ways <= set(outcomes), outcomes
    assert num_early > NUM_LIVES / 4, "D has checked nothing before it was all there"


def test_the_agent_of_d_is_driven_only_for_writes_that_go_on_after_their_post():
    world = World(0, is_direct=False)
    world.begin(NONCES[0])
    world.run_step(NONCES[0], layerwise=False)
    world.calm(2)
    assert not world.receiving.needs_progress
    job = world.nic.waiting[0]
    assert job.on_slow is not None
    for _ in range(2):
        job.on_slow()
    world.calm(2)
    assert world.receiving.needs_progress
    while world.nic.waiting or world.nic.posted:
        world.post()
        world.land(None)
        world.calm(1)
    world.run_step(NONCES[0], layerwise=False)
    world.calm(2)
    assert world.receiving.needs_progress, "it was told for the whole push"


def test_what_p_said_before_it_writes_once_more_is_not_believed_of_that():
    world = World(0, is_direct=False)
    nonce = NONCES[0]
    world.begin(nonce)
    for _ in EDGES[1:]:
        world.run_step(nonce, layerwise=False)
    world.finish(nonce)
    world.let_time_pass(0.0, is_heard=True)
    while not any(isinstance(message, Pushed) for message in world.to_d):
        world.post()
        world.land(None)
        world.deliver_nic()
        world.p_later.run()
    world.clock.now_s += 1.0
    world.pushing.tick()
    assert isinstance(world.to_d[-1], Progress)
    assert world.to_d[-1].num_settled == N
    said, world.to_d = world.to_d.pop(), deque(m for m in world.to_d if isinstance(m, Pushed))
    world.deliver_to_d()
    world.digest_at_d(is_bad=True)
    world.deliver_to_p()
    assert world.nic.waiting, "it is written once more"
    world.tell_d(said)
    assert not world.d_later.todo
    world.let_all_end()
    assert [type(report) for report in world.requests[nonce].reports] == [Received]


def test_a_push_holds_its_blocks_also_before_its_first_chunk_is_told():
    """The engine has the last token before its worker tells of the step that gave it."""
    world = World(0, is_direct=False)
    nonce = NONCES[0]
    request = world.requests[nonce]
    world.begin(nonce)
    assert request.is_registered
    request.num_steps = len(EDGES) - 1
    world.finish(nonce)
    world.leases.release(nonce, world.clock.now_s, LeaseEnd.RELEASED)
    world.tick()
    assert not request.is_settled
    request.num_steps = 0
    for _ in EDGES[1:]:
        world.run_step(nonce, layerwise=False)
    world.nothing_in_flight_can_harm()
    world.let_all_end()
    assert request.is_settled
    assert [type(report) for report in request.reports] == [Received]


def test_p_forgets_the_memory_it_wrote_to_also_if_it_was_told_to_end_over_another_connection():
    """D's agent was made again for the sake of another P, while a write of this one was stuck."""
    world = World(0, is_direct=True)
    world.begin(NONCES[0])
    world.run_step(NONCES[0], layerwise=False)
    world.post()
    world.fence("another P was lost")
    world.p_notices()
    world.reconnect()
    world.calm(3)
    assert isinstance(world.seen_by_p[-1], Abort)
    world.let_all_end()
    assert not world.nic.known


@pytest.mark.parametrize("change", [{"num_units": 1 << 40}, {"stride_bytes": 4}], ids=str)
def test_blocks_in_a_pool_of_another_size_are_refused(change):
    world = World(0, is_direct=False)
    assert world.destination is not None
    hello = world.destination.hello
    world.destination.hello = msgspec.structs.replace(
        hello, pool=msgspec.structs.replace(hello.pool, **change)
    )
    world.begin(NONCES[0])
    world.take_reports()
    (report,) = world.requests[NONCES[0]].reports
    assert f"it has {1 << 40}" in report.detail or "of 4" in report.detail


def test_a_write_that_never_ends_ends_its_push_though_both_sides_are_alive():
    world = World(0, is_direct=False)
    nonce = NONCES[0]
    world.begin(nonce)
    world.run_step(nonce, layerwise=False)
    world.post()
    assert world.nic.posted
    world.nic.posted[0].posted_s = world.clock.now_s
    for _ in range(8):
        assert not world.pushing._pushes[nonce].ending
        world.let_time_pass(1.0, is_heard=True)
        world.calm(3)
    assert world.pushing._pushes[nonce].ending
    world.let_all_end()
    assert [report.reason for report in world.requests[nonce].reports] == [LoadFailure.WITHDRAWN]


def test_a_release_that_overtakes_what_a_rank_of_d_has_checked_is_no_fault():
    """Each rank of D has a connection of its own, and the release comes over one of them."""
    world = World(0, is_direct=False)
    nonce = NONCES[0]
    world.begin(nonce)
    for _ in EDGES[1:]:
        world.run_step(nonce, layerwise=False)
    world.finish(nonce)
    while not any(isinstance(message, Taken) for message in world.to_p):
        world.post()
        world.land(None)
        world.calm(1)
        world.digest_at_d(is_bad=False)
    world.take_reports()
    world.release(nonce, LeaseEnd.READ)
    taken, release = world.to_p
    world.tell_p(release)
    assert not world.pushing.num_live
    world.tell_p(taken)
    assert not world.pushing.faults
    world.tell_p(taken)
    assert world.pushing.faults == {"push_unexpected": 1}, "said twice"
