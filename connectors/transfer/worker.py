"""The worker half of a connector that uses the transfer protocol: a facade over its runner."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pdserve.connectors.base import KVConnectorWorker
from pdserve.connectors.handover.instructions import read_chunks
from pdserve.connectors.transfer.pushes import ChunkStep
from pdserve.errors import InternalError
from pdserve.wire.transfer import ConnectorReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pdserve.connectors.base import KVLayout
    from pdserve.connectors.handover.instructions import Chunk
    from pdserve.connectors.transfer.pushes import Observation
    from pdserve.observe.clock import Clock
    from pdserve.wire.transfer import ConnectorMetadata, Endpoint, Failed


# Until something is measured: about the length at which it pays on the machines tried.
_FIRST_GUESS_TOKENS = 256
# Samples of each way before they are compared; the worse one is still tried now and then.
_MIN_SAMPLES = 3
_EXPLORE_EVERY = 16
_REMEMBERED = 9


class Runner(Protocol):
    """Runs the protocol of one rank over its KV memory, beside the steps."""

    @property
    def endpoint(self) -> Endpoint:
        """Address that peers connect to."""
        ...

    @property
    def observations(self) -> deque[Observation]:
        """Costs of pushed chunks; the thread that runs the steps removes them."""
        ...

    def submit(self, metadata: ConnectorMetadata) -> None:
        """Take instructions. Never blocks."""

    def submit_step(self, step: ChunkStep) -> None:
        """Take note that KV of a chunk is complete. Never blocks."""

    def note_step(self, now_s: float) -> None:
        """Take note that a step has run."""

    def take_report(self) -> ConnectorReport:
        """Return the facts since the last call."""
        ...

    def close(self, timeout_s: float) -> None:
        """End it; may be repeated."""


@dataclass(slots=True)
class _Bucket:
    """Steps of about one length: seconds per token by whether it went layer by layer."""

    num_chosen: int = 0
    costs: dict[bool, deque[float]] = field(
        default_factory=lambda: {way: deque(maxlen=_REMEMBERED) for way in (True, False)}
    )


class LayerwiseChoice:
    """Whether a pushed chunk is written layer by layer inside its step, or whole after it.

    Layer by layer, almost nothing is left to write when the step ends, but each layer costs a post
    beside the computation, which short steps cannot hide. Where the one overtakes the other depends
    on the machine, the transport and the model; so it is learned, per doubling of the step's
    tokens, from what is measured: seconds of the step plus seconds until its last byte was written.

    Pure: it knows no clock, no tensor and no thread. It is deterministic: what it has seen, in
    order, decides what it answers.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}

    def choose(self, num_step_tokens: int) -> bool:
        """Return whether the next step of this length should be written layer by layer.

        Until both ways were measured it takes them in turn; then the cheaper one, and the
        other one in every sixteenth step, because machines change.

        Args:
            num_step_tokens: Tokens of all requests together; at least 1.
        """
        bucket = self._bucket(num_step_tokens)
        bucket.num_chosen += 1
        best = self.is_better(num_step_tokens)
        if any(len(costs) < _MIN_SAMPLES for costs in bucket.costs.values()):
            return best if bucket.num_chosen % 2 else not best
        return best if bucket.num_chosen % _EXPLORE_EVERY else not best

    def observe(self, seen: Observation) -> None:
        """Learn the cost of a step."""
        costs = self._bucket(seen.num_step_tokens).costs[seen.layerwise]
        costs.append((seen.step_s + seen.exposed_s) / max(1, seen.num_step_tokens))

    def is_better(self, num_step_tokens: int) -> bool:
        """Whether layer by layer is the cheaper way at this length, as far as is known."""
        costs = self._bucket(num_step_tokens).costs
        if min(len(seen) for seen in costs.values()) == 0:
            return num_step_tokens >= _FIRST_GUESS_TOKENS
        # The median: one step in which the machine was busy elsewhere must not decide.
        return statistics.median(costs[True]) < statistics.median(costs[False])

    def _bucket(self, num_step_tokens: int) -> _Bucket:
        return self._buckets.setdefault(max(1, num_step_tokens).bit_length(), _Bucket())


class TransferWorker(KVConnectorWorker):
    """See `KVConnectorWorker`.

    What a step computes of pushed requests is written behind it. The last chunk of a prompt has
    no next step to hide behind: it may be written layer by layer inside its own, which is
    learned (`LayerwiseChoice`). On CUDA it is always written whole: a layer's kernels have only
    been launched when `save_kv_layer` is called. What a step has computed is complete when
    `wait_for_save` is: whoever runs steps has waited for the device.

    Args:
        start: Makes the runner of the protocol, given KV memory.
    """

    def __init__(self, start: Callable[[torch.Tensor], Runner], *, clock: Clock) -> None:
        self._start = start
        self._clock = clock
        self._runner: Runner | None = None
        self._is_cuda = False
        self._choice = LayerwiseChoice()
        self._chunks: list[Chunk] = []
        self._step_began_s = 0.0
        # Chunks of the running step that are written layer by layer; mostly none.
        self._layerwise: list[Chunk] = []

    def register_kv_caches(self, kv: torch.Tensor, layout: KVLayout) -> Endpoint:
        """See `KVConnectorWorker`.

        Raises:
            ConfigError: The transport cannot be loaded, or its side channel cannot be bound.
        """
        if self._runner is not None:
            raise InternalError("KV memory was registered twice")
        self._is_cuda = kv.is_cuda
        self._runner = self._start(kv)
        return self._runner.endpoint

    def post(self, metadata: ConnectorMetadata) -> None:
        """See `KVConnectorWorker`."""
        self._started().submit(metadata)

    def start_load_kv(self, metadata: ConnectorMetadata) -> bool:
        """See `KVConnectorWorker`: what the step computes of prompts that are handed over.

        Only a prompt's last chunk may be written layer by layer.
        """
        observations = self._started().observations
        while observations:
            self._choice.observe(observations.popleft())
        self._chunks = read_chunks(metadata.payload)
        self._step_began_s = self._clock.monotonic_s()
        proven = [chunk for chunk in self._chunks if not chunk.is_unproven]
        last = [chunk for chunk in proven if chunk.end_token >= chunk.num_tokens]
        if last and not self._is_cuda and self._choice.choose(last[0].num_step_tokens):
            self._layerwise = last
        return bool(self._layerwise)

    def save_kv_layer(self, layer: int) -> None:
        """See `KVConnectorWorker`."""
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
        return ConnectorReport() if self._runner is None else self._runner.take_report()

    def close(self, timeout_s: float) -> None:
        """See `KVConnectorWorker`."""
        if self._runner is not None:
            self._runner.close(timeout_s)

    def _say(self, chunk: Chunk, *, layers_end: int, is_over: bool) -> None:
        now_s = self._clock.monotonic_s()
        self._started().submit_step(
            ChunkStep(
                chunk=chunk,
                layers_end=layers_end,
                is_over=is_over,
                layerwise=any(chunk is each for each in self._layerwise),
                step_s=now_s - self._step_began_s,
                ended_s=now_s,
            )
        )

    def _started(self) -> Runner:
        if self._runner is None:
            raise InternalError("instructions came before KV memory was registered")
        return self._runner
