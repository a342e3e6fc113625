"""Settings of `pdserve trace`: one frozen struct and its flags."""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.config.checks import require, require_positive, require_url
from pdserve.config.setting import declare


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
        require_url(self.url, "url")
        require_positive("seconds", self.seconds)
        require(bool(self.output), "output", self.output, "name a file")


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
