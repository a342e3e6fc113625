"""Drafts in a worker: tokens and log-probabilities to the bit as without, whoever drafts."""

from __future__ import annotations

import json
import random
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch

from pdserve.config.boxed import boxed_model_dir
from pdserve.config.schema import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from pdserve.config.speculative import SpeculativeConfig
from pdserve.errors import InternalError
from pdserve.parallel.place import RankPlace
from pdserve.wire.ids import EngineId, Incarnation, RequestId
from pdserve.wire.sampling import Grammar
from pdserve.wire.step import NewRequest
from pdserve.worker.drafting.drafts import Drafts, measure_rows
from pdserve.worker.drafting.ngram import NgramDrafter
from pdserve.worker.drafting.suffix import SuffixDrafter
from pdserve.worker.sampler import Sampler
from pdserve.worker.worker import Worker
from tests.worker.driver import GREEDY, TINY, Driver, params
from tests.worker.same_drafts import BY_HEADS, DRAFTERS, compare, write_model, write_with_drafters
from tests.worker.test_model_runner import QWEN3, WINDOWED, prompt_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pdserve.wire.sampling import SamplingParams, TokenLogprobs
    from pdserve.worker.model_runner import ModelRunner

VOCAB = TINY["vocab_size"]
NUM_ROWS = 6
NUM_OUTPUTS = 40
DRAFTING = SpeculativeConfig(method="ngram", num_speculative_tokens=NUM_ROWS)
REQUESTS: dict[str, tuple[list[int], SamplingParams]] = {
    "greedy": (prompt_of(60, 1), GREEDY),
    "sampled": (prompt_of(33, 2), params(temperature=0.9, seed=4)),
    "nucleus": (prompt_of(1, 3), params(temperature=1.2, top_p=0.8, min_p=0.01, seed=5)),
    "penalised": (
        prompt_of(90, 4),
        params(temperature=0.5, frequency_penalty=0.7, repetition_penalty=1.2, seed=6),
    ),
    "ruled": (
        prompt_of(20, 7),
        params(logit_bias={5: 4.0}, bad_words=((9,), (5, 7)), min_tokens=5, stop_token_ids=(3,)),
    ),
    "described": (prompt_of(17, 5), params(logprobs=5)),
    "sampled and described": (prompt_of(8, 6), params(temperature=1.0, logprobs=2, seed=7)),
    "allowed": (prompt_of(8, 9), params(allowed_token_ids=tuple(range(50)))),
}


class Recall:
    """Drafts what it has been told beforehand, and what the test makes of that."""

    def __init__(
        self, known: dict[str, list[int]], change: Callable[[list[int]], list[int]]
    ) -> None:
        self._known, self._change = known, change
        self._outputs: dict[int, tuple[str, int]] = {}

    def add(self, row: int, request: NewRequest) -> None:
        self._outputs[row] = (str(request.request_id), len(request.output_token_ids))

    def remove(self, row: int) -> None:
        del self._outputs[row]

    def note(self, row: int, token_ids: Sequence[int]) -> None:
        name, num = self._outputs[row]
        self._outputs[row] = name, num + len(token_ids)

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        drafts = {}
        for row, max_tokens in wanted.items():
            name, num = self._outputs[row]
            drafts[row] = self._change(self._known[name][num : num + max_tokens])
        return drafts


def runner_of(driver: Driver) -> ModelRunner:
    """What runs the steps of a driver."""
    runner = driver.worker._runner
    assert runner is not None
    return runner


def drafts_by(driver: Driver, drafter: Recall) -> None:
    """Give a worker another drafter."""
    runner = runner_of(driver)
    runner._drafts = Drafts(drafter, vocab_size=VOCAB, max_tokens=NUM_ROWS)


def noisy(draft: list[int]) -> list[int]:
    """Some tokens are others."""
    rng = random.Random(sum(draft))
    return [token if rng.random() < 0.8 else rng.randrange(VOCAB) for token in draft]


CHANGES: dict[str, Callable[[list[int]], list[int]]] = {
    "right": lambda draft: draft,
    "noisy": noisy,
    "wrong": lambda draft: [(token + 1) % VOCAB for token in draft],
    "outside the vocabulary": lambda draft: [*draft[:2], VOCAB, -1, 2**40],
    "too long": lambda draft: [*draft, *range(100)],
    "one token for ever": lambda draft: [3] * NUM_ROWS,
}


