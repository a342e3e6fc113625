"""Engines of several real ranks give what one rank gives."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pdserve.config.schema import CacheConfig, EngineConfig, SchedulerConfig
from pdserve.config.speculative import SpeculativeConfig
from pdserve.parallel.group import World
from pdserve.parallel.mesh import MeshShape
from pdserve.wire.ids import RequestId
from pdserve.wire.sampling import Grammar, Pooling, SamplingParams
from pdserve.wire.transfer import Failed, LoadFailure
from pdserve.worker.worker import failed_anywhere
from tests.ranks import run_ranks
from tests.tiny_models import write_tokenizer
from tests.worker.driver import GREEDY, TINY, params
from tests.worker.spread import Outcome, Requests, config_of, serve

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.wire.sampling import TokenLogprobs

pytestmark = pytest.mark.slow

VOCAB = TINY["vocab_size"]
TP2 = MeshShape(tp=2)
PP2 = MeshShape(pp=2)
PP3 = MeshShape(pp=3)
TP2_PP2 = MeshShape(tp=2, pp=2)
MESHES = [TP2, PP2, PP3, TP2_PP2]


def meshes(*quick: MeshShape) -> pytest.MarkDecorator:
    """All; of which others than these are left to the night."""
    marks = [[] if shape in quick else [pytest.mark.matrix] for shape in MESHES]
    shapes = [pytest.param(s, marks=m) for s, m in zip(MESHES, marks, strict=True)]
    return pytest.mark.parametrize("shape", shapes, ids=name_of)


def name_of(shape: MeshShape) -> str:
    return f"tp {shape.tp} pp {shape.pp}"


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def ending(sampling: SamplingParams, max_tokens: int) -> SamplingParams:
    import msgspec

    return msgspec.structs.replace(sampling, max_tokens=max_tokens, ignore_eos=True)


REQUESTS: Requests = {
    "greedy": (prompt_of(60, 1), ending(GREEDY, 70)),
    "short": (prompt_of(1, 2), ending(GREEDY, 90)),
    "random": (prompt_of(33, 3), ending(params(temperature=0.9, seed=4), 60)),
    "nucleus": (
        prompt_of(12, 4),
        ending(params(temperature=1.2, top_p=0.8, min_p=0.01, seed=5), 60),
    ),
    "top k": (prompt_of(48, 5), ending(params(temperature=2.0, top_k=40, seed=7), 70)),
    "penalised": (
        prompt_of(90, 6),
        ending(params(temperature=0.5, frequency_penalty=0.7, repetition_penalty=1.2), 25),
    ),
    "ruled": (
        prompt_of(20, 7),
        ending(params(logit_bias={5: 4.0}, bad_words=[[9]], min_tokens=5), 70),
    ),
    "bound": (
        prompt_of(22, 13),
        ending(
            params(temperature=1.0, seed=9, grammar=Grammar(text="start: /[a-z 0-9]{900}/")), 50
        ),
    ),
    "described": (prompt_of(17, 8), ending(params(logprobs=3), 15)),
    "prompt described": (prompt_of(70, 9), ending(params(prompt_logprobs=2), 10)),
    "pooled to its last": (prompt_of(61, 10), ending(params(pooling=Pooling.LAST), 1)),
    "pooled to its mean": (prompt_of(63, 12), ending(params(pooling=Pooling.MEAN), 1)),
}

ROOMY = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512)
# Prompts take several steps, and the pool is too small for all requests at once: three of them
# grow by several blocks, and head-room is kept for one.
TIGHT = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=40)
TIGHT_CACHE = CacheConfig(num_gpu_blocks_override=18)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of three layers."""
    found = tmp_path_factory.mktemp("model")
    arch = {**TINY, "num_hidden_layers": 3, "vocab_size": 300}
    (found / "config.json").write_text(json.dumps(arch))
    write_tokenizer(found, 300)
    return found


@pytest.fixture(scope="module")
def expected(directory: Path) -> Outcome:
    """What one rank gives."""
    return serve(World.alone(), config_of(directory, MeshShape(), scheduler=ROOMY), REQUESTS)


def output_of(
    shape: MeshShape, config: EngineConfig, predictions: dict[str, list[int]] | None = None
) -> Outcome:
    """What the output rank of `shape` gives; the others say nothing."""
    outcomes: list[Outcome] = run_ranks(shape, serve, config, REQUESTS, predictions or {})
    output = outcomes.pop((shape.pp - 1) * shape.tp)
    assert all(other.says_nothing for other in outcomes)
    assert {other.num_steps for other in outcomes} == {output.num_steps}
    return output


