"""Decode steps captured as graphs, one for each of a few numbers of rows, which are tokens.

A step of decode is some hundreds of short kernels, and launching them one by one takes the host
about as long as running them takes the device. So a step in which every request computes one token,
and those of a draft behind it, is replayed, with tokens behind its own that compute nothing, up to
the next captured number. Which tokens are of one request is among the inputs.
"""

from __future__ import annotations

import bisect
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.worker.device import Device, DeviceGraph

T = TypeVar("T")

_SMALL = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_STRIDE = 32


def graph_sizes(max_num_rows: int) -> list[int]:
    """Numbers of rows that graphs are captured for, rising, up to the maximum itself.

    Close together where a row more costs a step's time the most; the same share apart from there.
    """
    sizes = [*_SMALL, *range(_SMALL[-1] + _STRIDE, max_num_rows, _STRIDE)]
    return [size for size in sizes if size < max_num_rows] + [max_num_rows]


def num_graph_rows(max_num_seqs: int, max_drafted: int) -> int:
    """Rows of the largest graph: a token of each request, and of its draft while those are few."""
    return max(max_num_seqs, min(_SMALL[-1], max_num_seqs * (1 + max_drafted)))


class StepGraphs(Generic[T]):
    """The graphs of one rank.

    Args:
        run: Runs a step of so many rows over the inputs of the rank's buffers, and returns what
            is wanted of it.
    """

    def __init__(self, device: Device, max_num_rows: int, run: Callable[[int], T]) -> None:
        self._device = device
        self._sizes = graph_sizes(max_num_rows)
        self._run = run
        self._captured: dict[int, tuple[DeviceGraph, T]] = {}

    def capture(self) -> None:
        """Capture every size, the largest first: the others find room in its memory.

        Raises:
            RuntimeError: A step cannot be captured; nothing is.
        """
        for size in reversed(self._sizes):
            try:
                self._captured[size] = self._device.capture(partial(self._run, size))
            except RuntimeError:
                self.close()
                raise

    def size_for(self, num_rows: int) -> int | None:
        """Rows of the smallest graph that has so many; None if there is none."""
        at = bisect.bisect_left(self._sizes, num_rows)
        return self._sizes[at] if self._captured and at < len(self._sizes) else None

    def replay(self, num_rows: int) -> T:
        """Run a captured step of exactly so many rows.

        Returns:
            What its `run` returned, filled again; valid until the next replay of any size.
        """
        graph, results = self._captured[num_rows]
        graph.replay()
        return results

    def close(self) -> None:
        """Give all of them back."""
        captured, self._captured = self._captured, {}
        for graph, _ in captured.values():
            graph.close()
