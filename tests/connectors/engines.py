"""Engines without a model, to drive both halves of a connector as an engine core would.

KV encodes who wrote it: block `b` of engine `seed` is filled from (seed, b, version), so a
stale, misplaced or half-copied block cannot pass for the right one.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, TransferConfig
from pdserve.connectors.base import ConnectorContext, KVLayout
from pdserve.connectors.registry import find
from pdserve.wire.ids import BlockId, Incarnation, RequestId
from pdserve.wire.step import KnownRequests, SchedulerOutput
from pdserve.wire.transfer import ConnectorReport, Endpoint, Failed, KVHandoff, Received, Settled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from pdserve.connectors.base import ConnectorFactory
    from pdserve.wire.outputs import TokenLogprobs

EMPTY_STEP = SchedulerOutput(
    step_id=0,
    new_requests=[],
    known_requests=KnownRequests(),
    num_scheduled_tokens={},
    gone_request_ids=[],
)


@dataclass
class FakeRequest:
    """What a connector sees of a request."""

    request_id: RequestId
    prompt_token_ids: list[int]
    output_token_ids: list[int] = field(default_factory=list)
    first_logprobs: list[TokenLogprobs] | None = None
    cache_salt: str = ""
    remote_decode: bool = False
    handoff: KVHandoff | None = None


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


def contents(shape: KVLayout, seed: int, block: int) -> torch.Tensor:
    """KV of one block, different for every (seed, block)."""
    size = (shape.num_layers, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    generator = torch.Generator().manual_seed(seed * 100_003 + block)
    return torch.randn(size, generator=generator).to(getattr(torch, shape.dtype))


def context(
    engine_id: str,
    *,
    incarnation: str | None = None,
    shape: KVLayout | None = None,
    kv_connector: str = "memory",
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
    )


class Engine:
    """Both halves of one connector over one pool of blocks."""

    def __init__(
        self,
        connector: str | ConnectorFactory,
        engine_id: str,
        *,
        incarnation: str | None = None,
        shape: KVLayout | None = None,
        **transfer: Any,
    ) -> None:
        shape = shape or layout()
        name = connector if isinstance(connector, str) else "memory"
        self.context = context(
            engine_id, incarnation=incarnation, shape=shape, kv_connector=name, **transfer
        )
        self.news = threading.Event()
        factory = find(connector) if isinstance(connector, str) else connector
        self.worker = factory.worker(self.context, self.news.set)
        self.kv = torch.zeros(
            shape.num_blocks,
            shape.num_layers,
            2,
            shape.num_kv_heads,
            shape.block_size,
            shape.head_dim,
            dtype=getattr(torch, shape.dtype),
        )
        self.worker.register_kv_caches(self.kv, shape)
        assert self.worker.endpoint is not None
        self.endpoint: Endpoint = self.worker.endpoint
        self.scheduler = factory.scheduler(self.context, self.endpoint)
        self.settled: list[Settled] = []
        self.received: list[Received] = []
        self.failed: list[Failed] = []
        self.faults: Counter[str] = Counter()
        self._count = 0

    def fill(self, block_ids: Sequence[int], seed: int) -> None:
        for block in block_ids:
            self.kv[block] = contents(self.context.layout, seed, block)

    def holds(self, local: Sequence[int], remote: Sequence[int], seed: int = 1) -> bool:
        """Whether `local` blocks are byte for byte what P wrote to `remote`."""
        return all(
            torch.equal(self.kv[mine], contents(self.context.layout, seed, theirs))
            for mine, theirs in zip(local, remote, strict=True)
        )

    def prefill(
        self, prompt: list[int], block_ids: Sequence[int], *, seed: int = 1, step: bool = True
    ) -> KVHandoff:
        """Finish a prompt and lease its blocks."""
        self._count += 1
        self.fill(block_ids, seed)
        request = FakeRequest(
            RequestId(f"{self.context.engine_id}-{self._count}"),
            prompt,
            output_token_ids=[7],
            remote_decode=True,
        )
        handoff = self.scheduler.request_finished(request, [BlockId(b) for b in block_ids])
        assert handoff is not None
        if step:
            self.step()
        return handoff

    def queue(
        self, prompt: list[int], handoff: KVHandoff, request_id: str, *, step: bool = True
    ) -> FakeRequest:
        request = FakeRequest(RequestId(request_id), prompt, handoff=handoff)
        refusal = self.scheduler.check_handoff(request)
        assert refusal is None, refusal
        self.scheduler.request_queued(request)
        if step:
            self.step()
        return request

    def load(
        self, request: FakeRequest, block_ids: Sequence[int], *, num_computed: int = 0
    ) -> None:
        match = self.scheduler.get_num_new_matched_tokens(request, num_computed)
        assert match is not None
        assert match.is_async
        self.scheduler.update_state_after_alloc(
            request, [BlockId(b) for b in block_ids], match.num_tokens
        )
        self.step()

    def step(self) -> ConnectorReport:
        """One engine step: instructions out, report in."""
        metadata = self.scheduler.build_connector_meta(EMPTY_STEP)
        if metadata is not None:
            self.worker.start_load_kv(metadata)
        report = self.worker.get_finished()
        self.scheduler.update_connector_output(report)
        self.settled += report.settled
        self.received += report.received
        self.failed += report.failed
        self.faults.update(report.faults)
        return report

    def until(self, condition: Callable[[], object], timeout_s: float = 10.0) -> None:
        """Step whenever there is news, until `condition` holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, (
                f"not in {timeout_s} s: {self.settled} {self.received} {self.failed}"
            )
            self.news.wait(0.02)
            self.news.clear()
            self.step()

    def close(self) -> None:
        self.worker.close(5.0)


