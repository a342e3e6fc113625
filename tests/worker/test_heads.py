"""EAGLE heads draft what their papers' formulas give, and change nothing that is put out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from pdserve.config.schema import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from pdserve.config.speculative import SpeculativeConfig
from pdserve.errors import ConfigError
from pdserve.parallel.mesh import MeshShape
from pdserve.worker.drafting.heads import HeadDrafter
from tests.ranks import run_ranks
from tests.worker.draft_models import write_eagle, write_mtp
from tests.worker.driver import TINY, Driver, params
from tests.worker.spread import config_of, serve
from tests.worker.test_draft_model import requests_of
from tests.worker.test_drafting import NUM_ROWS, run
from tests.worker.test_model_runner import prompt_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from pdserve.worker.drafting.drafter import StepStates

SIZE, HEADS, KV_HEADS = TINY["hidden_size"], 4, TINY["num_key_value_heads"]
HEAD_DIM = SIZE // HEADS
EPS = 1e-6
LAYERS = 8
"""Of the model: EAGLE-3 reads its stream before the third, the fifth and the sixth."""
WAYS = [("eagle", False, False), ("eagle3", False, False), ("eagle3", True, True)]
IDS = ["eagle", "eagle3", "eagle3 of speculators"]


def drafting_by(directory: Path | None, method: str) -> SpeculativeConfig:
    return SpeculativeConfig(
        method=method, model=str(directory or ""), num_speculative_tokens=NUM_ROWS
    )


def drafter_of(driver: Driver) -> HeadDrafter:
    runner = driver.worker._runner
    assert runner is not None
    assert runner._drafts is not None
    found = runner._drafts.reader
    assert isinstance(found, HeadDrafter)
    return found


class Watched:
    """What a head has been shown of one request, and what it drafted."""

    def __init__(self, drafter: HeadDrafter) -> None:
        self.hidden: list[Tensor] = []
        self.aux: list[Tensor] = []
        self.draft: list[int] = []
        self._observe, self._propose = drafter.observe, drafter.propose
        drafter.observe = self.observe  # type: ignore[method-assign]
        drafter.propose = self.propose  # type: ignore[method-assign]

    def observe(self, states: StepStates) -> None:
        num = int(states.num_valid[0])
        self.hidden += states.hidden[:num].clone()
        if states.aux:
            self.aux += torch.cat([each[:num] for each in states.aux], dim=-1)
        self._observe(states)

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        drafts = self._propose(wanted)
        (self.draft,) = drafts.values() or [[]]
        return drafts


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """`[T, heads, HEAD_DIM]`."""
    inverse = 10_000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = positions[:, None] * inverse
    cos, sin = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]
    half = HEAD_DIM // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Reference:
    """One layer in plain torch, over all tokens at once."""

    def __init__(
        self, weights: dict[str, Tensor], driver: Driver, *, before_residual: bool
    ) -> None:
        runner = driver.worker._runner
        assert runner is not None
        self.weights, self.model = weights, runner._model
        self.is_third, self.before_residual = "norm.weight" in weights, before_residual

    def states(self, tokens: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        """`[T]` tokens behind the positions, `[T, SIZE]` -> `[T, SIZE]`."""
        w, embedded = self.weights, self.model.embed(tokens)
        if self.is_third:
            normed = rms_norm(states, w["hidden_norm.weight"])
            stream = normed if self.before_residual else states
            x = torch.cat([rms_norm(embedded, w["input_layernorm.weight"]), normed], -1)
        else:
            stream = x = torch.cat([embedded, states], -1) @ w["fc.weight"].T

        def heads(name: str, num: int) -> Tensor:
            return (x @ w[f"self_attn.{name}.weight"].T).view(-1, num, HEAD_DIM)

        q = rotated(heads("q_proj", HEADS), positions)
        k = rotated(heads("k_proj", KV_HEADS), positions).repeat_interleave(2, 1)
        v = heads("v_proj", KV_HEADS).repeat_interleave(2, 1)
        attended = functional.scaled_dot_product_attention(
            *(each.transpose(0, 1) for each in (q, k, v)), is_causal=True
        )
        joined = attended.transpose(0, 1).reshape(len(x), -1)
        stream = stream + joined @ w["self_attn.o_proj.weight"].T
        normed = rms_norm(stream, w["post_attention_layernorm.weight"])
        gate = functional.silu(normed @ w["mlp.gate_proj.weight"].T)
        inner = gate * (normed @ w["mlp.up_proj.weight"].T)
        return stream + inner @ w["mlp.down_proj.weight"].T

    def draft(self, watched: Watched, tokens: list[int], num: int, first: int = 0) -> list[int]:
        """What follows `tokens`, of which those from `first` on are seen."""
        w = self.weights
        known = torch.stack(watched.aux if self.is_third else watched.hidden)[first:]
        states = known @ w["fc.weight"].T if self.is_third else known
        behind = torch.tensor(tokens[first + 1 :])
        drafted: list[int] = []
        for _ in range(num):
            positions = torch.arange(first, first + len(behind))
            last = self.states(behind, states, positions)[-1:]
            if self.is_third:
                logits = rms_norm(last, w["norm.weight"]) @ w["lm_head.weight"].T
                token = int(w["to_target"][logits.argmax()])
            else:
                token = int(self.model.logits(last).argmax())
            drafted.append(token)
            states = torch.cat([states, last])
            behind = torch.cat([behind, torch.tensor([token])])
        return drafted


@pytest.mark.parametrize(("method", "speculators", "before_residual"), WAYS, ids=IDS)
def test_drafts_are_those_of_the_published_forward(
    make_driver: Callable[..., Driver],
    tmp_path: Path,
    method: str,
    speculators: bool,
    before_residual: bool,
) -> None:
    weights = write_eagle(tmp_path / "head", method, speculators=speculators)
    driver = make_driver(
        arch={"num_hidden_layers": LAYERS}, speculative=drafting_by(tmp_path / "head", method)
    )
    reference = Reference(weights, driver, before_residual=before_residual)
    watched = Watched(drafter_of(driver))
    driver.add("r", prompt_of(70, 1))
    driver.step({"r": 33})
    driver.step({"r": 37})
    with torch.inference_mode():
        for num in (4, 1, 0, 0, 3, NUM_ROWS, 5):
            tokens = list(driver.tokens["r"])
            driver.step({"r": 1}, {"r": num} if num else {})
            if num:
                known = reference.draft(watched, tokens, num)
                assert watched.draft == known
        # As where what comes before was computed elsewhere: it begins at the next block.
        (row,) = drafter_of(driver)._kept
        drafter_of(driver)._begin(row, 81)
        found = []
        while len(driver.tokens["r"]) < 110:
            tokens = list(driver.tokens["r"])
            driver.step({"r": 1}, {"r": 4})
            found.append(watched.draft)
            if watched.draft:
                assert watched.draft == reference.draft(watched, tokens, 4, first=96)
    assert not found[0]
    assert sum(map(bool, found)) > 5


def test_a_head_that_knows_what_follows_is_always_right(
    make_driver: Callable[..., Driver], tmp_path: Path
) -> None:
    weights = write_eagle(tmp_path / "head", "eagle")
    driver = make_driver(
        arch={"num_hidden_layers": 2}, speculative=drafting_by(tmp_path / "head", "eagle")
    )
    assert weights
    # A model that goes by its last token alone, and a head that does the same.
    runner = driver.worker._runner
    assert runner is not None
    for layer in runner._model._layers:  # type: ignore[attr-defined]
        silence(layer.attention)
        silence(layer.mlp)
    head = drafter_of(driver)._head
    silence(head._attention)  # type: ignore[attr-defined]
    silence(head._mlp)  # type: ignore[attr-defined]
    joined = torch.cat([torch.eye(SIZE), torch.zeros(SIZE, SIZE)], dim=1)
    head._fc.packed.write(0, joined)  # type: ignore[attr-defined]
    driver.add("r", prompt_of(20, 1))
    driver.step({"r": 20})
    for _ in range(5):
        answer = driver.step({"r": 1}, {"r": NUM_ROWS})
        assert len(answer.sampled_token_ids[0]) == NUM_ROWS + 1


def silence(half: Any) -> None:
    """Have a half layer add nothing."""
    out = half._out if hasattr(half, "_out") else half._down
    out.packed.write(0, torch.zeros(out.packed.out_features, out.packed.in_features))


def test_states_of_requests_that_have_no_rows_are_computed_many_at_a_time(
    make_driver: Callable[..., Driver], tmp_path: Path
) -> None:
    write_eagle(tmp_path / "head", "eagle")
    driver = make_driver(speculative=drafting_by(tmp_path / "head", "eagle"))
    head, passes = drafter_of(driver)._head, []
    forward = head.forward

    def counting(step: Any, *rest: Any) -> Tensor:
        passes.append(len(step.token_ids))
        return forward(step, *rest)

    head.forward = counting  # type: ignore[method-assign]
    driver.add("r", prompt_of(20, 1))
    driver.step({"r": 20})
    for _ in range(80):
        driver.step({"r": 1})
    assert passes == [64]
    assert driver.step({"r": 1}, {"r": 1}).num_drafted == {"r": 1}
    assert passes == [64, 100 - 64]


@pytest.mark.parametrize(
    ("method", "family"),
    [("mtp", "deepseek_v3"), ("deepseek_mtp", "deepseek_v3"), ("glm4_moe_mtp", "glm4_moe")],
)
def test_a_layer_that_predicts_further_tokens_and_knows_them_is_always_right(
    make_driver: Callable[..., Driver], tmp_path: Path, method: str, family: str
) -> None:
    write_mtp(tmp_path, family, is_silent=True)
    driver = make_driver(directory=tmp_path, speculative=drafting_by(None, method))
    driver.add("r", prompt_of(20, 1), params(temperature=0.9, top_p=0.95, seed=8))
    driver.step({"r": 20})
    for _ in range(5):
        answer = driver.step({"r": 1}, {"r": NUM_ROWS})
        assert len(answer.sampled_token_ids[0]) == NUM_ROWS + 1


def test_tokens_and_logprobs_are_those_without_such_a_layer(
    make_driver: Callable[..., Driver], tmp_path: Path
) -> None:
    write_mtp(tmp_path, is_silent=False)
    plain = make_driver(directory=tmp_path)
    wanted, described, _ = run(plain, rows=0)
    driver = make_driver(directory=tmp_path, speculative=drafting_by(None, "mtp"))
    assert run(driver, rows=NUM_ROWS)[:2] == (wanted, described)
    one = make_driver(
        directory=tmp_path,
        cache=CacheConfig(kv_cache_memory_bytes=1 << 20),
        speculative=drafting_by(None, "mtp"),
    ).info.layout
    assert one.num_blocks == (1 << 20) // (one.block_bytes * 3 // 2)


def test_a_model_without_such_a_layer_is_refused_at_the_start(
    make_driver: Callable[..., Driver], tmp_path: Path
) -> None:
    write_mtp(tmp_path, is_silent=False, num_extra_layers=0)
    with pytest.raises(ConfigError, match="num_nextn_predict_layers is absent or 0") as raised:
        make_driver(directory=tmp_path, speculative=drafting_by(None, "mtp"))
    assert raised.value.param == "speculative-config.method"


@pytest.mark.slow
@pytest.mark.parametrize(("method", "speculators"), [way[:2] for way in WAYS], ids=IDS)
def test_tokens_and_logprobs_are_those_without_a_head(
    make_driver: Callable[..., Driver], tmp_path: Path, method: str, speculators: bool
) -> None:
    write_eagle(tmp_path / "head", method, speculators=speculators)
    arch = {"num_hidden_layers": LAYERS}
    wanted, described, num_steps = run(make_driver(arch=arch), rows=0)
    driver = make_driver(arch=arch, speculative=drafting_by(tmp_path / "head", method))
    tokens, entries, num = run(driver, rows=NUM_ROWS)
    assert (tokens, entries) == (wanted, described)
    assert num <= num_steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "num_blocks", "shape"),
    [
        ("eagle3", 200, MeshShape()),
        ("eagle3", 40, MeshShape()),
        *(
            pytest.param(method, num_blocks, MeshShape(tp=2), marks=pytest.mark.matrix)
            for method in ("eagle", "eagle3", "mtp")
            for num_blocks in (200, 40)
        ),
    ],
)
def test_engines_with_cached_prefixes_and_preemptions_put_out_the_same(
    tmp_path: Path, method: str, num_blocks: int, shape: MeshShape
) -> None:
    if method == "mtp":
        write_mtp(tmp_path, is_silent=False)
    else:
        write_eagle(tmp_path / "head", method)
        (tmp_path / "config.json").write_text(json.dumps({**TINY, "num_hidden_layers": LAYERS}))
    requests = requests_of(8) | {
        f"s{name}": each for name, each in requests_of(4, temperature=0.8, seed=3).items()
    }
    drafting = drafting_by(None if method == "mtp" else tmp_path / "head", method)
    plain, drafted = (
        run_ranks(
            shape,
            serve,
            config_of(
                tmp_path,
                shape,
                cache=CacheConfig(num_gpu_blocks_override=num_blocks, block_size=8),
                scheduler=SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=96),
                speculative=speculative,
                load_format="auto" if method == "mtp" else "dummy",
            ),
            requests,
        )[0]
        for speculative in (SpeculativeConfig(), drafting)
    )
    assert (drafted.tokens, drafted.logprobs) == (plain.tokens, plain.logprobs)
    assert drafted.num_drafted > 5


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"vocab_size": 300}, "vocab_size is 300: the model's is 211"),
        ({"hidden_size": 32}, "hidden_size is 32: the model's is 64"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2: heads of one layer"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 2, 3]}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 99]}, "different layers from 0 to 8"),
        ({"draft_vocab_size": 77}, "d2t has"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantised checkpoints"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_at_the_start_and_named(
    make_driver: Callable[..., Driver], tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    write_eagle(tmp_path / "head", "eagle3", **fields)
    with pytest.raises(ConfigError, match=words) as raised:
        make_driver(
            arch={"num_hidden_layers": LAYERS}, speculative=drafting_by(tmp_path / "head", "eagle3")
        )
    assert raised.value.param == "speculative-config.model"


def test_a_head_whose_tokens_are_none_of_the_model_is_refused_at_the_start(
    make_driver: Callable[..., Driver], tmp_path: Path
) -> None:
    write_eagle(tmp_path / "head", "eagle3")
    path = tmp_path / "head" / "model.safetensors"
    stored = load_file(path)
    stored["d2t"] = stored["d2t"] + 1
    save_file(stored, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="d2t names 211, but the model's tokens are 0 to 210"):
        make_driver(
            arch={"num_hidden_layers": LAYERS}, speculative=drafting_by(tmp_path / "head", "eagle3")
        )


def test_a_head_needs_all_layers_on_its_rank() -> None:
    with pytest.raises(ConfigError, match="several pipeline stages"):
        EngineConfig(
            model=ModelConfig(model="/m"),
            parallel=ParallelConfig(
                pipeline_parallel_size=2, distributed_executor_backend="multiprocess"
            ),
            speculative=SpeculativeConfig(method="mtp"),
        )
