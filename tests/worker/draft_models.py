"""Tiny models that draft: a smaller one that puts out the same tokens, heads, a layer more."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from pdserve.kernels.registry import kernels_on
from pdserve.models.mtp import MtpHead
from pdserve.models.weights import DummyWeights
from pdserve.parallel.group import World
from tests.models.decoding import CPU, load
from tests.tiny_models import CLASSES, FIELDS_OF
from tests.worker.driver import TINY

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

_SILENT = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def write_pair(directory: Path, *, num_layers: int = 6, **arch: Any) -> tuple[Path, Path]:
    """Write a model all of whose layers but the first add nothing, and one of that layer alone."""
    weights: dict[str, Tensor] = {}
    made = []
    for name, num in (("target", num_layers), ("draft", 1)):
        path = directory / name
        path.mkdir()
        config = {**TINY, "num_hidden_layers": num, **arch}
        (path / "config.json").write_text(json.dumps(config))
        slots = load(path, World.alone(), load_format="dummy").model.slots()
        source = DummyWeights(
            seed=0, std=TINY["initializer_range"], dtype=torch.float32, identity=""
        )
        weights = {each: tensor.clone() for each, tensor in source.tensors(slots)}
        for each, tensor in weights.items():
            if each.endswith(_SILENT) and ".layers.0." not in each:
                tensor.zero_()
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        made.append(path)
    return made[0], made[1]


def write_eagle(
    directory: Path,
    method: str,
    *,
    speculators: bool = False,
    vocab_size: int = TINY["vocab_size"],
    **config: Any,
) -> dict[str, Tensor]:
    """Write a random EAGLE head for `TINY`, in one of the two formats; return its weights.

    EAGLE-3's drafts every second token.

    Returns:
        Weights by their names below the layer, and beside it; `to_target` are the ids of what it
        drafts.
    """
    size, heads, kv_heads = TINY["hidden_size"], 4, TINY["num_key_value_heads"]
    head_dim, inner = size // heads, TINY["intermediate_size"]
    is_third = method == "eagle3"
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).mul_(0.2)

    read = 2 * size if is_third else size
    layer = {
        "self_attn.q_proj.weight": drawn(heads * head_dim, read),
        "self_attn.k_proj.weight": drawn(kv_heads * head_dim, read),
        "self_attn.v_proj.weight": drawn(kv_heads * head_dim, read),
        "self_attn.o_proj.weight": drawn(size, heads * head_dim),
        "mlp.gate_proj.weight": drawn(inner, size),
        "mlp.up_proj.weight": drawn(inner, size),
        "mlp.down_proj.weight": drawn(size, inner),
        "post_attention_layernorm.weight": 1 + drawn(size),
    }
    beside = {"fc.weight": drawn(size, (3 if is_third else 2) * size)}
    to_target = torch.arange(0, vocab_size, 2)
    if is_third:
        layer["input_layernorm.weight"] = 1 + drawn(size)
        layer["hidden_norm.weight"] = 1 + drawn(size)
        beside["norm.weight"] = 1 + drawn(size)
        beside["lm_head.weight"] = drawn(len(to_target), size)
    prefix = "midlayer." if is_third and not speculators else "layers.0."
    stored = beside | {prefix + name: tensor for name, tensor in layer.items()}
    stored["embed_tokens.weight"] = drawn(vocab_size, size)
    if is_third:
        stored["d2t"] = to_target - torch.arange(len(to_target))
        stored["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, to_target, True)
    directory.mkdir()
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    shape = {**TINY, "num_hidden_layers": 1, "vocab_size": vocab_size}
    extra = {"draft_vocab_size": len(to_target)} if is_third else {}
    written = {**shape, **extra, **config}
    if speculators:
        written = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": method,
            "speculators_config": {"algorithm": method},
            "transformer_layer_config": {**shape, "model_type": "llama"},
            **extra,
            **config,
        }
    (directory / "config.json").write_text(json.dumps(written))
    return layer | beside | {"to_target": to_target}


def write_mtp(
    directory: Path, family: str = "deepseek_v3", *, is_silent: bool, num_extra_layers: int = 1
) -> None:
    """Write a model with a layer that predicts further tokens.

    Args:
        is_silent: No layer adds anything: the model goes by its last token alone, and its last
            layer does the same.
    """
    shape = {
        **TINY,
        **FIELDS_OF[family],
        "architectures": [CLASSES[family][1]],
        "num_nextn_predict_layers": num_extra_layers,
    }
    (directory / "config.json").write_text(json.dumps(shape))
    target = load(directory, World.alone(), load_format="dummy")
    slots = dict(target.model.slots())
    if num_extra_layers:
        slots |= MtpHead(target, CPU, kernels_on(CPU)).slots()
    source = DummyWeights(seed=0, std=0.25, dtype=torch.float32, identity="")
    weights = {name: tensor.clone() for name, tensor in source.tensors(slots)}
    for name, tensor in weights.items() if is_silent else ():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        if name.endswith("eh_proj.weight"):
            size = len(tensor)
            tensor.copy_(torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1))
    last = f"model.layers.{target.arch.num_layers}."
    if num_extra_layers:
        weights[f"{last}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[f"{last}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
