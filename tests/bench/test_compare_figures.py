"""The table's figures, recomputed from the outcomes; ratios; what is read from the command line."""

from __future__ import annotations

import statistics

import msgspec
import numpy as np
import pytest

from pdserve.bench.compare import console, verdict
from pdserve.bench.compare.result import EngineRates, compact, load, save
from pdserve.bench.compare.summary import (
    Figure,
    beside_prefills,
    better,
    fell_behind,
    figures_of,
    rows,
)
from pdserve.bench.compare.topology import Kind, baseline, pairs, peers, plan, share
from pdserve.bench.figures import figures
from pdserve.bench.records import CoresUsed
from pdserve.bench.validity import judge
from pdserve.config.schema import Role
from pdserve.errors import ConfigError
from tests.bench import synthetic


@pytest.fixture
def made():
    return synthetic.comparison()


def row_of(comparison, label, rate=None):
    return next(row for row in rows(comparison, rate) if row.label == label)


class TestTable:
    def test_ttft_is_the_median_over_runs_of_each_runs_percentile(self, made):
        p99 = [
            np.percentile([(o.chunk_s[0] - o.sent_s) * 1e3 for o in run.outcomes], 99)
            for run in made.runs("P/D 1:1", None)
        ]
        value = row_of(made, "P/D 1:1").values[Figure.TTFT_P99]
        assert (value.median, value.low, value.high) == pytest.approx(
            (statistics.median(p99), min(p99), max(p99))
        )

    def test_itl_is_of_the_gaps_of_the_steady_decoders_alone(self, made):
        p99 = [
            np.percentile(
                [
                    gap * 1e3
                    for o in run.outcomes
                    if o.group == "steady"
                    for gap in np.diff(o.chunk_s)
                ],
                99,
            )
            for run in made.runs("colocated", None)
        ]
        value = row_of(made, "colocated").values[Figure.ITL_P99]
        assert value.median == pytest.approx(statistics.median(p99))

    def test_throughput_counts_the_tokens_of_all_requests(self, made):
        run = made.runs("colocated", None)[0]
        tokens = sum(o.num_output_tokens for o in run.outcomes)
        assert figures_of(run, [])[Figure.THROUGHPUT] == pytest.approx(tokens / run.duration_s)

    def test_prompt_tokens_that_no_cache_had_were_computed(self, made):
        run = made.runs("colocated", None)[0]
        counts = [len([o for o in run.outcomes if o.group == each]) for each in ("steady", "burst")]
        found = figures_of(run, [])
        assert found[Figure.COMPUTED] == counts[0] * 24 + counts[1] * 512
        prompts = counts[0] * 32 + counts[1] * 1024
        assert found[Figure.CACHED] == pytest.approx(100 * (1 - found[Figure.COMPUTED] / prompts))
        silent = msgspec.structs.replace(
            run, outcomes=[msgspec.structs.replace(o, num_cached_tokens=None) for o in run.outcomes]
        )
        assert Figure.CACHED not in figures_of(silent, [])

    def test_goodput_counts_requests_that_keep_every_limit(self, made):
        run = made.runs("2 replicas", None)[0]
        kept = sum(
            o.ttft_s <= 0.2 and (o.chunk_s[-1] - o.chunk_s[0]) / (o.num_output_tokens - 1) <= 0.02
            for o in run.outcomes
        )
        assert 0 < kept < len(run.outcomes)
        assert figures_of(run, made.slos)[Figure.GOODPUT] == pytest.approx(kept / run.duration_s)

    def test_figures_are_those_of_bench_serve(self, made):
        run = made.runs("colocated", None)[0]
        theirs, ours = figures(run, made.slos), figures_of(run, made.slos)
        steady = theirs["pdserve"]["groups"]["steady"]
        assert ours[Figure.TTFT_P99] == pytest.approx(theirs["p99_ttft_ms"])
        assert ours[Figure.ITL_P99] == pytest.approx(steady["p99_itl_ms"])
        assert ours[Figure.TPOT_P50] == pytest.approx(steady["median_tpot_ms"])
        assert ours[Figure.THROUGHPUT] == pytest.approx(theirs["output_throughput"])
        assert ours[Figure.GOODPUT] == pytest.approx(theirs["request_goodput"])

    def test_a_ratio_is_how_many_times_better_than_the_baseline(self, made):
        base, ours = row_of(made, "colocated"), row_of(made, "P/D 1:1")
        ratio = ours.ratios[Figure.ITL_P99].median
        assert ratio == pytest.approx(
            base.values[Figure.ITL_P99].median / ours.values[Figure.ITL_P99].median
        )
        assert ratio > 5

    def test_more_throughput_is_better_and_more_time_is_worse(self):
        assert better(Figure.THROUGHPUT, 20.0, 10.0) == 2.0
        assert better(Figure.TTFT_P50, 20.0, 10.0) == 0.5

    def test_a_failed_request_is_counted_and_gives_no_figure(self, made):
        run = made.runs("colocated", None)[0]
        before = figures_of(run, [])
        one = next(o for o in run.outcomes if o.group == "burst")
        one.error, one.chunk_s = "HTTP 500", []
        assert row_of(made, "colocated").num_failed == 1
        assert figures_of(run, [])[Figure.TTFT_P99] != before[Figure.TTFT_P99]

    def test_a_run_in_which_all_failed_has_no_throughput_and_its_repeats_are_not_alone(self, made):
        for each in made.runs("P/D 1:1", None)[1:]:
            for one in each.outcomes:
                one.error = "HTTP 500"
        value = row_of(made, "P/D 1:1").values[Figure.THROUGHPUT]
        assert (value.median, value.low) == (0.0, 0.0)
        assert Figure.TTFT_P50 in row_of(made, "P/D 1:1").values

    def test_the_console_shows_every_deployment_with_its_ratio(self, made):
        text = console.tables(made)
        for each in made.deployments:
            assert each.label in text
        ratio = row_of(made, "P/D 1:1").ratios[Figure.ITL_P99].median
        assert f"x{ratio:.1f}" in text


