"""How many cores a deployment's processes use, by what they are for, and what others use of them.

On a machine that engines share with what brings their tokens to the client, and maybe with other
programs, that says what stands in whose way. From Linux's /proc; knows no request and no figure.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

ENGINES: Final = "engines"
SERVERS: Final = "API servers"
PROXY: Final = "proxy"
STORE: Final = "store"
ALL: Final = "all"
"""Whatever the cores did, of whichever program; the kernel's own work, too."""

_PROC: Final = Path("/proc")


def cpu_seconds(processes: Mapping[int, str], cores: Collection[int]) -> dict[str, float]:
    """CPU time so far, in seconds, by `ENGINES`, `SERVERS`, `PROXY`, `STORE` and `ALL`.

    Args:
        processes: A deployment's processes by pid: which of these each is. Whatever a server has
            started is its engine. Without any the answer is empty.
        cores: That `ALL` is of.
    """
    if not processes:
        return {}
    own, parents = _all_processes()
    totals: dict[str, float] = {}
    for pid, part in processes.items():
        totals[part] = totals.get(part, 0.0) + own.get(pid, 0.0)
        if part == SERVERS:
            below = sum(own[each] for each in own if each != pid and _is_below(each, pid, parents))
            totals[ENGINES] = totals.get(ENGINES, 0.0) + below
    return {**totals, ALL: _busy_seconds(cores)}


def cores_used(
    before: Mapping[str, float], after: Mapping[str, float], elapsed_s: float
) -> dict[str, float]:
    """Cores that were busy on average between two calls of `cpu_seconds`."""
    return {
        part: round(max(0.0, total - before.get(part, 0.0)) / elapsed_s, 3)
        for part, total in after.items()
    }


def _is_below(pid: int, ancestor: int, parents: Mapping[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == ancestor:
            return True
    return False


def _busy_seconds(cores: Collection[int]) -> float:
    """What these cores have done since the machine's start, all but idling; 0 without /proc."""
    try:
        lines = (_PROC / "stat").read_text().splitlines()
    except OSError:
        return 0.0
    busy = 0
    for line in lines:
        name, *fields = line.split()
        if name.removeprefix("cpu") in map(str, cores):
            numbers = list(map(int, fields))
            busy += sum(numbers[:8]) - numbers[3] - numbers[4]  # of the guests' time it has part
    return busy / os.sysconf("SC_CLK_TCK")


def _all_processes() -> tuple[dict[int, float], dict[int, int]]:
    """CPU seconds and parent of every process; none where there is no /proc."""
    ticks = os.sysconf("SC_CLK_TCK")
    times: dict[int, float] = {}
    parents: dict[int, int] = {}
    for entry in _PROC.glob("[0-9]*/stat"):
        try:
            # The name in parentheses may have spaces; what follows it has none.
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(entry.parent.name)
        parents[pid] = int(fields[1])
        times[pid] = (int(fields[11]) + int(fields[12])) / ticks
    return times, parents
