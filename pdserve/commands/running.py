"""Runs one coroutine as a process: port check first, signals meanwhile, exit code last."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any

from pdserve.commands.announce import START, log_start
from pdserve.commands.exit_codes import EXIT_DONE, EXIT_INTERRUPTED
from pdserve.config.http import TlsConfig
from pdserve.config.load import Resolved, Table, build
from pdserve.config.log import LogConfig
from pdserve.errors import ConfigError
from pdserve.http.tls import client_context, server_context
from pdserve.lifeline import heeded_signals
from pdserve.observe.log import configure_logging


def run_until_signalled(
    main: Coroutine[Any, Any, int],
    *,
    on_second_signal: Callable[[], None] = lambda: None,
    is_service: bool = True,
) -> int:
    """Run `main` to its end and return its exit code.

    The first SIGINT, SIGTERM or SIGHUP cancels it, and `main` drains what runs; the second calls
    `on_second_signal` and ends the process at once. The code is 130 after SIGINT and, as a service
    has done its work then, 0 after the others.

    Args:
        is_service: Whether it runs until it is stopped; what is cut short ends with 130.
    """
    stopped_by = asyncio.run(_signalled(main, on_second_signal))
    if isinstance(stopped_by, signal.Signals):
        return exit_code(stopped_by) if is_service else EXIT_INTERRUPTED
    return stopped_by


async def _signalled(
    main: Coroutine[Any, Any, int], on_second: Callable[[], None]
) -> int | signal.Signals:
    loop = asyncio.get_running_loop()
    task = loop.create_task(main)
    received: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        if received:
            on_second()
            os._exit(EXIT_INTERRUPTED)
        received.append(number)
        task.cancel()

    heeded = heeded_signals()
    for number in heeded:
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        return received[0]
    finally:
        for number in heeded if not received else ():  # one more would raise amid the loop's end
            loop.remove_signal_handler(number)


def exit_code(stopped_by: signal.Signals) -> int:
    """Return the exit code of a process that drained after a stop signal."""
    return EXIT_INTERRUPTED if stopped_by is signal.SIGINT else EXIT_DONE


def start_logging(command: str, table: Table, resolved: Mapping[str, Resolved]) -> None:
    """Send this process's logs to stderr, and begin them with its settings.

    Raises:
        ConfigError: There is no such level.
    """
    configure_logging(sys.stderr, build("log", LogConfig, table, resolved))
    sys.excepthook = _log_bug
    log_start(command, resolved)


def _log_bug(kind: type[BaseException], bug: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger(START).critical("failed", exc_info=(kind, bug, trace))


def require_tls(tls: TlsConfig) -> None:
    """Check that certificates and keys can be used, before anything slow begins.

    Raises:
        ConfigError: One cannot; the message names the file.
    """
    server_context(tls)
    client_context(tls)


def require_free(host: str, port: int, *, flag: str) -> None:
    """Check that `port` can be bound, before anything slow begins.

    Raises:
        ConfigError: It cannot; the message names `flag`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--{flag} is {port}, where another program listens on {host}:{port}: end it (`ss "
                f"-ltnp 'sport = :{port}'` shows it), or choose another --{flag}",
                param=flag,
            ) from None
        raise ConfigError(
            f"cannot listen on --host {host} --{flag} {port}: {error.strerror or error}", param=flag
        ) from None
