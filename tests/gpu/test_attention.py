"""A row of attention has the same bits in any chunk, batch and form, wherever its blocks lie."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pdserve.kernels.cases.attention import (
    attention_inputs,
    with_nan_in_unused_slots,
    without_last_request,
)
from pdserve.kernels.cases.latent import latent_inputs
from pdserve.kernels.registry import kernels_on

pytestmark = pytest.mark.gpu

LENGTH = 1200
CHUNKS = [(0, 7), (7, 500), (500, 501), (501, 512), (512, 513), (513, LENGTH - 1), (1199, LENGTH)]


def in_chunks(op, args, chunks) -> torch.Tensor:
    """Attend chunks of the one request of ``args`` as the requests of one batch."""
    q, layer, table, _, _, scale, last = args
    starts = torch.tensor([0] + [b - a for a, b in chunks]).cumsum(0).int().to(q.device)
    contexts = torch.tensor([b for _, b in chunks], dtype=torch.int32).to(q.device)
    rows = torch.cat([q[a:b] for a, b in chunks])
    tables = table.expand(len(chunks), -1).contiguous()
    return op(rows, layer, tables, starts, contexts, scale, last)


def assert_same_bits(op, args) -> None:
    """Cut the request of ``args`` in every way, and move its blocks."""
    q, layer, table, starts, contexts, scale, last = args
    last_block = table[0, (LENGTH - 1) // layer.shape[3]].long()
    layer[last_block, :, :, (LENGTH - 1) % layer.shape[3] + 1 :] = torch.nan
    whole = op(*args)
    assert whole.isfinite().all()
    assert torch.equal(in_chunks(op, args, CHUNKS), whole)
    assert torch.equal(torch.cat([in_chunks(op, args, [chunk]) for chunk in CHUNKS]), whole)
    singles = list(range(0, LENGTH, 77))
    found = in_chunks(op, args, [(at, at + 1) for at in singles])
    assert torch.equal(found, whole[singles])
    order = torch.randperm(len(layer), device=layer.device)
    moved = order.argsort().int()[table.clamp(min=0).long()].contiguous()
    assert torch.equal(op(q, layer[order], moved, starts, contexts, scale, last), whole)


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "window", "dtype"),
    [
        ((8, 2), 128, 64, None, torch.bfloat16),
        ((8, 2), 128, 64, None, torch.float32),
        ((8, 2), 128, 16, 700, torch.bfloat16),
        ((9, 3), 64, 16, None, torch.float16),
        ((14, 2), 64, 128, None, torch.float16),
        ((4, 4), 80, 128, None, torch.bfloat16),
        ((6, 2), 96, 32, 700, torch.float16),
        ((8, 1), 256, 8, None, torch.bfloat16),
    ],
)
def test_a_row_of_paged_attention_has_its_own_bits(
    cuda: torch.device,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    args = attention_inputs(
        [LENGTH],
        [LENGTH],
        heads,
        head_dim,
        dtype=dtype,
        device=cuda,
        block_size=block_size,
        window=window,
    )
    assert_same_bits(kernels_on(cuda).paged_attention, args)


@pytest.mark.parametrize(
    ("num_heads", "dtype"),
    [(16, torch.bfloat16), (16, torch.float32), (48, torch.bfloat16), (128, torch.bfloat16)],
)
def test_a_row_of_latent_attention_has_its_own_bits(
    cuda: torch.device, num_heads: int, dtype: torch.dtype
) -> None:
    args = latent_inputs(
        [LENGTH], [LENGTH], num_heads, (512, 64), dtype=dtype, device=cuda, block_size=64
    )
    assert_same_bits(kernels_on(cuda).latent_attention, args)


def test_attention_of_single_tokens_is_captured_and_follows_its_inputs(cuda: torch.device) -> None:
    op = kernels_on(cuda).paged_attention
    args = attention_inputs(
        [1] * 5, [700, 3, 64, 65, 512], (8, 2), 128, dtype=torch.bfloat16, device=cuda
    )
    op(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = op(*args)
    contexts = args[4]
    for lengths in [700, 3, 64, 65, 512], [33, 2, 1, 0, 512]:
        contexts.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        assert torch.equal(found, op(*args))


BATCH = [(1, 900), (1500, 1500), (77, 77), (300, 1300), (5, 1029), (2, 514), (1, 64), (33, 250)]
"""Query tokens and context of each request."""


@pytest.mark.parametrize(
    ("batch", "heads", "head_dim", "block_size", "dtype"),
    [
        (BATCH, (8, 2), 128, 64, torch.bfloat16),
        (BATCH * 9, (14, 2), 64, 128, torch.float16),
        (BATCH, (40, 1), 64, 64, torch.bfloat16),
    ],
)
def test_prompts_have_the_same_bits_where_loads_and_products_run_apart(
    cuda: torch.device,
    batch: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    from pdserve.kernels.cuda.attention import AttentionCall, attend, tiles_for

    queries, contexts = ([*each] for each in zip(*batch, strict=True))
    call = AttentionCall(
        *with_nan_in_unused_slots(
            attention_inputs(
                queries, contexts, heads, head_dim, dtype=dtype, device=cuda, block_size=block_size
            )
        )
    )
    tiles = tiles_for(dtype, head_dim)
    found = [attend(call, tiles) for _ in range(3)]
    whole = attend(call, replace(tiles, apart=False))
    assert whole.isfinite().all()
    assert all(torch.equal(each, whole) for each in found)


def test_a_prompt_behind_a_captured_step_has_the_bits_of_one_before(cuda: torch.device) -> None:
    op = kernels_on(cuda).paged_attention

    def inputs(queries: list[int], contexts: list[int]) -> tuple[Any, ...]:
        return attention_inputs(
            queries, contexts, (8, 2), 128, dtype=torch.bfloat16, device=cuda, block_size=64
        )

    tokens, prompt = inputs([1] * 5, [700, 3, 64, 65, 512]), inputs([600, 1], [900, 70])
    whole, found = op(*prompt), op(*tokens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op(*tokens)
    for _ in range(3):
        graph.replay()
        assert torch.equal(op(*prompt), whole)
        assert torch.equal(captured, found)


PADDING = (1, 2, 40, 700, 1101)
"""Tokens without context: of one tile and several, whose positions reach below a segment's."""


