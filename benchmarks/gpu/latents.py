"""Latent attention of DeepSeek-V3's shape; a part of `benchmarks.gpu attention`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.gpu.timing import DEVICE, num_rotated, sized, time_eager, time_in_graph
from pdserve.kernels.cases.latent import latent_inputs
from pdserve.kernels.cuda.latent import latent_attention
from pdserve.kernels.reference import mla

DTYPE = sized(torch.bfloat16, torch.float16)
BLOCK_SIZE = 64


def decode(num_requests: int, context: int, num_heads: int) -> dict[str, Any]:
    """Time single tokens over DeepSeek-V3's latents, as shares of reading them once."""
    dims = sized((512, 64), (32, 16))
    num_bytes = num_requests * context * sum(dims) * DTYPE.itemsize
    sets = [
        latent_inputs(
            [1] * num_requests,
            [context] * num_requests,
            num_heads,
            dims,
            dtype=DTYPE,
            device=DEVICE,
            block_size=BLOCK_SIZE,
        )
        for _ in range(min(3, num_rotated(num_bytes)))
    ]
    error = (latent_attention(*sets[0]) - mla.latent_attention(*sets[0])).abs().max().item()
    timing = time_in_graph(lambda i: latent_attention(*sets[i % len(sets)]))
    return timing.row(gb_per_s=timing.gb_per_s(num_bytes), error=error, sets=len(sets))


def prefill() -> dict[str, Any]:
    """Time a prompt over latents."""
    length, num_heads, dims = sized((4096, 16, (512, 64)), (70, 4, (32, 16)))
    args = latent_inputs(
        [length], [length], num_heads, dims, dtype=DTYPE, device=DEVICE, block_size=BLOCK_SIZE
    )
    timing = time_eager(lambda _: latent_attention(*args), budget_s=0.1)
    num_flops = num_heads * (2 * dims[0] + dims[1]) * length * (length + 1)
    return timing.row(tflop_per_s=timing.tflop_per_s(num_flops))


LATENTS = {
    **{
        "{} x {}, {} heads".format(*of): partial(decode, *of)
        for of in sized([(8, 8192, 16), (64, 2048, 16), (8, 8192, 128)], [(2, 70, 4)])
    },
    "prompt": prefill,
}
"""Name -> experiment; names hold requests, the context of each, and heads."""
