"""Several proxies before the same engines: each counts what others have sent there."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.routing import figures, settings_of
from benchmarks.routing_work import greedy
from pdserve.observe.clock import ManualClock
from pdserve.planner.fleet import Fleet
from pdserve.planner.work import least_computed, parse_layout
from pdserve.proxy.brain.decision import repeated
from pdserve.proxy.brain.ledger import WorkLedger
from pdserve.proxy.brain.prompt import RoutePrompt
from pdserve.proxy.brain.work import EngineWork
from pdserve.proxy.policies.choosing import STALE_AFTER_S
from pdserve.wire.events import RoutingLoad
from pdserve.wire.hop import Registration
from pdserve.wire.request import EngineInfo
from tests.proxy.conftest import until
from tests.proxy.scripted import ScriptedEngine
from tests.proxy.test_pairing import learned


def test_others_have_at_an_engine_what_it_counts_beyond_ours_and_as_much_each():
    ledger = WorkLedger(lambda: 0.0)
    with ledger.hold("e", "prefill", 1000, 200), ledger.hold("e", "decode", 600, 0):
        ledger.heard("e", num_prompts=3, num_streams=1)
        others = ledger.of_others("e")
        assert (others.num_prompts, others.prompt_tokens, others.num_streams) == (2, 1600, 0)
        assert ledger.at("e").prompts.num == 3
        ledger.heard("e", num_prompts=0, num_streams=4)  # ours are on their way there
        assert ledger.of_others("e") == EngineWork(num_streams=3, kv_tokens=1800)
        assert ledger.at("e").num_prompts == 1


def test_others_prompts_are_there_until_they_are_computed_and_streams_for_a_while():
    clock = ManualClock(0.0)
    ledger = WorkLedger(clock.monotonic_s, seconds_of=lambda prompts: 0.5 * prompts.num)
    with ledger.hold("elsewhere", "prefill", 1000, 0):
        ledger.heard("e", num_prompts=2, num_streams=2)
    found = []
    for clock.now_s in (0.0, 0.5, 1.0, STALE_AFTER_S, STALE_AFTER_S + 0.1):
        others = ledger.of_others("e")
        found.append((others.num_prompts, others.prompt_tokens, others.num_streams))
    assert found == [(2, 2000, 2), (1, 1000, 2), (0, 0, 2), (0, 0, 2), (0, 0, 0)]


def test_others_may_be_done_before_an_engine_says_so():
    clock = ManualClock(0.0)
    ledger = WorkLedger(clock.monotonic_s, seconds_of=lambda prompts: 0.5 * prompts.num)
    for clock.now_s in (0.0, 0.1):
        ledger.heard("others", num_prompts=2, num_streams=2)
        ledger.heard("idle", num_prompts=0, num_streams=2)
    assert (ledger.report_delay_s("others"), ledger.report_delay_s("idle")) == (0.1, 0.0)
    clock.advance(60.0)
    ledger.heard("others", num_prompts=1, num_streams=0)
    assert ledger.report_delay_s("others") == 0.25, "it says so when it has something to say"


async def test_an_engine_that_others_keep_busy_is_passed_by_and_the_record_says_why(make_stack):
    busy, idle, decode = (ScriptedEngine(role) for role in ("prefill", "prefill", "decode"))
    stack = await make_stack([busy, idle], [decode], split_policy="predicted")
    pairing = stack.proxy.pairing
    pairing.model = learned()
    with pairing.ledger.hold("elsewhere", "prefill", 8000, 0):
        busy.load |= {"num_running": 3, "num_prompts": 3}
        await until(lambda: pairing.ledger.of_others(busy.url).num_prompts == 3)
    for number in range(4):
        await stack.stream({"prompt": [number, *range(3000)], "max_tokens": 4, "seed": 3})
    assert (len(busy.calls), len(idle.calls)) == (0, 4)
    for record in pairing.log.newest():
        question = record.decision.question
        assert {each.url: each.num_others for each in question.candidates}[busy.url] == 3
        assert repeated(record.decision) == record.decision


async def test_an_engine_that_has_left_for_good_is_forgotten_whatever_still_runs_there(make_stack):
    engine = ScriptedEngine("both")
    stack = await make_stack([engine], [engine], split_policy="predicted")
    pairing, url, prompt = stack.proxy.pairing, "http://gone:1", RoutePrompt(0, 1000)
    info = msgspec.convert(ScriptedEngine("decode").info(), EngineInfo)
    registration = Registration(url=url, role="decode", engine=info, lease_s=30.0)
    backend = stack.proxy.backends.register(registration)
    with pairing.hold(backend, "local", prompt, 0) as entry:
        entry.computed()
        pairing.heard(backend, RoutingLoad(num_requests=3))
        assert pairing.ledger.at(url).num_streams == 3
        stack.proxy.backends.deregister(url)
        pairing.heard(backend, RoutingLoad(num_requests=3))  # a check was under way
        with pairing.hold(backend, "local", prompt, 0):  # and a leg
            assert pairing.ledger.at(url) == EngineWork()
    assert (pairing.ledger.at(url), pairing.ledger.busy_s(url)) == (EngineWork(), 0.0)


@pytest.mark.matrix
def test_four_proxies_that_hear_of_one_another_serve_more_than_four_that_do_not():
    workload = greedy(350, 2.4, times=10.0)
    least = least_computed(workload)

    def goodput(**fields: float) -> float:
        fleet = Fleet(parse_layout("2P2D"), settings_of("prefix_sticky/predicted"), **fields)
        return figures(fleet.run(workload), least)["goodput"]

    assert goodput(num_proxies=4) > 1.1 * goodput(num_proxies=4, report_s=1e6)


@pytest.mark.slow
def test_who_is_held_back_for_others_is_sent_where_they_do_not_wait_before_it_is_late():
    workload = greedy(200, 2.4, times=10.0)
    fleet = Fleet(parse_layout("2P2D"), settings_of("prefix_sticky/predicted"))
    fleet.teach(workload)
    outcomes = fleet.run(workload)
    modest = sorted(each.ttft_s for each in outcomes if each.tenant == "modest")
    assert modest[len(modest) // 2] < 0.3, "prefill engines are kept for them"
    decisions = [each.decision for each in fleet.first.pairing.log.newest()]
    round_ = [each for each in decisions if each.question.held_s > 0]
    assert round_
    assert all(each.chosen.prefill.startswith("http://d") for each in round_)
    assert all(repeated(each) == each for each in round_)
