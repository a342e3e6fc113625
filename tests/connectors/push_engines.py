"""Engines without a model or a scheduler, of any shape, that push to one another over NIXL.

What a scheduler half would stage is posted by hand, so that each side can do any of it at any
time. KV says who wrote it, as in the conformance kit, so a byte that is missing, stale or
misplaced, on whatever rank, cannot pass for the right one.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, TransferConfig
from pdserve.connectors.base import ConnectorContext
from pdserve.connectors.conformance.engines import Rank
from pdserve.connectors.conformance.values import Share, make_shape
from pdserve.connectors.handover.instructions import (
    Chunk,
    EndLease,
    Expect,
    Grant,
    Instructions,
    Load,
    PushNews,
    Reserve,
    Watch,
)
from pdserve.connectors.nixl import NixlConnector
from pdserve.wire.ids import BlockId, EngineId, Incarnation, RequestId
from pdserve.wire.transfer import (
    ConnectorMetadata,
    EngineRef,
    Failed,
    KVHandoff,
    KVShape,
    LeaseEnd,
    Received,
)
from tests.connectors.engines import _answer, _Child

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from pdserve.connectors.transfer.pushes import Observation


class FixedChoice:
    """In the place of what is learned."""

    def __init__(self, layerwise: bool) -> None:
        self.layerwise = layerwise

    def choose(self, num_step_tokens: int) -> bool:
        return self.layerwise

    def observe(self, seen: Observation) -> None:
        return None


class PushEngine:
    """The worker halves of one engine, and what they reported.

    Attributes:
        facts: What each rank said, as (rank, fact), in order.
    """

    def __init__(
        self,
        engine_id: str,
        shape: KVShape | None = None,
        *,
        layerwise: bool = False,
        lease_s: float = 6.0,
        **transfer: Any,
    ) -> None:
        self.shape = shape = shape or make_shape()
        self.lease_s = lease_s
        self.news = threading.Event()
        self.ranks: list[Rank] = []
        self.facts: list[tuple[int, Any]] = []
        self.faults: Counter[str] = Counter()
        incarnation = Incarnation(os.urandom(8).hex())
        config = EngineConfig(
            model=ModelConfig(model="m"),
            cache=CacheConfig(block_size=shape.block_size),
            transfer=TransferConfig(
                **{"handshake_timeout_s": 30.0, **transfer},
                kv_connector="nixl",
                lease_s=lease_s,
                quarantine_s=30.0,
            ),
        )
        for rank in range(shape.num_ranks):
            context = ConnectorContext(
                config=config,
                engine_id=EngineId(engine_id),
                incarnation=incarnation,
                layout=Share(shape, rank).layout("float32"),
                layout_digest="same",
                layout_fields={},
                shape=shape,
                rank=rank,
            )
            self.ranks.append(Rank(NixlConnector(), context, self.news.set))
        self.workers: list[Any] = [each.worker for each in self.ranks]
        self.kvs = [each.kv for each in self.ranks]
        for worker in self.workers:
            worker._choice = FixedChoice(layerwise)
        self.ref = EngineRef(
            engine_id=EngineId(engine_id),
            incarnation=incarnation,
            endpoints=tuple(each.endpoint for each in self.ranks if each.endpoint),
            shape=shape,
        )

    @property
    def server(self) -> Any:
        """The serving side of the first rank's transfer thread."""
        return self.workers[0]._runner._machine.server

    # ---- KV ------------------------------------------------------------------------------

    def write_kv(
        self, blocks: Sequence[int], seed: int, first: int, end: int, layer: int | None = None
    ) -> None:
        """Have the tokens `[first, end)` computed, of all layers or of one of each rank's."""
        layers = slice(None) if layer is None else slice(layer, layer + 1)
        for rank in self.ranks:
            rank.write(blocks, seed, first, end, layers=layers)

    def holds(self, blocks: Sequence[int], seed: int, first: int, end: int) -> bool:
        """Whether every rank has these tokens, byte for byte."""
        return all(rank.holds(blocks, seed, first, end) for rank in self.ranks)

    def fill_kv(self, value: float) -> None:
        for kv in self.kvs:
            kv.fill_(value)

    def is_filled(self, value: float) -> bool:
        return all(bool((kv == value).all()) for kv in self.kvs)

    # ---- what a scheduler half would stage ---------------------------------------------------

    def post(self, **instructions: Any) -> None:
        metadata = Instructions(**instructions).to_metadata()
        for worker in self.workers:
            worker.post(metadata)

    def expect(self, nonce: str, decode: EngineRef) -> None:
        self.post(expects=[Expect(nonce, RequestId(f"p-{nonce}"), decode)])

    def reserve(
        self,
        nonce: str,
        owner: EngineRef,
        blocks: Sequence[int],
        num_tokens: int,
        *,
        first: int = 0,
        load_id: int = 1,
    ) -> None:
        self.post(
            watches=[Watch(nonce, owner, self.lease_s)],
            reserves=[
                Reserve(
                    load_id,
                    RequestId(f"d-{nonce}"),
                    nonce,
                    owner,
                    [BlockId(b) for b in blocks],
                    first,
                    num_tokens,
                )
            ],
        )

    def run(
        self,
        nonce: str,
        blocks: Sequence[int],
        first: int,
        end: int,
        num_tokens: int,
        *,
        seed: int = 1,
        per_layer_s: float = 0.0,
        is_computed: bool = False,
    ) -> None:
        """One step: it computes the tokens `[first, end)`, unless their KV is there already."""
        chunk = Chunk(
            nonce,
            RequestId(f"p-{nonce}"),
            [BlockId(b) for b in blocks],
            [1] * len(blocks),
            first,
            end,
            num_tokens,
            end - first,
        )
        metadata = ConnectorMetadata(msgspec.msgpack.encode([chunk]))
        layerwise = [worker.start_load_kv(metadata) for worker in self.workers]
        for layer in range(max(kv.shape[1] for kv in self.kvs)):
            if not is_computed:
                self.write_kv(blocks, seed, first, end, layer)
            if per_layer_s:
                time.sleep(per_layer_s)
            for worker, kv, is_layerwise in zip(self.workers, self.kvs, layerwise, strict=True):
                if layer < kv.shape[1] and is_layerwise:
                    worker.save_kv_layer(layer)
        for worker in self.workers:
            worker.wait_for_save()

    def handoff(self, nonce: str, blocks: Sequence[int], num_tokens: int) -> KVHandoff:
        return KVHandoff(
            engine_id=self.ref.engine_id,
            incarnation=self.ref.incarnation,
            nonce=nonce,
            request_id=RequestId(f"p-{nonce}"),
            endpoints=list(self.ref.endpoints),
            block_ids=[BlockId(b) for b in blocks],
            shape=self.shape,
            num_tokens=num_tokens,
            layout_digest="same",
            lease_s=self.lease_s,
            prompt_digest="",
            first_token_ids=[7],
            generations=[1] * len(blocks),
        )

    def grant(
        self, nonce: str, blocks: Sequence[int], num_tokens: int, *, lease_nonce: str = ""
    ) -> KVHandoff:
        handoff = self.handoff(lease_nonce or nonce, blocks, num_tokens)
        grant = Grant(
            lease_nonce or nonce,
            RequestId(f"p-{nonce}"),
            handoff.block_ids,
            handoff.generations,
            num_tokens,
            None if lease_nonce else handoff,
        )
        self.post(grants=[grant])
        return handoff

    def pull(self, nonce: str, owner: EngineRef, theirs: Sequence[int], mine: Sequence[int],
             num_tokens: int, *, load_id: int) -> None:  # fmt: skip
        load = Load(
            load_id,
            RequestId(f"d-{nonce}"),
            nonce,
            owner,
            [BlockId(b) for b in theirs],
            [BlockId(b) for b in mine],
            0,
            num_tokens,
        )
        self.post(watches=[Watch(nonce, owner, self.lease_s)], loads=[load])

    def release(self, nonce: str, owner: EngineRef, end: LeaseEnd = LeaseEnd.READ) -> None:
        self.post(releases=[EndLease(nonce, owner, end)])

    # ---- what was reported -------------------------------------------------------------------

    def step(self) -> None:
        for rank, worker in enumerate(self.workers):
            report = worker.get_finished()
            for news in map(PushNews.from_payload, report.payloads):
                self.facts += [(rank, fact) for fact in (*news.registered, *news.withdrawn)]
            for facts in (report.settled, report.received, report.failed):
                self.facts += [(rank, fact) for fact in facts]
            self.faults.update(report.faults)

    def said(self, kind: type, nonce: str = "") -> list[Any]:
        """Facts of a kind, of all ranks, in order; of one nonce if they name one."""
        self.step()
        return [
            fact
            for _, fact in self.facts
            if isinstance(fact, kind) and (not nonce or getattr(fact, "nonce", nonce) == nonce)
        ]

    def forget(self) -> None:
        """Forget what was said so far."""
        self.step()
        self.facts.clear()

    def faults_now(self) -> Counter[str]:
        self.step()
        return self.faults

    def until(self, condition: Callable[[], object], timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not in {timeout_s} s: {self.facts} {self.faults}"
            self.news.wait(0.01)
            self.news.clear()
            self.step()

    def until_said(self, kind: type, count: int = 0, timeout_s: float = 30.0) -> list[Any]:
        """Wait until each rank has said a fact of this kind (or so many were said)."""
        count = count or len(self.workers)
        self.until(lambda: len(self.said(kind)) >= count, timeout_s)
        return self.said(kind)

    def outcomes(self) -> list[Any]:
        """How reservations and loads ended."""
        return self.said(Received) + self.said(Failed)

    def close(self) -> None:
        for worker in self.workers:
            worker.close(5.0)


def _serve_push(pipe: Connection, environment: dict[str, str], arguments: dict[str, Any]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    engine = PushEngine(**arguments)
    pipe.send(engine.ref)
    _answer(pipe, engine, engine.step)


class RemotePushEngine(_Child):
    """A `PushEngine` in a child process; its methods through `call`."""

    def __init__(
        self, engine_id: str, *, environment: dict[str, str] | None = None, **arguments: Any
    ) -> None:
        super().__init__(_serve_push, environment or {}, {"engine_id": engine_id, **arguments})
        self.ref: EngineRef = self.greeting

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def until_said(self, kind: type, count: int = 1, timeout_s: float = 30.0) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        while len(facts := self.call("said", kind)) < count:
            assert time.monotonic() < deadline, self.call("faults_now")
            time.sleep(0.01)
        return list(facts)
