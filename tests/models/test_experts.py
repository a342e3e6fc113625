"""Mixture of experts and latent attention against transformers, on one rank and on several."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pdserve.config.schema import ParallelConfig
from pdserve.errors import ConfigError
from pdserve.kernels.registry import kernels_on
from pdserve.kernels.step import StepInputs
from pdserve.models.layers.moe import MoE, RoutedExperts
from pdserve.models.layers.parameter import Placement
from pdserve.models.reading import read_arch
from pdserve.parallel.dispatch import Routing, SlicedExperts
from pdserve.parallel.group import World
from pdserve.parallel.mesh import MeshShape
from tests.models.decoding import CPU, final_states, greedy, load
from tests.ranks import run_ranks
from tests.tiny_models import VOCAB_SIZE, greedy_by_transformers, one_thread, write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from pdserve.parallel.dispatch import LocalExperts

pytestmark = pytest.mark.slow

NUM_STEPS = 16
GENERATOR = torch.Generator().manual_seed(5)
PROMPTS = [torch.randint(VOCAB_SIZE, (n,), generator=GENERATOR).tolist() for n in (1, 2, 17, 300)]

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "mixtral, window, tied": ("mixtral", {"sliding_window": 23, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, some layers dense, plain scores, biases": (
        "qwen3_moe",
        {
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    ),
    "qwen3_moe, window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 20}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2, lite": (
        "deepseek_v2",
        {"topk_method": "greedy", "q_lora_rank": None, "n_group": None, "topk_group": None},
    ),
    "deepseek_v2, yarn": (
        "deepseek_v2",
        {"rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.3}},
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3, no groups, plain scores, biases": (
        "deepseek_v3",
        {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "attention_bias": True},
    ),
    "deepseek_v3, halves rotate": (
        "deepseek_v3",
        {"rope_interleave": False, "q_lora_rank": None, "rms_norm_eps": 1e-2},
    ),
    "deepseek_v3, yarn": (
        "deepseek_v3",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek_v3, latent of 512": (
        "deepseek_v3",
        {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 2},
    ),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe, a quarter rotates, no norms of q and k, groups": (
        "glm4_moe",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e5,
                "partial_rotary_factor": 0.25,
            },
            "use_qk_norm": False,
            "attention_bias": False,
            "head_dim": 32,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 2,
        },
    ),
    "glm4_moe, yarn": (
        "glm4_moe",
        {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
    ),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss, layers by type, other rope, gate and biases": (
        "gpt_oss",
        {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {**YARN, "truncate": False},
            "swiglu_alpha": 0.9,
            "swiglu_limit": 1.5,
            "attention_bias": False,
            "head_dim": 32,
            "tie_word_embeddings": True,
        },
    ),
    "minimax_m2": ("minimax_m2", {}),
    "minimax_m2, as transformers 4 wrote it, whole heads rotate": (
        "minimax_m2",
        {"rotary_dim": None, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "dots1": ("dots1", {}),
    "dots1, groups, plain scores, biases, no window": (
        "dots1",
        {
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "attention_bias": True,
            "sliding_window": None,
        },
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe, all but one layer, normalised scores, no biases": (
        "qwen2_moe",
        {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "qkv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
    "ernie4_5_moe, some layers, no shared experts, tied": (
        "ernie4_5_moe",
        {
            "num_hidden_layers": 4,
            "moe_layer_interval": 2,
            "moe_layer_end_index": 2,
            "moe_num_shared_experts": 0,
            "tie_word_embeddings": True,
        },
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "glm4_moe_lite, experts alternate": (
        "glm4_moe_lite",
        {"mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True},
    ),
}
ON_RANKS = (
    "mixtral",
    "qwen3_moe, some layers dense, plain scores, biases",
    "deepseek_v2, lite",
    "deepseek_v3",
    "deepseek_v3, no groups, plain scores, biases",
    "glm4_moe",
    "glm4_moe_lite, experts alternate",
    "gpt_oss",
    "minimax_m2",
    "dots1",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
    "qwen2_moe",
)
FAMILIES = (
    "mixtral",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "minimax_m2",
    "dots1",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
    "qwen2_moe",
)

MESHES: dict[str, tuple[MeshShape, dict[str, Any]]] = {
    "tp 2": (MeshShape(tp=2), {}),
    "tp 4": (MeshShape(tp=4), {}),
    "pp 2": (MeshShape(pp=2), {}),
    "sp 2": (MeshShape(tp=2), {"enable_sequence_parallel": True}),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")

    @functools.cache
    def make(name: str) -> Path:
        family, fields = MODELS[name]
        return write_tiny_model(root / name.replace(", ", "-"), family, **fields)

    return make


@pytest.fixture(scope="module")
def on_one_rank(directory_of: Callable[[str], Path]) -> Callable[..., Any]:
    return functools.cache(lambda name: greedy(load(directory_of(name)), PROMPTS, NUM_STEPS))


@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_logits_are_those_of_transformers(
    directory_of: Callable[[str], Path], on_one_rank: Callable[..., Any], name: str
) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(directory_of(name), dtype=torch.float32)
    outputs, logits = on_one_rank(name)
    for prompt, output, ours in zip(PROMPTS, outputs, logits, strict=True):
        with torch.inference_mode():
            theirs = reference(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        assert theirs.argmax(-1).tolist() == output
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert len({token for output in outputs for token in output}) > 20, "tokens do not vary"


def _decode_all(
    world: World, directories: dict[str, Path], parallel: ParallelConfig
) -> dict[str, Any]:
    found = {}
    for name, directory in directories.items():
        loaded = load(directory, world, parallel=parallel)
        found[name] = (
            greedy(loaded, PROMPTS, NUM_STEPS, world=world),
            # Fewer tokens than ranks.
            greedy(loaded, [PROMPTS[1]], 3, world=world)[0],
        )
    return found


@pytest.fixture(scope="module")
def decoded(directory_of: Callable[[str], Path]) -> Callable[[str], Any]:
    """What every rank of a mesh found; each mesh runs once."""

    @functools.cache
    def run(mesh: str) -> Any:
        shape, fields = MESHES[mesh]
        parallel = ParallelConfig(
            tensor_parallel_size=shape.tp, pipeline_parallel_size=shape.pp, **fields
        )
        directories = {name: directory_of(name) for name in ON_RANKS}
        return run_ranks(shape, _decode_all, directories, parallel)

    return run


@pytest.mark.parametrize(
    "mesh", [pytest.param(m, marks=[pytest.mark.matrix] * ("4" in m)) for m in MESHES]
)
@pytest.mark.parametrize("name", ON_RANKS)
def test_every_rank_finds_the_tokens_of_one_rank(
    decoded: Callable[[str], Any], on_one_rank: Callable[..., Any], name: str, mesh: str
) -> None:
    tokens, logits = on_one_rank(name)
    for found in decoded(mesh):
        (found_tokens, found_logits), lone = found[name]
        torch.testing.assert_close(found_logits, logits, rtol=1e-3, atol=1e-3)
        assert found_tokens == tokens
        assert lone == [tokens[1][:3]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_of_a_prompt_change_no_bit(
    directory_of: Callable[[str], Path], family: str, dtype: str
) -> None:
    loaded = load(directory_of(family), dtype=dtype)
    prompt = PROMPTS[-1]
    whole = final_states(loaded, prompt, [len(prompt)])
    assert torch.equal(final_states(loaded, prompt, [1, 16, 100, 150, len(prompt) - 267]), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_stays_close_to_full(
    directory_of: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    directory = write_tiny_model(tmp_path, family, initializer_range=0.1)
    full, half = (
        final_states(load(directory, dtype=dtype), PROMPTS[2], [17])
        for dtype in ("float32", "bfloat16")
    )
    assert 0 < (full - half).norm() / full.norm() < 0.1


class _Here:
    """Experts of one rank among several, as tests say; keeps what it was asked."""

    slices_experts = False

    def __init__(self, local: Sequence[int]) -> None:
        self.local = local
        self.asked: list[tuple[int, Routing, Tensor | None]] = []

    def local_experts(self, layer: int) -> Sequence[int]:
        return self.local

    def begin_step(self, num_tokens: Sequence[int]) -> None: ...

    def end_step(self) -> None: ...

    def __call__(
        self, layer: int, x: Tensor, routing: Routing, experts: LocalExperts, partial: Tensor | None
    ) -> Tensor:
        self.asked.append((layer, routing, partial))
        places = torch.full((64,), -1)
        places[torch.tensor(self.local)] = torch.arange(len(self.local))
        y = experts(x, places[routing.expert_ids], routing.weights)
        return y if partial is None else y + partial


def _slots_of(directory: Path, local: Sequence[int]) -> dict[str, Any]:
    placement = Placement(CPU, torch.float32, kernels_on(CPU), experts=_Here(local))
    return dict(MoE(read_arch(directory), 1, placement).slots(""))


def test_only_experts_that_lie_here_are_read(directory_of: Callable[[str], Path]) -> None:
    slots = _slots_of(directory_of("deepseek_v3"), [6, 2])
    read = {name for name, slot in slots.items() if slot.load is not None and ".experts." in name}
    parts = ("gate_proj", "up_proj", "down_proj")
    assert read == {f"mlp.experts.{e}.{part}.weight" for e in (2, 6) for part in parts}
    assert len([name for name in slots if ".experts." in name]) == 8 * 3


def test_an_expert_may_lie_on_a_rank_twice(directory_of: Callable[[str], Path]) -> None:
    moe = read_arch(directory_of("qwen3_moe")).moe
    assert moe is not None
    local = [5, 0, 5]
    placement = Placement(CPU, torch.float32, kernels_on(CPU), experts=_Here(local))
    experts = RoutedExperts(moe, 64, local, placement)
    for slot in dict(experts.slots("")).values():
        if slot.load is not None:
            slot.load(torch.randn(slot.shape))
    first, other, second = (experts.packed.read(i) for i in range(3))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def _layer(directory: Path, experts: Any) -> MoE:
    """The experts of layer 1, with the weights of `directory`."""
    from safetensors.torch import load_file

    stored = load_file(directory / "model.safetensors")
    layer = MoE(
        read_arch(directory), 1, Placement(CPU, torch.float32, kernels_on(CPU), experts=experts)
    )
    for name, slot in layer.slots("model.layers.1."):
        if slot.load is not None:
            slot.load(stored[name])
    return layer


def _step(num_tokens: int) -> StepInputs:
    longs, ints = torch.zeros(num_tokens, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    return StepInputs(
        token_ids=longs,
        positions=longs,
        slot_mapping=longs,
        block_tables=ints.view(1, 1),
        query_start=ints,
        context_lens=ints,
    )


def test_experts_of_two_ranks_sum_to_those_of_one(directory_of: Callable[[str], Path]) -> None:
    directory = directory_of("qwen3_moe")
    x, residual = torch.randn(2, 40, 64, generator=GENERATOR)
    whole, *parts = (
        _layer(directory, _Here(local))(x, residual.clone(), _step(40))
        for local in (range(8), [7, 1, 3], [0, 2, 4, 5, 6])
    )
    torch.testing.assert_close(sum(parts), whole)


def test_no_token_is_asked_of_the_experts_too(directory_of: Callable[[str], Path]) -> None:
    here = _Here(range(8))
    empty = torch.empty(0, 64)
    result = _layer(directory_of("deepseek_v3"), here)(empty, empty.clone(), _step(0))
    assert result.shape == (0, 64)
    (layer, routing, partial) = here.asked[0]
    assert (layer, routing.expert_ids.shape, routing.weights.shape) == (1, (0, 3), (0, 3))
    assert partial is not None
    assert partial.shape == (0, 64)


def test_an_expert_moves_as_bytes(directory_of: Callable[[str], Path]) -> None:
    directory = directory_of("mixtral")
    arch = read_arch(directory)
    assert arch.moe is not None
    shape = {"dtype": torch.float32, "device": CPU}
    kernels = kernels_on(CPU)
    source, target = kernels.experts(2, 64, 96, **shape), kernels.experts(3, 64, 96, **shape)
    for expert in range(2):
        source.write_gate(expert, torch.randn(96, 64))
        source.write_up(expert, torch.randn(96, 64))
        source.write_down(expert, torch.randn(64, 96))
    target.write(2, source.read(1))
    x, weights = torch.randn(5, 64), torch.rand(5, 1)
    assert torch.equal(
        target(x, torch.full((5, 1), 2), weights), source(x, torch.ones(5, 1).long(), weights)
    )


@pytest.mark.parametrize(
    ("name", "field"),
    [("mixtral", "num_attention_heads of 4"), ("deepseek_v3", "num_attention_heads of 4")],
)
def test_heads_that_do_not_divide_are_refused(
    directory_of: Callable[[str], Path], name: str, field: str
) -> None:
    for message in run_ranks(MeshShape(tp=3), _refusal, directory_of(name)):
        assert field in message


def _refusal(world: World, directory: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        load(directory, world, parallel=ParallelConfig(tensor_parallel_size=3))
    return str(refused.value)


@pytest.mark.parametrize(
    "fields", [{"kv_lora_rank": 40}, {"qk_rope_head_dim": 8}, {"kv_lora_rank": 1024}]
)
def test_latents_that_the_kernels_do_not_take_are_the_references(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    directory = write_tiny_model(tmp_path, "deepseek_v3", **fields)
    prompts = [[3 + 7 * i % 200 for i in range(length)] for length in (1, 17, 50)]
    outputs, _ = greedy(load(directory), prompts, 12)
    assert outputs == greedy_by_transformers(directory, prompts, 12)


def test_layers_that_predict_further_tokens_are_not_read(
    directory_of: Callable[[str], Path], on_one_rank: Callable[..., Any], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    source = directory_of("deepseek_v3")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    stored = load_file(source / "model.safetensors")
    extra = {"model.layers.3.eh_proj.weight": torch.zeros(64, 128)}
    save_file({**stored, **extra}, tmp_path / "model.safetensors")
    assert greedy(load(tmp_path), PROMPTS[:2], 3)[0] == [
        tokens[:3] for tokens in on_one_rank("deepseek_v3")[0][:2]
    ]
    extra = {"model.layers.4.eh_proj.weight": torch.zeros(64, 128)}
    save_file({**stored, **extra}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"unexpected: model\.layers\.4\."):
        load(tmp_path)


def test_sliced_experts_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, "qwen3_moe", moe_intermediate_size=37)
    for message in run_ranks(MeshShape(tp=2), _slicing_refusal, directory):
        assert "moe_intermediate_size of 37" in message


def _slicing_refusal(world: World, directory: Path) -> str:
    experts = SlicedExperts(8, world.tp)
    with pytest.raises(ConfigError) as refused:
        MoE(
            read_arch(directory),
            1,
            Placement(CPU, torch.float32, kernels_on(CPU), world, experts=experts),
        )
    return str(refused.value)