def assert_close(found: list[TokenLogprobs | None], wanted: list[TokenLogprobs | None]) -> None:
    """The same tokens in the same order, and values but for the rounding of sums."""
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is None or other is None:
            continue
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [t for t, _ in one.top] == [t for t, _ in other.top]


def assert_equal(found: Outcome, wanted: Outcome) -> None:
    assert found.tokens == wanted.tokens
    for name, entries in wanted.logprobs.items():
        assert_close([*found.logprobs[name]], [*entries])
    assert found.pooled.keys() == wanted.pooled.keys()
    assert len(wanted.pooled) == 2
    for name, vector in wanted.pooled.items():
        ours, theirs = np.frombuffer(found.pooled[name], "<f4"), np.frombuffer(vector, "<f4")
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    assert found.prompt_logprobs.keys() == wanted.prompt_logprobs.keys() == {"prompt described"}
    assert_close(
        found.prompt_logprobs["prompt described"], wanted.prompt_logprobs["prompt described"]
    )


@meshes(PP3, TP2_PP2)
def test_ranks_give_the_tokens_and_logprobs_of_one(
    directory: Path, expected: Outcome, shape: MeshShape
) -> None:
    found = output_of(shape, config_of(directory, shape, scheduler=ROOMY))
    assert_equal(found, expected)
    assert found.most_in_flight == max(shape.pp, min(2, shape.tp))
    assert len({tuple(tokens) for tokens in found.tokens.values()}) == len(REQUESTS)


@pytest.mark.parametrize(
    ("shape", "tight"),
    [
        (TP2, False),
        (TP2_PP2, True),
        *(
            pytest.param(shape, tight, marks=pytest.mark.matrix)
            for shape in MESHES
            for tight in (False, True)
            if (shape, tight) not in ((TP2, False), (TP2_PP2, True))
        ),
    ],
)
def test_so_they_do_with_drafts(
    directory: Path, expected: Outcome, shape: MeshShape, tight: bool
) -> None:
    scheduler, cache = (TIGHT, TIGHT_CACHE) if tight else (ROOMY, None)
    drafting = SpeculativeConfig(
        method="ngram", num_speculative_tokens=5, prompt_lookup_min=1, prompt_lookup_max=5
    )
    config = config_of(directory, shape, scheduler=scheduler, cache=cache, speculative=drafting)
    # Right but for every eleventh token.
    predictions = {
        name: [token if place % 11 else 0 for place, token in enumerate(tokens, 1)]
        for name, tokens in expected.tokens.items()
    }
    found = output_of(shape, config, predictions)
    assert_equal(found, expected)
    assert found.num_drafted > found.num_accepted > 200
    assert found.num_preemptions > 0 or not tight


@meshes(TP2, PP2)
def test_so_they_do_where_prompts_are_cut_and_requests_preempted(
    directory: Path, expected: Outcome, shape: MeshShape
) -> None:
    found = output_of(shape, config_of(directory, shape, scheduler=TIGHT, cache=TIGHT_CACHE))
    assert_equal(found, expected)
    assert found.num_preemptions > 0


def test_so_they_do_where_stages_pass_on_a_share_of_the_tokens_per_rank(
    directory: Path, expected: Outcome
) -> None:
    config = config_of(
        directory, TP2_PP2, scheduler=TIGHT, pipeline_layers=(2, 1), enable_sequence_parallel=True
    )
    assert_equal(output_of(TP2_PP2, config), expected)


def loads_that_failed(world: World) -> list[tuple[str, int]]:
    """The first rank has lost a load behind 32 tokens, the last one behind 16, and another."""
    names = {0: {"one": 32}, world.mesh.shape.world_size - 1: {"one": 16, "two": 0}}
    failed = [
        Failed(request_id=RequestId(name), reason=LoadFailure.DIGEST, num_valid_tokens=num)
        for name, num in names.get(world.mesh.rank, {}).items()
    ]
    ids = [RequestId(name) for name in ("one", "whole", "two")]
    return [
        (each.request_id, each.num_valid_tokens) for each in failed_anywhere(world, ids, failed)
    ]


@pytest.mark.parametrize("shape", [TP2, PP2, TP2_PP2], ids=name_of)
def test_what_has_failed_of_a_load_on_one_rank_every_rank_knows(shape: MeshShape) -> None:
    outcomes = run_ranks(shape, loads_that_failed)
    assert outcomes == [[("one", 16), ("two", 0)]] * shape.world_size
