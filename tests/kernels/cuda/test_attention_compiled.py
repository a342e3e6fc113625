"""What attention becomes on Hopper, at real sizes: registers, spills, instructions, wide loads."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from pdserve.kernels.cuda.attention import paged_attention
from pdserve.kernels.cuda.latent import latent_attention
from pdserve.kernels.reference.attention import AttentionForm
from tests.kernels.cuda import gate

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Wanted:
    """What the main kernel of a call takes at most, and has at least, under Triton 3.6 and 3.7.

    Attributes:
        registers: Of a thread.
        shared: KiB of a program.
        programs: That run on one SM at once.
        opcode: What multiplies.
        spilled: Bytes of a thread.
    """

    registers: int
    shared: int
    programs: int
    opcode: str
    spilled: int = 0


HMMA, HGMMA, FMA = "HMMA.16816.F32.BF16", "HGMMA.64x", "FFMA"
ROWS = {
    "tokens": Wanted(192, 70, 2, HMMA),
    "prompt": Wanted(168, 161, 1, HGMMA, 8),
    "prompt, heads of 64": Wanted(168, 83, 1, HGMMA),
    "prompt, over 2^31 rows": Wanted(255, 128, 1, HGMMA, 24),
    "tokens, blocks of 16": Wanted(160, 70, 3, HMMA),
    "prompt, blocks of 16": Wanted(255, 128, 1, HGMMA, 24),
    "tokens, windowed": Wanted(192, 70, 2, HMMA),
    "prompt, windowed": Wanted(255, 128, 1, HGMMA, 16),
    "tokens, sinks": Wanted(112, 36, 4, HMMA),
    "prompt, sinks": Wanted(192, 64, 1, HGMMA),
    "tokens, wide": Wanted(216, 74, 2, HMMA),
    "prompt, wide": Wanted(255, 160, 1, HGMMA, 200),
    "tokens, wide, windowed": Wanted(255, 74, 2, HMMA),
    "prompt, wide, windowed": Wanted(255, 160, 1, HGMMA, 168),
    "tokens, fp32": Wanted(96, 42, 5, FMA),
    "prompt, fp32": Wanted(255, 52, 2, FMA, 936),
    "tokens, wide, fp32": Wanted(128, 80, 2, FMA, 5248),
    "prompt, wide, fp32": Wanted(128, 80, 2, FMA, 48),
    "latents, 16 heads": Wanted(176, 91, 1, HMMA),
    "latents, 32 heads": Wanted(200, 74, 1, HMMA),
    "latents, 128 heads": Wanted(255, 144, 1, HGMMA, 8),
    "latents, prompt": Wanted(255, 74, 1, HMMA, 48),
    "latents, prompt, 128 heads": Wanted(255, 74, 1, HMMA, 8),
    "latents, fp32": Wanted(160, 108, 1, FMA),
    "latents, prompt, fp32": Wanted(184, 108, 1, FMA),
}
"""What prompts spill is of what is merged between segments."""

APART = ("prompt", "prompt, heads of 64")


def tensor(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attention(
    queries: tuple[int, int],
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    *,
    block_size: int = 64,
    num_blocks: int = 100,
    window: int | None = None,
    sinks: bool = False,
    dtype: torch.dtype = BF16,
) -> object:
    """Attend so many tokens of so many requests."""
    num_tokens, num_requests = queries
    layer = tensor(num_blocks, 32, 2, heads[1], block_size, head_dim, dtype=dtype)[:, 1]
    q = tensor(num_tokens, heads[0], head_dim, dtype=dtype)
    lengths = tensor(num_requests + 1), tensor(num_requests)
    tables = tensor(num_requests, 128)
    form = AttentionForm(window, tensor(heads[0], dtype=FP32) if sinks else None)
    return paged_attention(q, layer, tables, *lengths, head_dim**-0.5, form)


def latents(queries: tuple[int, int], num_heads: int, dtype: torch.dtype = BF16) -> object:
    """Attend over DeepSeek-V3's latents."""
    num_tokens, num_requests = queries
    q = tensor(num_tokens, num_heads, 576, dtype=dtype)
    layer = tensor(100, 61, 1, 1, 64, 576, dtype=dtype)[:, 1]
    lengths = tensor(num_requests + 1), tensor(num_requests)
    return latent_attention(q, layer, tensor(num_requests, 128), *lengths, 0.07, 512)


