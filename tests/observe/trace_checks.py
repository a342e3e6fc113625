"""What a trace file must be: a strict reader of the Trace Event Format, for tests.

Stricter than viewers are, who draw something of nearly everything.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

# Timestamps are microseconds to the nanosecond, written in decimal.
EPSILON_US = 0.0005


@dataclass
class Row:
    """One asynchronous row: its outermost slice, and those right in it."""

    pid: int
    name: str
    start_us: float
    args: dict[str, Any]
    end_us: float = 0.0
    slices: list[tuple[str, float, float]] = field(default_factory=list)
    notes: list[tuple[str, float]] = field(default_factory=list)

    @property
    def stages_us(self) -> dict[str, float]:
        """Microseconds by stage."""
        total: dict[str, float] = defaultdict(float)
        for name, start, end in self.slices:
            total[name] += end - start
        return dict(total)

    def until_us(self, mark_us: float) -> float:
        """What the slices before a mark add up to."""
        before = (each for each in self.slices if (each[1] + each[2]) / 2 < mark_us)
        return sum(end - start for _, start, end in before)


@dataclass
class Arrow:
    """The slices that an arrow leads through."""

    slices: list[dict[str, Any]]


@dataclass
class Checked:
    """What a valid trace holds."""

    processes: dict[int, str]
    threads: dict[tuple[int, int], str]
    rows: list[Row]
    slices: list[dict[str, Any]]
    arrows: list[Arrow]
    counters: dict[tuple[int, str], list[dict[str, Any]]]

    def rows_of(self, process: str) -> list[Row]:
        """The rows of the process whose name ends so."""
        return [row for row in self.rows if self.processes[row.pid].endswith(process)]


def check(trace: dict[str, Any]) -> Checked:
    """Read a trace.

    Raises:
        AssertionError: It is not what the format says, or something has no end.
    """
    events = trace["traceEvents"]
    by_phase: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        assert isinstance(event["name"], str), event
        assert event["name"], event
        assert isinstance(event["pid"], int), event
        assert isinstance(event["ts"], int | float), event
        assert event["ts"] >= 0, event
        by_phase[event["ph"]].append(event)
    assert by_phase.keys() <= set("MXbnestfC"), by_phase.keys()
    processes, threads = _names(by_phase["M"])
    for event in events:
        assert event["pid"] in processes, f"a process without a name: {event}"
    slices = _threads(by_phase["X"], threads)
    checked = Checked(
        processes=processes,
        threads=threads,
        rows=_rows([e for e in events if e["ph"] in "bne"]),
        slices=by_phase["X"],
        arrows=_arrows([e for e in events if e["ph"] in "stf"], slices),
        counters=_counters(by_phase["C"]),
    )
    for row in checked.rows:
        for (_, _, end), (_, start, _) in itertools.pairwise(row.slices):
            assert abs(start - end) <= EPSILON_US, f"a gap or an overlap in {row}"
    return checked


def _names(events: list[dict[str, Any]]) -> tuple[dict[int, str], dict[tuple[int, int], str]]:
    processes: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    for event in events:
        if event["name"] == "process_name":
            assert event["pid"] not in processes, f"named twice: {event}"
            processes[event["pid"]] = event["args"]["name"]
        if event["name"] == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
    assert len(set(processes.values())) == len(processes), processes
    return processes, threads


def _threads(
    events: list[dict[str, Any]], threads: dict[tuple[int, int], str]
) -> dict[tuple[int, int], list[dict[str, Any]]]:
    slices: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        thread = event["pid"], event["tid"]
        assert thread in threads, f"a thread without a name: {event}"
        assert event["dur"] >= 0, event
        slices[thread].append(event)
    for of_thread in slices.values():
        of_thread.sort(key=lambda event: (event["ts"], -event["dur"]))
        open_until: list[float] = []
        for event in of_thread:
            while open_until and open_until[-1] <= event["ts"] + EPSILON_US:
                open_until.pop()
            end = event["ts"] + event["dur"]
            assert not open_until or end <= open_until[-1] + EPSILON_US, f"not nested: {event}"
            open_until.append(end)
    return slices


def _rows(events: list[dict[str, Any]]) -> list[Row]:
    rows: list[Row] = []
    by_id: dict[tuple[int, str, str], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        by_id[event["pid"], event["cat"], event["id2"]["local"]].append(event)
    for of_row in by_id.values():
        row: Row | None = None
        stack: list[dict[str, Any]] = []
        # As viewers do: by time, and in the order of the file where times are equal.
        for event in sorted(of_row, key=lambda event: event["ts"]):
            match event["ph"]:
                case "b":
                    if not stack:
                        assert row is None, f"two slices in one row: {event}"
                        row = Row(event["pid"], event["name"], event["ts"], event["args"])
                    stack.append(event)
                case "e":
                    assert stack, f"it ends and has not begun: {event}"
                    begun = stack.pop()
                    assert begun["name"] == event["name"], f"{begun} is open where {event} ends"
                    assert row is not None
                    if stack:
                        row.slices.append((event["name"], begun["ts"], event["ts"]))
                    else:
                        row.end_us = event["ts"]
                case "n":
                    assert stack, f"outside of its row: {event}"
                    assert row is not None
                    row.notes.append((event["name"], event["ts"]))
        assert not stack, f"never ends: {stack}"
        assert row is not None
        rows.append(row)
    return rows


def _arrows(
    events: list[dict[str, Any]], slices: dict[tuple[int, int], list[dict[str, Any]]]
) -> list[Arrow]:
    arrows: list[Arrow] = []
    by_id: dict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        by_id[event["cat"], event["name"], event["id"]].append(event)
    for of_arrow in by_id.values():
        phases = "".join(event["ph"] for event in of_arrow)
        assert phases == "s" + "t" * (len(of_arrow) - 2) + "f", f"{phases}: {of_arrow}"
        times = [event["ts"] for event in of_arrow]
        assert times == sorted(times), f"backwards: {of_arrow}"
        touched = []
        for event in of_arrow:
            around = [
                each
                for each in slices[event["pid"], event["tid"]]
                if each["ts"] <= event["ts"] < each["ts"] + each["dur"]
            ]
            assert around, f"touches no slice: {event}"
            touched.append(around[-1])
        arrows.append(Arrow(touched))
    return arrows


def _counters(events: list[dict[str, Any]]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    counters: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        assert all(isinstance(value, int | float) for value in event["args"].values()), event
        counters[event["pid"], event["name"]].append(event)
    for of_counter in counters.values():
        times = [event["ts"] for event in of_counter]
        assert times == sorted(times)
        assert len({tuple(event["args"]) for event in of_counter}) == 1, of_counter[0]
    return counters
