"""A layer's products and the row kernels between them, in turn, as a decode step has them.

What it asks: for how many rows products, and the kernels between them, should overlap. There is no
attention: a norm stands in its place.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.timing import DEVICE, sized, time_in_graph
from benchmarks.gpu.ways import DTYPE, Build, least_us, random, run_tile
from pdserve.kernels.cuda.activation import silu_and_mul
from pdserve.kernels.cuda.launch import without_overlap
from pdserve.kernels.cuda.linear import multiply_gated
from pdserve.kernels.cuda.norm import add_rms_norm, rms_norm
from pdserve.kernels.cuda.tiles import GATED_ROWS, ProductTile, gated_tile, linear_tile

LAYER_ROWS = sized((1, 16, 64, 256), (3,))

_WIDTH, _QKV, _INNER = sized((4096, 6144, 14336), (32, 48, 64))
_NUM_LAYERS = 2
"""Different ones: together far larger than the L2 cache."""


@dataclass(frozen=True, slots=True)
class _Variant:
    """One way to run a layer.

    Attributes:
        overlaps: Whether any kernel does.
        products: Whether every product does, whatever the tables say.
    """

    overlaps: bool = True
    products: bool = False

    def tile(self, of: ProductTile) -> ProductTile:
        if not self.products:
            return of
        return replace(of, tuning=replace(of.tuning, overlaps=True))


_VARIANTS = {
    "without overlap": _Variant(overlaps=False),
    "as the tables": _Variant(),
    "every product overlaps": _Variant(products=True),
}


class _Layer:
    def __init__(self, seed: int) -> None:
        self.norm = random(_WIDTH, seed=seed)
        self.qkv = random(_QKV, _WIDTH, seed=seed + 1, scale=_WIDTH**-0.5)
        self.out = random(_WIDTH, _WIDTH, seed=seed + 2, scale=_WIDTH**-0.5)
        self.gate_up = random(2 * _INNER, _WIDTH, seed=seed + 3, scale=_WIDTH**-0.5)
        self.down = random(_WIDTH, _INNER, seed=seed + 4, scale=_INNER**-0.5)

    @property
    def num_weights(self) -> int:
        return sum(each.numel() for each in (self.qkv, self.out, self.gate_up, self.down))


def layer_builds() -> list[Build]:
    """Return the products that `layer_times` is to find compiled."""
    found = []
    for num_rows in LAYER_ROWS:
        for variant in _VARIANTS.values():
            tiles = [linear_tile(num_rows, n, DTYPE) for n in (_QKV, _WIDTH, 2 * _INNER)]
            found += [Build(variant.tile(of), overlaps=variant.overlaps) for of in tiles]
            if num_rows <= GATED_ROWS:
                of = variant.tile(gated_tile(num_rows, DTYPE))
                found.append(Build(of, gated=True, overlaps=variant.overlaps))
    return found


def _product(x: Tensor, weight: Tensor, variant: _Variant) -> Tensor:
    out = torch.empty((len(x), len(weight)), dtype=DTYPE, device=DEVICE)
    run_tile(variant.tile(linear_tile(len(x), len(weight), DTYPE)), x, weight, out)
    return out


def _run(x: Tensor, residual: Tensor, layer: _Layer, variant: _Variant) -> Tensor:
    """Return what a layer adds; ``residual`` is written."""
    qkv = _product(add_rms_norm(x, residual, layer.norm, 1e-5), layer.qkv, variant)
    middle = rms_norm(qkv.view(-1)[: x.numel()].view(x.shape), layer.norm, 1e-5)
    normed = add_rms_norm(_product(middle, layer.out, variant), residual, layer.norm, 1e-5)
    if len(x) <= GATED_ROWS:
        gated = torch.empty((len(x), _INNER), dtype=DTYPE, device=DEVICE)
        multiply_gated(normed, layer.gate_up, None, gated, variant.tile(gated_tile(len(x), DTYPE)))
    else:
        gated = silu_and_mul(_product(normed, layer.gate_up, variant))
    return _product(gated, layer.down, variant)


def layer_times(num_rows: int, peak: dict[str, float]) -> dict[str, Any]:
    """Time each way to run a layer, and compare its bits with those of the first."""
    layers = [_Layer(seed=10 * i) for i in range(_NUM_LAYERS)]
    x, start = random(num_rows, _WIDTH, seed=1), random(num_rows, _WIDTH, seed=2)
    num_weights = layers[0].num_weights
    floor_us = least_us(2 * num_weights, 2 * num_rows * num_weights, peak)
    found: dict[str, Any] = {}
    expected: Tensor | None = None
    for name, variant in _VARIANTS.items():
        residual = start.clone()
        with nullcontext() if variant.overlaps else without_overlap():
            bits = _run(x, residual, layers[0], variant)
            expected = bits if expected is None else expected
            timing = time_in_graph(
                lambda i, variant=variant, residual=residual: _run(
                    x, residual, layers[i % _NUM_LAYERS], variant
                ),
                calls=4 * _NUM_LAYERS,
                budget_s=0.1,
            )
        found[name] = timing.row(share=round(floor_us / timing.us, 3))
        found[name]["bits are equal"] = torch.equal(bits, expected)
    return found
