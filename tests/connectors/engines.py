"""Engines without a model, to drive both halves of a connector as an engine core would.

KV encodes who wrote it: block `b` of rank `r` is filled from (seed, b, r), so a stale,
misplaced or half-copied block, or another rank's, cannot pass for the right one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, TransferConfig
from pdserve.connectors.base import ConnectorContext, KVLayout
from pdserve.connectors.conformance.engines import Engine as KitEngine
from pdserve.connectors.conformance.engines import KitRequest
from pdserve.connectors.conformance.engines import Rank as KitRank
from pdserve.connectors.conformance.values import Share
from pdserve.connectors.registry import find
from pdserve.wire.ids import Incarnation, RequestId
from pdserve.wire.request import OnLoadFailure
from pdserve.wire.transfer import (
    ConnectorMetadata,
    ConnectorReport,
    Endpoint,
    KVHandoff,
    Settled,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from torch import Tensor

    from pdserve.connectors.base import KVConnectorBase, KVConnectorWorker


@dataclass
class FakeRequest(KitRequest):
    """A request that is computed here if its KV does not come."""

    on_load_failure: OnLoadFailure = OnLoadFailure.RECOMPUTE


def layout(num_blocks: int = 32, block_size: int = 16, dtype: str = "float32") -> KVLayout:
    return KVLayout(
        num_blocks=num_blocks,
        num_layers=2,
        num_kv_heads=2,
        block_size=block_size,
        head_dim=8,
        dtype=dtype,
        dtype_bytes={"float32": 4, "bfloat16": 2}[dtype],
    )


def contents(shape: KVLayout, seed: int, block: int, rank: int = 0) -> torch.Tensor:
    """KV of one block, different for every (seed, block, rank)."""
    size = (
        shape.num_layers,
        shape.num_planes,
        shape.num_kv_heads,
        shape.block_size,
        shape.head_dim,
    )
    generator = torch.Generator().manual_seed((seed * 100_003 + block) * 101 + rank)
    return torch.randn(size, generator=generator).to(getattr(torch, shape.dtype))


def context(
    engine_id: str,
    *,
    incarnation: str | None = None,
    shape: KVLayout | None = None,
    kv_connector: str = "memory",
    rank: int = 0,
    num_ranks: int = 1,
    **transfer: Any,
) -> ConnectorContext:
    """What both halves of an engine's connector know of it."""
    shape = shape or layout()
    fields = shape.fields(model="m", weights="w")
    return ConnectorContext(
        config=EngineConfig(
            model=ModelConfig(model="m"),
            cache=CacheConfig(block_size=shape.block_size),
            transfer=TransferConfig(kv_connector=kv_connector, **transfer),
        ),
        engine_id=engine_id,
        incarnation=Incarnation(incarnation or os.urandom(8).hex()),
        layout=shape,
        layout_digest="|".join(f"{k}={v}" for k, v in sorted(fields.items())),
        layout_fields=fields,
        shape=msgspec.structs.replace(
            shape.shape_of_one_rank(),
            tp_size=num_ranks,
            num_kv_heads=num_ranks * shape.num_kv_heads,
        ),
        rank=rank,
    )


class Rank(KitRank):
    """The kit's, over blocks whose contents say which block they are of."""

    def __init__(
        self, connector: KVConnectorBase, context: ConnectorContext, wake: Callable[[], None]
    ) -> None:
        super().__init__(connector, context, wake)
        self.context = context

    def fill(self, block_ids: Sequence[int], seed: int) -> None:
        for block in block_ids:
            self.kv[block] = contents(self.context.layout, seed, block, self.context.rank)

    def holds(  # type: ignore[override]
        self, local: Sequence[int], remote: Sequence[int], seed: int
    ) -> bool:
        """Whether `local` blocks are byte for byte what this rank of P wrote to `remote`."""
        shape, rank = self.context.layout, self.context.rank
        return all(
            torch.equal(self.kv[mine], contents(shape, seed, theirs, rank))
            for mine, theirs in zip(local, remote, strict=True)
        )

    def post(self, metadata: ConnectorMetadata) -> None:
        self.worker.post(metadata)

    def get_finished(self) -> ConnectorReport:
        return self.worker.get_finished()

    def close(self, timeout_s: float = 5.0) -> None:
        self.worker.close(timeout_s)


