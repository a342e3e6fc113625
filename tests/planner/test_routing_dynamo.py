"""What Dynamo's selector knows when it chooses does not depend on how fast it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.routing import served, settings_of
from benchmarks.routing_dynamo import serve
from benchmarks.routing_work import conversations
from pdserve.planner.fleet import Fleet
from pdserve.planner.work import parse_layout
from tests.scheduler.invariants import assert_nothing_held

pytestmark = pytest.mark.slow

STAND_IN = Path(__file__).with_name("selector_stand_in.py")
READERS = Path(__file__).parents[2] / ".venv-readers" / "bin" / "python"
TURNS = conversations(12, 40.0, num_turns=3, num_systems=2, seed=1)


def run(way, path):
    """Return outcomes, what the stand-in was told of bookings, and what each engine computed."""
    fleet = Fleet(parse_layout("2P2D"), settings_of("least_loaded"))
    command = [sys.executable, STAND_IN, way, path]
    patience_s = 3.0 if way == "deaf" else 20.0
    outcomes = serve(fleet, TURNS, command, counts_blocks=True, patience_s=patience_s)
    for engine in fleet.engines.values():
        assert_nothing_held(engine.scheduler)
    told = [json.loads(line) for line in path.read_text().splitlines()]
    computed = [engine.scheduler.stats().num_step_tokens for engine in fleet.engines.values()]
    return outcomes, told, computed


def test_a_slow_selector_chooses_as_a_prompt_one(tmp_path):
    prompt, slow = (run(way, tmp_path / way) for way in ("prompt", "slow"))
    assert slow == prompt
    assert all(each.end_s is not None for each in prompt[0])
    assert sum(each.num_cached for each in prompt[0]) > 0


def test_each_booking_is_completed_with_the_first_token_and_freed_with_the_end(tmp_path):
    _, told, _ = run("prompt", tmp_path / "told")
    by_request = {}
    for method, request_id, engine in told:
        by_request.setdefault(request_id, []).append((method, engine))
    methods = ("create_reservation", "prefill_complete", "free_reservation")
    assert len(by_request) == len(TURNS)
    for lines in by_request.values():
        engine = lines[0][1]
        assert lines == [(method, engine) for method in methods]
    assert {engine for *_, engine in told} == {0, 1}


def test_requests_go_where_the_selector_has_them_go(tmp_path):
    _, _, (first, last, *_) = run("last", tmp_path / "told")
    assert first == 0
    assert last > 0


def test_a_selector_that_reads_no_events_is_an_error(tmp_path):
    with pytest.raises(
        TimeoutError, match=r"has not read the KV events of \['http://p0', 'http://p1'\]"
    ):
        run("deaf", tmp_path / "told")


def test_a_selector_that_does_not_find_what_the_caches_have_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"finds .* blocks of .*, the caches have"):
        run("forgetful", tmp_path / "told")


@pytest.mark.matrix
@pytest.mark.parametrize("policy", ["selection_service", "selection_service_tokens"])
def test_the_released_selector_serves_a_workload(policy):
    if not READERS.exists():
        pytest.skip("make readers brings Dynamo's selector")
    outcomes = served(TURNS, "2P2D", policy, READERS)
    blind = served(TURNS, "2P2D", "least_loaded", None)
    assert all(each.end_s is not None for each in outcomes)
    assert sum(each.num_cached for each in outcomes) > sum(each.num_cached for each in blind)
