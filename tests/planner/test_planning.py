"""Which layout is found for workloads whose answer is known, and how sure it says it is."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from pdserve.bench.goodput import parse_goodput
from pdserve.bench.records import Planned
from pdserve.config.boxed import boxed_model_dir
from pdserve.errors import ConfigError
from pdserve.planner.candidates import demand_of, splits
from pdserve.planner.figures import load_figures
from pdserve.planner.fleet import Fleet
from pdserve.planner.planning import Planner, PlanQuestion, TimesError, longer, rank
from pdserve.planner.work import FleetCosts, FleetLayout, Work, parse_layout, workload_of
from pdserve.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

COSTS = FleetCosts()
SETTINGS = {
    "prefill_policy": "prefix_sticky",
    "decode_policy": "prefix_sticky",
    "split_policy": "always",
    "itl_slo_s": 0.03,
}
JOINT = SETTINGS | {"split_policy": "predicted"}


def work(num: int, per_s: float, num_prompt: int, num_output: int) -> list[Work]:
    """Requests at equal distances, no two of which begin alike."""
    return [
        Work(i / per_s, [1 + (i * 977 + j) % 40_000 for j in range(num_prompt)], num_output)
        for i in range(num)
    ]


def planner(workload: list[Work], *, slo=("ttft:1000", "tpot:30"), off=0.2, **settings) -> Planner:
    question = PlanQuestion(
        workload=workload,
        slos=parse_goodput(slo),
        share=0.9,
        settings=SETTINGS | settings,
        costs=COSTS,
        error=TimesError(prefill=off, step=off, wire=off),
        size=FleetLayout(0, 0, max_num_seqs=128),
    )
    return Planner(question)


PROMPTS = work(24, 16.0, 3000, 8)
"""Two engines for prompts are next to full."""


@pytest.mark.parametrize(
    ("workload", "first"), [(PROMPTS, "3P1D"), (work(40, 20.0, 100, 2000), "1P3D")]
)
def test_layouts_are_tried_by_what_keeps_engines_busy(workload, first):
    found = splits(4, demand_of(workload, COSTS), COSTS, 0.03)
    assert str(found[0]) == first
    assert {str(each) for each in found} == {"1P3D", "2P2D", "3P1D"}


def test_the_best_layout_is_the_one_in_which_most_requests_keep_their_objectives():
    plan = planner(PROMPTS, slo=("ttft:400", "tpot:30")).plan(4)
    assert plan.best in {"3P1D", "4B"}
    shares = [each.figures.goodput for each in plan.rows]
    assert shares == sorted(shares, reverse=True)
    assert {each.layout for each in plan.rows} == {"1P3D", "2P2D", "3P1D", "4B"}
    assert next(each for each in plan.rows if each.layout == "1P3D").figures.goodput < 0.6


def test_as_few_engines_are_found_as_hold_the_objectives():
    light = planner(work(12, 1.0, 500, 20)).plan(4)
    assert light.fewest is not None
    assert light.fewest.layout == "1B"
    assert light.highest_load > 2
    heavy = planner(PROMPTS, slo=("ttft:300", "tpot:30")).plan(1)
    assert not heavy.rows[0].holds
    assert heavy.fewest is not None
    assert 2 <= heavy.fewest.num_engines <= 4
    assert heavy.highest_load < 1


@pytest.mark.matrix
def test_longer_times_make_the_lower_end_of_the_range():
    tight = planner(PROMPTS, slo=("ttft:260", "tpot:30"), off=0.3)
    plan = tight.plan(0, [parse_layout("3P1D")])
    low, high = plan.goodput_range
    assert low < plan.rows[0].figures.goodput <= high
    assert plan.fewest is plan.rows[0]


def test_times_are_longer_by_their_own_error_and_a_hop_is_as_it_is():
    off = TimesError(prefill=0.1, step=0.5, wire=0.2)
    times = longer(COSTS, off, 1.0)
    assert times.prefill_token == pytest.approx(1.1 * COSTS.prefill_token)
    assert times.decode == pytest.approx(1.5 * COSTS.decode)
    assert times.wire_token == pytest.approx(1.2 * COSTS.wire_token)
    assert times.hop == COSTS.hop
    assert longer(COSTS, off, 0.0) == COSTS


def test_of_given_layouts_the_fewest_engines_are_of_one_that_holds():
    layouts = [parse_layout(name) for name in ("4B", "2B", "3P1D")]
    asked = planner(work(12, 1.0, 500, 20))
    fewest = asked.plan(0, layouts).fewest
    assert fewest is not None
    assert fewest.layout == "2B"
    never = planner(work(4, 1.0, 200, 4), slo=("ttft:0.1",)).plan(0, layouts)
    assert never.fewest is None
    assert never.most_engines == 4


def test_of_layouts_that_keep_no_objective_one_that_answers_is_better_than_one_that_does_not():
    answers = planner(work(4, 1.0, 200, 4), slo=("ttft:0.1",)).row(parse_layout("1P1D"))
    none = dict.fromkeys(("ttft_p99_ms", "tpot_p99_ms"), 0.0)
    silent = msgspec.structs.replace(answers.figures, num_failed=4, **none)
    assert rank(answers) < rank(msgspec.structs.replace(answers, figures=silent))


def test_a_request_as_long_as_a_cache_is_served():
    size = FleetLayout(0, 0, 1, kv_tokens=310, max_model_len=310)
    [served] = Fleet(size, SETTINGS).run(work(1, 1.0, 300, 10))
    assert served.end_s is not None


def test_an_objective_that_nobody_can_keep_has_no_layout_and_no_load():
    plan = planner(work(4, 1.0, 200, 4), slo=("ttft:0.1",)).plan(1)
    assert plan.fewest is None
    assert plan.highest_load is None


def test_each_layout_is_simulated_once_and_told():
    told: list[str] = []
    asked = planner(work(4, 1.0, 200, 4))
    asked.on_simulated = lambda number, layout, figures: told.append(layout)
    asked.plan(2)
    at_this_load = told[: told.index("1B") + 1]
    assert len(at_this_load) == len(set(at_this_load)) + 2  # the best one, longer and shorter


def test_what_a_client_would_have_seen_is_what_the_fleet_says():
    fleet = Fleet(parse_layout("1P1D"), SETTINGS)
    workload = work(3, 2.0, 300, 6)
    outcomes = fleet.run(workload)
    seen = [each.as_measured(number) for number, each in enumerate(outcomes)]
    for outcome, measured in zip(outcomes, seen, strict=True):
        assert measured.ttft_s == pytest.approx(outcome.ttft_s)
        assert measured.tpot_s == pytest.approx(outcome.tpot_s)
        assert len(measured.chunk_s) == 6
    figures = load_figures(seen, parse_goodput(["ttft:1000"]))
    assert (figures.num_good, figures.num_failed, figures.goodput) == (3, 0, 1.0)


def test_a_turn_comes_when_the_one_before_it_has_ended_and_stands_behind_it():
    first, *_ = work(1, 1.0, 300, 6)
    second = Work(0.0, [7] * 40, 5, after=0, delay_s=2.0)
    third = dataclasses.replace(second, after=1)
    outcomes = Fleet(parse_layout("1P1D"), SETTINGS).run([first, second, third])
    assert [each.num_prompt for each in outcomes] == [300, 346, 391]
    assert outcomes[1].at_s == pytest.approx(outcomes[0].end_s + 2.0, abs=0.01)
    assert outcomes[2].end_s is not None
    assert outcomes[2].num_cached >= 256


def test_a_proxy_that_was_taught_decides_from_the_first_request_on():
    workload = work(2, 1.0, 600, 8)
    new, taught = (Fleet(parse_layout("1P1D"), JOINT) for _ in range(2))
    taught.teach(workload)
    assert new.run(workload)[0].predicted_s is None
    predicted = taught.run(workload)[0]
    assert predicted.predicted_s == pytest.approx(predicted.ttft_s, rel=0.3)


def test_requests_that_are_all_due_at_once_are_no_load():
    tokenizer = Tokenizer.from_directory(boxed_model_dir())
    requests = [Planned(index=i, prompt=[1], max_tokens=2, at_s=0.0) for i in range(2)]
    with pytest.raises(ConfigError, match="--request-rate"):
        workload_of(requests, tokenizer)


def test_a_workload_is_as_long_and_as_alike_as_what_is_sent():
    tokenizer = Tokenizer.from_directory(boxed_model_dir())
    requests = [
        Planned(index=4, prompt=[5, 6], max_tokens=2, at_s=0.5),
        Planned(index=7, prompt="What is it?", max_tokens=3, after=4, delay_s=1.5),
    ]
    assert workload_of(requests, tokenizer) == [
        Work(0.5, [5, 6], 2),
        Work(0.0, tokenizer.encode("What is it?"), 3, after=0, delay_s=1.5),
    ]


@pytest.mark.parametrize("text", ["", "4", "4P", "3D", "2D1P", "0B"])
def test_what_is_no_layout_is_refused(text):
    with pytest.raises(ConfigError, match=f"--layout is '{text}'"):
        parse_layout(text)
