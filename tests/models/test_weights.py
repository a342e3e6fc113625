"""Weights reach their layers whole, or the model is refused with the names."""

from __future__ import annotations

import json
import shutil
import struct
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.config.schema import EngineConfig, ModelConfig
from pdserve.errors import ConfigError
from pdserve.kernels.registry import kernels_on
from pdserve.models.registry import LoadedModel, load_model
from pdserve.models.slots import Slot
from pdserve.models.weights import Checkpoint, DummyWeights, load_weights
from pdserve.parallel.group import World

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CPU = torch.device("cpu")


def load(directory: Path, **fields: Any) -> LoadedModel:
    return load_model(
        EngineConfig(model=ModelConfig(model=str(directory), **fields)),
        CPU,
        kernels_on(CPU),
        World.alone(),
        lambda _: None,
    )


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


class Recorder:
    """Slots that copy what they are given."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.slots = {
            name: Slot(shape, lambda tensor, name=name: self._load(name, tensor))
            for name, shape in shapes.items()
        }

    def _load(self, name: str, tensor: torch.Tensor) -> None:
        assert name not in self.loaded
        self.loaded[name] = tensor.clone()


def test_shards_with_an_index_load_like_one_file(
    save_model: Callable[..., Any], tmp_path: Path
) -> None:
    model = save_model(max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    recorder = Recorder(shapes)
    told: list[str] = []
    load_weights(recorder.slots, Checkpoint(tmp_path), tied_head=False, progress=told.append)
    for name, parameter in model.named_parameters():
        assert torch.equal(recorder.loaded[name], parameter)
    assert told[-1] == "weights 100 %"


def test_a_decoder_that_was_saved_alone_loads_under_its_names_in_a_model(
    save_model: Callable[..., Any], tmp_path: Path
) -> None:
    model = save_model()
    rewrite(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    rewrite(tmp_path, _without_prefix)
    shapes = {
        name: tuple(p.shape) for name, p in model.named_parameters() if name != "lm_head.weight"
    }
    recorder = Recorder(shapes)
    load_weights(recorder.slots, Checkpoint(tmp_path), tied_head=True, progress=lambda _: None)
    for name in shapes:
        assert torch.equal(recorder.loaded[name], model.get_parameter(name))


def _without_prefix(tensors: dict[str, torch.Tensor]) -> None:
    for name in [*tensors]:
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def test_only_one_tensor_of_a_checkpoint_is_alive_at_a_time(
    save_model: Callable[..., Any], tmp_path: Path
) -> None:
    import weakref

    model = save_model(max_shard_size="60KB")
    earlier: list[weakref.ref[torch.Tensor]] = []

    def slot(shape: tuple[int, ...]) -> Slot:
        def take(tensor: torch.Tensor) -> None:
            # The loop's own variable may still hold the one before.
            assert sum(ref() is not None for ref in earlier) <= 1
            earlier.append(weakref.ref(tensor))

        return Slot(shape, take)

    slots = {name: slot(tuple(p.shape)) for name, p in model.named_parameters()}
    load_weights(slots, Checkpoint(tmp_path), tied_head=False, progress=lambda _: None)
    assert len(earlier) == len(slots)


def test_rotary_buffers_and_a_repeated_tied_head_are_not_unexpected(
    save_model: Callable[..., Any], tmp_path: Path
) -> None:
    save_model(tie_word_embeddings=True)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    rewrite(tmp_path, add)
    load(tmp_path)


def test_a_tied_head_that_differs_from_the_embedding_is_refused(
    save_model: Callable[..., Any], tmp_path: Path
) -> None:
    save_model(tie_word_embeddings=True)
    rewrite(
        tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].roll(1, 0)})
    )
    with pytest.raises(ConfigError, match=r"tie_word_embeddings is True, but lm_head\.weight"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing: model.norm.weight"),
        (lambda t: t.pop("lm_head.weight"), "missing: lm_head.weight"),
        (lambda t: t.update(surplus=torch.zeros(1)), "unexpected: surplus"),
        (
            lambda t: t.update({"model.layers.1.self_attn.q_proj.bias": torch.zeros(64)}),
            "unexpected: model.layers.1.self_attn.q_proj.bias",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(63)}),
            r"model.norm.weight is \[63\], config.json says \[64\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int32)}),
            "model.norm.weight is I32",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    save_model: Callable[..., Any],
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], Any],
    message: str,
) -> None:
    save_model()
    rewrite(tmp_path, change)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_a_missing_shard_is_named(save_model: Callable[..., Any], tmp_path: Path) -> None:
    save_model(max_shard_size="60KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ConfigError, match=rf"lacks 1 of the \d+ shards.*{gone.name}"):
        load(tmp_path)


def test_a_whole_model_beside_other_shards_is_refused(
    save_model: Callable[..., Any], tmp_path: Path
) -> None:
    save_model(max_shard_size="60KB")
    shutil.copy(min(tmp_path.glob("*.safetensors")), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors is not one of the shards"):
        load(tmp_path)


def test_a_git_lfs_pointer_is_recognised(save_model: Callable[..., Any], tmp_path: Path) -> None:
    save_model()
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(ConfigError, match=r"Git LFS pointer.*git lfs pull"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 100, -8])
def test_a_file_cut_short_is_refused(
    save_model: Callable[..., Any], tmp_path: Path, keep: int
) -> None:
    save_model()
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be used"):
        load(tmp_path)


def test_a_directory_without_safetensors_says_what_to_do(
    save_model: Callable[..., Any], tmp_path: Path
) -> None:
    save_model()
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"has no \*.safetensors.*--load-format dummy"):
        load(tmp_path)


@pytest.mark.parametrize("text", ['{"metadata": {}}', '{"weight_map": {"a": 1}}', "[" * 10**5])
def test_an_index_without_a_weight_map_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match="has no weight_map"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "model.safetensors"]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    index = {"weight_map": {"a": "model.safetensors"}}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/proc/self/mem")  # whose first page nobody reads
    with pytest.raises(ConfigError, match=rf"/{name} cannot be .*: Input/output error"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "[" * 10**5,
        '{"a": {}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
        '{"a": {"dtype": "F32", "shape": [[1]], "data_offsets": [0, 4]}}',
    ],
)
def test_a_header_of_another_form_is_refused(tmp_path: Path, header: str) -> None:
    file = struct.pack("<Q", len(header)) + header.encode() + bytes(4)
    (tmp_path / "model.safetensors").write_bytes(file)
    with pytest.raises(ConfigError, match="its header is not readable"):
        Checkpoint(tmp_path)


def test_the_digest_changes_with_any_tensor_and_not_with_the_place(
    save_model: Callable[..., Any], tmp_path: Path
) -> None:
    model = save_model()
    found = {load(tmp_path).weights_digest}
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path, copy)
    assert load(copy).weights_digest in found
    for name in dict(model.named_parameters()):
        rewrite(copy, lambda tensors, name=name: tensors[name].mul_(1.5))
        found.add(load(copy).weights_digest)
    assert len(found) == 1 + len(dict(model.named_parameters()))


def test_the_checkpoints_dtype_stands_in_for_a_silent_config(
    save_model: Callable[..., Any], tmp_path: Path
) -> None:
    save_model(dtype="bfloat16").to(torch.bfloat16).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert load(tmp_path).dtype == torch.bfloat16
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path).dtype == torch.bfloat16
    assert load(tmp_path, dtype="float32").dtype == torch.float32


def test_dummy_weights_need_no_files_and_follow_the_seed(
    save_model: Callable[..., Any], tmp_path: Path
) -> None:
    save_model()
    (tmp_path / "model.safetensors").unlink()
    loaded = load(tmp_path, load_format="dummy", seed=7)
    again = load(tmp_path, load_format="dummy", seed=7)
    other = load(tmp_path, load_format="dummy", seed=8)
    hidden = torch.randn(1, 64)
    assert loaded.weights_digest == again.weights_digest != other.weights_digest
    assert torch.equal(loaded.model.logits(hidden), again.model.logits(hidden))
    assert not torch.equal(loaded.model.logits(hidden), other.model.logits(hidden))


def test_a_dummy_tensor_has_the_deviation_asked_for() -> None:
    source = DummyWeights(seed=1, std=0.25, dtype=torch.float32, identity="x")
    recorder = Recorder({"a.weight": (100, 100), "b.weight": (100, 100), "norm.weight": (9,)})
    load_weights(recorder.slots, source, tied_head=False, progress=lambda _: None)
    assert recorder.loaded["a.weight"].std().item() == pytest.approx(0.25, rel=0.05)
    assert not torch.equal(recorder.loaded["a.weight"], recorder.loaded["b.weight"])
    assert recorder.loaded["norm.weight"].eq(1).all()


def test_a_context_beyond_the_models_positions_is_refused(
    save_model: Callable[..., Any], tmp_path: Path
) -> None:
    save_model()
    with pytest.raises(ConfigError, match=r"--max-model-len is 513.*at most 512"):
        load(tmp_path, max_model_len=513)
