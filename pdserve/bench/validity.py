"""Decides whether a run's figures are valid, and explains why not.

A benchmark with an overloaded client measures itself. There are three signs: requests that were
sent late, timers that fired late (the times of chunks are late by the same amount), and a client
process without spare time. If the server shares its cores with programs outside the run, the
benchmark measures those too. And of a run that was cut short, the slowest requests are missing.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

import numpy as np

from pdserve.bench.priority import Priority
from pdserve.bench.records import MIN_SHOWN, CoresUsed, Outcome, RunHealth

MAX_LAG_SHARE: Final = 0.05
"""Share of the median TTFT by which 99 of 100 requests, and timers, may be late."""
MAX_CPU_SHARE: Final = 0.9
MAX_STOLEN_SHARE: Final = 0.1
"""Share of the cores that others may use. The kernel's own work for a run is half of that."""
_NOTED_ITL_SHARE: Final = 0.2


def judge(
    outcomes: Sequence[Outcome],
    loop_lags_s: Sequence[float],
    cpu_shares: Sequence[float],
    *,
    priority: Priority = Priority.USUAL,
    cores: CoresUsed | None = None,
    num_unfinished: int = 0,
) -> RunHealth:
    """Judge a run by its client, by the use of cores and by whether it was carried out.

    Args:
        outcomes: Outcomes of all client processes.
        loop_lags_s: Timer delays of all of them.
        cpu_shares: CPU time of each process, as a share of one core.
        priority: Their scheduling.
        cores: Use of the cores; None if unknown.
        num_unfinished: Planned requests without an outcome.
    """
    sent = [max(0.0, each.sent_s - each.scheduled_s) for each in outcomes if each.status]
    good = [each for each in outcomes if each.is_good]
    lag_p50, lag_p99 = _percentile(sent, 50), _percentile(sent, 99)
    loop_p99 = _percentile(loop_lags_s, 99)
    share = max(cpu_shares, default=0.0)
    why_not: list[str] = []
    notes: list[str] = []
    if num_unfinished:
        num_planned = len(outcomes) + num_unfinished
        why_not.append(
            f"The run was cut short: {len(outcomes)} of {num_planned} requests had ended, and the "
            "slowest of those that were sent are missing."
        )
    if good:
        ttft_s = statistics.median(each.ttft_s for each in good)
        limit_s = MAX_LAG_SHARE * ttft_s
        if lag_p99 > limit_s:
            why_not.append(
                f"The client was late: 1 in 100 requests was sent at least {_ms(lag_p99)} late, "
                f"which is over {MAX_LAG_SHARE:.0%} of the median TTFT ({_ms(ttft_s)})."
            )
        if loop_p99 > limit_s:
            why_not.append(
                f"The client measured late: 1 in 100 of its timers was at least {_ms(loop_p99)} "
                f"late, which is over {MAX_LAG_SHARE:.0%} of the median TTFT ({_ms(ttft_s)})."
            )
        gaps = [gap for each in good for gap in each.itl_s]
        itl_s = _percentile(gaps, 99)
        if gaps and loop_p99 > _NOTED_ITL_SHARE * itl_s:
            notes.append(
                f"1 in 100 of the client's timers was at least {_ms(loop_p99)} late: gaps between "
                f"tokens (p99 {_ms(itl_s)}) may be off by as much."
            )
    if share > MAX_CPU_SHARE:
        why_not.append(
            f"A client process used {share:.0%} of a core and was overloaded: use more client "
            "processes (--num-client-processes)."
        )
    if cores is not None and cores.others + cores.hypervisor > MAX_STOLEN_SHARE * cores.num_cores:
        why_not.append(_stolen_words(cores))
    return RunHealth(
        num_processes=max(1, len(cpu_shares)),
        send_lag_p50_s=lag_p50,
        send_lag_p99_s=lag_p99,
        loop_lag_p99_s=loop_p99,
        cpu_share=share,
        priority=priority.value,
        valid=not why_not,
        why_not=why_not,
        notes=notes,
    )


def _stolen_words(cores: CoresUsed) -> str:
    takers = []
    if cores.others >= MIN_SHOWN:
        most = f" (of which {cores.greediest}: {cores.greediest_cores:.2f})"
        is_seen = cores.greediest_cores >= MIN_SHOWN
        takers.append(f"other programs used {cores.others:.2f}{most if is_seen else ''}")
    if cores.hypervisor >= MIN_SHOWN:
        takers.append(f"the hypervisor took {cores.hypervisor:.2f}")
    words = " and ".join(takers)
    return (
        f"{words[0].upper()}{words[1:]} of the {cores.num_cores} cores, which is over "
        f"{MAX_STOLEN_SHARE:.0%} of them."
    )


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else 0.0


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
