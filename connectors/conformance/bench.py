"""Shared set-up of the kit: engines of the wanted shapes, closed after each test."""

from __future__ import annotations

import threading
import time
import unittest
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import torch

from pdserve.connectors.conformance.engines import Engine, prompt_of
from pdserve.connectors.conformance.values import make_shape
from pdserve.wire.ids import BlockId
from pdserve.wire.transfer import PushTicket

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.connectors.base import KVConnectorBase
    from pdserve.wire.transfer import KVShape

NUM_TOKENS = 40
PROMPT = prompt_of(NUM_TOKENS)
_ROOM_TOKENS = 64


class Bench:
    """Makes engines that can meet.

    Attributes:
        prefill_shape, decode_shape: How P and D spread the KV of one model over their ranks; set by
            subclasses. The kit raises `num_blocks` where a test needs more.
    """

    prefill_shape: ClassVar[KVShape] = make_shape()
    decode_shape: ClassVar[KVShape] = make_shape()

    def make_connector(self) -> KVConnectorBase:
        """Make the connector for one test; all engines that use it can meet."""
        raise NotImplementedError

    def setup_method(self) -> None:
        """Prepare a test."""
        self._num_threads = threading.active_count()
        self._engines: list[Engine] = []
        self._num_tickets = 0
        self._shapes = {"P": self.prefill_shape, "D": self.decode_shape}
        self.connector = self.make_connector()

    def teardown_method(self) -> None:
        """Close a test's engines, and check that nothing is left running."""
        for engine in self._engines:
            engine.close()
        deadline_s = time.monotonic() + 20.0
        while threading.active_count() > self._num_threads and time.monotonic() < deadline_s:
            time.sleep(0.005)
        assert threading.active_count() <= self._num_threads, "a connector left a thread behind"

    def new(self, name: str, **arguments: Any) -> Engine:
        """Make an engine with P's or D's shape, whichever letter its name begins with."""
        engine = Engine(self.connector, name, shape=self._shapes[name[0]], **arguments)
        self._engines.append(engine)
        return engine

    def pair(self, *, num_jobs: int = 0) -> tuple[Engine, Engine]:
        """Make a P and a D with room for at least `num_jobs` prompts."""
        if num_jobs:
            for name, shape in self._shapes.items():
                needed = (num_jobs + 1) * self._stride(name)
                self._shapes[name] = msgspec.structs.replace(
                    shape, num_blocks=max(shape.num_blocks, needed)
                )
        return self.new("P"), self.new("D")

    def ticket(self, p: Engine, d: Engine, **changes: Any) -> PushTicket:
        """Return a ticket for a push from `p` to `d`, as a proxy draws it.

        Skips the test if the connector does not push.
        """
        if not self.connector.capabilities.push:
            raise unittest.SkipTest("its capabilities do not name push")
        self._num_tickets += 1
        ticket = PushTicket(nonce=f"ticket {self._num_tickets}", prefill=p.ref, decode=d.ref)
        return msgspec.structs.replace(ticket, **changes)

    # --- where prompts lie

    def _stride(self, name: str) -> int:
        return _ROOM_TOKENS // self._shapes[name].block_size

    def _blocks(self, name: str, job: int) -> list[int]:
        first = job * self._stride(name)
        blocks = list(range(first, first + -(-NUM_TOKENS // self._shapes[name].block_size)))
        # Neighbouring blocks out of order, so that a table cannot be treated as a range.
        return [*blocks[1:], blocks[0]] if job % 2 == 0 else blocks

    def p_blocks(self, job: int) -> list[int]:
        """Return P's blocks of the `job`-th prompt (of `NUM_TOKENS` tokens), in token order."""
        return self._blocks("P", job)

    def d_blocks(self, job: int) -> list[int]:
        """Return D's blocks of the `job`-th prompt, likewise."""
        return [block + 1 for block in self._blocks("D", job)]

    @staticmethod
    def ids(blocks: Sequence[int]) -> list[BlockId]:
        """Return the blocks as block ids."""
        return [BlockId(block) for block in blocks]

    # --- questions

    @staticmethod
    def same(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
        """Whether two snapshots are equal."""
        return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

    @staticmethod
    def until_woken(engine: Engine, condition: Callable[[], object]) -> None:
        """Step only when the connector signals news, until `condition` holds."""
        deadline_s = time.monotonic() + 30.0
        while not condition():
            assert engine.news.wait(5.0), "the engine was not woken"
            assert time.monotonic() < deadline_s
            engine.news.clear()
            engine.step()
