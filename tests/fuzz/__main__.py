"""Many inputs: `python -m tests.fuzz --inputs 100000 [--seed 0] [--target core ...]`.

Prints one JSON object per target: inputs tried, seconds, what ended, what was left, memory and
descriptors before and after. Exits with 1 if anything broke, was left, or grew.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import resource
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
from hypothesis import strategies as st

from tests.fuzz.control import HopTarget, RegistrationTarget
from tests.fuzz.core import CoreTarget
from tests.fuzz.http import HttpTarget
from tests.fuzz.side_channel import SideChannelTarget

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fuzz.core import Target

TARGETS: dict[str, Callable[[], Target]] = {
    "core": CoreTarget,
    "hop": HopTarget,
    "http": HttpTarget,
    "registration": RegistrationTarget,
    "side channel": SideChannelTarget,
}
_BATCH = 500
_WARM_UP = 2 * _BATCH
"""At least; half of the inputs, if that is more: what is kept of the requests that ended last is
bounded, and takes thousands of them to fill."""
_MAX_GROWTH_BYTES = 48 << 20
_MAX_DATA_BYTES = 4 << 30


class _Faults(logging.Handler):
    """Counts what was logged as an error, by its first words: each is a fault of ours."""

    def __init__(self) -> None:
        super().__init__(level=logging.ERROR)
        self.seen: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.seen[f"{record.msg} {error!r}"[:200]] += 1


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _try_batch(target: Target, num_inputs: int, seed: int) -> None:
    """Try inputs until one breaks the target.

    Raises:
        Exception: It did; what is drawn again would meet another state, so nothing is shrunk.
    """
    broken: list[Exception] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=num_inputs,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(st.data())
    def one(data: st.DataObject) -> None:
        if broken:
            return
        try:
            target.try_one(data)
        except Exception as error:
            if type(error).__module__.startswith("hypothesis"):
                raise
            broken.append(error)

    try:
        one()
    finally:
        if broken:
            raise broken[0]


def run(name: str, num_inputs: int, seed: int) -> dict[str, Any]:
    """Try so many inputs on a target; return what came of it."""
    faults = _Faults()
    logging.getLogger("pdserve").addHandler(faults)
    logging.getLogger("pdserve").propagate = False
    target = TARGETS[name]()
    before: tuple[int, int] | None = None
    broken: list[str] = []
    warm_up = max(_WARM_UP, num_inputs // 2)
    start_s = time.perf_counter()
    for batch, first in enumerate(range(0, num_inputs, _BATCH)):
        try:
            _try_batch(target, min(_BATCH, num_inputs - first), seed + batch)
            target.check_service()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-3:]
            at = " < ".join(f"{each.filename}:{each.lineno}" for each in reversed(where))
            broken.append(f"seed {seed + batch}: {error!r} at {at}"[:3000])
            target.close()
            target = TARGETS[name]()
        if before is None and first + _BATCH >= warm_up:
            gc.collect()
            before = _rss_bytes(), _num_descriptors()
    seconds = time.perf_counter() - start_s
    gc.collect()
    rss_bytes, num_descriptors = _rss_bytes(), _num_descriptors()
    before = before or (rss_bytes, num_descriptors)
    num_held = target.num_held
    target.close()
    logging.getLogger("pdserve").removeHandler(faults)
    return {
        "target": name,
        "inputs": num_inputs,
        "seconds": round(seconds, 1),
        "engines_ended": len(broken),
        "blocks_and_leases_left": num_held,
        "errors_logged": dict(faults.seen),
        "refused": target.num_refused,
        "rss_mib": [round(each / (1 << 20), 1) for each in (before[0], rss_bytes)],
        "descriptors": [before[1], num_descriptors],
        "broken": broken,
    }


def main() -> int:
    """Run the targets that were asked for, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--inputs", type=int, default=100_000, help="in all, over the targets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", action="append", choices=sorted(TARGETS))
    asked = parser.parse_args()
    # An input that takes all memory breaks its target, and not the machine.
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_DATA_BYTES, _MAX_DATA_BYTES))
    names = asked.target or sorted(TARGETS)
    is_good = True
    for name in names:
        told = run(name, asked.inputs // len(names), asked.seed)
        print(json.dumps(told, indent=2), flush=True)
        grown = (told["rss_mib"][1] - told["rss_mib"][0]) * (1 << 20) > _MAX_GROWTH_BYTES
        opened = told["descriptors"][1] > told["descriptors"][0]
        left = told["blocks_and_leases_left"] or told["errors_logged"]
        is_good &= not (told["broken"] or left or grown or opened)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
