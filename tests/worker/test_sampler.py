"""Each sampling parameter against a naive reference, alone and in any company."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import InternalError
from pdserve.kernels.backend import REFERENCE
from pdserve.kernels.registry import kernels_on
from pdserve.scheduler.plan import refusal_of
from pdserve.wire.ids import RequestId
from pdserve.wire.request import GenerateRequest
from pdserve.wire.sampling import MAX_LOGPROBS
from pdserve.worker.logprobs import token_logprobs
from pdserve.worker.philox import uniforms
from pdserve.worker.sampler import Sampler
from tests.worker.driver import params

if TYPE_CHECKING:
    from pdserve.kernels.ops import SamplingOps
    from pdserve.wire.sampling import SamplingParams

CPU = torch.device("cpu")
OPS = [
    pytest.param(REFERENCE.sampling, id="reference"),
    pytest.param(kernels_on(CPU).sampling, id="kernels"),
]
VOCAB = 500
PROMPT = [3, 4, 5, 5, 499]
OUTPUTS = [5, 9, 9, 9, 20]


def naive_probabilities(
    logits: list[float], p: SamplingParams, prompt: list[int], outputs: list[int]
) -> list[float]:
    """vLLM's semantics, one token at a time, in fp64. Greedy puts everything on one token."""
    z = list(logits)
    for token, bias in p.logit_bias.items():
        z[token] += bias
    for token in {*prompt, *outputs}:
        z[token] = (
            z[token] / p.repetition_penalty if z[token] > 0 else z[token] * (p.repetition_penalty)
        )
    for token in set(outputs):
        z[token] -= p.frequency_penalty * outputs.count(token) + p.presence_penalty
    banned = set()
    if p.allowed_token_ids is not None:
        banned |= set(range(len(z))) - set(p.allowed_token_ids)
    for *head, last in p.bad_words:
        if outputs[len(outputs) - len(head) :] == head:
            banned.add(last)
    if len(outputs) < p.min_tokens:
        banned |= {*p.eos_token_ids, *p.stop_token_ids}
    for token in banned:
        z[token] = -math.inf
    if p.temperature == 0:
        return [float(i == z.index(max(z))) for i in range(len(z))]
    peak = max(z)
    w = [math.exp((value - peak) / p.temperature) for value in z]
    w = [0.0 if value < p.min_p else value for value in w]
    if 0 < p.top_k < len(w):
        kth = sorted(w, reverse=True)[p.top_k - 1]
        w = [0.0 if value < kth else value for value in w]
    total, running = sum(w), 0.0
    for value in sorted(w, reverse=True):
        running += value
        if running >= p.top_p * total:
            w = [0.0 if other < value else other for other in w]
            break
    total = sum(w)
    return [value / total for value in w]


def draws(
    logits: torch.Tensor, p: SamplingParams, prompt: list[int], outputs: list[int]
) -> list[int]:
    """Sample every row of `logits` as its own request of seed `row`."""
    sampler = Sampler(len(logits), logits.shape[1], CPU)
    for row in range(len(logits)):
        sampler.add(row, with_seed(p, row), prompt, outputs)
    rows = np.arange(len(logits))
    return sampler.sample(logits.clone(), rows, np.full(len(rows), len(outputs))).token_ids.tolist()


def with_seed(p: SamplingParams, seed: int) -> SamplingParams:
    return params(**{name: getattr(p, name) for name in p.__struct_fields__} | {"seed": seed})


CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_k of one": {"temperature": 1.0, "top_k": 1},
    "top_k beyond the vocabulary": {"temperature": 1.0, "top_k": 10_000},
    "top_p": {"temperature": 1.0, "top_p": 0.6},
    "top_p that needs the whole row": {"temperature": 20.0, "top_p": 0.95},
    "tiny top_p": {"temperature": 1.0, "top_p": 1e-6},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "all three": {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"temperature": 1.0, "frequency_penalty": 0.9},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.8},
    "penalties that reward": {"presence_penalty": -2.0, "repetition_penalty": 0.5},
    "bias": {"temperature": 1.0, "logit_bias": {7: 4.0, 9: -100.0}},
    "allowed": {"temperature": 1.0, "allowed_token_ids": (1, 2, 3, 9)},
    "bad word of one token": {"temperature": 0.2, "bad_words": ((5,), (9,))},
    "bad words of several tokens": {"bad_words": ((9, 20, 7), (20, 8), (9, 8), (1,) * 9)},
    "min_tokens not reached": {
        "min_tokens": 6,
        "eos_token_ids": (1, 2),
        "stop_token_ids": (3,),
        "ignore_eos": True,
    },
    "min_tokens reached": {"min_tokens": 5, "eos_token_ids": tuple(range(100))},
    "everything": {
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.3,
        "logit_bias": {0: 2.0},
        "bad_words": ((20, 0),),
        "min_tokens": 9,
        "eos_token_ids": (0, 11),
    },
}


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_tokens_are_those_of_the_naive_reference(fields: dict[str, Any]) -> None:
    p = params(**fields)
    logits = torch.randn(15, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    tokens = draws(logits, p, PROMPT, OUTPUTS)
    for row, token in enumerate(tokens):
        chances = naive_probabilities(logits[row].tolist(), p, PROMPT, OUTPUTS)
        uniform = uniforms(np.array([row], dtype=np.uint64), np.array([len(OUTPUTS)]))[0]
        running = itertools.accumulate(chances)
        assert token == next(i for i, passed in enumerate(running) if passed > uniform)
        assert chances[token] > 0


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_a_rows_token_does_not_depend_on_its_company(fields: dict[str, Any]) -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    companions = [params(), params(temperature=1.5, top_p=0.9), params(logprobs=3)]
    sampler = Sampler(8, VOCAB, CPU)
    for row in range(3):
        sampler.add(row, with_seed(params(**fields), row), PROMPT, OUTPUTS)
    alone = [
        sampler.sample(logits[i : i + 1].clone(), np.array([i]), np.array([5])).token_ids[0]
        for i in range(3)
    ]
    for row in range(3):
        sampler.remove(row)
        sampler.add(row, with_seed(params(**fields), row), PROMPT, OUTPUTS)
        sampler.add(row + 3, companions[row], PROMPT, OUTPUTS)
    order = np.array([4, 2, 5, 0, 3, 1])
    together = sampler.sample(logits[order], order, np.full(6, 5)).token_ids
    assert [together[list(order).index(i)] for i in range(3)] == alone


def test_frequencies_are_those_of_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, -1.0]])
    rows = np.arange(50)
    sampler = Sampler(len(rows), 5, CPU)
    for row in rows:
        sampler.add(row, params(temperature=1.5, seed=11), [0], [])
    num = 2000
    counts = np.zeros(5)
    for start in range(0, num, len(rows)):
        drawn = sampler.sample(logits.repeat(len(rows), 1), rows, start + rows)
        counts += np.bincount(drawn.token_ids, minlength=5)
    expected = num * (logits[0] / 1.5).softmax(-1).numpy()
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # 4 degrees of freedom, p = 0.001


def test_the_seed_and_the_index_decide_and_nothing_else() -> None:
    logits = torch.zeros(1, VOCAB)

    def tokens(seed: int) -> list[int]:
        sampler = Sampler(3, VOCAB, CPU)
        sampler.add(2, params(temperature=1.0, seed=seed), [1], [])
        return [
            int(sampler.sample(logits.clone(), np.array([2]), np.array([i])).token_ids[0])
            for i in (0, 1, 2, 1, 0)
        ]

    first = tokens(5)
    assert first == tokens(5)
    assert first != tokens(6)
    assert first[:2] == first[:2:-1]
    assert len(set(first)) == 3
    assert tokens(-1) == tokens(2**64 - 1)


def test_a_token_without_weight_is_never_drawn_at_the_ends_of_the_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.full((2, 130), -math.inf)
    logits[:, 64:67] = 0.0
    ends = np.array([0.0, 1 - 2.0**-53])
    monkeypatch.setattr("pdserve.worker.sampler.uniforms", lambda *_: ends)
    assert draws(logits, params(temperature=1.0), [1], []) == [64, 66]


def test_a_sum_rounded_up_in_fp32_does_not_lead_beyond_its_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 1 + 0.6 ulp: more when summed in fp32 than it is.
    logits = torch.full((1, 130), -math.inf)
    logits[0, 0], logits[0, 1] = 0.0, math.log(0.6 * 2.0**-23)
    end = np.array([1 - 2.0**-53])
    monkeypatch.setattr("pdserve.worker.sampler.uniforms", lambda *_: end)
    assert draws(logits, params(temperature=1.0), [1], []) == [1]


