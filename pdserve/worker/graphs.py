"""Steps that are run before there is a request, and decode steps captured as graphs.

Kernels are compiled at their first launch, and no request should wait for that; and the device
memory that steps need has to be known before KV gets the rest of it.

A step of decode is some hundreds of short kernels, and launching them one by one takes the host
about as long as running them takes the device. So a step in which every request computes one token,
and those of a draft behind it, is replayed, padded with tokens that compute nothing up to the next
captured number. The inputs say which tokens belong to one request.
"""

from __future__ import annotations

import bisect
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from pdserve.models.registry import CausalLM
    from pdserve.worker.device import Device, DeviceGraph
    from pdserve.worker.step_buffers import StepBuffers

T = TypeVar("T")

_SMALL = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_STRIDE = 32


def rehearsed_steps(
    max_num_rows: int, max_num_tokens: int, max_model_len: int
) -> list[tuple[int, int]]:
    """Return requests and tokens of steps that launch every kernel steps with prompts need.

    Kernels are compiled for a few ranges of sizes, each spanning a factor of 2 or more. The first
    step is the largest possible: those after it reuse the memory that it took.
    """
    largest = (max_num_rows, min(max_num_tokens, max_num_rows * max_model_len))
    doubled = [1 << i for i in range(max(max_num_rows, max_num_tokens).bit_length())]
    alone = [(-(-num // max_model_len), num) for num in [*doubled, max_num_tokens]]
    several = [(num, min(2 * num, max_num_tokens)) for num in [*doubled, max_num_rows]]
    return [
        (num_rows, num_tokens)
        for num_rows, num_tokens in dict.fromkeys([largest, *alone[::-1], *several[::-1]])
        if num_rows <= max_num_rows and num_rows < num_tokens <= max_num_tokens
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


def graph_sizes(max_num_rows: int) -> list[int]:
    """Return the numbers of rows that graphs are captured for, rising, up to the maximum itself.

    They are close together where an extra row costs the most time, then a constant ratio apart.
    """
    sizes = [*_SMALL, *range(_SMALL[-1] + _STRIDE, max_num_rows, _STRIDE)]
    return [size for size in sizes if size < max_num_rows] + [max_num_rows]


def num_graph_rows(max_num_seqs: int, max_drafted: int) -> int:
    """Return the rows of the largest graph: each request's token, and its draft's while few."""
    return max(max_num_seqs, min(_SMALL[-1], max_num_seqs * (1 + max_drafted)))


class StepGraphs(Generic[T]):
    """The graphs of one rank.

    Args:
        run: Runs a step of the given number of rows over the inputs of the rank's buffers, and
            returns its results.
    """

    def __init__(self, device: Device, max_num_rows: int, run: Callable[[int], T]) -> None:
        self._device = device
        self._sizes = graph_sizes(max_num_rows)
        self._run = run
        self._captured: dict[int, tuple[DeviceGraph, T]] = {}

    def capture(self) -> None:
        """Capture every size, the largest first: the others reuse its memory.

        Raises:
            RuntimeError: A step cannot be captured; then no graph is kept.
        """
        for size in reversed(self._sizes):
            try:
                self._captured[size] = self._device.capture(partial(self._run, size))
            except RuntimeError:
                self.close()
                raise

    def size_for(self, num_rows: int) -> int | None:
        """Return the rows of the smallest graph with at least `num_rows`; None if there is none."""
        at = bisect.bisect_left(self._sizes, num_rows)
        return self._sizes[at] if self._captured and at < len(self._sizes) else None

    def replay(self, num_rows: int) -> T:
        """Run a captured step of exactly `num_rows` rows.

        Returns:
            The tensors that `run` returned, refilled; valid until the next replay of any size.
        """
        graph, results = self._captured[num_rows]
        graph.replay()
        return results

    def close(self) -> None:
        """Release all graphs."""
        captured, self._captured = self._captured, {}
        for graph, _ in captured.values():
            graph.close()
