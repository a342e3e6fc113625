"""What must hold of a scheduler: always, and when nothing is left of any request."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pdserve.kvcache.lease import BlockUser
from pdserve.scheduler.life import State, Wait

if TYPE_CHECKING:
    from pdserve.scheduler.scheduler import Scheduler
    from pdserve.scheduler.state import SchedulerState
    from pdserve.wire.ids import BlockId


def assert_nothing_held(scheduler: Scheduler) -> None:
    """Raise AssertionError, with the stories, if anything of any request is left."""
    state = scheduler.state
    stories = "\n".join(request.story() for request in state.requests.values())
    assert not state.requests, f"requests are left:\n{stories}"
    assert not state.running
    assert not state.receiving
    assert not state.leased
    assert not state.prompts
    assert not state.holds, f"blocks of preempted requests are held: {list(state.holds)}"
    assert not len(state.waiting)
    assert not state.steps.num_known
    assert not len(state.steps)
    assert not state.kv.ledger.holdings
    assert state.kv.pool.num_free == state.kv.pool.num_blocks
    state.kv.pool.check()


def check(scheduler: Scheduler) -> None:
    """Raise AssertionError if an invariant is broken. O(requests + blocks)."""
    state = scheduler.state
    _check_blocks(state)
    num_waiting = 0
    places = {
        State.RECEIVING: state.receiving,
        State.RUNNING: state.running,
        State.LEASED: state.leased,
    }
    for request in state.requests.values():
        is_waiting = request.state is State.WAITING
        num_waiting += is_waiting
        assert (request.holding is None) == is_waiting, request.story()
        assert bool(request.waits_for) == (request.state is State.CLOSING), request.story()
        is_prompt = request.request_id in state.prompts
        assert not (is_prompt and request.output_token_ids), request.story()
        for where, place in places.items():
            is_there = place.get(request.request_id) is request
            assert is_there == (request.state is where), request.story()
        if request.holding is None:
            continue
        is_quarantined = request.holding.user is BlockUser.QUARANTINED
        assert is_quarantined == bool(request.waits_for - {Wait.STEP}), request.story()
    assert num_waiting == len(state.waiting)
    for place in places.values():
        assert place.keys() <= state.requests.keys(), "a request that is gone has a place"


def _check_blocks(state: SchedulerState) -> None:
    state.kv.pool.check()
    state.kv.ledger.check()
    refs: Counter[BlockId] = Counter()
    for holding in state.kv.ledger.holdings:
        refs.update(holding.blocks)
    held = {request.holding for request in state.requests.values() if request.holding}
    held |= set(state.holds.values())
    assert held == state.kv.ledger.holdings, "a holding belongs to no request"
    assert len(refs) == state.kv.pool.num_blocks - state.kv.pool.num_free
    for request in state.running.values():
        assert request.holding is not None
        capacity = len(request.holding.blocks) * state.kv.block_size
        assert request.num_computed_tokens <= capacity, request.story()
