"""Measures an endpoint's speed and sets the pace of `pd-interference` accordingly.

Values that users leave open (`auto`) follow from three times of the endpoint: the TTFT of a burst's
prompt and of a steady user's prompt when each is alone, and the gap between tokens when all steady
users are answered at once. Bursts then keep one prefill engine busy half the time, and each steady
user receives an answer four fifths of the time.

The endpoint should be one engine of a P/D deployment, or such a deployment. Its prompts differ from
those of the run, so no prefix cache contains prompts of the run afterwards. Knows no deployment.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

import msgspec

from pdserve.bench.datasets.interference import BURST, STEADY
from pdserve.bench.datasets.prompts import PromptMaker, Segment
from pdserve.bench.records import Outcome, Planned
from pdserve.bench.runner import Options, run_plan
from pdserve.bench.target import Target
from pdserve.config.datasets import DatasetConfig, DatasetName, InterferenceConfig
from pdserve.errors import PeerError

_NUM_ALONE: Final = 3
_NUM_TOKENS: Final = 64
"""Tokens of each answer whose gaps are measured."""
_NUM_ROUNDS: Final = 2

_ANSWER_S: Final = 1.0
_OUTPUT_LEN: Final = (64, 512)
"""Minimum and maximum tokens of a steady answer: it should last some steps, and end."""
_ANSWERED_SHARE: Final = 0.8
_PREFILL_LOAD: Final = 0.5
_LEAST_BURST_LOAD: Final = 0.1
_SEEN_BY_P99: Final = 0.01
_APART: Final = (0.118, 0.21, 0.29, 0.382, 0.618, 0.71, 0.79, 0.882)
"""Fractions that are far from 0, halves, thirds and quarters."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint's speed, in seconds.

    Attributes:
        burst_ttft_s, steady_ttft_s: TTFT of a prompt of the group, alone.
        itl_s: Gap between tokens, with all steady users answered at once.
    """

    burst_ttft_s: float
    steady_ttft_s: float
    itl_s: float


class Calibrated(msgspec.Struct, frozen=True, kw_only=True):
    """A data set whose pace is known.

    Attributes:
        dataset: The data set with numbers for all values that were left open.
        words: The measurements in words.
        flags: Flags that make the same data set again without measuring.
        notes: Notes needed to interpret the figures.
    """

    dataset: DatasetConfig
    words: str
    flags: tuple[str, ...]
    notes: tuple[str, ...] = ()


def is_needed(dataset: DatasetConfig) -> bool:
    """Whether the data set's pace is left open."""
    return dataset.name is DatasetName.PD_INTERFERENCE and dataset.interference.pace is None


async def calibrate(
    dataset: DatasetConfig,
    prompts: PromptMaker,
    target: Target,
    options: Options,
) -> Calibrated:
    """Measure the endpoint, and fill in the values left open.

    Args:
        dataset: A data set for which `is_needed` is true.
        prompts: Writes prompts for this endpoint.
        target: The endpoint, with a model.
        options: Options of the run that follows, except the number of requests in flight.

    Raises:
        ConfigError: A prompt and its output exceed the model's context.
        PeerError: The endpoint does not answer, or a request failed.
    """
    speed = await _measure(dataset, prompts.with_seed(dataset.seed), target, options)
    paced = pace_by(dataset, speed, max_model_len=prompts.max_model_len)
    own = paced.interference
    return Calibrated(
        dataset=paced,
        words=(
            f"a prompt of {own.burst_input_len} tokens takes {speed.burst_ttft_s * 1e3:.1f} ms, "
            f"one of {own.steady_input_len} takes {speed.steady_ttft_s * 1e3:.1f} ms, and a token "
            f"takes {speed.itl_s * 1e3:.2f} ms with {own.steady_streams} answers at once"
        ),
        flags=flags_of(own),
        notes=_notes(own, speed),
    )


def pace_by(dataset: DatasetConfig, speed: Speed, *, max_model_len: int | None) -> DatasetConfig:
    """Return the data set with numbers for values left open; given numbers stay.

    Args:
        dataset: A `pd-interference` data set.
        speed: Speed of one engine.
        max_model_len: Maximum tokens of prompt and output together; None if unknown.
    """
    own = dataset.interference
    num = own.steady_output_len
    if num is None:
        least, most = _OUTPUT_LEN
        num = min(max(round(_ANSWER_S / speed.itl_s), least), most)
        if max_model_len is not None:
            num = max(1, min(num, max_model_len - own.steady_input_len))
    period_s = own.steady_period_s
    if period_s is None:
        period_s = _rounded(num * speed.itl_s / _ANSWERED_SHARE)
    burst_period_s = own.burst_period_s
    if burst_period_s is None:
        steady_load = own.steady_streams * speed.steady_ttft_s / period_s
        load = max(_PREFILL_LOAD - steady_load, _LEAST_BURST_LOAD)
        burst_period_s = _rounded(
            _apart(
                max(1, own.burst_size) * speed.burst_ttft_s / load, period_s / own.steady_streams
            )
        )
    return msgspec.structs.replace(
        dataset,
        interference=msgspec.structs.replace(
            own,
            steady_output_len=num,
            steady_period_s=period_s,
            burst_period_s=burst_period_s,
        ),
    )


