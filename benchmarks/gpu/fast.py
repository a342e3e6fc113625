"""Numerics fast beside exact in one run: how many times as fast products, prompts and steps are.

*attention* of a prompt, by our kernel, FlashAttention 3 and cuDNN, which reads no blocks. *linear*:
an 8B's layers, by our kernel and by cuBLAS. *prompt*, *mixed*: whole steps of the 8B shape, kernel
by kernel, as an engine launches them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from benchmarks.gpu.attention import PROMPTS, Prefill
from benchmarks.gpu.llama import Rows, layers_of, make_kv, make_model
from benchmarks.gpu.paged import BASE, DTYPE
from benchmarks.gpu.timing import (
    DEVICE,
    IS_DRY,
    Experiments,
    num_rotated,
    sized,
    time_eager,
    time_in_graph,
)
from benchmarks.gpu.ways import SHAPES, random
from pdserve.config.numerics import NumericsMode
from pdserve.kernels.cuda.linear import CudaLinear
from pdserve.kernels.cuda.sizes import empty_rows
from pdserve.kernels.fast.attention import find_flash, with_flash
from pdserve.kernels.fast.linear import FastLinear
from pdserve.kernels.step import StepInputs

ROWS = sized((65, 96, 128, 256, 512, 1024), (65,))
LENGTHS = sized((2000, 8000), (60,))
MIXED = sized((256, 512), (40,))
NUM_DECODES, CONTEXT = sized((8, 2000), (3, 50))
"""Of a mixed step, beside one chunk of a prompt."""


def attention(length: int) -> dict[str, Any]:
    """Time the attention of one prompt in each way."""
    prompt, flash = Prefill(length, length), find_flash(DEVICE)
    exact = prompt.ours(BASE, budget_s=0.2)
    found: dict[str, Any] = {"exact": exact, "fast": flash}
    if not isinstance(flash, str):
        attend = with_flash(flash.attend, _refused)
        found["fast"] = fast = prompt.by(lambda call: attend(*call), budget_s=0.2)
        found["version"] = flash.version
        found["times as fast"] = round(exact["us"] / fast["us"], 3)
    if not IS_DRY:
        found["cudnn"] = prompt.theirs(SDPBackend.CUDNN_ATTENTION)
    return found


def _refused(*_: Any) -> Any:
    raise AssertionError("FlashAttention 3 does not take this prompt")


def linear(name: str) -> dict[str, Any]:
    """Time one of a layer's products, for each number of rows, with weights out of the cache."""
    cols, depth = SHAPES[name]
    layers = []
    for seed in range(num_rotated(cols * depth * DTYPE.itemsize)):
        layers.append(FastLinear(cols, depth, dtype=DTYPE, device=DEVICE))
        layers[-1].write(0, random(cols, depth, seed=seed, scale=depth**-0.5))

    def us(call: Callable[[FastLinear], object]) -> float:
        calls = len(layers) * sized(2, 1)
        return time_in_graph(lambda i: call(layers[i % len(layers)]), calls=calls, budget_s=0.03).us

    found = {}
    for num_rows in ROWS:
        drawn = random(num_rows, depth, seed=1)
        x = empty_rows(num_rows, depth, drawn).copy_(drawn)  # as operations leave it
        apart = (layers[0](x) - CudaLinear.__call__(layers[0], x)).abs().max().item()
        assert apart < 0.1, f"differs from exact by {apart}"
        exact = us(lambda layer, x=x: CudaLinear.__call__(layer, x))
        found[str(num_rows)] = _beside(exact, us(lambda layer, x=x: layer(x)))
    return found


class Models:
    """The 8B shape in both numerics, with the same weights, over one pool of KV."""

    def __init__(self) -> None:
        self.rows = Rows(NUM_DECODES + 1, max(*LENGTHS, CONTEXT), DEVICE)
        self._layers = layers_of(make_kv(self.rows.num_blocks, DEVICE))
        modes = NumericsMode.EXACT, sized(NumericsMode.FAST, NumericsMode.EXACT)
        self._models = [make_model(DEVICE, mode) for mode in modes]

    def beside(self, inputs: StepInputs) -> dict[str, Any]:
        """Time a step in both, and compare the last token's logits."""
        logits, times = [], []
        for model in self._models:

            def last(_: int, model: Any = model) -> torch.Tensor:
                return model.logits(model.forward(inputs, self._layers)[-1:])

            logits.append(last(0).float())
            times.append(time_eager(last, budget_s=0.5).us)
        exact, fast = logits
        return _beside(*times) | {
            "logits apart": round((exact - fast).abs().max().item(), 4),
            "logits spread": round(exact.std().item(), 4),
            "likeliest is the same": int(exact.argmax()) == int(fast.argmax()),
        }


def _beside(exact_us: float, fast_us: float) -> dict[str, Any]:
    return {
        "exact us": round(exact_us, 2),
        "fast us": round(fast_us, 2),
        "times as fast": round(exact_us / fast_us, 3),
    }


def run(limit_s: float) -> dict[str, Any]:
    """Compare attention, whole steps, then products."""
    experiments = Experiments("fast", limit_s)
    with torch.inference_mode():
        for length in PROMPTS:
            experiments.run(f"attention {length}", lambda length=length: attention(length))
        steps(experiments)
        for name in SHAPES:
            if name != "head":  # no step asks for so many rows of logits
                experiments.run(f"linear {name}", lambda name=name: linear(name))
    return experiments.results


def steps(experiments: Experiments) -> None:
    """Compare prompts, and a chunk beside single tokens."""
    models: list[Models] = []
    experiments.run("models", lambda: models.append(Models()))
    if not models:
        return
    both, rows = models[0], models[0].rows
    for length in LENGTHS:
        prompt = rows.chunk(0, rows.prompt(0, length), 0)
        experiments.run(f"prompt {length}", lambda prompt=prompt: both.beside(prompt))
    for size in MIXED:
        chunk = rows.prompt(NUM_DECODES, size - NUM_DECODES)
        step = rows.mixed(NUM_DECODES, CONTEXT, chunk)
        experiments.run(f"mixed {size}", lambda step=step: both.beside(step))
