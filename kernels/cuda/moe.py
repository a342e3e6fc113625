"""The experts of a mixture-of-experts layer: sorts choices by expert, then two products and a sum.

Sizes that depend on routing stay on the device: each grid is large enough for any routing, and
programs without work end at once. There are five launches, all of which a graph can capture.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.cuda.activation import gated
from pdserve.kernels.cuda.checks import check_float
from pdserve.kernels.cuda.launch import Tuning, launch, wait_for_previous
from pdserve.kernels.cuda.product import place_of, product, product_pair
from pdserve.kernels.cuda.sizes import divided_up, next_power_of_2
from pdserve.kernels.cuda.tiles import experts_tiles
from pdserve.kernels.reference.moe import PLAIN, ExpertForm, PackedExperts

_MOST_PARTS_BYTES = 512 << 20
"""Limit for the experts' unsummed results; more tokens are computed in several rounds."""

_IDS = 1024
_COLUMNS = 1024
_SORTING = Tuning(warps=4, overlaps=True)
_SUMMING = Tuning(warps=4, overlaps=True)


@triton.jit(do_not_specialize=["num_ids"])
def count_kernel(
    ids: tl.tensor,
    counts: tl.tensor,
    num_ids: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Count the choices of one expert; grid (experts,)."""
    wait_for_previous(OVERLAPS)
    expert = tl.program_id(0)
    found = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_ids, BLOCK):
        at = first + tl.arange(0, BLOCK)
        found += (tl.load(ids + at, mask=at < num_ids, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["num_ids", "num_tiles"])
def sort_kernel(
    ids: tl.tensor,
    counts: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    num_ids: tl.tensor,
    num_tiles: tl.tensor,
    num_experts: tl.tensor,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Place one expert's choices after those of lower experts, in order; grid (experts,).

    Args:
        ids: ``[num_ids]`` int64: the expert of each choice.
        counts: ``[num_experts]`` int32.
        order: ``[num_ids]`` int32: the choice at each place; unset after the last.
        tiles: ``[num_tiles, 3]`` int32: expert, first place and end of each run of ROWS places; the
            expert is -1 after the last.
        EXPERTS: At least ``num_experts``, a power of two.
    """
    wait_for_previous(OVERLAPS)
    expert = tl.program_id(0)
    every = tl.arange(0, EXPERTS)
    lower = tl.load(counts + every, mask=every < expert, other=0)
    first = tl.sum(lower, 0)
    tile = tl.sum((lower + ROWS - 1) // ROWS, 0)
    end = first + tl.load(counts + expert)
    for at in range(first, end, ROWS):
        tl.store(tiles + tile * 3, expert)
        tl.store(tiles + tile * 3 + 1, at)
        tl.store(tiles + tile * 3 + 2, end)
        tile += 1
    if expert == num_experts - 1:
        for unused in range(tile, num_tiles):
            tl.store(tiles + unused * 3, -1)
    if end > first:
        place = first
        for start in range(0, num_ids, BLOCK):
            choice = start + tl.arange(0, BLOCK)
            own = tl.load(ids + choice, mask=choice < num_ids, other=-1) == expert
            rank = tl.cumsum(own.to(tl.int32), 0)
            tl.store(order + place + rank - 1, choice, mask=own)
            place += tl.sum(own.to(tl.int32), 0)


@triton.jit
def clamped(gate: tl.tensor, up: tl.tensor, ALPHA: tl.constexpr, LIMIT: tl.constexpr) -> tl.tensor:
    """Return `clamped_glu` of the reference, rounded to the dtype of ``gate``; NaN stays NaN."""
    wide, other = gate.to(tl.float32), up.to(tl.float32)
    wide = tl.where(wide > LIMIT, LIMIT, wide)
    other = tl.where(other > LIMIT, LIMIT, tl.where(other < -LIMIT, -LIMIT, other))
    return ((other + 1.0) * (wide / (1.0 + tl.exp(-(wide * ALPHA))))).to(gate.dtype)


@triton.jit(do_not_specialize=["num_tiles"])
def gate_up_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    num_tiles: tl.tensor,
    top_k: tl.tensor,
    inner: tl.tensor,
    depth: tl.tensor,
    to_up: tl.tensor,
    to_expert: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAPPED: tl.constexpr,
    GROUP: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Gate the sorted choices' tokens by one expert; grid (tiles * column tiles,).

    Args:
        x: ``[T, depth]``.
        weight: ``[E, 2 * inner, depth]``, strided by ``to_expert`` over experts: gate and,
            ``to_up`` elements after it, up.
        bias: ``[E, 2 * inner]``, strided likewise; or None.
        out: ``[T * top_k, inner]``, by place.
        order: As of `sort_kernel`, and ``tiles``.
        LIMIT: Of `clamped`, and ALPHA; None is `gated`.
    """
    wait_for_previous(OVERLAPS)
    tile, column = place_of(tl.program_id(0), num_tiles, tl.cdiv(inner, BLOCK_N), GROUP)
    expert = tl.load(tiles + tile * 3)
    if expert >= 0:
        end = tl.load(tiles + tile * 3 + 2)
        place = tl.load(tiles + tile * 3 + 1) + tl.arange(0, BLOCK_M)
        live = place < end
        token = tl.load(order + place, mask=live, other=0) // top_k
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = n.to(tl.int64) * depth
        gate, up = product_pair(
            x + token.to(tl.int64) * depth,
            live,
            weight + expert.to(tl.int64) * to_expert + rows,
            n < inner,
            to_up,
            depth,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            EVEN_N,
            EVEN_K,
            SWAPPED,
        )
        dtype = out.dtype.element_ty
        at = out + (place.to(tl.int64) * inner)[:, None] + n[None, :]
        if bias is not None:
            of = bias + expert.to(tl.int64) * to_expert + n
            gate += tl.load(of, mask=n < inner, other=0.0).to(tl.float32)[None, :]
            up += tl.load(of + inner, mask=n < inner, other=0.0).to(tl.float32)[None, :]
        if LIMIT is None:
            result = gated(gate.to(dtype), up.to(dtype))
        else:
            result = clamped(gate.to(dtype), up.to(dtype), ALPHA, LIMIT)
        tl.store(at, result, mask=live[:, None] & (n < inner)[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def down_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    num_tiles: tl.tensor,
    num_cols: tl.tensor,
    depth: tl.tensor,
    to_expert: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAPPED: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Multiply the gated rows by one expert's last weight; grid (tiles * column tiles,).

    Args:
        x: ``[num_ids, depth]``, by place.
        weight: ``[E, num_cols, depth]``, strided by ``to_expert`` over experts.
        bias: ``[E, num_cols]``, strided likewise; or None.
        out: ``[num_ids, num_cols]`` fp32, by choice.
        order: As of `sort_kernel`, and ``tiles``.
    """
    wait_for_previous(OVERLAPS)
    tile, column = place_of(tl.program_id(0), num_tiles, tl.cdiv(num_cols, BLOCK_N), GROUP)
    expert = tl.load(tiles + tile * 3)
    if expert >= 0:
        end = tl.load(tiles + tile * 3 + 2)
        place = tl.load(tiles + tile * 3 + 1) + tl.arange(0, BLOCK_M)
        live = place < end
        choice = tl.load(order + place, mask=live, other=0)
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        total = product(
            x + place.to(tl.int64) * depth,
            live,
            weight + expert.to(tl.int64) * to_expert + n.to(tl.int64) * depth,
            n < num_cols,
            depth,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            EVEN_N,
            EVEN_K,
            SWAPPED,
        )
        if bias is not None:
            of = bias + expert.to(tl.int64) * to_expert + n
            total += tl.load(of, mask=n < num_cols, other=0.0).to(tl.float32)[None, :]
        at = out + (choice.to(tl.int64) * num_cols)[:, None] + n[None, :]
        tl.store(at, total, mask=live[:, None] & (n < num_cols)[None, :])


@triton.jit
def sum_kernel(
    parts: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    num_experts: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Sum a token's parts in the order of its choices, in fp32; grid (tokens, pieces).

    Args:
        parts: ``[T * TOP_K, width]`` fp32; unset if the expert is not here.
        ids: ``[T, TOP_K]`` int64.
        weights: ``[T, TOP_K]`` fp32.
        out: ``[T, width]``.
    """
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        choice = token * TOP_K + j
        expert = tl.load(ids + choice)
        here = (expert >= 0) & (expert < num_experts)
        part = tl.load(parts + choice * width + column, mask=inside & here, other=0.0)
        total = tl.where(here, total + tl.load(weights + choice) * part, total)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


class CudaExperts(PackedExperts):
    """Experts in grouped products; weights lie as in `PackedExperts`.

    Ids of other experts, negative or too large, add nothing.

    Raises:
        NotTakenError: The dtype is none of bf16, fp16 and fp32.
    """

    def __init__(
        self,
        num_experts: int,
        width: int,
        inner: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        form: ExpertForm = PLAIN,
    ) -> None:
        check_float(dtype)
        super().__init__(num_experts, width, inner, dtype=dtype, device=device, form=form)

    def __call__(self, x: Tensor, local_ids: Tensor, weights: Tensor) -> Tensor:
        """See `PackedExperts.__call__`.

        Raises:
            TypeError: A dtype is wrong, or a tensor is strided.
        """
        if x.dtype != self._dtype or x.shape[1] != self._width:
            raise TypeError(f"want [T, {self._width}] {self._dtype}, got {x.shape} {x.dtype}")
        if local_ids.dtype != torch.int64 or weights.dtype != torch.float32:
            raise TypeError(f"want int64 and fp32, got {local_ids.dtype} and {weights.dtype}")
        if not (x.is_contiguous() and local_ids.is_contiguous() and weights.is_contiguous()):
            raise TypeError("want contiguous tensors")
        out = torch.empty_like(x)
        num_tokens, top_k = local_ids.shape
        most = max(1, _MOST_PARTS_BYTES // (4 * top_k * self._width))
        for first in range(0, num_tokens, most):
            turn = slice(first, first + most)
            self._sum_experts(x[turn], local_ids[turn], weights[turn], out[turn])
        return out

    def _sum_experts(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> None:
        num_tokens, top_k = ids.shape
        num_experts, width, inner = self._down.shape
        num_ids = ids.numel()
        gate_up_tile, down_tile = experts_tiles(num_ids, num_experts, x.dtype)
        of_both, of_down = self._biases or (None, None)
        glu = self._form.glu
        order, tiles = _sort(ids, num_experts, down_tile.rows)
        middle = torch.empty((num_ids, inner), dtype=x.dtype, device=x.device)
        launch(
            gate_up_kernel,
            (len(tiles) * divided_up(inner, gate_up_tile.cols),),
            x,
            self._gate_up,
            of_both,
            middle,
            order,
            tiles,
            len(tiles),
            top_k,
            inner,
            width,
            inner * width,
            self._gate_up.stride(0),
            tuning=gate_up_tile.tuning,
            GROUP=gate_up_tile.group,
            ALPHA=None if glu is None else glu.alpha,
            LIMIT=None if glu is None else glu.limit,
            **gate_up_tile.constants(inner, width),
        )
        parts = torch.empty((num_ids, width), dtype=torch.float32, device=x.device)
        launch(
            down_kernel,
            (len(tiles) * divided_up(width, down_tile.cols),),
            middle,
            self._down,
            of_down,
            parts,
            order,
            tiles,
            len(tiles),
            width,
            inner,
            self._down.stride(0),
            tuning=down_tile.tuning,
            GROUP=down_tile.group,
            **down_tile.constants(width, inner),
        )
        launch(
            sum_kernel,
            (num_tokens, divided_up(width, _COLUMNS)),
            parts,
            ids,
            weights,
            out,
            width,
            num_experts,
            tuning=_SUMMING,
            TOP_K=top_k,
            BLOCK=_COLUMNS,
        )


def _sort(ids: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return ``order`` and ``tiles`` of `sort_kernel` for tiles with this number of rows."""
    num_ids = ids.numel()
    # Each expert that is chosen at all may fill its last tile by one row only.
    num_tiles = (num_ids + min(num_ids, num_experts) * (rows - 1)) // rows
    counts = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    order = torch.empty(num_ids, dtype=torch.int32, device=ids.device)
    tiles = torch.empty((num_tiles, 3), dtype=torch.int32, device=ids.device)
    launch(count_kernel, (num_experts,), ids, counts, num_ids, tuning=_SORTING, BLOCK=_IDS)
    launch(
        sort_kernel,
        (num_experts,),
        ids,
        counts,
        order,
        tiles,
        num_ids,
        num_tiles,
        num_experts,
        tuning=_SORTING,
        ROWS=rows,
        EXPERTS=next_power_of_2(num_experts),
        BLOCK=_IDS,
    )
    return order, tiles
