"""`pdserve kv-server`: an LMCache server that keeps KV for the engines of this host.

Unlike LMCache's own program, it first checks what would otherwise fail later, names its shared
memory so that none is left behind, allocates all of it at once (writing to memory that was promised
but does not exist ends a process), limits its folder of files across restarts, and reports no
usage.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import json
import logging
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from pdserve.commands.announce import START
from pdserve.commands.exit_codes import EXIT_CONFIG, EXIT_DONE
from pdserve.commands.findings import Grade
from pdserve.commands.running import require_free
from pdserve.commands.segments import own_segment
from pdserve.commands.tier_checks import files_of, findings_of
from pdserve.config.load import Resolved, Table, build
from pdserve.config.tiers import (
    LMCACHE_SILENT,
    LOOPBACK,
    DiskTier,
    KvServerConfig,
    Tiers,
    parse_tiers,
)
from pdserve.errors import ConfigError
from pdserve.lifeline import heeded_signals
from pdserve.observe.log import RepeatFilter, formatter

_log = logging.getLogger(START)

_PROGRAM: Final = "lmcache.v1.multiprocess.http_server"
_HELD_LOCKS: Final = "pdserve.connectors.lmcache.held_locks"
_LOOK_S: Final = 0.02
_GIB: Final = 1 << 30
_POPULATE_WRITE: Final = 23
"""MADV_POPULATE_WRITE of Linux' mman.h; Python has no name for it."""
_STORES: Final = "lmcache.v1.distributed.storage_controllers.store_controller"
"""LMCache's logger that warns of each chunk that a tier refuses, as Redis does once it is full."""
_REPEAT_S: Final = 60.0
_CLEARED_BYTES: Final = 32 << 20
"""Bytes cleared at a time, in about ten milliseconds."""


def run(table: Table, resolved: Mapping[str, Resolved]) -> int:
    """Run `pdserve kv-server` until SIGTERM, SIGHUP or Ctrl-C.

    Raises:
        ConfigError: A tier cannot be used here, or the port is taken.
    """
    config = build("kv", KvServerConfig, table, resolved)
    tiers = parse_tiers(config.tiers)
    require_free(LOOPBACK, config.port, flag="port")
    require_free(LOOPBACK, config.http_port, flag="http-port")
    for finding in findings_of(tiers, os.environ):
        if finding.verdict is Grade.FAIL:
            raise ConfigError(f"{finding.text}; {finding.remedy}", param="kv-tiers")
        if finding.verdict is Grade.WARN:
            _log.warning("%s; %s", finding.text, finding.remedy)
    _log.info(
        "engines find it with --kv-transfer-config.lmcache.url tcp://%s:%d "
        "--kv-transfer-config.lmcache.http-url http://%s:%d",
        *(LOOPBACK, config.port, LOOPBACK, config.http_port),
    )
    segment = own_segment()
    _Reserving(segment, tiers.cpu_bytes, config.port).start()
    disk_bytes = 0 if tiers.disk is None else make_room(tiers.disk)
    _serve(arguments_of(config, tiers, segment, disk_bytes=disk_bytes))
    return EXIT_DONE


def arguments_of(
    config: KvServerConfig, tiers: Tiers, segment: Path, *, disk_bytes: int = 0
) -> list[str]:
    """Return the arguments of LMCache's server.

    Args:
        segment: Its shared memory.
        disk_bytes: Bytes that it may write into the folder of the disk tier.
    """
    words = ["--host", LOOPBACK, "--port", str(config.port)]
    words += ["--http-host", LOOPBACK, "--http-port", str(config.http_port)]
    words += ["--chunk-size", str(config.chunk_size), "--hash-algorithm", "blake3"]
    words += ["--l1-size-gb", repr(tiers.cpu_bytes / _GIB), "--no-l1-use-lazy"]
    words += ["--eviction-policy", "LRU", "--shm-name", segment.name]
    words += ["--supported-transfer-mode", "engine_driven", "--disable-observability"]
    held_locks = {"module_path": _HELD_LOCKS, "config": {"segment": str(segment)}}
    words += ["--server-module", json.dumps(held_locks)]
    adapters: list[dict[str, Any]] = []
    if tiers.disk is not None:
        adapters.append(
            {
                "type": "fs_native",
                "base_path": tiers.disk.path,
                "max_capacity_gb": disk_bytes / _GIB,
                "eviction": {"eviction_policy": "LRU"},
            }
        )
    if tiers.redis is not None:
        adapters.append({"type": "resp", "host": tiers.redis.host, "port": tiers.redis.port})
    return words + [word for each in adapters for word in ("--l2-adapter", json.dumps(each))]


