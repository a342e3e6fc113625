"""Two engines without a model, for the benchmarks of the hand-over: P in a child process, D here.

Both run the real connector halves, over pools of the shape of an 8B Llama's KV (32 layers, 8 KV
heads of 128, bf16: 128 KiB per token). P does what it is asked over a pipe, and steps meanwhile.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, Role, TransferConfig
from pdserve.connectors.base import ConnectorContext, KVLayout
from pdserve.connectors.conformance.engines import KitRequest
from pdserve.connectors.nixl.agent import NixlAgent
from pdserve.connectors.registry import find
from pdserve.connectors.transfer.protocol import Region
from pdserve.connectors.views import ScheduledRequest, StepView
from pdserve.wire.ids import BlockId, EngineId, Incarnation, RequestId
from pdserve.wire.request import FinishReason
from pdserve.wire.transfer import ConnectorReport, EngineRef, KVHandoff, PushTicket

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection


NUM_LAYERS = 32
_NUM_KV_HEADS = 8
_HEAD_DIM = 128
# Leases of requests that wait for their turn outlive the whole run.
_LEASE_S = 900.0
# Far less than any model takes for a token here, and twice what its digest takes.
_DIGEST_S_PER_TOKEN = 25e-6


class Engine:
    """Both connector halves and a pool; no model.

    Attributes:
        kv: Its pool.
        news: Set when the worker half has something to report.
    """

    def __init__(
        self,
        role: Role,
        block_size: int,
        num_tokens: int,
        kv_connector: str = "nixl",
        device: str = "cpu",
    ) -> None:
        engine_id = EngineId(role.value)
        self.layout = KVLayout(
            num_blocks=num_tokens // block_size,
            num_layers=NUM_LAYERS,
            num_kv_heads=_NUM_KV_HEADS,
            block_size=block_size,
            head_dim=_HEAD_DIM,
            dtype="bfloat16",
            dtype_bytes=2,
        )
        context = ConnectorContext(
            config=EngineConfig(
                model=ModelConfig(model="8B-like"),
                role=role,
                cache=CacheConfig(block_size=block_size),
                transfer=TransferConfig(kv_connector=kv_connector, lease_s=_LEASE_S),
            ),
            engine_id=engine_id,
            incarnation=Incarnation(os.urandom(8).hex()),
            layout=self.layout,
            layout_digest="8B-like",
            layout_fields={},
            shape=self.layout.shape_of_one_rank(),
        )
        self.news = threading.Event()
        # Not zero: the kernel may back zeros by one page.
        self.kv = torch.full(
            (self.layout.num_blocks, NUM_LAYERS, 2, _NUM_KV_HEADS, block_size, _HEAD_DIM),
            1.0 if role is Role.PREFILL else 2.0,
            dtype=torch.bfloat16,
            device=device,
        )
        connector = find(kv_connector)
        self.worker = connector.make_worker(context, self.news.set)
        endpoint = self.worker.register_kv_caches(self.kv, self.layout)
        assert endpoint is not None
        self.scheduler = connector.make_scheduler(context, [endpoint])
        self.ref = EngineRef(
            engine_id=engine_id,
            incarnation=context.incarnation,
            endpoints=(endpoint,),
            shape=context.shape,
        )
        self._num_generations = 1
        self._num_leased = 0

    def step(self) -> ConnectorReport:
        """Carry both ways what does not wait for a model's step.

        Raises:
            SystemExit: Something has failed, or was done twice: there is nothing to measure.
        """
        metadata = self.scheduler.take_instructions()
        if metadata is not None:
            self.worker.post(metadata)
        report = self.worker.get_finished()
        self.scheduler.update_connector_output(report)
        self._num_leased -= len(report.settled)
        if report.failed or report.faults:
            raise SystemExit(f"not as it should be: {report}")
        return report

    def prefill(self, block_ids: Sequence[int], *, is_known: bool, chunk: int = 0) -> KVHandoff:
        """Lease blocks out.

        Args:
            is_known: They are as they were: their digests need not be taken again.
            chunk: If not 0, they are of a prompt that is computed in chunks of so many tokens:
                digests are taken of each while the next one is computed, as they always are.
        """
        if not is_known:
            self._reuse_blocks()
        num_tokens = len(block_ids) * self.layout.block_size
        request = KitRequest(_new_id(), list(range(num_tokens)), [1], remote_decode=True)
        self.scheduler.request_arrived(request)
        table, generations = _blocks(block_ids), [self._num_generations] * len(block_ids)
        for first in range(0, num_tokens - chunk, chunk) if chunk else ():
            scheduled = ScheduledRequest(request, table, generations, first, first + chunk)
            metadata = self.scheduler.build_connector_meta(_step(scheduled))
            assert metadata is not None
            self.worker.start_load_kv(metadata)
            self.worker.wait_for_save()
            time.sleep(_DIGEST_S_PER_TOKEN * chunk)
        handoff = self._hand_over(request, table, generations)
        self.step()
        return handoff

    def _hand_over(
        self, request: KitRequest, table: list[BlockId], generations: list[int]
    ) -> KVHandoff:
        request.finish_reason = FinishReason.HANDOFF
        hold = self.scheduler.request_finished(request, table, generations)
        assert hold is not None
        assert hold.handoff is not None
        self._num_leased += 1
        return hold.handoff

    def push(self, ticket: PushTicket, num_tokens: int, chunk: int, layer_s: float) -> float:
        """Compute a prompt in chunks, writing it to D; return when the last layer was through.

        Args:
            layer_s: What a layer of a chunk takes, of one core.
        """
        request = KitRequest(
            _new_id(), list(range(num_tokens)), [], remote_decode=True, ticket=ticket
        )
        self.scheduler.request_arrived(request)
        while self.scheduler.get_num_new_matched_tokens(request, 0) is None:
            self.step()
            time.sleep(0.0002)
        self._reuse_blocks()
        table = _blocks(range(num_tokens // self.layout.block_size))
        generations = [self._num_generations] * len(table)
        self.scheduler.update_state_after_alloc(request, table, 0, generations=generations)
        ended_s = 0.0
        for first in range(0, num_tokens, chunk):
            end = min(first + chunk, num_tokens)
            scheduled = ScheduledRequest(request, table, generations, first, end)
            metadata = self.scheduler.build_connector_meta(_step(scheduled))
            assert metadata is not None
            is_layerwise = self.worker.start_load_kv(metadata)
            for layer in range(NUM_LAYERS):
                _compute(layer_s)
                ended_s = time.monotonic()
                if is_layerwise:
                    self.worker.save_kv_layer(layer)
            self.worker.wait_for_save()
            self.step()
        request.output_token_ids.append(1)
        self._hand_over(request, table, generations)
        self.step()
        return ended_s

    def _reuse_blocks(self) -> None:
        """Hand all blocks out anew, once nobody has a lease on them."""
        while self._num_leased:
            self.step()
            time.sleep(0.0005)
        self._num_generations += 1
        # Other KV, a little in each head of each block: what was there before must not pass.
        self.kv[..., 0, 0] = self._num_generations % 128

    def region(self) -> Region:
        """Its pool, for a bare NIXL agent."""
        return Region(
            self.kv.data_ptr(),
            self.layout.block_bytes,
            self.layout.num_blocks,
            "VRAM" if self.kv.is_cuda else "DRAM",
            self.kv.device.index or 0,
        )


@dataclass
class Pair:
    """D, and P at the other end of a pipe.

    Attributes:
        bare_metadata, bare_region: Of a bare NIXL agent over P's pool, if NIXL moves the KV.
    """

    d: Engine
    p_ref: EngineRef
    bare_metadata: bytes
    bare_region: Region
    _pipe: Connection

    def prefill(
        self, tables: Sequence[Sequence[int]], *, is_known: bool = False, chunk: int = 0
    ) -> list[KVHandoff]:
        """Have P lease these blocks out; see `Engine.prefill`."""
        self._pipe.send(("prefill", [list(table) for table in tables], is_known, chunk))
        handoffs: list[KVHandoff] = self._pipe.recv()
        return handoffs

    def begin_push(
        self, ticket: PushTicket, num_tokens: int, *, chunk: int, layer_s: float
    ) -> None:
        """Have P compute a prompt and write it here; see `end_push`."""
        self._pipe.send(("push", ticket, num_tokens, chunk, layer_s))

    def end_push(self) -> float:
        """When P's last layer was through (monotonic seconds, of this machine)."""
        ended_s: float = self._pipe.recv()
        return ended_s

    def drive_bare(self, is_driven: bool) -> None:
        """Have P drive its bare agent, or leave off."""
        self._pipe.send(("drive", is_driven))


