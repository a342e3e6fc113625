"""`pd-interference`: what disaggregation is for.

Some users ask for short answers at a steady pace (group `steady`); now and then several long
prompts come at the same moment (group `burst`). Where prefills and decodes share an engine, every
burst makes the answers under way stand still for as long as it is computed, or, with chunked
prefill, makes each of their tokens wait for a chunk. The steady users' ITL p99 is the figure to
look at; a run with `--interference-burst-size 0` says what it is without bursts.

Every request has its own due time, whatever the answers do: each configuration that is measured
gets the same schedule, and one that falls behind is not spared. Each user's first request is
shifted by a share of the period, so that the steady load is even.

A p99 shows bursts only if they meet more than 1 % of the gaps. With s steps per burst, a gap of
g between tokens and p between bursts, it meets about s g / p of them, however many users there
are: bursts must come at least every 100 s g. So the sizes go with the model's speed:

- The defaults are for a model of about 135M parameters on two cores (g is 10 to 15 ms, 512 tokens
  take 115 ms on both cores and 220 ms on one): 4 users x 32 tokens in, 64 out, every 2 s, and a
  prompt of 512 tokens every 0.55 s, which is no multiple of the users' pace, so that bursts meet
  answers at every point. One core of prefill is busy for 40 % of the time.
- The boxed model is ten times as fast: with `--interference-for boxed` users ask for 512 tokens,
  and a prompt of 256 comes every 0.11 s.

All of it is within a context of 1024.
"""

from __future__ import annotations

from pdserve.bench.datasets.plan import Plan
from pdserve.bench.datasets.prompts import PromptMaker, Segment
from pdserve.bench.records import Planned
from pdserve.config.datasets import DatasetConfig, InterferenceConfig

STEADY = "steady"
BURST = "burst"


def make(config: DatasetConfig, prompts: PromptMaker) -> Plan:
    """Make the plan.

    Raises:
        ConfigError: A prompt and its output exceed the model's context.
    """
    own = config.interference
    prompts.require_room(
        own.steady_input_len,
        own.steady_output_len,
        "--interference-steady-input-len or --interference-steady-output-len",
    )
    if own.burst_size:
        prompts.require_room(
            own.burst_input_len,
            own.burst_output_len,
            "--interference-burst-input-len or --interference-burst-output-len",
        )
    due = [(at_s, STEADY, key) for at_s, key in _steady(own)]
    due += [(at_s, BURST, key) for at_s, key in _bursts(own)]
    due.sort()
    lengths = {
        STEADY: (own.steady_input_len, own.steady_output_len),
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
    return Plan(
        requests=requests,
        description=(
            f"pd-interference steady={own.steady_streams}x{own.steady_input_len}/"
            f"{own.steady_output_len} every {own.steady_period_s:g} s "
            f"burst={own.burst_size}x{own.burst_input_len}/{own.burst_output_len} every "
            f"{own.burst_period_s:g} s for {own.duration_s:g} s"
        ),
    )


def _steady(own: InterferenceConfig) -> list[tuple[float, str]]:
    due = []
    for stream in range(own.steady_streams):
        turn = 0
        while True:
            at_s = (turn + stream / own.steady_streams) * own.steady_period_s
            if at_s >= own.duration_s:
                break
            due.append((at_s, f"steady/{stream}/{turn}"))
            turn += 1
    return due


def _bursts(own: InterferenceConfig) -> list[tuple[float, str]]:
    due = []
    burst = 1
    while burst * own.burst_period_s < own.duration_s:
        due += [
            (burst * own.burst_period_s, f"burst/{burst}/{place}")
            for place in range(own.burst_size)
        ]
        burst += 1
    return due
