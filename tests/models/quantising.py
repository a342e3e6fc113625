"""Checkpoints of integers and 4-bit floats with scales, and what they stand for.

Each kind draws numbers, scales and zero points, packs them in a way of its own that is written from
the format's specification, and says what they stand for.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    Stored = tuple[dict[str, Tensor], Tensor]
    """Tensors by the ends of their names, and the weight that they stand for, fp64."""

IN_ORDER, AWQ_ORDER = range(32), (0, 2, 4, 6, 1, 3, 5, 7)
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def packed(numbers: Tensor, bits: int, order: Any = IN_ORDER) -> Tensor:
    """32-bit words of the numbers of each row; the first of `order` is in the lowest bits."""
    per = 32 // bits
    missing = -numbers.shape[1] % per
    numbers = torch.nn.functional.pad(numbers.long(), (0, missing)).unflatten(1, (-1, per))
    words = sum(numbers[..., each] << bits * place for place, each in enumerate(order[:per]))
    assert isinstance(words, torch.Tensor)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).int()


class Draw:
    """Numbers of a weight `[rows, columns]`, and what groups of its columns share."""

    def __init__(self, shape: tuple[int, int], config: dict[str, Any], seed: int) -> None:
        self.shape, self.config = shape, config
        self.random = torch.Generator().manual_seed(seed)
        self.bits: int = config.get("num_bits") or config.get("bits") or 4
        size = config.get("group_size") or -1
        self.size = shape[1] if size == -1 else size
        self.num_groups = -(-shape[1] // self.size)
        self.numbers = self.ints(0, 1 << self.bits, *shape)
        self.groups = torch.arange(shape[1]) // self.size
        if config.get("desc_act") or config.get("actorder") == "group":
            self.groups = self.groups[torch.randperm(shape[1], generator=self.random)]
        symmetric = config.get("sym", config.get("symmetric", True)) and "zero_point" not in config
        self.zeros = torch.full((shape[0], self.num_groups), 1 << (self.bits - 1))
        if not symmetric:
            self.zeros = self.ints(0, 1 << self.bits, shape[0], self.num_groups)
        self.scales = self.uniform(shape[0], self.num_groups) / (1 << self.bits)

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.random)

    def uniform(self, *shape: int) -> Tensor:
        """0.5 to 1.5, as bf16 has them."""
        return (torch.rand(shape, generator=self.random) + 0.5).bfloat16()

    @property
    def weight(self) -> Tensor:
        zeros, scales = (each.double()[:, self.groups] for each in (self.zeros, self.scales))
        return (self.numbers - zeros) * scales


def compressed(shape: tuple[int, int], config: dict[str, Any], seed: int) -> Stored:
    drawn = Draw(shape, config, seed)
    middle = 1 << (drawn.bits - 1)
    tensors = {
        "weight_packed": packed(drawn.numbers, drawn.bits),
        "weight_scale": drawn.scales,
        "weight_shape": torch.tensor(shape),
    }
    if config.get("plain"):
        del tensors["weight_packed"], tensors["weight_shape"]
        tensors["weight"] = (drawn.numbers - middle).to(torch.int8)
    if config.get("strategy") == "tensor":
        for each in (drawn.scales, drawn.zeros):
            each[:] = each[0, 0].clone()
        tensors["weight_scale"] = drawn.scales[0]
    if not config.get("symmetric", True):
        zeros = drawn.zeros - middle
        tensors["weight_zero_point"] = packed(drawn.zeros.T, drawn.bits).T
        if config.get("plain") or config.get("plain zeros"):
            zeros = zeros[0] if config["strategy"] == "tensor" else zeros
            tensors["weight_zero_point"] = zeros.to(torch.int8)
    if config.get("actorder") == "group":
        tensors["weight_g_idx"] = drawn.groups.int()
    return tensors, drawn.weight


def nvfp4(shape: tuple[int, int], config: dict[str, Any], seed: int) -> Stored:
    drawn = Draw(shape, config, seed)
    scales = (drawn.scales.float() * 64).to(torch.float8_e4m3fn)
    factors = (scales.float() / 300.0).double()[:, drawn.groups]
    low, high = drawn.numbers[:, ::2], drawn.numbers[:, 1::2]
    tensors = {
        "weight_packed": (low | high << 4).to(torch.uint8),
        "weight_scale": scales,
        "weight_global_scale": torch.tensor([300.0]),
        "input_global_scale": torch.tensor([1.0]),
    }
    return tensors, (FP4[drawn.numbers].double() * factors).float().double()


def gptq(shape: tuple[int, int], config: dict[str, Any], seed: int) -> Stored:
    drawn = Draw(shape, config, seed)
    zeros = drawn.zeros
    if config.get("checkpoint_format") != "gptq_v2":
        zeros = (zeros - 1) % (1 << drawn.bits)
    tensors = {
        "qweight": packed(drawn.numbers, drawn.bits).T,
        "qzeros": packed(zeros.T, drawn.bits),
        "scales": drawn.scales.T,
        "g_idx": drawn.groups.int(),
    }
    return tensors, drawn.weight


def awq(shape: tuple[int, int], config: dict[str, Any], seed: int) -> Stored:
    drawn = Draw(shape, config, seed)
    tensors = {
        "qweight": packed(drawn.numbers.T, 4, AWQ_ORDER),
        "qzeros": packed(drawn.zeros.T, 4, AWQ_ORDER),
        "scales": drawn.scales.T,
    }
    return tensors, drawn.weight


GROUPS = {"strategy": "group", "group_size": 8}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm"}

KINDS: dict[str, tuple[Callable[..., Stored], dict[str, Any]]] = {
    "W4A16": (compressed, {"num_bits": 4, **GROUPS}),
    "W4A16 with zeros": (compressed, {"num_bits": 4, "symmetric": False, **GROUPS}),
    "W4A16 with plain zeros": (
        compressed,
        {"num_bits": 4, "symmetric": False, "plain zeros": True, **GROUPS},
    ),
    "W4A16 in any order": (
        compressed,
        {"num_bits": 4, "symmetric": False, "actorder": "group", **GROUPS},
    ),
    "W8A16 by channel": (compressed, {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "W2A16 by tensor": (compressed, {"num_bits": 2, "strategy": "tensor"}),
    "W8A8": (compressed, {"num_bits": 8, "strategy": "channel", "plain": True}),
    "W8A8 with zeros": (
        compressed,
        {"num_bits": 8, "strategy": "tensor", "symmetric": False, "plain": True},
    ),
    "NVFP4": (nvfp4, NVFP4),
    "GPTQ": (gptq, GPTQ),
    "GPTQ in any order": (gptq, {**GPTQ, "desc_act": True, "sym": False, "group_size": 24}),
    "GPTQ of 8 bits": (gptq, {**GPTQ, "bits": 8, "sym": False, "group_size": -1}),
    "GPTQ v2 of 2 bits": (
        gptq,
        {**GPTQ, "bits": 2, "sym": False, "checkpoint_format": "gptq_v2"},
    ),
    "AWQ": (awq, {**AWQ, "zero_point": True}),
    "AWQ by channel": (awq, {**AWQ, "zero_point": True, "group_size": -1}),
}


def quantisation(*names: str) -> dict[str, Any]:
    """What `config.json` says of a checkpoint with weights of these kinds."""
    (make, config), *_ = (KINDS[name] for name in names)
    if make not in (compressed, nvfp4):
        return config
    groups = {}
    for name in names:
        make, weights = KINDS[name]
        form = "nvfp4-pack-quantized" if make is nvfp4 else "pack-quantized"
        groups[name] = {
            "format": "int-quantized" if weights.get("plain") else form,
            "targets": ["Linear"],
            "weights": {each: weights[each] for each in weights if not each.startswith("plain")},
            "input_activations": {"num_bits": 8, "dynamic": True, "strategy": "token"},
        }
    form = "mixed-precision" if len(names) > 1 else groups[names[0]].pop("format")
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": groups,
        "ignore": ["lm_head", "re:.*gate$"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "quantization_status": "compressed",
    }


def write_one(
    directory: Path, name: str, shape: tuple[int, int], module: str = "model.a"
) -> Tensor:
    """Write a checkpoint of one module's weight; return what it stands for, bf16."""
    make, config = KINDS[name]
    tensors, weight = make(shape, config, 1)
    stored = {f"{module}.{end}": each.contiguous() for end, each in tensors.items()}
    save_file(
        stored | {"model.norm": torch.ones(4, dtype=torch.bfloat16)}, directory / "a.safetensors"
    )
    said = {"quantization_config": quantisation(name)}
    (directory / "config.json").write_text(json.dumps(said))
    return weight.bfloat16()


