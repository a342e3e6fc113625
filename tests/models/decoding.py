"""Greedy decoding with a loaded model over a paged cache of scattered blocks, on any mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pdserve.config.schema import EngineConfig, ModelConfig, ParallelConfig
from pdserve.kernels.registry import kernels_on
from pdserve.kernels.step import StepInputs
from pdserve.models.decoder import WantedStates
from pdserve.models.registry import LoadedModel, load_model
from pdserve.parallel.group import World
from pdserve.parallel.pipeline import StageLink

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from pdserve.kernels.backend import KernelBackend
    from pdserve.models.decoder import LayerHooks

BLOCK_SIZE = 16
CPU = torch.device("cpu")


def load(
    directory: Path,
    world: World | None = None,
    *,
    parallel: ParallelConfig | None = None,
    kernels: KernelBackend | None = None,
    **fields: Any,
) -> LoadedModel:
    """Load a rank's part of a model; `fields` are of the model's configuration."""
    config = EngineConfig(
        model=ModelConfig(model=str(directory), **fields), parallel=parallel or ParallelConfig()
    )
    return load_model(
        config, CPU, kernels or kernels_on(CPU), world or World.alone(), lambda _: None
    )


def greedy(
    loaded: LoadedModel,
    prompts: list[list[int]],
    num_steps: int,
    *,
    world: World | None = None,
    hooks: LayerHooks | None = None,
    narrow: bool = False,
) -> tuple[list[list[int]], Tensor]:
    """Continue all prompts together; every rank must call this.

    Args:
        narrow: Ask for the final states of last tokens alone.

    Returns:
        The tokens of each prompt, and `[prompts, steps, vocab_size]`, the logits they were
        chosen by; both equal on all ranks.
    """
    world = world or World.alone()
    arch = loaded.arch
    per_request = -(-(max(map(len, prompts)) + num_steps) // BLOCK_SIZE)
    num_blocks = per_request * len(prompts)
    planes = 1 if arch.mla else 2
    shape = (
        num_blocks, len(loaded.layers), planes, loaded.num_kv_heads, BLOCK_SIZE, arch.head_dim,
    )  # fmt: skip
    kv = torch.full(shape, float("nan"), dtype=loaded.dtype)
    layers = list(kv.unbind(1))
    link = StageLink(world.pp, CPU, loaded.dtype)
    blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
    tables = blocks.view(len(prompts), per_request)
    tokens = [list(prompt) for prompt in prompts]
    computed = [0] * len(prompts)
    found = []
    with torch.inference_mode():
        for _ in range(num_steps):
            step = _inputs(tokens, computed, tables)
            hidden = None
            if not world.pp.is_first:
                num_rows = loaded.model.hidden_rows(len(step.token_ids))
                hidden = link.recv(num_rows, arch.hidden_size)
            rows = step.query_start[1:].long() - 1
            wanted = WantedStates(rows) if narrow else None
            hidden = loaded.model.forward(step, layers, hooks, hidden, wanted=wanted)
            logits = torch.empty(len(prompts), arch.vocab_size)
            if world.pp.is_last:
                last = hidden if narrow else hidden[rows]
                logits = _whole_vocabulary(loaded.model.logits(last), loaded, world)
            else:
                link.send(hidden)
            if world.pp.size > 1:
                dist.broadcast(logits, src=world.pp.last, group=world.pp.device)
            found.append(logits)
            computed = [len(t) for t in tokens]
            for row, token in zip(tokens, logits.argmax(-1).tolist(), strict=True):
                row.append(token)
    outputs = [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)]
    return outputs, torch.stack(found, 1)


def _inputs(tokens: list[list[int]], computed: list[int], tables: Tensor) -> StepInputs:
    positions = [torch.arange(done, len(t)) for done, t in zip(computed, tokens, strict=True)]
    slots = [
        table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
        for table, at in zip(tables, positions, strict=True)
    ]
    fresh = [t[done:] for done, t in zip(computed, tokens, strict=True)]
    return StepInputs(
        token_ids=torch.tensor([token for row in fresh for token in row]),
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots),
        block_tables=tables.int(),
        query_start=torch.tensor([0, *map(len, fresh)]).cumsum(0).int(),
        context_lens=torch.tensor([len(t) for t in tokens]).int(),
    )


def _whole_vocabulary(logits: Tensor, loaded: LoadedModel, world: World) -> Tensor:
    assert logits.shape[1] == len(loaded.vocab)
    whole = torch.zeros(len(logits), loaded.arch.vocab_size)
    whole[:, loaded.vocab.start : loaded.vocab.stop] = logits
    return world.tp.all_reduce(whole)


def final_states(loaded: LoadedModel, prompt: list[int], chunks: list[int]) -> Tensor:
    """Final hidden states of a prompt that is computed in chunks."""
    arch = loaded.arch
    num_blocks = -(-len(prompt) // BLOCK_SIZE)
    planes = 1 if arch.mla else 2
    shape = (num_blocks, arch.num_layers, planes, loaded.num_kv_heads, BLOCK_SIZE, arch.head_dim)
    kv = torch.full(shape, float("nan"), dtype=loaded.dtype)
    parts, done = [], 0
    with torch.inference_mode():
        for chunk in chunks:
            at = torch.arange(done, done + chunk)
            done += chunk
            step = StepInputs(
                token_ids=torch.tensor(prompt)[at],
                positions=at,
                slot_mapping=at,
                block_tables=torch.arange(num_blocks, dtype=torch.int32).view(1, -1),
                query_start=torch.tensor([0, chunk], dtype=torch.int32),
                context_lens=torch.tensor([done], dtype=torch.int32),
            )
            parts.append(loaded.model.forward(step, list(kv.unbind(1))))
    return torch.cat(parts)
