"""Runs that nobody ran: the same at each call."""

from __future__ import annotations

import random

from pdserve.bench.compare.result import Comparison, Deployment, EngineRates, Measured, compact
from pdserve.bench.goodput import Slo, SloMetric
from pdserve.bench.records import Outcome, Run, RunHealth


def run(
    label: str,
    *,
    seed: int = 0,
    is_disaggregated: bool = False,
    stall_ms: float = 90.0,
    step_ms: float = 5.0,
    num_steady: int = 8,
    num_out: int = 120,
    num_bursts: int = 3,
    with_stages: bool = True,
    valid: bool = True,
) -> Run:
    """Steady decoders, and prompts that stall them for `stall_ms` where they share an engine."""
    rng = random.Random(f"{label} {seed}")
    bursts = [
        _burst(index, number, rng, stall_ms, is_disaggregated, with_stages)
        for index, number in enumerate(
            (burst, place) for burst in range(num_bursts) for place in range(3)
        )
    ]
    outcomes = []
    for index in range(num_steady):
        sent = 0.02 * index
        at = sent + (0.03 if is_disaggregated else 0.02)
        times = [at]
        while len(times) < num_out:
            gap = step_ms * rng.uniform(0.9, 1.2) / 1e3
            if not is_disaggregated:
                hits = [b for b in bursts if b.sent_s <= at < b.chunk_s[0]]
                gap += (stall_ms / 1e3) * rng.uniform(0.8, 1.1) if hits else 0.0
            at += gap
            times.append(at)
        outcomes.append(
            Outcome(
                index=index,
                request_id=f"{label}-s{index}",
                group="steady",
                scheduled_s=sent,
                sent_s=sent,
                chunk_s=times,
                chunk_tokens=[1] * num_out,
                end_s=times[-1],
                num_prompt_tokens=32,
                num_cached_tokens=8,
                num_output_tokens=num_out,
                status=200,
                finish_reason="length",
                **_stages(times[0] - sent, is_disaggregated, with_stages),
            )
        )
    for number, one in enumerate(bursts):
        one.index = num_steady + number
    outcomes += bursts
    return Run(
        label=label,
        base_url="http://127.0.0.1:1",
        model="boxed",
        dataset="pd-interference steady=8 burst=3x3",
        arrivals="by the data set",
        seed=seed,
        started_wall_s=1.0,
        duration_s=max(one.end_s for one in outcomes),
        outcomes=outcomes,
        health=RunHealth(
            valid=valid, why_not=[] if valid else ["p99 send lag is 9 ms, 40 % of the median TTFT."]
        ),
    )


def _burst(
    index: int,
    number: tuple[int, int],
    rng: random.Random,
    stall_ms: float,
    is_disaggregated: bool,
    with_stages: bool,
) -> Outcome:
    burst, place = number
    sent = 0.2 + 0.25 * burst
    ttft = (place + 1) * stall_ms * (1.4 if is_disaggregated else 1.0) * rng.uniform(0.9, 1.1) / 1e3
    times = [sent + ttft + 0.006 * step for step in range(4)]
    return Outcome(
        index=index,
        request_id=f"b{index}",
        group="burst",
        scheduled_s=sent,
        sent_s=sent,
        chunk_s=times,
        chunk_tokens=[1] * 4,
        end_s=times[-1],
        num_prompt_tokens=1024,
        num_cached_tokens=512,
        num_output_tokens=4,
        status=200,
        finish_reason="length",
        **_stages(ttft, is_disaggregated, with_stages, queue_share=place / 4),
    )


def _stages(
    ttft_s: float, is_disaggregated: bool, with_stages: bool, queue_share: float = 0.02
) -> dict:
    if not with_stages:
        return {}
    ms = ttft_s * 1e3
    queue = ms * queue_share
    first = {"proxy": 0.3, "queue": queue, "prefill": ms - queue - 1.1, "relay": 0.6}
    second = {"kv": 2.0, "handover": 1.5, "first step": 2.5} if is_disaggregated else {}
    return {"stages": first, "second_stages": second}


def comparison(*, num_runs: int = 3, rates: tuple[float | None, ...] = (None,)) -> Comparison:
    """Two colocated deployments and a P/D one."""
    sides = {
        "colocated": (False, 60.0, 5.0),
        "2 replicas": (False, 100.0, 7.0),
        "colocated, unchunked": (False, 200.0, 5.0),
        "P/D 1:1": (True, 110.0, 6.0),
    }
    measured = [
        Measured(
            deployment=label,
            rate=rate,
            repeat=repeat,
            run=compact(
                run(
                    label,
                    seed=repeat,
                    is_disaggregated=is_disaggregated,
                    stall_ms=stall_ms * (1 + (rate or 0) / 10),
                    step_ms=step_ms,
                )
            ),
        )
        for rate in rates
        for repeat in range(num_runs)
        for label, (is_disaggregated, stall_ms, step_ms) in sides.items()
    ]
    return Comparison(
        title="pdserve bench compare: boxed, pd-interference",
        model="boxed",
        baseline="colocated",
        deployments=[
            Deployment(
                label=label,
                words="for the test",
                is_disaggregated=side[0],
                num_cores=2,
                num_prefill=int(side[0]),
                num_decode=int(side[0]),
                commands=("pdserve serve boxed",),
                ready_s=[2.5, 2.25],
            )
            for label, side in sides.items()
        ],
        measured=measured,
        rates=EngineRates(num_cores=1, ctx_rate=20.0, gen_rate=8.0, out_tok_s=960.0),
        slos=[Slo(SloMetric.TTFT, 200.0), Slo(SloMetric.TPOT, 20.0)],
        command="pdserve bench compare boxed --dataset-name pd-interference",
        environment={"date": "2026-11-22", "cpu": "a test", "pdserve": "0"},
    )