def calls() -> gate.Calls:
    """Heads of Llama-3.1-8B, and of gpt-oss and Gemma-2-9B, windowed in turn; latents."""
    tokens, prompt, gemma, oss = (64, 64), (4096, 1), ((16, 8), 256), ((64, 8), 64)
    return {
        "tokens": lambda: attention(tokens),
        "prompt": lambda: attention(prompt),
        "prompt, heads of 64": lambda: attention(prompt, (14, 2), 64, block_size=128),
        "prompt, over 2^31 rows": lambda: attention(prompt, num_blocks=1 << 16),
        "tokens, blocks of 16": lambda: attention(tokens, block_size=16),
        "prompt, blocks of 16": lambda: attention(prompt, block_size=16),
        "tokens, windowed": lambda: attention(tokens, window=4096),
        "prompt, windowed": lambda: attention(prompt, window=4096),
        "tokens, sinks": lambda: attention(tokens, *oss, sinks=True),
        "prompt, sinks": lambda: attention(prompt, *oss, sinks=True),
        "tokens, wide": lambda: attention(tokens, *gemma),
        "prompt, wide": lambda: attention(prompt, *gemma),
        "tokens, wide, windowed": lambda: attention(tokens, *gemma, window=4096),
        "prompt, wide, windowed": lambda: attention(prompt, *gemma, window=4096),
        "tokens, fp32": lambda: attention(tokens, dtype=FP32),
        "prompt, fp32": lambda: attention(prompt, dtype=FP32),
        "tokens, wide, fp32": lambda: attention(tokens, *gemma, dtype=FP32),
        "prompt, wide, fp32": lambda: attention(prompt, *gemma, dtype=FP32),
        "latents, 16 heads": lambda: latents((8, 8), 16),
        "latents, 32 heads": lambda: latents((8, 8), 32),
        "latents, 128 heads": lambda: latents((8, 8), 128),
        "latents, prompt": lambda: latents((2000, 1), 16),
        "latents, prompt, 128 heads": lambda: latents((2000, 1), 128),
        "latents, fp32": lambda: latents((8, 8), 16, FP32),
        "latents, prompt, fp32": lambda: latents((2000, 1), 16, FP32),
    }


@pytest.mark.matrix
def test_what_attention_becomes() -> None:
    for name, (main, *merge) in gate.compiled(f"{__name__}:calls", *ROWS).items():
        wanted = ROWS[name]
        form = "apart" if name in APART else "whole" if "prompt" in name else "split"
        assert main.kernel == f"attend_{form}", name
        assert main.spilled <= wanted.spilled, name
        assert main.registers <= wanted.registers, name
        assert main.shared <= wanted.shared << 10, name
        assert main.programs_per_sm() >= wanted.programs, name
        for opcode in (HMMA, HGMMA):
            assert (main.count(opcode) > 0) == (opcode == wanted.opcode), name
        assert main.count(wanted.opcode) > 0, name
        assert main.copies_of_16_bytes() == main.count("LDGSTS"), name
        if form == "apart":
            assert main.count("UTMALDG.2D") == 4, name
            assert main.count("USETMAXREG.TRY_ALLOC") > 0, name
        else:
            assert main.copies_of_16_bytes() + main.count("LDG.E.128") >= 20, name
        assert main.count("ACQBULK") == main.count("PREEXIT") == 1, name
        assert all(one.kernel == "merge" and one.spilled == 0 for one in merge), name
        assert len(merge) == (form == "split"), name


def test_every_call_of_attention_is_looked_at() -> None:
    assert calls().keys() == ROWS.keys()