class TestWords:
    def test_the_headline_gives_both_figures_and_their_ratio(self, made):
        found = verdict.headline(made, None)
        ours = row_of(made, "P/D 1:1").values[Figure.ITL_P99].median
        theirs = row_of(made, "colocated").values[Figure.ITL_P99].median
        assert f"{ours:.2f} ms with P/D 1:1" in found.text
        assert f"{theirs:.1f} ms with colocated" in found.text
        assert "reached in every run" in verdict.goal_words(found)

    def test_a_goal_that_was_missed_is_said_to_be(self, made):
        measured = [
            msgspec.structs.replace(each, run=made.runs("colocated", None)[each.repeat])
            if each.deployment == "P/D 1:1"
            else each
            for each in made.measured
        ]
        made = msgspec.structs.replace(made, measured=measured)
        assert "missed" in verdict.goal_words(verdict.headline(made, None))

    def test_a_rival_whose_tokens_all_come_at_once_has_no_ratio(self, made):
        for each in made.runs("2 replicas", None):
            for one in each.outcomes:
                one.chunk_s = [one.chunk_s[0]] * len(one.chunk_s)
        assert row_of(made, "2 replicas").values[Figure.ITL_P99].median == 0.0
        found = verdict.headline(made, None)
        assert found.strictest_label == "colocated"
        assert verdict.strictest_words(found).endswith(" times better.")

    def test_equal_deployments_are_not_said_to_differ(self, made):
        measured = [
            msgspec.structs.replace(each, run=made.runs("colocated", None)[each.repeat])
            if each.deployment == "2 replicas"
            else each
            for each in made.measured
        ]
        made = msgspec.structs.replace(made, measured=measured)
        sentence = next(s for s in verdict.sentences(made, None) if s.startswith("2 replicas"))
        assert "better" not in sentence
        assert "worse" not in sentence

    def test_repeats_that_disagree_are_no_difference(self):
        assert verdict.is_within_noise(verdict.Ratio(1.4, 0.9, 2.0))
        assert not verdict.is_within_noise(verdict.Ratio(1.4, 1.3, 2.0))

    def test_a_client_that_was_late_makes_the_headline_say_so(self, made):
        made.measured[0].run.health.valid = False
        made.measured[0].run.health.why_not = ["The client was late."]
        assert "NOT VALID" in verdict.headline(made, None).text
        assert any("The client was late." in line for line in verdict.caveats(made))

    def test_one_run_is_said_to_tell_no_spread(self):
        once = synthetic.comparison(num_runs=1)
        assert any("measured once" in line for line in verdict.caveats(once))

    def test_bursts_that_no_decoder_meets_are_said_to_show_nothing(self, made):
        assert not any("A p99 shows nothing" in line for line in verdict.caveats(made))
        for each in made.measured:
            for one in each.run.outcomes:
                if one.group == "burst":
                    one.sent_s += 50.0
                    one.chunk_s = [at + 50.0 for at in one.chunk_s]
        assert any("A p99 shows nothing" in line for line in verdict.caveats(made))

    def test_a_deployment_that_fell_behind_the_schedule_is_named(self, made):
        made.runs("2 replicas", None)[0].duration_s = 60.0
        assert any("2 replicas fell behind" in line for line in verdict.caveats(made))

    def test_who_fell_behind_is_marked_in_the_table(self, made):
        assert "fell behind" not in console.tables(made)
        made.runs("2 replicas", None)[0].duration_s = 60.0
        assert "fell behind" in console.tables(made)

    def test_a_long_answer_to_the_last_request_is_not_falling_behind(self, made):
        run = made.runs("2 replicas", None)[0]
        due_s = max(one.scheduled_s for one in run.outcomes)
        assert not fell_behind(run)
        run.duration_s = due_s + 20.0
        assert fell_behind(run)
        for one in run.outcomes:
            one.chunk_s = [*one.chunk_s, one.sent_s + 20.0]
        assert not fell_behind(run)

    def test_cores_in_use_are_told_and_whether_they_were_full(self, made):
        def told(**parts: float) -> str:
            for each in made.measured:
                each.run.cores = CoresUsed(num_cores=2, parts=parts, others=0.1)
            return " ".join(verdict.caveats(made))

        quiet = told(engines=1.0, proxy=0.25)
        words = "colocated 1.35 (engines 1.00, proxy 0.25, other programs and the kernel 0.10)"
        assert words in quiet
        assert "cores were fully used" not in quiet
        assert "The 2 cores were fully used by" in told(engines=1.5, proxy=0.3)

    def test_cores_that_others_took_from_one_run_make_the_headline_not_valid(self, made, tmp_path):
        before = verdict.headline(made, None)
        assert before.ratio.median > 1
        run = next(m.run for m in made.measured if m.deployment == made.baseline)
        run.cores = CoresUsed(num_cores=2, parts={"engines": 0.8}, others=1.15)
        run.health = judge(run.outcomes, [], [], cores=run.cores)
        found = verdict.headline(made, None)
        why = (
            f"{made.baseline}: Other programs used 1.15 of the 2 cores, which is over 10% of them."
        )
        assert list(found.why_not) == [why]
        assert found.text == f"{before.text} (NOT VALID: {why})"
        assert verdict.goal_words(found) == "; whether the goal was reached is unknown"
        assert "not valid" in console.tables(made)
        path = tmp_path / "found.json"
        save(made, path, headline=verdict.headline_facts(made, None))
        facts = msgspec.json.decode(path.read_bytes())["headline"]
        assert (facts["valid"], facts["why_not"]) == (False, [why])
        assert why in facts["text"]
        assert any(why.partition(": ")[2] in caveat for caveat in facts["caveats"])
        assert run.cores in [each.run.cores for each in load(path).measured]

    def test_small_differences_of_one_run_are_none(self):
        assert verdict.is_within_noise(verdict.Ratio(1.08, 1.08, 1.08))
        assert not verdict.is_within_noise(verdict.Ratio(1.08, 1.06, 1.09))

    def test_a_machine_that_was_busy_before_is_said_to_have_been(self, made):
        made.environment["load average before"] = "0.40"
        assert not any("busy with other work" in line for line in verdict.caveats(made))
        made.environment["load average before"] = "7.10"
        assert any("load average of 7.10" in line for line in verdict.caveats(made))

    def test_gaps_beside_a_prefill_are_counted_one_by_one(self, made):
        run = made.runs("colocated", None)[0]
        spans = []
        for one in run.outcomes:
            if one.group == "burst":
                start = one.sent_s + (one.stages["proxy"] + one.stages["queue"]) / 1e3
                spans.append((start, start + one.stages["prefill"] / 1e3))
        gaps = [
            pair
            for one in run.outcomes
            if one.group == "steady"
            for pair in zip(one.chunk_s, one.chunk_s[1:], strict=False)
        ]
        met = sum(any(s < end and e > start for s, e in spans) for start, end in gaps)
        assert beside_prefills(run) == (met, len(gaps))


