"""Brings the masks of rows that only a grammar rules to the device, all of a step's in one copy.

The host evaluates grammars; with their bits it need not touch a row of logits itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pdserve.kernels.reference.masks import HEAD, num_words
from pdserve.worker.device import Upload

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
        self._ops = ops
        self._masks = Upload(device, (num_rows, num_words(vocab_size)), torch.int32)

    def apply(self, logits: Tensor, masked: Sequence[tuple[int, Constraint]]) -> None:
        """Mask rows of logits, `[L, vocab_size]`, in place; never waits for the device.

        Args:
            masked: Each row, and its grammar, whose allowed tokens are known.
        """
        masks = self._masks.begin().numpy()
        for at, (row, constraint) in enumerate(masked):
            masks[at, :HEAD] = row, constraint.is_over
            masks[at, HEAD:] = constraint.words
        self._ops.mask(logits, self._masks.send(len(masked)))

    def warm_up(self, logits: Tensor) -> None:
        """Compile the kernel, for logits `[M, vocab_size]`."""
        self._ops.mask(logits, self._masks.there[:1])
