"""The residual stream over the ranks of a TP group: whole on each, or a share of rows on each.

Half layers read it through a norm and add a sum over the group to it. If it is whole, that sum is
one all_reduce. With sequence parallelism (Korthikanti et al. 2022, section 4.2.2) each rank norms
and keeps its own rows: the sum is a reduce_scatter, and an all_gather follows the norm. This moves
the same number of bytes and holds only a share of the activations, but needs twice as many
collectives, so a step of few tokens stays whole. Knows no layer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from pdserve.parallel.group import Group


# On a CPU a half layer is one call into C, unless norm and product are parted. Split, a
# decode step of the 135M shape on two ranks takes 1.35 times as long; one of 512 tokens does not.
SPLIT_FROM = 129


class ResidualStream:
    """The two ends of half layers. T is the number of tokens, D the hidden size.

    If it is split, rank i holds R = ceil(T / ranks) rows from `i * R` on; rows past the last token
    are zero and stay zero, because only norms see them. A token's result is the same to the last
    bit either way.

    Args:
        split_from: Minimum tokens of a step at which it is split; None: never.

    Attributes:
        is_alone: Whether this rank is the whole group; then every function returns its input.
    """

    def __init__(self, tp: Group, *, split_from: int | None) -> None:
        self._tp = tp
        self.is_alone = tp.size == 1
        self._split_from = math.inf if split_from is None or self.is_alone else split_from

    def is_split(self, num_tokens: int) -> bool:
        """Whether this rank holds only a share of the rows in a step of `num_tokens` tokens."""
        return num_tokens >= self._split_from

    def num_rows(self, num_tokens: int) -> int:
        """Rows that this rank holds of `num_tokens`."""
        return -(-num_tokens // self._tp.size) if self.is_split(num_tokens) else num_tokens

    def gather(self, rows: Tensor, num_tokens: int) -> Tensor:
        """Gather all rows from each rank's normed rows.

        Args:
            rows: `[num_rows(T), D]`.

        Returns:
            `[T, D]`, contiguous; the input itself if the stream is whole.
        """
        if self.is_alone or num_tokens == 0 or not self.is_split(num_tokens):
            return rows
        return self._tp.all_gather(rows)[:num_tokens]

    def sum(self, partial: Tensor) -> Tensor:
        """Sum the group's partial results for every row.

        Args:
            partial: `[T, D]`.

        Returns:
            `[num_rows(T), D]`, to be added to this rank's rows of the stream.
        """
        if self.is_alone or len(partial) == 0:
            return partial
        if not self.is_split(len(partial)):
            return self._tp.all_reduce(partial)
        return self._tp.reduce_scatter(self._padded(partial))

    def share(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of a tensor that every rank of the group has whole.

        Args:
            whole: `[T, D]`, equal on every rank.

        Returns:
            `[num_rows(T), D]`; the input itself if the stream is whole.
        """
        if self.is_alone or not self.is_split(len(whole)):
            return whole
        num_rows = self.num_rows(len(whole))
        start = self._tp.index * num_rows
        return self._padded(whole)[start : start + num_rows]

    def _padded(self, whole: Tensor) -> Tensor:
        missing = self.num_rows(len(whole)) * self._tp.size - len(whole)
        return functional.pad(whole, (0, 0, 0, missing)) if missing else whole