@contextmanager
def pair(
    block_size: int, num_tokens: int, kv_connector: str = "nixl", device: str = "cpu"
) -> Iterator[Pair]:
    """Two engines whose pools have so many tokens each, until the end of the block.

    Args:
        device: Where the pools lie; both on the same one.
    """
    _freeze_modules()
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    child = context.Process(
        target=_prefill_process,
        args=(theirs, block_size, num_tokens, kv_connector, device),
        daemon=True,
    )
    child.start()
    d = Engine(Role.DECODE, block_size, num_tokens, kv_connector, device)
    p_ref, metadata, region = pipe.recv()
    try:
        yield Pair(d, p_ref, metadata, region, pipe)
    finally:
        pipe.send(("close",))
        d.worker.close(5.0)
        child.join(20)


def queued(engine: Engine, request: KitRequest) -> KitRequest:
    """Have the engine take the request, so that it meets its peer."""
    engine.scheduler.request_arrived(request)
    engine.step()
    return request


def decode_request(handoff: KVHandoff) -> KitRequest:
    """What comes to D behind a handoff."""
    return KitRequest(_new_id(), list(range(handoff.num_tokens)), [], handoff=handoff)


def pushed_request(ticket: PushTicket, num_tokens: int) -> KitRequest:
    """What comes to D beside a push."""
    return KitRequest(_new_id(), list(range(num_tokens)), [], ticket=ticket)