def signed_with(handoff: KVHandoff, secret: str = "", **changes: Any) -> KVHandoff:
    """The handoff with other contents, signed."""
    return msgspec.structs.replace(handoff, **changes).signed(secret.encode())


def prompt_of(num_tokens: int) -> list[int]:
    return list(range(100, 100 + num_tokens))


# ---- an engine in another process ------------------------------------------------------------


def _serve(pipe: Connection, environment: dict[str, str], arguments: dict[str, Any]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    engine = Engine("nixl", **arguments)
    pipe.send((engine.endpoint, engine.context.incarnation))
    while True:
        if not pipe.poll(0.005):
            engine.step()
            continue
        try:
            call, args, kwargs = pipe.recv()
        except EOFError:
            break
        if call == "close":
            engine.close()
            pipe.send(None)
            break
        if call == "settled":
            engine.step()
            pipe.send(engine.settled)
        else:
            pipe.send(getattr(engine, call)(*args, **kwargs))


class RemoteEngine:
    """An `Engine` in a child process, which steps on its own every few milliseconds."""

    def __init__(self, environment: dict[str, str] | None = None, **arguments: Any) -> None:
        # A fork of a process that has imported everything starts in a tenth of a spawn's time.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "nixl"])
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, environment or {}, arguments), daemon=True
        )
        self.process.start()
        theirs.close()
        assert self._pipe.poll(60.0)
        self.endpoint, self.incarnation = self._pipe.recv()

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._pipe.send((name, args, kwargs))
        assert self._pipe.poll(20.0)
        return self._pipe.recv()

    def prefill(self, prompt: list[int], block_ids: Sequence[int], *, seed: int = 1) -> KVHandoff:
        handoff: KVHandoff = self.call("prefill", prompt, block_ids, seed=seed)
        return handoff

    @property
    def settled(self) -> list[Settled]:
        settled: list[Settled] = self.call("settled")
        return settled

    def close(self) -> None:
        if self.process.is_alive() and not self.process.exitcode:
            try:
                self.call("close")
            except (OSError, EOFError):
                pass
        self.process.join(10)
        self._pipe.close()
        self.process.close()
