"""The log line: its figures add up, whatever the engines say."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.observe.clock import ManualClock
from pdserve.proxy.live import finished, times_in_words
from pdserve.proxy.story import Gaps, Mode, Stage, Story
from pdserve.wire.hop import EngineStages
from pdserve.wire.transfer import KVMode

seconds = st.floats(0, 5)


def told(
    clock: ManualClock,
    waits: list[float],
    prefill: EngineStages | None,
    decode: EngineStages | None,
) -> Story:
    story = Story("3f2a", "/v1/completions", clock)
    story.mode, story.streamed = Mode.DISAGGREGATED, True
    story.queued()
    clock.advance(waits[0])
    story.admitted()
    clock.advance(waits[1])
    story.leg_sent(Stage.PREFILL, "http://p")
    clock.advance(waits[2])
    story.leg_sent(Stage.PREFILL, "http://q")
    clock.advance(waits[3])
    story.first_token(clock.monotonic_s())
    story.prefill_stages, story.decode_stages = prefill, decode
    clock.advance(waits[4])
    story.chunk(clock.monotonic_s())
    clock.advance(waits[5])
    story.chunk(clock.monotonic_s())
    return story


def printed_sum(line: str, start: str) -> tuple[float, float]:
    """(the total, the sum of its terms) of the part of a line that begins with `start`."""
    part = line[line.index(start) + len(start) :].split(" | ", maxsplit=1)[0]
    total, _, terms = part.partition("ms = ")
    values = [
        float(re.search(r"(-?\d+\.\d)(?: \(|$)", term.strip()).group(1))
        for term in re.sub(r"\([^)]*\)", "", terms).split(" + ")
    ]
    return float(total), round(sum(values), 1)


stages = st.builds(
    EngineStages,
    handover_s=seconds,
    kv_mode=st.sampled_from(["", "pull", "push"]),
    queue_s=seconds,
    prefill_s=seconds,
    kv_wait_s=seconds,
    kv_transfer_s=seconds,
    first_step_s=seconds,
    kv_bytes=st.integers(0, 10**9),
)


@given(st.lists(seconds, min_size=6, max_size=6), stages, stages)
def test_both_sums_of_the_line_add_up_as_printed(waits, prefill, decode):
    line = times_in_words(told(ManualClock(), waits, prefill, decode))
    for start in ("ttft=", "second token +"):
        total, terms = printed_sum(line, start)
        assert terms == pytest.approx(total, abs=0.05), line


@given(st.lists(seconds, min_size=6, max_size=6), st.none() | stages)
def test_the_terms_are_never_negative_and_sum_to_the_measured_time(waits, told_stages):
    story = told(ManualClock(), waits, told_stages, told_stages)
    terms = story.ttft_terms()
    assert all(value >= -1e-9 for value in terms.values())
    assert sum(terms.values()) == pytest.approx(sum(waits[:4]))
    if terms := story.second_token_terms():
        assert all(value >= -1e-9 for value in terms.values())
        assert sum(terms.values()) == pytest.approx(waits[4])


def test_the_line_reads_as_promised():
    prefill = EngineStages(queue_s=0.0004, prefill_s=0.0319)
    decode = EngineStages(
        kv_wait_s=0.0, kv_transfer_s=0.0063, first_step_s=0.0036, kv_bytes=8_400_000
    )
    story = told(ManualClock(0.0), [0, 0.0005, 0, 0.0327, 0.0121, 0.0061], prefill, decode)
    assert times_in_words(story) == (
        " ttft=33.2ms = proxy 0.5 + queue 0.4 + prefill 31.9 + relay 0.4"
        " | second token +12.1ms = kv 6.3 (8.4 MB, 1.3 GB/s) + handover 2.2 + first step 3.6"
        " | itl p50 6.1 max 6.1"
    )


def test_the_line_says_what_of_the_terms_was_waiting_for_the_peer_and_for_a_running_step():
    decode = EngineStages(
        kv_wait_s=0.0011,
        kv_transfer_s=0.0063,
        kv_digest_s=0.0004,
        first_step_s=0.0036,
        step_wait_s=0.0005,
        kv_bytes=8_400_000,
    )
    story = told(ManualClock(0.0), [0, 0, 0, 0, 0.0121, 0], None, decode)
    assert (
        "second token +12.1ms = kv 7.4 (wait 1.1, 8.4 MB, 1.3 GB/s, digest 0.4)"
        " + handover 1.1 (step 0.5) + first step 3.6" in times_in_words(story)
    )


@pytest.mark.parametrize(
    ("handover_s", "told_kv"),
    [
        (0.0100, "kv 0.0 (of 6.3, "),  # it was all here before the first token
        (0.0075, "kv 1.0 (of 6.3, "),  # the last of it came 1 ms behind
        (0.0010, "kv 6.3 ("),  # all of it may have
    ],
)
def test_of_a_push_only_what_comes_behind_the_first_token_delays_the_second(handover_s, told_kv):
    decode = EngineStages(
        queue_s=0.002,
        kv_wait_s=0.03,
        kv_transfer_s=0.0063,
        handover_s=handover_s,
        first_step_s=0.0036,
        kv_bytes=8_400_000,
        kv_mode="push",
    )
    story = told(ManualClock(0.0), [0, 0, 0, 0, 0.0121, 0], None, decode)
    assert f"second token +12.1ms = {told_kv}" in times_in_words(story)
    terms = story.second_token_terms()
    assert terms["first_step"] == 0.0036
    assert sum(terms.values()) == pytest.approx(0.0121)


def test_what_the_decode_engine_computed_again_has_a_term_of_its_own():
    decode = EngineStages(queue_s=0.001, prefill_s=0.009, load_failures=("lease_lost",))
    story = told(ManualClock(0.0), [0, 0, 0, 0, 0.0121, 0], None, decode)
    assert (
        "second token +12.1ms = decode queue 1.0 + kv 0.0 + recompute 9.0 + handover 2.1"
        " + first step 0.0" in times_in_words(story)
    )


def test_the_line_says_what_a_store_had_of_the_prompt():
    prefill = EngineStages(
        prefill_s=0.0319, prompt_tokens=4096, store_tokens=3072, store_bytes=21_000, store_s=1e-5
    )
    story = told(ManualClock(0.0), [0, 0, 0, 0.04, 0.0121, 0], prefill, EngineStages())
    assert times_in_words(story).endswith(" | kv from store 3072 of 4096, 2.1 GB/s")


def test_a_request_that_never_got_a_token_has_no_times():
    assert times_in_words(Story("3f2a", "/v1/completions", ManualClock())) == ""


def test_the_path_is_how_its_kv_came_and_nothing_before_an_engine_was_asked():
    story = Story("3f2a", "/v1/completions", ManualClock())
    assert finished(story, "ok", seq=1).kv_path == ""
    story.leg_sent(Stage.LOCAL, "http://p")
    assert finished(story, "ok", seq=1).kv_path == "local"
    story.mode, story.kv_mode = Mode.DISAGGREGATED, KVMode.PUSH
    story.prefill_stages = EngineStages(store_tokens=32)
    assert finished(story, "ok", seq=1).kv_path == "push+store"


def test_gaps_are_told_exactly_enough_and_stay_small_however_many_there_are() -> None:
    rng = random.Random(1)
    drawn = sorted(rng.lognormvariate(-5.0, 1.0) for _ in range(20_001))
    gaps = Gaps()
    for gap_s in drawn:
        gaps.add(gap_s)
    assert gaps.median_s == pytest.approx(drawn[10_000], rel=0.004)
    assert gaps.max_s == drawn[-1]
    assert sum(number for _, number in gaps) == len(gaps) == len(drawn)
    assert sum(gap_s * number for gap_s, number in gaps) == pytest.approx(sum(drawn), rel=0.004)
    assert len(list(gaps)) < 2000


def test_gaps_of_a_clock_that_stands_still_are_counted() -> None:
    gaps = Gaps()
    gaps.add(0.0)
    assert (len(gaps), gaps.median_s, gaps.max_s) == (1, 0.0, 0.0)
