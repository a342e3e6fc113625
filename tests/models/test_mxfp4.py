"""MXFP4 checkpoints: what transformers makes of their numbers, whole and by regions; refusals."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pdserve.config.schema import ParallelConfig
from pdserve.errors import ConfigError
from pdserve.models.mxfp4 import Mxfp4Stack
from pdserve.models.quantised_format import NUMBERS
from pdserve.models.scaled import SCALE
from pdserve.parallel.mesh import MeshShape
from tests.models.decoding import greedy, load
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from pdserve.parallel.group import World

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], list(range(40))]
STACKED = "model.layers.1.mlp.experts.down_proj"
QUANTISATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


def packed(experts: int, rows: int, columns: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Blocks and scales of random numbers, a few units large."""
    generator = torch.Generator().manual_seed(seed)
    shape = experts, rows, columns // 32
    blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An MXFP4 checkpoint, and one in bf16 of what it stands for. A rank's part is no whole run."""
    wide = write_tiny_model(tmp_path_factory.mktemp("wide"), "gpt_oss", intermediate_size=96)
    narrow = tmp_path_factory.mktemp("narrow")
    said = json.loads((wide / "config.json").read_text()) | {"dtype": "bfloat16"}
    (wide / "config.json").write_text(json.dumps(said))
    (narrow / "config.json").write_text(json.dumps(said | {"quantization_config": QUANTISATION}))
    tensors = {
        name: each.to(torch.bfloat16)
        for name, each in load_file(wide / "model.safetensors").items()
    }
    stored = dict(tensors)
    for seed, name in enumerate([n for n in tensors if n.endswith("_proj") and "experts" in n]):
        experts, columns, rows = tensors[name].shape
        blocks, scales = packed(experts, rows, columns, seed)
        tensors[name] = convert_moe_packed_tensors(blocks, scales)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    assert len(stored) == len(tensors) + 2 * said["num_hidden_layers"]
    save_file(tensors, wide / "model.safetensors")
    save_file(stored, narrow / "model.safetensors")
    return narrow, wide


def test_it_computes_what_transformers_widens_its_weights_to(pair: tuple[Path, Path]) -> None:
    loaded, expected = (load(each, dtype="auto") for each in pair)
    assert loaded.dtype == torch.bfloat16
    (tokens, logits), (others, as_wide) = (greedy(each, PROMPTS, 4) for each in (loaded, expected))
    assert tokens == others
    assert torch.equal(logits, as_wide)


@pytest.mark.slow
@pytest.mark.parametrize("is_by_expert", [False, True], ids=["sliced", "placed"])
def test_ranks_widen_their_parts(pair: tuple[Path, Path], is_by_expert: bool) -> None:
    shape = MeshShape(tp=2)
    parallel = ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=is_by_expert)
    found = [run_ranks(shape, _decode, each, parallel)[0] for each in pair]
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def _decode(world: World, directory: Path, parallel: ParallelConfig) -> tuple[Any, Tensor]:
    loaded = load(directory, world, parallel=parallel)
    assert loaded.experts is not None
    loaded.experts.begin_step([sum(map(len, PROMPTS))])
    found = greedy(loaded, PROMPTS, 1, world=world)
    loaded.experts.end_step()
    return found


@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4)),
    cuts=st.tuples(*(st.integers(0, 200) for _ in range(6))),
)
def test_a_region_is_widened_as_in_the_whole(
    sizes: tuple[int, int, int], cuts: tuple[int, ...]
) -> None:
    experts, rows, runs = sizes
    blocks, scales = packed(experts, rows, 32 * runs)
    whole, scheme = convert_moe_packed_tensors(blocks, scales), Mxfp4Stack()
    shape = tuple(whole.shape)
    assert shape == (experts, 32 * runs, rows)
    region = tuple(
        slice(*sorted((a % (size + 1), b % (size + 1))))
        for a, b, size in zip(cuts[:3], cuts[3:], shape, strict=True)
    )
    for part in (region, None):
        parts = scheme.regions(shape, part)
        tensors = {NUMBERS: blocks[parts[NUMBERS]], SCALE: scales[parts[SCALE]]}
        found = scheme.widened(tensors, shape=shape, region=part, to=torch.bfloat16)
        assert torch.equal(found, whole if part is None else whole[part])


def test_scales_may_be_in_another_file_and_the_config_silent_on_dtypes(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    tensors = load_file(pair[0] / "model.safetensors")
    scales = {name: tensors.pop(name) for name in [*tensors] if name.endswith("_scales")}
    save_file(tensors, tmp_path / "b.safetensors")
    save_file(scales, tmp_path / "a.safetensors")
    said = json.loads((pair[0] / "config.json").read_text())
    del said["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(said))
    loaded = load(tmp_path, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    expected = greedy(load(pair[1], dtype="auto"), PROMPTS, 2)[1]
    assert torch.equal(greedy(loaded, PROMPTS, 2)[1], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(STACKED + "_scales"), r"{name} .* U8 \[8, 64, 3, 16\]$"),
        (
            lambda t: t.update({STACKED + "_scales": t[STACKED + "_scales"][:1]}),
            r"s U8 \[1, 64, 3\]$",
        ),
        (
            lambda t: t.update({STACKED + "_blocks": t[STACKED + "_blocks"][..., :8].contiguous()}),
            r"{name} .*_blocks U8 \[8, 64, 3, 8\]",
        ),
        (
            lambda t: t.update({STACKED + "_scales": t[STACKED + "_scales"].float()}),
            r"scales F32 \[8, 64, 3\]$",
        ),
    ],
    ids=["no scales", "too few", "other blocks", "dtype"],
)
def test_what_does_not_fit_is_refused_by_name(
    pair: tuple[Path, Path],
    tmp_path: Path,
    change: Callable[[dict[str, Tensor]], Any],
    message: str,
) -> None:
    (tmp_path / "config.json").write_text((pair[0] / "config.json").read_text())
    tensors = load_file(pair[0] / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message.format(name=STACKED)):
        load(tmp_path)