def draw_ticket(pair: Pair) -> PushTicket:
    """A push from P to D."""
    return PushTicket(nonce=os.urandom(8).hex(), prefill=pair.p_ref, decode=pair.d.ref)


def _prefill_process(
    pipe: Connection, block_size: int, num_tokens: int, kv_connector: str, device: str
) -> None:
    torch.set_num_threads(1)
    _freeze_modules()
    engine = Engine(Role.PREFILL, block_size, num_tokens, kv_connector, device)
    bare = None
    if kv_connector == "nixl":
        bare = NixlAgent("bare-P-" + os.urandom(8).hex(), ["UCX"])
        bare.register(engine.region())
    pipe.send((engine.ref, b"" if bare is None else bare.metadata(), engine.region()))
    is_driven = False
    while True:
        if is_driven and bare is not None:
            bare.progress()
        if not pipe.poll(0.0005 if is_driven else 0.02):
            engine.step()
            continue
        match pipe.recv():
            case ("prefill", tables, is_known, chunk):
                pipe.send(
                    [engine.prefill(table, is_known=is_known, chunk=chunk) for table in tables]
                )
            case ("push", ticket, length, chunk, layer_s):
                pipe.send(engine.push(ticket, length, chunk, layer_s))
            case ("drive", value):
                is_driven = value
            case ("close",):
                break
    engine.worker.close(5.0)
    if bare is not None:
        bare.close()


def _freeze_modules() -> None:
    """Take what is imported out of the garbage collector's sight, as engines do.

    A full collection looks at all of torch otherwise: for a tenth of a second, once in some
    hundred hand-overs, nothing else in the process moves.
    """
    gc.collect()
    gc.freeze()


def _compute(seconds: float) -> None:
    """Keep one core busy as a layer does: in products, without the interpreter lock."""
    a, b = _OPERANDS
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        torch.mm(a, b)


def _step(scheduled: ScheduledRequest) -> StepView:
    """A step of one request."""
    num_tokens = scheduled.end_token - scheduled.start_token
    return StepView({scheduled.view.request_id: num_tokens}, lambda _: scheduled)


def _blocks(block_ids: Sequence[int]) -> list[BlockId]:
    return [BlockId(block_id) for block_id in block_ids]


def _new_id() -> RequestId:
    return RequestId(os.urandom(8).hex())


_OPERANDS = torch.ones(64, 512), torch.ones(512, 512)
