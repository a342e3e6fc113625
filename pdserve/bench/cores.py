"""How many cores a run used, by what they did: the client, the server's parts, and others.

On a machine that engines share with what brings their tokens to the client, and maybe with other
programs or, under a hypervisor, with other machines, that says what stands in whose way. From
Linux's /proc, by two readings; knows no request and no figure.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import psutil

from pdserve.bench.records import CoresUsed
from pdserve.lifeline import SUPERVISOR_VARIABLE

ENGINES: Final = "engines"
SERVERS: Final = "API servers"
PROXY: Final = "proxy"
STORE: Final = "store"
CLIENT: Final = "client"

_PROC: Final = Path("/proc")
_LEAST_S: Final = 1.0
"""Between two readings: their ticks are of 10 ms, one by one for each process."""
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_HTTP_PORT: Final = {"http": 80, "https": 443}


class _Process(NamedTuple):
    """What it has used, and those of its children that have ended, since it was started."""

    cpu_s: float
    parent: int
    name: str


class _Core(NamedTuple):
    """What it has done since the machine's start; `busy_s` is without the hypervisor's part."""

    busy_s: float
    stolen_s: float


class CpuReading(NamedTuple):
    """CPU time so far, of each core and of each process; both empty without /proc."""

    at_s: float
    cores: Mapping[int, _Core]
    processes: Mapping[int, _Process]


class Watched(NamedTuple):
    """What a run's cores are looked at for.

    Attributes:
        processes: The server's, by pid: `SERVERS`, `PROXY` or `STORE`. Whatever one has started
            is the same part, but of an API server its engine.
        cores: Those that it shares with the client.
    """

    processes: Mapping[int, str]
    cores: Collection[int]


def read_cpu(proc: Path = _PROC) -> CpuReading:
    """Read how much time every core and every process has used so far."""
    return CpuReading(time.monotonic(), _cores(proc), _processes(proc))


def used_cores(before: CpuReading, after: CpuReading, watched: Watched) -> CoresUsed | None:
    """Cores that were busy on average between two readings.

    Args:
        before, after: The first and the second reading.
        watched: This process and what it has started are the client, unless told otherwise here.

    Returns:
        None if the readings are too near one another, or there are none.
    """
    elapsed_s = after.at_s - before.at_s
    cores = [core for core in watched.cores if core in before.cores and core in after.cores]
    if elapsed_s < _LEAST_S or not cores:
        return None
    roots = {os.getpid(): CLIENT, **watched.processes}
    earlier, later = _by_part(before, roots), _by_part(after, roots)
    parts = {part: later[part] - earlier.get(part, 0.0) for part in later if part is not None}
    foreign = {
        pid: process.cpu_s - (then.cpu_s if (then := before.processes.get(pid)) else 0.0)
        for pid, process in after.processes.items()
        if _part_of(pid, roots, after.processes) is None
    }
    greediest = max(foreign, key=lambda pid: foreign[pid], default=None)
    busy = sum(after.cores[core].busy_s - before.cores[core].busy_s for core in cores)
    stolen = sum(after.cores[core].stolen_s - before.cores[core].stolen_s for core in cores)

    def share(spent_s: float) -> float:
        return round(max(0.0, spent_s) / elapsed_s, 3)

    return CoresUsed(
        num_cores=len(cores),
        parts={part: share(spent) for part, spent in parts.items()},
        others=share(busy - sum(parts.values())),
        hypervisor=share(stolen),
        greediest="" if greediest is None else f"{after.processes[greediest].name} ({greediest})",
        greediest_cores=0.0 if greediest is None else share(foreign[greediest]),
    )


def _by_part(reading: CpuReading, roots: Mapping[int, str]) -> dict[str | None, float]:
    """Seconds so far by part; None is what other programs have used."""
    totals: dict[str | None, float] = dict.fromkeys(roots.values(), 0.0)
    for pid, process in reading.processes.items():
        part = _part_of(pid, roots, reading.processes)
        totals[part] = totals.get(part, 0.0) + process.cpu_s
    return totals


def _part_of(pid: int, roots: Mapping[int, str], processes: Mapping[int, _Process]) -> str | None:
    """What a process is by the nearest of its ancestors that is known; None = of other programs."""
    at = pid
    while at not in roots:
        if at not in processes:
            return None
        at = processes[at].parent
    return ENGINES if roots[at] == SERVERS and at != pid else roots[at]


# ---- which processes serve a URL


def serving(base_url: str, engine_urls: Iterable[str]) -> Watched | None:
    """Find the server's processes by who listens where.

    Args:
        base_url: What the client asks.
        engine_urls: Of those behind it, if it is a proxy and tells.

    Returns:
        None if the server is not on this machine, or a part of it that is cannot be seen: in
        another container, or another user's.
    """
    engines = [each for each in engine_urls if each != base_url]
    try:
        listening = _listening()
    except (psutil.Error, OSError):
        return None
    found: dict[int, str] = {}
    for url in (base_url, *engines):
        place = _here(url)
        if place is None:
            continue
        pid = next((listening[each] for each in place if each in listening), None)
        if pid is None:
            return None
        found[pid] = PROXY if url == base_url and engines else SERVERS
    if not found:
        return None
    return Watched({**_supervisors(found), **found}, _allowed([os.getpid(), *found]))


def _listening() -> dict[tuple[str, int], int]:
    """Who listens, by address and port."""
    return {
        (each.laddr.ip, each.laddr.port): each.pid
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.pid is not None
    }


def _here(url: str) -> list[tuple[str, int]] | None:
    """Addresses that a listener of this URL may have; None if they are another machine's."""
    parts = urlsplit(url)
    port = parts.port or _HTTP_PORT.get(parts.scheme, 80)
    own = {each.address for those in psutil.net_if_addrs().values() for each in those}
    try:
        known = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    addresses = [str(where[0]) for *_, where in known]
    if not any(each in own or each.startswith("127.") for each in addresses):
        return None
    return [(each, port) for each in (*addresses, "0.0.0.0", "::")]


