"""Mixture of experts with the norm before it: router, shared experts, routed experts.

It is written as for one device: the placement's `ExpertParallel` handles where experts are, how
tokens reach them, and every sum over ranks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from pdserve.kernels.reference.activation import ClampedGlu
from pdserve.kernels.reference.moe import ExpertForm, RoutingRule
from pdserve.models.arch import GroupScore, Scoring
from pdserve.models.layers.linear import ColumnParallel, Linear, RowParallel
from pdserve.models.layers.norm import RMSNorm
from pdserve.models.layers.parameter import Parameter
from pdserve.models.slots import Keep, Slot
from pdserve.parallel.dispatch import Routing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from pdserve.kernels.fp8 import Fp8Weight
    from pdserve.kernels.reference.moe import PackedExperts
    from pdserve.models.arch import ModelArch, MoeArch
    from pdserve.models.layers.parameter import Placement


class MoE:
    """`shared(norm(x)) + sum of weight * expert(norm(x))` over the experts that a router chooses.

    Args:
        arch: The whole model, which has experts.
        layer: Index of this layer in the whole model.
        placement: With `experts` set.
    """

    def __init__(self, arch: ModelArch, layer: int, placement: Placement) -> None:
        moe = arch.moe
        assert moe is not None
        assert placement.experts is not None
        self._layer = layer
        self._norm = RMSNorm(arch, placement)
        self._router = ExpertRouter(moe, arch.hidden_size, placement)
        self._shared = (
            SharedExperts(arch.hidden_size, moe.shared_intermediate_size, placement)
            if moe.shared_intermediate_size
            else None
        )
        self._shared_gate = SharedGate(arch.hidden_size, placement) if moe.shared_gate else None
        self._parallel = placement.experts
        self._experts = RoutedExperts(
            moe, arch.hidden_size, placement.experts.local_experts(layer), placement
        )
        self._stream = placement.stream

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yield how to load each parameter; `prefix` is that of the layer."""
        yield f"{prefix}post_attention_layernorm.weight", self._norm.slot()
        yield from self._router.slots(f"{prefix}mlp.")
        if self._shared is not None:
            yield from self._shared.slots(f"{prefix}mlp.shared_experts.")
        if self._shared_gate is not None:
            yield from self._shared_gate.slots(f"{prefix}mlp.")
        yield from self._experts.slots(f"{prefix}mlp.experts.")

    def __call__(self, x: Tensor, residual: Tensor, num_tokens: int) -> Tensor:
        """Run the half layer. R rows of T are this rank's share of the residual stream, or all.

        Args:
            x: `[R, hidden_size]`, added to `residual` in place first; R may be 0.
            residual: `[R, hidden_size]`.
            num_tokens: T.

        Returns:
            `[R, hidden_size]`, summed over all ranks with experts, not yet added to `residual`.
        """
        normed = self._stream.gather(self._norm.add(x, residual), num_tokens)
        routing = self._router(normed)
        partial = None if self._shared is None else self._shared(normed)
        if partial is not None and self._shared_gate is not None:
            partial = self._shared_gate(normed, partial)
        total = self._parallel(self._layer, normed, routing, self._experts.packed, partial)
        return self._stream.share(total)


