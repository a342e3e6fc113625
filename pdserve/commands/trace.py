"""`pdserve trace`: save the last seconds of a running deployment for a trace viewer.

Asks a proxy, which asks all its engines; or one engine's server. The processes send what they
recorded, and the trace is made here.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pdserve.bench.files import whole_file
from pdserve.commands.asking import asked
from pdserve.commands.exit_codes import EXIT_DONE
from pdserve.config.checks import require
from pdserve.config.load import build
from pdserve.config.trace import TraceConfig
from pdserve.errors import ConfigError, PdserveError, PeerError
from pdserve.observe.chrome_trace import ChromeTrace
from pdserve.observe.trace import HORIZON_S
from pdserve.wire.seal import UNREADABLE
from pdserve.wire.trace import Collection

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.config.load import Resolved, Table
    from pdserve.observe.chrome_trace import Summary

_SLACK_S = 0.5
"""Time between asking the first and the last process."""


def run(table: Table, resolved: Mapping[str, Resolved]) -> int:
    """Run `pdserve trace`.

    Raises:
        PdserveError: There is nothing to write, or the server cannot be reached.
        ConfigError: The file cannot be written, or no process keeps events for so long.
    """
    config = build("trace", TraceConfig, table, resolved)
    remedy = f"use at most {HORIZON_S:g}, for which events are kept"
    require(config.seconds <= HORIZON_S, "seconds", config.seconds, remedy)
    path = Path(config.output)
    if not path.parent.is_dir():
        raise ConfigError(
            f"--output is {config.output!r}, but the directory {str(path.parent)!r} does not "
            "exist: create it, or choose another path",
            param="output",
        )
    trace = ChromeTrace(fetch(config))
    if trace.summary.is_empty:
        missing = "".join(f"; missing: {each}" for each in trace.summary.missing)
        raise PdserveError(
            f"nothing ran in the last {config.seconds:g} s, so {path} was not written: repeat the "
            f"command while requests run, or raise --seconds ({HORIZON_S:g} s are kept){missing}"
        )
    num_bytes = _write(trace, path)
    print("\n".join(described(trace.summary, path, num_bytes)))
    return EXIT_DONE


def fetch(config: TraceConfig) -> Collection:
    """Ask the proxy or the engine for its events.

    Raises:
        PeerError: It cannot be reached, or is neither.
        ConfigError: It requires another API key.
    """
    path = f"/debug/trace?seconds={config.seconds!r}"
    body = asked(config.url, path, config.api_keys)
    try:
        return msgspec.json.decode(body, type=Collection)
    except UNREADABLE as error:
        raise PeerError(
            f"{config.url}{path} did not answer with a trace of pdserve: {error}"
        ) from error


def described(summary: Summary, path: Path, num_bytes: int) -> list[str]:
    """Return lines on what the trace holds, and how to view it."""
    plural = "" if summary.num_requests == 1 else "s"
    unfinished = f" ({summary.num_unfinished} still running)" if summary.num_unfinished else ""
    lines = [
        f"{len(summary.processes)} processes: {', '.join(summary.processes)}",
        (
            f"{summary.num_requests} request{plural}{unfinished}, {summary.num_steps} steps, "
            f"{summary.num_arrows} handoff{'' if summary.num_arrows == 1 else 's'} between engines"
        ),
        (
            f"clocks aligned within {summary.uncertainty_s * 1e3:.3f} ms:"
            if summary.uncertainty_s
            else "clocks: all processes share one"
        ),
        *(f"  {clock}" for clock in summary.clocks),
    ]
    if summary.complete_s < summary.seconds - _SLACK_S or summary.num_dropped:
        lines.append(
            f"complete for the last {summary.complete_s:.1f} of {summary.seconds:g} s; "
            f"{summary.num_dropped} events were dropped since the processes started"
        )
    lines += [f"missing: {each}" for each in summary.missing]
    size = f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"
    lines.append(f"{path} ({size}): open it at https://ui.perfetto.dev or chrome://tracing")
    return lines


def _write(trace: ChromeTrace, path: Path) -> int:
    try:
        with whole_file(path) as raw:
            if path.suffix == ".gz":
                # No time and no name inside: equal traces are equal files.
                with gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
                    file.writelines(trace.pieces())
            else:
                raw.writelines(trace.pieces())
    except OSError as error:
        raise ConfigError(
            f"--output is {str(path)!r}, which cannot be written: {error.strerror or error}",
            param="output",
        ) from error
    return path.stat().st_size
