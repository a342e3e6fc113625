"""Loads drafters that run a forward pass, and checks that they fit the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from pdserve.config.schema import ParallelConfig, Role
from pdserve.config.speculative import DRAFT_MODEL, MEDUSA, MTP
from pdserve.errors import ConfigError
from pdserve.models import eagle, mtp
from pdserve.models.eagle import make_eagle, read_eagle
from pdserve.models.layers.parameter import Placement
from pdserve.models.medusa import MedusaHeads, read_medusa
from pdserve.models.mtp import MtpHead
from pdserve.models.reading import read_arch
from pdserve.models.registry import LoadedDraft, load_model
from pdserve.models.weights import Checkpoint, load_weights
from pdserve.parallel.group import World
from pdserve.worker import kv_memory
from pdserve.worker.drafting.guesses import Guesses
from pdserve.worker.drafting.heads import HeadDrafter
from pdserve.worker.drafting.medusa import MedusaDrafter
from pdserve.worker.drafting.model import DraftModel, FirstRanksDrafts
from pdserve.worker.sampler import first_largest
from pdserve.worker.vocabulary import SpreadSampler, SpreadVocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.config.schema import EngineConfig
    from pdserve.connectors.base import KVLayout
    from pdserve.kernels.backend import KernelBackend
    from pdserve.models.arch import ModelArch
    from pdserve.models.registry import DraftHead, LoadedModel
    from pdserve.models.slots import Slot
    from pdserve.parallel.group import Group
    from pdserve.worker.device import Device
    from pdserve.worker.input_batch import InputBatch
    from pdserve.worker.verifying import RowSampler


def needs_draft(config: EngineConfig, world: World) -> bool:
    """Whether this stage has a drafter with its own KV; a prefill-only engine never has."""
    speculative = config.speculative
    has_kv = speculative.is_by_head or speculative.method == DRAFT_MODEL
    return has_kv and config.role is not Role.PREFILL and world.pp.is_last


def load_draft(
    config: EngineConfig,
    target: LoadedModel,
    tp: Group,
    device: torch.device,
    kernels: KernelBackend,
    progress: Callable[[str], None],
) -> LoadedDraft | None:
    """Load the drafter, unsharded, in the dtype of the model that it drafts for.

    Returns:
        A draft model on the first rank of `tp`, or a head on each rank, as it shares the model's
        embedding.

    Raises:
        ConfigError: It cannot be used, or does not fit the model.
    """
    speculative = config.speculative
    if not (speculative.is_by_head or tp.is_first):
        return None
    progress("loading what drafts")
    try:
        if speculative.is_by_head:
            return _load_head(config, target, tp, device, kernels, progress)
        return _load_model(config, target, device, kernels, progress)
    except ConfigError as error:
        field = "model" if speculative.model else "method"
        flag = f"speculative-config.{field}"
        written = speculative.model or speculative.method
        raise ConfigError(f"--{flag} is {written!r}: {error}", param=flag) from None


def load_medusa(
    config: EngineConfig,
    target: LoadedModel,
    world: World,
    device: torch.device,
    kernels: KernelBackend,
) -> MedusaHeads | None:
    """Load Medusa heads, if configured; they are on each rank of the last stage.

    Raises:
        ConfigError: They cannot be used, or do not fit the model.
    """
    speculative = config.speculative
    if speculative.method != MEDUSA or config.role is Role.PREFILL:
        return None
    directory = Path(speculative.model)
    arch = read_medusa(directory, target.arch, speculative.max_drafted)
    if not world.pp.is_last:
        return None
    placement = Placement(device, target.dtype, kernels, world)
    return MedusaHeads(arch, directory, placement, target=target.model.logits)


def draft_cost(target: LoadedModel) -> float:
    """Return the time per draft token over that per token here; 0 if drafts are looked up."""
    if target.medusa is not None:
        return target.medusa.num_weights / _weights_of(target)
    return 0.0 if target.draft is None else target.draft.cost


def _load_model(
    config: EngineConfig,
    target: LoadedModel,
    device: torch.device,
    kernels: KernelBackend,
    progress: Callable[[str], None],
) -> LoadedDraft:
    path = config.speculative.model
    arch = read_arch(Path(path))
    if arch.vocab_size != target.arch.vocab_size:
        raise ConfigError(
            f"its vocabulary has {arch.vocab_size} tokens, but the model's has "
            f"{target.arch.vocab_size}: use a draft model with the same tokenizer"
        )
    model = msgspec.structs.replace(
        config.model,
        model=path,
        dtype=str(target.dtype).removeprefix("torch."),
        max_model_len=min(arch.max_context_len, target.max_model_len),
    )
    alone = msgspec.structs.replace(config, model=model, parallel=ParallelConfig())
    loaded = load_model(alone, device, kernels, World.alone(), progress)
    return LoadedDraft(
        model=loaded,
        head=None,
        arch=loaded.arch,
        num_layers=len(loaded.layers),
        cost=_weights_of(loaded) / _weights_of(target),
    )


def _load_head(
    config: EngineConfig,
    target: LoadedModel,
    tp: Group,
    device: torch.device,
    kernels: KernelBackend,
    progress: Callable[[str], None],
) -> LoadedDraft:
    speculative = config.speculative
    directory = Path(speculative.model or config.model.model)
    head: DraftHead
    layer, unused = target.arch, mtp.NOT_READ
    if speculative.method in MTP:
        head, source = MtpHead(target, device, kernels), Checkpoint(directory)
    else:
        arch = read_eagle(directory, speculative.method, target.arch)
        layer, unused = arch.layer, eagle.NOT_READ
        source, placement = Checkpoint(directory), Placement(device, target.dtype, kernels)
        head = make_eagle(arch, source, placement, target=target)
    slots = head.slots()
    load_weights(slots, source, tied_head=False, unused=unused, progress=progress)
    num_weights = _weights_per_token(layer, slots)
    if not head.has_output:
        num_weights += len(target.vocab) * target.arch.hidden_size
    return LoadedDraft(
        model=None,
        head=head,
        arch=layer,
        num_layers=1,
        cost=num_weights / _weights_of(target),
    )


def layout_of(draft: LoadedDraft, dtype: torch.dtype, block_size: int) -> KVLayout:
    """Return the layout of a pool of one block of its KV."""
    return kv_memory.layout_of_block(
        draft.arch,
        dtype,
        block_size,
        num_layers=draft.num_layers,
        num_kv_heads=draft.arch.num_kv_heads,
    )


def _weights_of(loaded: LoadedModel) -> float:
    return _weights_per_token(loaded.arch, loaded.model.slots())


def _weights_per_token(arch: ModelArch, slots: Mapping[str, Slot]) -> float:
    """Return the weight elements read per token on this rank, which dominate its time."""
    share = 1.0 if arch.moe is None else arch.moe.top_k / arch.moe.num_experts
    return sum(
        slot.num_elements * (share if ".experts." in name else 1.0) for name, slot in slots.items()
    )


def drafter_of(
    config: EngineConfig,
    target: LoadedModel,
    batch: InputBatch,
    num_blocks: int,
    device: Device,
    world: World,
    sampler: RowSampler | None,
) -> FirstRanksDrafts | HeadDrafter | MedusaDrafter | None:
    """Return the drafter that takes a forward pass, if there is one.

    Args:
        num_blocks: Blocks of its KV.
        sampler: Given on the last stage.

    Raises:
        ConfigError: There is not enough memory for its KV.
    """
    tp = world.tp
    if target.medusa is not None:
        return _by_heads(target.medusa, tp)
    if not needs_draft(config, world):
        return None
    draft = target.draft
    if draft is None:
        return FirstRanksDrafts(None, tp)
    assert sampler is not None
    whole = sampler.guess_whole if isinstance(sampler, SpreadSampler) else sampler.guess
    block_size = kv_memory.block_size_on(device.torch, config.cache)
    layout = msgspec.structs.replace(
        layout_of(draft, target.dtype, block_size), num_blocks=num_blocks
    )
    if draft.head is not None:
        max_num_tokens = max(
            config.scheduler.max_num_batched_tokens,
            0 if config.scheduler.enable_chunked_prefill else batch.max_blocks * layout.block_size,
        )
        return HeadDrafter(
            draft.head,
            layout,
            batch,
            tp,
            Guesses(whole if draft.head.has_output else sampler.guess, draft.head.offsets),
            device=device,
            max_num_tokens=max_num_tokens,
        )
    assert draft.model is not None
    own = DraftModel(draft.model, layout, batch, Guesses(whole), device=device)
    return FirstRanksDrafts(own, tp)


def _by_heads(heads: MedusaHeads, tp: Group) -> MedusaDrafter:
    if tp.size == 1:
        return MedusaDrafter(heads, lambda logits: first_largest(logits)[0].cpu().numpy())
    spread = SpreadVocabulary(
        tp, heads.vocab, vocab_size=heads.vocab_size, device=torch.device("cpu")
    )
    return MedusaDrafter(heads, lambda logits: spread.first_largest(logits)[0])
