"""Settings of `pdserve kv-events`: one frozen struct and its flags."""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.config.checks import require_not_negative, require_url
from pdserve.config.setting import declare


class KVEventsReaderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which engine's events to read, and for how long.

    Attributes:
        url: Base URL of an engine.
        seconds: Time to listen; 0 listens until Ctrl-C.
        secret: The deployment's shared secret.
    """

    url: str = "http://127.0.0.1:8100"
    seconds: float = 0.0
    secret: str = ""

    def __post_init__(self) -> None:
        require_url(self.url, "url")
        require_not_negative("seconds", self.seconds)


# fmt: off
KV_EVENTS_READER_SETTINGS: Final = declare(
    "reader",
    KVEventsReaderConfig,
    "KV events",
    (
        ("url", "url", "URL", "base URL of the engine"),
        ("seconds", "seconds", "N", "time to listen; 0 listens until Ctrl-C"),
        ("secret", "secret", "TEXT", "the deployment's shared secret (prefer PDSERVE_SECRET)"),
    ),
)
# fmt: on
