"""Settings of logging: what a process logs and in which format."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from pdserve.config.checks import require_one_of
from pdserve.config.setting import declare

LOG_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
"""By name, the numbers that `logging` gives them; ascending."""


class LogFormat(enum.Enum):
    """Format of a log line: plain text or one JSON object."""

    TEXT = "text"
    JSON = "json"


class LogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a process logs on stderr.

    Attributes:
        level: Name of the lowest level to log.
        requests: Whether each request has a line; requests that a server failed always have one.
        stats: Whether to log a regular summary while there is work.
    """

    level: str = "info"
    format: LogFormat = LogFormat.TEXT
    requests: bool = True
    stats: bool = True

    def __post_init__(self) -> None:
        require_one_of("log-level", self.level, *LOG_LEVELS)


# fmt: off
LOG_FORM_SETTINGS: Final = declare(
    "log",
    LogConfig,
    "output",
    (
        ("log-level", "level", "|".join(LOG_LEVELS), "lowest level to log"),
        ("log-format", "format", "text|json", "plain lines, or one JSON object per line"),
    ),
)
"""Log settings of commands without requests."""

LOG_SETTINGS: Final = LOG_FORM_SETTINGS + declare(
    "log",
    LogConfig,
    "output",
    (
        ("log-requests", "requests", "", "log a line for each request; requests that a server failed always have one"),
        ("log-stats", "stats", "", "log a summary every 10 s while there is work"),
    ),
)
# fmt: on
