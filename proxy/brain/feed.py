"""Feeds engines' KV events into the index: one subscription per engine core.

Who there is to listen to is looked up at each turn, like whom to believe: an engine that falls
silent, or lost events that have not been made up for, has nothing in the index until it is in step
again. Everything happens on the event loop, when a socket has something, and ten times a second.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec
import zmq

from pdserve.observe.log import log_event
from pdserve.proxy.brain.index import Holder
from pdserve.wire.event_reader import EventReader
from pdserve.wire.events import HASH_VERSION, Answer, Batch, RoutingLoad, curve_secret
from pdserve.wire.ids import GRAIN_TOKENS
from pdserve.wire.seal import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdserve.observe.clock import Clock
    from pdserve.proxy.backend import Backend
    from pdserve.proxy.brain.index import PrefixIndex
    from pdserve.wire.event_reader import GrainIndex, ReaderState
    from pdserve.wire.events import EventEndpoint
    from pdserve.wire.ids import Incarnation
    from pdserve.wire.learned import LearnedTimes

log = logging.getLogger(__name__)

_MAX_AT_ONCE: Final = 256
"""Messages that are read in a row; others have a turn between."""
_TURN_S: Final = 0.1
_MAX_TURNED_PER_S: Final = 2000
"""Cores that are looked at whether or not they have said something: with more of them a turn comes
later."""
_LOAD_S: Final = 0.1
"""Between two times that it is told how much an engine has to do, at least."""
_SWEPT: Final = 10_000
"""Entries that are looked at in one turn for what retired holders left: a few milliseconds."""


class CoreSubscription:
    """Keeps an index in step with one engine core.

    Args:
        secret: The deployment's.
        now_s: Returns monotonic seconds.

    Attributes:
        reader: Knows whether the index is in step.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: EventEndpoint,
        secret: str,
        index: GrainIndex,
        *,
        now_s: float,
    ) -> None:
        self.reader = EventReader(index, now_s=now_s)
        self._batches = msgspec.msgpack.Decoder(Batch)
        self._answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
        self._sub, self._asks = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._sub.subscribe(b"")
        for each, port in ((self._sub, endpoint.port), (self._asks, endpoint.snapshot_port)):
            each.linger = 0
            each.curve_serverkey = zmq.curve_public(curve_secret(secret))
            each.curve_publickey, each.curve_secretkey = zmq.curve_keypair()
            each.ipv6 = ":" in endpoint.host
            host = f"[{endpoint.host}]" if each.ipv6 else endpoint.host
            try:
                each.connect(f"tcp://{host}:{port}")
            except zmq.ZMQError:
                self.close()
                raise

    @property
    def file_descriptors(self) -> tuple[int, int]:
        """Descriptors readable when there may be data to `pump`; edge-triggered (see ZMQ_FD)."""
        return self._sub.FD, self._asks.FD

    def wait(self, timeout_ms: int) -> None:
        """Wait until part of the stream has arrived."""
        self._sub.poll(timeout_ms)

    def pump(self, now_s: float) -> bool:
        """Ask for missing events and process those received; return whether more remain."""
        ask = self.reader.due(now_s)
        if ask is not None:
            try:
                self._asks.send(msgspec.msgpack.encode(ask), zmq.NOBLOCK)
            except zmq.Again:
                return False  # it is not connected yet; the reader asks again
        for _ in range(_MAX_AT_ONCE):
            try:
                if (said := _receive(self._sub)) is not None:
                    self.reader.heard(self._batches.decode(said), now_s)
                elif (said := _receive(self._asks)) is not None:
                    self.reader.answered(self._answers.decode(said), now_s)
                else:
                    return False
            except UNREADABLE:
                pass  # the reader notices what it lacks, and asks again
        return True

    def close(self) -> None:
        """Close the subscription."""
        self._sub.close()
        self._asks.close()


@dataclass(frozen=True, slots=True)
class _CoreName:
    url: str
    life: Incarnation
    rank: int


@dataclass(slots=True)
class _Core:
    holder: Holder
    subscription: CoreSubscription
    is_exact: bool = False


