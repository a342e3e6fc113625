"""A row of a native kernel's result has the same bits, whatever else the call computes, and how.

These equalities are exact: they are what makes disaggregated and colocated serving give the same
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pdserve.kernels.backend import KernelBackend
from pdserve.kernels.cases.attention import attention_inputs, kv_cache, rope_table, with_sinks
from pdserve.kernels.cases.latent import latent_cache, latent_inputs
from pdserve.kernels.reference.moe import RoutingRule
from tests.kernels.builds import CPU, KERNELS, TARGETS, ZEN_3, kernels_for, marks_of, needs_native

pytestmark = needs_native

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# float16 goes the ways of bfloat16, with another conversion.
SLOW = pytest.param(torch.float16, marks=pytest.mark.slow)
dtypes = pytest.mark.parametrize("dtype", [*DTYPES[:2], SLOW], ids=str)


@contextmanager
def threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(
    params=[2, *(pytest.param(num, marks=pytest.mark.slow) for num in (1, 5))],
    ids="threads={}".format,
)
def any_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    with threads(request.param):
        yield


@dtypes
@pytest.mark.covering(2)
@pytest.mark.usefixtures("any_threads")
@pytest.mark.parametrize("rows", [2, 3, 5, 12, 13, 16, 17, 33, 64, 300, 512])
def test_linear_row_is_the_same_in_any_batch(dtype: torch.dtype, rows: int) -> None:
    x = torch.randn(512, 353, generator=_seeded()).to(dtype)
    layer = KERNELS.linear_of(torch.randn(200, 353, generator=_seeded()).to(dtype))
    with threads(1):
        alone = torch.cat([layer(x[i : i + 1]) for i in range(rows)])

    assert torch.equal(layer(x[:rows]), alone)


@dtypes
@pytest.mark.usefixtures("any_threads")
def test_row_operations_are_the_same_in_any_batch(dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 130, 578, generator=_seeded()).to(dtype)
    weight = torch.randn(578, generator=_seeded()).to(dtype)
    sums = [row.clone() for row in residual.split(1)]
    normed = [KERNELS.rms_norm(row, weight, 1e-5) for row in x.split(1)]
    added = [KERNELS.add_rms_norm(x[i : i + 1], sums[i], weight, 1e-5) for i in range(len(x))]
    gated = [KERNELS.silu_and_mul(row) for row in x.split(1)]
    by_gelu = [KERNELS.gelu_and_mul(row) for row in x.split(1)]

    assert torch.equal(KERNELS.rms_norm(x, weight, 1e-5), torch.cat(normed))
    assert torch.equal(KERNELS.add_rms_norm(x, residual, weight, 1e-5), torch.cat(added))
    assert torch.equal(residual, torch.cat(sums))
    assert torch.equal(KERNELS.silu_and_mul(x), torch.cat(gated))
    assert torch.equal(KERNELS.gelu_and_mul(x), torch.cat(by_gelu))


@dtypes
@pytest.mark.usefixtures("any_threads")
def test_rope_and_cache_are_the_same_in_any_batch(dtype: torch.dtype) -> None:
    tokens, heads, kv_heads, head_dim = 90, 6, 2, 64
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, generator=_seeded()).to(dtype)
    norm = torch.randn(head_dim, generator=_seeded()).to(dtype)
    at, table = torch.arange(tokens), rope_table(tokens, head_dim, CPU)
    whole = kv_cache(8, kv_heads, 16, head_dim, dtype=dtype, device=CPU)
    single = whole.clone()
    q = KERNELS.rope_and_cache(qkv, at, table, whole, at, norm, norm, 1e-6)
    each = [
        KERNELS.rope_and_cache(
            qkv[i : i + 1], at[i : i + 1], table, single, at[i : i + 1], norm, norm, 1e-6
        )
        for i in range(tokens)
    ]

    assert torch.equal(q, torch.cat(each))
    assert torch.equal(whole, single)


def test_threads_do_not_change_a_large_product() -> None:
    x = torch.randn(200, 600, generator=_seeded()).bfloat16()
    layer = KERNELS.linear_of(torch.randn(900, 600, generator=_seeded()).bfloat16())
    with threads(1):
        expected = layer(x)
    for num_threads in (2, 3, 8):
        with threads(num_threads):
            assert torch.equal(layer(x), expected)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _attend_in_chunks(inputs: tuple, chunks: list[int], kernels: KernelBackend = KERNELS) -> Tensor:
    """Attend to a single request's queries in several calls, as chunked prefill does."""
    q, kv, tables, _, contexts, *rest = inputs
    first_position = int(contexts[0]) - len(q)
    parts, done = [], 0
    for chunk in chunks:
        starts = torch.tensor([0, chunk], dtype=torch.int32)
        context = torch.tensor([first_position + done + chunk], dtype=torch.int32)
        part = q[done : done + chunk]
        parts.append(kernels.paged_attention(part, kv, tables, starts, context, *rest))
        done += chunk
    return torch.cat(parts)