def run(
    driver: Driver, *, rows: int, num_outputs: int = NUM_OUTPUTS
) -> tuple[dict[str, list[int]], dict[str, list[TokenLogprobs]], int]:
    """All requests together, with so many rows for drafts; and how many steps they took in all."""
    logprobs: dict[str, list[TokenLogprobs]] = {}
    for name, (prompt, sampling) in REQUESTS.items():
        driver.add(name, prompt, sampling)
    running, outputs, num_steps = list(REQUESTS), {}, 0
    while running:
        num_tokens = {name: min(driver.remaining(name), 25) for name in running}
        granted = {
            name: min(rows, num_outputs - len(driver.outputs[name]) - 1)
            for name, num in num_tokens.items()
            if driver.outputs[name] and num == 1
        }
        answer = driver.step(num_tokens, {name: num for name, num in granted.items() if num > 0})
        assert not answer.non_finite_ids
        runner_of(driver).finish_step()
        num_steps += len(answer.request_ids)
        for name, entries in answer.logprobs.items():
            logprobs.setdefault(str(name), []).extend(entries)
        for name in list(running):
            if len(driver.outputs[name]) == num_outputs:
                outputs[name] = driver.outputs[name]
                running.remove(name)
                driver.drop(name)
    return outputs, logprobs, num_steps


@pytest.mark.parametrize(
    "arch",
    [
        {},
        pytest.param(QWEN3, marks=pytest.mark.slow),
        pytest.param(WINDOWED, marks=pytest.mark.slow),
    ],
    ids=["llama", "qwen3 bf16", "window"],
)
def test_tokens_and_logprobs_are_those_without_drafts(
    make_driver: Callable[..., Driver], arch: dict[str, object]
) -> None:
    wanted, described, num_steps = run(make_driver(arch=arch), rows=0)
    assert len({tuple(tokens) for tokens in wanted.values()}) == len(REQUESTS)
    driver = make_driver(arch=arch, speculative=DRAFTING)
    found = {}
    for name, change in CHANGES.items():
        drafts_by(driver, Recall(wanted, change))
        tokens, entries, found[name] = run(driver, rows=NUM_ROWS)
        assert tokens == wanted, name
        assert entries == described, name
    # "ruled" has a stop id, which no draft goes beyond.
    assert found["right"] < num_steps / 3
    assert found["wrong"] == num_steps


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_of_looked_up_tokens_change_nothing(
    make_driver: Callable[..., Driver], method: str
) -> None:
    wanted, described, num_steps = run(make_driver(), rows=0)
    drafting = msgspec.structs.replace(
        DRAFTING, method=method, prompt_lookup_min=1, prompt_lookup_max=5
    )
    driver = make_driver(speculative=drafting)
    taken = []
    for _ in range(2):
        tokens, entries, num = run(driver, rows=NUM_ROWS)
        assert (tokens, entries) == (wanted, described)
        taken.append(num)
    assert min(taken) < num_steps
    # The second time, the same was answered before.
    assert taken[1] < taken[0] / 2 if method == "suffix" else taken[1] == taken[0]


def test_a_draft_ends_before_a_token_that_ends_its_request(
    make_driver: Callable[..., Driver],
) -> None:
    driver = make_driver(speculative=DRAFTING)
    driver.add("r", prompt_of(9, 1))
    wanted = list(driver.run("r", 12))
    driver.drop("r")
    at = next(place for place in range(2, 6) if wanted.index(wanted[place]) == place)
    stop = wanted[at]
    for sampling, length in (
        (params(eos_token_ids=(stop,)), at + 1),
        (params(stop_token_ids=(stop,), ignore_eos=True), at + 1),
        (params(eos_token_ids=(stop,), ignore_eos=True), 1 + NUM_ROWS + 1),
    ):
        drafts_by(driver, Recall({"r": wanted}, lambda draft: draft))
        driver.add("r", prompt_of(9, 1), sampling)
        driver.step({"r": 9})
        answer = driver.step({"r": 1}, {"r": NUM_ROWS})
        assert driver.outputs["r"] == wanted[:length]
        assert answer.num_drafted == {"r": length - 2}
        driver.drop("r")


def poison(driver: Driver, rows: slice) -> None:
    """Have logits of some rows of each step be NaN in one place."""
    runner = driver.worker._runner
    assert runner is not None
    compute = runner._model.logits

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        logits[rows, 0] = float("nan")
        return logits

    runner._model.logits = poisoned  # type: ignore[method-assign]


