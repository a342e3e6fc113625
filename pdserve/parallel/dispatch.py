"""Brings a step's tokens to the experts they chose, and the results back.

A mixture-of-experts layer computes what *its* experts add to each token (`LocalExperts`), and
gives that function to an `ExpertParallel`, which knows where the other experts are. So the
layer is single-device code, and every way of sharing experts is one class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pdserve.parallel.group import Group
    from pdserve.wire.step import ExpertBalance


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts each token goes to. T tokens, k experts each.

    Attributes:
        expert_ids: `[T, k]` int64, logical: as the checkpoint numbers them.
        weights: `[T, k]` fp32, factors on the experts' results.
    """

    expert_ids: Tensor
    weights: Tensor


class LocalExperts(Protocol):
    """The experts of one layer that lie on this rank."""

    def read(self, local: int) -> Tensor:
        """Return the bytes of the weights of the expert with this local index: `[n]` uint8."""
        ...

    def write(self, local: int, data: Tensor) -> None:
        """Replace an expert's weights by what `read` returned on another rank."""
        ...

    def __call__(self, x: Tensor, local_ids: Tensor, weights: Tensor) -> Tensor:
        """Sum over each token's choices that are here, weighted, in order of the choices.

        Args:
            x: `[N, D]`.
            local_ids: `[N, k]` int64, index among this rank's experts; negative: not here.
            weights: `[N, k]` fp32.

        Returns:
            `[N, D]`, the dtype of `x`; zero for a token none of whose experts is here.
        """
        ...


class ExpertParallel(Protocol):
    """Where the experts of every layer are, and how tokens get there."""

    def local_experts(self, layer: int) -> Sequence[int]:
        """Return the logical id of each expert copy of `layer` on this rank, by local index."""
        ...

    @property
    def slices_experts(self) -> bool:
        """Whether each expert is sliced over the TP group (else it is whole on its rank)."""
        ...

    @property
    def balance(self) -> ExpertBalance | None:
        """How evenly the experts are loaded, if they are balanced; a new object for each change."""
        ...

    def begin_step(self, num_tokens: Sequence[int]) -> None:
        """Begin a forward pass. `num_tokens`: tokens of each DP rank, including this one."""
        ...

    def end_step(self) -> None:
        """End the forward pass: experts may move now. Each rank of the EP group calls it once."""
        ...

    def __call__(
        self, layer: int, x: Tensor, routing: Routing, experts: LocalExperts, partial: Tensor | None
    ) -> Tensor:
        """Run the experts of `layer`, wherever they are.

        Args:
            x: `[T, D]`, equal on every rank of the TP group; T may be 0.
            routing: Equal on every rank of the TP group.
            experts: This rank's.
            partial: `[T, D]`, what this rank adds to a sum over the TP group (a slice of the
                shared experts), or None.

        Returns:
            `[T, D]`, whole, equal on every rank of the TP group.
        """
        ...


class SlicedExperts:
    """Each rank of the TP group has a slice of every expert: one sum, and no tokens to send."""

    slices_experts = True
    balance = None

    def __init__(self, num_experts: int, tp: Group) -> None:
        self._local = range(num_experts)
        self._tp = tp

    def local_experts(self, layer: int) -> Sequence[int]:
        """See `ExpertParallel`."""
        return self._local

    def begin_step(self, num_tokens: Sequence[int]) -> None:
        """See `ExpertParallel`. Nothing is shared with other DP ranks."""

    def end_step(self) -> None:
        """See `ExpertParallel`. Nothing moves."""

    def __call__(
        self, layer: int, x: Tensor, routing: Routing, experts: LocalExperts, partial: Tensor | None
    ) -> Tensor:
        """See `ExpertParallel`."""
        y = experts(x, routing.expert_ids, routing.weights)
        return self._tp.all_reduce(y if partial is None else y + partial)
