"""`pdserve kv-events`: print the prefixes an engine holds, and changes as they happen.

A reader like a proxy: what it prints is what routing knows of the engine.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import msgspec
import zmq

from pdserve.commands.exit_codes import EXIT_DONE
from pdserve.config.kv_events import KVEventsReaderConfig
from pdserve.config.load import build
from pdserve.errors import ConfigError, PeerError
from pdserve.http.plain_client import fetched, reason_and_remedy
from pdserve.proxy.brain.feed import CoreSubscription
from pdserve.wire.event_reader import GrainSet, ReaderState
from pdserve.wire.events import HASH_VERSION, EventEndpoint
from pdserve.wire.hop import INFO_PATH, EngineReport
from pdserve.wire.seal import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.config.load import Resolved, Table
    from pdserve.wire.events import GrainEvent

_TIMEOUT_S = 5.0
_POLL_MS = 50
_PRINT_S = 0.25


def run(table: Table, resolved: Mapping[str, Resolved]) -> int:
    """Run `pdserve kv-events`."""
    config = build("reader", KVEventsReaderConfig, table, resolved)
    endpoints = fetch(config.url)
    with zmq.Context() as context:
        cores = [
            CoreEvents(context, endpoint, config.secret, now_s=time.monotonic())
            for endpoint in endpoints
        ]
        try:
            _watch(cores, config.seconds or float("inf"))
        finally:
            for core in cores:
                core.close()
    return EXIT_DONE


def fetch(url: str) -> Sequence[EventEndpoint]:
    """Ask an engine for the addresses of its cores' KV events.

    Raises:
        PeerError: It cannot be reached, or is not an engine of pdserve.
        ConfigError: It publishes no events, or hashes prefixes differently from this version.
    """
    try:
        answer = fetched(f"{url.rstrip('/')}{INFO_PATH}", _TIMEOUT_S)
        engine = msgspec.json.decode(answer, type=EngineReport).engine
    except (OSError, *UNREADABLE, json.JSONDecodeError) as error:
        reason, remedy = reason_and_remedy(error, "give an engine's URL with --url")
        raise PeerError(f"{url} does not answer as an engine does ({reason}): {remedy}") from error
    if engine is None or not engine.kv_events:
        raise ConfigError(
            f"{url} publishes no KV events: start it with "
            "--kv-events-config.enable-kv-cache-events, and wait until it is ready",
            param="url",
        )
    for endpoint in engine.kv_events:
        if endpoint.hash_version != HASH_VERSION:
            raise ConfigError(
                f"{url} hashes prefixes with version {endpoint.hash_version}, but this command "
                f"uses version {HASH_VERSION}: use the release of pdserve that the engine runs",
                param="url",
            )
    return engine.kv_events


class CoreEvents:
    """The KV events of one engine core so far.

    Attributes:
        index: What the core holds, as far as is known.
        num_stored, num_removed: Grains stored and removed since the last line.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: EventEndpoint,
        secret: str,
        *,
        now_s: float,
    ) -> None:
        self.index = GrainSet()
        self.grain_tokens = endpoint.grain_tokens
        self.num_stored = self.num_removed = 0
        self._subscription = CoreSubscription(context, endpoint, secret, self, now_s=now_s)
        self.reader = self._subscription.reader

    def retire(self) -> None:
        """See `GrainIndex`."""
        self.index.retire()

    def apply(self, event: GrainEvent) -> None:
        """See `GrainIndex`."""
        before = self.num_grains
        self.index.apply(event)
        change = self.num_grains - before
        self.num_stored += max(0, change)
        self.num_removed += max(0, -change)

    @property
    def num_grains(self) -> int:
        """Grains in all media together."""
        return sum(map(len, self.index.grains.values()))

    def read(self, timeout_ms: int) -> None:
        """Read the events that have arrived, and request missing ones."""
        self._subscription.wait(timeout_ms)
        while self._subscription.pump(time.monotonic()):
            pass

    def close(self) -> None:
        """Close the subscription."""
        self._subscription.close()


def _watch(cores: Sequence[CoreEvents], seconds: float) -> None:
    start_s = time.monotonic()
    printed: list[str] = [""] * len(cores)
    printed_s = start_s
    while (now_s := time.monotonic()) - start_s < seconds:
        for core in cores:
            core.read(max(1, _POLL_MS // len(cores)))
        if now_s - printed_s < _PRINT_S:
            continue
        printed_s = now_s
        for number, core in enumerate(cores):
            line = described(core, now_s)
            if line != printed[number]:
                printed[number] = line
                name = f"core {number}: " if len(cores) > 1 else ""
                print(f"{now_s - start_s:8.1f} s  {name}{line}", flush=True)


def described(core: CoreEvents, now_s: float) -> str:
    """Return a line: the reader's state, changes since the last line, and what the core holds."""
    state = core.reader.state(now_s)
    if state is ReaderState.RESYNC:
        return "asking for all that it holds (if this lasts, PDSERVE_SECRET differs)"
    came = f"+{core.num_stored} -{core.num_removed}"
    core.num_stored = core.num_removed = 0
    media = ", ".join(
        f"{name} {len(grains)}" for name, grains in sorted(core.index.grains.items()) if grains
    )
    return f"{state.value:5}  {came:>12}  prefixes of {core.grain_tokens} tokens: {media or 'none'}"