class TestBound:
    RATES = EngineRates(num_cores=1, ctx_rate=20.0, gen_rate=8.0, out_tok_s=960.0)

    def test_the_bound_is_the_formula(self):
        assert self.RATES.bound_per_core == pytest.approx(960 / (1 * 8 / 20 + 1))

    def test_whole_engines_go_at_the_pace_of_the_slower_side(self):
        assert self.RATES.reach(1, 1) == pytest.approx(960)
        assert self.RATES.reach(1, 4) == pytest.approx(20 * 120)


class TestTopologies:
    def test_every_deployment_uses_all_cores_and_none_twice(self):
        kinds = [Kind.COLOCATED, Kind.REPLICAS, Kind.UNCHUNKED, Kind.DISAGGREGATED]
        for topology in plan(kinds, [(1, 1), (2, 1), (1, 3)], range(4)):
            cores = [core for engine in topology.engines for core in engine.cores]
            assert sorted(cores) == [0, 1, 2, 3], topology.label

    def test_a_ratio_gives_so_many_engines_of_each_role(self):
        (found,) = plan([Kind.DISAGGREGATED], [(2, 1)], range(3))
        assert [e.role for e in found.engines] == [Role.PREFILL, Role.PREFILL, Role.DECODE]
        assert found.label == "P/D 2:1"

    def test_replicas_are_as_many_as_the_engines_of_the_largest_ratio(self):
        (found,) = plan([Kind.REPLICAS], [(1, 1), (2, 1)], range(6))
        assert [e.cores for e in found.engines] == [(0, 1), (2, 3), (4, 5)]

    def test_each_chunk_size_is_a_deployment(self):
        found = plan([Kind.COLOCATED, Kind.UNCHUNKED], [], range(2), chunk_tokens=[512, 128])
        assert [t.chunk_tokens for t in found] == [512, 128, None]
        assert [t.is_chunked for t in found] == [True, True, False]
        assert len({t.label for t in found}) == 3

    def test_engines_that_outnumber_the_cores_share_them_role_by_role(self):
        def cores(ratio: tuple[int, int], num: int) -> list[tuple[int, ...]]:
            (found,) = plan([Kind.DISAGGREGATED], [ratio], range(num), may_share=True)
            return [engine.cores for engine in found.engines]

        assert cores((2, 1), 2) == [(0,), (0,), (1,)]
        assert cores((1, 2), 2) == [(0,), (1,), (1,)]
        assert cores((3, 3), 4) == [(0,), (1,), (0,), (2,), (3,), (2,)]
        assert cores((1, 1), 1) == [(0,), (0,)]

    def test_a_crowded_deployment_says_which_engines_share_a_core(self):
        (crowded,) = plan([Kind.DISAGGREGATED], [(2, 1)], [4, 5], may_share=True)
        assert crowded.crowded == {4: ["prefill0", "prefill1"]}
        (roomy,) = plan([Kind.DISAGGREGATED], [(1, 1)], [4, 5], may_share=True)
        assert not roomy.crowded

    def test_there_are_no_more_replicas_than_cores(self):
        (found,) = plan([Kind.REPLICAS], [(2, 1)], range(2), may_share=True)
        assert (found.label, [e.cores for e in found.engines]) == ("2 replicas", [(0,), (1,)])

    def test_more_engines_than_gpus_are_refused_with_what_helps(self):
        with pytest.raises(ConfigError, match=r"3 engines need 3 GPUs.* with --gpus"):
            plan([Kind.DISAGGREGATED], [(2, 1)], range(2), what="GPUs")

    def test_more_engines_than_cores_are_refused(self):
        with pytest.raises(ConfigError, match="3 engines need 3 cores, but only 2 can be used"):
            plan([Kind.DISAGGREGATED], [(2, 1)], range(2))

    def test_cores_that_do_not_divide_go_to_the_first(self):
        assert share([5, 6, 7], 2) == [(5, 6), (7,)]

    @pytest.mark.parametrize("word", ["1", "1:0", "a:b", "1:1:1", ""])
    def test_what_is_no_ratio_is_refused(self, word):
        with pytest.raises(ConfigError, match="--pd"):
            pairs([word])

    def test_a_peer_may_have_a_label(self):
        with_label, without = peers(["vllm=http://a:1/v1", "http://b:2"])
        assert (with_label.label, with_label.url) == ("vllm", "http://a:1")
        assert (without.label, without.url) == ("b:2", "http://b:2")

    def test_a_peer_without_url_is_refused(self):
        with pytest.raises(ConfigError, match="--peer is 'vllm'"):
            peers(["vllm"])

    def test_the_baseline_is_colocated_with_chunks_wherever_it_stands(self):
        kinds = [Kind.UNCHUNKED, Kind.DISAGGREGATED, Kind.COLOCATED]
        assert baseline(plan(kinds, [(1, 1)], range(2))) == "colocated"


class TestFile:
    def test_a_saved_comparison_gives_the_same_table(self, made, tmp_path):
        path = tmp_path / "c.json"
        save(made, path)
        assert console.tables(load(path)) == console.tables(made)

    def test_rounding_times_to_be_kept_changes_no_figure_by_more_than_it_may(self, made):
        run = synthetic.run("colocated")
        before, after = figures_of(run, made.slos), figures_of(compact(run), made.slos)
        for figure, value in before.items():
            assert after[figure] == pytest.approx(value, abs=0.021), figure

    def test_what_is_no_comparison_is_refused(self, tmp_path):
        (tmp_path / "c.json").write_text('{"format":"pdserve-comparison-1"}')
        with pytest.raises(ConfigError, match="is not a saved comparison"):
            load(tmp_path / "c.json")