@pytest.mark.parametrize("size", [VOCAB, 40])
def test_a_guess_is_the_token_that_would_be_sampled_but_for_rules(size: int) -> None:
    asked = [
        params(),
        params(temperature=0.8, seed=1),
        params(temperature=1.0, top_k=50, top_p=0.7, min_p=0.02, seed=2),
        params(temperature=1.0, seed=3, frequency_penalty=1.0, logit_bias={7: 100.0}),
    ]
    guessing, sampling = Sampler(len(asked), VOCAB, CPU), Sampler(len(asked), size, CPU)
    for row, each in enumerate(asked):
        guessing.add(row, each, PROMPT, OUTPUTS)
        free = with_seed(params(temperature=1.0), 3) if each.logit_bias else each
        sampling.add(row, free, [3], [5])
    rows = np.repeat(np.arange(len(asked)), 20)
    index = np.tile(np.arange(20), len(asked))
    logits = torch.randn(len(rows), size, generator=torch.Generator().manual_seed(0)) * 3
    likeliest, drawn = guessing.guess(logits.clone(), rows, index, draws=True)
    assert likeliest.tolist() == logits.argmax(-1).tolist()
    for each in guessing.guess(logits.clone(), rows, index, draws=False):
        assert each.tolist() == likeliest.tolist()
    assert drawn.tolist() == sampling.sample(logits, rows, index).token_ids.tolist()
    assert len({*drawn[20:40].tolist()}) > 5


def test_a_removed_requests_rules_do_not_outlive_it() -> None:
    logits = torch.arange(10.0)[None]
    sampler = Sampler(1, 10, CPU)
    rules = params(temperature=1.0, top_k=2, bad_words=((9,),), logprobs=1, min_p=0.3)
    sampler.add(0, rules, [1], [])
    sampler.sample(logits.clone(), np.array([0]), np.array([0]))
    sampler.remove(0)
    sampler.add(0, params(), [1], [])
    sampled = sampler.sample(logits.clone(), np.array([0]), np.array([0]))
    assert (sampled.token_ids.tolist(), sampled.logprobs) == ([9], {})


def test_penalties_see_the_tokens_sampled_since() -> None:
    logits = torch.tensor([[5.0, 4.9, 4.8, 0.0]])
    sampler = Sampler(1, 4, CPU)
    sampler.add(0, params(presence_penalty=1.0), [0], [])
    tokens = [
        int(sampler.sample(logits.clone(), np.array([0]), np.array([i])).token_ids[0])
        for i in range(4)
    ]
    assert tokens == [0, 1, 2, 0]


def test_soft_masks_give_way_where_they_would_leave_nothing() -> None:
    p = params(allowed_token_ids=(3, 7), min_tokens=5, eos_token_ids=(3,), bad_words=((7,),))
    logits = torch.arange(10.0)[None]
    assert draws(logits, p, [1], []) == [7]


@pytest.mark.parametrize("allowed", [(), (VOCAB, VOCAB + 1)])
def test_a_request_that_allows_no_token_is_refused(allowed: tuple[int, ...]) -> None:
    with pytest.raises(InternalError, match="the server should have refused it"):
        Sampler(1, VOCAB, CPU).add(0, params(allowed_token_ids=allowed), [1], [])


def test_ids_outside_the_vocabulary_forbid_and_favour_nothing() -> None:
    p = params(
        allowed_token_ids=(3, 99),
        bad_words=((50,),),
        logit_bias={70: 5.0},
        min_tokens=3,
        eos_token_ids=(60,),
    )
    assert draws(torch.arange(10.0)[None], p, [1], []) == [3]


