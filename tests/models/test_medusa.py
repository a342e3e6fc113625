"""Medusa heads: the formats they come in, what they compute, and what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from pdserve.config.boxed import boxed_heads_dir, boxed_model_dir
from pdserve.errors import ConfigError
from pdserve.kernels.registry import kernels_on
from pdserve.models.layers.parameter import Placement
from pdserve.models.medusa import MEDUSA_PT, MedusaHeads, read_medusa
from pdserve.models.reading import read_arch
from tests.worker.driver import TINY

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from pdserve.models.arch import ModelArch

CPU = torch.device("cpu")
SIZE, VOCAB = TINY["hidden_size"], TINY["vocab_size"]
NUM_HEADS, NUM_LAYERS = 3, 2
NUM_KEPT = 50


@pytest.fixture(scope="module")
def arch(tmp_path_factory: pytest.TempPathFactory) -> ModelArch:
    """The model that the heads are for."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(TINY))
    return read_arch(directory)


def drawn(*shape: int) -> Tensor:
    seed = torch.Generator().manual_seed(sum(shape) + 7 * len(shape))
    return torch.randn(shape, generator=seed) / 8


WEIGHTS = drawn(NUM_HEADS, NUM_LAYERS, SIZE, SIZE)
BIASES = drawn(NUM_HEADS, NUM_LAYERS, SIZE)
OUTPUTS = drawn(NUM_HEADS, VOCAB, SIZE)
MODELS_OUTPUT = drawn(VOCAB + 0, SIZE) * 2
TOKEN_MAP = torch.arange(NUM_KEPT) * 4


def expected(hidden: Tensor, outputs: Tensor, *, with_bias: bool = True) -> Tensor:
    """Logits of all heads, written down as the paper has them."""
    found = []
    for head in range(NUM_HEADS):
        state = hidden
        for layer in range(NUM_LAYERS):
            product = state @ WEIGHTS[head, layer].T
            state = state + functional.silu(product + BIASES[head, layer] * with_bias)
        found.append(state @ outputs[head % len(outputs)].T)
    return torch.stack(found)