def quantise(
    directory: Path, *names: str, family: str = "qwen3", **fields: Any
) -> tuple[Path, Path]:
    """Write a model whose matrices are of these kinds by turns, and what it stands for in bf16."""
    wide, narrow = directory / "wide", directory / "narrow"
    write_tiny_model(wide, family, **fields)
    said = json.loads((wide / "config.json").read_text()) | {"dtype": "bfloat16"}
    (wide / "config.json").write_text(json.dumps(said))
    shutil.copytree(wide, narrow)
    said["quantization_config"] = quantisation(*names)
    (narrow / "config.json").write_text(json.dumps(said))
    path = wide / "model.safetensors"
    tensors = {name: each.bfloat16() for name, each in load_file(path).items()}
    stored = dict(tensors)
    for index, name in enumerate([name for name in tensors if name.endswith("proj.weight")]):
        make, config = KINDS[names[index % len(names)]]
        parts, weight = make(tuple(stored.pop(name).shape), config, index)
        # Weights as large as the model's own, so that tokens vary.
        tensors[name] = weight.bfloat16()
        stem = name.removesuffix("weight")
        stored |= {stem + end: each.contiguous() for end, each in parts.items()}
    save_file(tensors, path)
    save_file(stored, narrow / "model.safetensors")
    return narrow, wide
