"""Publishes one engine core's KV events, to pdserve's proxies and in vLLM's format.

The core's loop queues its new events and continues; a thread numbers, keeps and sends them, and
answers subscribers that missed some. The loop never waits: events that find the queue full are
lost, and the loss is counted and reported. The stream of pdserve then begins a new epoch with the
current contents; vLLM's format skips the numbers of the lost batches.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import zmq

from pdserve.config.checks import is_loopback
from pdserve.errors import ConfigError
from pdserve.kvcache.grains import GrainTracker
from pdserve.wire.event_stream import GrainStream
from pdserve.wire.events import (
    HEARTBEAT_S,
    LEARNED_S,
    Ask,
    EventEndpoint,
    RoutingLoad,
    curve_secret,
    first_epoch,
)
from pdserve.wire.seal import UNREADABLE
from pdserve.wire.vllm_events import VllmEvents

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from pdserve.config.kv_events import KVEventsConfig
    from pdserve.config.schema import TransferConfig
    from pdserve.wire.events import GrainEvent, KVEvent
    from pdserve.wire.ids import Incarnation
    from pdserve.wire.learned import LearnedTimes

_FLUSH_S = 0.005
_FLUSH_GRAINS = 64
_LINGER_MS = 200


class _Queue:
    """Events that the loop has queued and the thread has not taken.

    Grains are tracked here, before any loss, so that the current ones are always known.
    """

    def __init__(self, max_steps: int) -> None:
        self._lock = threading.Lock()
        self._tracker = GrainTracker()
        self._max_steps = max_steps
        self._steps: list[tuple[Sequence[KVEvent], Sequence[GrainEvent]]] = []
        self._num_lost_steps = 0
        self.num_lost_events = 0

    def __len__(self) -> int:
        return len(self._steps)

    def put(self, events: Sequence[KVEvent]) -> bool:
        """Add a step's events; return whether the thread must be woken."""
        with self._lock:
            grain_events = self._tracker.apply(events)
            if len(self._steps) >= self._max_steps:
                self._num_lost_steps += 1
                self.num_lost_events += len(events)
                return False
            self._steps.append((events, grain_events))
            return len(self._steps) == 1

    def take(self) -> _Taken:
        """Take and return everything queued."""
        with self._lock:
            taken = _Taken(self._steps, self._num_lost_steps, {})
            self._steps = []
            if self._num_lost_steps:
                taken.grains = self._tracker.grains()
                self._num_lost_steps = 0
            return taken


class _Taken(msgspec.Struct):
    """Steps in order, the number lost behind them, and the current grains if any were lost."""

    steps: list[tuple[Sequence[KVEvent], Sequence[GrainEvent]]]
    num_lost: int
    grains: dict[str, set[int]]


