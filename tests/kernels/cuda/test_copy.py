"""KV blocks arrive whole, whatever views they are copied between; nothing else is written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdserve.kernels.cuda.copy import gather_blocks, repage, scatter_blocks

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.uint8)


def pool(num_blocks: int, block_size: int, *, dtype: torch.dtype = torch.float16) -> Tensor:
    shape = num_blocks, 3, 2, 4, block_size, 8
    generator = torch.Generator().manual_seed(num_blocks)
    return torch.randint(0, 200, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("programs", [1, 7, 1000])
def test_blocks_are_gathered_and_scattered(dtype: torch.dtype, programs: int) -> None:
    kv, ids = pool(7, 4, dtype=dtype), torch.tensor([5, 0, 3])
    staging = torch.full_like(kv[:3], 255)
    gather_blocks(kv, ids, staging, max_programs=programs)
    assert torch.equal(staging, kv[ids])
    other = torch.full_like(kv, 255)
    scatter_blocks(staging, other, ids.int(), max_programs=programs)
    wanted = torch.full_like(kv, 255)
    wanted[ids] = kv[ids]
    assert torch.equal(other, wanted)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param((slice(None), slice(1, 2)), id="a layer"),
        pytest.param((slice(None), slice(1, 3), slice(None), slice(2, 4)), id="a share of heads"),
        pytest.param((slice(None), slice(None), slice(1, 2)), id="a plane"),
    ],
)
def test_a_share_of_blocks_is_scattered_and_the_rest_left_alone(view: tuple[slice, ...]) -> None:
    kv, ids = pool(6, 4), torch.tensor([4, 1])
    wanted = kv.clone()
    staging = torch.full_like(kv[view][:2], 201).contiguous()
    wanted[view][ids] = staging
    scatter_blocks(staging, kv[view], ids)
    assert torch.equal(kv, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [0, 3, 13, 16, 40])
@pytest.mark.parametrize(("from_size", "to_size"), [(4, 16), (16, 4), (8, 8)])
def test_tokens_move_to_blocks_of_another_size(
    from_size: int, to_size: int, num_tokens: int
) -> None:
    source, target = pool(12, from_size), pool(13, to_size).fill_(255)
    from_ids = torch.randperm(12)[: -(-48 // from_size)]
    to_ids = torch.randperm(13)[: -(-48 // to_size)].int()
    repage(source, from_ids, target, to_ids, num_tokens)
    for token in range(num_tokens):
        wanted = source[from_ids[token // from_size], :, :, :, token % from_size]
        found = target[to_ids[token // to_size], :, :, :, token % to_size]
        assert torch.equal(found, wanted)
    whole = -(-num_tokens // min(from_size, to_size)) * min(from_size, to_size)
    untouched = torch.ones(13, to_size, dtype=torch.bool)
    for token in range(whole):
        untouched[to_ids[token // to_size], token % to_size] = False
    assert (target.movedim(4, 1)[untouched] == 255).all()


def test_what_does_not_fit_is_refused() -> None:
    ids = torch.tensor([0, 1])
    with pytest.raises(TypeError, match="cannot copy"):
        gather_blocks(pool(3, 4), ids, pool(2, 4, dtype=torch.float32))
    with pytest.raises(TypeError, match="side by side"):
        gather_blocks(pool(3, 4)[..., :6], ids, pool(2, 4)[..., :6])
    with pytest.raises(TypeError, match="no runs"):
        repage(pool(3, 4), ids, pool(2, 6), ids, 4)
    with pytest.raises(ValueError, match="9 tokens are not in 8"):
        repage(pool(3, 4), ids, pool(2, 16), ids, 9)
