"""Exchange between the ranks of a TP group that each have some columns of the logits.

The likeliest token of a row needs one value and one index of each rank. What needs a whole row
is done on the group's first rank, to which the others send their columns. Knows columns and
rows, no requests and no sampling parameters.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import torch

from pdserve.errors import InternalError
from pdserve.worker.sampler import first_largest

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from pdserve.parallel.group import Group


class SpreadVocabulary:
    """The vocabulary as a TP group holds it. Every rank makes the same calls in the same order.

    Args:
        vocab: Token ids whose logits this rank computes; the ranks' follow one another.
        device: Where logits are.

    Raises:
        InternalError: The ranks' parts are not the vocabulary, in order.
    """

    def __init__(self, tp: Group, vocab: range, *, vocab_size: int, device: torch.device) -> None:
        parts = tp.gather_ints([vocab.start, vocab.stop])
        if [0, *(stop for _, stop in parts)] != [*(start for start, _ in parts), vocab_size]:
            raise InternalError(f"parts {parts} are not a vocabulary of {vocab_size}, in order")
        self._tp = tp
        self._vocab = vocab
        self._device = device
        self._widths = [stop - start for start, stop in parts]

    @property
    def is_first(self) -> bool:
        """Whether this rank gets whole rows."""
        return self._tp.is_first

    def first_largest(self, logits: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The likeliest token of each row, on every rank.

        Args:
            logits: `[M, len(vocab)]` fp32.

        Returns:
            `[M]` token ids, the lowest of equal ones; `[M]`, their logits. A NaN counts as
            larger than any number, wherever it is.
        """
        found = self._tp.all_gather(self._mine(logits))
        peaks, token_ids = found.view(self._tp.size, 2, -1).cpu().numpy().swapaxes(0, 1)
        # Of equal ones the first rank's, whose ids are the lowest.
        winner = peaks.argmax(0), np.arange(peaks.shape[1])
        return token_ids[winner].astype(np.int64), peaks[winner]

    def _mine(self, logits: Tensor) -> Tensor:
        """The largest logit here and its token id, `[2, M]` fp64, which holds both exactly."""
        if not self._vocab:
            return logits.new_full((2, len(logits)), -torch.inf, dtype=torch.float64)
        index, peaks = first_largest(logits)
        return torch.stack([peaks.double(), (index + self._vocab.start).double()])

    def whole(self, logits: Tensor) -> Tensor | None:
        """Send columns to the first rank.

        Args:
            logits: `[M, len(vocab)]` fp32.

        Returns:
            `[M, vocab_size]` on the first rank, None on the others.
        """
        num_rows = len(logits)
        to_first = [0] * (self._tp.size - 1)
        if not self.is_first:
            self._tp.all_to_all(logits.reshape(-1), [0, *to_first], [logits.numel(), *to_first])
            return None
        sizes = [num_rows * width for width in self._widths]
        flat = self._tp.all_to_all(logits.reshape(-1), sizes, [logits.numel(), *to_first])
        ends = itertools.accumulate(sizes)
        parts = (flat[end - size : end] for size, end in zip(sizes, ends, strict=True) if size)
        return torch.cat([part.view(num_rows, -1) for part in parts], dim=-1)

    def announce(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first rank's `values`, on every rank; the others give as many."""
        told = self._tp.broadcast(torch.from_numpy(values).to(self._device))
        return told.cpu().numpy()
