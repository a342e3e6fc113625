"""Gate, up and their activation in one launch, and the experts of a layer: times of their tiles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.timing import DEVICE, IS_DRY, num_rotated, sized, time_in_graph
from benchmarks.gpu.ways import Build, described, named, tile
from pdserve.kernels.cuda.activation import silu_and_mul
from pdserve.kernels.cuda.experts import CudaExperts
from pdserve.kernels.cuda.linear import CudaLinear, multiply_gated
from pdserve.kernels.cuda.router import route
from pdserve.kernels.cuda.tiles import ProductTile, gated_tile
from pdserve.kernels.reference.moe import RoutingRule

DTYPE = sized(torch.bfloat16, torch.float16)
GATED_ROWS = sized((1, 64, 256, 2048), (5,))
EXPERT_TOKENS = sized((1, 16, 64, 2048), (3,))

_WIDTH, _INNER = sized((4096, 14336), (64, 48))
_NUM_EXPERTS = sized(8, 4)


_FEW = [
    tile(16, 32, 128, 4, 5),
    tile(16, 64, 128, 4, 3),
    tile(16, 64, 64, 4, 6, swapped=True),
    tile(16, 64, 128, 4, 3, swapped=True),
    tile(16, 64, 128, 4, 5, swapped=True),
    described(16, 64, 128, 4, 5),
    described(16, 64, 128, 4, 5, swapped=True),
    tile(16, 128, 64, 8, 5, swapped=True),
]
_SOME = [
    described(64, 32, 128, 4, 4),
    described(64, 32, 128, 4, 5),
    described(64, 64, 64, 4, 4),
    described(64, 64, 64, 4, 6),
    described(64, 64, 128, 4, 3),
    described(64, 64, 128, 4, 4),
    described(64, 128, 64, 8, 4),
]
_MANY = [
    described(128, 64, 64, 4, 4),
    described(128, 64, 64, 8, 4),
    described(128, 128, 64, 8, 3),
    described(128, 128, 64, 8, 4),
    described(256, 64, 64, 8, 4),
]
_DRY = [tile(16, 32, 32, 4, 3)]


def _swept(num_rows: int) -> list[ProductTile]:
    if IS_DRY:
        return _DRY
    if num_rows <= 16:
        found = _FEW
    else:
        found = _SOME if num_rows <= 64 else _MANY
    return list(dict.fromkeys([gated_tile(num_rows, DTYPE), *found]))


def gated_builds() -> list[Build]:
    """Return what `sweep_gated` is to find compiled."""
    return [Build(of, gated=True) for num_rows in GATED_ROWS for of in _swept(num_rows)]


def _random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).mul_(scale).to(DTYPE)


def sweep_gated(num_rows: int, peak: dict[str, float]) -> dict[str, Any]:
    """Time tiles of gate and up with their activation, and the two operations in turn."""
    num_copies = num_rotated(2 * _INNER * _WIDTH * 2)
    weights = [_random(2 * _INNER, _WIDTH, scale=_WIDTH**-0.5) for _ in range(num_copies)]
    layers = []
    for weight in weights:
        layer = CudaLinear(2 * _INNER, _WIDTH, dtype=DTYPE, device=DEVICE)
        layer.write(0, weight)
        layers.append(layer)
    x = _random(num_rows, _WIDTH)
    out = torch.empty((num_rows, _INNER), dtype=DTYPE, device=DEVICE)
    wanted = silu_and_mul(layers[0](x))

    def row(call: Any) -> dict[str, Any]:
        timing = time_in_graph(call, calls=2 * num_copies, budget_s=0.04)
        if num_rows <= 64:
            share = timing.gb_per_s(weights[0].nbytes) / peak["copy_gb_per_s"]
        else:
            flops = 4 * num_rows * _INNER * _WIDTH
            share = timing.tflop_per_s(flops) / peak["tflop_per_s"]
        return {"us": round(timing.us, 2), "share": round(share, 3)}

    found: dict[str, dict[str, Any]] = {}
    for of in _swept(num_rows):
        name = named(of)
        try:
            out.fill_(float("nan"))
            multiply_gated(x, weights[0], None, out, of)
            equal = torch.equal(out, wanted)
            found[name] = row(
                lambda i, of=of: multiply_gated(x, weights[i % num_copies], None, out, of)
            )
            if not equal:
                found[name]["bits"] = "differ"
        except Exception as error:  # noqa: BLE001  # a tile that does not fit leaves the others
            found[name] = {"us": float("inf"), "error": str(error)[:200]}
    found = dict(sorted(found.items(), key=lambda item: item[1]["us"]))
    best = next(iter(found))
    return {
        "best": {best: found[best]},
        "table": named(gated_tile(num_rows, DTYPE)),
        "in_turn": row(lambda i: silu_and_mul(layers[i % num_copies](x))),
        "all": found,
    }


def experts_times(num_tokens: int, peak: dict[str, float]) -> dict[str, Any]:
    """Time a Mixtral layer's router and experts, and compare some rows' bits."""
    layer = CudaExperts(_NUM_EXPERTS, _WIDTH, _INNER, dtype=DTYPE, device=DEVICE)
    for expert in range(_NUM_EXPERTS):
        layer.write_gate(expert, _random(_INNER, _WIDTH, scale=_WIDTH**-0.5))
        layer.write_up(expert, _random(_INNER, _WIDTH, scale=_WIDTH**-0.5))
        layer.write_down(expert, _random(_WIDTH, _INNER, scale=_INNER**-0.5))
    x = _random(num_tokens, _WIDTH)
    logits = [torch.randn(num_tokens, _NUM_EXPERTS, device=DEVICE) for _ in range(8)]
    rule = RoutingRule(2, normalize=True)
    choices = [route(one, None, rule) for one in logits]
    routing = time_in_graph(lambda i: route(logits[i % 8], None, rule), budget_s=0.05)
    timing = time_in_graph(lambda i: layer(x, *choices[i % 8]), calls=8, budget_s=0.1)
    of_expert = 3 * _INNER * _WIDTH * 2
    num_used = sum(len(ids.unique()) for ids, _ in choices) / len(choices)
    ids, weights = choices[0]
    whole = layer(x, ids, weights)
    alone = layer(x[-1:], ids[-1:], weights[-1:])
    found = {
        "route_us": round(routing.us, 2),
        "experts_us": round(timing.us, 2),
        "experts_used": num_used,
        "a_row_alone_has_its_bits": torch.equal(alone, whole[-1:]),
    }
    if num_tokens <= 64:
        rate = timing.gb_per_s(int(num_used * of_expert))
        return found | {"share": round(rate / peak["copy_gb_per_s"], 3)}
    rate = timing.tflop_per_s(num_tokens * 2 * of_expert)
    return found | {"share": round(rate / peak["tflop_per_s"], 3)}
