"""LMCache's own settings, `--kv-transfer-config.lmcache.*`, and the check that it is installed."""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from pdserve.config.checks import require_url
from pdserve.config.tiers import KV_PORT, LMCACHE_VERSION, LOOPBACK
from pdserve.errors import ConfigError

_PREFIX: Final = "kv-transfer-config.lmcache"
_ADDRESS: Final = re.compile(rb"tcp://[A-Za-z\d][\w.-]*:\d{1,5}|ipc://.{1,107}")
"""What ZeroMQ takes; it refuses others only once the model is loaded. LMCache's sockets have IPv6
off, so that they would never connect to such an address. Linux' paths of sockets have 107 bytes."""
_SAVES: Final = ("prompt", "all", "off")
_DEFAULT_URL: Final = f"tcp://{LOOPBACK}:{KV_PORT}"


class LMCacheSettings(msgspec.Struct, frozen=True, kw_only=True):
    """See the module."""

    url: Annotated[
        str,
        Meta(description=f"address of the LMCache server on this machine: {_DEFAULT_URL}"),
    ] = ""
    http_url: Annotated[
        str, Meta(description="HTTP address of the server, used to replace wrong chunks")
    ] = ""
    save: Annotated[
        str, Meta(description="which KV to save: prompt, all (answers too), or off")
    ] = "prompt"
    namespace: Annotated[
        str, Meta(description="engines find only KV that was saved under the same namespace")
    ] = ""
    timeout_s: Annotated[
        float, Meta(description="seconds without an answer after which a lookup counts as a miss")
    ] = 1.0
    heartbeat_s: Annotated[float, Meta(description="seconds between checks of the server")] = 2.0
    max_pending_chunks: Annotated[
        int, Meta(description="chunks that may wait to be saved; more are dropped")
    ] = 256

    def __post_init__(self) -> None:
        if not _ADDRESS.fullmatch(os.fsencode(self.server_url)):
            self._refuse("url", f"{self.url!r}: write it as {_DEFAULT_URL}")
        if self.http_url:
            require_url(self.http_url, f"{_PREFIX}.http-url")
        if self.save not in _SAVES:
            self._refuse("save", f"{self.save!r}: use one of {', '.join(_SAVES)}")
        for name in ("timeout_s", "heartbeat_s", "max_pending_chunks"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                self._refuse(name.replace("_", "-"), f"{value}: it must be a number above 0")

    @property
    def server_url(self) -> str:
        """The address at which the server listens."""
        return self.url or _DEFAULT_URL

    @staticmethod
    def _refuse(name: str, why: str) -> None:
        flag = f"{_PREFIX}.{name}"
        raise ConfigError(f"--{flag} is {why}", param=flag)


def require_lmcache() -> None:
    """Check that the one version of LMCache that pdserve supports is installed.

    Raises:
        ConfigError: It is not installed, or another version is.
    """
    flag = "kv-transfer-config.kv-connector"
    try:
        found = importlib.metadata.version("lmcache")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"--{flag} is 'lmcache', which is not installed: pip install 'pdserve[lmcache]'",
            param=flag,
        ) from None
    if found != LMCACHE_VERSION:
        raise ConfigError(
            f"--{flag} is 'lmcache', but lmcache {found} is installed and pdserve needs "
            f"{LMCACHE_VERSION}: pip install 'pdserve[lmcache]'",
            param=flag,
        )
