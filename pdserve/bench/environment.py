"""Describes the machine and the versions with which figures are measured."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path

import aiohttp

import pdserve


def describe() -> dict[str, object]:
    """Return CPU, cores, memory, load, versions, commit and date, as JSON values."""
    return {
        "cpu": _cpu(),
        "cores": num_cores(),
        "memory_bytes": _memory_bytes(),
        "load_average": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "pdserve": pdserve.__version__,
        "aiohttp": aiohttp.__version__,
        "git_commit": _git_commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _git_commit() -> str | None:
    """Return the commit that pdserve runs from, with a plus if files differ from it."""
    tree = Path(pdserve.__file__).parents[1]
    if not (tree / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "--no-optional-locks", "-C", str(tree), *arguments],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
