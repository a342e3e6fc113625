"""Sizes and allocates the KV memory of a rank, which is one tensor, or two with a draft model.

Every rank of an engine has the same blocks, with its own layers and heads of each; so the rank
with the least room sets their number. Knows bytes and shapes; the scheduler knows what blocks
mean, and a connector where they go.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pdserve.connectors.base import KVLayout
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from pdserve.config.schema import CacheConfig
    from pdserve.models.arch import ModelArch

_CPU_DEFAULT_BYTES = 1 << 30
_CPU_FREE_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Offer:
    """The memory that a device can give for KV.

    Attributes:
        default_bytes: Bytes taken when nothing is configured.
        limit_bytes: Maximum taken where one request needs more than the default.
    """

    default_bytes: int
    limit_bytes: int


def host_offer(*, num_local: int) -> Offer:
    """Return the host's offer, once the weights of all its ranks are loaded.

    1 GiB, and at most this rank's share of half of what is free.

    Args:
        num_local: Number of ranks on this machine.
    """
    limit = int(_free_host_bytes() * _CPU_FREE_SHARE / num_local)
    return Offer(min(_CPU_DEFAULT_BYTES, limit), limit)


def block_size_on(device: torch.device, cache: CacheConfig) -> int:
    """Return the tokens per block on a device.

    The default on CUDA is 64, as larger pieces are copied and loaded faster there.
    """
    return cache.block_size or (64 if device.type == "cuda" else 16)


def layout_of_block(
    arch: ModelArch, dtype: torch.dtype, block_size: int, *, num_layers: int, num_kv_heads: int
) -> KVLayout:
    """Return the layout of a pool of one block.

    Args:
        block_size: Tokens of a block.
        num_layers, num_kv_heads: Of this rank's share of the model.
    """
    return KVLayout(
        num_blocks=1,
        num_layers=num_layers,
        num_planes=2 if arch.mla is None else 1,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=arch.head_dim,
        dtype=str(dtype).removeprefix("torch."),
        dtype_bytes=dtype.itemsize,
    )


@dataclass(frozen=True, slots=True, order=True)
class Supply:
    """KV capacity of one rank; the minimum over an engine's ranks is the scarcest.

    Attributes:
        num_blocks: Blocks that it can hold.
        block_bytes: Size of one block there.
    """

    num_blocks: int
    block_bytes: int


def supply(
    block_bytes: int, cache: CacheConfig, *, per_request: int, max_num_seqs: int, offer: Offer
) -> Supply:
    """Count the blocks that this rank can hold.

    An exact number wins over a size, and a size over the device's offer. The offer is cut
    to what `max_num_seqs` requests of full length could use at once.

    Args:
        block_bytes: Size of a block, including a draft model's KV under the same id.
        per_request: Blocks of a request of maximum length.
    """
    if cache.num_gpu_blocks_override is not None:
        return Supply(cache.num_gpu_blocks_override, block_bytes)
    if cache.kv_cache_memory_bytes is not None:
        return Supply(cache.kv_cache_memory_bytes // block_bytes, block_bytes)
    num_bytes = min(offer.limit_bytes, max(offer.default_bytes, per_request * block_bytes))
    return Supply(min(num_bytes // block_bytes, per_request * max_num_seqs), block_bytes)


def is_sized(cache: CacheConfig) -> bool:
    """Whether the pool's size is configured rather than derived from free memory."""
    return cache.num_gpu_blocks_override is not None or cache.kv_cache_memory_bytes is not None


def require_one_request(
    scarcest: Supply,
    cache: CacheConfig,
    *,
    max_model_len: int,
    block_size: int,
    is_share: bool = False,
) -> None:
    """Refuse a pool that is too small, in the same words on every rank.

    Args:
        scarcest: The smallest supply of all ranks of the engine.
        is_share: Whether nothing is configured and devices give the rest of their share.

    Raises:
        ConfigError: Not even one request of `max_model_len` would fit.
    """
    per_request = blocks_for(max_model_len, block_size)
    if scarcest.num_blocks >= per_request:
        return
    setting = "--kv-cache-memory-bytes"
    if cache.num_gpu_blocks_override is not None:
        setting = "--num-gpu-blocks-override"
    giver = setting if is_sized(cache) else "the free memory"
    flag, remedy = "max-model-len", f"raise {setting}"
    if is_share:
        flag = "gpu-memory-utilization"
        giver = f"what --{flag} {cache.gpu_memory_utilization:g} leaves after weights and steps"
        remedy = (
            f"raise --{flag}, lower --max-num-batched-tokens or --max-num-seqs, or end other "
            "programs on the device"
        )
    if scarcest.num_blocks:
        fitting = scarcest.num_blocks * block_size
        remedy = f"set --max-model-len to at most {fitting}, or {remedy}"
    raise ConfigError(
        f"one request of {max_model_len} tokens needs {per_request} KV blocks "
        f"({per_request * scarcest.block_bytes / (1 << 20):.0f} MiB), but {giver} gives "
        f"{scarcest.num_blocks}: {remedy}",
        param=flag,
    )


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold `num_tokens`."""
    return -(-num_tokens // block_size)


def allocate(layout: KVLayout, device: torch.device) -> Tensor:
    """Allocate and touch the pool, so that no page is first faulted in by a transfer.

    Returns:
        `[num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]`, contiguous,
        zero, starting at a page boundary.

    Raises:
        ConfigError: The device does not have that much.
    """
    num_bytes = layout.num_blocks * layout.block_bytes
    try:
        raw = torch.empty(num_bytes + mmap.PAGESIZE, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise ConfigError(
            f"{num_bytes / (1 << 20):.0f} MiB of KV memory cannot be allocated ({error}): lower "
            "--max-model-len, --kv-cache-memory-bytes or --num-gpu-blocks-override",
            param="kv-cache-memory-bytes",
        ) from None
    start = -raw.data_ptr() % mmap.PAGESIZE
    dtype: torch.dtype = getattr(torch, layout.dtype)
    return (
        raw[start : start + num_bytes]
        .zero_()
        .view(dtype)
        .view(
            layout.num_blocks,
            layout.num_layers,
            layout.num_planes,
            layout.num_kv_heads,
            layout.block_size,
            layout.head_dim,
        )
    )


def _free_host_bytes() -> int:
    """Return the bytes still free on the machine and within its container's limit, if any."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        free = _counters(meminfo).get("MemAvailable:", free >> 10) << 10
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        used = int((group / "memory.current").read_text())
        # Pages of files read once, such as weights, count as used and are given up on demand.
        used -= _counters(group / "memory.stat").get("inactive_file", 0)
        free = min(free, max(0, int(text) - used))
    return free


def _counters(path: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    return {line.split()[0]: int(line.split()[1]) for line in path.read_text().splitlines()}