def flags_of(own: InterferenceConfig) -> tuple[str, ...]:
    """Return the flags that set the same pace again."""
    pace = own.pace
    assert pace is not None
    return (
        *("--interference-steady-output-len", str(pace.steady_output_len)),
        *("--interference-steady-period", f"{pace.steady_period_s:g}"),
        *("--interference-burst-period", f"{pace.burst_period_s:g}"),
    )


def _rounded(value_s: float) -> float:
    """Round to four digits, so that a flag gives it exactly."""
    return float(f"{value_s:.4g}")


def _apart(burst_s: float, slot_s: float) -> float:
    """Return a period near `burst_s` whose bursts fall at varying points between steady requests.

    If one period is nearly a multiple of the other (or of its half or third), bursts would always
    meet the steady answers at the same points. So the longer one is moved to a whole number of
    shorter ones plus the nearest of `_APART`: by at most an eighth of the shorter one.
    """
    long_s, short_s = max(burst_s, slot_s), min(burst_s, slot_s)
    whole = int(long_s / short_s)
    choices = [num + part for num in range(max(1, whole - 1), whole + 2) for part in _APART]
    quotient = min(choices, key=lambda choice: abs(choice - long_s / short_s))
    return slot_s * quotient if burst_s >= slot_s else slot_s / quotient


def _notes(own: InterferenceConfig, speed: Speed) -> tuple[str, ...]:
    pace = own.pace
    assert pace is not None
    share = own.burst_size * speed.itl_s / pace.burst_period_s
    if not own.burst_size or share >= _SEEN_BY_P99:
        return ()
    sentence = (
        f"If a prompt is computed in one step, bursts affect about {share * 100:.2g} % of the "
        "steady users' gaps, and a p99 does not show what affects fewer than 1 % of them: lower "
        f"--interference-burst-input-len (it is {own.burst_input_len})."
    )
    return (sentence,)


async def _measure(
    dataset: DatasetConfig, prompts: PromptMaker, target: Target, options: Options
) -> Speed:
    own = dataset.interference
    num_tokens = own.steady_output_len or _NUM_TOKENS
    if prompts.max_model_len is not None:
        num_tokens = min(num_tokens, max(2, prompts.max_model_len - own.steady_input_len))
    for prompt_len, output_len, whose in (
        (own.burst_input_len, own.burst_output_len, BURST),
        (own.steady_input_len, num_tokens, STEADY),
    ):
        prompts.require_room(prompt_len, output_len, f"--interference-{whose}-input-len")
    lengths = {BURST: own.burst_input_len, STEADY: own.steady_input_len}

    def request(index: int, group: str, max_tokens: int, key: str) -> Planned:
        return Planned(
            index=index,
            prompt=prompts.make([Segment(f"calibration/{key}/{index}", lengths[group])]),
            max_tokens=max_tokens,
            num_prompt_tokens=lengths[group],
            at_s=0.0,
            group=group,
        )

    groups = [BURST, STEADY] * (1 + _NUM_ALONE)
    alone = [
        request(index, group, own.burst_output_len, "alone") for index, group in enumerate(groups)
    ]
    together = [
        request(index, STEADY, num_tokens, "together")
        for index in range(_NUM_ROUNDS * own.steady_streams)
    ]
    apart = await _play(alone, target, options, 1)
    counted = apart[2:]  # The first of each group warm up what is warmed once.
    beside = await _play(together, target, options, own.steady_streams)
    itl_s = usual_gap_s(beside)
    if not itl_s:
        raise PeerError(
            f"{target.base_url} wrote no two answers of at least two tokens in a row, so the pace "
            f"of pd-interference cannot be measured: {_REMEDY}"
        )
    return Speed(
        burst_ttft_s=statistics.median(one.ttft_s for one in counted if one.group == BURST),
        steady_ttft_s=statistics.median(one.ttft_s for one in counted if one.group == STEADY),
        itl_s=itl_s,
    )


def usual_gap_s(answers: Sequence[Outcome]) -> float:
    """Return the median answer's mean seconds from chunk to chunk; 0 if no time passes.

    Not the median gap, because a busy client reads several tokens at once.
    """
    return statistics.median(
        [statistics.fmean(answer.itl_s) for answer in answers if answer.itl_s] or [0.0]
    )


_REMEDY: Final = (
    "give --interference-steady-output-len, --interference-steady-period and "
    "--interference-burst-period as numbers"
)


async def _play(
    requests: Sequence[Planned], target: Target, options: Options, num_at_once: int
) -> list[Outcome]:
    """Return the outcomes of the requests, sent with `num_at_once` of them in flight.

    Raises:
        PeerError: One failed.
    """
    own = msgspec.structs.replace(
        options,
        max_concurrency=num_at_once,
        num_processes=1,
        num_warmups=0,
        keep_text=False,
        with_stages=False,
    )
    run = await run_plan(requests, target, own)
    for one in run.outcomes:
        if not one.is_good:
            raise PeerError(
                f"a request that measures the pace of pd-interference failed at {target.base_url} "
                f"({one.error or 'no token came'}): {_REMEDY}"
            )
    return run.outcomes
