"""Sampling over columns that several ranks have: what one rank would do with all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from pdserve.errors import InternalError
from pdserve.parallel.group import World
from pdserve.parallel.mesh import MeshShape
from pdserve.worker.sampler import Sampler
from pdserve.worker.vocabulary import SpreadSampler, SpreadVocabulary
from tests.ranks import run_ranks
from tests.worker.driver import GREEDY, params

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pdserve.wire.sampling import SamplingParams, TokenLogprobs

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")


def part_of(world: World, vocab_size: int) -> range:
    """Uneven parts; the last may be empty."""
    each = -(-vocab_size // world.tp.size)
    return range(
        min(world.tp.index * each, vocab_size), min((world.tp.index + 1) * each, vocab_size)
    )


def vocabulary_of(world: World, vocab_size: int) -> SpreadVocabulary:
    return SpreadVocabulary(world.tp, part_of(world, vocab_size), vocab_size=vocab_size, device=CPU)


def columns_of(world: World, logits: torch.Tensor) -> torch.Tensor:
    part = part_of(world, logits.shape[-1])
    return logits[:, part.start : part.stop].clone()


# ---- the vocabulary ------------------------------------------------------------------

ROWS = torch.tensor(
    [
        [1.0, 5.0, 2.0, 5.0, 5.0],
        [-7.0, -9.0, -8.0, -9.0, -6.5],
        [2.0, NAN, 1.0, 9.0, 3.0],
        [2.0, 1.0, 1.0, 9.0, NAN],
        [0.0, 0.0, INF, 0.0, 0.0],
        [-INF, -INF, -INF, -INF, 4.0],
        [-INF, -INF, -INF, -INF, -INF],
    ]
)


def _largest_and_whole(world: World) -> tuple[list[int], list[float], torch.Tensor | None]:
    vocabulary = vocabulary_of(world, ROWS.shape[-1])
    chosen, peaks = vocabulary.first_largest(columns_of(world, ROWS))
    return chosen.tolist(), peaks.tolist(), vocabulary.whole(columns_of(world, ROWS))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_agree_on_what_one_rank_finds_and_the_first_gets_whole_rows(num_ranks: int) -> None:
    first, *others = run_ranks(MeshShape(tp=num_ranks), _largest_and_whole)
    chosen, peaks, whole = first
    np.testing.assert_array_equal(peaks, ROWS.numpy().max(-1))
    # The lowest of equal ones; where nothing is finite the token does not matter.
    finite = np.isfinite(peaks)
    assert np.array(chosen)[finite].tolist() == ROWS.numpy().argmax(-1)[finite].tolist()
    torch.testing.assert_close(whole, ROWS, rtol=0, atol=0, equal_nan=True)
    for other in others:
        assert other[0] == chosen
        np.testing.assert_array_equal(other[1], peaks)
        assert other[2] is None


def _wrong_parts(world: World) -> str:
    try:
        SpreadVocabulary(world.tp, range(world.tp.index, 4), vocab_size=4, device=CPU)
    except InternalError as error:
        return str(error)
    return ""


def test_parts_that_overlap_are_refused_on_every_rank() -> None:
    said = run_ranks(MeshShape(tp=2), _wrong_parts)
    assert len(set(said)) == 1
    assert "not a vocabulary of 4" in said[0]


# ---- the sampler ---------------------------------------------------------------------

VOCAB = 150
PARAMS = [
    GREEDY,
    params(temperature=0.8, seed=1),
    params(logprobs=3),
    GREEDY,
    params(temperature=1.3, top_p=0.7, min_p=0.01, seed=2),
    params(frequency_penalty=0.4, presence_penalty=0.3),
    params(temperature=2.0, top_k=9, repetition_penalty=1.3, seed=3, logprobs=0),
    params(allowed_token_ids=[3, 70, 149]),
]


def logits_of(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(len(PARAMS), VOCAB, generator=generator) * 3


def spread_over(world: World) -> SpreadSampler:
    own = Sampler(len(PARAMS), VOCAB, CPU) if world.tp.is_first else None
    return SpreadSampler(vocabulary_of(world, VOCAB), own)


def sample_steps(
    sampler: Sampler | SpreadSampler, world: World, order: list[list[int]]
) -> list[tuple[list[int], dict[int, TokenLogprobs]]]:
    """A step for each list of requests; request i has row i."""
    num_outputs = np.zeros(len(PARAMS), dtype=np.int64)
    for row, sampling in enumerate(PARAMS):
        sampler.add(row, sampling, [1, 2, 3], [])
    steps = []
    for step, batch in enumerate(order):
        rows = np.array(batch)
        sampled = sampler.sample(columns_of(world, logits_of(step)[batch]), rows, num_outputs[rows])
        num_outputs[rows] += 1
        steps.append((sampled.token_ids.tolist(), sampled.logprobs))
    return steps


# All, mixed, greedy ones alone, and others alone.
ORDER = [list(range(8)), [6, 0, 3, 1], [0, 3], [5, 6, 7], [3], [2], list(range(7, -1, -1))]


def _sample(world: World) -> list[tuple[list[int], dict[int, TokenLogprobs]]]:
    sampler = spread_over(world)
    return sample_steps(sampler, world, ORDER)


def test_ranks_sample_the_tokens_of_one_and_the_first_describes_them() -> None:
    first, second = run_ranks(MeshShape(tp=2), _sample)
    assert first == sample_steps(Sampler(len(PARAMS), VOCAB, CPU), World.alone(), ORDER)
    assert [tokens for tokens, _ in second] == [tokens for tokens, _ in first]
    assert not any(logprobs for _, logprobs in second)


def _guess(world: World) -> tuple[list[int], list[int]]:
    sampler = spread_over(world)
    logits, rows, index = _guessed_from(sampler)
    _, of_columns = sampler.guess(columns_of(world, logits), rows, index, draws=True)
    _, of_whole = sampler.guess_whole(logits.clone(), rows, index, draws=True)
    return of_columns.tolist(), of_whole.tolist()


def _guessed_from(
    sampler: Sampler | SpreadSampler,
) -> tuple[torch.Tensor, NDArray[np.int64], NDArray[np.int64]]:
    for row, sampling in enumerate(PARAMS):
        sampler.add(row, sampling, [1, 2, 3], [])
    rows = np.repeat(np.arange(len(PARAMS)), 3)
    return torch.cat([logits_of(step) for step in range(3)])[rows], rows, np.arange(len(rows)) % 3


def test_ranks_guess_the_tokens_of_one() -> None:
    alone = Sampler(len(PARAMS), VOCAB, CPU)
    wanted = alone.guess(*_guessed_from(alone), draws=True)[1].tolist()
    found = run_ranks(MeshShape(tp=3), _guess)
    assert [columns for columns, _ in found] == [wanted] * 3
    assert found[0][1] == wanted


def _sample_one(world: World, sampling: SamplingParams) -> list[int]:
    """Greedy on a row whose user before was `sampling`."""
    sampler = spread_over(world)
    sampler.add(0, sampling, [], [])
    sampler.remove(0)
    sampler.add(0, GREEDY, [], [])
    sampled = sampler.sample(columns_of(world, logits_of(0)[:1]), np.array([0]), np.array([0]))
    assert not sampled.logprobs
    return sampled.token_ids.tolist()


def test_a_row_forgets_who_had_it() -> None:
    before = params(temperature=5.0, logprobs=2, logit_bias={7: 100.0})
    wanted = logits_of(0)[0].argmax().item()
    assert run_ranks(MeshShape(tp=2), _sample_one, before) == [[wanted]] * 2


def _poisoned(
    world: World, rows: list[int], poisoned: list[int], value: float
) -> tuple[list[int], list[int]]:
    """Which rows are named, where the last rank alone has bad columns of some; others' tokens."""
    sampler = spread_over(world)
    for row, sampling in enumerate(PARAMS):
        sampler.add(row, sampling, [1], [])
    logits = columns_of(world, logits_of(0)[rows])
    if world.tp.is_last:
        logits[poisoned, 3] = value
    sampled = sampler.sample(logits, np.array(rows), np.zeros(len(rows), dtype=np.int64))
    return sampled.non_finite, np.delete(sampled.token_ids, poisoned).tolist()


@pytest.mark.parametrize(
    ("rows", "poisoned"),
    [([0, 3], [1]), ([1, 2, 5], [0, 2]), (list(range(8)), [0, 4, 7]), (list(range(8)), [6])],
    ids=["greedy", "whole", "both", "one of both"],
)
@pytest.mark.parametrize("value", [NAN, INF])
def test_what_is_not_finite_on_one_rank_is_known_on_all_and_costs_no_other_row_its_token(
    rows: list[int], poisoned: list[int], value: float
) -> None:
    ((_, wanted),) = run_ranks(MeshShape(), _poisoned, rows, [], value)
    others = [token for i, token in enumerate(wanted) if i not in poisoned]
    found = run_ranks(MeshShape(tp=2), _poisoned, rows, poisoned, value)
    assert found == [(poisoned, others)] * 2