class KVEventPublisher:
    """Sockets and a thread. Made where the scheduler runs.

    Args:
        transfer: Settings with the announced address and the deployment's secret.
        rank: Index of the core in its engine.

    Attributes:
        endpoint: Address to which proxies of pdserve connect.
        load, learned: The core's load, and its learned step times, for subscribers; the core's
            loop sets both.

    Raises:
        ConfigError: An address cannot be bound.
    """

    def __init__(
        self,
        config: KVEventsConfig,
        transfer: TransferConfig,
        *,
        incarnation: Incarnation,
        rank: int,
    ) -> None:
        self._queue = _Queue(config.max_queue_size)
        self._stream = GrainStream(first_epoch(incarnation))
        self._context = zmq.Context()
        self._pub = self._curve(zmq.PUB, transfer.secret)
        self._pub.set_hwm(config.hwm)
        self._snapshots = self._curve(zmq.ROUTER, transfer.secret)
        self._vllm: VllmEvents | None = None
        self._vllm_pub, self._replays = (
            self._context.socket(zmq.PUB),
            self._context.socket(zmq.ROUTER),
        )
        try:
            port = config.port + 2 * rank if config.port else 0
            self.endpoint = EventEndpoint(
                host=transfer.host,
                port=_bind_port(self._pub, transfer.host, port),
                snapshot_port=_bind_port(self._snapshots, transfer.host, port and port + 1),
            )
            if config.endpoint is not None and config.publisher != "null":
                self._vllm = VllmEvents(
                    rank=rank,
                    topic=config.topic,
                    num_kept=config.buffer_steps,
                    replay_topic=config.replay_topic,
                )
                self._vllm_pub.set_hwm(config.hwm)
                _open(self._vllm_pub, config.endpoint, rank, flag="endpoint")
                self._replays.set_hwm(config.buffer_steps + 1)
                if config.replay_endpoint is not None:
                    _open(self._replays, config.replay_endpoint, rank, flag="replay-endpoint")
        except BaseException:
            self._close_sockets()
            raise
        self.load = RoutingLoad()
        self.learned: LearnedTimes | None = None
        self._told: LearnedTimes | None = None
        self._told_s = float("-inf")
        self._num_published = 0
        self._is_ending = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Queue a step's events. Never waits."""
        if events and self._queue.put(events):
            os.eventfd_write(self._wake_fd, 1)

    def counts(self) -> dict[str, int]:
        """Return the events published and lost since the start, and the steps still queued."""
        return {
            "published": self._num_published,
            "dropped": self._queue.num_lost_events,
            "queued": len(self._queue),
        }

    def close(self, timeout_s: float) -> None:
        """Send what is queued, and end. Nothing is published after that. Idempotent."""
        if not self._is_ending:
            self._is_ending = True
            os.eventfd_write(self._wake_fd, 1)
            self._thread.join(timeout_s)
            os.close(self._wake_fd)

    # ---- the thread ----------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._wake_fd, self._snapshots, self._replays):
            poller.register(source, zmq.POLLIN)
        encode = msgspec.msgpack.Encoder().encode
        due_s = 0.0
        try:
            while True:
                is_ending = self._is_ending
                wait_s = max(0.0, due_s - time.monotonic())
                ready = dict(poller.poll(math.ceil(wait_s * 1e3)))
                if self._wake_fd in ready:
                    os.eventfd_read(self._wake_fd)
                    if self._take():
                        due_s = min(due_s, time.monotonic() + _FLUSH_S)
                is_full = self._stream.num_pending >= _FLUSH_GRAINS
                if is_full or is_ending or self._snapshots in ready or due_s <= time.monotonic():
                    learned = self._learned(is_asked=self._snapshots in ready)
                    self._pub.send(encode(self._stream.batch(self.load, learned)))
                    due_s = time.monotonic() + HEARTBEAT_S
                if self._snapshots in ready:
                    self._answer(encode)
                if self._replays in ready:
                    self._replay()
                if is_ending:
                    return
        finally:
            self._close_sockets()

    def _learned(self, *, is_asked: bool) -> LearnedTimes | None:
        """Return the learned times if they are due or, with `is_asked`, a subscriber is new."""
        learned, now_s = self.learned, time.monotonic()
        if learned is self._told and not is_asked and now_s - self._told_s < LEARNED_S:
            return None
        self._told, self._told_s = learned, now_s
        return learned

    def _take(self) -> bool:
        """Publish what is queued in vLLM's format; return whether there is news for proxies."""
        taken = self._queue.take()
        for events, grain_events in taken.steps:
            self._num_published += len(events)
            self._stream.add(grain_events)
            if self._vllm is not None:
                self._vllm_pub.send_multipart(self._vllm.frames(events, wall_s=time.time()))
        if taken.num_lost:
            self._stream.restart(taken.grains)
            if self._vllm is not None:
                self._vllm.skip(taken.num_lost)
        return self._stream.num_pending > 0 or taken.num_lost > 0

    def _answer(self, encode: Any) -> None:
        peer, *frames = self._snapshots.recv_multipart()
        try:
            ask = msgspec.msgpack.decode(frames[-1] if frames else b"", type=Ask)
        except UNREADABLE:
            return  # a peer that knows the secret and sends this needs no answer
        for answer in self._stream.answer(ask):
            self._snapshots.send_multipart((peer, encode(answer)))

    def _replay(self) -> None:
        peer, *frames = self._replays.recv_multipart()
        if self._vllm is not None:
            for answer in self._vllm.replay(frames):
                self._replays.send_multipart((peer, *answer))

    def _curve(self, kind: int, secret: str) -> zmq.Socket[bytes]:
        if not zmq.has("curve"):
            raise ConfigError(
                "this ZMQ has no CURVE encryption, which pdserve needs: install pyzmq from its "
                "wheels"
            )
        listening = self._context.socket(kind)
        listening.curve_server = True
        listening.curve_secretkey = curve_secret(secret)
        return listening

    def _close_sockets(self) -> None:
        for each in (self._pub, self._snapshots, self._vllm_pub, self._replays):
            each.close(linger=_LINGER_MS)
        self._context.term()


def _bind_port(bound: zmq.Socket[bytes], host: str, port: int) -> int:
    """Listen at `host`, at a free port if `port` is 0. Return the port."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound.ipv6 = family == socket.AF_INET6
        number = f"[{address[0]}]" if bound.ipv6 else address[0]
        bound.bind(f"tcp://{number}:{port or '*'}")
    except (OSError, zmq.ZMQError) as error:
        raise ConfigError(
            f"--kv-events-config.port is {port}: cannot listen on it at {host!r} ({error}); use "
            "another port, or 0 for a free one",
            param="kv-events-config.port",
        ) from error
    return int(bound.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def _open(opened: zmq.Socket[bytes], endpoint: str, rank: int, *, flag: str) -> None:
    """Bind or connect, as vLLM would; core `rank` adds its number to the port."""
    scheme, _, address = endpoint.partition("://")
    if scheme == "tcp":
        host, _, port = address.rpartition(":")
        mine = f"tcp://{host}:{int(port) + rank}"
        is_bound = host in ("*", "0.0.0.0", "[::]") or is_loopback(host.strip("[]"))
        opened.ipv6 = "[" in host
    else:
        mine, is_bound = f"{endpoint}_dp{rank}" if rank else endpoint, True
    try:
        (opened.bind if is_bound else opened.connect)(mine)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"--kv-events-config.{flag} is {endpoint!r}: cannot listen on {mine} ({error}); use "
            "another address, and a different one for each engine of a machine (--prefill.FLAG, "
            "--decode.FLAG)",
            param=f"kv-events-config.{flag}",
        ) from error
