"""Reads a Hugging Face `config.json` into a `ModelArch`: one reader for each family.

No part of a configuration is silently ignored: an unsupported feature that would change the numbers
is a `ConfigError` that names it. Free of torch, so that servers can use it. Knows neither weights
nor devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdserve.errors import ConfigError
from pdserve.models.config_json import Fields, read_config
from pdserve.models.readers import dense, experts, latent, post_norm

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pdserve.models.arch import ModelArch

_MAX_LAYERS = 10_000


def read_arch(directory: Path) -> ModelArch:
    """Read `directory/config.json`.

    Raises:
        ConfigError: There is no such directory or file, `parse_arch` refuses it, or there is an
            adapter beside it.
    """
    if (adapter := directory / "adapter_config.json").exists():
        raise ConfigError(
            f"{adapter}: adapters are not applied: merge it into the weights, or remove it",
            param="model",
        )
    return parse_arch(read_config(directory))


def parse_arch(config: dict[str, Any]) -> ModelArch:
    """Read a `config.json` object, as transformers 4 or 5 writes it.

    Absent fields have the default of the architecture's class in transformers.

    Raises:
        ConfigError: The architecture is unknown (the known ones are listed), a feature is
            not supported, or a field is missing or impossible.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(
            f"config.json: architectures is {names!r}: it must have exactly one name", param="model"
        )
    (name,) = names
    if name in _TEXT_PARTS:
        return parse_arch(_text_part(name, config))
    if name not in _FAMILIES:
        raise ConfigError(
            f"architecture {name!r} is not supported: use one of {', '.join(KNOWN)}", param="model"
        )
    fields = Fields(name, config)
    read, model_types = _FAMILIES[name]
    fields.only("model_type", *model_types)
    if "num_hidden_layers" in fields and (num := fields.count("num_hidden_layers")) > _MAX_LAYERS:
        raise fields.error("num_hidden_layers", num, f"at most {_MAX_LAYERS} layers are served")
    return read(fields)


def _text_part(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the decoder of a model that also reads images."""
    model_type, decoders = _TEXT_PARTS[name]
    fields = Fields(name, config)
    fields.only("model_type", model_type)
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise fields.error("text_config", text, "an object is needed")
    kinds = {_FAMILIES[decoder][1][0]: decoder for decoder in decoders}
    fields.replaced(**{"text_config.model_type": text.get("model_type")}).only(
        "text_config.model_type", *kinds
    )
    decoder = kinds.get(text.get("model_type", ""), decoders[0])
    told = {field: config[field] for field in _OF_BOTH if config.get(field) is not None}
    return {**text, **told, "architectures": [decoder]}


_FAMILIES: dict[str, tuple[Callable[[Fields], ModelArch], tuple[str, ...]]] = {
    "LlamaForCausalLM": (dense.llama, ("llama",)),
    "MistralForCausalLM": (dense.mistral, ("mistral",)),
    "Qwen2ForCausalLM": (dense.qwen2, ("qwen2",)),
    "Qwen3ForCausalLM": (dense.qwen3, ("qwen3",)),
    "MixtralForCausalLM": (experts.mixtral, ("mixtral",)),
    "Qwen3MoeForCausalLM": (experts.qwen3_moe, ("qwen3_moe",)),
    "DeepseekV2ForCausalLM": (latent.deepseek_v2, ("deepseek_v2",)),
    "DeepseekV3ForCausalLM": (latent.deepseek_v3, ("deepseek_v3", "kimi_k2")),
    "Glm4MoeForCausalLM": (experts.glm4_moe, ("glm4_moe",)),
    "Glm4MoeLiteForCausalLM": (latent.glm4_moe_lite, ("glm4_moe_lite",)),
    "Phi3ForCausalLM": (dense.phi3, ("phi3",)),
    "SeedOssForCausalLM": (dense.seed_oss, ("seed_oss",)),
    "Gemma3ForCausalLM": (post_norm.gemma3, ("gemma3_text",)),
    "MiniMaxM2ForCausalLM": (experts.minimax_m2, ("minimax_m2", "minimax")),
    "Dots1ForCausalLM": (experts.dots1, ("dots1",)),
    "SmolLM3ForCausalLM": (dense.smollm3, ("smollm3",)),
    "GraniteForCausalLM": (dense.granite, ("granite",)),
    "Ernie4_5ForCausalLM": (dense.ernie4_5, ("ernie4_5",)),
    "Ernie4_5_MoeForCausalLM": (experts.ernie4_5_moe, ("ernie4_5_moe",)),
    "Olmo2ForCausalLM": (post_norm.olmo2, ("olmo2",)),
    "Olmo3ForCausalLM": (post_norm.olmo3, ("olmo3",)),
    "Exaone4ForCausalLM": (post_norm.exaone4, ("exaone4",)),
    "GlmForCausalLM": (post_norm.glm, ("glm",)),
    "Glm4ForCausalLM": (post_norm.glm4, ("glm4",)),
    "Ministral3ForCausalLM": (dense.ministral3, ("ministral3",)),
    "HunYuanDenseV1ForCausalLM": (dense.hunyuan, ("hunyuan_v1_dense",)),
    "HunYuanMoEV1ForCausalLM": (experts.hunyuan_moe, ("hunyuan_v1_moe",)),
    "Qwen2MoeForCausalLM": (experts.qwen2_moe, ("qwen2_moe",)),
    "GptOssForCausalLM": (experts.gpt_oss, ("gpt_oss",)),
}
"""Reader of each architecture, and the values of `model_type`, by which transformers chooses the
model that it builds."""

_TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": ("gemma3", ("Gemma3ForCausalLM",)),
    "Mistral3ForConditionalGeneration": (
        "mistral3",
        ("MistralForCausalLM", "Ministral3ForCausalLM"),
    ),
}
"""Models whose decoder is served: the whole's `model_type`, and what the decoder may be."""
_OF_BOTH = (
    "bos_token_id",
    "compression_config",
    "dtype",
    "eos_token_id",
    "quantization_config",
    "tie_word_embeddings",
    "torch_dtype",
)
"""Fields that decide wherever they stand."""

KNOWN = tuple(sorted({*_FAMILIES, *_TEXT_PARTS}))
"""Names of all architectures that can be read."""
