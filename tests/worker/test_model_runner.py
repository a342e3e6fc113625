"""Steps through a worker: tokens and logits do not depend on how the work was cut up."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pdserve.config.schema import CacheConfig
from pdserve.errors import InternalError
from pdserve.wire.ids import BlockId, RequestId
from pdserve.wire.step import NewRequest, SchedulerOutput
from pdserve.worker.philox import uniforms
from pdserve.worker.sampler import Sampler
from tests.worker.driver import GREEDY, TINY, params

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from pdserve.wire.sampling import SamplingParams
    from pdserve.worker.sampler import Sampled
    from tests.worker.driver import Driver

VOCAB = TINY["vocab_size"]
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "dtype": "bfloat16"}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "head_dim": 16, "num_local_experts": 4}
WINDOWED = {"architectures": ["MistralForCausalLM"], "sliding_window": 19, "head_dim": 16}


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Every matrix of logits that is sampled from, in order."""
    matrices: list[torch.Tensor] = []
    sample = Sampler.sample

    def spy(
        self: Sampler, logits: torch.Tensor, rows: NDArray[np.int64], outputs: NDArray[np.int64]
    ) -> Sampled:
        matrices.append(logits.clone())
        return sample(self, logits, rows, outputs)

    monkeypatch.setattr(Sampler, "sample", spy)
    return matrices


