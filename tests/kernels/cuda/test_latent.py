"""Latent attention on CUDA: its results, and bits that are a row's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pdserve.kernels.backend import NotTakenError
from pdserve.kernels.cases.attention import without_last_request
from pdserve.kernels.cases.case import Case
from pdserve.kernels.cases.latent import latent_inputs
from pdserve.kernels.cases.table import OPERATIONS
from pdserve.kernels.cuda import latent
from pdserve.kernels.cuda.latent import latent_attention

CPU = torch.device("cpu")
OPERATION = OPERATIONS["latent_attention"]
LENGTH = 35
FP16, FP32 = torch.float16, torch.float32
QUICK = {
    *((name, FP16) for name in ("empty", "first_token", "deepseek_decode")),
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


def prompt_of(length: int, num_heads: int) -> Callable[..., torch.Tensor]:
    """Return what attends tokens ``[first, last)`` of one prompt, each part a request of a batch.

    What was never written is NaN.
    """
    q, layer, table, _, _, scale, latent_dim = latent_inputs(
        [length], [length], num_heads, (32, 16), dtype=torch.float16, device=CPU
    )
    layer[table[0, length // 16].long(), :, :, length % 16 :] = float("nan")

    def rows(*parts: tuple[int, int]) -> torch.Tensor:
        starts = torch.tensor([0] + [last - first for first, last in parts]).cumsum(0).int()
        contexts = torch.tensor([last for _, last in parts], dtype=torch.int32)
        x = torch.cat([q[first:last] for first, last in parts])
        tables = table.expand(len(parts), -1).contiguous()
        return latent_attention(x, layer, tables, starts, contexts, scale, latent_dim)

    return rows


def use_small_tiles(monkeypatch: pytest.MonkeyPatch, num_heads: int) -> None:
    tiles = replace(latent.latent_tiles(torch.float16, num_heads), tile=16, segment=16)
    monkeypatch.setattr(latent, "latent_tiles", lambda *_: tiles)


@pytest.mark.slow
@pytest.mark.usefixtures("hopper_products")
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
    use_small_tiles(monkeypatch, num_heads)
    rows = prompt_of(LENGTH, num_heads)

    whole = rows((0, LENGTH))
    assert whole.isfinite().all()
    wanted = torch.cat([whole[first:last] for first, last in chunks])
    assert torch.equal(rows(*chunks), wanted)
    assert torch.equal(torch.cat([rows(chunk) for chunk in chunks]), wanted)


@pytest.mark.usefixtures("hopper_products")
@pytest.mark.parametrize("num_tokens", [3, pytest.param(40, marks=pytest.mark.matrix)])
def test_rows_without_context_are_zero_and_leave_others_alone(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_tiles(monkeypatch, 3)
    args = latent_inputs(
        [1, 2, num_tokens], [42, 9, 0], 3, (32, 16), dtype=torch.float16, device=CPU
    )
    found = latent_attention(*args)
    assert torch.equal(found[:3], latent_attention(*without_last_request(args)))
    assert not found[3:].any()


@pytest.mark.matrix
@pytest.mark.usefixtures("hopper_products")
@pytest.mark.parametrize("num_heads", [2, 32])
def test_shipped_tiles_give_chunks_and_single_tokens_equal_bits(num_heads: int) -> None:
    rows = prompt_of(1060, num_heads)
    chunk = rows((1022, 1060))
    singles = [1022, 1023, 1024, 1059]
    assert torch.equal(rows(*((t, t + 1) for t in singles)), chunk[[t - 1022 for t in singles]])


def test_wide_latents_are_refused() -> None:
    args = latent_inputs([1], [9], 2, (640, 64), dtype=torch.float16, device=CPU)
    with pytest.raises(NotTakenError, match="at most 512"):
        latent_attention(*args)
