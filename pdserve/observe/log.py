"""Logs as events: a fixed text, then fields; and the one line per request.

Knows nothing of what the fields mean.
"""

from __future__ import annotations

import json
import logging
import statistics
from typing import TYPE_CHECKING, NamedTuple, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def log_event(
    logger: logging.Logger, event: str, *, level: int = logging.INFO, **fields: object
) -> None:
    """Log `event` followed by `key=value` for each field; None fields are left out."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", " ".join([event, *_pairs(fields)]))


def configure_logging(stream: TextIO, *, level: int = logging.INFO) -> None:
    """Send pdserve's logs to `stream`, one line each with the time and the module."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname).1s %(name)s %(message)s", "%H:%M:%S")
    )
    logger = logging.getLogger("pdserve")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
    http = logging.getLogger("aiohttp.server")
    http.handlers[:] = [handler]
    http.filters[:] = [_one_line_for_what_is_no_request]
    http.propagate = False


def _one_line_for_what_is_no_request(record: logging.LogRecord) -> bool:
    """Bytes that are not HTTP were answered with a 400: they are nobody's fault here.

    Anybody can send them, so they get one line and no traceback.
    """
    error = record.exc_info[1] if record.exc_info else None
    if type(error).__module__ == "aiohttp.http_exceptions":
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args = "refused what is no HTTP request (%s)", (type(error).__name__,)
        record.exc_info = record.exc_text = None
    return True


class StoredKV(NamedTuple):
    """What a store had of a prompt.

    Attributes:
        num_tokens: Leading tokens that it gave, beyond those that were in blocks.
        seconds: Copying them took, beside computing.
    """

    num_tokens: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def of(self, num_prompt_tokens: int) -> str:
        """Return it in words, as `kv from store 3072 of 4096, 2.1 GB/s`; empty if it had none."""
        if not self.num_tokens:
            return ""
        words = f"kv from store {self.num_tokens} of {num_prompt_tokens}"
        return f"{words}, {_rate(self.num_bytes, self.seconds)}" if self.seconds > 0 else words


class MovedKV(NamedTuple):
    """KV that a request was given by another engine, and by a store.

    Attributes:
        seconds: On the wire.
        digest_s: Those of them that digests took.
        mode: How it came: push or pull; empty if it did not.
        store: What a store gave.
    """

    num_bytes: int
    seconds: float
    digest_s: float = 0.0
    mode: str = ""
    store: StoredKV = StoredKV()


def request_line(
    request_id: str,
    outcome: str,
    *,
    num_tokens: tuple[int, int],
    ttft_s: float | None,
    stages: Mapping[str, float],
    kv: MovedKV | None = None,
    gaps_s: Sequence[float] = (),
) -> str:
    """Return what happened to one request, in one line.

    Args:
        num_tokens: Of the prompt, of the output.
        stages: Seconds by stage, in order of time; they sum to `ttft_s`. The stage `kv`
            is followed by the bytes moved and their rate.
        gaps_s: Seconds between output tokens.
    """
    line = f"req {request_id} {outcome} in={num_tokens[0]} out={num_tokens[1]}"
    if ttft_s is not None:
        line += f" ttft={ttft_s * 1e3:.1f}ms"
        parts = []
        for name, seconds in stages.items():
            part = f"{name.replace('_', ' ')} {seconds * 1e3:.1f}"
            if name == "kv" and kv is not None and kv.num_bytes:
                part += f" ({moved(kv.num_bytes, kv.seconds, digest_s=kv.digest_s)})"
            parts.append(part)
        if parts:
            line += " = " + " + ".join(parts)
    if gaps_s:
        line += f" | itl p50 {statistics.median(gaps_s) * 1e3:.1f} max {max(gaps_s) * 1e3:.1f}"
    if kv is not None and kv.mode:
        line += f" | kv by {kv.mode}"
    if kv is not None and (told := kv.store.of(num_tokens[0])):
        line += f" | {told}"
    return line


def moved(num_bytes: int, seconds: float, *, digest_s: float = 0.0) -> str:
    """Return what was moved and how fast, as `8.4 MB, 1.3 GB/s, digest 0.2`.

    Args:
        digest_s: The part of `seconds` that digests took; shown in milliseconds if any.
    """
    parts = [f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"]
    if seconds > 0:
        parts.append(_rate(num_bytes, seconds))
    if digest_s > 0:
        parts.append(f"digest {digest_s * 1e3:.1f}")
    return ", ".join(parts)


def _rate(num_bytes: int, seconds: float) -> str:
    rate = num_bytes / seconds
    return f"{rate / 1e9:.1f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.1f} MB/s"


def _pairs(fields: Mapping[str, object]) -> list[str]:
    return [f"{name}={_value(value)}" for name, value in fields.items() if value is not None]


def _value(value: object) -> str:
    """A value that stays one word: what holds spaces, quotes or newlines is quoted."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    plain = text.isprintable() and not any(char in ' "=' for char in text)
    return text if plain and text else json.dumps(text, ensure_ascii=False)
