"""The log line of each request, the same at proxies and engines.

    req 3f2a ok status=200 endpoint=/v1/completions path=push model=m in=512 cached=0 out=64
    total=412.0ms ttft=33.2ms = proxy 0.5 + ... | itl p50 6.1 max 9.8

What stands before the times is the same everywhere (`with_line`); the process that took the times
adds them. As JSON the line has the same keys (`fields_of`).
"""

from __future__ import annotations

import logging
import statistics
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from pdserve.observe.log import REQUESTS, LogEvent, word
from pdserve.wire.finished import Finished

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.errors import PdserveError

_log = logging.getLogger(REQUESTS)

CLIENT_LEFT: Final = 499
"""Status of a request whose client did not wait for it, as in other servers' logs."""
MAX_LINE_CHARS: Final = 2000


class StoredKV(NamedTuple):
    """The part of a prompt that came from a store.

    Attributes:
        num_tokens: Leading tokens from the store, beyond those that were in blocks.
        seconds: Time spent copying them, in parallel with computing.
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
    """KV that a request received from another engine, and from a store.

    Attributes:
        seconds: Time on the wire.
        digest_s: The part of `seconds` spent on digests.
        store: The part from a store.
    """

    num_bytes: int
    seconds: float
    digest_s: float = 0.0
    store: StoredKV = StoredKV()


def outcome_of(status: int) -> str:
    """Return the outcome of a request that was answered with an error of this status."""
    if status in (429, 503):
        return "shed"
    return "client_error" if status < 500 else "error"


def kv_path(mode: str, *, has_store: bool) -> str:
    """Return how KV arrived: `mode` is push, pull, local or, if no engine was asked, empty."""
    return f"{mode}+store" if mode and has_store else mode


def with_line(ended: Finished, times: str) -> Finished:
    """Return a request with its line, which ends with `times`."""
    known = {
        "status": ended.status,
        "reason": ended.reason,
        "stage": ended.stage,
        "endpoint": ended.path,
        "path": ended.kv_path,
        "model": ended.model,
    }
    words = [f"req {ended.request_id} {ended.outcome}"]
    words += [f"{key}={word(value)}" for key, value in known.items() if value]
    if ended.prompt_tokens:
        words.append(f"in={ended.prompt_tokens} cached={ended.cached_tokens}")
    words.append(f"out={ended.output_tokens} total={ended.total_ms:.1f}ms")
    line = " ".join(words) + times
    return msgspec.structs.replace(ended, line=line[:MAX_LINE_CHARS])


def log_request(ended: Finished) -> None:
    """Write the line of a request that has ended.

    The level is warning if a server failed it, which no client can cause at will, and otherwise
    info, whatever the client did. What was only reported is told by who has other ways.
    """
    is_failed = ended.outcome != "reported" and (ended.outcome == "error" or ended.status >= 500)
    level = logging.WARNING if is_failed else logging.INFO
    if _log.isEnabledFor(level):
        _log.log(level, LogEvent("request", fields_of(ended), ended.line))


def fields_of(ended: Finished) -> dict[str, object]:
    """Return the line's values by its keys; times are milliseconds."""
    rungs = zip(ended.rungs, ended.rung_reasons, strict=True)
    return {
        "request": ended.request_id,
        "outcome": ended.outcome,
        "status": ended.status,
        "reason": ended.reason or None,
        "stage": ended.stage or None,
        "endpoint": ended.path,
        "path": ended.kv_path or None,
        "model": ended.model or None,
        "in": ended.prompt_tokens or None,
        "cached": ended.cached_tokens if ended.prompt_tokens else None,
        "out": ended.output_tokens,
        "total_ms": ended.total_ms,
        "ttft_ms": ended.ttft_ms,
        "ttft_terms_ms": ended.ttft_terms or None,
        "second_token_ms": ended.second_token_ms,
        "second_token_terms_ms": ended.second_token_terms or None,
        "itl_p50_ms": ended.itl_p50_ms,
        "itl_max_ms": ended.itl_max_ms,
        "tokens_per_step": ended.tokens_per_step,
        "kv_bytes": ended.kv_bytes or None,
        "store_tokens": ended.store_tokens or None,
        "ladder": [f"{rung}({reason})" for rung, reason in rungs] or None,
        "prefill": ended.prefill or None,
        "decode": ended.decode or None,
    }


def log_refusal(request_id: str, path: str, error: PdserveError, *, total_s: float = 0.0) -> None:
    """Write the line of a request that was refused before any work on it."""
    if _log.isEnabledFor(logging.INFO):
        ended = Finished(
            request_id=request_id,
            outcome=outcome_of(error.status),
            status=error.status,
            reason=error.error_code,
            path=path,
            total_ms=round(total_s * 1e3, 3),
        )
        log_request(with_line(ended, ""))


def times_of(
    ttft_s: float | None,
    stages: Mapping[str, float],
    *,
    num_prompt_tokens: int,
    kv: MovedKV | None = None,
    gaps_s: Sequence[float] = (),
    tokens_per_step: float | None = None,
) -> str:
    """Return the breakdown of the time of a request that one engine served.

    Args:
        stages: Seconds by stage, in order of time; they sum to `ttft_s`. The stage `kv`
            is followed by the bytes moved and their rate.
        gaps_s: Seconds between outputs.
        tokens_per_step: Where drafts were verified.
    """
    words = ""
    if ttft_s is not None:
        words += f" ttft={ttft_s * 1e3:.1f}ms"
        parts = []
        for name, seconds in stages.items():
            part = f"{name.replace('_', ' ')} {seconds * 1e3:.1f}"
            if name == "kv" and kv is not None and kv.num_bytes:
                part += f" ({moved(kv.num_bytes, kv.seconds, digest_s=kv.digest_s)})"
            parts.append(part)
        if parts:
            words += " = " + " + ".join(parts)
    if gaps_s:
        median_s = statistics.median_high(gaps_s)
        words += f" | itl p50 {median_s * 1e3:.1f} max {max(gaps_s) * 1e3:.1f}"
    if tokens_per_step is not None:
        words += f" | spec {tokens_per_step:.1f}/step"
    if kv is not None and (stored := kv.store.of(num_prompt_tokens)):
        words += f" | {stored}"
    return words


def moved(num_bytes: int, seconds: float, *, digest_s: float) -> str:
    """Return the amount moved and its speed, as `8.4 MB, 1.3 GB/s, digest 0.2`.

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
