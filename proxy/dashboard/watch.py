"""Reads the engines' `/metrics` once a second while the dashboard is open.

While no dashboard is open, nothing is read and nothing is kept. This module fetches and parses
Prometheus' text format, the only source of every figure that the dashboard shows; the page gives
the series their meaning.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.proxy.errors import WorkerError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.proxy.backend import Backend
    from pdserve.proxy.services import Services

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
READ_TIMEOUT_S = 0.8
WATCHED_S = 5.0
"""How long after its last request a dashboard counts as open."""
_FIRST_ROUND_S = 1.0
_APART_S = 0.01
_SPREAD_S = 0.8
"""Reads of a round begin so far apart, or within this time: hundreds of answers at once would hold
up every stream."""

SHOWN_OF_ENGINES = frozenset(
    {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting_by_reason",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "pdserve_engine_steps_total",
        "pdserve_kv_blocks",
        "pdserve_kv_loads_total",
        "pdserve_kv_transfer_bytes_total",
        "pdserve_kv_transfer_failures_total",
        "pdserve_kv_lease_expired_total",
        "pdserve_recompute_tokens_total",
        "vllm:external_prefix_cache_queries_total",
        "vllm:external_prefix_cache_hits_total",
        "pdserve_kv_tier_loaded_bytes_total",
        "pdserve_kv_tier_load_seconds_total",
        "pdserve_kv_tier_saved_bytes_total",
        "pdserve_kv_tier_dropped_saves_total",
        "pdserve_kv_tier_digest_mismatches_total",
        "pdserve_kv_tier_lookup_timeouts_total",
        "pdserve_kv_tier_server_up",
    }
)
"""Names of the series that an engine's card draws, out of several hundred."""


SHOWN_OF_PROXY = re.compile(r"pdserve_|vllm:(?:prompt|generation)_tokens_total")
"""Starts of the names shown; its other series (HTTP, process, vLLM's) are for Prometheus."""


@dataclass(slots=True)
class Reading:
    """The last series read from an engine.

    Attributes:
        at_s: Monotonic seconds at which they were read; None if never.
        failure: Why the newest attempt failed; empty if it did not.
        is_unreachable: Whether the newest attempt could not connect.
    """

    series: dict[str, float] = field(default_factory=dict)
    at_s: float | None = None
    failure: str = ""
    is_unreachable: bool = False


class EngineWatch:
    """Readings of all engines, as long as `look` is called.

    Args:
        headers: Sent with every request.
    """

    def __init__(self, services: Services, headers: Mapping[str, str]) -> None:
        self._backends = services.backends
        self._http = services.http
        self._clock = services.clock
        self._headers = dict(headers)
        self._readings: dict[str, Reading] = {}
        self._looked_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._has_read = asyncio.Event()

    @property
    def is_on(self) -> bool:
        """Whether engines are being read."""
        return self._task is not None

    def reading(self, backend: Backend) -> Reading:
        """Return an engine's last reading."""
        return self._readings.get(backend.url) or Reading()

    async def look(self) -> None:
        """Keep reading for `WATCHED_S` more. The first call waits for the first answers."""
        self._looked_s = self._clock.monotonic_s()
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            async with asyncio.timeout(_FIRST_ROUND_S):
                await self._has_read.wait()
        except TimeoutError:
            pass  # an engine hangs: show what has been read so far

    async def stop(self) -> None:
        """Stop at once."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            while self._clock.monotonic_s() - self._looked_s < WATCHED_S:
                begun_s = self._clock.monotonic_s()
                await self._read_all()
                self._has_read.set()
                spent_s = self._clock.monotonic_s() - begun_s
                await asyncio.sleep(max(0.0, INTERVAL_S - spent_s))
        except Exception:
            log.exception("the dashboard cannot read the engines")
        finally:
            self._task = None
            self._has_read.clear()
            self._readings.clear()

    async def _read_all(self) -> None:
        backends = list(self._backends)
        for url in self._readings.keys() - {backend.url for backend in backends}:
            del self._readings[url]
        apart_s = min(_APART_S, _SPREAD_S / max(1, len(backends)))
        await asyncio.gather(*(self._read(each, i * apart_s) for i, each in enumerate(backends)))

    async def _read(self, backend: Backend, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        reading = self._readings.setdefault(backend.url, Reading())
        try:
            status, body = await self._http.get_json(
                f"{backend.url}/metrics", READ_TIMEOUT_S, self._headers
            )
        except WorkerError as error:
            reading.failure, reading.is_unreachable = error.detail, error.reason == "connect"
            return
        reading.is_unreachable = False
        if status != 200:
            reading.failure = f"{backend.url}/metrics answers {status}"
            return
        reading.series = series_in(body.decode(errors="replace"), SHOWN_OF_ENGINES)
        reading.at_s, reading.failure = self._clock.monotonic_s(), ""


def series_in(text: str, names: frozenset[str] | re.Pattern[str]) -> dict[str, float]:
    """Return the value of every series in `text`, by its name with labels as written there.

    Series without a finite value are left out, since JSON cannot represent it.

    Args:
        names: The series names to return, without labels, or a pattern for their start.
    """
    found = {}
    for line in text.splitlines():
        if not line or line[0] == "#":
            continue
        series, _, value = line.rpartition(" ")
        name = series.partition("{")[0]
        is_shown = name in names if isinstance(names, frozenset) else names.match(name)
        if not is_shown:
            continue
        try:
            number = float(value)
        except ValueError:
            continue  # other makes of engine may write what we cannot read
        if math.isfinite(number):
            found[series] = number
    return found
