"""Models over real ranks: what TP, PP and SP compute is what one rank computes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.config.schema import ParallelConfig
from pdserve.errors import ConfigError
from pdserve.parallel import collectives
from pdserve.parallel.mesh import MeshShape
from tests.models.decoding import greedy, load
from tests.ranks import run_ranks
from tests.tiny_models import model_of, write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pdserve.parallel.group import World

pytestmark = pytest.mark.slow

NUM_STEPS = 16
GENERATOR = torch.Generator().manual_seed(5)
# Together more than the 128 rows of one native call, and no multiple of the ranks.
PROMPTS = [torch.randint(211, (n,), generator=GENERATOR).tolist() for n in (1, 2, 17, 33, 150)]
LONE_PROMPT = [[7, 5, 3]]

# Odd vocabulary: 211 is a prime. Four heads; one KV head is on every rank of TP 2 and 4.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"vocab_size": 211, "attention_bias": True, "mlp_bias": True}),
    "llama, one KV head, tied": (
        "llama",
        {"vocab_size": 211, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen2": ("qwen2", {"vocab_size": 211}),
    "qwen3": ("qwen3", {"vocab_size": 211, "head_dim": 32, "num_hidden_layers": 4}),
    "phi3": ("phi3", {"vocab_size": 211}),
    "gemma3": ("gemma3_text", {"vocab_size": 211}),
    "olmo3": ("olmo3", {"vocab_size": 211}),
    "glm4": ("glm4", {"vocab_size": 211}),
}
FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    family: (family, {"vocab_size": 211})
    for family in (
        "mistral3",
        "smollm3",
        "granite",
        "ernie4_5",
        "olmo2",
        "exaone4",
        "glm",
        "ministral3",
        "hunyuan_v1_dense",
    )
}
"""Compared at night, because they are made of the same parts."""
NAMES = [*MODELS, *(pytest.param(name, marks=pytest.mark.matrix) for name in FURTHER)]

MESHES: dict[str, tuple[MeshShape, dict[str, Any]]] = {
    "tp 2": (MeshShape(tp=2), {}),
    "tp 4": (MeshShape(tp=4), {}),
    "pp 2, uneven": (MeshShape(pp=2), {}),
    "pp 3": (MeshShape(pp=3), {}),
    "tp 2, pp 2": (MeshShape(tp=2, pp=2), {}),
    "sp 2": (MeshShape(tp=2), {"enable_sequence_parallel": True}),
    "sp 4": (MeshShape(tp=4), {"enable_sequence_parallel": True}),
    "sp 2, pp 2": (MeshShape(tp=2, pp=2), {"enable_sequence_parallel": True}),
}


def settings(shape: MeshShape, fields: dict[str, Any]) -> ParallelConfig:
    return ParallelConfig(tensor_parallel_size=shape.tp, pipeline_parallel_size=shape.pp, **fields)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: write_tiny_model(root / name.replace(", ", "-"), family, **fields)
        for name, (family, fields) in (MODELS | FURTHER).items()
    }


def _decode_all(
    world: World, directories: dict[str, Path], parallel: ParallelConfig, fields: dict[str, Any]
) -> dict[str, Any]:
    """Tokens and logits of every model, with many requests and with one."""
    found = {}
    for name, directory in directories.items():
        loaded = load(directory, world, parallel=parallel, **fields)
        many = greedy(loaded, PROMPTS, NUM_STEPS, world=world)
        one = greedy(loaded, LONE_PROMPT, NUM_STEPS, world=world)
        found[name] = (many, one, loaded.weights_digest)
    return found


@pytest.fixture(scope="module")
def decoded(directories: dict[str, Path]) -> Callable[..., list[Any]]:
    """What every rank of a mesh found of a model; each mesh runs once."""

    @functools.cache
    def run(mesh: str, dtype: str, names: tuple[str, ...]) -> list[dict[str, Any]]:
        shape, fields = MESHES[mesh]
        of_names = {name: directories[name] for name in names}
        return run_ranks(shape, _decode_all, of_names, settings(shape, fields), {"dtype": dtype})

    def found(mesh: str, name: str, dtype: str = "float32") -> list[Any]:
        names = tuple(MODELS if name in MODELS else FURTHER)
        return [of_rank[name] for of_rank in run(mesh, dtype, names)]

    return found


@pytest.fixture(scope="module")
def on_one_rank(directories: dict[str, Path]) -> Callable[..., Any]:
    @functools.cache
    def run(name: str, dtype: str = "float32") -> Any:
        # A process like the ranks': one thread, on which torch's own products depend.
        arguments = {name: directories[name]}, ParallelConfig(), {"dtype": dtype}
        (found,) = run_ranks(MeshShape(), _decode_all, *arguments)
        return found[name]

    return run


@pytest.mark.parametrize(
    "mesh", [pytest.param(m, marks=[pytest.mark.matrix] * ("4" in m)) for m in MESHES]
)
@pytest.mark.parametrize("name", NAMES)
def test_every_rank_finds_the_tokens_of_one_rank(
    decoded: Callable[..., Any], on_one_rank: Callable[..., Any], name: str, mesh: str
) -> None:
    (tokens, logits), (lone_tokens, _), digest = on_one_rank(name)
    assert len({token for row in tokens for token in row}) > 20, "tokens do not vary"
    for many, one, found_digest in decoded(mesh, name):
        torch.testing.assert_close(many[1], logits, rtol=1e-3, atol=1e-3)
        assert (many[0], one[0]) == (tokens, lone_tokens)
        assert found_digest == digest


@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_are_those_of_transformers(
    directories: dict[str, Path], on_one_rank: Callable[..., Any], name: str
) -> None:
    reference = model_of(directories[name])
    (outputs, _), _, _ = on_one_rank(name)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        with torch.inference_mode():
            theirs = reference(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        assert theirs.argmax(-1).tolist() == output


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mesh", ["pp 2, uneven", "pp 3"])
@pytest.mark.parametrize("name", NAMES)
def test_stages_change_no_bit(
    decoded: Callable[..., Any],
    on_one_rank: Callable[..., Any],
    name: str,
    mesh: str,
    dtype: str,
) -> None:
    (_, logits), (_, lone_logits), _ = on_one_rank(name, dtype)
    (_, found), (_, lone_found), _ = decoded(mesh, name, dtype)[0]
    assert torch.equal(found, logits)
    assert torch.equal(lone_found, lone_logits)


class _Counter:
    """Counts calls of the collectives."""

    def __init__(self) -> None:
        self.calls = dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), 0)
        for name in self.calls:
            setattr(collectives, name, functools.partial(self._count, name))
        self._ops = torch.ops.pdserve

    def _count(self, name: str, *args: Any) -> Any:
        self.calls[name] += 1
        return getattr(self._ops, name)(*args)


def _count_calls(
    world: World, directory: Path, parallel: ParallelConfig
) -> tuple[dict[str, int], dict[str, int]]:
    """Calls of the collectives in a forward pass of many tokens, and in one of few."""
    loaded = load(directory, world, parallel=parallel)
    counts = []
    for prompts in (PROMPTS, LONE_PROMPT):
        counter = _Counter()
        greedy(loaded, prompts, 1, world=world)
        counts.append(counter.calls)
    return counts[0], counts[1]


def _counts(*, all_reduce: int, split: int = 0) -> dict[str, int]:
    return {"all_reduce": all_reduce, "all_gather": split, "reduce_scatter": split}


@pytest.mark.parametrize(
    ("mesh", "of_many", "of_few"),
    [
        # Of four layers; one more all_reduce is of the test, which joins the logits.
        ("tp 2", _counts(all_reduce=2 * 4 + 1 + 1), _counts(all_reduce=2 * 4 + 1 + 1)),
        ("tp 2, pp 2", _counts(all_reduce=2 * 2 + 1), _counts(all_reduce=2 * 2 + 1)),
        # A step of few tokens is not worth splitting.
        ("sp 2", _counts(all_reduce=1, split=2 * 4 + 1), _counts(all_reduce=2 * 4 + 1 + 1)),
        ("pp 3", _counts(all_reduce=0), _counts(all_reduce=0)),
    ],
)
def test_there_is_one_sum_per_half_layer_and_one_for_the_embedding(
    directories: dict[str, Path], mesh: str, of_many: dict[str, int], of_few: dict[str, int]
) -> None:
    shape, fields = MESHES[mesh]
    found = run_ranks(shape, _count_calls, directories["qwen3"], settings(shape, fields))
    assert found == [(of_many, of_few)] * shape.world_size


def _in_company_and_alone(
    world: World, directory: Path, parallel: ParallelConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    loaded = load(directory, world, parallel=parallel, dtype="bfloat16")
    _, together = greedy(loaded, PROMPTS, 4, world=world)
    _, alone = greedy(loaded, PROMPTS[2:3], 4, world=world)
    return together[2:3], alone


def test_logits_are_the_same_whether_the_residual_stream_is_split_or_not(
    directories: dict[str, Path],
) -> None:
    shape, fields = MESHES["sp 2"]
    arguments = directories["qwen3"], settings(shape, fields)
    for together, alone in run_ranks(shape, _in_company_and_alone, *arguments):
        assert torch.equal(together, alone)


class _Hooks:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def wait_for_layer_load(self, layer: int) -> None:
        self.calls.append(("wait", layer))

    def save_kv_layer(self, layer: int) -> None:
        self.calls.append(("save", layer))


def _explicit_stage(world: World, directory: Path, parallel: ParallelConfig) -> Any:
    loaded = load(directory, world, parallel=parallel)
    hooks = _Hooks()
    tokens, _ = greedy(loaded, PROMPTS, 1, world=world, hooks=hooks)
    return loaded.layers, hooks.calls, tokens


def _all_states_and_last_ones(
    world: World, directories: dict[str, Path], parallel: ParallelConfig
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    found = []
    for directory in directories.values():
        loaded = load(directory, world, parallel=parallel, dtype="bfloat16")
        _, of_all = greedy(loaded, PROMPTS, 2, world=world)
        _, of_last = greedy(loaded, PROMPTS, 2, world=world, narrow=True)
        # The few rows that are left are shared out, too.
        with mock.patch("pdserve.models.layers.parameter.SPLIT_FROM", 2):
            split = load(directory, world, parallel=parallel, dtype="bfloat16")
        _, of_split = greedy(split, PROMPTS, 2, world=world, narrow=True)
        found.append((of_all, of_last, of_split))
    return found


def test_the_states_of_some_tokens_are_the_same_where_the_others_are_not_computed(
    directories: dict[str, Path],
) -> None:
    shape, fields = MESHES["sp 2"]
    parallel = settings(shape, fields)
    for found in run_ranks(shape, _all_states_and_last_ones, directories, parallel):
        for of_all, of_last, of_split in found:
            assert torch.equal(of_all, of_last)
            assert torch.equal(of_all, of_split)


def test_layers_can_be_given_to_stages_and_hooks_count_a_stages_own(
    directories: dict[str, Path], on_one_rank: Callable[..., Any]
) -> None:
    shape = MeshShape(pp=2)
    parallel = settings(shape, {"pipeline_layers": (1, 3)})
    first, last = run_ranks(shape, _explicit_stage, directories["qwen3"], parallel)
    (tokens, _), _, _ = on_one_rank("qwen3")
    assert [first[0], last[0]] == [range(1), range(1, 4)]
    assert first[1] == [("wait", 0), ("save", 0)]
    assert last[1] == [(call, layer) for layer in range(3) for call in ("wait", "save")]
    assert last[2] == [row[:1] for row in tokens]


def _dummy(world: World, directory: Path, parallel: ParallelConfig) -> Any:
    loaded = load(directory, world, parallel=parallel, load_format="dummy", seed=3)
    return greedy(loaded, PROMPTS, 4, world=world)[1], loaded.weights_digest


@pytest.mark.parametrize("mesh", ["tp 4", "tp 2, pp 2"])
def test_dummy_weights_are_the_same_on_any_mesh(directories: dict[str, Path], mesh: str) -> None:
    shape, fields = MESHES[mesh]
    ((logits, digest),) = run_ranks(MeshShape(), _dummy, directories["llama"], ParallelConfig())
    for found, found_digest in run_ranks(
        shape, _dummy, directories["llama"], settings(shape, fields)
    ):
        assert found_digest == digest
        torch.testing.assert_close(found, logits, rtol=1e-3, atol=1e-3)


def _refusals(world: World, directories: list[Path], parallel: ParallelConfig) -> list[str]:
    messages = []
    for directory in directories:
        try:
            load(directory, world, parallel=parallel)
        except ConfigError as error:
            messages.append(str(error))
        else:
            messages.append("loaded")
    return messages


def _copies(source: Path, root: Path) -> Iterator[tuple[Path, str]]:
    """Copies of a model that must be refused, and a word of the reason."""

    def copy(name: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
        directory = root / name
        directory.mkdir()
        (directory / "config.json").write_text((source / "config.json").read_text())
        tensors = load_file(source / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors")
        return directory

    first, last = "model.layers.0.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight"
    yield copy("a", lambda t: t.pop(first)), f"missing: {first}"
    yield copy("b", lambda t: t.pop(last)), f"missing: {last}"
    yield copy("c", lambda t: t.update(surplus=torch.zeros(1))), "unexpected: surplus"
    short = torch.zeros(95, 64)
    yield copy("d", lambda t: t.update({last: short})), f"{last} is [95, 64]"


def test_weights_that_do_not_fit_are_refused_by_every_rank(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    shape = MeshShape(tp=2, pp=2)
    wrong = list(_copies(directories["llama"], tmp_path))
    found = run_ranks(shape, _refusals, [directory for directory, _ in wrong], settings(shape, {}))
    for messages in found:
        for message, (_, reason) in zip(messages, wrong, strict=True):
            assert reason in message


def _too_many_stages(world: World, directory: Path, fields: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        load(directory, world, parallel=settings(world.mesh.shape, fields))
    return str(refused.value)


@pytest.mark.parametrize(
    ("shape", "fields", "message"),
    [
        (MeshShape(pp=4), {}, "--pipeline-parallel-size is 4, but the model has only 3 layers"),
        (
            MeshShape(pp=2),
            {"pipeline_layers": (1, 3)},
            "--pipeline-layers is [1, 3], a total of 4: it must be 3",
        ),
        (MeshShape(tp=3), {}, "--tensor-parallel-size is 3, which does not divide"),
    ],
)
def test_a_model_that_does_not_divide_is_refused_with_the_sizes(
    directories: dict[str, Path], shape: MeshShape, fields: dict[str, Any], message: str
) -> None:
    for found in run_ranks(shape, _too_many_stages, directories["llama"], fields):
        assert message in found


def _no_tokens(world: World, directory: Path) -> None:
    load(directory, world, parallel=settings(world.mesh.shape, {})).model.idle_forward()


def test_a_dense_model_has_nothing_to_do_when_idle(directories: dict[str, Path]) -> None:
    assert run_ranks(MeshShape(tp=2), _no_tokens, directories["llama"]) == [None, None]
