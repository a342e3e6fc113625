"""Whole experts on one or several ranks each, and the tokens sent to them.

Two ways of bringing tokens to experts. `GatheredTokens`: every rank sees every token and adds the
results of its own experts. `RoutedTokens`: the ranks of a TP group share its tokens, and each sends
a token to the ranks of its experts alone, once per rank.

A token's result does not depend on the other tokens of the step: its copies of experts are chosen
by its own contents, and its results are summed in the order of the ranks, at least in fp32. (The
order of an all-reduce is that of `pdserve.parallel.collectives`.)
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

import torch

from pdserve.errors import InternalError
from pdserve.parallel.dispatch import SlicedExperts
from pdserve.parallel.experts import place
from pdserve.parallel.rebalancing import Rebalancer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pdserve.config.schema import ParallelConfig
    from pdserve.parallel.dispatch import ExpertParallel, LocalExperts, Routing
    from pdserve.parallel.experts import ExpertPlacement
    from pdserve.parallel.group import World
    from pdserve.wire.ids import EngineId
    from pdserve.wire.step import ExpertBalance

# Where ranks have about as many tokens, an all-gather of padded ones takes half the time of an
# all-to-all; where one has 512 and another 8, half as much again (two ranks, shared memory).
_MAX_PADDING = 1.5
_KEY_ELEMENTS = 8


class _Map:
    """Where the experts of a layer are, for lookups by tensors.

    A *slot* numbers the copies of all ranks: rank x width + local index.

    Attributes:
        width: Slots per rank.
    """

    def __init__(self, placement: ExpertPlacement, rank: int, device: torch.device) -> None:
        self.width = placement.max_local
        counts, at_rank, local = placement.copies
        self._num_columns = int(counts.max())
        self._factors = torch.empty(0)
        self._counts = torch.from_numpy(counts).to(device)
        self._slots = torch.from_numpy(at_rank * self.width + local).flatten().to(device)
        self._here = torch.full((placement.num_ranks * self.width,), -1, device=device)
        first = rank * self.width
        self._here[first : first + self.width] = torch.arange(self.width, device=device)
        self._local = self.here(self._slots)

    def slots(self, x: Tensor, expert_ids: Tensor) -> Tensor:
        """Return the slots `[T, k]` of the copies that the tokens `x` `[T, D]` go to."""
        return self._slots[self._choose(x, expert_ids)]

    def local(self, x: Tensor, expert_ids: Tensor) -> Tensor:
        """Return their local indices `[T, k]` on this rank, -1 for those elsewhere."""
        return self._local[self._choose(x, expert_ids)]

    def here(self, slots: Tensor) -> Tensor:
        """Return the local indices of `slots` on this rank, -1 for those elsewhere."""
        return self._here[slots]

    def _choose(self, x: Tensor, expert_ids: Tensor) -> Tensor:
        if self._num_columns == 1:
            return expert_ids
        copy: Tensor = (self._keys(x) + expert_ids) % self._counts[expert_ids]
        return expert_ids * self._num_columns + copy

    def _keys(self, x: Tensor) -> Tensor:
        """Return a number per token `[T, 1]` from its own bits: equal tokens have equal numbers."""
        words = x[:, :_KEY_ELEMENTS].contiguous().view(torch.int16).to(torch.int64)
        if len(self._factors) != words.shape[1]:
            # Odd, so that every word's last bit counts; and 1, so that all remainders occur.
            self._factors = torch.arange(1, 2 * words.shape[1], 2, device=x.device)
        return (words * self._factors).sum(dim=1, keepdim=True)


class PlacedExperts(abc.ABC):
    """The common part of both ways: maps, balancing, and the sum over the TP group at the end."""

    slices_experts = False

    def __init__(
        self,
        placements: dict[int, ExpertPlacement],
        world: World,
        rebalancer: Rebalancer | None = None,
    ) -> None:
        self._placements = placements
        self._rebalancer = rebalancer
        self._tp, self._dp, self._ep = world.tp, world.dp, world.ep
        self._num_tokens: list[int] = []
        self._maps: dict[int, _Map] = {}

    @property
    def balance(self) -> ExpertBalance | None:
        """See `ExpertParallel`."""
        return None if self._rebalancer is None else self._rebalancer.stats

    def local_experts(self, layer: int) -> Sequence[int]:
        """See `ExpertParallel`."""
        return self._placements[layer].ranks[self._ep.index]

    def begin_step(self, num_tokens: Sequence[int]) -> None:
        """See `ExpertParallel`."""
        self._num_tokens = list(num_tokens)
        if self._rebalancer is not None:
            self._rebalancer.begin_step()

    def end_step(self) -> None:
        """See `ExpertParallel`. Where experts are balanced, some may be moved here."""
        if self._rebalancer is not None:
            changed = self._rebalancer.end_step()
            if changed is not None:
                self._maps.pop(changed, None)

    def __call__(
        self, layer: int, x: Tensor, routing: Routing, experts: LocalExperts, partial: Tensor | None
    ) -> Tensor:
        """See `ExpertParallel`."""
        if self._rebalancer is not None:
            self._rebalancer.count(layer, routing.expert_ids, experts)
        if not self._any_tokens(x):
            return x
        where = self._maps.get(layer)
        if where is None:
            where = _Map(self._placements[layer], self._ep.index, x.device)
            self._maps[layer] = where
        return self._run(where, x, routing, experts, partial)

    @abc.abstractmethod
    def _run(
        self,
        where: _Map,
        x: Tensor,
        routing: Routing,
        experts: LocalExperts,
        partial: Tensor | None,
    ) -> Tensor:
        """As `__call__`, with at least one token on some rank."""

    def _any_tokens(self, x: Tensor) -> bool:
        """Whether any rank has tokens; all answer alike."""
        if self._dp.size == 1:
            return len(x) > 0
        if len(self._num_tokens) != self._dp.size or self._num_tokens[self._dp.index] != len(x):
            raise InternalError(
                f"DP rank {self._dp.index} has {len(x)} tokens, the step began with "
                f"{self._num_tokens}"
            )
        return any(self._num_tokens)

    def _share(self, num_tokens: int, index: int) -> slice:
        """Return the tokens of a TP group that its `index`-th rank handles.

        All shares but the last ones are equal, so that they need no reordering once gathered.
        """
        size = -(-num_tokens // self._tp.size)
        return slice(min(index * size, num_tokens), min((index + 1) * size, num_tokens))

    def _whole(self, share: Tensor, num_tokens: int, partial: Tensor | None) -> Tensor:
        """Return the layer's result, on all TP ranks, from this rank's share of the results."""
        own = self._share(num_tokens, self._tp.index)
        if partial is not None:
            result = partial.clone()
            result[own] += share
            return self._tp.all_reduce(result) if num_tokens else result
        if self._tp.size == 1 or not num_tokens:
            return share
        padded = share.new_zeros((-(-num_tokens // self._tp.size), *share.shape[1:]))
        padded[: len(share)] = share
        return self._tp.all_gather(padded)[:num_tokens]


class GatheredTokens(PlacedExperts):
    """Every rank runs its experts over the tokens of all DP ranks."""

    def _run(
        self,
        where: _Map,
        x: Tensor,
        routing: Routing,
        experts: LocalExperts,
        partial: Tensor | None,
    ) -> Tensor:
        if self._dp.size == 1:
            y = experts(x, where.local(x, routing.expert_ids), routing.weights)
            return self._tp.all_reduce(y if partial is None else y + partial)
        counts = self._num_tokens
        rows = _pack(x, where.slots(x, routing.expert_ids), routing.weights)
        everyones, slots, weights = _unpack(self._gather(rows), x, routing.weights)
        y = experts(everyones, where.here(slots), weights)
        shares = [
            share.stop - share.start
            for num_tokens in counts
            for share in (self._share(num_tokens, index) for index in range(self._tp.size))
        ]
        own = shares[self._ep.index]
        found = self._ep.all_to_all(y, [own] * self._ep.size, shares)
        first, *others = found.view(self._ep.size, own, *x.shape[1:])
        total = first.to(_sum_dtype(x), copy=True)
        for part in others:
            total += part
        return self._whole(total.to(x.dtype), len(x), partial)

    def _gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all DP ranks, in rank order."""
        counts, num_ranks = self._num_tokens, self._dp.size
        longest = max(counts)
        if longest * num_ranks > _MAX_PADDING * sum(counts):
            return self._dp.all_to_all(rows.repeat(num_ranks, 1), counts, [len(rows)] * num_ranks)
        if longest * num_ranks == sum(counts):
            return self._dp.all_gather(rows)
        padded = torch.nn.functional.pad(rows, (0, 0, 0, longest - len(rows)))
        found = self._dp.all_gather(padded)
        parts = torch.split(found, longest)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