@pytest.mark.parametrize("num_tokens", PADDING)
@pytest.mark.parametrize(
    ("block_size", "window"), [(64, None), (16, None), (64, 300)], ids=["apart", "whole", "window"]
)
def test_rows_of_paged_attention_without_context_are_zero_and_leave_others_alone(
    cuda: torch.device, num_tokens: int, block_size: int, window: int | None
) -> None:
    args = attention_inputs(
        [1, 300, num_tokens],
        [70, 500, 0],
        (8, 2),
        128,
        dtype=torch.bfloat16,
        device=cuda,
        block_size=block_size,
        window=window,
    )
    assert_padding_is_zero(kernels_on(cuda).paged_attention, with_nan_in_unused_slots(args))


@pytest.mark.parametrize("num_tokens", PADDING)
def test_rows_of_latent_attention_without_context_are_zero_and_leave_others_alone(
    cuda: torch.device, num_tokens: int
) -> None:
    args = latent_inputs(
        [1, 30, num_tokens], [70, 500, 0], 16, (512, 64), dtype=torch.bfloat16, device=cuda
    )
    assert_padding_is_zero(kernels_on(cuda).latent_attention, args)


def assert_padding_is_zero(op, args) -> None:
    first = int(args[3][-2])
    found = op(*args)
    assert torch.equal(found[:first], op(*without_last_request(args)))
    assert not found[first:].any()


def test_a_captured_prompt_follows_its_inputs_and_what_pads_it_is_zero(cuda: torch.device) -> None:
    op = kernels_on(cuda).paged_attention
    args = with_nan_in_unused_slots(
        attention_inputs(
            [600, 0], [900, 0], (8, 2), 128, dtype=torch.bfloat16, device=cuda, block_size=64
        )
    )
    starts, contexts = args[3:5]
    op(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = op(*args)
    for num_tokens, context in (600, 900), (37, 70), (2, 515), (0, 0), (600, 900):
        starts[1], contexts[0] = num_tokens, context
        graph.replay()
        assert torch.equal(found[:num_tokens], op(*without_last_request(args)))
        assert not found[num_tokens:].any()
