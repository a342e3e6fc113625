"""Integers and 4-bit floats with scales are widened to what their formats' specifications say."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.config.schema import ParallelConfig
from pdserve.errors import ConfigError
from pdserve.models.config_json import Fields
from pdserve.models.quantised import read_quantised
from pdserve.models.slots import Slot
from pdserve.models.weights import Checkpoint
from pdserve.parallel.group import World
from pdserve.parallel.mesh import MeshShape
from tests.models.decoding import greedy, load
from tests.models.quantising import (
    AWQ,
    AWQ_ORDER,
    GPTQ,
    IN_ORDER,
    KINDS,
    packed,
    quantisation,
    quantise,
    write_one,
)
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

PROMPTS = [[5, 17, 33, 80, 2], [9] * 21]


def read_one(directory: Path, shape: tuple[int, int], region: Any = None) -> Tensor:
    slots = {
        "model.a.weight": Slot(shape, lambda _: None, region),
        "model.norm": Slot((4,), None),
    }
    checkpoint = Checkpoint(directory)
    checkpoint.check(slots, tied_head=False)
    ((_, found),) = checkpoint.tensors(slots)
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_region_is_widened_as_in_the_whole(tmp_path: Path, name: str) -> None:
    shape = 40, 80
    whole = write_one(tmp_path, name, shape)
    everything = slice(None)
    for region in (
        None,
        (slice(20), everything),
        (slice(13, 40), everything),
        (everything, slice(20)),
        (everything, slice(20, 40)),
        (everything, slice(60, 80)),
        (slice(3, 4), slice(5, 77)),
        (slice(7, 7), slice(11, 11)),
    ):
        found = read_one(tmp_path, shape, region)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, whole if region is None else whole[region])


def test_numbers_are_where_the_specifications_say() -> None:
    numbers = torch.arange(8)[None]
    words = [int(packed(numbers, 4, order)) for order in (IN_ORDER, AWQ_ORDER)]
    assert words == [0x76543210, 0x75316420]


def decoded(world: World, directory: Path, parallel: ParallelConfig) -> tuple[Any, Tensor]:
    loaded = load(directory, world, parallel=parallel)
    if loaded.experts is not None:
        loaded.experts.begin_step([sum(map(len, PROMPTS))])
    found = greedy(loaded, PROMPTS, 1, world=world)
    if loaded.experts is not None:
        loaded.experts.end_step()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [(name,) for name in KINDS] + [("W4A16", "W8A8", "NVFP4", "W4A16 with zeros")]
)
def test_it_computes_what_its_weights_stand_for(tmp_path: Path, names: tuple[str, ...]) -> None:
    (tokens, logits), (others, as_wide) = (
        greedy(load(each), PROMPTS, 4) for each in quantise(tmp_path, *names)
    )
    assert not torch.equal(logits[0], logits[1]), "prompts make no difference"
    assert tokens == others
    assert torch.equal(logits, as_wide)


MESHES: dict[str, tuple[MeshShape, dict[str, Any]]] = {
    "tp": (MeshShape(tp=2), {}),
    "pp": (MeshShape(pp=2), {}),
    "ep": (MeshShape(tp=2), {"enable_expert_parallel": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "phi3", "deepseek_v3"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["W4A16 in any order", "GPTQ", "AWQ", "W8A8", "NVFP4"])
@pytest.mark.covering(1)
def test_ranks_widen_their_parts(tmp_path: Path, name: str, mesh: str, family: str) -> None:
    shape, fields = MESHES[mesh]
    if family == "phi3":
        fields = {}
    parallel = ParallelConfig(
        tensor_parallel_size=shape.tp, pipeline_parallel_size=shape.pp, **fields
    )
    found = [
        run_ranks(shape, decoded, each, parallel)[0]
        for each in quantise(tmp_path, name, family=family)
    ]
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def change(directory: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    path = directory / "a.safetensors"
    tensors = {name: each.clone() for name, each in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("W4A16 with zeros", lambda t: t.pop("model.a.weight_zero_point"), "quantization_config"),
        ("W4A16 in any order", lambda t: t.pop("model.a.weight_g_idx"), "quantization_config"),
        ("GPTQ in any order", lambda t: t.pop("model.a.g_idx"), "quantization_config"),
        ("GPTQ", lambda t: t.pop("model.a.scales"), "quantization_config"),
        ("AWQ", lambda t: t.update({"model.a.g_idx": torch.zeros(80).int()}), "g_idx I32"),
        ("AWQ", lambda t: t.update({"model.a.qzeros": t["model.a.qzeros"][:3]}), r"I32 \[3, 5\]"),
        ("W8A8", lambda t: t.update({"model.a.weight_packed": torch.ones(4)}), "unexpected"),
        ("GPTQ", lambda t: t.update({"model.a.weight": torch.ones(40, 80)}), "unexpected"),
        (
            "GPTQ",
            lambda t: t.update({"model.a.bias": torch.ones(40).bfloat16()}),
            "unexpected: .*bias",
        ),
        ("GPTQ", lambda t: t["model.a.qzeros"].zero_(), "model.a.weight: zero points differ"),
        ("GPTQ", lambda t: t["model.a.g_idx"].fill_(10), "a.weight: .* not among its 10"),
        ("W4A16 in any order", lambda t: t["model.a.weight_g_idx"][3:5].fill_(-1), "not among"),
    ],
)
def test_what_is_stored_otherwise_is_refused(
    tmp_path: Path, name: str, edit: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    write_one(tmp_path, name, (40, 80))
    change(tmp_path, edit)
    with pytest.raises(ConfigError, match=message):
        read_one(tmp_path, (40, 80))


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("GPTQ", lambda t: t.update({"model.a.bias": torch.zeros(40).bfloat16()})),
        ("GPTQ", lambda t: t.pop("model.a.g_idx")),
        # Of GPTQModel's releases some wrote symmetric zero points as gptq_v2 has them.
        ("GPTQ", lambda t: t["model.a.qzeros"].fill_(0x88888888 - (1 << 32))),
        ("W4A16", lambda t: t.update({"model.a.weight_scale": t["model.a.weight_scale"].float()})),
    ],
)
def test_what_makes_no_difference_is_taken(
    tmp_path: Path, name: str, edit: Callable[[dict[str, Tensor]], Any]
) -> None:
    whole = write_one(tmp_path, name, (40, 80))
    change(tmp_path, edit)
    assert torch.equal(read_one(tmp_path, (40, 80)), whole)


def test_columns_that_name_no_group_are_in_order(tmp_path: Path) -> None:
    whole = write_one(tmp_path, "W4A16", (40, 80))
    change(tmp_path, lambda t: t.update({"model.a.weight_g_idx": torch.full((80,), -1).int()}))
    said = json.loads((tmp_path / "config.json").read_text())
    said["quantization_config"]["config_groups"]["W4A16"]["weights"]["actorder"] = "group"
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert torch.equal(read_one(tmp_path, (40, 80), (slice(9), slice(20, 60))), whole[:9, 20:60])


def test_modules_may_have_other_bits_and_groups_by_gptqs_dynamic(tmp_path: Path) -> None:
    whole = write_one(tmp_path, "GPTQ of 8 bits", (40, 80))
    dynamic = {"-:lm_head": {}, r"+:.*\.a": {"bits": 8, "group_size": -1}}
    said = {"quantization_config": {**GPTQ, "sym": False, "dynamic": dynamic}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert torch.equal(read_one(tmp_path, (40, 80)), whole)


def test_a_rank_reads_the_words_and_scales_of_its_region() -> None:
    scheme = read_quantised(Fields("", {"quantization_config": quantisation("W4A16")}))
    assert scheme is not None
    region = slice(3, 9), slice(60, 90)
    assert scheme.schemes[0].regions((40, 160), region) == {
        "numbers": (slice(3, 9), slice(7, 12)),
        "scale": (slice(3, 9), slice(7, 12)),
    }


def test_equal_files_that_are_widened_differently_have_different_digests(tmp_path: Path) -> None:
    digests = set()
    for form in ("gptq", "gptq_v2"):
        write_one(tmp_path, "GPTQ", (40, 80))
        said = {"quantization_config": {**GPTQ, "sym": False, "checkpoint_format": form}}
        (tmp_path / "config.json").write_text(json.dumps(said))
        with Checkpoint(tmp_path).digesting(World.alone()) as digest:
            digests.add(digest())
    assert len(digests) == 2


def test_a_quantised_head_is_not_the_embedding(tmp_path: Path) -> None:
    write_one(tmp_path, "GPTQ", (40, 80), "lm_head")
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs from"):
        Checkpoint(tmp_path).check_tied_head()


def weights_of(**fields: Any) -> dict[str, Any]:
    config = quantisation("W4A16")
    config["config_groups"]["W4A16"]["weights"].update(fields)
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (weights_of(num_bits=3), "W4A16.weights.num_bits is 3: only 2, 4 and 8"),
        (weights_of(strategy="block"), "strategy is 'block': only group, channel and tensor"),
        (weights_of(group_size=None), "group_size is None"),
        (weights_of(type="float"), "type is 'float'"),
        (weights_of(actorder="random"), "actorder is 'random'"),
        (
            quantisation("W4A16") | {"format": "marlin-24"},
            "format is 'marlin-24': only pack",
        ),
        (quantisation("W4A16") | {"format": "mixed-precision"}, "W4A16.format is 'mixed"),
        (quantisation("W4A16") | {"config_groups": None}, "config_groups is None"),
        (
            quantisation("W4A16") | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format is 'sparse-24-bitmask'",
        ),
        ({**GPTQ, "bits": 3}, "quantization_config.bits is 3: only 2, 4 and 8"),
        ({**GPTQ, "bits": None}, "quantization_config.bits is None"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype is 'int16'"),
        ({**GPTQ, "dynamic": {"+:a": {"sym": False}}}, r"dynamic.\+:a.sym is False"),
        ({**GPTQ, "group_size": 0}, "group_size is 0"),
        ({**AWQ, "version": "gemv"}, "version is 'gemv': only 'gemm'"),
        ({**AWQ, "bits": 8}, "quantization_config.bits is 8: only 4"),
        ({**AWQ, "zero_point": False}, "zero_point is False"),
        ({**AWQ, "backend": "llm-awq"}, "backend is 'llm-awq'"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_field_and_value(
    config: dict[str, Any], message: str
) -> None:
    said = {"architectures": ["LlamaForCausalLM"], "quantization_config": config}
    with pytest.raises(ConfigError, match=message):
        read_quantised(Fields("", said))
