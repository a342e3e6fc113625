"""Moves experts between ranks while serving, to even out their load.

The load of each expert is counted over a window of steps. In each interval one layer after another
is planned and its experts are moved, a few after each step, so that no forward pass sees half a
move or waits long. All ranks of the group count the same steps, so they rebalance in the same ones;
the load is summed over them, so they plan the same.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from pdserve.observe.clock import SystemClock
from pdserve.observe.log import log_event
from pdserve.parallel.balance import busiest_and_mean, rebalance
from pdserve.parallel.moves import after, rounds
from pdserve.wire.step import ExpertBalance

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from pdserve.config.schema import EplbConfig
    from pdserve.parallel.dispatch import LocalExperts
    from pdserve.parallel.experts import ExpertPlacement
    from pdserve.parallel.group import Group, World
    from pdserve.parallel.moves import Move

_logger = logging.getLogger(__name__)

_STEP_BYTES = 64 << 20
"""Weights that a rank sends and receives after one step, at most; but at least one expert."""


class Rebalancer:
    """Counts, plans and moves, for the layers of one pipeline stage.

    Attributes:
        placements: Placement of each layer; replaced as experts move.
        stats: For metrics; replaced in `end_step` when it changes.
    """

    def __init__(
        self,
        placements: dict[int, ExpertPlacement],
        world: World,
        config: EplbConfig,
    ) -> None:
        self.placements = placements
        self.stats = ExpertBalance()
        self._ep: Group = world.ep
        # The ranks of a TP group see the same tokens: one of them counts.
        self._may_count = world.tp.is_first
        self._is_counting = False
        self._clock = SystemClock()
        self._rows = {layer: row for row, layer in enumerate(placements)}
        self._num_experts = next(iter(placements.values())).num_experts
        self._interval, self._window = config.step_interval, config.window_size
        self._num_steps = 0
        self._experts: dict[int, LocalExperts] = {}
        self._counts: Tensor | None = None
        self._one: Tensor | None = None
        # A window that is longer than the interval consists of whole intervals.
        self._recent: deque[NDArray[np.int64]] = deque(
            maxlen=max(1, self._window // self._interval)
        )
        self._work: Iterator[int | None] | None = None

    def begin_step(self) -> None:
        """Begin a step; it is counted if it is in the window."""
        since = self._num_steps % self._interval
        self._is_counting = self._may_count and since >= self._interval - self._window

    def count(self, layer: int, expert_ids: Tensor, experts: LocalExperts) -> None:
        """Count the tokens of this DP rank in `layer`.

        Args:
            expert_ids: `[T, k]` int64, logical.
            experts: This rank's experts, which may be moved later.
        """
        self._experts[layer] = experts
        if not self._is_counting:
            return
        if self._counts is None or self._one is None:
            shape = (len(self._rows), self._num_experts)
            self._counts = expert_ids.new_zeros(shape)
            self._one = expert_ids.new_ones(1)
        chosen = expert_ids.flatten()
        self._counts[self._rows[layer]].index_add_(0, chosen, self._one.expand(chosen.shape))

    def end_step(self) -> int | None:
        """Continue rebalancing if it is due; every rank of the group takes part.

        Returns:
            The layer whose placement has changed, if one has.
        """
        self._num_steps += 1
        if self._work is None:
            if self._num_steps % self._interval:
                return None
            self._work = self._rebalance(self._take_counts())
        start_s = self._clock.monotonic_s()
        with torch.inference_mode():
            changed = next(self._work, None)
        took_s = self._clock.monotonic_s() - start_s
        self._note(
            rebalancing_s=self.stats.rebalancing_s + took_s,
            longest_s=max(self.stats.longest_s, took_s),
        )
        return changed

    def _note(self, **changes: float) -> None:
        self.stats = msgspec.structs.replace(self.stats, **changes)

    def _take_counts(self) -> NDArray[np.int64]:
        """Return this rank's counts of each expert's tokens in the window: `[layers, E]`."""
        counts = np.zeros((len(self._rows), self._num_experts), dtype=np.int64)
        if self._counts is not None:
            counts += self._counts.cpu().numpy()
            # An inference tensor, which could not be zeroed in place outside inference mode.
            self._counts = None
        self._recent.append(counts)
        return np.asarray(sum(self._recent), dtype=np.int64)

    def _rebalance(self, counted: NDArray[np.int64]) -> Iterator[int | None]:
        """Go through all layers. Yields, step by step, the layer changed in that step or None."""
        busiest_before = busiest = total_mean = 0.0
        before_it = self.stats
        for layer, row in self._rows.items():
            by_rank = self._ep.gather_ints(counted[row].tolist())
            load = [sum(column) for column in zip(*by_rank, strict=True)]
            current = self.placements[layer]
            wanted = rebalance(current, load)
            before, mean = busiest_and_mean(current, load)
            busiest_before += before
            busiest += busiest_and_mean(wanted, load)[0]
            total_mean += mean
            todo = rounds(current, wanted)
            if not todo:
                yield None
                continue
            experts = self._experts[layer]
            num_bytes = experts.read(0).numel()
            per_step = max(1, _STEP_BYTES // num_bytes)
            for first in range(0, len(todo), per_step):
                for moved in todo[first : first + per_step]:
                    self._carry_out(moved, experts, num_bytes)
                    self.placements[layer] = after(self.placements[layer], moved)
                    self._note(
                        num_moved=self.stats.num_moved + len(moved),
                        moved_bytes=self.stats.moved_bytes + len(moved) * num_bytes,
                    )
                yield layer
        self._work = None
        self._note(num_rebalancings=before_it.num_rebalancings + 1)
        if total_mean:
            self._note(ratio_before=busiest_before / total_mean, balance_ratio=busiest / total_mean)
        if self._ep.is_first:
            stats = self.stats
            log_event(
                _logger,
                "experts rebalanced",
                layers=len(self._rows),
                ratio_before=round(stats.ratio_before, 3),
                ratio_after=round(stats.balance_ratio, 3),
                moved=stats.num_moved - before_it.num_moved,
                moved_mb=round((stats.moved_bytes - before_it.moved_bytes) / 1e6, 1),
                longest_step_ms=round(stats.longest_s * 1e3, 1),
            )

    def _carry_out(self, moved: Sequence[Move], experts: LocalExperts, num_bytes: int) -> None:
        """Send and receive this rank's experts of a round, at most one each way."""
        group = self._ep
        data, local = experts.read(0)[:0], -1
        sent, received = [0] * group.size, [0] * group.size
        for source, target in moved:
            if source.rank == group.index:
                data, sent[target.rank] = experts.read(source.local), num_bytes
            if target.rank == group.index:
                local, received[source.rank] = target.local, num_bytes
        found = group.all_to_all(data, received, sent)
        if local >= 0:
            experts.write(local, found)
