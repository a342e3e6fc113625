"""A rank that loads holds at most its shard of the weights and the largest tensor under way."""

from __future__ import annotations

import gc
import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
from safetensors.torch import save_file

from pdserve.config.schema import ParallelConfig
from pdserve.models import registry
from pdserve.models.slots import Slot
from pdserve.models.weights import load_weights
from pdserve.parallel.mesh import MeshShape
from tests.models.decoding import load
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.parallel.group import World

MIB = 1 << 20
# Huge pages round up, and Python's own objects come and go.
SLACK = 6 * MIB

HIDDEN, INNER, VOCAB, NUM_LAYERS = 1024, 2816, 32000, 4


def _tensors(*, tied: bool) -> Iterator[tuple[str, torch.Tensor]]:
    def matrix(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.bfloat16)

    yield "model.embed_tokens.weight", matrix(VOCAB, HIDDEN)
    yield "model.norm.weight", matrix(HIDDEN)
    if not tied:
        yield "lm_head.weight", matrix(VOCAB, HIDDEN)
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{prefix}self_attn.{name}.weight", matrix(HIDDEN, HIDDEN)
        yield f"{prefix}mlp.gate_proj.weight", matrix(INNER, HIDDEN)
        yield f"{prefix}mlp.up_proj.weight", matrix(INNER, HIDDEN)
        yield f"{prefix}mlp.down_proj.weight", matrix(HIDDEN, INNER)
        yield f"{prefix}input_layernorm.weight", matrix(HIDDEN)
        yield f"{prefix}post_attention_layernorm.weight", matrix(HIDDEN)


def _write(directory: Path, *, tied: bool) -> Path:
    directory.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(dict(_tensors(tied=tied)), directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    root = tmp_path_factory.mktemp("big")
    found = {
        "own head": _write(root / "own-head", tied=False),
        "tied": _write(root / "tied", tied=True),
        "small": write_tiny_model(root / "small"),
    }
    yield found
    for directory in found.values():
        (directory / "model.safetensors").unlink()


class _Peak:
    """The most anonymous and shared memory this process has while it is open."""

    def __enter__(self) -> Self:
        gc.collect()
        self.start = self.peak = _resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.end = _resident_bytes()

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.peak = max(self.peak, _resident_bytes())


def _resident_bytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def _measure(world: World, small: Path, directory: Path, parallel: ParallelConfig) -> Any:
    """Bytes of the shard, of its largest tensor, at the peak and at the end; and is it mapped."""
    load(small, world, parallel=parallel)  # brings modules and kernels
    sizes: list[int] = []

    def spy(slots: dict[str, Slot], *args: Any, **kwargs: Any) -> None:
        sizes[:] = [2 * slot.num_elements for slot in slots.values()]
        load_weights(slots, *args, **kwargs)

    registry.load_weights = spy
    with _Peak() as memory:
        loaded = load(directory, world, parallel=parallel)
    is_mapped = "model.safetensors" in Path("/proc/self/maps").read_text()
    del loaded
    return sum(sizes), max(sizes), memory.peak - memory.start, memory.end - memory.start, is_mapped


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own head", pytest.param("tied", marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    "shape", [MeshShape(), MeshShape(tp=2), MeshShape(pp=2)], ids=["one rank", "tp 2", "pp 2"]
)
def test_the_peak_is_the_shard_and_the_largest_tensor(
    models: dict[str, Path], shape: MeshShape, name: str
) -> None:
    parallel = ParallelConfig(tensor_parallel_size=shape.tp, pipeline_parallel_size=shape.pp)
    ranks = run_ranks(shape, _measure, models["small"], models[name], parallel)
    for rank, (shard, largest, peak, kept, is_mapped) in enumerate(ranks):
        print(
            f"{name}, rank {rank} of {shape.world_size}: shard {shard / MIB:.1f} MiB, "
            f"largest {largest / MIB:.1f}, peak {peak / MIB:.1f}, kept {kept / MIB:.1f}"
        )
        assert shard - SLACK <= kept <= shard + SLACK
        assert peak <= shard + largest + SLACK
        assert not is_mapped
