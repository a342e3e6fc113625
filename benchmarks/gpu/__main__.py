"""Measures what a CUDA device can do, and how much of it the kernels and the step reach.

Each part runs in a process of its own, so that one which crashes or hangs leaves the others alone.
The file is written after each part, and holds the environment that the figures belong to. Without a
device it is a dry run, of small sizes on the CPU.

With ``--checks``, the device's tests and NVIDIA's sanitizer run first, and one file is left in
`benchmarks/results`: the run book of a machine with a GPU.

    python -m benchmarks.gpu [PART ...] [--checks] [--json FILE] [--limit-s N] [--no-sweeps]
                             [--vllm PROGRAM]                                  parts: see PARTS
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import checks, targets
from benchmarks.gpu.kernel_parts import part_hashes
from benchmarks.gpu.report_file import write

PARTS = ("peaks", "copies", "rows", "attention", "bits", "linear", "step", "fast", "serving")
_ROOT = Path(__file__).resolve().parents[2]
_LONGER = {"serving": 3.0}
"""Parts that start engines, and how many times as long they may take as others."""
_SWEPT = ("attention", "linear")
"""Parts that go on to time other tilings than those that are shipped."""
_GRACE_S = 60.0
"""For a part's imports and its last experiment, before it is killed."""


def existing_parts() -> list[str]:
    """Return the parts whose module is there, in order."""
    return [name for name in PARTS if importlib.util.find_spec(f"benchmarks.gpu.{name}")]


def environment() -> dict[str, Any]:
    """Return the device, the versions and the kernels that figures belong to."""
    import torch
    import triton

    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "commit": _output("git", "-C", str(_ROOT), "rev-parse", "HEAD"),
        "kernels": part_hashes(),
        "driver": _smi("driver_version"),
        "clocks": clocks(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
        }
    else:
        found["device"] = "none: a dry run, whose figures mean nothing"
    return found


def clocks() -> str | None:
    """Return clocks, power, temperature and what holds the clocks down, as nvidia-smi says."""
    fields = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,power.limit"
    return _smi(f"{fields},temperature.gpu,clocks_event_reasons.active") or _smi(fields)


def _smi(fields: str) -> str | None:
    return _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")


def _output(*command: str) -> str | None:
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


def run_part(name: str, limit_s: float, *flags: str) -> dict[str, Any]:
    """Run one part in its own process, with more flags; never raises for what the part does."""
    started = time.monotonic()
    before = clocks()
    limit_s *= _LONGER.get(name, 1.0)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.gpu", name, "--here", "--json", str(result)]
        try:
            code: int | str = subprocess.run(
                [*command, "--limit-s", str(limit_s), *flags],
                timeout=limit_s + _GRACE_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"killed after {limit_s + _GRACE_S:.0f} s"
        found = json.loads(result.read_text()) if result.exists() else {}
        if code:
            found["error"] = f"ended by {code}"
    return {
        "seconds": round(time.monotonic() - started, 1),
        "clocks_before": before,
        "clocks_after": clocks(),
        "results": found,
    }


def outcome(report: dict[str, Any]) -> tuple[list[str], bool]:
    """Return what was found in lines, and whether something failed: a missed share is no failure.

    What differs in a dry run tells nothing: there NumPy multiplies.
    """
    found = report.get("checks", {})
    failed = [f"failed: {name}" for name in targets.errors(report)]
    if "targets" in report:
        failed += [f"differs: {name}" for name in targets.differences(report)]
    lines = [checks.in_words(name, one) for name, one in found.items()] + failed
    lines += [targets.in_words(row) for row in report.get("targets", [])]
    return lines, bool(failed) or not all(one.get("passed", True) for one in found.values())


def file_name(environment: dict[str, Any]) -> Path:
    """Return where the report of a whole run is kept."""
    device = re.sub(r"[^a-z0-9]+", "-", environment["device"].lower())
    return _ROOT / "benchmarks" / "results" / f"{environment['date']}-{device}-gpu-all.json"


def main() -> int:
    parts = existing_parts()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}; all")
    parser.add_argument("--json", type=Path, help="file for the report")
    parser.add_argument("--limit-s", type=float, default=120.0, help="seconds for a part")
    parser.add_argument("--here", action="store_true", help="one part, in this process")
    parser.add_argument("--no-sweeps", action="store_true", help="only the tilings shipped")
    parser.add_argument(
        "--checks", action="store_true", help="first the tests that need a device, and a sanitizer"
    )
    parser.add_argument(
        "--vllm", metavar="PROGRAM", help="vLLM's command: the part `serving` measures it as well"
    )
    args = parser.parse_args()
    if unknown := set(args.parts) - set(parts):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    if args.here:
        (name,) = args.parts
        module = importlib.import_module(f"benchmarks.gpu.{name}")
        experiments = importlib.import_module("benchmarks.gpu.timing").Experiments
        experiments.path = args.json
        more: dict[str, Any] = {"vllm": args.vllm} if args.vllm else {}
        if name in _SWEPT:
            more["sweeps"] = not args.no_sweeps
        write(args.json, module.run(args.limit_s, **more))
        return 0
    report: dict[str, Any] = {"benchmark": "gpu", "environment": environment(), "parts": {}}
    print(json.dumps(report["environment"]), flush=True)
    is_dry = "capability" not in report["environment"]
    if args.checks:
        if is_dry:
            parser.error("--checks needs a CUDA device, and torch finds none")
        args.json = args.json or file_name(report["environment"])
        report["checks"] = checks.check()
    for name in args.parts or parts:
        flags = ["--vllm", args.vllm] if args.vllm and name == "serving" else []
        flags += ["--no-sweeps"] * args.no_sweeps
        report["parts"][name] = run_part(name, args.limit_s, *flags)
        write(args.json, report)
    if not is_dry:
        report["targets"] = targets.judged(report)
        write(args.json, report)
    if args.json is None:
        print(json.dumps(report, default=str))
    lines, has_failed = outcome(report)
    print(*lines, sep="\n")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
