"""Brings the masks of rows that only a grammar rules to the device, all of a step's in one copy.

The host evaluates grammars; with their bits it need not touch a row of logits itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pdserve.kernels.reference.masks import HEAD, num_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pdserve.kernels.ops import SamplingOps
    from pdserve.worker.device import Device
    from pdserve.worker.grammar import Constraint


class DeviceMasks:
    """The masks of one step's rows.

    Args:
        num_rows: Maximum number of rows that are masked at once.
    """

    def __init__(self, num_rows: int, vocab_size: int, *, device: Device, ops: SamplingOps) -> None:
        self._device = device
        self._ops = ops
        shape = num_rows, num_words(vocab_size)
        num_bytes = shape[0] * shape[1] * torch.int32.itemsize
        self._host = [device.staging(num_bytes).view(torch.int32).view(shape) for _ in range(2)]
        self._copied = [device.event() for _ in self._host]
        self._turn = 0
        self._there = torch.zeros(shape, dtype=torch.int32, device=device.torch)

    def apply(self, logits: Tensor, masked: Sequence[tuple[int, Constraint]]) -> None:
        """Mask rows of logits, `[L, vocab_size]`, in place; never waits for the device.

        Args:
            masked: Each row, and its grammar, whose allowed tokens are known.
        """
        self._turn = 1 - self._turn
        self._copied[self._turn].wait()  # it was copied two steps ago
        memory = self._host[self._turn]
        masks = memory.numpy()
        for at, (row, constraint) in enumerate(masked):
            masks[at, :HEAD] = row, constraint.is_over
            masks[at, HEAD:] = constraint.words
        there = self._there[: len(masked)]
        self._device.copy(there, memory[: len(masked)])
        self._copied[self._turn].record()
        self._ops.mask(logits, there)

    def warm_up(self, logits: Tensor) -> None:
        """Compile the kernel, for logits `[M, vocab_size]`."""
        self._ops.mask(logits, self._there[:1])
