"""Writes into docs/gpu.md which CUDA kernels were measured on a device as they are now.

python -m tools.measured_kernels           # writes it
python -m tools.measured_kernels --check   # exit code 1 if it is not what would be written
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.kernel_parts import part_hashes
from benchmarks.gpu.targets import has_run
from tools.written import write_or_check

ROOT: Final = Path(__file__).parents[1]
DOCUMENT: Final = ROOT / "docs" / "gpu.md"
RESULTS: Final = ROOT / "benchmarks" / "results"
_BEGIN: Final = "<!-- written by python -m tools.measured_kernels -->\n"
_END: Final = "<!-- end -->\n"
_FIGURES: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "attention": (("step", "graph "), ("attention", "decode ")),
    "latent attention": (("attention", "latents: "),),
    "linear layers": (("step", "graph "), ("linear", "tiles ")),
    "experts": (("linear", "experts "),),
    "norms": (("step", "graph "), ("rows", "rms_norm")),
    "activation": (("rows", "silu_and_mul"),),
    "activation of Gemma": (("rows", "gelu_and_mul"),),
    "rotation and cache write": (("step", "graph "), ("rows", "rope_and_cache")),
    "digests": (("rows", "kv_digests"),),
    "copies to and from a store": (("copies", "chunks, "),),
    "choice of tokens": (("step", "sampling "),),
    "penalties and other rules": (("step", "runner B=1 penalties"),),
    "masks of grammars": (("rows", "mask of "),),
    "sums over ranks": (("rows", "sum_ranks"),),
    "launching": (("step", "graph "),),
}
"""Part of the kernels -> a part of `benchmarks.gpu` and the experiments in it that measure it."""


def table(hashes: dict[str, str], reports: list[dict[str, Any]]) -> str:
    """Make the table.

    Args:
        hashes: Of each part as it is now; see `part_hashes`.
        reports: What `benchmarks.gpu` left, oldest first.
    """
    rows = [f"| {part} | {_state(part, hashes[part], reports)} |\n" for part in hashes]
    return f"| kernels | as they are now |\n|---|---|\n{''.join(rows)}"


def _state(part: str, current: str, reports: list[dict[str, Any]]) -> str:
    ran = [
        report["environment"]
        for report in reports
        if any(_has_figures(report, *where) for where in _FIGURES[part])
    ]
    same = [environment for environment in ran if environment["kernels"].get(part) == current]
    if same:
        last = same[-1]
        return f"measured {last['date']}, {last['device']}, Triton {last['triton']}"
    if ran:
        return f"**unmeasured**: changed since {ran[-1]['date']}"
    return "**unmeasured**"


def _has_figures(report: dict[str, Any], part: str, experiment: str) -> bool:
    found = report["parts"].get(part, {})
    found = found.get("results", found)
    return any(name.startswith(experiment) and has_run(figures) for name, figures in found.items())


def reports() -> list[dict[str, Any]]:
    """Return what devices left, oldest first."""
    files = sorted(RESULTS.glob("*-gpu-*.json"))
    return [json.loads(file.read_text()) for file in files]


def document() -> str:
    """Return the page with the table as it should be.

    Raises:
        ValueError: The page has no place for it.
    """
    before, found, rest = DOCUMENT.read_text().partition(_BEGIN)
    _, ended, after = rest.partition(_END)
    if not (found and ended):
        raise ValueError(f"{DOCUMENT} has no {_BEGIN}...{_END}")
    return f"{before}{_BEGIN}{table(part_hashes(), reports())}{_END}{after}"


if __name__ == "__main__":
    sys.exit(write_or_check(DOCUMENT, document()))