@dataclass(slots=True)
class _Engine:
    backend: Backend
    cores: list[_Core] = field(default_factory=list)
    reported: RoutingLoad | None = None
    reported_s: float = float("-inf")
    learned: list[LearnedTimes] = field(default_factory=list)


class EventFeed:
    """The subscriptions of one proxy.

    Args:
        backends: The engines, read at each turn.
        secret: The deployment's.
        on_load: Called with an engine's load, repeatedly while it has any.
        on_learned: Called with what the cores of the engine at a URL have learned of their steps,
            whenever that changes; with nothing once the engine is left.
    """

    def __init__(
        self,
        index: PrefixIndex,
        backends: Iterable[Backend],
        clock: Clock,
        *,
        secret: str,
        on_load: Callable[[Backend, RoutingLoad], None] = lambda engine, load: None,
        on_learned: Callable[[str, Sequence[LearnedTimes]], None] = lambda url, learned: None,
    ) -> None:
        self._index = index
        self._backends = backends
        self._clock = clock
        self._secret = secret
        self._on_load, self._on_learned = on_load, on_learned
        self._engines: dict[str, _Engine] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._cores: dict[_CoreName, _Core] = {}
        self._exact: dict[str, tuple[int, ...]] = {}
        self._refused: set[tuple[str, Incarnation]] = set()
        self._num_former_resyncs = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start listening, on the running event loop."""
        self._context = zmq.Context()
        self._context.max_sockets = self._context.get(zmq.SOCKET_LIMIT)  # else 1,023
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Close the subscriptions to all engines."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for name in list(self._cores):
            self._leave(name)
        if self._context is not None:
            self._context.term()

    def exact(self, url: str) -> Sequence[int]:
        """Return the index numbers of an engine's cores; none if their contents are unknown."""
        return self._exact.get(url, ())

    def states(self) -> list[ReaderState]:
        """Return the state of each core's reader."""
        now_s = self._clock.monotonic_s()
        return [core.subscription.reader.state(now_s) for core in self._cores.values()]

    def lags_s(self) -> dict[str, float]:
        """Return seconds since each engine was last heard, by URL; for its most delayed core."""
        now_s = self._clock.monotonic_s()
        lags_s: dict[str, float] = {}
        for name, core in self._cores.items():
            lag_s = core.subscription.reader.silent_s(now_s)
            lags_s[name.url] = max(lag_s, lags_s.get(name.url, 0.0))
        return lags_s

    def resyncs(self) -> dict[str, int]:
        """Return how often each present engine's events had to be requested, by URL."""
        numbers: dict[str, int] = {}
        for name, core in self._cores.items():
            number = core.subscription.reader.num_resyncs
            numbers[name.url] = numbers.get(name.url, 0) + number
        return numbers

    @property
    def num_resyncs(self) -> int:
        """Number of times events had to be requested, including each core's first time."""
        cores = self._cores.values()
        return self._num_former_resyncs + sum(c.subscription.reader.num_resyncs for c in cores)

    async def _run(self) -> None:
        while True:
            try:
                self._turn()
            except Exception:  # the top of a loop that must go on
                log.exception("engines' KV events cannot be followed")
            await asyncio.sleep(max(_TURN_S, len(self._cores) / _MAX_TURNED_PER_S))

    def _turn(self) -> None:
        self._refused &= {
            (backend.url, backend.info.incarnation)
            for backend in self._backends
            if backend.info is not None
        }
        wanted = {
            _CoreName(backend.url, backend.info.incarnation, rank): (backend, endpoint)
            for backend in self._backends
            if backend.info is not None
            and (backend.url, backend.info.incarnation) not in self._refused
            for rank, endpoint in enumerate(self._readable(backend))
        }
        for name in self._cores.keys() - wanted.keys():
            self._leave(name)
        for name, (backend, endpoint) in wanted.items():
            if name not in self._cores:
                self._join(name, backend, endpoint)
            else:  # which may have left and come back since
                self._engines[name.url].backend = backend
        for name in list(self._cores):
            self._pump(name)
        self._believe()
        self._index.sweep(_SWEPT, self._clock.monotonic_s())

    def _readable(self, backend: Backend) -> Sequence[EventEndpoint]:
        """Return where an engine publishes its KV events, if it names KV as this proxy does."""
        assert backend.info is not None
        endpoints = backend.info.kv_events
        named = {(each.hash_version, each.grain_tokens) for each in endpoints}
        if named <= {(HASH_VERSION, GRAIN_TOKENS)}:
            return endpoints
        self._refuse(
            backend.url,
            backend.info.incarnation,
            "it names prefixes otherwise: use one release for engines and proxies",
        )
        return ()

    def _refuse(self, url: str, life: Incarnation, why: str) -> None:
        self._refused.add((url, life))
        level = logging.WARNING
        log_event(log, "its KV events are not read", level=level, url=url, reason=why)

    def _join(self, name: _CoreName, backend: Backend, endpoint: EventEndpoint) -> None:
        assert self._context is not None
        holder = Holder(self._index, name.url)
        holder.believe(is_believed=False)
        try:
            subscription = CoreSubscription(
                self._context, endpoint, self._secret, holder, now_s=self._clock.monotonic_s()
            )
        except zmq.ZMQError as error:
            holder.close()
            where = f"{endpoint.host}:{endpoint.port} and :{endpoint.snapshot_port}"
            why = f"{where} cannot be connected to ({error}): see its --kv-events-config"
            self._refuse(name.url, name.life, why)
            return
        core = self._cores[name] = _Core(holder, subscription)
        self._engines.setdefault(name.url, _Engine(backend)).cores.append(core)
        loop = asyncio.get_running_loop()
        for descriptor in subscription.file_descriptors:
            loop.add_reader(descriptor, self._pump, name)

    def _leave(self, name: _CoreName) -> None:
        core = self._cores.pop(name)
        engine = self._engines[name.url]
        engine.cores.remove(core)
        if not engine.cores:
            del self._engines[name.url]
            self._on_learned(name.url, ())
        loop = asyncio.get_running_loop()
        for descriptor in core.subscription.file_descriptors:
            loop.remove_reader(descriptor)
        self._num_former_resyncs += core.subscription.reader.num_resyncs
        core.holder.close()
        core.subscription.close()

    def _pump(self, name: _CoreName) -> None:
        core = self._cores.get(name)
        if core is None:
            return
        now_s = self._clock.monotonic_s()
        if core.subscription.pump(now_s):
            asyncio.get_running_loop().call_soon(self._pump, name)
        if core.subscription.reader.is_exact(now_s) is not core.is_exact:
            self._believe()
        self._tell_load(name.url, now_s)
        self._tell_learned(name.url)

    def _tell_load(self, url: str, now_s: float) -> None:
        """Report an engine's load, once all its cores have reported theirs."""
        engine = self._engines[url]
        if now_s - engine.reported_s < _LOAD_S:
            return
        total = RoutingLoad()
        for core in engine.cores:
            if core.subscription.reader.load is None:
                return
            total = total.plus(core.subscription.reader.load)
        if total.num_requests or total != engine.reported:
            engine.reported, engine.reported_s = total, now_s
            self._on_load(engine.backend, total)

    def _tell_learned(self, url: str) -> None:
        """Report what an engine has learned, if that has changed."""
        engine = self._engines[url]
        said = [core.subscription.reader.learned for core in engine.cores]
        learned = [each for each in said if each is not None]
        if learned != engine.learned:
            engine.learned = learned
            self._on_learned(url, learned)

    def _believe(self) -> None:
        """Update the index with which cores are in step now."""
        now_s = self._clock.monotonic_s()
        exact: dict[str, tuple[int, ...]] = {}
        doubtful: set[str] = set()
        for name, core in self._cores.items():
            is_exact = core.subscription.reader.is_exact(now_s)
            if is_exact is not core.is_exact:
                core.is_exact = is_exact
                core.holder.believe(is_believed=is_exact)
            if is_exact:
                exact[name.url] = (*exact.get(name.url, ()), core.holder.bit)
            else:
                doubtful.add(name.url)
        self._exact = {url: bits for url, bits in exact.items() if url not in doubtful}


def _receive(socket: zmq.Socket[bytes]) -> bytes | None:
    try:
        return socket.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None
