"""Loads a rank's part of a model: the decoder that its `ModelArch` describes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from pdserve.errors import ConfigError
from pdserve.models.arch import ModelArch
from pdserve.models.decoder import Decoder
from pdserve.models.layers.linear import kv_heads_of
from pdserve.models.layers.parameter import Placement
from pdserve.models.naming import as_stored, unread_of
from pdserve.models.reading import read_arch
from pdserve.models.weights import Checkpoint, DummyWeights, WeightSource, load_weights
from pdserve.parallel import placed
from pdserve.parallel.mesh import split_layers

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from pdserve.config.schema import EngineConfig, ModelConfig, ParallelConfig
    from pdserve.kernels.backend import KernelBackend
    from pdserve.kernels.ops import SamplingOps
    from pdserve.kernels.step import StepInputs
    from pdserve.models.decoder import LayerHooks, StreamTap, WantedStates
    from pdserve.models.medusa import MedusaHeads
    from pdserve.models.slots import Slot
    from pdserve.parallel.dispatch import ExpertParallel
    from pdserve.parallel.group import World

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


class CausalLM(Protocol):
    """The interface of a model for the model runner; `Decoder` documents it."""

    def slots(self) -> dict[str, Slot]:
        """How to load each tensor of the checkpoint, by name."""
        ...

    @property
    def vocab(self) -> range:
        """Token ids whose logits this rank computes."""
        ...

    def forward(
        self,
        step: StepInputs,
        kv_layers: list[Tensor],
        hooks: LayerHooks | None = None,
        hidden: Tensor | None = None,
        tap: StreamTap | None = None,
        wanted: WantedStates | None = None,
    ) -> Tensor:
        """Run this stage; writes the step's KV.

        The last stage returns final hidden states, `[T, hidden_size]` or the wanted ones; other
        stages return what to send on, `[hidden_rows(T), hidden_size]`.
        """
        ...

    def hidden_rows(self, num_tokens: int) -> int:
        """Rows that a stage sends to the next for `num_tokens` tokens."""
        ...

    def idle_forward(self) -> None:
        """Take part, with no token, in the layers whose experts other engine cores share."""
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """`[T] -> [T, hidden_size]`; on the first stage, on each rank of its TP group."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """`[M, hidden_size] -> [M, len(vocab)]` fp32; on the last stage."""
        ...


class DraftHead(Protocol):
    """A drafter from a model's states, such as `models.eagle` and `models.mtp`.

    Attributes:
        aux_layers: Layers of the model before which it reads the stream, ascending.
        hidden_size: Size of the model's states.
        has_output: Whether it has an output head of its own, instead of the model's.
        offsets: `[N]` int64, added to a column of its logits to get the model's token; None if they
            are the same.
    """

    aux_layers: tuple[int, ...]
    hidden_size: int
    has_output: bool
    offsets: Tensor | None

    def slots(self) -> dict[str, Slot]:
        """How to load each tensor of its checkpoint, by name."""
        ...

    def enter(self, hidden: Tensor, aux: tuple[Tensor, ...]) -> Tensor:
        """Return the states that it reads, `[T, hidden_size]`, from the model's results.

        Args:
            hidden: `[T, hidden_size]`, normed.
            aux: The same for each of `aux_layers`, not normed.
        """
        ...

    def forward(self, step: StepInputs, states: Tensor, kv_layers: list[Tensor]) -> Tensor:
        """Return the next states, `[T, hidden_size]`, and write the step's KV.

        Args:
            step: Its tokens are those after the positions.
            states: `[T, hidden_size]`, the states of the positions.
        """
        ...

    def logits(self, states: Tensor) -> Tensor:
        """Return logits of the tokens that follow.

        Args:
            states: `[M, hidden_size]`, of those that `forward` made.

        Returns:
            `[M, N]` fp32: all of its own output head, or this rank's columns of the model's.
        """
        ...


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A drafter that runs a forward pass.

    Attributes:
        model: A separate model.
        head: Or a head that continues from the model's states.
        arch: Architecture of its layers.
        num_layers: Number of layers that have KV.
        cost: Time of a drafted token, divided by that of a token of the model.
    """

    model: LoadedModel | None
    head: DraftHead | None
    arch: ModelArch
    num_layers: int
    cost: float


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A rank's part of a model, with its weights in place.

    Attributes:
        arch: Architecture of the whole model.
        max_model_len: Maximum tokens of a request, prompt and output.
        weights_digest: Equal for equal weights, on every rank.
        layers: The model's layers that this pipeline stage has.
        num_kv_heads: Number of KV heads of this rank.
        vocab: Token ids whose logits this rank computes, on the last stage.
        experts: Location of the experts; None for a model without any.
        sampling: How ranks with logits choose tokens.
        draft: The drafter that runs a forward pass on this rank, if any.
        medusa: Medusa heads that draft for it, on the last stage, if configured.
    """

    model: CausalLM
    arch: ModelArch
    dtype: torch.dtype
    max_model_len: int
    weights_digest: str
    layers: range
    num_kv_heads: int
    vocab: range
    experts: ExpertParallel | None
    sampling: SamplingOps
    draft: LoadedDraft | None = None
    medusa: MedusaHeads | None = None


def load_model(
    config: EngineConfig,
    device: torch.device,
    kernels: KernelBackend,
    world: World,
    progress: Callable[[str], None],
) -> LoadedModel:
    """Build this rank's part of a model on `device`, run by `kernels`, and load its weights.

    Raises:
        ConfigError: The directory, its configuration or its weights cannot be used, or it cannot be
            spread over the ranks.
    """
    directory = Path(config.model.model)
    arch = read_arch(directory)
    max_model_len = _max_model_len(config.model, arch)
    checkpoint = None if config.model.load_format == "dummy" else Checkpoint(directory)
    if checkpoint is not None and arch.tie_embeddings:
        checkpoint.check_tied_head()
    dtype = _dtype(config.model, arch, checkpoint)
    source: WeightSource = checkpoint or DummyWeights(
        seed=config.model.seed, std=arch.initializer_range, dtype=dtype, identity=arch.digest
    )
    layers = _stage(arch, config.parallel, world)
    placement = Placement(
        device,
        dtype,
        kernels,
        world,
        sequence_parallel=config.parallel.enable_sequence_parallel,
        experts=_experts(arch, layers, config.parallel, world),
    )
    model = Decoder(arch, placement, max_positions=max_model_len, layers=layers)
    with source.digesting(world) as digest:
        load_weights(
            as_stored(arch.architecture, model.slots()),
            source,
            tied_head=arch.tie_embeddings,
            unused=(
                *unread_of(arch.architecture),
                *(f"model.layers.{arch.num_layers + i}." for i in range(arch.num_extra_layers)),
            ),
            progress=progress,
        )
        weights_digest = digest()
    return LoadedModel(
        model,
        arch,
        dtype,
        max_model_len,
        weights_digest,
        layers=layers,
        num_kv_heads=len(kv_heads_of(arch.num_kv_heads, placement)),
        vocab=model.vocab,
        experts=placement.experts,
        sampling=kernels.sampling,
    )


def _stage(arch: ModelArch, parallel: ParallelConfig, world: World) -> range:
    """Layers of this rank's pipeline stage.

    Raises:
        ConfigError: See `ModelArch.require_ranks`; or --pipeline-layers has the wrong sum.
    """
    explicit, num_stages = parallel.pipeline_layers, world.pp.size
    arch.require_ranks(tp=world.tp.size, pp=num_stages)
    if explicit and sum(explicit) != arch.num_layers:
        raise ConfigError(
            f"--pipeline-layers is {list(explicit)}, a total of {sum(explicit)}: it must be "
            f"{arch.num_layers}, the model's number of layers",
            param="pipeline-layers",
        )
    return split_layers(arch.num_layers, num_stages, explicit)[world.pp.index]


def _experts(
    arch: ModelArch, layers: range, parallel: ParallelConfig, world: World
) -> ExpertParallel | None:
    if arch.moe is None:
        return None
    moe_layers = [layer for layer in layers if arch.moe.layers[layer]]
    return placed.make(moe_layers, arch.moe.num_experts, parallel, world)


def _max_model_len(config: ModelConfig, arch: ModelArch) -> int:
    wanted = config.max_model_len
    if wanted is None:
        return arch.max_context_len
    if wanted > arch.max_context_len:
        raise ConfigError(
            f"--max-model-len is {wanted}, but the model supports at most {arch.max_context_len}: "
            "lower it",
            param="max-model-len",
        )
    return wanted


def _dtype(config: ModelConfig, arch: ModelArch, checkpoint: Checkpoint | None) -> torch.dtype:
    name = arch.dtype if config.dtype == "auto" else config.dtype
    if name is None:
        return torch.float32 if checkpoint is None else checkpoint.dtype
    if name not in _DTYPES:
        raise ConfigError(
            f"config.json: dtype is {name!r}, which is not supported: use --dtype with one of "
            f"{', '.join(_DTYPES)}",
            param="dtype",
        )
    return _DTYPES[name]