class ExpertRouter:
    """Chooses the experts of each token, the same on every rank. Logits and scores are fp32."""

    def __init__(self, moe: MoeArch, hidden_size: int, placement: Placement) -> None:
        self._gate = Linear(
            hidden_size,
            {"gate": moe.num_experts},
            placement,
            bias=moe.router_bias,
            out_dtype=torch.float32,
        )
        self._bias = (
            Parameter((moe.num_experts,), replace(placement, dtype=torch.float32))
            if moe.has_correction_bias
            else None
        )
        self._route = placement.kernels.route
        self._rule = RoutingRule(
            moe.top_k,
            sigmoid=moe.scoring is Scoring.SIGMOID,
            normalize=moe.normalize_weights,
            scale=moe.routed_scaling_factor,
            num_groups=moe.num_groups,
            top_k_groups=moe.top_k_groups,
            rank_groups_by_two=moe.group_score is GroupScore.SUM_OF_TOP_2,
        )

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yield how to load each parameter."""
        yield from self._gate.slots(prefix)
        if self._bias is not None:
            yield f"{prefix}gate.e_score_correction_bias", self._bias.slot()

    def __call__(self, x: Tensor) -> Routing:
        """`[T, hidden_size]` -> the choices of T tokens."""
        bias = None if self._bias is None else self._bias.value
        return Routing(*self._route(self._gate.packed(x), bias, self._rule))


class SharedExperts:
    """The experts of every token, as one gated MLP split over the TP group."""

    def __init__(self, hidden_size: int, inner: int, placement: Placement) -> None:
        self._gate_up = ColumnParallel(
            hidden_size, {"gate_proj": inner, "up_proj": inner}, placement
        )
        self._down = RowParallel(inner, "down_proj", hidden_size, placement=placement)
        self._silu_and_mul = placement.kernels.silu_and_mul

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yield how to load each parameter."""
        yield from self._gate_up.slots(prefix)
        yield from self._down.slots(prefix)

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, hidden_size]` -> this rank's term of the sum over the TP group."""
        return self._down.packed(self._silu_and_mul(self._gate_up.packed(x)))


class SharedGate:
    """The factor of the shared experts' result, a sigmoid for each token."""

    def __init__(self, hidden_size: int, placement: Placement) -> None:
        self._gate = Linear(
            hidden_size, {"shared_expert_gate": 1}, placement, out_dtype=torch.float32
        )
        # The router's sigmoid, because torch's depends on a row's place among the others.
        self._route = placement.kernels.route
        self._rule = RoutingRule(1, sigmoid=True)

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yield how to load its row."""
        yield from self._gate.slots(prefix)

    def __call__(self, x: Tensor, result: Tensor) -> Tensor:
        """Return `result`, `[T, hidden_size]`, times the factor of `x`, of the same shape."""
        _, factors = self._route(self._gate.packed(x), None, self._rule)
        return result * factors.to(result.dtype)


class RoutedExperts:
    """This rank's experts of one layer, and how to load them.

    Args:
        local: Logical id of each expert on this rank, by local index; an expert may occur twice.

    Raises:
        ConfigError: Experts are sliced over the TP group and do not divide.
    """

    def __init__(
        self, moe: MoeArch, hidden_size: int, local: Sequence[int], placement: Placement
    ) -> None:
        assert placement.experts is not None
        self._placement = placement
        self._num_experts = moe.num_experts
        self._whole = (moe.intermediate_size, hidden_size)
        self._copies: dict[int, list[int]] = {}
        for index, expert in enumerate(local):
            self._copies.setdefault(expert, []).append(index)
        self._num_local = len(local)
        self._form = ExpertForm(
            moe.experts_bias,
            None if moe.glu is None else ClampedGlu(moe.glu.alpha, moe.glu.limit),
        )
        self._inner = (
            placement.part("moe_intermediate_size", moe.intermediate_size)
            if placement.experts.slices_experts
            else range(moe.intermediate_size)
        )
        self._adds_down_bias = not placement.experts.slices_experts or placement.world.tp.is_first

    @cached_property
    def packed(self) -> PackedExperts:
        """The experts on this rank; usable once all of them are loaded."""
        return self._placement.kernels.experts(
            self._num_local,
            self._whole[1],
            len(self._inner),
            dtype=self._placement.dtype,
            device=self._placement.device,
            form=self._form,
        )

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yield how to load each expert; experts on other ranks are not loaded."""
        inner, hidden_size = self._whole
        mine, everything = slice(self._inner.start, self._inner.stop), slice(None)
        placement, num_slots = self._placement, 3 * self._num_experts
        for expert in range(self._num_experts):
            copies = self._copies.get(expert, [])
            for part, shape, region in (
                ("gate", (inner, hidden_size), (mine, everything)),
                ("up", (inner, hidden_size), (mine, everything)),
                ("down", (hidden_size, inner), (everything, mine)),
            ):
                load = self._loader(part, copies)
                keep = None
                if placement.kernels.keeps_fp8:
                    keep = Keep(self, num_slots, placement.dtype, load)
                slot = Slot(shape, load if copies else None, region, keep)
                yield f"{prefix}{expert}.{part}_proj.weight", slot
                if self._form.has_bias:
                    add = self._bias_loader(part, copies) if copies else None
                    yield f"{prefix}{expert}.{part}_proj.bias", Slot(shape[:1], add, region[:1])

    def _loader(self, part: str, copies: list[int]) -> Callable[[Tensor | Fp8Weight], None]:
        def load(tensor: Tensor | Fp8Weight) -> None:
            write = {
                "gate": self.packed.write_gate,
                "up": self.packed.write_up,
                "down": self.packed.write_down,
            }[part]
            for local in copies:
                write(local, tensor)

        return load

    def _bias_loader(self, part: str, copies: list[int]) -> Callable[[Tensor], None]:
        def load(tensor: Tensor) -> None:
            write = {
                "gate": self.packed.write_gate_bias,
                "up": self.packed.write_up_bias,
                "down": self.packed.write_down_bias,
            }[part]
            if part == "down" and not self._adds_down_bias:
                tensor = torch.zeros_like(tensor)  # of the ranks' sum one term has it
            for local in copies:
                write(local, tensor)

        return load
