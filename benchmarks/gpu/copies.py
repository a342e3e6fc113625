"""Copies of KV blocks: by kernels on the device, by the copy engine to and from the host.

KV as of Llama-3.1-8B in bf16: a block of 16 tokens is 2 MiB, one of 64 tokens 8 MiB. Blocks are in
random order, and a call moves far more than the L2 cache holds. Rates on the device count bytes
read and written; those to and from the host count each byte once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.peaks import copied
from benchmarks.gpu.timing import DEVICE, IS_DRY, Experiments, sized, time_eager
from pdserve.kernels.cuda.copy import EVERYWHERE, gather_blocks, repage, scatter_blocks

LAYERS, HEADS, HEAD_DIM = sized((32, 8, 128), (2, 2, 8))
POOL_TOKENS = sized(16384, 256)
CALL_TOKENS = POOL_TOKENS // 4
HOST_BYTES = sized(256 << 20, 1 << 16)
BOUNDS = sized((EVERYWHERE, 132 * 16, 132 * 4, 32 * 16, 16 * 16), (EVERYWHERE, 4))
MULTIPROCESSOR_PROGRAMS = 16


def pool(num_tokens: int, block_size: int) -> Tensor:
    """Return random KV memory, ``[blocks, L, 2, H, block_size, Dh]``."""
    shape = num_tokens // block_size, LAYERS, 2, HEADS, block_size, HEAD_DIM
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def shuffled(num_blocks: int, count: int) -> Tensor:
    """Return the ids of ``count`` blocks in random order."""
    return torch.randperm(num_blocks, device=DEVICE)[:count].to(torch.int32)


def shares(kv: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield views of the pool that are copied: everything, halves of it, a layer."""
    yield "blocks", kv
    yield "half of the heads", kv[:, :, :, : HEADS // 2]
    yield "a head", kv[:, :, :, :1]
    yield "a layer", kv[:, 1:2]


def gathered(kv: Tensor, block_size: int, max_programs: int) -> dict[str, Any]:
    """Gather a quarter of the blocks of a view, and scatter them."""
    ids = shuffled(len(kv), CALL_TOKENS // block_size)
    staging = torch.empty_like(kv[: len(ids)], memory_format=torch.contiguous_format)
    moved = 2 * staging.nbytes
    timing = time_eager(lambda _: gather_blocks(kv, ids, staging, max_programs=max_programs))
    assert torch.equal(staging, kv[ids.long()]), "what was gathered is wrong"
    back = time_eager(lambda _: scatter_blocks(staging, kv, ids, max_programs=max_programs))
    assert torch.equal(staging, kv[ids.long()]), "what was scattered is wrong"
    return {
        "mib": staging.nbytes / (1 << 20),
        "gather": timing.row(gb_per_s=timing.gb_per_s(moved)),
        "scatter": back.row(gb_per_s=back.gb_per_s(moved)),
    }


def gathered_by_torch(kv: Tensor, block_size: int) -> dict[str, Any]:
    """The same by index_select."""
    ids = shuffled(len(kv), CALL_TOKENS // block_size)
    staging = torch.empty_like(kv[: len(ids)])
    timing = time_eager(lambda _: torch.index_select(kv, 0, ids, out=staging))
    return timing.row(gb_per_s=timing.gb_per_s(2 * staging.nbytes))


def repaged(from_size: int, to_size: int) -> dict[str, Any]:
    """Move tokens to blocks of another size."""
    source, target = pool(POOL_TOKENS // 2, from_size), pool(POOL_TOKENS // 2, to_size)
    from_ids = shuffled(len(source), CALL_TOKENS // from_size)
    to_ids = shuffled(len(target), CALL_TOKENS // to_size)
    timing = time_eager(lambda _: repage(source, from_ids, target, to_ids, CALL_TOKENS))

    def tokens(kv: Tensor, ids: Tensor) -> Tensor:
        return kv[:, 1, :, 1][ids.long()].movedim(2, 1).flatten(0, 1)

    assert torch.equal(tokens(source, from_ids), tokens(target, to_ids)), "a token is wrong"
    moved = 2 * source[0].nbytes * len(from_ids)
    return timing.row(gb_per_s=timing.gb_per_s(moved))


def by_engine(piece_bytes: int, *, to_host: bool) -> dict[str, Any]:
    """Copy pieces, one after another, between pinned memory and random places of the device."""
    host = torch.empty(HOST_BYTES // 4, dtype=torch.int32, pin_memory=not IS_DRY)
    device = torch.randint(-(1 << 31), 1 << 31, (len(host),), dtype=torch.int32, device=DEVICE)
    host.copy_(device)
    words = piece_bytes // 4
    order = torch.randperm(len(host) // words).tolist()
    on_host = host[: len(order) * words].split(words)
    on_device = device[: len(order) * words].split(words)
    sources, targets = (on_device, on_host) if to_host else (on_host, on_device)
    pairs = [(targets[i], sources[at]) for i, at in enumerate(order)]

    def call(_: int) -> None:
        for target, source in pairs:
            target.copy_(source, non_blocking=True)

    timing = time_eager(call, budget_s=0.5)
    moved = len(order) * piece_bytes
    return timing.row(gb_per_s=timing.gb_per_s(moved), us_each=round(timing.us / len(order), 2))


def to_pinned(block_size: int, max_programs: int) -> dict[str, Any]:
    """Have a kernel gather a share of the heads straight into pinned memory of the host."""
    kv = pool(POOL_TOKENS, block_size)[:, :, :, : HEADS // 2]
    ids = shuffled(len(kv), CALL_TOKENS // block_size // 4)
    shape = (len(ids), *kv.shape[1:])
    staging = torch.empty(shape, dtype=kv.dtype, pin_memory=not IS_DRY)
    timing = time_eager(lambda _: gather_blocks(kv, ids, staging, max_programs=max_programs))
    assert torch.equal(staging, kv[ids.long()].cpu()), "what arrived is wrong"
    return timing.row(gb_per_s=timing.gb_per_s(staging.nbytes))


def run(limit_s: float) -> dict[str, Any]:
    """Run the part."""
    experiments = Experiments("copies", limit_s)

    def each(name: str, experiment: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        experiments.run(name, lambda: experiment(*args, **kwargs))

    each("copy", copied)
    for size in sized((16, 64), (4, 16)):
        kv = pool(POOL_TOKENS, size)
        for share, view in shares(kv):
            each(f"block {size}: {share}", gathered, view, size, EVERYWHERE)
        each(f"block {size}: index_select", gathered_by_torch, kv, size)
        for bound in BOUNDS[1:]:
            each(f"block {size}: blocks, {bound} programs", gathered, kv, size, bound)
        del kv, view
    small, large = sized((16, 64), (4, 16))
    each(f"repage {small} to {large}", repaged, small, large)
    each(f"repage {large} to {small}", repaged, large, small)
    for piece in sized((64 << 10, 256 << 10, 2 << 20, 8 << 20), (4096,)):
        for to_host in (True, False):
            name = f"engine, {piece >> 10} KiB {'to' if to_host else 'from'} the host"
            each(name, by_engine, piece, to_host=to_host)
    for bound in sized((8 * MULTIPROCESSOR_PROGRAMS, 32 * MULTIPROCESSOR_PROGRAMS), (4,)):
        each(f"kernel to the host, {bound} programs", to_pinned, small, bound)
    return experiments.results
