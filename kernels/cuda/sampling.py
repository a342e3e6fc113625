"""Tokens from logits on CUDA, as ``reference.sampling`` defines them.

All sums over the vocabulary are integers, so any number of programs can share a row. A row is read
a few times, after the first time from the cache, and nothing of its size is written. The least
power that ``top_k`` and ``top_p`` keep is found digit by digit, from the highest: each pass counts
the powers that agree with the digits found so far, by their next digit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.cuda.launch import Tuning, launch
from pdserve.kernels.cuda.sizes import divided_up, next_power_of_2
from pdserve.kernels.reference.sampling import Draws

_BLOCK = 2048
"""Logits per program."""
_TUNING = Tuning(warps=4)
_NUM_DIGITS = 6
"""Powers are at most 1, whose bits form a 30-bit number; as integers they keep their order."""
# The interpreter knows no globals of Triton's types: kernels spell out 2**40, 2**53, 2**31 - 1, and
# the base of 32 with its 5 bits and 6 digits.


@triton.jit
def largest_of_block(
    logits: tl.tensor,
    partial: tl.tensor,
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Find the largest logit of a block of a row, and its id, as one integer; grid (rows, blocks).

    Ordered by the logit (NaN above all), then by descending id.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab_size
    logit = tl.load(logits + row * vocab_size + column, mask=inside, other=float("-inf"))
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    ordered = tl.where(is_nan, 0x7FFFFFFF, ordered).to(tl.int64)
    key = (ordered << 32) | (0x7FFFFFFF - column).to(tl.int64)
    tl.store(partial + row * num_blocks + block, tl.max(key, 0))


@triton.jit
def largest_of_row(
    logits: tl.tensor,
    partial: tl.tensor,
    tokens: tl.tensor,
    peaks: tl.tensor,
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    BLOCKS: tl.constexpr,
) -> None:
    """Find the largest of a row's blocks; grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    keys = tl.load(
        partial + row * num_blocks + block, mask=block < num_blocks, other=-0x7FFFFFFFFFFFFFFF
    )
    token = 0x7FFFFFFF - (tl.max(keys, 0) & 0xFFFFFFFF)
    peak = tl.load(logits + row * vocab_size + token)
    is_finite = tl.abs(peak) < float("inf")
    tl.store(tokens + row, tl.where(is_finite, token, -1))
    tl.store(peaks + row, peak)


