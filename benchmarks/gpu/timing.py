"""Times work on a CUDA device, and keeps the results of one part's experiments.

Without a device every measurement is a *dry run*: small sizes (`sized`) on the CPU, where Triton's
interpreter runs the kernels if ``TRITON_INTERPRET=1``. Its times mean nothing; it shows that the
code runs.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from benchmarks.gpu.report_file import write

IS_DRY = not torch.cuda.is_available()
DEVICE = torch.device("cpu") if IS_DRY else torch.device("cuda", 0)

_BEYOND_CACHE = 192 << 20
"""Bytes of inputs that a 50 MB L2 cache keeps nothing useful of, when they are read in turn."""

_MAX_REPETITIONS = 200
_Size = TypeVar("_Size")


def sized(real: _Size, dry: _Size) -> _Size:
    """Return the size for a device, or the one for a dry run."""
    return dry if IS_DRY else real


def num_rotated(num_bytes: int, at_most: int = 64) -> int:
    """Return how many sets of inputs of ``num_bytes`` each outgrow the L2 cache."""
    return min(at_most, 1 + -(-_BEYOND_CACHE // max(1, num_bytes))) if not IS_DRY else 2


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one call, of many measured.

    Attributes:
        us: Median.
        low_us: Tenth percentile.
        high_us: Ninetieth percentile.
        repetitions: Measurements; each is of several calls.
    """

    us: float
    low_us: float
    high_us: float
    repetitions: int

    def row(self, **more: Any) -> dict[str, Any]:
        """Return it as JSON takes it, with what else is known of the call."""
        return {
            "us": round(self.us, 3),
            "low_us": round(self.low_us, 3),
            "high_us": round(self.high_us, 3),
            "repetitions": self.repetitions,
            **more,
        }

    def gb_per_s(self, num_bytes: int) -> float:
        """Return the rate at which a call moves ``num_bytes``."""
        return round(num_bytes / self.us / 1e3, 1)

    def tflop_per_s(self, num_flops: int) -> float:
        """Return the rate of a call's arithmetic."""
        return round(num_flops / self.us / 1e6, 1)


def time_in_graph(
    call: Callable[[int], object], *, calls: int = 20, budget_s: float = 0.3
) -> Timing:
    """Time calls that follow one another in a CUDA graph: no launch from the host is counted.

    Args:
        call: Must be capturable; its argument counts up from 0, to rotate the inputs.
        calls: In one graph. Together they should take some 100 us: the graph before a measured one
            hides what the host needs to launch it.
        budget_s: Of measuring; warming up and capturing are not in it.
    """
    if IS_DRY:
        return _time_dry(call)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what runs first compiles, and allocates what it keeps
        for i in range(min(calls, 3)):
            call(i)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    graph.replay()
    torch.cuda.synchronize()
    samples = _samples(graph.replay, graph.replay, calls, budget_s)
    graph.reset()
    return _timing(samples)


def time_eager(call: Callable[[int], object], *, calls: int = 1, budget_s: float = 0.3) -> Timing:
    """Time calls launched one by one, on a device that is kept busy until they are queued.

    For work that cannot be captured, or takes so long that launches do not count: a call's launch
    should take the host below 100 us.
    """
    if IS_DRY:
        return _time_dry(call)
    counter = itertools.count()
    for _ in range(3):
        call(next(counter))
    torch.cuda.synchronize()

    def wait() -> None:
        torch.cuda._sleep(200_000 + 200_000 * calls)  # cycles: about 100 us for each call

    def run() -> None:
        for _ in range(calls):
            call(next(counter))

    return _timing(_samples(wait, run, calls, budget_s))


def _samples(
    before: Callable[[], object], run: Callable[[], object], calls: int, budget_s: float
) -> list[float]:
    """Microseconds of a call, once for every time that ``run`` followed ``before``."""
    samples: list[float] = []
    end = time.perf_counter() + budget_s
    while len(samples) < 5 or (time.perf_counter() < end and len(samples) < _MAX_REPETITIONS):
        start_event = torch.cuda.Event(enable_timing=True)
        end_event = torch.cuda.Event(enable_timing=True)
        before()
        start_event.record()
        run()
        end_event.record()
        end_event.synchronize()
        samples.append(start_event.elapsed_time(end_event) * 1e3 / calls)
    return samples


def _time_dry(call: Callable[[int], object]) -> Timing:
    samples = []
    for i in range(2):
        start = time.perf_counter()
        call(i)
        samples.append((time.perf_counter() - start) * 1e6)
    return _timing(samples)


def _timing(samples: list[float]) -> Timing:
    samples = sorted(samples)
    return Timing(
        statistics.median(samples),
        samples[len(samples) // 10],
        samples[len(samples) * 9 // 10],
        len(samples),
    )


class Experiments:
    """Runs one part's experiments in turn, each guarded, until its time is over.

    Args:
        part: Its name, for the lines that are printed.
        limit_s: Nothing starts after so many seconds.

    Attributes:
        path: File of the results so far, for whoever ends this process; None: there is none.
        results: Name -> what the experiment returned, or ``{"error": ...}``.
    """

    path: ClassVar[Path | None] = None

    def __init__(self, part: str, limit_s: float) -> None:
        self._part = part
        self._end = time.monotonic() + limit_s
        self._is_lost = False
        self.results: dict[str, Any] = {}

    @property
    def left_s(self) -> float:
        """Seconds until nothing starts any more."""
        return self._end - time.monotonic()

    def run(self, name: str, experiment: Callable[[], Any]) -> Any:
        """Run an experiment, print its result as one line of JSON and return it.

        Returns:
            None where it raised, or was not started.
        """
        if self._is_lost or self.left_s <= 0:
            result: Any = {"skipped": "the device is lost" if self._is_lost else "time is over"}
            return self._keep(name, result, None)
        try:
            found = experiment()
            if not IS_DRY:
                torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001  # the machine is rarely seen: tell all
            where = traceback.format_exc(limit=-3)
            self._is_lost = _is_lost()
            text = f"{type(error).__name__}: {error}"[:600]
            return self._keep(name, {"error": text, "where": where[-1500:]}, None)
        return self._keep(name, found, found)

    def _keep(self, name: str, result: Any, found: Any) -> Any:
        self.results[name] = result
        write(self.path, self.results)
        print(f"{self._part}: {name}: {json.dumps(result, default=str)}", flush=True)
        return found


def _is_lost() -> bool:
    """Whether every later call fails too, as after an illegal access."""
    if IS_DRY:
        return False
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception:  # noqa: BLE001
        return True
    return False
