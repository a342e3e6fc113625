"""`pdserve drain`: empty engines in bounded time, so that they can be stopped or changed.

Asks all proxies in front of them at the same time; the proxies do the work. What one of them did is
reported even if another one fails.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

import msgspec

from pdserve.commands.announce import tell_failure
from pdserve.commands.asking import asked
from pdserve.commands.exit_codes import EXIT_DONE, EXIT_FAILED
from pdserve.config.drain import DrainConfig
from pdserve.config.load import build
from pdserve.errors import ConfigError, PdserveError, PeerError
from pdserve.wire.drain import PATH, DrainReport, DrainRequest
from pdserve.wire.seal import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.config.load import Resolved, Table

_SLACK_S = 10.0
"""Time that a proxy may take beyond the deadline."""


def run(table: Table, resolved: Mapping[str, Resolved]) -> int:
    """Run `pdserve drain`.

    Raises:
        ConfigError: No engine is named, a proxy does not know one, or wants another key.
        PeerError: A proxy cannot be reached, or does not answer like one; of several failures, the
            last one.
    """
    config = build("drain", DrainConfig, table, resolved)
    if not config.engines:
        raise ConfigError(
            "ENGINE is missing: run pdserve drain URL with the URL of an engine", param="engines"
        )
    asked_pairs = [
        (proxy, engine, _asked(config, proxy, engine))
        for proxy, engine in itertools.product(config.proxies, config.engines)
    ]
    failures: list[PdserveError] = []
    is_done = True
    for proxy, engine, answer in asked_pairs:
        named = proxy if len(config.proxies) > 1 else ""
        try:
            if config.is_resumed:
                answer.result()
                print(f"{engine} receives requests again{f' of {named}' if named else ''}")
                continue
            report = _report(proxy, answer.result())
        except PdserveError as error:
            failures.append(error)
            continue
        print(described(report, named))
        is_done = is_done and report.is_empty
    if failures:
        for failure in failures[:-1]:
            tell_failure("drain", failure)
        raise failures[-1]
    return EXIT_DONE if is_done else EXIT_FAILED


def ask(config: DrainConfig, proxy: str, engine: str) -> bytes:
    """Ask one proxy to drain one engine, or to use it again; return its answer.

    Raises:
        ConfigError, PeerError: As in `run`.
    """
    return asked(
        proxy,
        PATH,
        config.api_keys,
        body=msgspec.json.encode(DrainRequest(engine, config.deadline_s)),
        method="DELETE" if config.is_resumed else "POST",
        timeout_s=config.deadline_s + _SLACK_S,
        remedy="give the proxy's base URL with --proxy",
    )


def _asked(config: DrainConfig, proxy: str, engine: str) -> Future[bytes]:
    """Ask in a thread that nothing waits for when Ctrl-C ends this command."""
    answer: Future[bytes] = Future()

    def run() -> None:
        try:
            answer.set_result(ask(config, proxy, engine))
        except Exception as error:  # noqa: BLE001 - it is raised where the answer is awaited
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer


def described(report: DrainReport, proxy: str) -> str:
    """One line: whether the engine is empty, and what became of its requests."""
    if report.is_empty:
        state = "is empty"
    elif report.num_left:
        state = f"still has {report.num_left} requests"
    else:
        state = "still has requests that no proxy relays, or KV that another engine is to read,"
    of = f" of {proxy}" if proxy else ""
    return (
        f"{report.url} {state} after {report.seconds:.1f} s: of the requests{of} that ran there, "
        f"{report.num_finished} finished and {report.num_moved} moved to other engines"
    )


def _report(proxy: str, answer: bytes) -> DrainReport:
    try:
        return msgspec.json.decode(answer, type=DrainReport)
    except UNREADABLE as error:
        raise PeerError(f"{proxy} did not answer as a pdserve proxy does: {error}") from error
