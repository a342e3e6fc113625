"""Settings of `pdserve drain`: one frozen struct and its flags."""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.config.checks import is_url, require, require_keys, require_url
from pdserve.config.setting import declare
from pdserve.errors import ConfigError
from pdserve.wire.drain import DEADLINE_S, MAX_DEADLINE_S


class DrainConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which engines to drain, and by when.

    Attributes:
        engines: Base URLs, as the proxies know the engines.
        proxies: Base URLs of all proxies in front of them.
        deadline_s: Requests that still run then move to other engines.
        is_resumed: Whether to end the drain instead.
        api_keys: The first is sent.
    """

    engines: tuple[str, ...] = ()
    proxies: tuple[str, ...] = ("http://127.0.0.1:8000",)
    deadline_s: float = DEADLINE_S
    is_resumed: bool = False
    api_keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for url in self.engines:
            if not is_url(url):
                raise ConfigError(
                    f"ENGINE is {url!r}: write it as http://127.0.0.1:8100", param="engines"
                )
        for url in self.proxies:
            require_url(url, "proxy")
        require(bool(self.proxies), "proxy", self.proxies, "name the proxies before the engines")
        require(
            0 <= self.deadline_s <= MAX_DEADLINE_S,
            "deadline",
            self.deadline_s,
            f"use seconds from 0 to {MAX_DEADLINE_S:g}",
        )
        require_keys("api-key", self.api_keys)


# fmt: off
DRAIN_SETTINGS: Final = declare(
    "drain",
    DrainConfig,
    "drain",
    (
        ("engines", "engines", "URL", "engines to drain, by the URLs that their proxies use"),
        ("proxy", "proxies", "URL", "all proxies in front of the engines"),
        ("deadline", "deadline_s", "SECONDS", "time until running requests move to other engines"),
        ("resume", "is_resumed", "", "end the drain: send requests to the engines again"),
        ("api-key", "api_keys", "KEY", "an operator key (prefer PDSERVE_API_KEY)"),
    ),
)
# fmt: on
