"""A prefix cache without a model, whose events go to readers over a network that loses some."""

from __future__ import annotations

import itertools
import random
import socket
import threading
import time
from typing import TYPE_CHECKING

import zmq

from pdserve.config.kv_events import KVEventsConfig
from pdserve.config.schema import TransferConfig
from pdserve.engine.kv_events import KVEventPublisher
from pdserve.kvcache.block_pool import OutOfBlocksError
from pdserve.kvcache.manager import KVCacheManager
from pdserve.wire.ids import Incarnation

if TYPE_CHECKING:
    from pdserve.kvcache.lease import Holding
    from pdserve.kvcache.manager import HashChain

CONNECTED_S = 20.0
BLOCK_SIZE = 16
NUM_BLOCKS = 24
LETTERS = ("abc", "ab", "ab", "abc")


def tokens_of(letters: str) -> list[int]:
    return [100 * ord(letter) + i for letter in letters for i in range(BLOCK_SIZE)]


PROMPTS = ["".join(letters) for letters in itertools.product(*LETTERS)]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class LossyNetwork:
    """Carries batches from an engine to readers, and loses some.

    Attributes:
        endpoint: Where readers subscribe.
        loss: Share of batches that is lost.
        num_passed, num_lost: How many were passed on since the last connection, and lost in all.
    """

    def __init__(self, source: str, rng: random.Random) -> None:
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.loss = 0.0
        self.num_lost = 0
        self._source = source
        self._rng = rng
        self._context = zmq.Context()
        self._out = self._context.socket(zmq.PUB)
        self._out.bind(self.endpoint)
        self.connect()

    def connect(self) -> None:
        self.num_passed = 0
        self._in = self._context.socket(zmq.SUB)
        self._in.subscribe(b"")
        self._in.connect(self._source)
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_ending.is_set():
            if self._in.poll(20):
                frames = self._in.recv_multipart()
                if self._rng.random() < self.loss:
                    self.num_lost += 1
                else:
                    self._out.send_multipart(frames)
                    self.num_passed += 1

    def disconnect(self) -> None:
        """Drop what is on the way: a connection ends with its engine."""
        self._is_ending.set()
        self._thread.join(5.0)
        self._in.close(linger=0)

    def close(self) -> None:
        self.disconnect()
        self._context.destroy(linger=0)


class LossyEngine:
    """Takes random prompts, evicts, forgets, restarts.

    Args:
        replay_topic: See `KVEventsConfig`.

    Attributes:
        replay_endpoint: Where readers ask for what they lack.
        num_lives: How often it was started.
    """

    def __init__(self, rng: random.Random, *, replay_topic: bool) -> None:
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.replay_endpoint = f"tcp://127.0.0.1:{free_port()}"
        self._config = KVEventsConfig(
            enable_kv_cache_events=True,
            endpoint=endpoint,
            replay_endpoint=self.replay_endpoint,
            replay_topic=replay_topic,
        )
        self._rng = rng
        self._network_rng = random.Random(rng.random())
        self.num_lives = 0
        self._start()
        self.network = LossyNetwork(endpoint, self._network_rng)

    def _start(self) -> None:
        self.num_lives += 1
        self._kv = KVCacheManager(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=True,
            log_events=True,
        )
        self._running: list[tuple[Holding, HashChain, int]] = []
        self._publisher = KVEventPublisher(
            self._config,
            TransferConfig(),
            incarnation=Incarnation(f"{self.num_lives:016x}"),
            rank=0,
        )

    def restart(self) -> None:
        """Start over. Readers hear of it at once, as they are connected before a model is loaded.

        vLLM's format has no epochs. To a reader that hears of this life only once it has counted
        further than the former one, the former one goes on.
        """
        self.close_publisher()
        self.network.disconnect()
        self._start()
        self.network.connect()
        loss, self.network.loss = self.network.loss, 0.0
        end_s = time.monotonic() + CONNECTED_S
        while not self.network.num_passed:
            assert time.monotonic() < end_s, "nothing comes from the engine that was started again"
            self.beat()
            time.sleep(0.01)
        self.network.loss = loss

    def step(self) -> None:
        """One random thing happens."""
        match self._rng.choices(("begin", "compute", "end", "clear"), (40, 60, 35, 1))[0]:
            case "begin":
                tokens = tokens_of(self._rng.choice(PROMPTS)[: self._rng.randint(1, 4)])
                chain = self._kv.chain(tokens, "")
                hit = self._kv.match(chain, max_tokens=len(tokens) - 1)
                try:
                    self._running.append((self._kv.open(hit, len(tokens)), chain, len(tokens)))
                except OutOfBlocksError:
                    self._end()
            case "compute" if self._running:
                holding, chain, num_most = self._rng.choice(self._running)
                num_tokens = self._rng.randint(1, num_most // BLOCK_SIZE) * BLOCK_SIZE
                self._kv.publish(holding, chain, num_computed_tokens=num_tokens)
            case "end":
                self._end()
            case "clear":
                self._kv.pool.forget_all()
        self._publisher.publish(self._kv.events.drain())

    def _end(self) -> None:
        if self._running:
            holding, *_ = self._running.pop(self._rng.randrange(len(self._running)))
            holding.end()

    def depth(self, prompt: str) -> int:
        """Blocks of a prompt that would be found."""
        tokens = tokens_of(prompt)
        hit = self._kv.match(self._kv.chain(tokens, ""), max_tokens=len(tokens))
        return hit.num_tokens // BLOCK_SIZE

    def beat(self) -> None:
        """Publish something that shows readers what they lack, and leaves nothing."""
        tokens = [9] * BLOCK_SIZE
        chain = self._kv.chain(tokens, "")
        while self._kv.pool.num_free == 0:
            self._end()
        hit = self._kv.match(chain, max_tokens=0)
        holding = self._kv.open(hit, len(tokens))
        self._kv.publish(holding, chain, num_computed_tokens=len(tokens))
        self._kv.pool.forget(holding.blocks)
        holding.end()
        self._publisher.publish(self._kv.events.drain())

    def close_publisher(self) -> None:
        self._publisher.close(5.0)

    def close(self) -> None:
        self.close_publisher()
        self.network.close()
