"""Drafts by Medusa heads: of the boxed model, whose own heads are right often enough to tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer

from pdserve.config.boxed import boxed_heads_dir, boxed_model_dir
from pdserve.config.schema import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from pdserve.config.speculative import SpeculativeConfig
from pdserve.parallel.group import World
from pdserve.parallel.mesh import MeshShape
from pdserve.wire.sampling import Grammar
from tests.ranks import run_ranks
from tests.worker.driver import params
from tests.worker.spread import FREE_ROWS, Outcome, Requests, serve

if TYPE_CHECKING:
    from pdserve.wire.sampling import SamplingParams

NUM_DRAFTED = 4
BY_HEADS = SpeculativeConfig(
    method="medusa", model=str(boxed_heads_dir()), num_speculative_tokens=NUM_DRAFTED
)
TEXTS = ("Disaggregated serving means", "Once upon a time", "The decode engine")
SAMPLINGS: dict[str, SamplingParams] = {
    "greedy": params(max_tokens=60, eos_token_ids=(1,)),
    "sampled": params(max_tokens=60, temperature=1.0, seed=3, logprobs=2, eos_token_ids=(1,)),
    "ruled": params(
        max_tokens=50,
        temperature=0.7,
        top_p=0.9,
        seed=4,
        frequency_penalty=0.6,
        min_tokens=20,
        logprobs=1,
        stop_token_ids=(12,),
    ),
    "bound": params(
        max_tokens=40, logprobs=0, grammar=Grammar(text="start: /[a-z ,.]{900}/"), ignore_eos=True
    ),
}


def drafting(world: World, config: EngineConfig, requests: Requests) -> Outcome:
    """Serve where rows for drafts cost next to nothing."""
    return serve(world, config, requests, row_costs=FREE_ROWS)


def config_of(
    speculative: SpeculativeConfig, *, num_blocks: int = 128, shape: MeshShape | None = None
) -> EngineConfig:
    """An engine of the boxed model."""
    shape = shape or MeshShape()
    return EngineConfig(
        model=ModelConfig(model=str(boxed_model_dir()), max_model_len=192),
        device="cpu",
        cache=CacheConfig(num_gpu_blocks_override=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64),
        parallel=ParallelConfig(
            tensor_parallel_size=shape.tp,
            pipeline_parallel_size=shape.pp,
            distributed_executor_backend="inline" if shape.world_size == 1 else "multiprocess",
            num_threads=1,
        ),
        speculative=speculative,
    )


@pytest.fixture(scope="module")
def requests() -> Requests:
    """Each text under each rule."""
    tokenizer = Tokenizer.from_file(str(boxed_model_dir() / "tokenizer.json"))
    return {
        f"{name} {index}": (tokenizer.encode(text).ids, sampling)
        for name, sampling in SAMPLINGS.items()
        for index, text in enumerate(TEXTS)
    }


@pytest.fixture(scope="module")
def plain(requests: Requests) -> Outcome:
    """What an engine gives that drafts nothing."""
    return serve(World.alone(), config_of(SpeculativeConfig()), requests)


def assert_same(found: Outcome, plain: Outcome) -> None:
    assert found.tokens == plain.tokens
    assert found.logprobs == plain.logprobs


def test_tokens_and_logprobs_are_those_without_heads(requests: Requests, plain: Outcome) -> None:
    found = drafting(World.alone(), config_of(BY_HEADS), requests)
    assert_same(found, plain)
    assert found.num_accepted > 0.4 * found.num_drafted > 100


def test_so_they_are_where_requests_are_preempted(requests: Requests, plain: Outcome) -> None:
    found = drafting(World.alone(), config_of(BY_HEADS, num_blocks=14), requests)
    assert_same(found, plain)
    assert found.num_preemptions > 0
    assert found.num_accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        MeshShape(tp=2),
        *(
            pytest.param(shape, marks=pytest.mark.matrix)
            for shape in (MeshShape(pp=2), MeshShape(tp=2, pp=2))
        ),
    ],
    ids=lambda shape: f"tp {shape.tp} pp {shape.pp}",
)
@pytest.mark.parametrize("num_blocks", [128, pytest.param(14, marks=pytest.mark.matrix)])
def test_so_they_are_on_several_ranks(
    requests: Requests, shape: MeshShape, num_blocks: int
) -> None:
    plain, found = (
        run_ranks(shape, drafting, config_of(each, num_blocks=num_blocks, shape=shape), requests)
        for each in (SpeculativeConfig(), BY_HEADS)
    )
    output = (shape.pp - 1) * shape.tp
    assert_same(found[output], plain[output])
    assert found[output].num_accepted > 0.4 * found[output].num_drafted > 100
    assert all(outcome.says_nothing for at, outcome in enumerate(found) if at != output)
    assert found[output].num_preemptions > 0 or num_blocks > 14
