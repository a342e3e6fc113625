"""What is told of requests that have ended, and how little the ring of them keeps."""

from __future__ import annotations

import tracemalloc

import pytest

from pdserve.observe.clock import ManualClock
from pdserve.proxy.live import MAX_BYTES_EACH, MAX_EVENTS, finished, times_in_words
from pdserve.proxy.story import LadderRung, Mode, Stage, Story
from pdserve.wire.finished import NUM_KEPT, FinishedRequests
from pdserve.wire.hop import EngineStages
from pdserve.wire.transfer import KVMode


def ended(clock: ManualClock, request_id: str = "a", *, wait_s: float = 0.01) -> Story:
    story = Story(request_id, "/v1/completions", clock)
    story.mode, story.streamed, story.kv_mode = Mode.DISAGGREGATED, True, KVMode.PUSH
    story.queued()
    clock.advance(0.001)
    story.admitted()
    story.leg_sent(Stage.PREFILL, "http://p")
    story.receiver_sent("http://d")
    clock.advance(wait_s)
    story.first_token(clock.monotonic_s())
    story.prefill_stages = EngineStages(queue_s=0.001, prefill_s=wait_s / 2)
    story.decode_stages = EngineStages(kv_mode="push", kv_bytes=99, first_step_s=0.001)
    for gap_s in (0.002, 0.005, 0.006, 0.019):
        clock.advance(gap_s)
        story.chunk(clock.monotonic_s())
    story.num_prompt_tokens, story.num_output_tokens = 7, 5
    return story


def keep(recent: FinishedRequests, story: Story) -> None:
    recent.add(finished(story, "ok", seq=recent.next_seq))


def test_a_finished_request_tells_what_its_log_line_tells() -> None:
    clock = ManualClock()
    story = ended(clock)
    story.climbed(LadderRung.OTHER_DECODE, "dropped")
    told = finished(story, "ok", seq=1)
    assert told.line.endswith(times_in_words(story))
    assert told.ttft_ms == pytest.approx(11)
    assert sum(told.ttft_terms.values()) == pytest.approx(told.ttft_ms, abs=1e-3)
    assert told.second_token_ms == pytest.approx(2)
    assert sum(told.second_token_terms.values()) == pytest.approx(2, abs=1e-3)
    assert told.itl_p50_ms == pytest.approx(6.0, rel=0.004)
    assert (told.itl_max_ms, told.num_gaps) == (19.0, 3)
    assert (told.kv_mode, told.kv_bytes, told.rungs) == ("push", 99, ["other_decode"])
    assert told.rung_reasons == ["dropped"]
    assert (told.prefill, told.decode) == ("http://p", "http://d")
    assert (told.prompt_tokens, told.output_tokens) == (7, 5)
    assert told.times_ms["first_token"] == pytest.approx(11)


def test_the_newest_come_first_and_only_those_after_a_number_or_a_time() -> None:
    clock, recent = ManualClock(), FinishedRequests(num_kept=3)
    for name in "abcd":
        keep(recent, ended(clock, name))
        end_s = clock.monotonic_s()
        clock.advance(1)
    assert [told.request_id for told in recent.since(0)] == ["d", "c", "b"]
    assert [told.request_id for told in recent.since(end_s)] == ["d"]
    assert recent.as_json(1).startswith(b'[{"seq":4,')
    assert recent.as_json(9, after_seq=3).count(b'"seq"') == 1
    assert recent.as_json(0) == b"[]"


def test_the_slowest_are_those_with_the_longest_time_to_the_first_token() -> None:
    clock, recent = ManualClock(), FinishedRequests()
    for name, wait_s in (("a", 0.2), ("b", 0.1), ("c", 0.3), ("d", 0.01)):
        keep(recent, ended(clock, name, wait_s=wait_s))
    found = recent.slowest(2, since_s=0)
    assert [told.request_id for told in found] == ["c", "a"]


def test_a_request_without_a_first_token_has_no_time_to_it() -> None:
    clock = ManualClock()
    story = Story("a", "/v1/completions", clock)
    clock.advance(0.5)
    told = finished(story, "shed", seq=1)
    assert (told.ttft_ms, told.ttft_terms, told.itl_p50_ms) == (None, {}, None)
    assert told.total_ms == 500


def test_a_request_that_was_served_by_one_engine_names_no_other() -> None:
    story = Story("a", "/v1/completions", ManualClock())
    story.leg_sent(Stage.PREFILL, "http://dead")
    story.leg_sent(Stage.LOCAL, "http://d")
    told = finished(story, "ok", seq=1)
    assert (told.prefill, told.decode) == ("", "http://d")


def test_an_entry_stays_small_whatever_happened_to_its_request() -> None:
    clock, recent = ManualClock(), FinishedRequests()
    story = ended(clock, '"' * 128)
    for _ in range(100_000):
        story.token_gaps.add(0.01)
    for _ in range(1000):
        story.climbed(LadderRung.LOCAL, "stream_lost")
        story.tell("\x00" * 10_000)
    keep(recent, story)
    assert len(recent.as_json(1)) < MAX_BYTES_EACH
    assert len(recent.since(0)[0].story) == MAX_EVENTS


@pytest.mark.matrix
def test_a_full_ring_takes_little_more_than_two_kilobytes_for_each() -> None:
    clock, recent = ManualClock(), FinishedRequests()
    tracemalloc.start()
    for number in range(NUM_KEPT + 100):
        keep(recent, ended(clock, f"{number:032x}"))
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(recent) == NUM_KEPT
    assert kept_bytes / NUM_KEPT < 2200
