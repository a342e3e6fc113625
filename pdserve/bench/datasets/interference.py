"""`pd-interference`: steady decoders beside bursts of long prompts, where disaggregation helps.

Some users request short answers at a steady pace (group `steady`); now and then several long
prompts arrive at once (group `burst`). If prefills and decodes share an engine, every burst stops
the running answers while it is computed, or, with chunked prefill, makes each of their tokens wait
for a chunk. The key figure is the steady users' ITL p99; a run with `--interference-burst-size 0`
shows it without bursts.

Every request has its own due time, independent of the answers: each configuration gets the same
schedule, even if it falls behind. Each user's first request is shifted by a share of the period, so
that the steady load is even.

The pace must suit the model and the machine: with too frequent bursts the prefill engine falls
behind, and its TTFT only reflects the length of the run; with too rare bursts a p99 does not show
them. If bursts keep one engine busy for a share u of the time, a gap between tokens is g and a
prefill step (a chunk, or a whole prompt) takes t, bursts affect about u g / t of the gaps, whatever
the number of users, and a p99 shows them if that is more than 1 %. So `calibration` measures g and
t and sets u to one half. Its results can also be given as numbers.
"""

from __future__ import annotations

from typing import Final

from pdserve.bench.datasets.prompts import PromptMaker, Segment
from pdserve.bench.records import Planned, RequestPlan
from pdserve.config.datasets import DatasetConfig, InterferenceConfig, Pace
from pdserve.errors import InternalError

STEADY: Final = "steady"
BURST: Final = "burst"

_ENOUGH_BURSTS: Final = 6


def make(config: DatasetConfig, prompts: PromptMaker) -> RequestPlan:
    """Make the plan.

    Args:
        config: Settings with a known pace.
        prompts: Writes the prompts.

    Raises:
        ConfigError: A prompt and its output exceed the model's context.
    """
    own = config.interference
    pace = own.pace
    if pace is None:
        raise InternalError("pd-interference was planned before its pace was measured")
    prompts.require_room(
        own.steady_input_len,
        pace.steady_output_len,
        "--interference-steady-input-len or --interference-steady-output-len",
    )
    if own.burst_size:
        prompts.require_room(
            own.burst_input_len,
            own.burst_output_len,
            "--interference-burst-input-len or --interference-burst-output-len",
        )
    due = [(at_s, STEADY, key) for at_s, key in _steady(own, pace)]
    bursts = _bursts(own, pace)
    due += [(at_s, BURST, key) for at_s, key in bursts]
    due.sort()
    lengths = {
        STEADY: (own.steady_input_len, pace.steady_output_len),
        BURST: (own.burst_input_len, own.burst_output_len),
    }
    requests = [
        Planned(
            index=index,
            prompt=prompts.make([Segment(key, lengths[group][0])]),
            max_tokens=lengths[group][1],
            num_prompt_tokens=lengths[group][0],
            at_s=at_s,
            group=group,
        )
        for index, (at_s, group, key) in enumerate(due)
    ]
    return RequestPlan(
        requests=requests,
        description=(
            f"pd-interference steady={own.steady_streams}x{own.steady_input_len}/"
            f"{pace.steady_output_len} every {pace.steady_period_s:g} s "
            f"burst={own.burst_size}x{own.burst_input_len}/{own.burst_output_len} every "
            f"{pace.burst_period_s:g} s for {own.duration_s:g} s"
        ),
        notes=_notes(own, pace, len(bursts)),
    )


def _notes(own: InterferenceConfig, pace: Pace, num_burst_requests: int) -> list[str]:
    if not own.burst_size:
        return []
    num = num_burst_requests // own.burst_size
    if num >= _ENOUGH_BURSTS:
        return []
    sentence = (
        f"Only {num} burst{'' if num == 1 else 's'} came in {own.duration_s:g} s, one every "
        f"{pace.burst_period_s:g} s, so percentiles under bursts describe only a few prompts; "
        f"--interference-duration {_ENOUGH_BURSTS * pace.burst_period_s * 1.2:.0f} or a smaller "
        "--interference-burst-input-len gives more."
    )
    return [sentence]


def _steady(own: InterferenceConfig, pace: Pace) -> list[tuple[float, str]]:
    due = []
    for stream in range(own.steady_streams):
        turn = 0
        while True:
            at_s = (turn + stream / own.steady_streams) * pace.steady_period_s
            if at_s >= own.duration_s:
                break
            due.append((at_s, f"steady/{stream}/{turn}"))
            turn += 1
    return due


def _bursts(own: InterferenceConfig, pace: Pace) -> list[tuple[float, str]]:
    due = []
    burst = 1
    while burst * pace.burst_period_s < own.duration_s:
        due += [
            (burst * pace.burst_period_s, f"burst/{burst}/{place}")
            for place in range(own.burst_size)
        ]
        burst += 1
    return due