def make_room(tier: DiskTier) -> int:
    """Remove the oldest files until they take half of a disk tier; return the bytes that are left.

    LMCache counts only the files of its own process: those of an earlier one are used, but neither
    counted nor removed. So its limit is lower than the tier's size.
    """
    folder = Path(tier.path)
    folder.mkdir(parents=True, exist_ok=True)
    files = sorted(
        (each.stat().st_mtime_ns, each.stat().st_size, each) for each in files_of(folder)
    )
    num_taken = sum(size for _, size, _ in files)
    for _, size, path in files:
        if num_taken <= tier.num_bytes // 2:
            break
        path.unlink()
        num_taken -= size
    return tier.num_bytes - num_taken


class _Reserving(threading.Thread):
    """Allocates and maps the pages of the segment once LMCache has; ends the server without them.

    A page that is not allocated yet is cleared by its first writer, which makes a save take ten
    times as long as its copy. One that LMCache has not mapped cuts the kernel's copies to a file
    short, and each time it clears what it has not copied of up to 2 MiB. LMCache serves without a
    segment if others have taken the memory while it was starting, and no engine can use such a
    server.

    Args:
        port: On which LMCache listens once it has made all it is going to make.
    """

    def __init__(self, segment: Path, num_bytes: int, port: int) -> None:
        super().__init__(name="reserve", daemon=True)
        self._segment = segment
        self._num_bytes = num_bytes
        self._port = port

    def run(self) -> None:
        """Wait until LMCache has mapped the segment, and allocate and map its pages."""
        while not (mapped := _mapped(self._segment)):
            if _is_listening(self._port) and not _mapped(self._segment):
                self._end(os.strerror(errno.ENOSPC))
            time.sleep(_LOOK_S)
        with self._segment.open("r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, self._num_bytes)
            except OSError as error:
                self._end(error.strerror)
        for start, end in mapped:
            _clear(start, end)

    def _end(self, reason: str | None) -> NoReturn:
        _log.error(
            "the cpu tier's %d MiB of shared memory cannot be had: %s; make the tier smaller",
            *(self._num_bytes >> 20, reason),
        )
        os._exit(EXIT_CONFIG)


def _is_listening(port: int) -> bool:
    """Whether somebody listens on a port of loopback."""
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0


def _mapped(segment: Path) -> list[tuple[int, int]]:
    """Return the address ranges in which this process has mapped a file."""
    if not segment.exists():
        return []
    lines = [each.split(maxsplit=5) for each in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [line[0].split("-") for line in lines if line[5:] == [str(segment)]]
    return [(int(start, 16), int(end, 16)) for start, end in ranges]


def _clear(start: int, end: int) -> None:
    """Have the kernel allocate and map pages now, keeping written ones; needs Linux 5.14.

    It uses ctypes, which lets the server's other threads run, and goes piece by piece, because a
    thread that maps or unmaps memory waits for a piece. 100 GiB take half a minute or more.
    """
    madvise = ctypes.CDLL(None).madvise
    for address in range(start, end, _CLEARED_BYTES):
        size = min(_CLEARED_BYTES, end - address)
        madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_WRITE)


def _serve(arguments: list[str]) -> None:
    """Run LMCache's server, in this process, until it is interrupted.

    Until it has handlers of its own, and again once it has closed, a signal ends the process at
    once: an import could swallow an exception, and the server would continue.
    """
    # Engines copy their KV themselves: on a device the server would only take memory.
    os.environ.update(LMCACHE_SILENT, CUDA_VISIBLE_DEVICES="")
    if os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING") == "WARNING":
        logging.disable(logging.INFO)  # uvicorn's as well, which has a line for each request
    logging.getLogger(_STORES).addFilter(RepeatFilter(_REPEAT_S))
    sys.argv = [_PROGRAM, *arguments]
    for number in heeded_signals():
        signal.signal(number, lambda *_: os._exit(EXIT_DONE))
    if signal.SIGHUP in heeded_signals():  # LMCache has no handler for it
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    # Else its lines have colours, whatever --log-format asks for.
    vars(importlib.import_module("lmcache.logging"))["CustomFormatter"] = formatter
    runpy.run_module(_PROGRAM, run_name="__main__")
