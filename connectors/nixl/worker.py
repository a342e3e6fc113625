"""The worker half of the NIXL connector: a facade over its transfer thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pdserve.connectors.base import KVConnectorWorker
from pdserve.connectors.handover.instructions import StepInstructions
from pdserve.connectors.nixl.layerwise import LayerwiseChoice
from pdserve.connectors.nixl.pushes import ChunkStep
from pdserve.connectors.nixl.transfer import TransferThread
from pdserve.errors import InternalError
from pdserve.wire.transfer import ConnectorReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.connectors.base import ConnectorContext, KVLayout
    from pdserve.connectors.handover.instructions import Chunk
    from pdserve.connectors.nixl.settings import NixlSettings
    from pdserve.observe.clock import Clock
    from pdserve.wire.transfer import ConnectorMetadata, Endpoint, Failed


class NixlWorker(KVConnectorWorker):
    """See `KVConnectorWorker`.

    What a step computes of pushed requests is written behind it. The last chunk of a prompt has
    no next step to hide behind: it may be written layer by layer inside its own, which is
    learned (`LayerwiseChoice`). On CUDA it is always written whole: a layer's kernels have only
    been launched when `save_kv_layer` is called, and each would need an event.

    Args:
        quarantine_s: See `TransferThread`.
    """

    def __init__(
        self,
        context: ConnectorContext,
        wake: Callable[[], None],
        *,
        clock: Clock,
        quarantine_s: float,
        settings: NixlSettings,
    ) -> None:
        self._context = context
        self._wake = wake
        self._clock = clock
        self._quarantine_s = quarantine_s
        self._settings = settings
        self._thread: TransferThread | None = None
        self._is_cuda = False
        self._choice = LayerwiseChoice()
        self._chunks: list[Chunk] = []
        self._step_began_s = 0.0
        # Chunks of the step that runs which are written layer by layer; mostly none.
        self._layerwise: list[Chunk] = []

    def register_kv_caches(self, kv: torch.Tensor, layout: KVLayout) -> Endpoint:
        """See `KVConnectorWorker`. Starts the transfer thread and the side channel.

        Raises:
            ConfigError: NIXL cannot be loaded, or the side channel cannot be bound.
        """
        if self._thread is not None:
            raise InternalError("KV memory was registered twice")
        self._is_cuda = kv.is_cuda
        self._thread = TransferThread(
            self._context,
            kv=kv,
            layout=layout,
            wake=self._wake,
            clock=self._clock,
            quarantine_s=self._quarantine_s,
            settings=self._settings,
        )
        return self._thread.endpoint

    def post(self, metadata: ConnectorMetadata) -> None:
        """See `KVConnectorWorker`."""
        self._started().submit(metadata)

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        """See `KVConnectorWorker`: what the step computes of prompts that are handed over."""
        observations = self._started().observations
        while observations:
            seen = observations.popleft()
            self._choice.observe(
                seen.num_step_tokens,
                layerwise=seen.layerwise,
                step_s=seen.step_s,
                exposed_s=seen.exposed_s,
            )
        self._chunks = StepInstructions.from_metadata(metadata).chunks
        self._step_began_s = self._clock.monotonic_s()
        last = [chunk for chunk in self._chunks if chunk.end_token >= chunk.num_tokens]
        if last and not self._is_cuda and self._choice.choose(last[0].num_step_tokens):
            self._layerwise = last

    def save_kv_layer(self, layer: int) -> None:
        """See `KVConnectorWorker`."""
        if self._layerwise:
            for chunk in self._layerwise:
                self._say(chunk, layers_end=layer + 1, is_over=False)

    def wait_for_save(self) -> Sequence[Failed]:
        """See `KVConnectorWorker`. It waits for nothing, and loads nothing inside steps."""
        self._started().note_step(self._clock.monotonic_s())
        chunks, self._chunks = self._chunks, []
        for chunk in chunks:
            self._say(chunk, layers_end=0, is_over=True)
        self._layerwise = []
        return ()

    def get_finished(self) -> ConnectorReport:
        """See `KVConnectorWorker`."""
        return ConnectorReport() if self._thread is None else self._thread.take_report()

    def close(self, timeout_s: float) -> None:
        """See `KVConnectorWorker`."""
        if self._thread is not None:
            self._thread.close(timeout_s)

    def _say(self, chunk: Chunk, *, layers_end: int, is_over: bool) -> None:
        is_ready = None
        if self._is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            is_ready = event.query
        now_s = self._clock.monotonic_s()
        self._started().submit_step(
            ChunkStep(
                chunk=chunk,
                layers_end=layers_end,
                is_over=is_over,
                layerwise=any(chunk is each for each in self._layerwise),
                step_s=now_s - self._step_began_s,
                ended_s=now_s,
                is_ready=is_ready,
            )
        )

    def _started(self) -> TransferThread:
        if self._thread is None:
            raise InternalError("instructions came before KV memory was registered")
        return self._thread
