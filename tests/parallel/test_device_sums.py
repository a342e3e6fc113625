"""What ranks on GPUs ask of NCCL: to move values, and never to add them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import Tensor

from pdserve.kernels.reference.ranks import sum_ranks
from pdserve.parallel import collectives

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS, WIDTH = 4, 1024
NAME = "nccl"


class OnCuda(Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]
    device = torch.device("cuda")  # type: ignore[assignment]


class Nccl:
    """A process group as its first rank sees it, with no calls but those which move values.

    Args:
        parts: Each rank's values, flat.
    """

    def __init__(self, parts: Tensor) -> None:
        self._parts = parts
        self.asked: list[str] = []

    def all_to_all_single(
        self, out: Tensor, x: Tensor, received: object, sent: object, options: object
    ) -> None:
        assert torch.equal(x.flatten(), self._parts[0])
        out.view(RANKS, -1).copy_(self._parts.chunk(RANKS, 1)[0])
        self.asked.append("exchange")

    def all_gather_single(self, out: Tensor, x: Tensor, options: object) -> None:
        theirs = self._parts
        if self.asked:
            theirs = torch.stack([sum_ranks(part) for part in theirs.chunk(RANKS, 1)])
        assert torch.equal(x, theirs[0])
        out.view(RANKS, -1).copy_(theirs)
        self.asked.append("gather")


@pytest.mark.parametrize(
    ("collective", "rows", "asked"),
    [
        (collectives.all_reduce, 8, ["gather"]),
        (collectives.all_reduce, 512, ["exchange", "gather"]),
        (lambda x, name: collectives.reduce_scatter(x, 0, name), 8, ["exchange"]),
    ],
    ids=["all_reduce", "all_reduce of many rows", "reduce_scatter"],
)
def test_ranks_on_gpus_add_by_themselves_in_rank_order(
    collective: Callable[[Tensor, str], Tensor], rows: int, asked: list[str]
) -> None:
    values = torch.randn(RANKS, rows, WIDTH, generator=torch.Generator().manual_seed(rows))
    parts = (values * 2.0 ** torch.arange(RANKS).view(-1, 1, 1)).bfloat16()
    nccl, nothing = Nccl(parts.flatten(1)), cast("Any", None)
    collectives.remember(
        NAME,
        tuple(range(RANKS)),
        device=cast("Any", nccl),
        host=nothing,
        shared=cast("Any", "not on GPUs"),
        sum_ranks=sum_ranks,
    )
    found = collective(parts[0].as_subclass(OnCuda), NAME)
    collectives.forget(NAME)
    assert torch.equal(found, sum_ranks(parts.flatten(1)).view(rows, WIDTH)[: len(found)])
    assert nccl.asked == asked
