"""Settings of logging: what a process logs and in which format."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from pdserve.config.setting import declare
from pdserve.errors import ConfigError

LOG_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
"""By name, the numbers that `logging` gives them; ascending."""


class LogFormat(enum.Enum):
    """What a line looks like: for people, or one JSON object."""

    TEXT = "text"
    JSON = "json"


class LogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says on stderr.

    Attributes:
        level: Name of the least level.
        requests: Whether each request has a line; those that a server failed have one in any case.
        stats: Whether what was done is summed up while there is something to do.
    """

    level: str = "info"
    format: LogFormat = LogFormat.TEXT
    requests: bool = True
    stats: bool = True

    def __post_init__(self) -> None:
        if self.level not in LOG_LEVELS:
            raise ConfigError(
                f"--log-level is {self.level!r}: use debug, info, warning or error",
                param="log-level",
            )


LOG_FORM_SETTINGS: Final = declare(
    "log",
    LogConfig,
    "output",
    (
        ("log-level", "level", "|".join(LOG_LEVELS), "least level of what is logged"),
        ("log-format", "format", "text|json", "lines for people, or one JSON object each"),
    ),
)
"""Of what has no requests."""

LOG_SETTINGS: Final = LOG_FORM_SETTINGS + declare(
    "log",
    LogConfig,
    "output",
    (
        (
            "log-requests",
            "requests",
            "",
            "a line for each request; those that a server failed have one in any case",
        ),
        ("log-stats", "stats", "", "a summary every 10 s while there is work"),
    ),
)