@triton.jit
def powers_of_block(
    logits: tl.tensor,
    row: tl.tensor,
    peak: tl.tensor,
    scale: tl.tensor,
    min_p: tl.tensor,
    block: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Powers of a block, 0 beyond the vocabulary or below ``min_p``."""
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab_size
    logit = tl.load(logits + row * vocab_size + column, mask=inside, other=float("-inf"))
    power = tl.exp2((logit - peak) * scale)
    return tl.where(power < min_p, 0.0, power)


@triton.jit
def weights_of(power: tl.tensor) -> tl.tensor:
    """Integer weights of powers."""
    return (power * 1099511627776.0).to(tl.int64)


@triton.jit
def share(total: tl.tensor, fraction: tl.tensor) -> tl.tensor:
    """See ``share_of``."""
    total_high, total_low = total >> 29, total & 0x1FFFFFFF
    high, low = fraction >> 26, fraction & 0x3FFFFFF
    middle = high * total_low + 8 * low * total_high + (low * total_low >> 26)
    return 4 * high * total_high + (middle >> 27)


@triton.jit
def leading_digits(tally: tl.tensor, wanted: tl.tensor, num: tl.tensor) -> tl.tensor:
    """Return the first ``num`` digits of the least kept power.

    Args:
        tally: ``[digits, base]``, the totals at each digit, of powers with the found digits.
        wanted: The minimum total of the kept powers, reached only with the least one.
        num: Number of tallied digits.
    """
    digit = tl.arange(0, 32)
    found = tl.zeros((), tl.int32)
    for place in range(num):
        here = tl.load(tally + place * 32 + digit)
        at_least = tl.sum(here, 0) - tl.cumsum(here, 0) + here
        chosen = tl.sum((at_least >= wanted).to(tl.int32), 0) - 1
        wanted -= tl.sum(tl.where(digit > chosen, here, 0), 0)
        found = (found << 5) | chosen
    return found


@triton.jit(do_not_specialize=["place"])
def tally_block(
    logits: tl.tensor,
    peaks: tl.tensor,
    rows: tl.tensor,
    scales: tl.tensor,
    min_ps: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    counts: tl.tensor,
    sums: tl.tensor,
    vocab_size: tl.tensor,
    place: tl.tensor,
    BLOCK: tl.constexpr,
    BY_K: tl.constexpr,
    IS_SUM: tl.constexpr,
) -> None:
    """Add a block's powers to the tally of one digit; grid (draws, blocks).

    Args:
        counts: ``[N, digits, base]`` int64, zeros at first: how many powers.
        sums: Likewise: their weights.
        place: Index of the digit, from the highest; those before it are tallied.
        BY_K: Whether the digit is for ``sums`` and ``counts`` are complete.
        IS_SUM: Whether the digit is for ``sums``, not ``counts``.
    """
    index = tl.program_id(0).to(tl.int64)
    top_k, top_p = tl.load(top_ks + index).to(tl.int64), tl.load(top_ps + index)
    if IS_SUM:
        is_asked = top_p < (1 << 53)
    else:
        is_asked = top_k > 0
    row = tl.load(rows + index).to(tl.int64)
    peak = tl.load(peaks + row)
    if is_asked & (tl.abs(peak) < float("inf")):
        power = powers_of_block(
            logits,
            row,
            peak,
            tl.load(scales + index),
            tl.load(min_ps + index),
            tl.program_id(1),
            vocab_size,
            BLOCK,
        )
        bits = power.to(tl.int32, bitcast=True)
        at = index * 6 * 32
        if IS_SUM:
            amount = weights_of(power)
            if BY_K:
                is_kept = (top_k == 0) | (bits >= leading_digits(counts + at, top_k, 6))
                amount = tl.where(is_kept, amount, 0)
            tally = sums + at
            # Of the first digit it means nothing, and is not looked at.
            total = tl.sum(tl.load(tally + tl.arange(0, 32)), 0)
            wanted = tl.maximum(share(total, top_p), 1)
        else:
            column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            amount = (column < vocab_size).to(tl.int64)
            tally = counts + at
            wanted = top_k
        shift = (5 - place) * 5
        agrees = (bits >> (shift + 5)) == leading_digits(tally, wanted, place)
        amount = tl.where(agrees, amount, 0)
        if tl.max(amount, 0) > 0:
            digit = (bits >> shift) & 31
            for value in tl.static_range(32):
                here = tl.sum(tl.where(digit == value, amount, 0), 0)
                tl.atomic_add(tally + place * 32 + value, here, mask=here > 0)


@triton.jit
def weigh_block(
    logits: tl.tensor,
    peaks: tl.tensor,
    rows: tl.tensor,
    scales: tl.tensor,
    min_ps: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    counts: tl.tensor,
    sums: tl.tensor,
    partial: tl.tensor,
    bounds: tl.tensor,
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    BY_K: tl.constexpr,
    BY_P: tl.constexpr,
) -> None:
    """Sum the weights that a block keeps; grid (draws, blocks).

    Args:
        partial: ``[N, blocks]`` int64.
        bounds: ``[N]`` int32: bits of the least kept power.
    """
    index = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.load(rows + index).to(tl.int64)
    peak = tl.load(peaks + row)
    total = tl.zeros((), tl.int64)
    if tl.abs(peak) < float("inf"):
        bound = tl.zeros((), tl.int32)
        at = index * 6 * 32
        if BY_K:
            top_k = tl.load(top_ks + index).to(tl.int64)
            if top_k > 0:
                bound = leading_digits(counts + at, top_k, 6)
        if BY_P:
            top_p = tl.load(top_ps + index)
            if top_p < (1 << 53):
                kept = tl.sum(tl.load(sums + at + tl.arange(0, 32)), 0)
                wanted = tl.maximum(share(kept, top_p), 1)
                bound = tl.maximum(bound, leading_digits(sums + at, wanted, 6))
        power = powers_of_block(
            logits,
            row,
            peak,
            tl.load(scales + index),
            tl.load(min_ps + index),
            block,
            vocab_size,
            BLOCK,
        )
        is_kept = power.to(tl.int32, bitcast=True) >= bound
        total = tl.sum(tl.where(is_kept, weights_of(power), 0), 0)
        if block == 0:
            tl.store(bounds + index, bound)
    tl.store(partial + index * num_blocks + block, total)


@triton.jit
def draw_row(
    logits: tl.tensor,
    peaks: tl.tensor,
    rows: tl.tensor,
    scales: tl.tensor,
    min_ps: tl.tensor,
    uniforms: tl.tensor,
    partial: tl.tensor,
    bounds: tl.tensor,
    tokens: tl.tensor,
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Find the block, then the token, whose running weight passes the target; grid (draws,)."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index).to(tl.int64)
    peak = tl.load(peaks + row)
    if tl.abs(peak) < float("inf"):
        each = tl.arange(0, BLOCKS)
        weight = tl.load(partial + index * num_blocks + each, mask=each < num_blocks, other=0)
        running = tl.cumsum(weight, 0)
        target = share(tl.sum(weight, 0), tl.load(uniforms + index))
        is_before = running <= target
        block = tl.sum(is_before.to(tl.int32), 0)
        rest = target - tl.sum(tl.where(is_before, weight, 0), 0)
        power = powers_of_block(
            logits,
            row,
            peak,
            tl.load(scales + index),
            tl.load(min_ps + index),
            block,
            vocab_size,
            BLOCK,
        )
        is_kept = power.to(tl.int32, bitcast=True) >= tl.load(bounds + index)
        inner = tl.cumsum(tl.where(is_kept, weights_of(power), 0), 0)
        token = block * BLOCK + tl.sum((inner <= rest).to(tl.int32), 0)
        tl.store(tokens + row, token.to(tl.int64))


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See ``reference.sampling.largest``; contiguous."""
    num_rows, vocab_size = logits.shape
    num_blocks = divided_up(vocab_size, _BLOCK)
    partial = _empty(logits, num_rows, num_blocks, dtype=torch.int64)
    tokens = _empty(logits, num_rows, dtype=torch.int64)
    peaks = _empty(logits, num_rows, dtype=torch.float32)
    launch(
        largest_of_block,
        (num_rows, num_blocks),
        logits,
        partial,
        vocab_size,
        num_blocks,
        tuning=_TUNING,
        BLOCK=_BLOCK,
    )
    launch(
        largest_of_row,
        (num_rows,),
        logits,
        partial,
        tokens,
        peaks,
        vocab_size,
        num_blocks,
        tuning=_TUNING,
        BLOCKS=next_power_of_2(num_blocks),
    )
    return tokens, peaks


def draw(
    logits: Tensor, peaks: Tensor, draws: Draws, tokens: Tensor, *, by_k: bool, by_p: bool
) -> None:
    """See ``reference.sampling.draw``; contiguous."""
    num_draws, vocab_size = len(draws.rows), logits.shape[1]
    num_blocks = divided_up(vocab_size, _BLOCK)
    grid = num_draws, num_blocks
    every = logits, peaks, draws.rows, draws.scale, draws.min_p
    tallies = torch.zeros(
        2 if by_k or by_p else 0,
        num_draws,
        _NUM_DIGITS * 32,
        dtype=torch.int64,
        device=logits.device,
    )
    counts, sums = tallies if len(tallies) else (tallies, tallies)
    bounded = *every, draws.top_k, draws.top_p, counts, sums
    for is_sum in [False] * by_k + [True] * by_p:
        for place in range(_NUM_DIGITS):
            launch(
                tally_block,
                grid,
                *bounded,
                vocab_size,
                place,
                tuning=_TUNING,
                BLOCK=_BLOCK,
                BY_K=by_k and is_sum,
                IS_SUM=is_sum,
            )
    partial = _empty(logits, num_draws, num_blocks, dtype=torch.int64)
    bounds = _empty(logits, num_draws, dtype=torch.int32)
    launch(
        weigh_block,
        grid,
        *bounded,
        partial,
        bounds,
        vocab_size,
        num_blocks,
        tuning=_TUNING,
        BLOCK=_BLOCK,
        BY_K=by_k,
        BY_P=by_p,
    )
    launch(
        draw_row,
        (num_draws,),
        *every,
        draws.uniform,
        partial,
        bounds,
        tokens,
        vocab_size,
        num_blocks,
        tuning=_TUNING,
        BLOCK=_BLOCK,
        BLOCKS=next_power_of_2(num_blocks),
    )


def _empty(beside: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=beside.device)
