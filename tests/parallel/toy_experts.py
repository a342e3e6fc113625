"""A layer of experts that are plain matrices, and what it must compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pdserve.parallel.dispatch import Routing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def make_weights(layer: int, num_experts: int, width: int, dtype: torch.dtype) -> Tensor:
    """The experts of a layer, as a checkpoint has them: `[E, width, width]`."""
    generator = torch.Generator().manual_seed(100 + layer)
    shape = (num_experts, width, width)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


class ToyExperts:
    """Some of a layer's experts. Each token is computed by itself, whoever its neighbours are.

    Attributes:
        num_choices: Choices of tokens served so far.
    """

    def __init__(self, weights: Tensor, held: Sequence[int]) -> None:
        self.weights = weights[list(held)].clone()
        self.num_choices = 0

    def read(self, local: int) -> Tensor:
        return self.weights[local].flatten().view(torch.uint8)

    def write(self, local: int, data: Tensor) -> None:
        self.weights[local].flatten().view(torch.uint8).copy_(data)

    def __call__(self, x: Tensor, local_ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for ids, factors in zip(local_ids.T, weights.T.to(x.dtype), strict=True):
            (here,) = (ids >= 0).nonzero(as_tuple=True)
            matrices, tokens = self.weights[ids[here]], x[here]
            # Term by term: a matrix product's order of sums depends on the number of rows.
            result = torch.zeros_like(tokens)
            for dim in range(x.shape[1]):
                result += tokens[:, dim, None] * matrices[:, dim]
            y[here] += factors[here, None] * result
            self.num_choices += len(here)
        return y


def route(
    num_tokens: int, num_experts: int, top_k: int, *, seed: int, popularity: Tensor | None = None
) -> Routing:
    """Random choices, each expert as likely as `popularity` `[E]` says."""
    generator = torch.Generator().manual_seed(seed)
    if popularity is None:
        popularity = torch.ones(num_experts)
    likely = popularity.expand(max(1, num_tokens), -1)
    ids = torch.multinomial(likely, top_k, generator=generator)[:num_tokens]
    weights = torch.rand((num_tokens, top_k), generator=generator)
    return Routing(ids, weights)


def expected(x: Tensor, routing: Routing, weights: Tensor, shared: Tensor | None) -> Tensor:
    """The layer on one rank. `shared`: a matrix for all tokens."""
    y = ToyExperts(weights, range(len(weights)))(x, routing.expert_ids, routing.weights)
    return y if shared is None else y + x @ shared