@pytest.mark.parametrize("sampling", [GREEDY, params(temperature=1.0, seed=3)])
def test_logits_behind_a_wrong_draft_that_are_not_finite_are_nobodys_fault(
    make_driver: Callable[..., Driver], sampling: SamplingParams
) -> None:
    driver = make_driver(speculative=DRAFTING)
    driver.add("r", prompt_of(9, 1), sampling)
    wanted = list(driver.run("r", 20))
    driver.drop("r")
    drafts_by(driver, Recall({"r": wanted}, lambda draft: [*draft[:2], (draft[2] + 1) % VOCAB]))
    driver.add("r", prompt_of(9, 1), sampling)
    driver.step({"r": 9})
    poison(driver, slice(-1, None))
    for _ in range(4):
        assert driver.step({"r": 1}, {"r": 3}).non_finite_ids == []
    assert driver.outputs["r"] == wanted[:13]


@pytest.mark.parametrize("sampling", [GREEDY, params(temperature=1.0, seed=3, min_tokens=9)])
def test_logits_behind_a_right_draft_that_are_not_finite_end_nothing_by_themselves(
    make_driver: Callable[..., Driver], sampling: SamplingParams
) -> None:
    driver = make_driver(speculative=DRAFTING)
    driver.add("r", prompt_of(9, 1), sampling)
    wanted = list(driver.run("r", 20))
    driver.drop("r")
    drafts_by(driver, Recall({"r": wanted}, list))
    driver.add("r", prompt_of(9, 1), sampling)
    driver.step({"r": 9})
    poison(driver, slice(2, None))
    for _ in range(4):  # two tokens of each step are behind logits that are finite
        assert driver.step({"r": 1}, {"r": 3}).non_finite_ids == []
    assert driver.outputs["r"] == wanted[:9]
    poison(driver, slice(None))
    spoiled = driver.step({"r": 1}, {"r": 3})
    assert (spoiled.spoiled_ids, spoiled.non_finite_ids) == (["r"], [])
    assert driver.step({"r": 1}).non_finite_ids == ["r"]


@pytest.mark.parametrize("sampling", [GREEDY, params(temperature=1.0, seed=3, min_tokens=20)])
def test_a_draft_whose_values_are_not_finite_ends_no_request(
    make_driver: Callable[..., Driver], sampling: SamplingParams
) -> None:
    driver = make_driver(speculative=DRAFTING)
    prompts = {"r": prompt_of(9, 1), "other": prompt_of(20, 2)}
    wanted = {}
    for name, prompt in prompts.items():
        driver.add(name, prompt, sampling)
        wanted[name] = list(driver.run(name, 40))
        driver.drop(name)
    used = {token for name in prompts for token in (*prompts[name], *wanted[name])}
    bad = next(token for token in range(VOCAB) if token not in used)
    model: Any = runner_of(driver)._model
    model._embedding._table[bad] = float("nan")
    drafts_by(driver, Recall(wanted, lambda draft: [draft[0], bad] if draft else []))
    for name, prompt in prompts.items():
        driver.add(name, prompt, sampling)
    driver.step({name: len(prompt) for name, prompt in prompts.items()})
    spoiled: set[str] = set()
    while len(driver.outputs["r"]) < 12:
        rows = {} if "r" in spoiled else {"r": 3}
        answer = driver.step({"r": 1, "other": 1}, rows)
        assert not answer.non_finite_ids
        spoiled = {*answer.spoiled_ids}
        runner_of(driver).finish_step()
    for name, tokens in driver.outputs.items():
        assert tokens == wanted[name][: len(tokens)]


def test_a_draft_without_its_requests_last_token_is_refused(
    make_driver: Callable[..., Driver],
) -> None:
    driver = make_driver(speculative=DRAFTING)
    drafts_by(driver, Recall({"r": [1, 2, 3]}, lambda draft: draft))
    driver.add("r", prompt_of(9, 1))
    with pytest.raises(InternalError, match="cannot have a draft"):
        driver.step({"r": 5}, {"r": 3})


def wait_for_grammars(driver: Driver) -> None:
    """Wait until it is known what the grammars of the batch allow, and leave no choice of."""
    runner = driver.worker._runner
    assert runner is not None
    assert isinstance(runner._sampler, Sampler)
    for rules in runner._sampler._rules.values():
        assert rules._constraint is not None
        deadline_s = time.monotonic() + 30.0
        while not rules._constraint.is_known(deadline_s):  # it waits once for each token, at most
            assert time.monotonic() < deadline_s
            time.sleep(0.001)


