"""An FP8 checkpoint is the one of its weights times their scales."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from pdserve.config.schema import ParallelConfig
from pdserve.errors import ConfigError
from pdserve.kernels.fp8 import Fp8Weight, NotANumberError
from pdserve.kernels.registry import kernels_on
from pdserve.models.quantised_format import NUMBERS
from pdserve.models.reading import read_arch
from pdserve.models.scaled import SCALE, ScaledMatrix
from pdserve.models.slots import Keep, Slot
from pdserve.models.weights import Checkpoint, load_weights
from pdserve.parallel.mesh import MeshShape
from tests.models.decoding import greedy, load
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from pdserve.kernels.backend import KernelBackend
    from pdserve.parallel.group import World

PROMPTS = [[5, 17, 33, 80, 2], [9] * 21]
LARGEST = torch.finfo(torch.float8_e4m3fn).max
FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def compressed(**weights: Any) -> dict[str, Any]:
    group = {"weights": {"num_bits": 8, "type": "float", **weights}, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
    }


FORMATS: dict[str, tuple[dict[str, Any], str, tuple[int, int]]] = {
    "DeepSeek's": ({**FP8, "weight_block_size": [24, 40]}, "_scale_inv", (24, 40)),
    "whole runs": ({**FP8, "weight_block_size": [24, 32]}, "_scale_inv", (24, 32)),
    "a scale for each tensor": ({**FP8, "weight_block_size": None}, "_scale_inv", (10**6, 10**6)),
    "channels": (compressed(strategy="channel"), "_scale", (1, 10**6)),
    "tensors": (compressed(strategy="tensor"), "_scale", (10**6, 10**6)),
    "blocks": (compressed(strategy="block", block_structure=[24, 40]), "_scale", (24, 40)),
}
"""What the configuration says, how scales are named, and what of a weight has one."""


QUANTISED = ("proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")


def rounded(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """A weight in FP8, its scales, and what they stand for together."""
    high, wide = (min(each, size) for each, size in zip(block, weight.shape, strict=True))
    of_rows = torch.arange(weight.shape[0]) // high
    of_columns = torch.arange(weight.shape[1]) // wide
    scale = torch.zeros(int(of_rows[-1]) + 1, int(of_columns[-1]) + 1)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            part = weight[of_rows == row][:, of_columns == column]
            scale[row, column] = part.abs().max() / LARGEST
    factors = scale[of_rows][:, of_columns]
    stored = (weight / factors).to(torch.float8_e4m3fn)
    return stored, scale, stored.float() * factors


def quantise(directory: Path, name: str) -> Path:
    """Make an FP8 checkpoint of one in bf16; return where what it stands for is in bf16."""
    config, end, block = FORMATS[name]
    wide = directory / "wide"
    wide.mkdir()
    shutil.copy(directory / "config.json", wide)
    path = directory / "model.safetensors"
    tensors = {each: tensor.clone() for each, tensor in load_file(path).items()}
    stood_for = dict(tensors)
    for each in [n for n in tensors if n.endswith(QUANTISED)]:
        stored, scale, stood = rounded(tensors[each].float(), block)
        tensors[each] = stored
        tensors[each + end] = scale if scale.numel() > 1 else scale.reshape(())
        tensors[each.removesuffix("weight") + "input_scale"] = torch.ones(())
        stood_for[each] = stood.to(stood_for[each].dtype)
    save_file(tensors, path)
    save_file(stood_for, wide / "model.safetensors")
    said = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(said | {"quantization_config": config}))
    return wide


KEEPING = replace(kernels_on(torch.device("cpu")), keeps_fp8=True)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [None, KEEPING], ids=["widened", "kept"])
@pytest.mark.parametrize("name", FORMATS)
def test_it_computes_what_its_weights_times_their_scales_compute(
    save_model: Callable[..., Any], tmp_path: Path, name: str, kernels: KernelBackend | None
) -> None:
    save_model("qwen3", dtype="bfloat16").to(torch.bfloat16).save_pretrained(tmp_path)
    wide = quantise(tmp_path, name)
    loaded, expected = load(tmp_path, kernels=kernels), load(wide)
    assert loaded.dtype == torch.bfloat16
    tokens, logits = greedy(loaded, PROMPTS, 4)
    others, as_wide = greedy(expected, PROMPTS, 4)
    assert tokens == others
    assert torch.equal(logits, as_wide)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "minimax_m2"])
def test_ranks_widen_their_parts_of_experts_and_latents(tmp_path: Path, family: str) -> None:
    wide = quantise(write_tiny_model(tmp_path / family, family), "DeepSeek's")
    shape, parallel = MeshShape(tp=2), ParallelConfig(tensor_parallel_size=2)
    found = [
        run_ranks(shape, _decode, directory, parallel)[0] for directory in (tmp_path / family, wide)
    ]
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def _decode(world: World, directory: Path, parallel: ParallelConfig) -> tuple[Any, Tensor]:
    return greedy(load(directory, world, parallel=parallel), PROMPTS, 3, world=world)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_experts_take_kept_weights(tmp_path: Path, family: str) -> None:
    wide = quantise(write_tiny_model(tmp_path / family, family), "tensors")
    found, expected = load(tmp_path / family, kernels=KEEPING), load(wide)
    assert torch.equal(greedy(found, PROMPTS, 3)[1], greedy(expected, PROMPTS, 3)[1])


def _slots(dtype: torch.dtype, found: list[Any]) -> dict[str, Slot]:
    """Slots of two weights of one layer, of which a rank has some columns."""

    def slot(columns: slice) -> Slot:
        region = slice(None), columns
        return Slot((64, 96), found.append, region, Keep("layer", 2, dtype, found.append))

    return {"model.a": slot(slice(32, 96)), "model.b": slot(slice(32, 96))}


def _write_two(directory: Path, *, is_b_fp8: bool = True) -> None:
    tensors = {}
    for name in "ab":
        stored, scale, whole = rounded(torch.randn(64, 96), (16, 32))
        is_fp8 = is_b_fp8 or name == "a"
        tensors[name] = stored if is_fp8 else whole.bfloat16()
        if is_fp8:
            tensors[f"{name}_scale"] = scale
    tensors["c"] = torch.zeros(1 << 14, dtype=torch.bfloat16)  # what the checkpoint's dtype is
    save_file(tensors, directory / "model.safetensors")
    said = {"quantization_config": {**FP8, "weight_block_size": [16, 32]}}
    (directory / "config.json").write_text(json.dumps(said))


def _kinds(directory: Path, slots: dict[str, Slot], found: list[Any]) -> set[type]:
    slots = {**slots, "model.c": Slot((1 << 14,), None)}
    load_weights(slots, Checkpoint(directory), tied_head=False, progress=lambda _: None)
    return {type(each) for each in found}


def test_a_layer_keeps_all_of_its_weights_or_none(tmp_path: Path) -> None:
    _write_two(tmp_path)
    found: list[Any] = []
    slots = _slots(torch.bfloat16, found)
    assert _kinds(tmp_path, slots, found) == {Fp8Weight}
    assert [each.numbers.shape for each in found] == 2 * [(64, 64)]

    found.clear()
    assert _kinds(tmp_path, _slots(torch.float32, found), found) == {torch.Tensor}

    found.clear()
    amid_a_block = replace(slots["model.b"], region=(slice(None), slice(40, 96)))
    assert _kinds(tmp_path, {**slots, "model.b": amid_a_block}, found) == {torch.Tensor}

    found.clear()
    changed = Slot((64, 96), found.append, slots["model.b"].region)
    assert _kinds(tmp_path, {**slots, "model.b": changed}, found) == {torch.Tensor}

    found.clear()
    _write_two(tmp_path, is_b_fp8=False)
    assert _kinds(tmp_path, slots, found) == {torch.Tensor}


def test_nan_in_a_kept_weight_is_refused_by_name(tmp_path: Path) -> None:
    def load_kept(_: Fp8Weight) -> None:
        raise NotANumberError

    _write_two(tmp_path)
    slots = {
        name: replace(slot, keep=Keep("layer", 2, torch.bfloat16, load_kept))
        for name, slot in _slots(torch.bfloat16, []).items()
    }
    with pytest.raises(ConfigError, match=r"model\.a has NaN"):
        _kinds(tmp_path, slots, [])


def test_a_silent_config_has_the_dtype_of_what_is_not_fp8(
    save_model: Callable[..., Any], tmp_path: Path
) -> None:
    save_model(dtype="bfloat16").to(torch.bfloat16).save_pretrained(tmp_path)
    quantise(tmp_path, "DeepSeek's")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path).dtype == torch.bfloat16


def test_scales_may_be_in_another_file_than_their_weights(
    save_model: Callable[..., Any], tmp_path: Path
) -> None:
    save_model(dtype="bfloat16").to(torch.bfloat16).save_pretrained(tmp_path)
    wide = quantise(tmp_path, "DeepSeek's")
    tensors = load_file(tmp_path / "model.safetensors")
    scales = {name: tensors.pop(name) for name in [*tensors] if name.endswith("_scale_inv")}
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "b.safetensors")
    save_file(scales, tmp_path / "a.safetensors")
    assert torch.equal(greedy(load(tmp_path), PROMPTS, 2)[1], greedy(load(wide), PROMPTS, 2)[1])


@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    block=st.tuples(st.integers(1, 16), st.integers(1, 16)),
    cuts=st.tuples(*(st.integers(0, 40) for _ in range(4))),
    kind=st.sampled_from(["block", "row", "tensor"]),
)
def test_a_region_is_widened_as_in_the_whole(
    shape: tuple[int, int], block: tuple[int, int], cuts: tuple[int, ...], kind: str
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    block = {"block": block, "row": (1, shape[1]), "tensor": shape}[kind]
    stored, scale, whole = rounded(weight, block)
    scheme = ScaledMatrix("F8_E4M3", block)
    region = tuple(
        slice(*sorted((a % (size + 1), b % (size + 1))))
        for a, b, size in zip(cuts[:2], cuts[2:], shape, strict=True)
    )
    parts = scheme.regions(shape, region)
    tensors = {NUMBERS: stored[parts[NUMBERS]], SCALE: scale[parts[SCALE]]}
    found = scheme.widened(tensors, shape=shape, region=region, to=torch.float32)
    assert torch.equal(found, whole[region])
    if scheme.run(region) is not None:
        kept = scheme.kept(tensors, shape=shape, region=region)
        assert kept.numbers is tensors[NUMBERS]
        assert torch.equal(kept.widened(torch.float32), found)


def test_a_block_may_be_much_wider_than_its_weight() -> None:
    stored, scale, whole = rounded(torch.randn(6, 5), (2, 5))
    scheme, tensors = ScaledMatrix("F8_E4M3", (2, 1 << 40)), {NUMBERS: stored, SCALE: scale}
    found = scheme.widened(tensors, shape=(6, 5), region=None, to=torch.float32)
    assert torch.equal(found, whole)


def test_a_rank_reads_its_region(tmp_path: Path) -> None:
    stored, scale, whole = rounded(torch.randn(96, 80), (24, 40))
    other = torch.zeros(3, dtype=torch.bfloat16)
    save_file({"a": stored, "a_scale": scale, "b": other}, tmp_path / "model.safetensors")
    said = {"quantization_config": {**FP8, "weight_block_size": [24, 40]}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    read: list[Tensor] = []
    region = slice(10, 50), slice(None)
    slots = {
        "model.a": Slot((96, 80), lambda tensor: read.append(tensor.clone()), region),
        "model.b": Slot((3,), None),
    }
    load_weights(slots, Checkpoint(tmp_path), tied_head=False, progress=lambda _: None)
    assert torch.equal(read[0], whole[10:50].to(torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(PROJ + "_scale_inv"), r"{proj} \[64, 64\] of {proj} F8_E4M3 \[64, 64\]$"),
        (
            lambda t: t.update({PROJ + "_scale_inv": torch.ones(3, 3)}),
            r"{proj} .*_scale_inv F32 \[3, 3\]$",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}),
            r"model.norm.weight \[64\] of model.norm.weight F8_E4M3 \[64\]$",
        ),
        (
            lambda t: t.update({PROJ + "_scale_inv": torch.ones(3, 2, dtype=torch.int32)}),
            "{proj} .*_scale_inv I32",
        ),
        (lambda t: t.update({"x.k_scale": torch.ones(())}), "unexpected: x.k_scale"),
    ],
)
def test_scales_that_do_not_fit_are_refused_by_name(
    save_model: Callable[..., Any],
    tmp_path: Path,
    change: Callable[[dict[str, Tensor]], Any],
    message: str,
) -> None:
    save_model(dtype="bfloat16").to(torch.bfloat16).save_pretrained(tmp_path)
    quantise(tmp_path, "DeepSeek's")
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message.format(proj=PROJ)):
        load(tmp_path)


PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "hqq", "bits": 4}, "config.quant_method is 'hqq': of quantised"),
        ({}, "config.quant_method is None: of quantised"),
        ("fp8", "quantization_config is 'fp8': an object is needed"),
        ({**FP8, "fmt": "e5m2"}, "quantization_config.fmt is 'e5m2'"),
        ({**FP8, "weight_block_size": [128]}, r"weight_block_size is \[128\]: two positive"),
        ({**FP8, "weight_block_size": [0, 128]}, "weight_block_size"),
        (compressed(strategy="group"), "strategy is 'group'"),
        (compressed(num_bits=4), "num_bits is 4"),
        (compressed(type="int"), "type is 'int'"),
        (compressed(strategy="tensor") | {"format": "marlin-24"}, "format is 'marlin-24'"),
        (compressed(strategy="tensor") | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (compressed(strategy="tensor") | {"transform_config": {"config_groups": {}}}, "transform_"),
    ],
    ids=str,
)
def test_what_is_quantised_otherwise_is_refused_by_name(
    save_model: Callable[..., Any], tmp_path: Path, config: Any, message: str
) -> None:
    save_model()
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {"quantization_config": config}))
    with pytest.raises(ConfigError, match=message):
        read_arch(tmp_path)
