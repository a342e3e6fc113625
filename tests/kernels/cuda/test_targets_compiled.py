"""Every kind of kernel on every architecture that has tiles: it compiles, and fits."""

from __future__ import annotations

import pytest
import torch

from pdserve.kernels.cuda.attention import tiles_for
from pdserve.kernels.cuda.target import (
    H100,
    TARGETS,
    Architecture,
    LaunchTarget,
    architecture_of,
    assuming,
)
from pdserve.kernels.cuda.tiles import experts_tiles, linear_tile
from tests.kernels.cuda import (
    gate,
    test_attention_compiled,
    test_products_compiled,
    test_rows_compiled,
    test_rules_compiled,
    test_sampling_compiled,
)

OTHERS = [each for each in TARGETS.values() if each is not H100]
SPILLED = {
    "attention prompt": 208,
    "attention prompt, over 2^31 rows": 208,
    "attention prompt, blocks of 16": 192,
    "attention prompt, windowed": 192,
    "attention prompt, sinks": 40,
    "attention prompt, wide": 384,
    "attention prompt, wide, windowed": 320,
    "attention prompt, fp32": 1040,
    "attention tokens, wide, fp32": 5448,
    "attention prompt, wide, fp32": 40,
    "attention latents, 128 heads": 800,
    "attention latents, prompt": 32,
    "attention latents, prompt, fp32": 24,
    "many 128x160": 40,
    "many 128x192": 40,
    "gated 2048": 128,
    "experts 2048": 144,
}
"""Bytes that a thread spills at most where it may spill more than 16, which is slow, not wrong."""


def every_call() -> gate.Calls:
    found: gate.Calls = {}
    for module in (
        test_attention_compiled,
        test_rows_compiled,
        test_rules_compiled,
        test_sampling_compiled,
    ):
        part = module.__name__.rpartition(".test_")[2].removesuffix("_compiled")
        found |= {f"{part} {name}": call for name, call in module.calls().items()}
    return found | test_products_compiled.every_call()


def on_each() -> gate.Calls:
    return gate.assuming_each(OTHERS, every_call())


def check(architecture: Architecture, *calls: str) -> None:
    """Of shared memory the gate itself takes care."""
    names = {f"{architecture.name} {call}": call for call in calls}
    for name, kernels in gate.compiled(f"{__name__}:on_each", *names).items():
        for kernel in kernels:
            assert kernel.spilled <= SPILLED.get(names[name], 16), f"{kernel.kernel} of {name}"
            if not architecture.is_hopper_like:
                assert kernel.count("ACQBULK") == kernel.count("UTMALDG") == 0, name


@pytest.mark.matrix
def test_a_product_compiles_where_shared_memory_is_least() -> None:
    check(Architecture.SM_89, "linear 1x4096")


@pytest.mark.matrix
@pytest.mark.parametrize("architecture", [t.architecture for t in OTHERS], ids=lambda a: a.name)
def test_every_kind_of_kernel_compiles_and_fits(architecture: Architecture) -> None:
    check(architecture, *every_call())


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [
        ((8, 0), Architecture.SM_80),
        ((8, 6), Architecture.SM_89),
        ((8, 7), Architecture.SM_80),
        ((8, 9), Architecture.SM_89),
        ((9, 0), Architecture.SM_90),
        ((10, 0), Architecture.SM_100),
        ((10, 3), Architecture.SM_100),
        ((12, 0), Architecture.SM_89),
    ],
)
def test_a_device_takes_the_tiles_that_fit_its_shared_memory(
    capability: tuple[int, int], architecture: Architecture
) -> None:
    assert architecture_of(capability) is architecture


def test_few_multiprocessors_take_wider_tiles() -> None:
    def cols(multiprocessors: int) -> int:
        with assuming(LaunchTarget(Architecture.SM_90, multiprocessors)):
            return linear_tile(1, 6144, torch.bfloat16).cols

    assert [cols(num) for num in (16, 132, 256)] == [128, 64, 32]


@pytest.mark.parametrize("each", TARGETS.values(), ids=lambda each: each.architecture.name)
def test_keys_are_cut_at_the_same_places_everywhere(
    each: LaunchTarget,
) -> None:
    with assuming(each):
        for dtype in (torch.bfloat16, torch.float32):
            for head_dim in (64, 128, 256):
                tiles = tiles_for(dtype, head_dim)
                assert (tiles.tile, tiles.segment) == (32 if dtype.itemsize == 4 else 64, 512)


@pytest.mark.parametrize("each", TARGETS.values(), ids=lambda each: each.architecture.name)
def test_experts_take_as_many_rows_in_both_of_their_products(each: LaunchTarget) -> None:
    with assuming(each):
        for num_choices in (1, 17, 65, 4096):
            gate_up, down = experts_tiles(num_choices, 1, torch.bfloat16)
            assert gate_up.rows == down.rows
