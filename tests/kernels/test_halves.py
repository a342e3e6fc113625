"""A half layer in one call has the bits of its operations called in turn."""

from __future__ import annotations

import pytest
import torch

from pdserve.errors import InternalError
from pdserve.kernels.cases.attention import attention_inputs, rope_table
from pdserve.kernels.gates import Activation
from pdserve.kernels.reference.attention import AttentionForm
from pdserve.kernels.reference.halves import Attention, AttentionWeights, Mlp, MlpWeights
from pdserve.kernels.reference.linear import PackedLinear
from pdserve.kernels.step import StepInputs
from tests.kernels.builds import CPU, KERNELS, needs_native

pytestmark = needs_native
WIDTH, HEADS, KV_HEADS, HEAD_DIM = 96, 4, 2, 32
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
adds = pytest.mark.parametrize("add", [True, False], ids=["add", "first"])


def _linear(depth: int, cols: int, dtype: torch.dtype, *, bias: bool = False) -> PackedLinear:
    weight = (torch.randn(cols, depth) / depth**0.5).to(dtype)
    return KERNELS.linear_of(weight, torch.randn(cols).to(dtype) if bias else None)


@dtypes
@adds
@pytest.mark.parametrize(
    ("rows", "inner", "gate", "wide"),
    [
        (0, 160, Activation.SILU, False),
        (1, 160, Activation.SILU, False),
        (7, 160, Activation.GELU_TANH, True),
        (150, 160, Activation.SILU, False),
        (150, 160, Activation.GELU_TANH, False),
        (150, 168, Activation.SILU, True),
    ],
)
def test_mlp(
    dtype: torch.dtype, add: bool, rows: int, inner: int, gate: Activation, wide: bool
) -> None:
    up, down = _linear(WIDTH, 2 * inner, dtype, bias=True), _linear(inner, WIDTH, dtype)
    norm = torch.randn(WIDTH).to(torch.float32 if wide else dtype)
    weights = MlpWeights(norm, 1e-5, up, down, gate)
    x, residual = torch.randn(2, rows, WIDTH).to(dtype)
    expected_residual = residual.clone()
    mlp = KERNELS.mlp(KERNELS, weights)
    result = mlp(x if add else None, residual)

    assert type(mlp) is not Mlp
    assert torch.equal(result, Mlp(KERNELS, weights)(x if add else None, expected_residual))
    assert torch.equal(residual, expected_residual)


def _attention(
    dtype: torch.dtype, window: int | None = None, *, sinks: bool = False, wide: bool = False
) -> AttentionWeights:
    of_norms = torch.float32 if wide else dtype
    return AttentionWeights(
        norm=torch.randn(WIDTH).to(of_norms),
        eps=1e-5,
        qkv=_linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype, bias=True),
        out=_linear(HEADS * HEAD_DIM, WIDTH, dtype),
        cos_sin=rope_table(200, HEAD_DIM, CPU),
        q_norm=torch.randn(HEAD_DIM).to(of_norms),
        k_norm=torch.randn(HEAD_DIM).to(of_norms),
        scale=0.2,
        form=AttentionForm(window, torch.randn(HEADS) if sinks else None),
    )


def _step(
    queries: list[int], contexts: list[int], dtype: torch.dtype
) -> tuple[torch.Tensor, StepInputs]:
    _, kv, tables, starts, lens, _, _ = attention_inputs(
        queries, contexts, (HEADS, KV_HEADS), HEAD_DIM, dtype=dtype, device=CPU
    )
    at = [range(c - n, c) for n, c in zip(queries, contexts, strict=True)]
    slots = [int(tables[r, p // 16]) * 16 + p % 16 for r, places in enumerate(at) for p in places]
    return kv, StepInputs(
        token_ids=torch.empty(0, dtype=torch.int64),
        positions=torch.tensor([p for places in at for p in places]),
        slot_mapping=torch.tensor(slots),
        block_tables=tables,
        query_start=starts,
        context_lens=lens,
    )


@dtypes
@adds
@pytest.mark.parametrize(
    ("prompt", "sinks", "wide"),
    [(9, False, False), (150, False, False), (9, True, False), (9, False, True)],
)
def test_attention(dtype: torch.dtype, add: bool, prompt: int, sinks: bool, wide: bool) -> None:
    weights = _attention(dtype, window=70, sinks=sinks, wide=wide)
    kv, step = _step([1, prompt, 1], [60, prompt, 130], dtype)
    x, residual = torch.randn(2, prompt + 2, WIDTH).to(dtype)
    expected_kv, expected_residual = kv.clone(), residual.clone()
    attention = KERNELS.attention(KERNELS, weights)
    result = attention(x if add else None, residual, kv, step)
    in_turn = Attention(KERNELS, weights)
    expected = in_turn(x if add else None, expected_residual, expected_kv, step)

    assert type(attention) is not Attention
    assert torch.equal(result, expected)
    assert torch.equal(residual, expected_residual)
    assert torch.equal(kv, expected_kv)


def test_a_position_out_of_range_is_refused() -> None:
    kv, step = _step([1], [60], torch.float32)
    step.positions.add_(1000)
    attention = KERNELS.attention(KERNELS, _attention(torch.float32))

    with pytest.raises(InternalError):
        attention(None, torch.randn(1, WIDTH), kv, step)
