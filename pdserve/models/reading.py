"""Reads a Hugging Face `config.json` into a `ModelArch`: one reader for each family.

No part of a configuration is silently ignored: an unsupported feature that would change the numbers
is a `ConfigError` that names it. Free of torch, so that servers can use it. Knows neither weights
nor devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdserve.errors import ConfigError
from pdserve.models.config_json import Fields, read_config
from pdserve.models.readers import dense, experts, latent

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
    "GptOssForCausalLM": (experts.gpt_oss, ("gpt_oss",)),
}
"""Reader of each architecture, and the values of `model_type`, by which transformers chooses the
model that it builds."""

KNOWN = tuple(sorted(_FAMILIES))
"""Names of all architectures that can be read."""
