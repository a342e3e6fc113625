"""Settings of `pdserve trace`: one frozen struct and its flags."""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.config.setting import declare
from pdserve.errors import ConfigError


class TraceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which deployment to trace, and where to write the trace.

    Attributes:
        url: Base URL of a proxy, or of one engine.
        seconds: Until now; processes keep the last 120.
        output: Path of the file; compressed if it ends in .gz.
        api_keys: The first is sent.
    """

    url: str = "http://127.0.0.1:8000"
    seconds: float = 10.0
    output: str = "trace.json"
    api_keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"--url is {self.url!r}: use a URL such as http://127.0.0.1:8000", param="url"
            )
        if not self.seconds > 0:
            raise ConfigError(f"--seconds is {self.seconds!r}: it must be above 0", param="seconds")
        if not self.output:
            raise ConfigError("--output is empty: name a file", param="output")


# fmt: off
TRACE_SETTINGS: Final = declare(
    "trace",
    TraceConfig,
    "trace",
    (
        ("url", "url", "URL", "base URL of the proxy, for the whole deployment, or of one engine"),
        ("seconds", "seconds", "N", "how far back; 120 s are kept"),
        ("output", "output", "FILE", "file to write; compressed if its name ends in .gz"),
        ("api-key", "api_keys", "KEY", "sent as a bearer token (prefer PDSERVE_API_KEY)"),
    ),
)
# fmt: on