class RoutedTokens(PlacedExperts):
    """Each token travels to the ranks of its experts, and back."""

    def _run(
        self,
        where: _Map,
        x: Tensor,
        routing: Routing,
        experts: LocalExperts,
        partial: Tensor | None,
    ) -> Tensor:
        own = self._share(len(x), self._tp.index)
        mine = x[own]
        slots = where.slots(mine, routing.expert_ids[own])
        goes_to = torch.zeros((len(mine), self._ep.size), dtype=torch.bool, device=x.device)
        goes_to.scatter_(1, slots // where.width, True)
        sent = goes_to.sum(dim=0).tolist()
        received = [counts[self._ep.index] for counts in self._ep.gather_ints(sent)]
        # By rank, then by token.
        tokens = goes_to.t().nonzero()[:, 1]
        rows = _pack(mine, slots, routing.weights[own])[tokens]
        rows = self._ep.all_to_all(rows, received, sent)
        received_rows, received_slots, weights = _unpack(rows, x, routing.weights)
        y = experts(received_rows, where.here(received_slots), weights)
        found = self._ep.all_to_all(y, sent, received)
        total = torch.zeros(mine.shape, dtype=_sum_dtype(x), device=x.device)
        for part, of_tokens in zip(
            torch.split(found, sent), torch.split(tokens, sent), strict=True
        ):
            # Each token occurs once, so the order of threads does not matter.
            total.index_add_(0, of_tokens, part.to(total.dtype))
        return self._whole(total.to(x.dtype), len(x), partial)


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _pack(x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """Pack tokens with their choices as bytes: one message instead of three.

    Returns:
        `[T, n]` uint8.
    """
    columns = (x, weights, slots.to(torch.int32))
    return torch.cat([column.contiguous().view(torch.uint8) for column in columns], dim=1)


def _unpack(rows: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, slots and weights of `_pack`; `x` and `weights` give widths and dtypes."""
    num_choices = weights.shape[1]
    sizes = [x.shape[1] * x.itemsize, num_choices * weights.itemsize, num_choices * 4]
    tokens, factors, slots = (column.contiguous() for column in torch.split(rows, sizes, dim=1))
    return (
        tokens.view(x.dtype),
        slots.view(torch.int32).to(torch.int64),
        factors.view(weights.dtype),
    )


def make(
    moe_layers: Sequence[int], num_experts: int, parallel: ParallelConfig, world: World
) -> ExpertParallel:
    """Return the way of sharing experts that the settings choose.

    Args:
        moe_layers: Layers of this rank's pipeline stage that have experts.

    Raises:
        ConfigError: The experts, or their copies, cannot be placed on so many ranks.
    """
    if not parallel.enable_expert_parallel:
        if world.dp.size > 1:
            raise InternalError(f"{world.dp.size} DP ranks are in one world and share no experts")
        return SlicedExperts(num_experts, world.tp)
    placement = place(
        num_experts,
        world.ep.size,
        strategy=parallel.expert_placement_strategy,
        num_redundant=parallel.eplb.num_redundant_experts,
    )
    if world.ep.size == 1 or not moe_layers:
        return SlicedExperts(num_experts, world.tp)
    placements = dict.fromkeys(moe_layers, placement)
    rebalancer = Rebalancer(placements, world, parallel.eplb) if parallel.enable_eplb else None
    kind = RoutedTokens if parallel.all2all_backend == "all_to_all" else GatheredTokens
    return kind(placements, world, rebalancer)


def where_they_lie(parallel: ParallelConfig, world: World, engine_id: EngineId) -> str:
    """Describe how a model's experts are shared, as far as sums depend on it; "" if sliced.

    Balanced experts lie in no two engines alike, as each moves them with its own load.
    """
    if not parallel.enable_expert_parallel or world.ep.size == 1:
        return ""
    strategy, backend = parallel.expert_placement_strategy, parallel.all2all_backend
    lie = f"{strategy} on {world.ep.size} ranks by {backend}"
    num_redundant = parallel.eplb.num_redundant_experts
    if not parallel.enable_eplb:
        return lie
    return f"{lie}, balanced with {num_redundant} redundant by the load of {engine_id}"
