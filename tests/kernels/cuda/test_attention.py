"""Paged attention on CUDA: its results, and bits that are a row's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pdserve.kernels.backend import NotTakenError
from pdserve.kernels.cases.attention import (
    GROUPS,
    HEAD_DIMS,
    attention_inputs,
    grouped_attention,
    with_sinks,
    without_last_request,
)
from pdserve.kernels.cases.case import Case
from pdserve.kernels.cases.table import OPERATIONS
from pdserve.kernels.cuda.attention import (
    AttentionCall,
    AttentionTiles,
    attend,
    paged_attention,
    tiles_for,
)
from pdserve.kernels.cuda.cache_rows import describe_cache
from pdserve.kernels.reference.attention import AttentionForm

CPU = torch.device("cpu")
FP16, FP32 = torch.float16, torch.float32
OPERATION = OPERATIONS["paged_attention"]
SMALL = replace(tiles_for(torch.float16, 32), tile=16, segment=32, whole_rows=32, programs_per_sm=3)


EVERY_GROUP = [grouped_attention(group, head_dim) for group in GROUPS for head_dim in HEAD_DIMS]
CASES = {case.name: case for case in (*OPERATION.cases(), *EVERY_GROUP)}.values()
QUICK = {
    *((name, FP16) for name in ("empty", "first_token", "mixed")),
    *((name, FP16) for name in ("window", "window_long", "window_of_one")),
    *((name, FP16) for name in ("empty_rows", "group_4_head_192", "sinks", "sinks_window")),
    ("mixed", FP32),
}
"""Both forms, several segments and tiles, every kind of window, what is never read."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(
            case,
            dtype,
            id=f"{case.name}-{dtype}",
            marks=[] if (case.name, dtype) in QUICK else pytest.mark.matrix,
        )
        for case in CASES
        for dtype in (FP16, FP32)
    ],
)
def test_attention_is_that_of_the_reference(case: Case, dtype: torch.dtype) -> None:
    args = case.make(dtype, CPU)
    tolerance = OPERATION.tolerance[dtype]
    torch.testing.assert_close(
        paged_attention(*args), OPERATION.reference(*args), rtol=tolerance, atol=tolerance
    )


@pytest.mark.matrix
@pytest.mark.parametrize(
    "group", [5, *(pytest.param(group, marks=pytest.mark.matrix) for group in (1, 2, 7, 16))]
)
def test_several_segments_of_any_number_of_heads_are_merged(group: int) -> None:
    args = attention_inputs([1, 3], [40, 37], (2 * group, 2), 24, dtype=torch.float32, device=CPU)
    torch.testing.assert_close(
        attend(AttentionCall(*args), SMALL), OPERATION.reference(*args), rtol=5e-5, atol=5e-5
    )