@pytest.mark.parametrize("arch", [{}, QWEN3, WINDOWED], ids=["llama", "qwen3 bf16", "window"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
def test_a_prompt_in_chunks_gives_the_bits_of_a_whole_one(
    make_driver: Callable[..., Driver], seen: list[torch.Tensor], arch: dict[str, Any], chunk: int
) -> None:
    driver = make_driver(arch=arch)
    prompt = prompt_of(150, seed=1)
    driver.add("whole", prompt)
    whole = driver.run("whole", 10)
    logits, seen[:] = list(seen), []
    driver.add("cut", prompt)
    assert driver.run("cut", 10, chunk=chunk) == whole
    assert all(torch.equal(a, b) for a, b in zip(logits, seen, strict=True))
    assert len(set(whole)) > 3


def counts_of_last_layer(driver: Driver) -> list[int]:
    """The tokens that the last layer's MLP computes from now on, by call."""
    computed: list[int] = []
    layer = driver.worker._runner._model._layers[-1]  # type: ignore[union-attr, attr-defined]
    half = layer.mlp

    def count(x: torch.Tensor, residual: torch.Tensor, num_tokens: int) -> torch.Tensor:
        computed.append(num_tokens)
        return half(x, residual, num_tokens)

    layer.mlp = count
    return computed


@pytest.mark.parametrize("arch", [{}, QWEN3, MIXTRAL], ids=["llama", "qwen3 bf16", "experts"])
def test_what_no_logits_need_of_the_last_layer_is_left_out_and_changes_no_bit(
    make_driver: Callable[..., Driver],
    monkeypatch: pytest.MonkeyPatch,
    seen: list[torch.Tensor],
    arch: dict[str, Any],
) -> None:
    def found(least: int) -> tuple[list[int], list[torch.Tensor]]:
        monkeypatch.setattr("pdserve.worker.step._WORTH_LEAVING_OUT", least)
        driver = make_driver(arch=arch)
        computed = counts_of_last_layer(driver)
        driver.add("one", prompt_of(60, 1))
        driver.add("other", prompt_of(90, 2))
        driver.step({"one": 40})
        driver.step({"one": 20, "other": 60})
        driver.step({"one": 1, "other": 30})
        driver.step({"one": 1, "other": 1})
        logits, seen[:] = list(seen), []
        return computed, logits

    computed, logits = found(32)
    assert computed == [1, 31, 2]  # none of the first step
    every, wanted = found(1000)
    assert every == [40, 80, 31, 2]
    assert len(logits) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(logits, wanted, strict=True))


@pytest.mark.parametrize("num_first", [59, 60])
def test_a_described_prompt_needs_all_final_states_only_once(
    make_driver: Callable[..., Driver], num_first: int
) -> None:
    driver = make_driver()
    computed = counts_of_last_layer(driver)
    prompt, sampling = prompt_of(60, 1), params(prompt_logprobs=0)
    driver.add("described", prompt, sampling)
    driver.step({"described": num_first})
    driver.add("other", prompt_of(90, 2))
    driver.step({"described": 1, "other": 60})
    outputs = driver.outputs["described"]
    driver.drop("described")
    driver.add("described", prompt, sampling, outputs=outputs)  # preempted
    again = driver.step({"described": num_first + 2})
    assert computed == [num_first, 1, 1]
    assert again.prompt_logprobs == {}, "it left with the first token"


@pytest.mark.parametrize("arch", [{}, QWEN3], ids=["llama", "qwen3 bf16"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_tokens_and_logits_do_not_depend_on_the_batch(
    make_driver: Callable[..., Driver],
    seen: list[torch.Tensor],
    arch: dict[str, Any],
    num_threads: int,
) -> None:
    requests = {
        "greedy": (prompt_of(60, 1), GREEDY),
        "sampled": (prompt_of(33, 2), params(temperature=0.9, seed=4)),
        "nucleus": (prompt_of(1, 3), params(temperature=1.2, top_p=0.8, min_p=0.01, seed=5)),
        "penalised": (prompt_of(90, 4), params(temperature=0.5, frequency_penalty=0.7, seed=6)),
        "described": (prompt_of(17, 5), params(logprobs=5)),
        "top_k": (prompt_of(48, 6), params(temperature=2.0, top_k=40, seed=7)),
    }
    num_outputs = 12
    driver = make_driver(arch=arch, num_threads=1)
    expected: dict[str, list[int]] = {}
    logits: dict[str, list[torch.Tensor]] = {}
    for name, (prompt, sampling) in requests.items():
        driver.add(name, prompt, sampling)
        expected[name] = driver.run(name, num_outputs)
        logits[name], seen[:] = [matrix[0] for matrix in seen], []

    driver = make_driver(arch=arch, num_threads=num_threads)
    rng = random.Random(9)
    arriving, running = list(requests), []
    while arriving or running:
        if arriving and rng.random() < 0.6:
            name = arriving.pop(rng.randrange(len(arriving)))
            driver.add(name, *requests[name])
            running.append(name)
        if not running:
            continue
        rng.shuffle(running)
        chosen = running[: rng.randint(1, len(running))]
        output = driver.step(
            {name: min(driver.remaining(name), rng.choice([1, 9, 40])) for name in chosen}
        )
        if output.request_ids:
            for name, row in zip(output.request_ids, seen.pop(), strict=True):
                assert torch.equal(row, logits[name][len(driver.outputs[name]) - 1]), name
        for name in chosen:
            if len(driver.outputs[name]) == num_outputs:
                assert driver.outputs[name] == expected[name]
                running.remove(name)
                driver.drop(name)


@pytest.mark.parametrize(
    "sampling", [GREEDY, params(temperature=1.0, repetition_penalty=1.3, seed=3)]
)
def test_a_request_resumed_elsewhere_goes_on_as_if_it_had_stayed(
    make_driver: Callable[..., Driver], sampling: Any
) -> None:
    prompt = prompt_of(40, seed=8)
    driver = make_driver()
    driver.add("stays", prompt, sampling)
    stays = driver.run("stays", 20)
    driver.add("moves", prompt, sampling)
    first = list(driver.run("moves", 7))
    driver.drop("moves")
    other = make_driver(cache=CacheConfig(num_gpu_blocks_override=64, block_size=8))
    other.add("moves", prompt, sampling, outputs=first)
    assert other.run("moves", 20) == stays


def test_prompt_logprobs_are_those_of_each_prefix_however_it_is_cut(
    make_driver: Callable[..., Driver],
) -> None:
    driver = make_driver()
    prompt = prompt_of(50, seed=10)
    by_chunk = []
    for chunk in (50, 13):
        name = f"chunk {chunk}"
        driver.add(name, prompt, params(prompt_logprobs=2))
        entries = []
        while not driver.outputs[name]:
            output = driver.step({name: min(chunk, driver.remaining(name))})
            entries += output.prompt_logprobs.get(RequestId(name), [])
        by_chunk.append(entries)
        assert driver.step({name: 1}).prompt_logprobs == {}
        driver.drop(name)
    assert by_chunk[0] == by_chunk[1]
    assert [entry.token_id for entry in by_chunk[0]] == prompt[1:]
    for length in (1, 20, 49):
        driver.add("prefix", prompt[:length], params(logprobs=VOCAB))
        top = dict(driver.step({"prefix": length}).logprobs[RequestId("prefix")][0].top)
        entry = by_chunk[0][length - 1]
        assert entry.logprob == top[prompt[length]]
        assert entry.rank == 1 + sum(value > entry.logprob for value in top.values())
        assert entry.top == list(top.items())[:2]
        driver.drop("prefix")


def test_named_tokens_have_the_logprobs_that_they_have_among_all(
    make_driver: Callable[..., Driver],
) -> None:
    driver = make_driver()
    prompt = prompt_of(20, seed=3)
    driver.add("all", prompt, params(logprobs=VOCAB))
    driver.add("some", prompt, params(logprobs=1, logprob_token_ids=(7, 3, 200)))
    driver.add("top", prompt, params(logprobs=2))
    told = driver.step({"all": 20, "some": 20, "top": 20}).logprobs
    [every], [some], [top] = (told[RequestId(name)] for name in ("all", "some", "top"))
    assert some.top == [(token_id, dict(every.top)[token_id]) for token_id in (7, 3, 200)]
    assert (some.token_id, some.logprob, some.rank) == (every.token_id, every.logprob, every.rank)
    assert top.top == every.top[:2]


def test_a_step_says_which_requests_sampled(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver()
    driver.add("long", prompt_of(30, 1))
    driver.add("short", prompt_of(5, 2), params(logprobs=1))
    output = driver.step({"long": 20, "short": 5})
    assert output.request_ids == ["short"]
    (entry,) = output.logprobs[RequestId("short")]
    assert output.sampled_token_ids == [[entry.token_id]]
    assert output.forward_s > 0
    assert driver.step({"short": 1, "long": 10}).request_ids == ["short", "long"]


def test_output_i_is_drawn_with_the_number_of_seed_and_i(
    make_driver: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[int, int]] = []

    def record(seed: NDArray[np.uint64], index: NDArray[np.int64]) -> NDArray[np.float64]:
        drawn.extend(zip(seed.tolist(), index.tolist(), strict=True))
        return uniforms(seed, index)

    monkeypatch.setattr("pdserve.worker.sampler.uniforms", record)
    driver = make_driver()
    driver.add("new", prompt_of(9, 1), params(temperature=1.0, seed=5))
    driver.add("resumed", prompt_of(4, 2), params(temperature=1.0, seed=6), outputs=[1, 2, 3])
    driver.step({"new": 9, "resumed": 7})
    driver.step({"new": 1, "resumed": 1})
    assert drawn == [(5, 0), (6, 3), (5, 1), (6, 4)]


def test_rows_of_gone_requests_are_used_again(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver()
    expected = None
    for life in range(30):
        name = f"life {life}"
        driver.add(name, prompt_of(20, 1), params(temperature=1.0, seed=1))
        outputs = driver.run(name, 3)
        expected = expected or outputs
        assert outputs == expected
        driver.drop(name)


@pytest.mark.parametrize("arch", [{}, WINDOWED, MIXTRAL], ids=["llama", "window", "experts"])
@pytest.mark.parametrize("sampling", [params(), params(temperature=1.0, logprobs=2)])
@pytest.mark.parametrize("left_out", [True, False], ids=["alone", "all"])
def test_a_request_that_becomes_nan_is_named_at_its_chunk_and_leaves_the_others_their_tokens(
    make_driver: Callable[..., Driver],
    monkeypatch: pytest.MonkeyPatch,
    arch: dict[str, Any],
    sampling: SamplingParams,
    left_out: bool,
) -> None:
    least = 1 if left_out else 1000
    monkeypatch.setattr("pdserve.worker.step._WORTH_LEAVING_OUT", least)
    alone = make_driver(arch=arch)
    alone.add("sound", prompt_of(40, 1), sampling)
    wanted = alone.run("sound", 12)

    driver = make_driver(arch=arch)
    poisonous = next(token for token in range(VOCAB) if token not in {*prompt_of(40, 1), *wanted})
    poison(driver, poisonous)
    bad = [token for token in prompt_of(80, 2) if token != poisonous][:60]
    bad[19] = poisonous
    driver.add("sound", prompt_of(40, 1), sampling)
    driver.add("bad", bad, sampling)
    assert driver.step({"sound": 40, "bad": 16}).non_finite_ids == []
    assert driver.step({"sound": 1, "bad": 16}).non_finite_ids == ["bad"]
    # Steps that were on their way go on with it.
    for num_tokens in (28, 1):
        output = driver.step({"sound": 1, "bad": num_tokens})
        assert output.non_finite_ids == ["bad"]
        assert "nan" not in str(output.logprobs.get(RequestId("sound")))
    driver.drop("bad")
    driver.add("next", prompt_of(40, 1), sampling)  # its blocks were the bad one's
    driver.step({"sound": 1, "next": 40})
    assert driver.run("sound", 12) == wanted
    assert driver.run("next", 12) == wanted


def poison(driver: Driver, token_id: int) -> None:
    """A row of the embedding is NaN."""
    runner = driver.worker._runner
    assert runner is not None
    runner._model._embedding._table[token_id] = float("nan")  # type: ignore[attr-defined]


@pytest.mark.parametrize("arch", [{}, {"head_dim": 24}], ids=["heads of 16", "heads of 24"])
def test_blocks_of_any_allowed_size_give_the_same_tokens(
    make_driver: Callable[..., Driver], arch: dict[str, Any]
) -> None:
    found = []
    for block_size in (8, 16, 32, 64, 128):
        cache = CacheConfig(num_gpu_blocks_override=40, block_size=block_size)
        driver = make_driver(arch=arch, cache=cache)
        driver.add("r", prompt_of(150, 1))
        found.append(driver.run("r", 10, chunk=40))
    assert found == [found[0]] * 5


def test_kv_that_is_nan_fails_the_row_that_reads_it(make_driver: Callable[..., Driver]) -> None:
    alone = make_driver()
    alone.add("sound", prompt_of(20, 1))
    wanted = alone.run("sound", 4)
    driver = make_driver()
    driver.add("sound", prompt_of(20, 1))
    driver.add("poisoned", prompt_of(20, 2))
    driver.step({"sound": 20, "poisoned": 20})
    block = driver._blocks["poisoned"][0]
    runner = driver.worker._runner
    assert runner is not None
    runner._kv_layers[1][block].fill_(float("nan"))
    assert driver.step({"sound": 1, "poisoned": 1}).non_finite_ids == ["poisoned"]
    assert driver.run("sound", 4) == wanted


def test_nan_prompt_logprobs_fail_the_request(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver()
    driver.add("r", prompt_of(60, 1), params(prompt_logprobs=0))
    driver.step({"r": 20})
    runner = driver.worker._runner
    assert runner is not None
    runner._kv_layers[0].fill_(float("nan"))
    assert driver.step({"r": 20}).non_finite_ids == ["r"]


class TestIllegalSteps:
    """A step that does not fit what the worker knows is refused before it can write KV."""

    @staticmethod
    def new(**fields: Any) -> NewRequest:
        given: dict[str, Any] = {
            "request_id": RequestId("r"),
            "prompt_token_ids": [1, 2, 3],
            "output_token_ids": [],
            "sampling": GREEDY,
            "block_ids": [BlockId(0)],
            "num_computed_tokens": 0,
        }
        return NewRequest(**{**given, **fields})

    @staticmethod
    def step(num_tokens: int, *new: NewRequest, known: int | None = None) -> SchedulerOutput:
        request_id = RequestId("r")
        return SchedulerOutput(
            step_id=1,
            new_requests=list(new),
            num_computed_tokens=[] if known is None else [known],
            num_scheduled_tokens={request_id: num_tokens},
        )

    def test_an_unknown_request(self, make_driver: Callable[..., Driver]) -> None:
        with pytest.raises(InternalError, match="r is not known"):
            make_driver().worker.execute(self.step(1, known=0))

    def test_a_new_request_that_is_known(self, make_driver: Callable[..., Driver]) -> None:
        worker = make_driver().worker
        worker.execute(self.step(3, self.new()))
        with pytest.raises(InternalError, match="r is new to a worker that knows it"):
            worker.execute(self.step(3, self.new()))

    def test_more_tokens_than_there_are(self, make_driver: Callable[..., Driver]) -> None:
        with pytest.raises(InternalError, match="cannot compute tokens 0 to 4: it has 3 tokens"):
            make_driver().worker.execute(self.step(4, self.new()))

    def test_tokens_without_blocks(self, make_driver: Callable[..., Driver]) -> None:
        with pytest.raises(InternalError, match=r"cannot compute tokens 0 to 17.*blocks for 16"):
            make_driver().worker.execute(self.step(17, self.new(prompt_token_ids=[1] * 17)))

    def test_no_tokens_for_a_scheduled_request(self, make_driver: Callable[..., Driver]) -> None:
        with pytest.raises(InternalError, match="cannot compute tokens 0 to 0"):
            make_driver().worker.execute(self.step(0, self.new()))

    def test_more_requests_than_rows(self, make_driver: Callable[..., Driver]) -> None:
        news = [self.new(request_id=RequestId(f"r{i}")) for i in range(9)]
        with pytest.raises(InternalError, match="all 8 rows are taken"):
            make_driver().worker.execute(self.step(1, *news))
