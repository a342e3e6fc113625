"""Logs as events: a fixed text, then fields; as lines for people, or as JSON objects.

Nothing is formatted before a handler takes it. Does not know the meaning of the fields.
"""

from __future__ import annotations

import json
import logging
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TextIO

from pdserve.config.log import LOG_LEVELS, LogConfig, LogFormat

if TYPE_CHECKING:
    from collections.abc import Mapping

REQUESTS: Final = "pdserve.requests"
"""Logger of the request lines."""
STATS: Final = "pdserve.stats"
"""Logger of the summaries written while there is work."""
_DEFAULT: Final = LogConfig()
_OTHERS: Final = ("aiohttp", "asyncio", "py.warnings")
"""Loggers of libraries that share our log, from level warning up."""


@dataclass(frozen=True, slots=True)
class LogEvent:
    """The content of a log record, used as its message object.

    Attributes:
        name: A fixed text.
        fields: The values of this event; None fields are left out.
        text: The line for people; if empty, the name and `key=value` for each field.
    """

    name: str
    fields: Mapping[str, object]
    text: str = ""

    def __str__(self) -> str:
        return self.text or " ".join([self.name, *_pairs(self.fields)])


def log_event(
    logger: logging.Logger,
    event: str,
    *,
    level: int = logging.INFO,
    exc_info: BaseException | None = None,
    **fields: object,
) -> None:
    """Log `event` and its fields, and the traceback of `exc_info` if there is one."""
    if logger.isEnabledFor(level):
        logger.log(level, LogEvent(event, fields), exc_info=exc_info)


def configure_logging(stream: TextIO, config: LogConfig = _DEFAULT) -> None:
    """Send pdserve's logs to `stream`, one line each, with time and level."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_formatter_of(config))
    level = LOG_LEVELS[config.level]
    logger = logging.getLogger("pdserve")
    logger.setLevel(level)
    others = [logging.getLogger(name) for name in _OTHERS]
    for each in (logger, *others):
        each.handlers[:] = [handler]
        each.propagate = False
    for name, is_wanted in ((REQUESTS, config.requests), (STATS, config.stats)):
        least = logging.NOTSET if is_wanted else max(level, logging.WARNING)
        logging.getLogger(name).setLevel(least)
    logging.getLogger("aiohttp.server").filters[:] = [_one_line_for_what_is_no_request]
    logging.captureWarnings(capture=True)


def log_config() -> LogConfig:
    """Return this process's log settings, for the processes that it starts."""
    logger = logging.getLogger("pdserve")
    for handler in logger.handlers:
        if isinstance(handler.formatter, _Formatter):
            return handler.formatter.config
    least = logger.getEffectiveLevel()
    return LogConfig(
        level=next((name for name, level in LOG_LEVELS.items() if level >= least), "error")
    )


def formatter() -> logging.Formatter:
    """Return a formatter of lines as this process's logs have, for another library's handlers."""
    return _formatter_of(log_config())


class _Formatter(logging.Formatter):
    """Lines that begin with the time in UTC, to the millisecond (RFC 3339)."""

    def __init__(self, config: LogConfig) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")
        self.config = config

    def formatTime(  # noqa: N802 - the name that `logging` calls
        self, record: logging.LogRecord, datefmt: str | None = None
    ) -> str:
        """See `logging.Formatter`."""
        seconds, ms = divmod(int(record.created * 1e3), 1000)
        return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{ms:03d}Z"


class _JsonFormatter(_Formatter):
    """One JSON object per line, exceptions inside."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        said = record.msg
        line: dict[str, object] = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "event": said.name if isinstance(said, LogEvent) else record.getMessage(),
        }
        if isinstance(said, LogEvent):
            fields = {name: _plain(value) for name, value in said.fields.items()}
            line |= {name: value for name, value in fields.items() if value is not None}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _formatter_of(config: LogConfig) -> logging.Formatter:
    return (_JsonFormatter if config.format is LogFormat.JSON else _Formatter)(config)


class RepeatFilter(logging.Filter):
    """Passes messages of one form once in `interval_s`, with the number left out in between."""

    def __init__(self, interval_s: float) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._passed: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log it; the form of a message is what it is before its values."""
        form = str(record.msg)
        at_s, num_omitted = self._passed.get(form, (-math.inf, 0))
        if record.created < at_s + self._interval_s:
            self._passed[form] = at_s, num_omitted + 1
            return False
        self._passed[form] = record.created, 0
        if num_omitted:
            record.msg, record.args = f"{record.getMessage()} ({num_omitted} more before)", ()
        return True


def _one_line_for_what_is_no_request(record: logging.LogRecord) -> bool:
    """Shorten the record for bytes that are not HTTP, which were answered with a 400.

    Any client can send them, so they get one line and no traceback.
    """
    error = record.exc_info[1] if record.exc_info else None
    if type(error).__module__ == "aiohttp.http_exceptions":
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args = "refused what is no HTTP request (%s)", (type(error).__name__,)
        record.exc_info = record.exc_text = None
    return True


def _plain(value: object) -> Any:
    """Return a value as JSON can hold it: floats to six digits, as in the line for people."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value


def _pairs(fields: Mapping[str, object]) -> list[str]:
    return [f"{name}={word(value)}" for name, value in fields.items() if value is not None]


def word(value: object) -> str:
    """Return a value as one word: text with spaces, quotes or newlines is quoted.

    Text with what no terminal should get, such as other ends of lines and C1 controls, is escaped.
    """
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    is_printable = text.isprintable()
    plain = is_printable and not any(char in ' "=' for char in text)
    return text if plain and text else json.dumps(text, ensure_ascii=not is_printable)