class Prompt:
    """One request whose whole prompt is in a cache; what was never written is NaN."""

    def __init__(
        self,
        block_size: int,
        *,
        length: int = 42,
        heads: tuple[int, int] = (3, 1),
        dtype: torch.dtype = FP16,
        window: int | None = None,
        tiles: AttentionTiles = SMALL,
        sinks: bool = False,
    ) -> None:
        self.length, self.tiles = length, tiles
        self.q, layer, tables, _, _, self.scale, _ = attention_inputs(
            [self.length], [self.length], heads, 32, dtype=dtype, device=CPU, block_size=block_size
        )
        num_blocks = -(-self.length // block_size)
        self.layer = torch.full_like(layer, float("nan"))
        self.table = tables[0, :num_blocks].long()
        self.layer[self.table] = layer[self.table]
        self.layer[self.table[-1], :, :, (self.length - 1) % block_size + 1 :] = float("nan")
        self.form = AttentionForm(window, torch.randn(heads[0]) if sinks else None)

    def rows(self, *parts: tuple[int, int]) -> torch.Tensor:
        """Attend tokens ``[first, last)`` of each part, all in one batch, each a request."""
        lengths = torch.tensor([0] + [last - first for first, last in parts])
        return attend(
            AttentionCall(
                torch.cat([self.q[first:last] for first, last in parts]),
                self.layer,
                torch.stack([self.table.int()] * len(parts)),
                lengths.cumsum(0).int(),
                torch.tensor([last for _, last in parts], dtype=torch.int32),
                self.scale,
                self.form,
            ),
            self.tiles,
        )

    def move_blocks(self) -> None:
        """Have every block lie elsewhere."""
        order = torch.randperm(len(self.layer), generator=torch.Generator().manual_seed(2))
        self.layer = self.layer[order]
        self.table = order.argsort()[self.table]


@pytest.mark.slow
@pytest.mark.usefixtures("hopper_products")
@pytest.mark.parametrize(
    ("block_size", "heads", "dtype", "window", "sinks"),
    [
        (8, (3, 1), FP16, 9, False),  # shorter than a segment: of the last rows one is left out
        (8, (6, 2), FP16, None, True),
        pytest.param(8, (6, 2), FP16, 21, True, marks=pytest.mark.matrix),
        pytest.param(8, (6, 2), FP16, None, False, marks=pytest.mark.matrix),
        pytest.param(32, (6, 2), FP32, None, False, marks=pytest.mark.matrix),
        pytest.param(32, (6, 2), FP32, 21, False, marks=pytest.mark.matrix),
    ],
)
def test_bits_depend_on_neither_chunks_nor_batch_nor_form(
    block_size: int, heads: tuple[int, int], dtype: torch.dtype, window: int | None, sinks: bool
) -> None:
    prompt = Prompt(block_size, heads=heads, dtype=dtype, window=window, sinks=sinks)
    whole = prompt.rows((0, prompt.length))
    assert whole.isfinite().all()
    chunks = [(0, 7), (7, 32), (32, 33), (33, 42)]
    assert torch.equal(torch.cat([prompt.rows(chunk) for chunk in chunks]), whole)
    assert torch.equal(prompt.rows(*chunks), whole)
    singles = [0, 16, 31, 41]
    found = prompt.rows(*((at, at + 1) for at in singles))
    assert torch.equal(found, whole[singles])
    assert torch.equal(prompt.rows((38, 39)), whole[38:39])


@pytest.mark.slow
@pytest.mark.usefixtures("hopper_products")
def test_bits_do_not_depend_on_where_the_blocks_lie() -> None:
    prompt = Prompt(16)
    found = prompt.rows((0, 35), (41, 42))
    prompt.move_blocks()
    assert torch.equal(prompt.rows((0, 35), (41, 42)), found)


def shipped(length: int, window: int | None = None) -> Prompt:
    """Return a prompt with the tiles and segments that a device has."""
    return Prompt(64, length=length, heads=(1, 1), window=window, tiles=tiles_for(FP16, 128))


@pytest.mark.slow
@pytest.mark.usefixtures("hopper_products")
@pytest.mark.parametrize(
    ("length", "window"),
    [
        (580, None),
        pytest.param(1090, None, marks=pytest.mark.matrix),
        pytest.param(1090, 700, marks=pytest.mark.matrix),
    ],
)
def test_with_shipped_tiles_a_prompt_its_chunks_and_its_tokens_have_equal_bits(
    length: int, window: int | None
) -> None:
    prompt = shipped(length, window)
    whole = prompt.rows((0, length))
    assert torch.equal(prompt.rows((490, 550), (550, length)), whole[490:])
    singles = [5, 511, 512, length - 1]
    found = prompt.rows((490, 530), *((t, t + 1) for t in singles))
    assert torch.equal(found[40:], whole[singles])
    prompt.move_blocks()
    assert torch.equal(prompt.rows((length - 1, length)), whole[-1:])


@pytest.mark.slow
@pytest.mark.usefixtures("hopper_products")
@pytest.mark.parametrize("change", [{"segment": 256}, {"tile": 32}], ids=str)
def test_single_tokens_of_other_segments_or_tiles_would_have_other_bits(
    change: dict[str, int],
) -> None:
    prompt = shipped(580)
    chunk = prompt.rows((540, 580))
    prompt.tiles = replace(prompt.tiles, **change)
    assert not torch.equal(prompt.rows((579, 580)), chunk[-1:])


@pytest.mark.slow
@pytest.mark.usefixtures("hopper_products")
def test_more_requests_than_tokens_may_hold_chunks_too() -> None:
    prompt = Prompt(16)
    whole = prompt.rows((0, 42))
    found = prompt.rows((9, 9), (31, 34), (9, 9), (40, 41), (9, 9))
    assert torch.equal(found, whole[[31, 32, 33, 40]])


@pytest.mark.slow
def test_what_lies_behind_a_steps_inputs_is_not_read() -> None:
    q, kv, tables, starts, contexts, *rest = attention_inputs(
        [1, 5, 1, 1], [20, 33, 5, 70], (4, 2), 32, dtype=torch.float16, device=CPU
    )
    # Buffers are used again: there lies a step of more requests, of one token each.
    of_others = torch.arange(64, dtype=torch.int32)
    of_others[: len(starts)] = starts
    long = torch.zeros(64, dtype=torch.int32)
    long[: len(contexts)] = contexts

    found = paged_attention(q, kv, tables, of_others[:5], long[:4], *rest)

    assert torch.equal(found, paged_attention(q, kv, tables, starts, contexts, *rest))


@pytest.mark.usefixtures("hopper_products")
@pytest.mark.parametrize(
    ("num_tokens", "window"),
    [
        (1, None),
        pytest.param(40, 9, marks=pytest.mark.slow),
        *(pytest.param(n, None, marks=pytest.mark.matrix) for n in (3, 40)),
    ],
)
def test_rows_without_context_are_zero_and_leave_others_alone(
    num_tokens: int, window: int | None
) -> None:
    args = with_sinks(
        attention_inputs(
            [1, 2, num_tokens], [42, 9, 0], (3, 1), 32, dtype=FP16, device=CPU, window=window
        )
    )
    found = attend(AttentionCall(*args), SMALL)
    assert torch.equal(found[:3], attend(AttentionCall(*without_last_request(args)), SMALL))
    assert not found[3:].any()


def test_what_the_kernels_do_not_take_is_refused_before_anything_is_launched() -> None:
    def args(dtype: torch.dtype, head_dim: int) -> tuple[Any, ...]:
        return attention_inputs([1], [9], (2, 1), head_dim, dtype=dtype, device=CPU)

    with pytest.raises(NotTakenError, match="heads of 320"):
        paged_attention(*args(torch.float16, 320))
    with pytest.raises(NotTakenError, match="float64"):
        paged_attention(*args(torch.float64, 32))
    q, layer, *rest = args(torch.float16, 32)
    with pytest.raises(NotTakenError, match="strided"):
        paged_attention(q, layer.transpose(3, 4).contiguous().transpose(3, 4), *rest)


def test_a_layers_descriptor_finds_its_rows_and_knows_nothing_but_where_they_lie() -> None:
    layer = torch.randn(5, 3, 2, 4, 128, 64).half()[:, 1]
    found = describe_cache(layer, 64)
    rows = layer.as_strided(found.shape, found.strides)
    last = 4 * layer.stride(0) // 64 + (1 * 4 + 3) * 128
    assert torch.equal(rows[last:], layer[4, 1, 3])
    assert found.base == (layer.data_ptr(), torch.float16)
    assert describe_cache(layer.view_as(layer), 64) is found
    assert describe_cache(layer[:4], 64).shape == [last + 128 - layer.stride(0) // 64, 64]
