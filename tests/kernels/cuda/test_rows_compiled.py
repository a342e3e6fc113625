"""Norms, activation, rotation, digests, copies, sums over ranks: wide accesses, no spills."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from pdserve.kernels.cuda import activation, digest, gelu, norm, ranks, rope
from pdserve.kernels.cuda.chunks import ChunkCopy, copied
from pdserve.kernels.cuda.launch import without_overlap
from pdserve.kernels.digest import place_keys, word_constants
from tests.kernels.cuda import gate


def calls() -> gate.Calls:
    """Calls of the sizes of Llama-3.1-8B, and of DeepSeek-V3's latents."""

    def of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    places = of(8, dtype=torch.int64)
    table, norms = of(8192, 128, dtype=torch.float32), of(128)
    kv, latents = of(8, 32, 2, 8, 64, 128), of(8, 61, 1, 1, 64, 576)
    spans, keys = of(4, 5, dtype=torch.int64), of(32, 2, 8, dtype=torch.int64)
    constants = of(64, 64, dtype=torch.int32)
    return {
        "rms_norm": lambda: norm.rms_norm(of(8, 4096), of(4096), 1e-5),
        "add_rms_norm": lambda: norm.add_rms_norm(of(8, 4096), of(8, 4096), of(4096), 1e-5),
        "wide_norm": lambda: norm.rms_norm(of(8, 32768), of(32768), 1e-5),
        "silu_and_mul": lambda: activation.silu_and_mul(of(8, 28672)),
        "gelu_and_mul": lambda: gelu.gelu_and_mul(of(8, 28672)),
        "sum_ranks": lambda: ranks.sum_ranks(of(8, 8 * 4096)),
        "rope": lambda: rope.rope_and_cache(
            of(8, 6144), places, table, kv[:, 1], places, None, None, 1e-5
        ),
        "rope_normed": lambda: rope.rope_and_cache(
            of(8, 6144), places, table, kv[:, 1], places, norms, norms, 1e-5
        ),
        "rope_latent": lambda: rope.rope_and_latent(
            of(8, 128, 192),
            of(8, 128, 576),
            of(8, 576),
            places,
            of(8192, 64, dtype=torch.float32),
            latents[:, 1],
            places,
            of(512),
            1e-6,
        ),
        "digests": lambda: digest.digests_on_device(kv, spans, constants, keys, 4),
    }


ROWS = {
    # Registers at most, programs of an SM at least, loads and stores of 16 bytes at least.
    "rms_norm": (48, 5, 4, 2),
    "add_rms_norm": (48, 5, 6, 4),
    "wide_norm": (128, 1, 16, 8),
    "silu_and_mul": (32, 16, 2, 1),
    "gelu_and_mul": (32, 16, 2, 1),
    "sum_ranks": (40, 12, 8, 1),
    "rope": (40, 24, 6, 6),
    "rope_normed": (56, 16, 6, 6),
    "rope_latent": (32, 16, 2, 0),
    "digests": (128, 4, 16, 0),
}


def calls_with_and_without_overlap() -> gate.Calls:
    def in_turn(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            with without_overlap():
                call()

        return run

    return calls() | {f"{name}, in turn": in_turn(call) for name, call in calls().items()}


@cache
def _compiled() -> dict[str, list[gate.Compiled]]:
    return gate.compiled(f"{__name__}:calls_with_and_without_overlap")


def test_every_call_is_looked_at() -> None:
    assert calls().keys() == ROWS.keys()


@pytest.mark.matrix
@pytest.mark.parametrize("name", ROWS)
def test_a_kernel_stays_in_registers_waits_by_itself_and_moves_16_bytes_at_once(name: str) -> None:
    registers, programs, loads, stores = ROWS[name]
    found = _compiled()
    (kernel,) = found[name]
    assert kernel.spilled == 0
    assert kernel.registers <= registers
    assert kernel.programs_per_sm() >= programs
    assert kernel.count("LDG.E.128") >= loads
    assert kernel.count("STG.E.128") >= stores
    overlaps = name not in {"digests", "sum_ranks"}
    assert kernel.count("ACQBULK") == kernel.count("PREEXIT") == overlaps
    (in_turn,) = found[f"{name}, in turn"]
    assert in_turn.count("ACQBULK") == in_turn.count("PREEXIT") == 0


def copies() -> gate.Calls:
    """A chunk of Llama-3.1-8B out of blocks, a layer of some into blocks; latents."""
    pool = torch.empty(1 << 33, dtype=torch.uint8, device="meta")

    def copy(*shape: int, share: slice = slice(None), num_chunks: int = 1) -> ChunkCopy:
        kv = torch.empty(shape, dtype=torch.bfloat16, device="meta")[:, share]
        _, num_layers, num_planes, num_heads, block_size, head_dim = kv.shape
        blocks = torch.zeros(num_chunks, 256 // block_size, dtype=torch.int64)
        starts = torch.zeros(num_chunks, num_heads, dtype=torch.int64)
        keys = place_keys(range(num_layers), num_planes, range(num_heads))
        return ChunkCopy(kv, blocks, pool, starts, word_constants(256, head_dim // 2), keys)

    layer, llama = slice(1, 2), (100, 32, 2, 8, 64, 128)
    small, latent = (400, 32, 2, 8, 16, 128), (100, 61, 1, 1, 64, 576)
    return {
        "save": lambda: copied(copy(*llama), to_pool=True),
        "load": lambda: copied(copy(*llama, share=layer, num_chunks=9), to_pool=False),
        "load, small blocks": lambda: copied(copy(*small, share=layer), to_pool=False),
        "save latents": lambda: copied(copy(*latent), to_pool=True),
    }


@pytest.mark.matrix
def test_copies_move_16_bytes_at_once_and_leave_room_for_steps() -> None:
    for name, (kernel,) in gate.compiled(f"{__name__}:copies").items():
        assert kernel.spilled == 0
        assert kernel.registers <= 72
        assert kernel.shared <= 64
        num_accesses = 2 if name == "load, small blocks" else 4  # of a thread, for a piece
        assert kernel.count("STG.E.128") == num_accesses
        assert kernel.count("LDG.E.128") == 2 * num_accesses  # words and constants
