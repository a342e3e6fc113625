"""A draft model: its tokens are the model's where it is the model, and change nothing anywhere."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from pdserve.config.schema import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    Role,
    SchedulerConfig,
)
from pdserve.config.speculative import SpeculativeConfig
from pdserve.errors import ConfigError
from pdserve.parallel.group import World
from pdserve.parallel.mesh import MeshShape
from pdserve.worker.drafting.model import FirstRanksDrafts
from tests.ranks import run_ranks
from tests.worker.draft_models import write_pair
from tests.worker.driver import TINY, Driver, params, workers
from tests.worker.spread import FREE_ROWS, Outcome, Requests, config_of, serve
from tests.worker.test_drafting import NUM_ROWS, run
from tests.worker.test_model_runner import prompt_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pdserve.wire.sampling import SamplingParams
    from pdserve.worker.drafting.model import DraftModel


def drafting_by(directory: Path, num_tokens: int = NUM_ROWS) -> SpeculativeConfig:
    return SpeculativeConfig(
        method="draft_model", model=str(directory), num_speculative_tokens=num_tokens
    )


@pytest.fixture
def itself(tmp_path: Path) -> SpeculativeConfig:
    """The model that `make_driver` starts drafts for itself."""
    return drafting_by(tmp_path)


def drafter_of(driver: Driver) -> DraftModel:
    runner = driver.worker._runner
    assert runner is not None
    assert runner._drafts is not None
    shared = runner._drafts._in_step
    assert isinstance(shared, FirstRanksDrafts)
    assert shared._own is not None
    return shared._own


def count_forwards(driver: Driver) -> list[int]:
    """The tokens of each forward of the draft model from now on."""
    model = drafter_of(driver)._model
    forward, counted = model.forward, []

    def counting(step: Any, *rest: Any) -> torch.Tensor:
        counted.append(len(step.token_ids))
        return forward(step, *rest)

    model.forward = counting  # type: ignore[method-assign]
    return counted


@pytest.mark.parametrize(
    "sampling",
    [
        params(),
        params(temperature=1.0, seed=5),
        params(temperature=0.7, top_k=40, top_p=0.9, min_p=0.01, seed=6),
    ],
    ids=["greedy", "drawn", "truncated"],
)
def test_a_model_that_drafts_for_itself_is_always_right(
    make_driver: Callable[..., Driver], itself: SpeculativeConfig, sampling: SamplingParams
) -> None:
    driver = make_driver(speculative=itself)
    for name in ("a", "b"):
        driver.add(name, prompt_of(40, 1 + len(name) * ord(name)), sampling)
        driver.step({name: 40})
    for _ in range(6):
        answer = driver.step({"a": 1, "b": 1}, {"a": NUM_ROWS, "b": 3})
        assert answer.num_drafted == {"a": NUM_ROWS, "b": 3}
        assert [len(tokens) for tokens in answer.sampled_token_ids] == [NUM_ROWS + 1, 4]


def test_tokens_and_logprobs_are_those_without_a_draft_model(
    make_driver: Callable[..., Driver], itself: SpeculativeConfig, tmp_path: Path
) -> None:
    wanted, described, num_steps = run(make_driver(), rows=0)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**TINY, "num_hidden_layers": 1}))
    taken = []
    for speculative in (itself, drafting_by(other)):
        tokens, entries, num = run(make_driver(speculative=speculative), rows=NUM_ROWS)
        assert (tokens, entries) == (wanted, described)
        taken.append(num)
    assert taken[0] < 0.7 * num_steps
    assert taken[1] < num_steps


def test_a_request_that_comes_again_is_drafted_for_from_its_first_token(
    make_driver: Callable[..., Driver], itself: SpeculativeConfig
) -> None:
    driver = make_driver(speculative=itself)
    driver.add("r", prompt_of(30, 1))
    wanted = list(driver.run("r", 40))
    driver.drop("r")
    driver.add("r", prompt_of(30, 1))
    driver.step({"r": 30})
    driver.step({"r": 1}, {"r": 4})
    outputs = list(driver.outputs["r"])
    driver.drop("r")
    # Others get its blocks, with other KV in them, and it gets theirs.
    driver.add("s", prompt_of(50, 2))
    driver.step({"s": 50})
    driver.step({"s": 1}, {"s": 4})
    driver.add("r", prompt_of(30, 1), outputs=outputs)
    driver.step({"r": driver.remaining("r")})
    for _ in range(4):
        assert len(driver.step({"r": 1}, {"r": 4}).sampled_token_ids[0]) == 5
    assert driver.outputs["r"] == wanted[: len(driver.outputs["r"])]


def test_a_long_prompt_is_made_up_for_in_several_steps_of_a_bounded_size(
    make_driver: Callable[..., Driver], itself: SpeculativeConfig
) -> None:
    driver = make_driver(speculative=itself, arch={"max_position_embeddings": 1024})
    driver.add("long", prompt_of(500, 1))
    driver.step({"long": 500})
    driver.add("short", prompt_of(20, 2))
    driver.step({"short": 20})
    counted = count_forwards(driver)
    lengths = []
    for _ in range(8):
        answer = driver.step({"long": 1, "short": 1}, {"long": 2, "short": 2})
        lengths.append([len(tokens) for tokens in answer.sampled_token_ids])
    # The short one does not wait for the long one, which catches up, and is then right, too.
    assert all(short == 3 for _, short in lengths)
    assert [long == 3 for long, _ in lengths] == [False] * 4 + [True] * 4
    assert max(counted) == 128 + 2 * 2


def test_a_request_that_has_no_rows_costs_its_draft_model_nothing(
    make_driver: Callable[..., Driver], itself: SpeculativeConfig
) -> None:
    driver = make_driver(speculative=itself)
    driver.add("r", prompt_of(20, 1))
    driver.step({"r": 20})
    counted = count_forwards(driver)
    for _ in range(10):
        driver.step({"r": 1})
    assert counted == []
    assert driver.step({"r": 1}, {"r": 1}).num_drafted == {"r": 1}
    assert counted == [31]


def test_kv_of_a_draft_model_that_is_wrong_changes_no_token(
    make_driver: Callable[..., Driver], itself: SpeculativeConfig
) -> None:
    wanted, described, _ = run(make_driver(), rows=0)
    for value in (float("nan"), 3.0):
        driver = make_driver(speculative=itself)
        kv = drafter_of(driver)._kv_layers
        compute = drafter_of(driver)._compute

        def poisoned(*args: Any, compute: Any = compute, kv: Any = kv, value: float = value) -> Any:
            for layer in kv:
                layer.fill_(value)
            return compute(*args)

        drafter_of(driver)._compute = poisoned  # type: ignore[method-assign]
        tokens, entries, _ = run(driver, rows=NUM_ROWS)
        assert (tokens, entries) == (wanted, described)


def test_nothing_is_drafted_beyond_the_positions_of_a_draft_model(
    make_driver: Callable[..., Driver], tmp_path: Path
) -> None:
    short = tmp_path / "short"
    short.mkdir()
    (short / "config.json").write_text(json.dumps({**TINY, "max_position_embeddings": 40}))
    driver = make_driver(speculative=drafting_by(short))
    driver.add("r", prompt_of(30, 1))
    wanted = list(driver.run("r", 60))
    driver.drop("r")
    driver.add("r", prompt_of(30, 1))
    driver.step({"r": 30})
    num_drafted = []
    while len(driver.outputs["r"]) < 40:
        num_drafted.append(driver.step({"r": 1}, {"r": 4}).num_drafted.get("r", 0))
    assert driver.outputs["r"] == wanted[: len(driver.outputs["r"])]
    # 31 tokens, 36, then 41, which are too many.
    assert num_drafted[:2] == [4, 4]
    assert not any(num_drafted[2:])


def test_the_kv_of_both_models_is_within_what_is_given_for_kv(
    make_driver: Callable[..., Driver], itself: SpeculativeConfig
) -> None:
    cache = CacheConfig(kv_cache_memory_bytes=1 << 20)
    plain = make_driver(cache=cache).info.layout
    both = make_driver(cache=cache, speculative=itself).info.layout
    assert both.block_bytes == plain.block_bytes
    assert both.num_blocks == plain.num_blocks // 2


def test_an_engine_that_computes_prompts_alone_has_no_draft_model(
    tmp_path: Path, itself: SpeculativeConfig
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    config = EngineConfig(
        model=ModelConfig(model=str(tmp_path), load_format="dummy"),
        role=Role.PREFILL,
        device="cpu",
        cache=CacheConfig(num_gpu_blocks_override=64),
        parallel=ParallelConfig(num_threads=1),
        speculative=itself,
    )
    with workers() as begin:
        driver = begin(config)
        assert driver.info.draft_cost == 0.0
        driver.add("r", prompt_of(30, 1))
        driver.step({"r": 30})


@pytest.mark.parametrize(
    ("arch", "words"),
    [
        (None, "is not a directory"),
        ({"vocab_size": 300}, "its vocabulary has 300 tokens, but the model's has 211"),
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' is not supported"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_a_draft_model_that_cannot_be_used_is_refused_at_the_start_and_named(
    make_driver: Callable[..., Driver], tmp_path: Path, arch: dict[str, Any] | None, words: str
) -> None:
    other = tmp_path / "other"
    if arch is not None:
        other.mkdir()
        (other / "config.json").write_text(json.dumps({**TINY, **arch}))
    with pytest.raises(ConfigError, match=words) as raised:
        make_driver(speculative=drafting_by(other))
    assert raised.value.param == "speculative-config.model"
    assert str(other) in str(raised.value)


def test_a_draft_model_needs_its_directory() -> None:
    for fields in ({"method": "draft_model"}, {"method": "ngram", "model": "/m"}):
        with pytest.raises(ConfigError, match="need a directory"):
            SpeculativeConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "lookup"),
    [
        ({}, (5, 3)),
        ({"prompt_lookup_max": 2}, (2, 2)),
        ({"prompt_lookup_min": 6}, (6, 6)),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 4}, (4, 1)),
    ],
)
def test_one_limit_of_what_ngram_compares_is_the_other_as_well(
    fields: dict[str, int], lookup: tuple[int, int]
) -> None:
    assert SpeculativeConfig(method="ngram", **fields).lookup == lookup


@pytest.mark.parametrize("field", ["model", "num_speculative_tokens", "prompt_lookup_max"])
def test_a_field_that_has_no_effect_without_a_method_is_refused_with_the_methods(field):
    with pytest.raises(ConfigError, match=f"so {field} would have no effect: use ngram") as raised:
        msgspec.convert({field: "/m" if field == "model" else 9}, SpeculativeConfig)
    assert raised.value.param == "speculative-config.method"


# Whole engines, whose scheduler gives rows to drafts as they pay. -----------------------


def requests_of(num: int, **fields: Any) -> Requests:
    """Requests that share the beginnings of their prompts."""
    common = prompt_of(40, 7)
    return {
        f"r{index}": (
            common[: 8 * (index % 6)] + prompt_of(10, index),
            params(max_tokens=60, ignore_eos=True, **fields),
        )
        for index in range(num)
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_blocks", "shape"),
    [
        pytest.param(200, MeshShape(), marks=pytest.mark.matrix),
        (40, MeshShape()),
        pytest.param(200, MeshShape(tp=2), marks=pytest.mark.matrix),
        pytest.param(40, MeshShape(tp=2), marks=pytest.mark.matrix),
        pytest.param(200, MeshShape(pp=2), marks=pytest.mark.matrix),
        pytest.param(40, MeshShape(tp=2, pp=2), marks=pytest.mark.matrix),
    ],
    ids=["", "preempted", "two ranks", "two ranks, preempted", "stages", "all, preempted"],
)
def test_engines_put_out_the_same_and_those_whose_drafts_are_right_in_fewer_steps(
    tmp_path: Path, num_blocks: int, shape: MeshShape
) -> None:
    target, draft = write_pair(tmp_path, num_layers=8 * shape.tp * shape.pp)
    free = requests_of(4) | {
        f"drawn {name}": each for name, each in requests_of(4, temperature=0.8, seed=3).items()
    }
    ruled = requests_of(4, temperature=0.8, seed=3, frequency_penalty=0.9, logprobs=2)
    requests = free | {f"ruled {name}": each for name, each in ruled.items()}

    def config(speculative: SpeculativeConfig, shape: MeshShape) -> EngineConfig:
        return config_of(
            target,
            shape,
            load_format="auto",
            cache=CacheConfig(num_gpu_blocks_override=num_blocks, block_size=8),
            scheduler=SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=96),
            speculative=speculative,
        )

    def drafted(requests: Requests) -> Outcome:
        drafting = config(drafting_by(draft, 5), shape)
        found = run_ranks(shape, serve, drafting, requests, {}, FREE_ROWS)
        outcome: Outcome = found[(shape.pp - 1) * shape.tp]
        return outcome

    wanted = serve(World.alone(), config(SpeculativeConfig(), MeshShape()), requests)
    found = drafted(requests)
    assert found.tokens == wanted.tokens
    if shape.tp == shape.pp == 1:
        assert found.logprobs == wanted.logprobs
    assert found.num_drafted > found.num_accepted > 50
    assert (found.num_preemptions > 0) == (num_blocks == 40)
    told = drafted(free)
    assert told.num_drafted == told.num_accepted > 100
    assert shape.pp > 1 or told.num_steps < wanted.num_steps


# Blocks that come back with what was computed in them. ----------------------------------


def again(driver: Driver, name: str, then: str, prompt: list[int]) -> None:
    """Have a request `then` get the blocks that `name` had, in their order."""
    blocks = list(driver._blocks[name])
    driver.drop(name)
    driver._free = [each for each in driver._free if each not in blocks] + blocks[::-1]
    driver.add(then, prompt)
    driver.step({then: len(prompt)})


def test_a_prefix_whose_blocks_hold_its_drafting_kv_is_not_computed_again(
    make_driver: Callable[..., Driver], itself: SpeculativeConfig
) -> None:
    driver = make_driver(speculative=itself)
    prompt = prompt_of(100, 1)
    driver.add("a", prompt)
    driver.step({"a": 100})
    for _ in range(4):
        driver.step({"a": 1}, {"a": 4})
    answer = driver.outputs["a"]
    counted = count_forwards(driver)
    turns = [*prompt, *answer, *prompt_of(9, 2)]
    again(driver, "a", "b", turns)
    driver.step({"b": 1}, {"b": 4})
    # Of 16 tokens each, all blocks but the one that was not full: some of it was drafted.
    held = (len(prompt) + len(answer) - 1) // 16 * 16
    assert held >= 112
    assert counted[0] == len(turns) + 1 - held
    for _ in range(3):
        assert len(driver.step({"b": 1}, {"b": 4}).sampled_token_ids[0]) == 5


@pytest.mark.parametrize("place", [0, 20, 60])
def test_blocks_hold_nothing_of_another_prefix(
    make_driver: Callable[..., Driver], itself: SpeculativeConfig, place: int
) -> None:
    driver = make_driver(speculative=itself)
    prompt = prompt_of(64, 1)
    driver.add("a", prompt)
    driver.step({"a": 64})
    driver.step({"a": 1}, {"a": 4})
    other = [*prompt[:place], (prompt[place] + 1) % 211, *prompt[place + 1 :]]
    counted = count_forwards(driver)
    again(driver, "a", "b", other)
    driver.step({"b": 1}, {"b": 4})
    assert counted[0] == 65 - place // 16 * 16
    # And what was computed for the other took the names of the first one's blocks.
    del counted[:]
    again(driver, "b", "c", prompt)
    driver.step({"c": 1}, {"c": 4})
    assert counted[0] == 65 - place // 16 * 16
    assert len(driver.step({"c": 1}, {"c": 4}).sampled_token_ids[0]) == 5


def test_a_prediction_comes_before_what_a_model_drafts(
    make_driver: Callable[..., Driver], itself: SpeculativeConfig
) -> None:
    driver = make_driver(speculative=itself)
    counted = count_forwards(driver)
    prompt = prompt_of(20, 1)
    driver.add("r", prompt)
    wanted = list(driver.run("r", 30))
    driver.drop("r")
    runner = driver.worker._runner
    assert runner is not None
    assert runner._drafts is not None
    drafts, add = runner._drafts, runner._drafts.add
    drafts.add = lambda row, request: add(  # type: ignore[method-assign]
        row, msgspec.structs.replace(request, prediction_token_ids=wanted)
    )
    driver.add("r", prompt)
    driver.step({"r": 20})
    for _ in range(4):
        assert len(driver.step({"r": 1}, {"r": 4}).sampled_token_ids[0]) == 5
    assert driver.outputs["r"] == wanted[:21]
    assert counted == []