@pytest.fixture
def make_boxed() -> Iterator[Callable[[SpeculativeConfig], Driver]]:
    """Start a worker with the boxed model, whose tokenizer grammars need, and a driver for it."""
    workers: list[Worker] = []

    def make(speculative: SpeculativeConfig) -> Driver:
        worker = Worker(
            EngineConfig(
                model=ModelConfig(model=str(boxed_model_dir()), max_model_len=512),
                device="cpu",
                cache=CacheConfig(num_gpu_blocks_override=64),
                scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512),
                parallel=ParallelConfig(num_threads=1),
                speculative=speculative,
            ),
            place=RankPlace(),
            incarnation=Incarnation("life"),
            engine_id=EngineId("engine"),
            wake=lambda: None,
            progress=lambda _: None,
        )
        workers.append(worker)
        return Driver(worker, worker.start())

    yield make
    for worker in workers:
        worker.close(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_grammar_leaves_no_choice_of_is_put_out_in_one_step(
    make_boxed: Callable[[SpeculativeConfig], Driver], temperature: float
) -> None:
    names = ["first_name", "last_name", "years_of_experience"]
    schema = {
        "type": "object",
        "properties": {name: {"type": "string", "maxLength": 3} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    grammar = Grammar(text=json.dumps({"grammars": [{"json_schema": schema}]}))
    sampling = params(grammar=grammar, temperature=temperature, seed=5, logprobs=1)
    found = []
    for speculative in (SpeculativeConfig(), DRAFTING):
        driver = make_boxed(speculative)
        driver.add("r", [5, 6, 7], sampling)
        logprobs: list[TokenLogprobs] = []
        num_steps = 0
        while len(driver.outputs["r"]) < 40 and 1 not in driver.outputs["r"]:
            rows = {"r": NUM_ROWS} if speculative.method and driver.outputs["r"] else {}
            wait_for_grammars(driver)
            answer = driver.step({"r": driver.remaining("r")}, rows)
            driver.worker.finish_step()
            if answer.unready_ids:
                driver.take_back("r")
                continue
            num_steps += 1
            logprobs += answer.logprobs[RequestId("r")]
        found.append((driver.outputs["r"], logprobs, num_steps))
    (wanted, described, most), (tokens, entries, fewer) = found
    assert tokens[: len(wanted)] == wanted
    assert entries[: len(wanted)] == described
    assert fewer < 0.7 * most


class Told:
    """A drafter that keeps what it is told, and drafts the last of that."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def add(self, row: int, request: NewRequest) -> None:
        pass

    def remove(self, row: int) -> None:
        pass

    def note(self, row: int, token_ids: Sequence[int]) -> None:
        self.tokens += token_ids

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        return dict.fromkeys(wanted, self.tokens[-1:])


def test_a_drafter_of_looked_up_tokens_is_left_alone_while_nobody_has_rows() -> None:
    request = NewRequest(
        request_id=RequestId("r"),
        prompt_token_ids=[1],
        output_token_ids=[],
        block_ids=[],
        num_computed_tokens=0,
        sampling=GREEDY,
    )
    drafter = Told()
    drafts = Drafts(drafter, vocab_size=VOCAB, max_tokens=NUM_ROWS)

    def step(rows: dict[RequestId, int], token: int) -> dict[RequestId, list[int]]:
        drafts.begin(rows)
        found = drafts.take(rows)
        drafts.note([0], [[token]])
        drafts.finish()
        return found

    drafts.add(0, request)
    assert [step({}, token) for token in (2, 3, 4)] == [{}, {}, {}]
    assert drafter.tokens == []
    assert step({request.request_id: 1}, 5) == {request.request_id: [4]}
    assert drafter.tokens == [2, 3, 4, 5]
    step({}, 6)
    drafts.remove(request.request_id)
    assert drafter.tokens[-1] == 6  # others' answers may be drafted from it


class TestNgram:
    """What is looked up, and where."""

    @staticmethod
    def draft(
        prompt: list[int],
        outputs: list[int],
        max_tokens: int,
        *,
        prediction: list[int] | None = None,
        longest: int = 4,
        shortest: int = 2,
    ) -> list[int]:
        drafter = NgramDrafter(longest=longest, shortest=shortest)
        drafter.add(
            3,
            NewRequest(
                request_id=RequestId("r"),
                prompt_token_ids=prompt,
                output_token_ids=outputs[:1],
                sampling=GREEDY,
                block_ids=[],
                num_computed_tokens=0,
                prediction_token_ids=prediction or [],
            ),
        )
        for token_id in outputs[1:]:
            drafter.note(3, [token_id])
        return drafter.propose({3: max_tokens})[3]

    def test_what_followed_the_last_tokens_is_the_draft(self) -> None:
        assert self.draft([1, 2, 3, 4, 5, 6, 9], [2, 3], 3) == [4, 5, 6]

    def test_the_longest_run_wins_and_of_equal_ones_the_latest(self) -> None:
        assert self.draft([1, 2, 3, 7, 0, 2, 3, 8], [1, 2, 3], 1) == [7]
        assert self.draft([1, 2, 3, 7, 0, 2, 3, 8], [2, 3], 1) == [8]

    def test_fewer_equal_tokens_than_asked_are_no_run(self) -> None:
        assert self.draft([1, 2, 3, 4], [5, 3], 2) == []
        assert self.draft([1, 2, 3, 4], [5, 3], 2, shortest=1) == [4, 5]

    def test_the_answer_itself_is_looked_up(self) -> None:
        assert self.draft([1], [7, 8, 9, 5, 7, 8], 2) == [9, 5]

    def test_a_run_up_to_the_end_goes_on_as_it_began(self) -> None:
        assert self.draft([1], [7, 8, 7, 8], 5) == [7, 8, 7, 8, 7]

    def test_a_prediction_is_followed_from_its_first_token(self) -> None:
        prediction = [20, 21, 22, 23, 24, 25]
        assert self.draft([1, 2, 3], [20], 3, prediction=prediction) == [21, 22, 23]
        assert self.draft([1, 2, 3], [20, 21, 5, 22, 23], 4, prediction=prediction)[:2] == [24, 25]
        assert self.draft([1, 2, 3], [9], 3, prediction=prediction) == []

    def test_one_token_is_no_corpus(self) -> None:
        assert self.draft([1], [], 3, shortest=1) == []

    def test_a_long_answer_finds_what_a_search_of_every_place_finds(self) -> None:
        rng = random.Random(1)
        prompt = rng.choices(range(5), k=40)
        outputs = rng.choices(range(5), k=700)
        drafter = NgramDrafter(longest=4, shortest=2)
        drafter.add(
            0,
            NewRequest(
                request_id=RequestId("r"),
                prompt_token_ids=prompt,
                output_token_ids=[],
                sampling=GREEDY,
                block_ids=[],
                num_computed_tokens=0,
            ),
        )
        tokens = list(prompt)
        for start in range(0, 700, 7):
            drafter.note(0, outputs[start : start + 7])
            tokens += outputs[start : start + 7]
            assert drafter.propose({0: 3})[0] == searched(tokens, 3)


def searched(tokens: list[int], max_tokens: int) -> list[int]:
    """The same by looking at every place."""
    for length in (4, 3, 2):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                followed = tokens[end:]
                return np.resize(followed, max_tokens).tolist()
    return []


class TestSuffix:
    """What followed most often, and for whom."""

    @staticmethod
    def drafter(**fields: float) -> SuffixDrafter:
        return SuffixDrafter(msgspec.structs.replace(SpeculativeConfig(method="suffix"), **fields))

    @staticmethod
    def begin(
        drafter: SuffixDrafter,
        row: int,
        prompt: list[int],
        outputs: list[int],
        salt: str = "",
        before: Sequence[int] = (),
    ) -> None:
        drafter.add(
            row,
            NewRequest(
                request_id=RequestId(f"r{row}"),
                prompt_token_ids=prompt,
                output_token_ids=list(before),
                sampling=GREEDY,
                block_ids=[],
                num_computed_tokens=0,
                cache_salt=salt,
            ),
        )
        drafter.note(row, outputs)

    def test_former_answers_of_the_same_salt_are_looked_up_and_no_others(self) -> None:
        drafter = self.drafter()
        self.begin(drafter, 0, [1, 2], [10, 11, 12, 13, 14], salt="a")
        self.begin(drafter, 1, [5], [10, 11], salt="a")
        assert drafter.propose({1: 5})[1] == []
        drafter.remove(0)
        assert drafter.propose({1: 5})[1] == [12, 13]
        self.begin(drafter, 0, [5], [10, 11], salt="b")
        assert drafter.propose({0: 5})[0] == []

    def test_the_draft_is_as_long_as_the_run_times_the_factor(self) -> None:
        for factor, wanted in ((1.0, [4, 5]), (0.5, [4]), (2.0, [4, 5, 6, 7])):
            drafter = self.drafter(suffix_decoding_max_spec_factor=factor)
            self.begin(drafter, 0, [1, 2, 3, 4, 5, 6, 7, 8], [2, 3])
            assert drafter.propose({0: 9})[0] == wanted
            assert drafter.propose({0: 1})[0] == wanted[:1]

    def test_the_most_frequent_continuation_wins_and_rare_ones_are_not_drafted(self) -> None:
        prompt = [1, 2, 7, 0, 1, 2, 8, 0, 1, 2, 7, 0, 1, 2, 9]
        drafter = self.drafter()
        self.begin(drafter, 0, prompt, [1, 2])
        assert drafter.propose({0: 1})[0] == [7]
        drafter = self.drafter(suffix_decoding_min_token_prob=0.6)
        self.begin(drafter, 0, prompt, [1, 2])
        assert drafter.propose({0: 1})[0] == []

    def test_nothing_is_drafted_beyond_the_end_of_a_former_answer(self) -> None:
        drafter = self.drafter(suffix_decoding_max_spec_factor=8.0)
        for row, outputs in ((0, [1, 2, 3]), (1, [4, 5, 6])):
            self.begin(drafter, row, [9], outputs)
            drafter.remove(row)
        self.begin(drafter, 2, [9], [1, 2])
        assert drafter.propose({2: 5})[2] == [3]

    def test_only_so_many_former_answers_are_kept(self) -> None:
        drafter = self.drafter(suffix_decoding_max_cached_requests=2)
        for row in range(3):
            self.begin(drafter, row, [9], [row, row + 10, row + 20])
            drafter.remove(row)
        found = []
        for row in range(3):
            self.begin(drafter, 10 + row, [9], [row, row + 10])
            found.append(drafter.propose({10 + row: 1})[10 + row])
        assert found == [[], [21], [22]]

    def test_an_answer_counts_once_however_often_its_request_is_preempted(self) -> None:
        drafter = self.drafter(suffix_decoding_max_cached_requests=2)
        self.begin(drafter, 0, [9], [1, 2, 3])
        drafter.remove(0)
        self.begin(drafter, 0, [9], [4, 5])
        drafter.remove(0)
        self.begin(drafter, 0, [9], [6], before=[4, 5])
        drafter.remove(0)
        for row, outputs in enumerate(([1, 2], [4, 5])):
            self.begin(drafter, row, [9], outputs)
            assert drafter.propose({row: 1})[row] == [outputs[1] + 1]

    def test_a_very_long_answer_is_kept_by_its_end(self) -> None:
        drafter = self.drafter()
        self.begin(drafter, 0, [9], list(range(100_000)))
        drafter.remove(0)
        self.begin(drafter, 0, [9], [99_990, 99_991])
        assert drafter.propose({0: 2})[0] == [99_992, 99_993]
        self.begin(drafter, 1, [9], [5, 6])
        assert drafter.propose({1: 2})[1] == []


def test_costs_are_of_rising_numbers_of_rows() -> None:
    calls: list[int] = []
    waits: list[None] = []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(len(hidden))
        return hidden

    costs = measure_rows(logits, torch.zeros(128, 2), lambda: waits.append(None))
    assert [rows for rows, _ in costs] == sorted(set(calls))
    assert len(waits) == len(calls)
    assert min(seconds for _, seconds in costs) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_requests", "left_out"),
    [
        (20, {"ngram 1", "ngram 15", "eagle", "medusa 1"}),
        pytest.param(50, set(), marks=pytest.mark.matrix),
    ],
)
def test_random_requests_put_out_the_same_whatever_is_drafted(
    tmp_path: Path, num_requests: int, left_out: set[str]
) -> None:
    def compared(
        directory: Path, drafters: dict[str, SpeculativeConfig]
    ) -> dict[str, dict[str, int]]:
        chosen = {name: each for name, each in drafters.items() if name not in left_out}
        return compare(directory, chosen, num_requests, seed=1)

    write_model(tmp_path)
    found = compared(tmp_path, DRAFTERS)
    found |= compared(*write_with_drafters(tmp_path))
    found |= compared(boxed_model_dir(), BY_HEADS)
    for name, counts in found.items():
        assert counts["differing"] == 0, name
        assert counts["drafted"] > counts["accepted"] > num_requests, name
    assert any(counts["preemptions"] for counts in found.values())
