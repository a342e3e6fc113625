"""What grows in processes that live through a soak: their memory, and what of it is in use.

A process's own memory (its unique set size) has holes: what was given back between pieces that
are still used. They come and go by half a MiB and more, and a leak is not told from them. What is
in use is told by the process itself (`tests.chaos.census`).
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import psutil

CENSUS = Path(__file__).parent / "census"
"""To be on the PYTHONPATH of a process that is asked."""
MAX_BLOCKS_PER_REQUEST = 1.0
"""Pieces that Python holds: a request that leaves one object leaves one at least."""
MAX_BYTES_PER_REQUEST = 100.0
"""In use, beside what lives of peers leave."""
MAX_BYTES_PER_LIFE = 32 << 10
"""In use: UCX keeps a connection to a peer that has died until its own process ends. Measured: 0.35
MB for 24 lives of engines, half of which were of the role that is met."""
MAX_GROWTH = 0.02
"""Of a process's own memory over half of a soak; what more there is of holes."""
MIN_SAMPLES = 12
"""A slope over fewer is none."""
NUM_TYPES = 12
_ANSWER_S = 30.0


@dataclass(frozen=True)
class Sample:
    """One look at a process and what it started.

    Attributes:
        at_s: Seconds into the run.
        requests: Requests that have ended so far.
        own_mib: Unique set size, MiB.
        used_mib: What allocators have given out, MiB.
    """

    at_s: float
    requests: int
    own_mib: float
    used_mib: float


def look(family: list[psutil.Process], folder: Path, at_s: float, requests: int) -> Sample:
    """Look at a process and what it started; `folder` is where each of them answers."""
    return Sample(
        at_s=at_s,
        requests=requests,
        own_mib=sum(each.memory_full_info().uss for each in family) / (1 << 20),
        used_mib=sum(each["bytes"] for each in _answers(family, folder, b"-")) / (1 << 20),
    )


def census(family: list[psutil.Process], folder: Path) -> dict[str, Any]:
    """Count what idle processes have in use: bytes, Python's pieces, and objects by type."""
    answers = _answers(family, folder, b"types")
    types: Counter[str] = Counter()
    for each in answers:
        types.update(each["types"])
    return {
        "bytes": sum(each["bytes"] for each in answers),
        "blocks": sum(each["blocks"] for each in answers),
        "types": types,
    }


def grown(
    before: dict[str, Any], after: dict[str, Any], *, requests: int, lives: int
) -> dict[str, Any]:
    """What there is more of after so many requests, and lives of peers that were met."""
    more = Counter(after["types"])
    more.subtract(before["types"])
    num_bytes, blocks = after["bytes"] - before["bytes"], after["blocks"] - before["blocks"]
    allowed = MAX_BYTES_PER_REQUEST * requests + MAX_BYTES_PER_LIFE * lives
    return {
        "requests": requests,
        "lives_of_peers": lives,
        "bytes": num_bytes,
        "blocks_per_request": round(blocks / requests, 2),
        "types": dict(more.most_common(NUM_TYPES)),
        "is_flat": num_bytes <= allowed and blocks < MAX_BLOCKS_PER_REQUEST * requests,
    }


def slope(samples: list[Sample]) -> dict[str, float | bool | None]:
    """How memory grows over the second half of a run, by least squares.

    Args:
        samples: In order.

    Returns:
        `is_flat` is None, and there is no slope, if the run was too short to tell.
    """
    from_s = samples[-1].at_s / 2
    settled = [sample for sample in samples if sample.at_s >= from_s]
    requests = np.array([sample.requests for sample in settled])
    if len(settled) < MIN_SAMPLES or requests[0] == requests[-1]:
        return {"from_s": round(from_s, 1), "is_flat": None}
    own, used = (
        np.array([getattr(sample, name) for sample in settled]) for name in ("own_mib", "used_mib")
    )
    own_slope, used_slope = (
        float(np.polyfit(requests, mib, 1)[0]) * (1 << 20) for mib in (own, used)
    )
    growth = own_slope / (1 << 20) * (requests[-1] - requests[0]) / own[0]
    return {
        "from_s": round(from_s, 1),
        "first_mib": round(float(own[0]), 1),
        "last_mib": round(float(own[-1]), 1),
        "used_mib": round(float(used[-1]), 1),
        "requests": int(requests[-1] - requests[0]),
        "own_bytes_per_request": round(own_slope, 1),
        "own_growth": round(float(growth), 4),
        "used_bytes_per_request": round(used_slope, 1),
        "is_flat": bool(growth <= MAX_GROWTH),
    }


def _answers(family: list[psutil.Process], folder: Path, what: bytes) -> list[dict[str, Any]]:
    answers = []
    for process in family:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWER_S)
            connection.connect(str(folder / str(process.pid)))
            connection.sendall(what)
            with connection.makefile("rb") as file:
                answers.append(json.load(file))
    return answers
