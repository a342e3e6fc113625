"""Checks what KV tiers need of this machine, as the doctor does. Starts and changes nothing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import socket
import sys
import tempfile
import urllib.error
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pdserve.commands.findings import Finding, Grade
from pdserve.commands.segments import SHARED_MEMORY
from pdserve.config.tiers import (
    LMCACHE_VERSION,
    REDIS_PASSWORD,
    REDIS_USERNAME,
    DiskTier,
    RedisTier,
    Tiers,
)
from pdserve.http.plain_client import fetched

_LEAST_DISK_BYTES: Final = 64 << 20
_REDIS_TIMEOUT_S: Final = 2.0
_ANSWER_TIMEOUT_S: Final = 5.0


def findings_of(tiers: Tiers, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Can a server with these tiers run here?"""
    yield installed()
    yield shared_memory(tiers.cpu_bytes, SHARED_MEMORY)
    if tiers.disk is not None:
        yield disk(tiers.disk)
    if tiers.redis is not None:
        yield redis(tiers.redis, environ)


def installed() -> Finding:
    """Is LMCache installed, in the version that the connector supports?"""
    remedy = f"{sys.executable} -m pip install 'pdserve[lmcache]'"
    try:
        version = importlib.metadata.version("lmcache")
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            "lmcache", Grade.FAIL, "KV tiers need LMCache, which is not installed", remedy
        )
    if version != LMCACHE_VERSION:
        return Finding(
            "lmcache",
            Grade.FAIL,
            f"LMCache {version} is installed, but {LMCACHE_VERSION} is needed, because its "
            "protocol differs from version to version",
            remedy,
        )
    return Finding("lmcache", Grade.OK, f"LMCache {version}")


def shared_memory(num_bytes: int, folder: Path) -> Finding:
    """Is there room for the cpu tier?"""
    usage = shutil.disk_usage(folder)
    free = usage.free
    text = f"the cpu tier takes {_mib(num_bytes)} of {folder}, which has {_mib(free)} free"
    if free < num_bytes:
        enough_gib = (usage.used + num_bytes >> 30) + 1
        return Finding(
            "cpu tier",
            Grade.FAIL,
            text,
            f"make the tier smaller, or the folder larger: mount -o remount,size={enough_gib}G "
            f"{folder}; in a container docker run --shm-size={enough_gib}g, or an emptyDir of "
            "medium Memory",
        )
    return Finding("cpu tier", Grade.OK, text)


def disk(tier: DiskTier) -> Finding:
    """Can the folder be written, and is there room in it?"""
    folder = Path(tier.path)
    remedy = f"give it to user {os.getuid()}, or choose another folder for the disk tier"
    try:
        there = next(each for each in (folder, *folder.parents) if each.exists())
    except OSError as error:
        text = f"{folder} cannot be looked at: {error.strerror}"
        return Finding("disk tier", Grade.FAIL, text, remedy)
    if not there.is_dir() or not _is_writable(there):
        what = "is not writable" if there.is_dir() else "is not a folder"
        return Finding("disk tier", Grade.FAIL, f"{there} {what}", remedy)
    free = shutil.disk_usage(there).free
    text = f"the disk tier may use {_mib(tier.num_bytes)} in {folder}, where {_mib(free)} are free"
    if free < _LEAST_DISK_BYTES:
        room = f"make room for at least {_mib(_LEAST_DISK_BYTES)}, or choose another folder"
        return Finding("disk tier", Grade.FAIL, text, room)
    if free + _bytes_in(folder) < tier.num_bytes:
        return Finding(
            "disk tier",
            Grade.WARN,
            text,
            "what does not fit is dropped and computed again: make the tier smaller",
        )
    return Finding("disk tier", Grade.OK, text)


def redis(tier: RedisTier, environ: Mapping[str, str]) -> Finding:
    """Does the server answer?"""
    where = f"the Redis server at {tier.host}:{tier.port}"
    words = []
    if password := environ.get(REDIS_PASSWORD, ""):
        user = environ.get(REDIS_USERNAME, "")
        words.append(["AUTH", *([user] if user else []), password])
    try:
        with socket.create_connection((tier.host, tier.port), _REDIS_TIMEOUT_S) as connection:
            for command in [*words, ["PING"]]:
                parts = "".join(f"${len(each.encode())}\r\n{each}\r\n" for each in command)
                connection.sendall(f"*{len(command)}\r\n{parts}".encode())
                answer = connection.recv(512).decode(errors="replace").strip()
                if not answer.startswith("+"):
                    return Finding(
                        "redis tier",
                        Grade.FAIL,
                        f"{where} refuses {command[0]}: {answer or 'it closed the connection'}",
                        f"set {REDIS_USERNAME} and {REDIS_PASSWORD} to a user with permission to "
                        "read and write",
                    )
    except OSError as error:
        return Finding(
            "redis tier",
            Grade.FAIL,
            f"{where} does not answer: {error}",
            "start it, or leave the redis tier out",
        )
    return Finding("redis tier", Grade.OK, f"{where} answers")


def server(http_url: str, block_size: int) -> Finding:
    """Does a running server answer, with the supported version and a usable chunk size?

    Args:
        http_url: Its HTTP address, as in `lmcache.http-url`.
        block_size: Block size of the engines, in tokens.
    """
    flag = "--kv-transfer-config.lmcache.http-url"
    try:
        version = str(_ask(f"{http_url.rstrip('/')}/version")).partition("-")[0]
        status = _ask(f"{http_url.rstrip('/')}/status")
        chunk_size, is_healthy = int(status["chunk_size"]), bool(status["is_healthy"])
    except urllib.error.HTTPError as error:
        text = f"{http_url} is not an LMCache server: HTTP {error.code}"
        return Finding("kv server", Grade.FAIL, text, f"give {flag}")
    except OSError as error:
        reason = getattr(error, "reason", error)
        return Finding(
            "kv server",
            Grade.FAIL,
            f"{http_url} cannot be reached: {reason}",
            f"start pdserve kv-server --kv-tiers cpu:4GiB, or correct {flag}",
        )
    except (ValueError, RecursionError, KeyError, TypeError):
        text = f"{http_url} is not an LMCache server"
        return Finding("kv server", Grade.FAIL, text, f"give {flag}")
    text = f"{http_url} is LMCache {version} with chunks of {chunk_size} tokens"
    if version != LMCACHE_VERSION:
        return Finding("kv server", Grade.FAIL, text, f"run {LMCACHE_VERSION} there")
    if chunk_size % block_size:
        return Finding(
            "kv server",
            Grade.FAIL,
            f"{text}, which is not a multiple of --block-size {block_size}",
            "change its --chunk-size or the engines' --block-size",
        )
    if not is_healthy:
        return Finding(
            "kv server",
            Grade.WARN,
            f"{text}, but reports that it is unhealthy",
            f"see {http_url}/status",
        )
    return Finding("kv server", Grade.OK, text)


def _ask(url: str) -> Any:
    return json.loads(fetched(url, _ANSWER_TIMEOUT_S))


def _is_writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _bytes_in(folder: Path) -> int:
    """Return the size of a disk tier's files; a running server may be removing some."""
    num_bytes = 0
    for each in files_of(folder):
        with contextlib.suppress(FileNotFoundError):
            num_bytes += each.stat().st_size
    return num_bytes


def files_of(folder: Path) -> list[Path]:
    """Return the files of a disk tier."""
    return list(folder.glob("*.data"))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
