"""Linear layers, some merged from several matrices, and their parts over a TP group.

Each layer is one `PackedLinear` of this rank's sizes; slots describe how a part of a checkpoint
matrix reaches its place in it. A `RowParallel` returns this rank's term of a sum that its caller
computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from pdserve.errors import ConfigError
from pdserve.models.slots import Keep, Slot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from pdserve.kernels.fp8 import Fp8Weight
    from pdserve.kernels.reference.linear import PackedLinear
    from pdserve.models.layers.parameter import Placement


@dataclass(frozen=True, slots=True)
class Rows:
    """A rank's part of one matrix: `rows` of the `num_rows` in the checkpoint."""

    num_rows: int
    rows: range


class Linear:
    """`x @ weight.T + bias`, with rows stacked from one or more matrices; whole on every rank.

    Matrices that read the same input (q, k and v; gate and up) are merged, so that a step
    passes over the input once. Each goes from the checkpoint straight to its rows.

    Args:
        in_features: Columns in the checkpoint.
        parts: For each matrix, by its name in the checkpoint and in stacking order: its rows, and
            which of them are this rank's, unless all are.
        columns: This rank's columns; None: all.
        bias: Whether every part has one.
        adds_bias: Whether this rank adds it.
        out_dtype: Dtype of the results; None means the placement's.

    Attributes:
        out_features: Rows of this rank.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int | Rows],
        placement: Placement,
        *,
        columns: range | None = None,
        bias: bool = False,
        adds_bias: bool = True,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self._in_features = in_features
        self._parts = {
            name: Rows(part, range(part)) if isinstance(part, int) else part
            for name, part in parts.items()
        }
        self._placement = placement
        self._columns = range(in_features) if columns is None else columns
        self._has_bias, self._adds_bias = bias, bias and adds_bias
        self._out_dtype = out_dtype
        self.out_features = sum(len(part.rows) for part in self._parts.values())

    @cached_property
    def packed(self) -> PackedLinear:
        """`x [M, this rank's columns] -> [M, out_features]`; usable once every part is loaded."""
        return self._placement.kernels.linear(
            self.out_features,
            len(self._columns),
            dtype=self._placement.dtype,
            device=self._placement.device,
            has_bias=self._adds_bias,
            out_dtype=self._out_dtype,
        )

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yield how to load each part, by its full name (`prefix` + part + field)."""
        first = 0
        for name, part in self._parts.items():
            yield f"{prefix}{name}.weight", self._weight_slot(first, part)
            if self._has_bias:
                yield f"{prefix}{name}.bias", self._bias_slot(first, part)
            first += len(part.rows)

    def _weight_slot(self, first: int, part: Rows) -> Slot:
        def load(tensor: Tensor | Fp8Weight) -> None:
            self.packed.write(first, tensor)

        shape = (part.num_rows, self._in_features)
        region = _slice(part.rows), _slice(self._columns)
        placement = self._placement
        keep = None
        if placement.kernels.keeps_fp8:
            keep = Keep(self, len(self._parts), placement.dtype, load)
        return Slot(shape, load, region, keep)

    def _bias_slot(self, first: int, part: Rows) -> Slot:
        def load(tensor: Tensor) -> None:
            self.packed.write_bias(first, tensor)

        slot = Slot((part.num_rows,), load, (_slice(part.rows),))
        return slot if self._adds_bias else slot.elsewhere()


class ColumnParallel(Linear):
    """A linear layer whose parts are each split by rows over the TP group.

    The name is the usual one for `x @ A`, where outputs are columns of A.

    Args:
        parts: Rows of each matrix of the checkpoint; all must divide by the group's size.

    Raises:
        ConfigError: A part's rows do not divide.
    """

    def __init__(
        self, in_features: int, parts: dict[str, int], placement: Placement, *, bias: bool = False
    ) -> None:
        super().__init__(
            in_features,
            {name: Rows(rows, placement.part(name, rows)) for name, rows in parts.items()},
            placement,
            bias=bias,
        )


class QKV(Linear):
    """The merged projections of attention, split by heads over the TP group.

    A rank has the key and value heads that its query heads read; if there are more ranks than such
    heads, several ranks have the same one.

    Args:
        interleaved: Elements of each head of q and k that rotate in pairs of neighbours; they are
            reordered as they load, so that pairs are a half apart. Scores do not depend on the
            order.

    Raises:
        ConfigError: The heads cannot be divided like this.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        head_dim: int,
        placement: Placement,
        bias: bool = False,
        interleaved: int = 0,
    ) -> None:
        heads = placement.part("num_attention_heads", num_heads)
        kv_heads = kv_heads_of(num_kv_heads, placement)

        def rows(total: int, mine: range) -> Rows:
            return Rows(total * head_dim, range(mine.start * head_dim, mine.stop * head_dim))

        q, kv = rows(num_heads, heads), rows(num_kv_heads, kv_heads)
        parts: dict[str, int | Rows] = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        super().__init__(in_features, parts, placement, bias=bias)
        pairs = torch.arange(interleaved)
        rest = torch.arange(interleaved, head_dim)
        self._order = torch.cat((pairs[::2], pairs[1::2], rest)) if interleaved else None

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """See `Linear.slots`."""
        for name, slot in super().slots(prefix):
            is_rotated = name.removeprefix(prefix).startswith(("q_proj", "k_proj"))
            yield (
                name,
                slot if self._order is None or not is_rotated else in_order(slot, self._order),
            )


class RowParallel(Linear):
    """A linear layer split by columns over the TP group; the first rank adds its bias.

    Args:
        in_features: Columns in the checkpoint; they must divide by the group's size.
        part: Name of the matrix.
        out_features: Its rows.

    Raises:
        ConfigError: The columns do not divide.
    """

    def __init__(
        self,
        in_features: int,
        part: str,
        out_features: int,
        *,
        placement: Placement,
        bias: bool = False,
    ) -> None:
        super().__init__(
            in_features,
            {part: out_features},
            placement,
            columns=placement.part(f"{part} input", in_features),
            bias=bias,
            adds_bias=placement.world.tp.is_first,
        )


def in_order(slot: Slot, order: Tensor) -> Slot:
    """Return a slot whose rows are reordered as they load.

    Args:
        slot: Of heads of as many rows as `order` has.
        order: Which row of a head comes first, and so on.
    """
    load = slot.load
    if load is None:
        return slot

    def load_heads(tensor: Tensor) -> None:
        heads = tensor.reshape(-1, len(order), *tensor.shape[1:])
        load(heads[:, order].flatten(0, 1))

    return Slot(slot.shape, load_heads, slot.region)


def kv_heads_of(num_kv_heads: int, placement: Placement) -> range:
    """Key and value heads of this TP rank.

    Raises:
        ConfigError: Neither number, of heads and ranks, divides the other.
    """
    tp = placement.world.tp
    if num_kv_heads % tp.size and tp.size % num_kv_heads:
        raise ConfigError(
            f"--tensor-parallel-size is {tp.size}, but the model has {num_kv_heads} KV heads "
            "(num_key_value_heads): use a size that divides this number or is a multiple of it",
            param="tensor-parallel-size",
        )
    each = max(1, num_kv_heads // tp.size)
    first = tp.index * num_kv_heads // tp.size
    return range(first, first + each)


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)
