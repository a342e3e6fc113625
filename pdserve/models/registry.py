"""Architecture names -> models, and a model loaded from a configuration.

A new architecture is one line in `_MODELS`, one reader in `arch`, and its module.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch

from pdserve.errors import ConfigError
from pdserve.models.arch import ModelArch, read_arch
from pdserve.models.layers.parameter import Placement
from pdserve.models.weights import Checkpoint, DummyWeights, WeightSource, load_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from pdserve.config.schema import ModelConfig
    from pdserve.models.decoder import LayerHooks, StepInputs
    from pdserve.models.weights import Slot

_MODELS = {
    "LlamaForCausalLM": "pdserve.models.llama",
    "MistralForCausalLM": "pdserve.models.llama",
    "Qwen2ForCausalLM": "pdserve.models.qwen2",
    "Qwen3ForCausalLM": "pdserve.models.qwen3",
}

_CPU_HEAD_DIMS = range(16, 257, 16)

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


class CausalLM(Protocol):
    """What the model runner needs of a model; `Decoder` documents it."""

    def slots(self) -> dict[str, Slot]:
        """How each tensor of the checkpoint is loaded, by name."""
        ...

    def forward(
        self, step: StepInputs, kv_layers: list[Tensor], hooks: LayerHooks | None = None
    ) -> Tensor:
        """Final hidden states of a step, `[T, hidden_size]`; writes the step's KV."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """`[M, hidden_size] -> [M, vocab_size]` fp32."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights in place.

    Attributes:
        max_model_len: Tokens a request may have, prompt and output.
        weights_digest: Equal for equal weights.
    """

    model: CausalLM
    arch: ModelArch
    dtype: torch.dtype
    max_model_len: int
    weights_digest: str


def load_model(
    config: ModelConfig, device: torch.device, progress: Callable[[str], None]
) -> LoadedModel:
    """Build the model of `config.model` on `device` and load its weights.

    Raises:
        ConfigError: The directory, its configuration or its weights cannot be used.
    """
    directory = Path(config.model)
    arch = read_arch(directory)
    if device.type == "cpu" and arch.head_dim not in _CPU_HEAD_DIMS:
        raise ConfigError(
            f"config.json: head_dim is {arch.head_dim}: the CPU kernels take multiples of 16 up "
            "to 256",
            param="model",
        )
    max_model_len = _max_model_len(config, arch)
    checkpoint = None if config.load_format == "dummy" else Checkpoint(directory)
    dtype = _dtype(config, arch, checkpoint)
    source: WeightSource = checkpoint or DummyWeights(
        seed=config.seed, std=arch.initializer_range, dtype=dtype, identity=arch.digest
    )
    module = importlib.import_module(_MODELS[arch.architecture])
    construct = cast("Callable[..., CausalLM]", getattr(module, arch.architecture))
    model = construct(arch, Placement(device, dtype), max_positions=max_model_len)
    load_weights(model.slots(), source, tied_head=arch.tie_embeddings, progress=progress)
    return LoadedModel(model, arch, dtype, max_model_len, source.digest)


def _max_model_len(config: ModelConfig, arch: ModelArch) -> int:
    wanted = config.max_model_len
    if wanted is None:
        return arch.max_context_len
    if wanted > arch.max_context_len:
        raise ConfigError(
            f"--max-model-len is {wanted}: the model's positions end at {arch.max_context_len}",
            param="max-model-len",
        )
    return wanted


def _dtype(config: ModelConfig, arch: ModelArch, checkpoint: Checkpoint | None) -> torch.dtype:
    name = arch.dtype if config.dtype == "auto" else config.dtype
    if name is None:
        return torch.float32 if checkpoint is None else checkpoint.dtype
    if name not in _DTYPES:
        raise ConfigError(
            f"config.json: dtype is {name!r}: use --dtype with one of {', '.join(_DTYPES)}",
            param="dtype",
        )
    return _DTYPES[name]
