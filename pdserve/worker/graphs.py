"""Steps that are run before there is a request, and steps captured as graphs.

Kernels are compiled at their first launch, and no request should wait for that; and the device
memory that steps need has to be known before KV gets the rest of it.

A step is some hundreds of kernels. Launching them one by one takes the host longer than running
them takes the device, unless the step has many hundreds of tokens. So steps with fewer are replayed
as graphs, padded with tokens that compute nothing up to the next captured size: decode steps, in
which every request computes one token, or one and a draft behind it, and steps with prompts. The
inputs say which tokens belong to one request.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from pdserve.worker.step_buffers import GraphSize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from pdserve.models.registry import CausalLM
    from pdserve.worker.device import Device, DeviceGraph
    from pdserve.worker.step_buffers import StepBuffers

T = TypeVar("T")

_SMALL = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_STRIDE = 32

_PROMPT_TOKENS: Final = (16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024)
"""Close to the tiles of products, in which padding takes no time. With more tokens, the device
takes longer than the host needs to launch the step."""
_PROMPT_REQUESTS: Final = (2, 16, 64)


def rehearsed_steps(
    max_num_rows: int, max_num_tokens: int, max_model_len: int
) -> list[tuple[int, int]]:
    """Return requests and tokens of steps that launch every kernel that steps need.

    Kernels are compiled for a few ranges of sizes, each spanning a factor of 2 or more. The first
    step is the largest possible: those after it reuse the memory that it took.
    """
    largest = (max_num_rows, min(max_num_tokens, max_num_rows * max_model_len))
    doubled = [1 << i for i in range(max(max_num_rows, max_num_tokens).bit_length())]
    alone = [(-(-num // max_model_len), num) for num in [*doubled, max_num_tokens]]
    several = [(num, min(2 * num, max_num_tokens)) for num in [*doubled, max_num_rows]]
    single = [(num, num) for num in [*doubled, max_num_rows]]
    every = [largest, *alone[::-1], *several[::-1], *single[::-1]]
    return [
        (num_rows, num_tokens)
        for num_rows, num_tokens in dict.fromkeys(every)
        if num_rows <= max_num_rows and num_rows <= num_tokens <= max_num_tokens
    ]


def rehearse(
    model: CausalLM,
    kv_layers: list[Tensor],
    buffers: StepBuffers,
    steps: Iterable[tuple[int, int]],
    hidden_size: int | None,
) -> None:
    """Run steps that store nothing. Collective over a TP group; stages run independently.

    Args:
        model: This rank's part.
        kv_layers: As for `CausalLM.forward`; at least one block.
        steps: As returned by `rehearsed_steps`.
        hidden_size: Size of the states that a stage receives, zeros here; None on the first one.
    """
    for num_requests, num_tokens in steps:
        inputs = buffers.rehearse(num_requests, num_tokens)
        received = None
        if hidden_size is not None:
            received = kv_layers[0].new_zeros(model.hidden_rows(num_tokens), hidden_size)
        model.forward(inputs, kv_layers, None, received)


def decode_sizes(max_num_rows: int) -> list[GraphSize]:
    """Return the sizes that decode steps are captured for, rising, up to the maximum itself.

    They are close together where an extra row costs the most time, then a constant ratio apart.
    """
    sizes = [*_SMALL, *range(_SMALL[-1] + _STRIDE, max_num_rows, _STRIDE)]
    rows = [size for size in sizes if size < max_num_rows] + [max_num_rows]
    return [GraphSize(num, num) for num in rows]


def prompt_sizes(max_num_seqs: int, max_num_tokens: int) -> list[GraphSize]:
    """Return the sizes that steps with prompts are captured for, rising.

    Each has room for a request that holds the padding.
    """
    most_tokens = min(max_num_tokens, _PROMPT_TOKENS[-1])
    tokens = [num for num in _PROMPT_TOKENS if num < most_tokens] + [most_tokens]
    requests = [num for num in _PROMPT_REQUESTS if num <= max_num_seqs] + [max_num_seqs + 1]
    pairs = itertools.product(tokens, requests)
    return sorted({GraphSize(tokens, min(tokens, requests)) for tokens, requests in pairs})


def num_graph_rows(max_num_seqs: int, max_drafted: int) -> int:
    """Return the rows of the largest graph: each request's token, and its draft's while few."""
    return max(max_num_seqs, min(_SMALL[-1], max_num_seqs * (1 + max_drafted)))


class StepGraphs(Generic[T]):
    """The graphs of one rank for one kind of step.

    Args:
        sizes: Sizes to capture, rising.
        stage: Brings a step of a size that computes nothing to the device.
        run: Runs a step of a size over the inputs of the rank's buffers, and returns its results.
    """

    def __init__(
        self,
        device: Device,
        sizes: Sequence[GraphSize],
        stage: Callable[[GraphSize], None],
        run: Callable[[GraphSize], T],
    ) -> None:
        self._device = device
        self._sizes = sizes
        self._stage = stage
        self._run = run
        self._captured: dict[GraphSize, tuple[DeviceGraph, T]] = {}

    def capture(self) -> None:
        """Capture every size, the largest first: the others reuse its memory.

        Raises:
            RuntimeError: A step cannot be captured; then no graph is kept.
        """
        for size in reversed(self._sizes):
            self._stage(size)
            try:
                self._captured[size] = self._device.capture(partial(self._run, size))
            except RuntimeError:
                self.close()
                raise

    def size_for(self, num_tokens: int, num_requests: int, num_logits: int = 0) -> GraphSize | None:
        """Return the smallest captured size that a step fits in; None if there is none.

        Args:
            num_logits: Tokens whose logits are wanted, if a graph picks them out.
        """
        for size in self._sizes if self._captured else ():
            num_needed = num_requests + (num_tokens < size.num_tokens)  # some hold the padding
            if num_tokens <= size.num_tokens and max(num_needed, num_logits) <= size.num_requests:
                return size
        return None

    def replay(self, size: GraphSize) -> T:
        """Run a captured step of exactly this size.

        Returns:
            The tensors that `run` returned, refilled; valid until the next replay of any graph.
        """
        graph, results = self._captured[size]
        graph.replay()
        return results

    def close(self) -> None:
        """Release all graphs."""
        captured, self._captured = self._captured, {}
        for graph, _ in captured.values():
            graph.close()