FLOATS = st.sampled_from([math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e30, 0.0, 1e-40])
IDS = st.integers(-1, VOCAB)
SAMPLING = st.builds(
    params,
    seed=st.integers(0, 1 << 62),
    temperature=st.sampled_from([0.0, 1e-9, 1e-5, 1.0, 1e6]),
    top_p=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.sampled_from([0, 1, VOCAB, 1 << 40]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    presence_penalty=st.sampled_from([-1e6, 0.0, 1e6]),
    frequency_penalty=st.sampled_from([-1e6, 0.0, 1e6]),
    repetition_penalty=st.sampled_from([1e-6, 1.0, 1e6]),
    logit_bias=st.dictionaries(IDS, st.sampled_from([-1e6, 1e6]), max_size=3),
    allowed_token_ids=st.none() | st.lists(IDS, max_size=3).map(lambda ids: (7, *ids)),
    bad_words=st.lists(st.lists(IDS, max_size=2).map(tuple), max_size=3).map(tuple),
    min_tokens=st.sampled_from([0, 50]),
    eos_token_ids=st.sampled_from([(), (7,)]),
    logprobs=st.sampled_from([None, 0, MAX_LOGPROBS]),
)


@given(
    bad=st.lists(st.tuples(st.integers(0, VOCAB - 1), FLOATS), min_size=1, max_size=4),
    fill=st.just(0.0) | FLOATS,
    sampling=SAMPLING,
)
def test_no_row_of_any_request_ends_the_step_or_changes_another_row(
    bad: list[tuple[int, float]], fill: float, sampling: SamplingParams
) -> None:
    request = GenerateRequest(
        request_id=RequestId("r"), prompt_token_ids=PROMPT, sampling=sampling, arrival_s=0.0
    )
    assert refusal_of(request, vocab_size=VOCAB, max_model_len=1000) is None
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    sampler = Sampler(3, VOCAB, CPU)
    for row, mine in enumerate((params(temperature=1.0, seed=5), sampling, params(logprobs=1))):
        sampler.add(row, mine, PROMPT, OUTPUTS)
    rows, num_outputs = np.arange(3), np.full(3, len(OUTPUTS))
    wanted = sampler.sample(logits.clone(), rows, num_outputs)
    logits[1] += fill
    for token, value in bad:
        logits[1, token] = value
    found = sampler.sample(logits, rows, num_outputs)
    assert set(found.non_finite) <= {1}
    assert 0 <= found.token_ids[1] < VOCAB
    assert [found.token_ids[0], found.token_ids[2]] == [wanted.token_ids[0], wanted.token_ids[2]]
    assert found.logprobs[2] == wanted.logprobs[2]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("fields", [{}, {"logit_bias": {3: 1.0}, "logprobs": 1}])
def test_rows_whose_logits_are_not_finite_are_named(
    value: float, temperature: float, fields: dict[str, Any]
) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, 77] = value
    sampler = Sampler(3, VOCAB, CPU)
    for row in range(3):
        sampler.add(row, params(temperature=temperature, **fields), PROMPT, OUTPUTS)
    assert sampler.sample(logits, np.arange(3), np.full(3, 5)).non_finite == [1]


@pytest.mark.parametrize("fields", [{}, {"temperature": 2.0, "logit_bias": {1: 50.0}}])
def test_logprobs_come_from_unmodified_logits(fields: dict[str, Any]) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(3))
    reference = logits.double().log_softmax(-1)
    sampler = Sampler(2, VOCAB, CPU)
    sampler.add(0, params(logprobs=0, **fields), [1], [])
    sampler.add(1, params(logprobs=4, **fields), [1], [])
    sampled = sampler.sample(logits, np.array([0, 1]), np.array([0, 0]))
    for row, (token, num_top) in enumerate(zip(sampled.token_ids, (0, 4), strict=True)):
        entry = sampled.logprobs[row]
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(reference[row, token].item(), abs=1e-5)
        assert entry.rank == 1 + (reference[row] > reference[row, token]).sum().item()
        best = reference[row].topk(num_top)
        assert [t for t, _ in entry.top] == best.indices.tolist()
        assert [v for _, v in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("ops", OPS)
def test_logprobs_are_to_the_bit_those_of_any_order_of_the_vocabulary(ops: SamplingOps) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(8, 5003, generator=generator) * 4
    tokens = torch.arange(8)
    told = token_logprobs(ops, logits, tokens, [3] * 8)
    exact = logits.double().log_softmax(-1)[tokens, tokens]
    assert [each.logprob for each in told] == pytest.approx(exact.tolist(), abs=2e-8)
    for _ in range(20):
        order = torch.randperm(logits.shape[1], generator=generator)
        moved = token_logprobs(ops, logits[:, order], order.argsort()[tokens], [3] * 8)
        assert [each.logprob for each in moved] == [each.logprob for each in told]
        for one, other in zip(moved, told, strict=True):
            assert [(int(order[token]), value) for token, value in one.top] == other.top
    logits[3, 17], logits[4, 17], logits[5] = math.nan, math.inf, -math.inf
    lost = token_logprobs(ops, logits, tokens, [2] * 8)
    assert [math.isnan(each.logprob) for each in lost] == [i in (3, 4, 5) for i in range(8)]


@pytest.mark.parametrize("ops", OPS)
def test_of_equally_likely_tokens_the_first_ones_are_reported_whatever_else_is_in_the_batch(
    ops: SamplingOps,
) -> None:
    logits = (torch.randn(3, 50_000, generator=torch.Generator().manual_seed(0)) * 2).round()
    tokens = torch.zeros(3, dtype=torch.int64)
    best = sorted(range(50_000), key=lambda token: -float(logits[0, token]))[:5]
    for rows, widest in ((1, 5), (3, 5), (3, 20)):
        told = token_logprobs(ops, logits[:rows], tokens[:rows], [5, widest, 0][:rows])
        assert [token for token, _ in told[0].top] == best
