"""The worked example of docs/extending.md is code that runs, on one rank and on several."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import Tensor

from pdserve.kernels.registry import kernels_on
from pdserve.models.decoder import FeedForwardHalf
from pdserve.models.layers.linear import ColumnParallel, RowParallel
from pdserve.models.layers.norm import RMSNorm
from pdserve.models.layers.parameter import Placement
from pdserve.models.layers.stream import SPLIT_FROM
from pdserve.models.reading import parse_arch
from pdserve.models.weights import DummyWeights, load_weights
from pdserve.parallel.mesh import MeshShape
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from pdserve.parallel.group import World

pytestmark = pytest.mark.slow

EXTENDING = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
NUM_TOKENS = SPLIT_FROM + 2  # so that the residual stream is split, unevenly


def example(arch: Any, placement: Placement) -> Any:
    section = EXTENDING.read_text().split("## Adding a model or a layer")[1].split("\n## ")[0]
    (text,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict[str, Any] = {
        "ColumnParallel": ColumnParallel,
        "RowParallel": RowParallel,
        "RMSNorm": RMSNorm,
    }
    exec("from __future__ import annotations\n" + text, names)
    made, called = names["Squared"], inspect.signature(FeedForwardHalf.__call__)
    assert str(inspect.signature(made.__call__)) == str(called)  # as the decoder calls it
    return made(arch, placement)


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, residual = torch.randn(2, NUM_TOKENS, CONFIG["hidden_size"], generator=generator)
    return x, residual


def run(world: World, sequence_parallel: bool) -> Tensor:
    """The half layer's result, whole."""
    arch = parse_arch(CONFIG)
    device = torch.device("cpu")
    placement = Placement(device, torch.float32, kernels_on(device), world)
    placement = replace(placement, sequence_parallel=sequence_parallel)
    layer = example(arch, placement)
    slots = dict(layer.slots("model.layers.0."))
    source = DummyWeights(seed=1, std=0.3, dtype=torch.float32, identity="")
    load_weights(slots, source, tied_head=True, progress=lambda text: None)
    x, residual = inputs()
    stream = placement.stream
    result = layer(stream.share(x).clone(), stream.share(residual).clone(), NUM_TOKENS)
    return cast("Tensor", stream.gather(result, NUM_TOKENS))


def by_hand() -> Tensor:
    names = {
        "post_attention_layernorm.weight": (32,),
        "mlp.up_proj.weight": (48, 32),
        "mlp.down_proj.weight": (32, 48),
    }
    weights: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda tensor: weights.update({name: tensor.clone()})

    from pdserve.models.slots import Slot

    source = DummyWeights(seed=1, std=0.3, dtype=torch.float32, identity="")
    slots = {f"model.layers.0.{n}": Slot(shape, keep(n)) for n, shape in names.items()}
    load_weights(slots, source, tied_head=True, progress=lambda text: None)
    x, residual = inputs()
    normed = torch.nn.functional.rms_norm(x + residual, (32,), eps=1e-6)
    up = normed @ weights["mlp.up_proj.weight"].T
    return up.relu().square() @ weights["mlp.down_proj.weight"].T


@pytest.mark.parametrize(("num_ranks", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_the_layer_of_the_recipe_computes_the_same_on_any_ranks(
    num_ranks: int, sequence_parallel: bool
) -> None:
    for result in run_ranks(MeshShape(tp=num_ranks), run, sequence_parallel):
        torch.testing.assert_close(result, by_hand(), rtol=1e-4, atol=1e-4)
