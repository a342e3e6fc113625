"""Measures how many cores a run used: by client, server parts and other programs.

Engines may share a machine with the proxy and the client, with other programs and, under a
hypervisor, with other machines; this shows how much each of them uses. It compares two readings of
Linux's /proc; knows no request and no figure.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import psutil

from pdserve.bench.records import CoresUsed

_Place = tuple[str, int]
"""Address and port."""

ENGINES: Final = "engines"
SERVERS: Final = "API servers"
PROXY: Final = "proxy"
STORE: Final = "store"
CLIENT: Final = "client"

_PROC: Final = Path("/proc")
_LEAST_S: Final = 1.0
"""Minimum time between two readings, because each process's ticks are 10 ms."""
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_HTTP_PORT: Final = {"http": 80, "https": 443}


class _Process(NamedTuple):
    """CPU time since its start, including its children that have ended."""

    cpu_s: float
    parent: int
    name: str


class _Core(NamedTuple):
    """Times since the machine's start; `busy_s` excludes the hypervisor's part."""

    busy_s: float
    stolen_s: float


class CpuReading(NamedTuple):
    """CPU time so far, of each core and of each process; both empty without /proc."""

    at_s: float
    cores: Mapping[int, _Core]
    processes: Mapping[int, _Process]


class Watched(NamedTuple):
    """The processes and cores to measure in a run.

    Attributes:
        processes: The server's processes by pid: `SERVERS`, `PROXY` or `STORE`. Their children are
            the same part, except that those of an API server are its engine.
        cores: The cores that it shares with the client.
    """

    processes: Mapping[int, str]
    cores: Collection[int]


def read_cpu(proc: Path = _PROC) -> CpuReading:
    """Read how much time every core and every process has used so far."""
    return CpuReading(time.monotonic(), _cores(proc), _processes(proc))


def used_cores(before: CpuReading, after: CpuReading, watched: Watched) -> CoresUsed | None:
    """Return the average number of busy cores between two readings.

    Args:
        before, after: The first and the second reading.
        watched: The server's processes; this process and its other children are the client.

    Returns:
        None if the readings are too close together, or there are none.
    """
    elapsed_s = after.at_s - before.at_s
    cores = [core for core in watched.cores if core in before.cores and core in after.cores]
    if elapsed_s < _LEAST_S or not cores:
        return None
    roots = {os.getpid(): CLIENT, **watched.processes}
    earlier, later = _by_part(before, roots), _by_part(after, roots)
    parts = {part: later[part] - earlier.get(part, 0.0) for part in later if part is not None}
    foreign = {
        pid: process.cpu_s
        for pid, process in after.processes.items()
        if _part_of(pid, roots, after) is None
    }
    for pid, process in before.processes.items():
        # All that a process ever used is its parent's once it has ended.
        holder = next((each for each in _line(pid, before) if each in after.processes), None)
        if holder in foreign:
            foreign[holder] -= process.cpu_s
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
        greediest=""
        if greediest is None
        else f"process {greediest}, {after.processes[greediest].name}",
        greediest_cores=0.0 if greediest is None else share(foreign[greediest]),
    )


def _by_part(reading: CpuReading, roots: Mapping[int, str]) -> dict[str | None, float]:
    """Seconds so far by part; None is the part of other programs."""
    totals: dict[str | None, float] = dict.fromkeys(roots.values(), 0.0)
    for pid, process in reading.processes.items():
        part = _part_of(pid, roots, reading)
        totals[part] = totals.get(part, 0.0) + process.cpu_s
    return totals


def _part_of(pid: int, roots: Mapping[int, str], reading: CpuReading) -> str | None:
    """Return a process's part by its nearest known ancestor; None = other programs."""
    for at in _line(pid, reading):
        if at in roots:
            return ENGINES if roots[at] == SERVERS and at != pid else roots[at]
    return None


# ---- which processes serve a URL


def serving(base_url: str, engine_urls: Collection[str], reading: CpuReading) -> Watched | None:
    """Find the server's processes: the listener, and the processes connected to it.

    Args:
        base_url: URL that the client uses.
        engine_urls: URLs of the engines behind it, if it is a proxy and reports them.
        reading: A reading, which has each process's parent.

    Returns:
        None if part of the server is on another machine, or invisible because it is in another
        container or belongs to another user.
    """
    try:
        sockets = _Sockets()
    except (psutil.Error, OSError):
        return None
    found: dict[int, str] = {}
    for url in (*engine_urls, base_url):
        pid = sockets.listener(url)
        if pid is None:
            return None
        found.setdefault(pid, SERVERS if url in engine_urls or not found else PROXY)
    further = STORE if len(found) > 1 else SERVERS
    unseen = deque(found)
    while unseen:
        root = unseen.popleft()
        below = [pid for pid in reading.processes if root in _line(pid, reading)]
        for pid in sockets.asked_by({root, *below}):
            if pid is None:
                return None
            if found.keys().isdisjoint(_line(pid, reading)):
                found[pid] = further
                unseen.append(pid)
    return Watched(found, _allowed([os.getpid(), *found]))


class _Sockets:
    """The TCP sockets of this machine and their owners."""

    def __init__(self) -> None:
        self._listeners: dict[_Place, int | None] = {}
        self._ends: dict[tuple[_Place, _Place], int | None] = {}
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN:
                self._listeners[_place(each.laddr)] = each.pid
            elif each.status == psutil.CONN_ESTABLISHED:
                self._ends[_place(each.laddr), _place(each.raddr)] = each.pid

    def listener(self, url: str) -> int | None:
        """Return the process that listens at a URL; None if none is visible on this machine."""
        parts = urlsplit(url)
        port = parts.port or _HTTP_PORT.get(parts.scheme, 80)
        own = {each.address for those in psutil.net_if_addrs().values() for each in those}
        try:
            known = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        except OSError:
            return None
        hosts = [str(where[0]) for *_, where in known]
        if not any(host in own or host.startswith("127.") for host in hosts):
            return None
        listening = (self._listeners.get(at) for host in hosts for at in _places((host, port)))
        return next(filter(None, listening), None)

    def asked_by(self, pids: Collection[int]) -> Iterator[int | None]:
        """Return the processes at the other end of these connections; None = not visible."""
        for (here, there), pid in self._ends.items():
            if pid in pids and not any(at in self._listeners for at in _places(here)):
                taken = self._ends.get((there, here))
                waits_at = (self._listeners.get(at) for at in _places(there))
                yield taken if taken is not None else next(filter(None, waits_at), None)


def _place(address: Any) -> _Place:
    return address.ip.removeprefix("::ffff:"), address.port


def _places(place: _Place) -> list[_Place]:
    """Return the addresses to which a listener reached there may be bound."""
    host, port = place
    return [(host, port), ("0.0.0.0", port), ("::", port)]


def _line(pid: int, reading: CpuReading) -> list[int]:
    """A process, its parent, and so on."""
    found = [pid]
    while (process := reading.processes.get(found[-1])) is not None:
        found.append(process.parent)
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
