"""The pace of `pd-interference`: what follows from a model's speed, and how that is measured."""

from __future__ import annotations

import json

import pytest

from pdserve.bench.calibration import (
    Speed,
    calibrate,
    flags_of,
    is_needed,
    pace_by,
    usual_gap_s,
)
from pdserve.bench.datasets.prompts import PromptMaker
from pdserve.bench.records import Outcome
from pdserve.bench.runner import Options
from pdserve.bench.target import ApiEndpoint, Target
from pdserve.config.boxed import boxed_model_dir
from pdserve.config.datasets import DatasetConfig, DatasetName, InterferenceConfig, Pace
from pdserve.config.load import build, resolve
from pdserve.config.settings import bench_compare_table
from pdserve.errors import PeerError
from pdserve.text.tokenizer import Tokenizer
from tests.bench.scripted import script, scripted_server
from tests.cli.process import pdserve

pytestmark = pytest.mark.slow

BOXED = Speed(burst_ttft_s=0.05, steady_ttft_s=0.005, itl_s=0.0015)
SLOW = Speed(burst_ttft_s=0.65, steady_ttft_s=0.06, itl_s=0.045)
SPEEDS = [
    BOXED,
    SLOW,
    *(
        Speed(burst_ttft_s=ttft, steady_ttft_s=ttft / 20, itl_s=itl)
        for ttft in (0.02, 0.1, 0.333, 1.3)
        for itl in (0.001, 0.008, 0.03)
    ),
]


def dataset(**fields: object) -> DatasetConfig:
    return DatasetConfig(
        name=DatasetName.PD_INTERFERENCE, interference=InterferenceConfig(**fields)
    )


def paced(speed: Speed, *, max_model_len: int | None = 4096, **fields: object) -> Pace:
    found = pace_by(dataset(**fields), speed, max_model_len=max_model_len).interference.pace
    assert found is not None
    return found


class TestPace:
    @pytest.mark.parametrize("speed", SPEEDS)
    def test_bursts_and_steady_prompts_keep_one_engine_half_busy(self, speed):
        pace = paced(speed)
        bursts = speed.burst_ttft_s / pace.burst_period_s
        steady = 4 * speed.steady_ttft_s / pace.steady_period_s
        assert bursts + steady == pytest.approx(0.5, rel=0.13)

    def test_three_prompts_at_once_come_a_third_as_often(self):
        one, three = paced(BOXED), paced(BOXED, burst_size=3)
        assert three.burst_period_s == pytest.approx(3 * one.burst_period_s, rel=0.2)

    @pytest.mark.parametrize(("speed", "num"), [(BOXED, 512), (SLOW, 64)])
    def test_a_steady_answer_is_neither_endless_nor_over_at_once(self, speed, num):
        assert paced(speed).steady_output_len == num

    def test_a_steady_answer_fits_the_context(self):
        assert paced(BOXED, max_model_len=256).steady_output_len == 256 - 32

    def test_a_steady_user_is_answered_four_fifths_of_the_time(self):
        pace = paced(BOXED)
        assert pace.steady_output_len * 0.0015 / pace.steady_period_s == pytest.approx(
            0.8, abs=1e-3
        )

    @pytest.mark.parametrize("speed", SPEEDS)
    def test_bursts_meet_the_steady_users_at_ever_other_moments(self, speed):
        pace = paced(speed)
        slot_s = pace.steady_period_s / 4
        long_s, short_s = sorted([slot_s, pace.burst_period_s], reverse=True)
        for times in (1, 2, 3, 4):
            quotient = long_s / short_s * times
            assert abs(quotient - round(quotient)) > 0.08

    def test_numbers_that_were_given_stay(self):
        pace = paced(BOXED, steady_output_len=100, burst_period_s=0.7)
        assert (pace.steady_output_len, pace.burst_period_s) == (100, 0.7)
        assert pace.steady_period_s == pytest.approx(100 * 0.0015 / 0.8)

    def test_the_flags_make_the_same_data_set_again(self):
        found = pace_by(dataset(), BOXED, max_model_len=4096)
        words = flags_of(found.interference)
        given = {
            flag.removeprefix("--"): value
            for flag, value in zip(words[::2], words[1::2], strict=True)
        }
        table = bench_compare_table()
        resolved = resolve(table, command_line=given, environ={})
        assert build("dataset", DatasetConfig, table, resolved) == found

    def test_tokens_that_were_read_at_once_still_have_a_gap(self):
        chunk_s = [1.0, 1.0, 1.0, 1.0, 1.02, 1.02, 1.02, 1.02, 1.02]
        answer = Outcome(index=0, request_id="r", chunk_s=chunk_s)
        assert usual_gap_s([answer]) == pytest.approx(0.02 / 8)
        assert usual_gap_s([]) == 0.0

    def test_only_what_is_left_open_is_measured(self):
        assert is_needed(dataset())
        assert is_needed(dataset(steady_output_len=64, steady_period_s=1.0))
        whole = dataset(steady_output_len=64, steady_period_s=1.0, burst_period_s=0.5)
        assert not is_needed(whole)
        assert not is_needed(DatasetConfig(name=DatasetName.RANDOM))