def papers() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As the paper's code writes them."""
    tensors = {}
    for head in range(NUM_HEADS):
        for layer in range(NUM_LAYERS):
            tensors[f"{head}.{layer}.linear.weight"] = WEIGHTS[head, layer]
            tensors[f"{head}.{layer}.linear.bias"] = BIASES[head, layer]
        tensors[f"{head}.{NUM_LAYERS}.weight"] = OUTPUTS[head]
    return {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": NUM_LAYERS}, tensors


def vllms(**config: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As vLLM reads them, without biases."""
    tensors = {
        f"medusa_heads.blocks.{head}.layers.{layer}.weight": WEIGHTS[head, layer]
        for head in range(NUM_HEADS)
        for layer in range(NUM_LAYERS)
    }
    for head in range(NUM_HEADS):
        tensors[f"lm_heads.{head}.weight"] = OUTPUTS[head]
    shape = {"num_heads": NUM_HEADS, "num_hidden_layers": NUM_LAYERS, "hidden_size": SIZE}
    return {**shape, "vocab_size": VOCAB, **config}, tensors


def write(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, directory / "a.safetensors"
    )
    return directory


def loaded(directory: Path, arch: ModelArch) -> MedusaHeads:
    placement = Placement(CPU, torch.float32, kernels_on(CPU))
    shape = read_medusa(directory, arch, NUM_HEADS)
    return MedusaHeads(shape, directory, placement, target=lambda states: states @ MODELS_OUTPUT.T)


def assert_gives(heads: MedusaHeads, wanted: Callable[[Tensor], Tensor]) -> None:
    hidden = drawn(5, SIZE) * 8
    for num_heads in range(1, NUM_HEADS + 1):
        found = heads(hidden, num_heads).view(num_heads, 5, -1)
        torch.testing.assert_close(found, wanted(hidden)[:num_heads], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_pickled", [False, True])
def test_the_papers_format_is_read(tmp_path: Path, arch: ModelArch, is_pickled: bool) -> None:
    config, tensors = papers()
    directory = write(tmp_path, config, tensors)
    if is_pickled:
        (directory / "a.safetensors").unlink()
        torch.save(tensors, directory / MEDUSA_PT)
    assert_gives(loaded(directory, arch), lambda hidden: expected(hidden, OUTPUTS))


def test_vllms_format_is_read(tmp_path: Path, arch: ModelArch) -> None:
    heads = loaded(write(tmp_path, *vllms()), arch)
    assert_gives(heads, lambda hidden: expected(hidden, OUTPUTS, with_bias=False))
    assert heads.token_ids is None


@pytest.mark.parametrize("num_stored", [NUM_KEPT, VOCAB])
def test_heads_of_fewer_tokens_have_a_map(tmp_path: Path, arch: ModelArch, num_stored: int) -> None:
    config, tensors = vllms(truncated_vocab_size=NUM_KEPT)
    kept = OUTPUTS[:, TOKEN_MAP]
    for head in range(NUM_HEADS):
        tensors[f"lm_heads.{head}.weight"] = (kept if num_stored == NUM_KEPT else OUTPUTS)[head]
    tensors["token_map"] = TOKEN_MAP
    heads = loaded(write(tmp_path, config, tensors), arch)
    assert_gives(heads, lambda hidden: expected(hidden, kept, with_bias=False))
    assert heads.token_ids is not None
    assert heads.token_ids.tolist() == TOKEN_MAP.tolist()


@pytest.mark.parametrize("is_stored", [True, False])
def test_one_output_head_may_serve_all_and_be_the_models(
    tmp_path: Path, arch: ModelArch, is_stored: bool
) -> None:
    config, tensors = vllms(original_lm_head=True)
    for head in range(int(is_stored), NUM_HEADS):
        del tensors[f"lm_heads.{head}.weight"]
    one = OUTPUTS[:1] if is_stored else MODELS_OUTPUT[None]
    heads = loaded(write(tmp_path, config, tensors), arch)
    assert_gives(heads, lambda hidden: expected(hidden, one, with_bias=False))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden_size": 32}, "hidden_size is 32: the model's is 64"),
        ({"vocab_size": 500}, "vocab_size is 500: the model's is 211"),
        ({"num_heads": 2}, "num_heads is 2: there are drafts of 3 tokens"),
        ({"num_heads": "many"}, "num_heads is 'many': a number is needed"),
        ({"num_heads": 4}, r"blocks.3.layers.0.weight is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 3}, r"blocks.0.layers.2.weight is missing"),
        ({"truncated_vocab_size": 212}, "truncated_vocab_size is 212: the model has 211 tokens"),
        ({"truncated_vocab_size": 50}, "token_map is missing"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_field(
    tmp_path: Path, arch: ModelArch, config: dict[str, Any], said: str
) -> None:
    directory = write(tmp_path, *vllms(**config))
    with pytest.raises(ConfigError, match=said) as refused:
        loaded(directory, arch)
    assert refused.value.param == "speculative-config.model"


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("lm_heads.1.weight", drawn(VOCAB - 1, SIZE), r"lm_heads.1.weight is \[210, 64\]"),
        ("blocks.1.layers.1.weight", drawn(SIZE, 9), r"blocks.1.layers.1.weight is \[64, 9\]"),
        ("token_map", TOKEN_MAP + VOCAB, "token_map has ids that are no tokens"),
        ("token_map", TOKEN_MAP[1:], r"token_map is \[49\], and should be \[50\]"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, arch: ModelArch, name: str, tensor: Tensor, said: str
) -> None:
    kept = {"truncated_vocab_size": NUM_KEPT} if name == "token_map" else {}
    config, tensors = vllms(**kept)
    tensors.pop(f"medusa_heads.{name}", None)
    with pytest.raises(ConfigError, match=said) as refused:
        loaded(write(tmp_path, config, {**tensors, name: tensor}), arch)
    assert refused.value.param == "speculative-config.model"


def test_a_directory_without_heads_is_refused(tmp_path: Path, arch: ModelArch) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        loaded(tmp_path / "nowhere", arch)
    (tmp_path / "config.json").write_text(json.dumps(vllms()[0]))
    with pytest.raises(ConfigError, match="holds no Medusa heads"):
        loaded(tmp_path, arch)
    (tmp_path / MEDUSA_PT).write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match="cannot be read"):
        loaded(tmp_path, arch)


def test_the_boxed_models_heads_are_small_and_fit_it() -> None:
    shape = read_medusa(boxed_heads_dir(), read_arch(boxed_model_dir()), 4)
    assert shape.has_one_head
    files = list(boxed_heads_dir().iterdir())
    assert sum(path.stat().st_size for path in files) < 3 << 20