class Engine(KitEngine):
    """The kit's engine, over blocks whose contents say which block they are of.

    Args:
        connector: A name of the registry, or a connector.
        shape: Of each rank.
        num_ranks: Ranks of the engine.
        make_rank: Makes them; None makes them here, with the connector.

    Attributes:
        worker, kv, endpoint: The first rank's.
        failed: All loads that have failed, those that were tried once more among them.
    """

    def __init__(
        self,
        connector: str | KVConnectorBase,
        engine_id: str,
        *,
        shape: KVLayout | None = None,
        num_ranks: int = 1,
        make_rank: Callable[[ConnectorContext], Any] | None = None,
        **fields: Any,
    ) -> None:
        self._make_rank = make_rank
        self._num_prefills = 0
        mine = shape or layout()
        super().__init__(
            find(connector) if isinstance(connector, str) else connector,
            engine_id,
            shape=msgspec.structs.replace(
                mine.shape_of_one_rank(),
                tp_size=num_ranks,
                num_kv_heads=num_ranks * mine.num_kv_heads,
            ),
            dtype=mine.dtype,
            **{"secret": "", "handshake_timeout_s": 30.0, **fields},
        )

    def make_rank(self, connector: KVConnectorBase, rank: int, dtype: str) -> Any:
        shape = Share(self.context.shape, rank).layout(dtype)
        context = msgspec.structs.replace(self.context, layout=shape, rank=rank)
        if self._make_rank is not None:
            return self._make_rank(context)
        return Rank(connector, context, self.news.set)

    @property
    def worker(self) -> KVConnectorWorker:
        return self.ranks[0].worker

    @property
    def kv(self) -> torch.Tensor:
        return self.ranks[0].kv

    @property
    def endpoint(self) -> Endpoint:
        return self.endpoints[0]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, on all ranks together."""
        return len(self.ranks) * self.context.layout.block_bytes

    def fill(self, blocks: Sequence[int], seed: int) -> None:
        for rank in self.ranks:
            rank.fill(blocks, seed)

    def holds(self, local: Sequence[int], remote: Sequence[int], seed: int = 1) -> bool:
        """Whether `local` blocks are, on every rank, byte for byte what P wrote to `remote`."""
        return all(rank.holds(local, remote, seed) for rank in self.ranks)

    def prefill(self, prompt: list[int], blocks: Sequence[int], **fields: Any) -> KVHandoff:
        """The kit's, into blocks that are handed out anew each time."""
        self._num_prefills += 1
        generations = [self._num_prefills] * len(blocks)
        return super().prefill(prompt, blocks, generations=generations, **fields)

    def queue(
        self, prompt: list[int], handoff: KVHandoff, request_id: str, *, step: bool = True
    ) -> FakeRequest:
        request = FakeRequest(RequestId(request_id), prompt, handoff=handoff)
        self.arrive(request)
        if step:
            self.step()
        return request

    def step(self) -> ConnectorReport:
        """One step of the kit's, and what follows from its news is begun."""
        num_retried = len(self.retried)
        report = super().step()
        self.failed += self.retried[num_retried:]
        metadata = self.scheduler.take_instructions()
        if metadata is not None:
            self.post(metadata)
        return report


# ---- engines and ranks in other processes -----------------------------------------------------


def _serve(pipe: Connection, environment: dict[str, str], arguments: dict[str, Any]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    engine = Engine("nixl", **arguments)
    pipe.send((engine.endpoint, engine.context.incarnation))
    _answer(pipe, engine, engine.step)


def _serve_rank(pipe: Connection, environment: dict[str, str], context: ConnectorContext) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    rank = Rank(find("nixl"), context, lambda: None)
    pipe.send(rank.endpoint)
    _answer(pipe, rank, lambda: None)


def _answer(pipe: Connection, target: Any, idle: Callable[[], object]) -> None:
    """Do to `target` what the other side calls, until it closes it or is gone."""
    while True:
        if not pipe.poll(0.005):
            idle()
            continue
        try:
            call, args, kwargs = pipe.recv()
        except EOFError:
            return
        if call == "settled":
            target.step()
            pipe.send(target.settled)
            continue
        pipe.send(getattr(target, call)(*args, **kwargs))
        if call == "close":
            return


def until_still(kv: Tensor) -> None:
    """Wait until nothing lands in that KV any more."""
    seen: list[Tensor] = []
    while len(seen) < 3 or not torch.equal(seen[-3], seen[-1]):
        seen.append(kv[..., -1].clone())
        time.sleep(0.02)


PRELOADED = [__name__, "nixl"]


class _Child:
    """A process that answers calls; the first thing it says is kept in `greeting`."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        # A fork of a process that has imported everything starts in a tenth of a spawn's time.
        forkserver = multiprocessing.get_context("forkserver")
        forkserver.set_forkserver_preload(PRELOADED)
        self._pipe, theirs = forkserver.Pipe()
        self.process = forkserver.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()
        assert self._pipe.poll(60.0)
        self.greeting = self._pipe.recv()

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._pipe.send((name, args, kwargs))
        assert self._pipe.poll(40.0)
        return self._pipe.recv()

    def close(self, timeout_s: float = 5.0) -> None:
        if self.process.is_alive() and not self.process.exitcode:
            with contextlib.suppress(ProcessLookupError):  # it may end at this very moment
                os.kill(self.process.pid or 0, signal.SIGCONT)  # a test may have failed in between
            try:
                self.call("close")
            except (OSError, EOFError):
                pass
        self.process.join(10)
        self._pipe.close()
        self.process.close()


class RemoteEngine(_Child):
    """An `Engine` in a child process, which steps on its own every few milliseconds."""

    def __init__(
        self, engine_id: str, *, environment: dict[str, str] | None = None, **arguments: Any
    ) -> None:
        super().__init__(_serve, environment or {}, {"engine_id": engine_id, **arguments})
        self.endpoint, self.incarnation = self.greeting

    def prefill(self, prompt: list[int], block_ids: Sequence[int], *, seed: int = 1) -> KVHandoff:
        handoff: KVHandoff = self.call("prefill", prompt, block_ids, seed=seed)
        return handoff

    @property
    def settled(self) -> list[Settled]:
        settled: list[Settled] = self.call("settled")
        return settled


class RemoteRank(_Child):
    """A `Rank` of the NIXL connector in a child process.

    One that was killed does nothing and says nothing any more.
    """

    def __init__(self, context: ConnectorContext, environment: dict[str, str]) -> None:
        super().__init__(_serve_rank, environment, context)
        self.endpoint: Endpoint = self.greeting
        self.worker = self

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def fill(self, block_ids: Sequence[int], seed: int) -> None:
        self.call("fill", block_ids, seed)

    def holds(self, local: Sequence[int], remote: Sequence[int], seed: int) -> bool:
        return bool(self.call("holds", local, remote, seed))

    def post(self, metadata: ConnectorMetadata) -> None:
        if self.process.is_alive():
            self.call("post", metadata)

    def get_finished(self) -> ConnectorReport:
        if not self.process.is_alive():
            return ConnectorReport()
        report: ConnectorReport = self.call("get_finished")
        return report
