"""Copies between KV blocks and the host's memory: by kernels that digest them, by the copy engine.

KV as of Llama-3.1-8B in bf16: a chunk of 256 tokens is 32 MiB, in one layer 1 MiB. A save takes one
chunk with all its layers, a load one layer of many chunks. Blocks are in random order. Rates count
each byte once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.peaks import copied as copied_by_device
from benchmarks.gpu.timing import DEVICE, IS_DRY, Experiments, sized, time_eager
from pdserve.kernels.cuda.chunks import MAX_PROGRAMS, ChunkCopy, copied
from pdserve.kernels.digest import place_keys, word_constants
from pdserve.kernels.reference.chunks import gather_chunks

LAYERS, HEADS, HEAD_DIM = sized((32, 8, 128), (2, 2, 8))
CHUNK = sized(256, 16)
NUM_CHUNKS = sized(16, 2)
HOST_BYTES = sized(256 << 20, 1 << 16)
BOUNDS = sized((8, 16, 32, 64), (4,))


def chunks(block_size: int, num_chunks: int, layers: slice) -> ChunkCopy:
    """Return arguments: some layers of chunks, and a pool of their size in pinned memory."""
    each = CHUNK // block_size
    shape = 4 * num_chunks * each, LAYERS, 2, HEADS, block_size, HEAD_DIM
    kv = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)[:, layers]
    blocks = torch.randperm(len(kv))[: num_chunks * each].view(num_chunks, each)
    size = kv[0, :, :, 0].nbytes * each
    starts = torch.arange(num_chunks * HEADS).view(num_chunks, HEADS) * size
    pool = torch.zeros(num_chunks * HEADS * size, dtype=torch.uint8, pin_memory=not IS_DRY)
    keys = place_keys(range(kv.shape[1]), 2, range(HEADS))
    return ChunkCopy(kv, blocks, pool, starts, word_constants(CHUNK, HEAD_DIM // 2), keys)


def by_kernel(copy: ChunkCopy, max_programs: int) -> dict[str, Any]:
    """Save chunks, and load them."""

    def call(to_pool: bool) -> torch.Tensor:
        return copied(copy, to_pool=to_pool, max_programs=max_programs)

    copy.pool.zero_()
    found = call(True).cpu()
    saved = copy.pool.clone()
    assert torch.equal(found, gather_chunks(*copy)), "digests are wrong"
    assert torch.equal(saved, copy.pool), "what was saved is wrong"
    save = time_eager(lambda _: call(True))
    load = time_eager(lambda _: call(False))
    num_bytes = copy.pool.nbytes
    return {
        "mib": num_bytes / (1 << 20),
        "save": save.row(gb_per_s=save.gb_per_s(num_bytes)),
        "load": load.row(gb_per_s=load.gb_per_s(num_bytes)),
    }


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


def run(limit_s: float) -> dict[str, Any]:
    """Run the part."""
    experiments = Experiments("copies", limit_s)

    def each(name: str, experiment: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        experiments.run(name, lambda: experiment(*args, **kwargs))

    each("copy", copied_by_device)
    for size in sized((16, 64), (4, 16)):
        chunk, layer = chunks(size, 1, slice(None)), chunks(size, NUM_CHUNKS, slice(1, 2))
        for bound in BOUNDS if size == sized(64, 16) else (MAX_PROGRAMS,):
            how = "as shipped" if bound == MAX_PROGRAMS else f"{bound} programs"
            each(f"chunks, {how}: block {size}, one", by_kernel, chunk, bound)
            each(f"chunks, {how}: block {size}, a layer", by_kernel, layer, bound)
    for piece in sized((64 << 10, 256 << 10, 2 << 20, 8 << 20), (4096,)):
        for to_host in (True, False):
            name = f"engine, {piece >> 10} KiB {'to' if to_host else 'from'} the host"
            each(name, by_engine, piece, to_host=to_host)
    return experiments.results
