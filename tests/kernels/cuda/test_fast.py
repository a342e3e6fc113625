"""What `--numerics fast` replaces: which calls cuBLAS and FlashAttention 3 are left, and with what.

Neither is here: torch multiplies, and a stand-in reads the cache as FlashAttention 3 does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from pdserve.kernels.backend import REFERENCE, KernelBackend
from pdserve.kernels.cases.attention import (
    attention_inputs,
    rope_table,
    with_nan_in_unused_slots,
    with_sinks,
)
from pdserve.kernels.cuda import backend
from pdserve.kernels.cuda.linear import CudaLinear
from pdserve.kernels.fast.attention import Flash, find_flash, with_flash
from pdserve.kernels.fast.backend import faster
from pdserve.kernels.fast.linear import MOST_ROWS, FastLinear
from pdserve.kernels.reference.attention import paged_attention
from pdserve.kernels.reference.halves import Attention, AttentionWeights
from pdserve.kernels.reference.linear import linear
from pdserve.kernels.step import StepInputs

CPU = torch.device("cpu")
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


class Products(TorchFunctionMode):
    """Counts what torch multiplies."""

    num = 0

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.num += func in {torch.mm, torch.addmm}
        return func(*args, **(kwargs or {}))


def make(
    kind: type[CudaLinear], dtype: torch.dtype = FP16, *, biased: bool = False, **fields: Any
) -> CudaLinear:
    generator = torch.Generator().manual_seed(3)
    layer = kind(24, 16, dtype=dtype, device=CPU, has_bias=biased, **fields)
    layer.write(0, torch.randn(24, 16, generator=generator))
    if biased:
        layer.write_bias(0, torch.randn(24, generator=generator))
    return layer


def rows(num: int, dtype: torch.dtype = FP16) -> torch.Tensor:
    return torch.randn(num, 16, generator=torch.Generator().manual_seed(4)).to(dtype)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_many_rows_are_multiplied_by_cublas_into_the_result_that_is_given(
    dtype: torch.dtype, biased: bool
) -> None:
    layer, x = make(FastLinear, dtype, biased=biased), rows(65, dtype)
    wanted = linear(x, layer.unpack(), layer._bias)
    out = torch.empty_like(wanted)
    with Products() as products:
        assert layer(x, out) is out
        found = layer(x)
    assert products.num == 2
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
    assert torch.equal(found, out)


@pytest.mark.parametrize(
    ("num_rows", "dtype", "fields"),
    [
        (64, FP16, {}),
        pytest.param(MOST_ROWS + 1, FP16, {}, marks=pytest.mark.slow),
        (65, FP32, {}),
        (65, FP16, {"out_dtype": FP32}),
    ],
)
def test_other_products_have_the_bits_of_the_exact_backend(
    num_rows: int, dtype: torch.dtype, fields: dict[str, Any]
) -> None:
    x = rows(num_rows, dtype)
    with Products() as products:
        found = make(FastLinear, dtype, **fields)(x)
    assert not products.num
    assert torch.equal(found, make(CudaLinear, dtype, **fields)(x))


def test_a_product_checks_what_it_is_given() -> None:
    with pytest.raises(TypeError, match="want"):
        make(FastLinear)(rows(100, BF16))


def flash(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """`flash_attn_with_kvcache`: what it checks, and what it computes."""
    assert causal
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == page_table.stride(-1) == 1
    assert {x.dtype for x in (cache_seqlens, page_table, cu_seqlens_q)} == {torch.int32}
    assert cu_seqlens_q.is_contiguous()
    assert len(page_table) == len(cache_seqlens) == len(cu_seqlens_q) - 1
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    out = torch.empty_like(q)
    left, right = window_size
    group = q.shape[1] // k_cache.shape[2]
    for request, num_keys in enumerate(cache_seqlens.tolist()):
        first, last = cu_seqlens_q[request : request + 2].tolist()
        pages = page_table[request, : -(-num_keys // k_cache.shape[1])].long()
        k, v = (
            cache[pages].flatten(0, 1)[:num_keys].float().repeat_interleave(group, 1)
            for cache in (k_cache, v_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", q[first:last].float(), k) * softmax_scale
        at = torch.arange(num_keys) - torch.arange(num_keys - last + first, num_keys)[:, None]
        unseen = (at > max(right, 0)) | ((at < -left) if left >= 0 else torch.tensor(False))
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out


def refused(*_: Any, **__: Any) -> Any:
    raise AssertionError("not for this one")


@pytest.mark.parametrize(
    ("queries", "contexts", "head_dim", "block_size", "window"),
    [
        ([40], [40], 64, 16, None),
        ([35], [90], 128, 64, None),
        ([1, 33, 1, 2], [70, 33, 5, 66], 64, 16, None),
        ([1, 40], [70, 71], 64, 64, 20),
        ([40, 1], [41, 3], 64, 16, 1),
    ],
    ids=["prompt", "chunk", "mixed", "window", "window of one"],
)
def test_flash_is_told_where_queries_and_keys_lie(
    queries: list[int], contexts: list[int], head_dim: int, block_size: int, window: int | None
) -> None:
    args = with_nan_in_unused_slots(
        attention_inputs(
            queries,
            contexts,
            (6, 2),
            head_dim,
            dtype=FP16,
            device=CPU,
            block_size=block_size,
            window=window,
        )
    )
    found = with_flash(flash, refused)(*args)
    torch.testing.assert_close(found, paged_attention(*args), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("queries", "head_dim", "block_size", "dtype"),
    [
        ([32], 64, 16, FP16),
        ([1] * 41, 64, 16, FP16),
        ([40], 64, 16, FP32),
        ([40], 80, 16, FP16),
        ([40], 192, 16, FP16),
        ([40], 64, 128, FP16),
    ],
    ids=["few tokens", "single tokens", "fp32", "heads of 80", "heads of 192", "large blocks"],
)
def test_what_flash_does_not_take_is_left_to_the_kernels(
    queries: list[int], head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    args = attention_inputs(
        queries, queries, (4, 2), head_dim, dtype=dtype, device=CPU, block_size=block_size
    )
    assert torch.equal(with_flash(refused, paged_attention)(*args), paged_attention(*args))


def test_sinks_are_left_to_the_kernels() -> None:
    args = with_sinks(attention_inputs([40], [40], (4, 2), 64, dtype=FP16, device=CPU))
    assert torch.equal(with_flash(refused, paged_attention)(*args), paged_attention(*args))


def test_padded_steps_are_left_to_the_kernels() -> None:
    _, kv, tables, starts, lens, scale, form = attention_inputs(
        [40], [40], (4, 2), 64, dtype=FP16, device=CPU
    )
    step = StepInputs(
        token_ids=torch.zeros(40, dtype=torch.int64),
        positions=torch.arange(40),
        slot_mapping=torch.full((40,), -1),
        block_tables=tables,
        query_start=starts,
        context_lens=lens,
    )
    weights = AttentionWeights(
        norm=torch.ones(32),
        eps=1e-5,
        qkv=REFERENCE.linear_of(torch.randn(512, 32).to(FP16)),
        out=REFERENCE.linear_of(torch.randn(32, 256).to(FP16)),
        cos_sin=rope_table(40, 64, CPU),
        q_norm=None,
        k_norm=None,
        scale=scale,
        form=form,
    )
    kernels = faster(REFERENCE, Flash("3.0", refused), lambda _: None)
    half, normed = kernels.attention(kernels, weights), torch.randn(40, 32).to(FP16)
    wanted = Attention(REFERENCE, weights).after_norm(normed, kv, step)
    assert torch.equal(half.after_norm(normed, kv, replace(step, is_padded=True)), wanted)
    with pytest.raises(AssertionError, match="not for this one"):
        half.after_norm(normed, kv, step)


@pytest.fixture
def exact() -> KernelBackend:
    return backend.load(CPU, lambda _: None)


def identity(kernels: KernelBackend) -> tuple[str, str, str]:
    return kernels.name, kernels.sources[:12], kernels.compiler


def test_what_decides_how_it_rounds_is_in_the_name_of_a_backend(exact: KernelBackend) -> None:
    def told(flash: Flash | str) -> KernelBackend:
        return faster(exact, flash, lambda _: None)

    backends = [exact, told("none"), told(Flash("3.0", flash)), told(Flash("3.1", flash))]
    assert len({identity(each) for each in backends}) == 4
    assert identity(told("none")) == identity(told("another reason"))
    assert torch.__version__ in told("none").compiler


def test_the_start_says_what_computes(exact: KernelBackend) -> None:
    told: list[str] = []
    without = faster(exact, "FA3 is not installed: no module", told.append)
    with_it = faster(exact, Flash("3.0", flash), told.append)
    assert "cuBLAS" in told[0]
    assert "FA3 is not installed: no module" in told[0]
    assert "by FA3 3.0" in told[1]
    assert without.paged_attention is exact.paged_attention
    assert without.description.endswith(told[0].removeprefix("numerics fast: "))
    assert with_it.paged_attention is not exact.paged_attention


def test_flash_needs_a_device_that_it_was_built_for() -> None:
    assert find_flash(CPU) == "FA3 needs a device of compute capability 9.0"
