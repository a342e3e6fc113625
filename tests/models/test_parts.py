"""Which part of a model each rank of a TP group has, and how the residual stream is shared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pdserve.errors import ConfigError
from pdserve.kernels.backend import REFERENCE
from pdserve.models.layers.embedding import vocab_rows
from pdserve.models.layers.linear import QKV, ColumnParallel, RowParallel, kv_heads_of
from pdserve.models.layers.parameter import Placement
from pdserve.models.layers.stream import ResidualStream
from pdserve.parallel.group import Group, World
from pdserve.parallel.mesh import Axis, Mesh, MeshShape
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from torch import Tensor


def placements(size: int) -> list[Placement]:
    """One per rank; no rank talks to another."""
    shape, ranks = MeshShape(tp=size), tuple(range(size))
    found = []
    for rank in ranks:
        groups = {axis: Group((rank,), rank) for axis in Axis}
        groups[Axis.TP] = Group(ranks, rank)
        world = World(Mesh(shape, rank), groups)
        found.append(Placement(torch.device("cpu"), torch.float32, REFERENCE, world))
    return found


@pytest.mark.parametrize("vocab_size", [1, 5, 211, 320, 32003])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_id_is_one_ranks(vocab_size: int, size: int) -> None:
    parts = [vocab_rows(vocab_size, p.world.tp) for p in placements(size)]
    assert [i for part in parts for i in part] == list(range(vocab_size))
    each = -(-vocab_size // size)
    assert all(part.start == min(i * each, vocab_size) for i, part in enumerate(parts))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size"),
    [(8, 8, 4), (8, 2, 2), (8, 2, 4), (8, 2, 8), (8, 1, 4), (12, 3, 6), (12, 4, 2), (12, 3, 12)],
)
def test_a_rank_has_the_kv_heads_that_its_query_heads_read(
    num_heads: int, num_kv_heads: int, size: int
) -> None:
    group = num_heads // num_kv_heads
    for placement in placements(size):
        heads = placement.part("num_attention_heads", num_heads)
        kv_heads = kv_heads_of(num_kv_heads, placement)
        assert {head // group for head in heads} == set(kv_heads)
        # The kernels take head h to read KV head h // (heads / KV heads), counted on the rank.
        mine = len(heads) // len(kv_heads)
        assert [kv_heads[i // mine] for i in range(len(heads))] == [h // group for h in heads]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "message"),
    [
        (6, 2, 4, "--tensor-parallel-size is 4, .* model's num_attention_heads of 6.*1, 2, 3, 6"),
        (12, 3, 4, "--tensor-parallel-size is 4, but the model has 3 KV heads .*: use"),
        (12, 4, 6, "--tensor-parallel-size is 6, but the model has 4 KV heads .*: use"),
    ],
)
def test_heads_that_do_not_divide_are_refused(
    num_heads: int, num_kv_heads: int, size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        QKV(64, num_heads, num_kv_heads, head_dim=16, placement=placements(size)[0])


def load(layer: ColumnParallel | RowParallel | QKV, stored: dict[str, Tensor]) -> None:
    for name, slot in layer.slots(""):
        assert slot.shape == tuple(stored[name].shape)
        if slot.load is not None:
            slot.load(stored[name] if slot.region is None else stored[name][slot.region])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_terms_of_all_ranks_sum_to_the_whole_layer(size: int) -> None:
    gate, up, down = torch.randn(12, 8), torch.randn(12, 8), torch.randn(8, 12)
    bias = torch.randn(8)
    x = torch.randn(5, 8)
    total = torch.zeros(5, 8)
    for placement in placements(size):
        first = ColumnParallel(8, {"gate": 12, "up": 12}, placement)
        second = RowParallel(12, "down", 8, placement=placement, bias=True)
        load(first, {"gate.weight": gate, "up.weight": up})
        load(second, {"down.weight": down, "down.bias": bias})
        left, right = first.packed(x).chunk(2, dim=-1)
        total += second.packed(left * right)
    expected = (x @ gate.T * (x @ up.T)) @ down.T + bias
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


def _share(world: World, num_tokens: int) -> dict[str, Tensor]:
    stream = ResidualStream(world.tp, split_from=0)
    whole = torch.arange(num_tokens * 3.0).view(num_tokens, 3) + 1
    shared = stream.share(whole)
    assert shared.shape == (stream.num_rows(num_tokens), 3)
    summed = stream.sum(whole * (world.tp.index + 1))
    gathered = stream.gather(shared, num_tokens)
    return {"shared": shared, "summed": summed, "gathered": gathered}


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 7])
def test_a_split_stream_gathers_and_sums_any_number_of_tokens(num_tokens: int) -> None:
    whole = torch.arange(num_tokens * 3.0).view(num_tokens, 3) + 1
    found = run_ranks(MeshShape(tp=3), _share, num_tokens)
    padded = torch.zeros(-(-num_tokens // 3) * 3, 3)
    padded[:num_tokens] = whole
    assert torch.equal(torch.cat([rank["shared"] for rank in found]), padded)
    assert torch.equal(torch.cat([rank["summed"] for rank in found]), padded * (1 + 2 + 3))
    for rank in found:
        assert torch.equal(rank["gathered"], whole)