def _supervisors(pids: Iterable[int]) -> dict[int, str]:
    """`pdserve up` above them: what else it has started is a store."""
    found = {}
    for pid in pids:
        try:
            supervisor = psutil.Process(pid).environ().get(SUPERVISOR_VARIABLE, "")
        except (psutil.Error, OSError):
            continue
        if supervisor.isdigit() and int(supervisor) != os.getpid():
            found[int(supervisor)] = STORE
    return found


def _allowed(pids: Iterable[int]) -> set[int]:
    """The cores on which some of these processes may run."""
    found: set[int] = set()
    for pid in pids:
        try:
            found |= os.sched_getaffinity(pid)
        except OSError:  # it has ended
            continue
    return found


# ---- /proc


def _cores(proc: Path) -> dict[int, _Core]:
    try:
        lines = (proc / "stat").read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        name, *fields = line.split()
        if name.startswith("cpu") and name != "cpu":
            # Of user, nice, system, idle, iowait, irq, softirq, steal; guests are part of user.
            user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
            busy = user + nice + system + irq + softirq
            found[int(name.removeprefix("cpu"))] = _Core(busy / _TICKS_PER_S, steal / _TICKS_PER_S)
    return found


def _processes(proc: Path) -> dict[int, _Process]:
    found = {}
    for entry in proc.glob("[0-9]*/stat"):
        try:
            # The name in parentheses may have spaces and parentheses; what follows it has none.
            head, _, tail = entry.read_text().rpartition(")")
        except OSError:  # it has ended
            continue
        fields = tail.split()
        cpu_s = sum(map(int, fields[11:15])) / _TICKS_PER_S
        found[int(entry.parent.name)] = _Process(cpu_s, int(fields[1]), head.partition("(")[2])
    return found
