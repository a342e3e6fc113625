"""The syntax of `--kv-tiers`: the tiers of a store that keeps KV beyond requests and engines.

`cpu:4GiB,disk:/data/kv:50GiB,redis:redis://127.0.0.1:6379`: shared memory, which engines copy from
and to, and the tiers behind it. Knows no server: `commands.kv_server` starts one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final, NoReturn
from urllib.parse import urlsplit

import msgspec

from pdserve.config.checks import POSITIVE, require, require_port
from pdserve.config.setting import declare, parse_int
from pdserve.errors import ConfigError

_FLAG: Final = "kv-tiers"
_FORM: Final = "write it as cpu:4GiB,disk:/data/kv:50GiB,redis:redis://127.0.0.1:6379"
LMCACHE_VERSION: Final = "0.5.6"
"""The one whose protocol the connector speaks."""
LMCACHE_SILENT: Final = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}
"""Variables with which LMCache, as server and as client, tells nobody that it is used."""
REDIS_USERNAME: Final = "LMCACHE_RESP_USERNAME"
REDIS_PASSWORD: Final = "LMCACHE_RESP_PASSWORD"
"""Variables that LMCache's adapter reads."""
LOOPBACK: Final = "127.0.0.1"
"""A store asks nobody for a key, and engines share its memory: it serves one host."""
KV_PORT: Final = 8300
"""Where `pdserve kv-server` listens and engines look for it.

Not LMCache's own 5555: a server that was started for others gives out no memory that engines of
ours can use (it was started without --shm-name), and is not to be taken for one that does.
"""
_MAX_CHUNK_TOKENS: Final = 1 << 16
"""A prompt shorter than a chunk is never stored."""
LEAST_CPU_BYTES: Final = 64 << 20
"""Below this, a chunk or two of a model would fill it."""


@dataclasses.dataclass(frozen=True, slots=True)
class DiskTier:
    """A folder of files.

    Attributes:
        num_bytes: What they may take together.
    """

    path: str
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class RedisTier:
    """A Redis or Valkey server, which has its own limits."""

    host: str
    port: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """The tiers in which a store keeps KV.

    Attributes:
        cpu_bytes: Size of the shared memory that engines copy from and to.
    """

    cpu_bytes: int
    disk: DiskTier | None = None
    redis: RedisTier | None = None


def parse_tiers(text: str) -> Tiers:
    """Parse `--kv-tiers`.

    Raises:
        ConfigError: It is not valid; the message names the wrong part.
    """
    found: dict[str, object] = {}
    for part in text.split(","):
        kind, _, rest = part.strip().partition(":")
        if kind not in _READERS:
            _refuse(f"{part!r} is not a tier: use {', '.join(_READERS)}; {_FORM}")
        if kind in found:
            _refuse(f"{text!r} has two tiers {kind!r}: give only one of each kind")
        found[kind] = _READERS[kind](part, rest)
    cpu, disk, redis = (found.get(kind) for kind in _READERS)
    if not isinstance(cpu, int):
        _refuse(f"{text!r} has no cpu tier, from which the other tiers are filled: add cpu:4GiB")
    assert disk is None or isinstance(disk, DiskTier)
    assert redis is None or isinstance(redis, RedisTier)
    return Tiers(cpu_bytes=cpu, disk=disk, redis=redis)


def _cpu(part: str, rest: str) -> int:
    num_bytes = _size(part, rest)
    if num_bytes < LEAST_CPU_BYTES:
        _refuse(f"{part!r} is too small to hold a few chunks: use at least 64MiB")
    return num_bytes


def _disk(part: str, rest: str) -> DiskTier:
    path, _, size = rest.rpartition(":")
    if not path.startswith("/"):
        _refuse(
            f"{part!r} does not name a folder with an absolute path: write it as "
            "disk:/data/kv:50GiB"
        )
    return DiskTier(path, _size(part, size))


def _redis(part: str, rest: str) -> RedisTier:
    url = urlsplit(rest)
    try:
        port = url.port or 6379
    except ValueError as error:
        _refuse(f"{part!r}: {error}")
    if url.username or url.password:
        _refuse(
            "a password in a redis tier would appear on a command line, where every user can "
            f"read it: set {REDIS_USERNAME} and {REDIS_PASSWORD} instead"
        )
    if url.scheme != "redis" or not url.hostname or url.path not in ("", "/") or url.query:
        _refuse(
            f"{part!r} does not name a server: write only its address, as "
            "redis:redis://127.0.0.1:6379"
        )
    return RedisTier(url.hostname, port)


_READERS: Final[dict[str, Callable[[str, str], object]]] = {
    "cpu": _cpu,
    "disk": _disk,
    "redis": _redis,
}


def _size(part: str, text: str) -> int:
    try:
        num_bytes = parse_int(text)
    except ValueError:
        _refuse(f"{part!r} has no size: end it with a size such as 4GiB or 500M")
    if num_bytes <= 0:
        _refuse(f"{part!r} has the size {num_bytes}: {POSITIVE}")
    return num_bytes


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"--{_FLAG}: {message}", param=_FLAG)


def store_words(connector: str, url: str, http_url: str) -> list[str]:
    """Return the flags with which an engine keeps KV in a store.

    The KV of its answers is kept too, for the next turn of a conversation.

    Args:
        connector: The connector by which it exchanges KV with other engines; empty if it does not.
        url, http_url: Addresses of the store.
    """
    prefix = "--kv-transfer-config"
    names = f"{connector},lmcache" if connector else "lmcache"
    words = [f"{prefix}.kv-connector", names, f"{prefix}.lmcache.save", "all"]
    return [*words, f"{prefix}.lmcache.url", url, f"{prefix}.lmcache.http-url", http_url]


class KvServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A server that keeps KV for the engines of this host.

    Attributes:
        tiers: As `parse_tiers` reads it.
        port: On loopback: it asks nobody for a key.
        http_port: Likewise; by it, engines have it drop chunks that are not what they saved.
        chunk_size: Tokens per chunk; a multiple of the engines' block size.
    """

    tiers: str = "cpu:4GiB"
    port: int = KV_PORT
    http_port: int = 8301
    chunk_size: int = 256

    def __post_init__(self) -> None:
        parse_tiers(self.tiers)
        for flag, port in (("port", self.port), ("http-port", self.http_port)):
            require_port(port, flag)
            require(port > 0, flag, port, "choose a port, because engines need to know it")
        require(
            self.http_port != self.port,
            "http-port",
            self.http_port,
            "it is --port as well: choose another one",
        )
        require_chunk_size("chunk-size", self.chunk_size)


def require_chunk_size(flag: str, chunk_size: int) -> None:
    """Refuse a size that chunks cannot have.

    Raises:
        ConfigError: It is not a valid size.
    """
    remedy = f"use a multiple of --block-size, {_MAX_CHUNK_TOKENS} at most"
    require(0 < chunk_size <= _MAX_CHUNK_TOKENS, flag, chunk_size, remedy)


# fmt: off
KV_SERVER_SETTINGS: Final = declare(
    "kv",
    KvServerConfig,
    "KV tiers",
    (
        ("kv-tiers", "tiers", "TIERS", "cpu:SIZE[,disk:FOLDER:SIZE][,redis:redis://HOST:PORT]"),
        ("port", "port", "PORT", "port on loopback"),
        ("http-port", "http_port", "PORT", "HTTP port, also on loopback"),
        ("chunk-size", "chunk_size", "N", "tokens per chunk, a multiple of --block-size"),
    ),
)
# fmt: on