class TestMeasuring:
    """Against a server with known delays: a busy machine can only make them longer."""

    PROMPTS = PromptMaker(
        Tokenizer.from_directory(boxed_model_dir()),
        endpoint=ApiEndpoint.COMPLETIONS,
        max_model_len=4096,
    )

    async def measured(self, url: str, **fields: object):
        config = dataset(steady_input_len=8, burst_input_len=64, **fields)
        return await calibrate(config, self.PROMPTS, Target(base_url=url, model="m"), Options())

    async def test_the_pace_is_that_of_the_endpoint(self):
        with scripted_server("--first-ms", "60", "--gap-ms", "20") as server:
            found = await self.measured(server.url, steady_output_len=16)
            asked, at_once = len(server.times()), server.max_open()
        pace = found.dataset.interference.pace
        assert pace is not None
        # Read late, a first token shortens the gaps behind it.
        assert pace.steady_period_s >= 16 * 0.012 / 0.8
        assert pace.burst_period_s >= 0.06 / 0.5 * 0.9
        assert "a prompt of 64 tokens takes " in found.words
        assert asked >= 4 + 4 + 2 * 4  # each group one by one, then two rounds of the streams
        assert at_once == 4

    async def test_bursts_that_a_p99_cannot_see_are_said_to_be_too_seldom(self):
        with scripted_server("--first-ms", "60", "--gap-ms", "0.2") as server:
            found = await self.measured(server.url, burst_period_s=30.0)
        (sentence,) = found.notes
        assert "a p99 does not show" in sentence
        assert "--interference-burst-input-len" in sentence

    async def test_an_endpoint_that_fails_is_named_with_the_way_out(self):
        with (
            scripted_server() as server,
            pytest.raises(PeerError, match="--interference-burst-period as numbers"),
        ):
            await calibrate(
                dataset(),
                FailingPrompts(self.PROMPTS),
                Target(base_url=server.url, model="m"),
                Options(),
            )

    def test_bench_serve_says_the_pace_it_measured_and_keeps_it(self, tmp_path):
        with scripted_server("--first-ms", "20", "--gap-ms", "2") as server:
            done = pdserve(
                *("bench", "serve", "--base-url", server.url, "--tokenizer", "boxed"),
                *("--dataset-name", "pd-interference", "--interference-duration", "0.6"),
                *("--no-progress", "--allow-invalid", "--interference-steady-output-len", "16"),
                *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"),
                timeout_s=200,
            )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Measured pace: a prompt of 1024 tokens takes " in done.stdout
        assert "--interference-steady-output-len 16 --interference-steady-period" in done.stdout
        notes = json.loads((tmp_path / "r.json").read_text())["pdserve"]["notes"]
        assert any("The pace was measured before the run" in note for note in notes)


class FailingPrompts(PromptMaker):
    """Every prompt is a script that ends with an error."""

    def __init__(self, like: PromptMaker) -> None:
        super().__init__(None, endpoint=like.endpoint, max_model_len=like.max_model_len)

    def make(self, segments, *, may_cut_all=False):
        return script(status=500)
