"""Latent attention on CUDA: its results, bits that are a row's own, what it compiles to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pdserve.kernels.backend import NotTakenError
from pdserve.kernels.cases.case import Case
from pdserve.kernels.cases.latent import latent_inputs
from pdserve.kernels.cases.table import OPERATIONS
from pdserve.kernels.cuda import latent
from pdserve.kernels.cuda.latent import latent_attention
from tests.kernels.cuda import gate

CPU = torch.device("cpu")
OPERATION = OPERATIONS["latent_attention"]
LENGTH = 35
FP16, FP32 = torch.float16, torch.float32
QUICK = {
    *((name, FP16) for name in ("empty", "first_token", "decode_batch", "deepseek_decode")),
    ("one_head", FP16),
    ("mixed", FP32),
}


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
        for case in OPERATION.cases()
        for dtype in (FP16, FP32)
        if dtype == FP16 or case.name != "deepseek_chunk"  # half a minute
    ],
)
def test_latent_attention_is_that_of_the_reference(case: Case, dtype: torch.dtype) -> None:
    args = case.make(dtype, CPU)
    tolerance = OPERATION.tolerance[dtype]
    torch.testing.assert_close(
        latent_attention(*args), OPERATION.reference(*args), rtol=tolerance, atol=tolerance
    )


@pytest.mark.slow
@pytest.mark.usefixtures("ordered_products")
@pytest.mark.parametrize(
    ("num_heads", "chunks"),
    [
        (3, [(0, 7), (7, 32), (32, 33), (33, LENGTH)]),
        pytest.param(20, [(0, 7), (7, 32), (32, 33), (33, LENGTH)], marks=pytest.mark.matrix),
    ],
    ids=["few heads", "many heads"],
)
def test_bits_depend_on_neither_chunks_nor_batch_nor_form(
    num_heads: int, chunks: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = replace(latent.latent_tiles(torch.float16, num_heads), tile=16, segment=16)
    monkeypatch.setattr(latent, "latent_tiles", lambda *_: tiles)
    latent._cut.cache_clear()
    q, layer, table, _, _, scale, latent_dim = latent_inputs(
        [LENGTH], [LENGTH], num_heads, (32, 16), dtype=torch.float16, device=CPU
    )
    layer[table[0, LENGTH // 16].long(), :, :, LENGTH % 16 :] = float("nan")

    def rows(*parts: tuple[int, int]) -> torch.Tensor:
        starts = torch.tensor([0] + [last - first for first, last in parts]).cumsum(0).int()
        contexts = torch.tensor([last for _, last in parts], dtype=torch.int32)
        x = torch.cat([q[first:last] for first, last in parts])
        tables = table.expand(len(parts), -1).contiguous()
        return latent_attention(x, layer, tables, starts, contexts, scale, latent_dim)

    whole = rows((0, LENGTH))
    assert whole.isfinite().all()
    wanted = torch.cat([whole[first:last] for first, last in chunks])
    assert torch.equal(rows(*chunks), wanted)
    assert torch.equal(torch.cat([rows(chunk) for chunk in chunks]), wanted)
    latent._cut.cache_clear()


def test_wide_latents_are_refused() -> None:
    args = latent_inputs([1], [9], 2, (640, 64), dtype=torch.float16, device=CPU)
    with pytest.raises(NotTakenError, match="at most 512"):
        latent_attention(*args)


def calls() -> gate.Calls:
    """DeepSeek-V3's layer, with the heads of one rank of eight, and with all."""

    def call(num_tokens: int, num_requests: int, num_heads: int) -> object:
        def ints(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device="meta")

        q = torch.empty(num_tokens, num_heads, 576, dtype=torch.bfloat16, device="meta")
        layer = torch.empty(100, 61, 1, 1, 64, 576, dtype=torch.bfloat16, device="meta")[:, 1]
        lengths = ints(num_requests + 1), ints(num_requests)
        return latent_attention(q, layer, ints(num_requests, 128), *lengths, 0.07, 512)

    return {
        "decode": lambda: call(8, 8, 16),
        "decode, all heads": lambda: call(8, 8, 128),
        "prefill": lambda: call(2000, 1, 16),
    }


@pytest.mark.matrix
def test_kernels_compile_for_hopper_and_keep_their_sums_in_registers() -> None:
    decode, _ = gate.compiled(f"{__name__}:calls", "decode")["decode"]
    assert decode.spilled == 0
    assert decode.count("HMMA.16816") > 0
    assert decode.copies_of_16_bytes() >= 18


@pytest.mark.matrix
def test_many_heads_and_prompts_compile_for_hopper() -> None:
    found = gate.compiled(f"{__name__}:calls", "decode, all heads", "prefill")
    every, _ = found["decode, all heads"]
    assert every.spilled <= 8
    assert every.count("HGMMA") > 0
    (whole,) = found["prefill"]
    assert whole.spilled <= 32  # of what is merged between segments