@dtypes
@pytest.mark.covering(2)
@pytest.mark.usefixtures("any_threads")
@pytest.mark.parametrize(
    ("window", "sinks"), [(None, False), (50, False), (700, False), (None, True)]
)
@pytest.mark.parametrize("chunk", [1, 16, 100, 512])
def test_attention_is_the_same_for_any_chunks(
    dtype: torch.dtype, chunk: int, window: int | None, sinks: bool
) -> None:
    tokens = 90 if chunk == 1 else 1100
    inputs = attention_inputs([tokens], [1100], (4, 2), 32, dtype=dtype, device=CPU, window=window)
    inputs = with_sinks(inputs) if sinks else inputs
    chunks = [chunk] * (tokens // chunk) + ([tokens % chunk] if tokens % chunk else [])
    with threads(1):
        whole = KERNELS.paged_attention(*inputs)

    assert torch.equal(_attend_in_chunks(inputs, chunks), whole)


@pytest.mark.parametrize("target", [pytest.param(ZEN_3, marks=marks_of(ZEN_3))])
def test_attention_built_for_zen_3_is_the_same_token_by_token(target: str) -> None:
    kernels = kernels_for(target)
    inputs = attention_inputs([90], [1100], (4, 2), 32, dtype=torch.float32, device=CPU)
    whole = kernels.paged_attention(*inputs)
    assert torch.equal(_attend_in_chunks(inputs, [1] * 90, kernels), whole)


@given(data=st.data())
def test_attention_of_a_request_is_the_same_in_any_company(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    heads = data.draw(st.sampled_from([(1, 1), (6, 2), (7, 1), (9, 3)]))
    block_size = data.draw(st.sampled_from([8, 16, 32, 64, 128]))
    head_dim = data.draw(st.sampled_from([32, 100, 29]))
    window = data.draw(st.none() | st.integers(1, 800))
    contexts = data.draw(st.lists(st.integers(1, 1300), min_size=1, max_size=5))
    queries = [data.draw(st.sampled_from([min(c, n) for n in (1, 3, 40)])) for c in contexts]
    inputs = attention_inputs(
        queries,
        contexts,
        heads,
        head_dim,
        dtype=dtype,
        device=CPU,
        block_size=block_size,
        window=window,
    )
    q, kv, tables, starts, lens, scale, form = inputs
    together = KERNELS.paged_attention(*inputs)

    for r, count in enumerate(queries):
        first = int(starts[r])
        # The same contents in other blocks: the pool is reversed.
        alone = KERNELS.paged_attention(
            q[first : first + count],
            kv.flip(0),
            (len(kv) - 1 - tables[r : r + 1]).contiguous(),
            torch.tensor([0, count], dtype=torch.int32),
            lens[r : r + 1],
            scale,
            form,
        )
        assert torch.equal(together[first : first + count], alone)


@pytest.mark.usefixtures("any_threads")
@pytest.mark.parametrize("sigmoid", [False, True])
def test_the_choice_of_experts_is_the_same_in_any_batch(sigmoid: bool) -> None:
    logits = torch.randn(150, 60, generator=_seeded())
    bias = torch.randn(60, generator=_seeded())
    rule = RoutingRule(
        6, sigmoid=sigmoid, normalize=True, num_groups=6, top_k_groups=3, rank_groups_by_two=True
    )
    ids, weights = KERNELS.route(logits, bias, rule)
    each = [KERNELS.route(row, bias, rule) for row in logits.split(1)]

    assert torch.equal(ids, torch.cat([ids for ids, _ in each]))
    assert torch.equal(weights, torch.cat([weights for _, weights in each]))


@dtypes
@pytest.mark.usefixtures("any_threads")
@pytest.mark.parametrize("rows", [2, 13, 64, 200])
def test_experts_row_is_the_same_in_any_batch(dtype: torch.dtype, rows: int) -> None:
    width, inner, num_experts, top_k = 96, 70, 5, 3
    layer = KERNELS.experts(num_experts, width, inner, dtype=dtype, device=CPU)
    for expert, weights in enumerate(torch.randn(num_experts, 3, inner, width)):
        layer.write_gate(expert, weights[0])
        layer.write_up(expert, weights[1])
        layer.write_down(expert, weights[2].T)
    x = torch.randn(rows, width, generator=_seeded()).to(dtype)
    # Some choices are not here.
    ids = torch.rand(rows, num_experts + 2, generator=_seeded()).argsort(-1)[:, :top_k] - 2
    weights = torch.rand(rows, top_k, generator=_seeded())
    together = layer(x, ids, weights)
    with threads(1):
        each = [layer(x[i : i + 1], ids[i : i + 1], weights[i : i + 1]) for i in range(rows)]

    assert torch.equal(together, torch.cat(each))


def test_an_expert_does_not_notice_the_others_on_its_rank() -> None:
    width, inner = 64, 48
    everyone = KERNELS.experts(4, width, inner, dtype=torch.bfloat16, device=CPU)
    alone = KERNELS.experts(1, width, inner, dtype=torch.bfloat16, device=CPU)
    for expert, weights in enumerate(torch.randn(4, 3, inner, width)):
        everyone.write_gate(expert, weights[0])
        everyone.write_up(expert, weights[1])
        everyone.write_down(expert, weights[2].T)
    alone.write(0, everyone.read(2))
    x = torch.randn(30, width, generator=_seeded()).bfloat16()
    weights = torch.rand(30, 2, generator=_seeded())
    ids = torch.tensor([[2, -1]] * 30)

    assert torch.equal(everyone(x, ids, weights), alone(x, ids.clamp(max=0), weights))


@dtypes
@pytest.mark.usefixtures("any_threads")
def test_a_heads_product_is_the_same_in_any_batch_and_beside_any_heads(dtype: torch.dtype) -> None:
    x = torch.randn(700, 3, 50, generator=_seeded()).to(dtype)[..., :33]
    weight = torch.randn(3, 70, 33, generator=_seeded()).to(dtype)
    together = KERNELS.heads(weight)(x)
    with threads(1):
        for head in range(3):
            layer = KERNELS.heads(weight[head : head + 1])
            each = [layer(row[:, head : head + 1]) for row in x[::97].split(1)]
            assert torch.equal(together[::97, head : head + 1], torch.cat(each))


@dtypes
@pytest.mark.usefixtures("any_threads")
def test_rope_and_latent_are_the_same_in_any_batch(dtype: torch.dtype) -> None:
    tokens, heads, nope, latent, rotary = 90, 6, 24, 64, 16
    q = torch.randn(tokens, heads, nope + rotary, generator=_seeded()).to(dtype)
    kv = torch.randn(tokens, latent + rotary, generator=_seeded()).to(dtype)
    norm = torch.randn(latent, generator=_seeded()).to(dtype)
    at, table = torch.arange(tokens), rope_table(tokens, rotary, CPU)
    whole = latent_cache(8, 16, latent + rotary, dtype=dtype, device=CPU)
    single = whole.clone()
    queries = torch.zeros(tokens, heads, latent + rotary, dtype=dtype)
    each = queries.clone()
    KERNELS.rope_and_latent(q, queries, kv, at, table, whole, at, norm, 1e-6)
    for i in range(tokens):
        one = slice(i, i + 1)
        KERNELS.rope_and_latent(
            q[one], each[one], kv[one], at[one], table, single, at[one], norm, 1e-6
        )

    assert torch.equal(queries, each)
    assert torch.equal(whole, single)


@dtypes
@pytest.mark.usefixtures("any_threads")
@pytest.mark.parametrize(
    ("chunk", "num_heads", "dims"),
    [
        (1, 16, (48, 16)),
        (16, 3, (21, 8)),
        pytest.param(100, 40, (48, 16), marks=pytest.mark.matrix),
        (512, 5, (48, 16)),
    ],
)
def test_latent_attention_is_the_same_for_any_chunks(
    dtype: torch.dtype, chunk: int, num_heads: int, dims: tuple[int, int]
) -> None:
    tokens, context = 90 if chunk == 1 else 1100, 1100
    inputs = latent_inputs([tokens], [context], num_heads, dims, dtype=dtype, device=CPU)
    q, kv, tables, _, _, scale, latent = inputs
    with threads(1):
        whole = KERNELS.latent_attention(*inputs)
    parts, done = [], 0
    while done < tokens:
        size = min(chunk, tokens - done)
        starts = torch.tensor([0, size], dtype=torch.int32)
        lens = torch.tensor([context - tokens + done + size], dtype=torch.int32)
        part = q[done : done + size]
        parts.append(KERNELS.latent_attention(part, kv, tables, starts, lens, scale, latent))
        done += size

    assert torch.equal(torch.cat(parts), whole)


@dtypes
@pytest.mark.usefixtures("any_threads")
def test_latent_attention_is_the_same_in_any_company_and_for_any_heads(dtype: torch.dtype) -> None:
    queries, contexts = [1, 40, 1, 7], [65, 700, 513, 135]
    inputs = latent_inputs(queries, contexts, 6, (64, 16), dtype=dtype, device=CPU)
    q, kv, tables, starts, lens, scale, latent = inputs
    together = KERNELS.latent_attention(*inputs)
    for r, count in enumerate(queries):
        first = int(starts[r])
        for heads in (slice(0, 2), slice(2, 6)):
            # As another TP rank would have it, and alone.
            alone = KERNELS.latent_attention(
                q[first : first + count, heads].contiguous(),
                kv,
                tables[r : r + 1],
                torch.tensor([0, count], dtype=torch.int32),
                lens[r : r + 1],
                scale,
                latent,
            )
            assert torch.equal(together[first : first + count, heads], alone)


@pytest.mark.timeout(300)  # it may wait for a compiler
@dtypes
@pytest.mark.parametrize("target", TARGETS)
def test_builds_for_lesser_cpus_are_invariant_too(target: str, dtype: torch.dtype) -> None:
    kernels = kernels_for(target)
    x = torch.randn(600, 701, generator=_seeded()).to(dtype)
    layer = kernels.linear_of(torch.randn(70, 701, generator=_seeded()).to(dtype))
    inputs = attention_inputs([150], [150], (2, 1), 32, dtype=dtype, device=CPU)
    q, kv, tables, _, *rest = inputs
    last = (q[-1:], kv, tables, torch.tensor([0, 1], dtype=torch.int32), *rest)

    # In one band of vectors and in several, by streams and by slices, in one panel and in more.
    expected = layer(x)
    for rows in (1, 2, 5, 7, 13, 24, 25, 63, 130):
        assert torch.equal(layer(x[-rows:]), expected[-rows:])
    assert torch.equal(kernels.paged_attention(*inputs)[-1:], kernels.paged_attention(*last))
