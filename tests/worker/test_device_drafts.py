"""Drafts on a device that notices what a real one would get wrong: tokens as without, in graphs."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import torch

from pdserve.config.schema import SchedulerConfig
from pdserve.config.speculative import SpeculativeConfig
from pdserve.kernels.registry import kernels_on
from pdserve.worker.device import HostDevice
from pdserve.worker.sampler import Sampler
from tests.worker.draft_models import write_eagle, write_pair
from tests.worker.driver import params
from tests.worker.recorded_device import RecordedDevice
from tests.worker.test_ahead import PLAIN, generate, lasting
from tests.worker.test_device_sampler import OUTPUTS, VOCAB, Bench, random_params
from tests.worker.test_drafting import DRAFTING, Recall, drafts_by, noisy, run
from tests.worker.test_graphs import CPU, Engine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pdserve.wire.ids import RequestId
    from pdserve.wire.sampling import SamplingParams, TokenLogprobs
    from pdserve.worker.drafting.drafter import StepStates

pytestmark = pytest.mark.slow

NUM_ROWS = 8
NUM_DRAFTED = 6
SCHEDULER = SchedulerConfig(max_num_seqs=NUM_ROWS, max_num_batched_tokens=144)


@pytest.mark.parametrize("seed", range(4))
def test_a_device_verifies_as_a_host_that_knows_nothing_of_drafts(seed: int) -> None:
    rng = random.Random(seed)
    asked = [random_params(rng) for _ in range(NUM_ROWS)]
    for row in range(0, NUM_ROWS, 3):
        asked[row] = msgspec.structs.replace(
            asked[row], min_tokens=len(OUTPUTS) + 4, stop_token_ids=tuple(range(0, VOCAB, 2))
        )
    bench = Bench(*asked, num_drafted=NUM_DRAFTED)
    generator = torch.Generator().manual_seed(seed)
    num_outputs = np.full(NUM_ROWS, len(OUTPUTS))
    for _ in range(4):
        lengths = [rng.randint(0, NUM_DRAFTED) for _ in asked]
        logits = torch.randn(sum(lengths) + NUM_ROWS, VOCAB, generator=generator) * 2
        drafts, wanted, told = [], [], []
        first = 0
        for row, length in enumerate(lengths):
            tokens, entries, draft = followed(
                bench.host, logits[first : first + length + 1], row, int(num_outputs[row]), rng
            )
            first += length + 1
            drafts.append(draft)
            wanted.append(tokens)
            told.append(entries)
        verified = bench.verify(logits, num_outputs, drafts)
        assert verified.token_ids == wanted
        assert [verified.logprobs.get(row, []) for row in range(NUM_ROWS)] == told
        num_outputs += [len(tokens) for tokens in wanted]


def followed(
    host: Sampler, logits: torch.Tensor, row: int, num_outputs: int, rng: random.Random
) -> tuple[list[int], list[TokenLogprobs], list[int]]:
    """Sample a request row by row, with a draft that may be wrong somewhere.

    Returns:
        Its tokens, what is told of them, and the draft.
    """
    tokens: list[int] = []
    entries: list[TokenLogprobs] = []
    draft: list[int] = []
    for depth, here in enumerate(logits):
        at = np.array([row]), np.array([num_outputs + depth])
        sampled = host.sample(here[None].clone(), *at)
        tokens += sampled.token_ids.tolist()
        entries += sampled.logprobs.values()
        if depth == len(logits) - 1:
            return tokens, entries, draft
        is_right = rng.random() < 0.8
        draft.append(tokens[-1] if is_right else (tokens[-1] + 1) % VOCAB)
        if not is_right:
            rest = len(logits) - 2 - depth
            return tokens, entries, draft + rng.choices(range(VOCAB), k=rest)
    raise AssertionError


@pytest.mark.parametrize(
    "change", [pytest.param(list, marks=pytest.mark.matrix), noisy], ids=["right", "noisy"]
)
def test_tokens_and_logprobs_of_launched_steps_have_the_bits_of_those_without_drafts(
    tmp_path: Path, change: type[list[int]]
) -> None:
    def engine(speculative: SpeculativeConfig | None = None) -> Engine:
        device = RecordedDevice(has_graphs=False)
        kernels = kernels_on(CPU)
        return Engine(
            tmp_path, device, kernels=kernels, scheduler=SCHEDULER, speculative=speculative
        )

    wanted, described, num_steps = run(engine(), rows=0)
    drafting = engine(DRAFTING)
    drafts_by(drafting, Recall(wanted, change))
    found, entries, fewer = run(drafting, rows=NUM_DRAFTED)
    assert (found, entries) == (wanted, described)
    assert fewer < num_steps / 2


def test_steps_with_drafts_are_replayed_and_give_the_tokens_of_those_without(
    tmp_path: Path,
) -> None:
    host = Engine(tmp_path, HostDevice(CPU), scheduler=SCHEDULER)
    wanted, _, num_steps = run(host, rows=0, num_outputs=12)
    engine = Engine(tmp_path, RecordedDevice(), scheduler=SCHEDULER, speculative=DRAFTING)
    drafts_by(engine, Recall(wanted, noisy))
    tokens, _, fewer = run(engine, rows=NUM_DRAFTED, num_outputs=12)
    assert tokens == wanted
    assert fewer < num_steps / 2
    decode = [size for size in engine.replayed if size.num_tokens == size.num_requests]
    assert max(decode).num_tokens > 8


def test_a_step_with_drafts_takes_one_copy_and_eight_bytes_a_row(tmp_path: Path) -> None:
    engine = Engine(tmp_path, RecordedDevice(), speculative=DRAFTING)
    drafts_by(engine, Recall({"r": [5, 6, 7, 8]}, list))
    engine.add("r", [1, 2, 3])
    engine.step({"r": 3})
    engine.device.copies.clear()  # type: ignore[attr-defined]
    engine.step({"r": 1}, {"r": 2})
    assert engine.device.copies[1:] == [3 * 8]  # type: ignore[attr-defined]


def test_drafts_beside_a_prompt_may_have_more_rows_than_a_graph_picks_out(tmp_path: Path) -> None:
    found = []
    for has_graphs in (True, False):
        device = RecordedDevice(has_graphs=has_graphs)
        engine = Engine(tmp_path, device, speculative=DRAFTING)
        drafts_by(engine, Recall({name: [5, 6, 7, 8] for name in ("a", "b", "prompt")}, list))
        for name in "ab":
            engine.add(name, [1, 2, 3])
        engine.step({"a": 3, "b": 3})
        engine.add("prompt", [1, 2])
        engine.step({"a": 1, "b": 1, "prompt": 2}, {"a": 3, "b": 3})
        assert len(device.replays) == has_graphs
        found.append(engine.outputs)
    assert found[0] == found[1]


def test_a_request_that_has_rows_for_drafts_is_not_computed_ahead(tmp_path: Path) -> None:
    engine = Engine(tmp_path, RecordedDevice(), speculative=DRAFTING)
    engine.add("r", [1, 2, 3])
    engine.step({"r": 3})
    assert engine.runner.may_follow(engine.plan({"r": 1}))
    assert not engine.runner.may_follow(engine.plan({"r": 1}, {"r": 1}))


class Listener(Recall):
    """Drafts nothing, and keeps what it is told."""

    def __init__(self) -> None:
        super().__init__({}, list)
        self.tokens: list[int] = []

    def note(self, row: int, token_ids: Sequence[int]) -> None:
        self.tokens += token_ids

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        return {}


def test_tokens_of_a_step_that_runs_to_its_end_are_noted_behind_those_of_the_step_before(
    tmp_path: Path,
) -> None:
    engine = Engine(tmp_path, RecordedDevice(), speculative=DRAFTING)
    listener = Listener()
    drafts_by(engine, listener)
    engine.add("r", [1, 2, 3])
    engine.add("cut", [4, 5, 6])
    engine.step({"r": 3, "cut": 1})
    ahead = engine.runner.launch(engine.plan({"r": 1}))
    behind = engine.runner.launch(engine.plan({"r": 1, "cut": 1}))  # "cut" samples nothing
    for launched in (ahead, behind):
        engine.take(engine.runner.collect(launched))
    engine.step({"r": 1, "cut": 1}, {"r": 1})
    engine.runner.finish_step()
    assert listener.tokens[:4] == engine.outputs["r"]
    assert len(set(listener.tokens[1:3])) == 2


def test_drafts_that_are_looked_up_follow_steps_that_ran_ahead(tmp_path: Path) -> None:
    asked = [lasting(repeating(PLAIN[0]), 20), *(lasting(each, 45) for each in PLAIN[1:3])]
    wanted, *_ = generate(Engine(tmp_path, HostDevice(CPU)), asked, max_in_flight=1)
    engine = Engine(tmp_path, RecordedDevice(), speculative=DRAFTING)
    found, executor, _ = generate(engine, asked, speculative=DRAFTING)
    assert found == wanted
    assert executor.num_ahead > 5
    assert executor.num_accepted > 5


def repeating(sampling: SamplingParams) -> SamplingParams:
    """Have an answer say the same few tokens over and over."""
    return msgspec.structs.replace(sampling, allowed_token_ids=(7, 8))


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_what_drafts_by_a_model_reads_replayed_steps_as_launched_ones(
    tmp_path: Path, method: str
) -> None:
    target, draft = write_pair(tmp_path, num_layers=2)
    if method == "eagle3":
        draft = tmp_path / method
        write_eagle(draft, method, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    speculative = SpeculativeConfig(method=method, model=str(draft), num_speculative_tokens=3)
    wanted, _ = drafted_by(Engine(target, RecordedDevice(has_graphs=False), num_rows=2), 0)
    found = []
    for has_graphs in (False, True):
        device = RecordedDevice(has_graphs=has_graphs)
        engine = Engine(target, device, num_rows=2, speculative=speculative)
        assert not engine.runner.runs_ahead
        tokens, drafted = drafted_by(engine, 3)
        assert tokens == wanted
        assert any(drafted)
        found.append(drafted)
    assert found[0] == found[1]
    assert {size.num_tokens == size.num_requests for size in engine.replayed} == {True, False}
    assert (len(device.replays) > len(engine.replayed)) == (method == "draft_model")


def test_states_of_replayed_steps_are_the_drafters_to_keep(tmp_path: Path) -> None:
    target, _ = write_pair(tmp_path, num_layers=2)
    write_eagle(tmp_path / "eagle3", "eagle3", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    speculative = SpeculativeConfig(
        method="eagle3", model=str(tmp_path / "eagle3"), num_speculative_tokens=3
    )
    engine = Engine(target, RecordedDevice(), num_rows=2, speculative=speculative)
    shown: list[tuple[torch.Tensor, torch.Tensor]] = []
    drafts = engine.runner._drafts
    assert drafts is not None
    reader = drafts.reader
    assert reader is not None
    observe = reader.observe

    def keep(states: StepStates) -> None:
        shown.extend((each, each.clone()) for each in (states.hidden, *states.aux))
        observe(states)

    reader.observe = keep  # type: ignore[method-assign]
    drafted_by(engine, 3)
    engine.runner.finish_step()
    assert len(shown) == 4 * len(engine.replayed)
    assert {size.num_tokens == size.num_requests for size in engine.replayed} == {True, False}
    assert all(torch.equal(each, at_first) for each, at_first in shown)


def drafted_by(
    engine: Engine, num_rows: int
) -> tuple[dict[str, list[int]], list[dict[RequestId, int]]]:
    """Tokens of two requests, and how many were drafted of each in each step."""
    drafted = []
    for name, sampling in (("a", params()), ("b", params(temperature=1.0, seed=1))):
        engine.add(name, [5, 6, 7, 5, 6], sampling)
    while left := [name for name in "ab" if len(engine.outputs[name]) < 10]:
        num_tokens = {name: engine.remaining(name) for name in left}
        rows = dict.fromkeys((name for name in left if engine.outputs[name]), num_rows)
        answer = engine.step(num_tokens, rows if num_rows else {})
        drafted.append(answer.num_drafted)
    return {name: tokens[:10] for name, tokens in engine.outputs.items()}, drafted
