"""Steps on a device that notices what a real one would get wrong."""

from __future__ import annotations

import json
import random
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch

from pdserve.config.schema import EngineConfig, ModelConfig, SchedulerConfig
from pdserve.config.speculative import SpeculativeConfig
from pdserve.kernels.backend import REFERENCE
from pdserve.kernels.reference.halves import Attention
from pdserve.models.registry import load_model
from pdserve.parallel.group import World
from pdserve.worker import kv_memory
from pdserve.worker.device import CudaDevice, HostDevice
from pdserve.worker.drafting.loading import load_draft, load_medusa, needs_draft
from pdserve.worker.graphs import (
    StepGraphs,
    decode_sizes,
    num_graph_rows,
    prompt_sizes,
    rehearsed_steps,
)
from pdserve.worker.model_runner import ModelRunner
from pdserve.worker.step_buffers import GraphSize, StepBuffers
from tests.worker.capturable import CAPTURABLE
from tests.worker.driver import TINY, Driver, params
from tests.worker.recorded_device import CannotBeCapturedError, RecordedDevice, RecordedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from pdserve.kernels.backend import KernelBackend
    from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput
    from pdserve.worker.device import Device
    from pdserve.worker.grammar import GrammarPool

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
NUM_ROWS = 5
MAX_NUM_TOKENS = 96


ASKED = {
    "r0": params(),
    "r1": params(temperature=0.7, seed=1),
    "r2": params(temperature=1.2, seed=2, top_p=0.8),
    "r3": params(),
    "r4": params(temperature=0.9, seed=4, top_k=20, frequency_penalty=0.5),
    "r5": params(logprobs=2),
    "r6": params(repetition_penalty=1.5),
    "r7": params(temperature=2.0, seed=7, min_p=0.02),
    "r8": params(),
}


class Hooks:
    """A connector's; it has work in the steps whose number is in `busy`."""

    def __init__(self, *busy: int) -> None:
        self._busy = busy
        self.step = 0
        self.calls: list[str] = []

    def of_step(self) -> Hooks | None:
        """Itself, if it has work in the next step."""
        self.step += 1
        return self if self.step in self._busy else None

    def wait_for_layer_load(self, layer: int) -> None:
        self.calls.append(f"{self.step} wait {layer}")

    def save_kv_layer(self, layer: int) -> None:
        self.calls.append(f"{self.step} save {layer}")


class RunnerAlone:
    """What a driver needs of a worker."""

    def __init__(self, runner: ModelRunner, hooks: Hooks) -> None:
        self._runner, self._hooks = runner, hooks

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self._runner.execute(step, self._hooks.of_step())


class Engine(Driver):
    """A driver of a runner on a recorded device; `kv` is its memory, `sizes` its graphs'."""

    def __init__(
        self,
        directory: Path,
        device: Device,
        *,
        kernels: KernelBackend = CAPTURABLE,
        hooks: Hooks | None = None,
        num_rows: int = NUM_ROWS,
        scheduler: SchedulerConfig | None = None,
        speculative: SpeculativeConfig | None = None,
        grammars: GrammarPool | None = None,
        warms_up: bool = True,
    ) -> None:
        scheduler = scheduler or SchedulerConfig(
            max_num_seqs=num_rows, max_num_batched_tokens=MAX_NUM_TOKENS
        )
        if not (directory / "model.safetensors").exists():
            (directory / "config.json").write_text(json.dumps(TINY))
        load_format = "auto" if (directory / "model.safetensors").exists() else "dummy"
        config = EngineConfig(
            model=ModelConfig(model=str(directory), load_format=load_format),
            scheduler=scheduler,
            speculative=speculative or SpeculativeConfig(),
        )
        world = World.alone()
        loaded = load_model(config, CPU, kernels, world, lambda _: None)
        loaded = replace(loaded, medusa=load_medusa(config, loaded, world, CPU, kernels))
        if needs_draft(config, world):
            draft = load_draft(config, loaded, world.tp, CPU, kernels, lambda _: None)
            loaded = replace(loaded, draft=draft)
        layout = kv_memory.layout_of_block(
            loaded.arch,
            loaded.dtype,
            16,
            num_layers=len(loaded.layers),
            num_kv_heads=loaded.num_kv_heads,
        )
        layout = msgspec.structs.replace(layout, num_blocks=80)
        self.kv = kv_memory.allocate(layout, CPU)
        self.device = device
        num_rows, num_tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        if not scheduler.enable_chunked_prefill:
            num_tokens = max(num_tokens, loaded.max_model_len)
        max_drafted = config.speculative.max_drafted
        decode = decode_sizes(min(num_graph_rows(num_rows, max_drafted), num_tokens))
        self.sizes = [*prompt_sizes(num_rows, num_tokens)[::-1], *decode[::-1]]
        self.runner = ModelRunner(
            loaded, self.kv, config, device=device, world=world, grammars=grammars
        )
        self.told: list[str] = []
        if warms_up:
            self.runner.rehearse(self.told.append)
            self.runner.capture(self.told.append)
        worker: Any = RunnerAlone(self.runner, hooks or Hooks())
        super().__init__(worker, SimpleNamespace(layout=layout))  # type: ignore[arg-type]

    @property
    def replayed(self) -> list[GraphSize]:
        """Sizes of the graphs of the model that were replayed, in order."""
        assert isinstance(self.device, RecordedDevice)
        return [self.sizes[index] for index in self.device.replays if index < len(self.sizes)]


def play(engine: Engine) -> dict[str, list[int]]:
    """Requests come and go, in prompts, chunks of them and decode; returns their tokens."""
    rng = random.Random(3)
    arriving = [(f"r{i}", rng.choices(range(211), k=rng.choice((1, 9, 40)))) for i in range(9)]
    running: list[str] = []
    done: dict[str, list[int]] = {}
    while arriving or running:
        while arriving and len(running) < NUM_ROWS and rng.random() < 0.3:
            name, prompt = arriving.pop()
            engine.add(name, prompt, ASKED[name])
            running.append(name)
        chosen = rng.sample(running, rng.randint(min(1, len(running)), len(running)))
        if chosen:
            engine.step({name: min(engine.remaining(name), 17) for name in chosen})
        for name in chosen:
            if len(engine.outputs[name]) == 12:
                done[name] = engine.outputs[name]
                running.remove(name)
                engine.drop(name)
    engine.device.synchronize()
    return done


@pytest.mark.parametrize(
    ("max_num_rows", "rows"),
    [
        (1, [1]),
        (5, [1, 2, 4, 5]),
        (64, [1, 2, 4, 8, 16, 24, 32, 48, 64]),
        (130, [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 130]),
    ],
)
def test_sizes_of_decode_steps_rise_to_the_largest_step(max_num_rows: int, rows: list[int]) -> None:
    assert decode_sizes(max_num_rows) == [(num, num) for num in rows]


@pytest.mark.parametrize(("max_num_seqs", "max_num_tokens"), [(1, 16), (5, 96), (256, 8192)])
def test_steps_with_prompts_have_a_size_with_room_for_their_padding(
    max_num_seqs: int, max_num_tokens: int
) -> None:
    sizes = prompt_sizes(max_num_seqs, max_num_tokens)
    assert len(sizes) < 60
    assert sizes == sorted(sizes)
    device = RecordedDevice()
    graphs = StepGraphs(device, sizes, lambda _: None, lambda size: torch.zeros(size))
    graphs.capture()
    for num_tokens in range(2, min(max_num_tokens, 1024) + 1):
        for num_requests in {1, min(num_tokens - 1, max_num_seqs)}:
            tokens, requests = graphs.size_for(num_tokens, num_requests, 1) or (0, 0)
            assert num_tokens <= tokens < max(17, 2 * num_tokens)
            assert num_requests + (num_tokens < tokens) <= requests <= 8 * num_requests + 8
    assert graphs.size_for(16, 1, max_num_seqs + 2) is None
    assert graphs.size_for(max_num_tokens + 1, 1) is None


@pytest.mark.parametrize(("rows", "tokens", "length"), [(5, 256, 64), (128, 2048, 8192), (1, 7, 7)])
def test_steps_of_every_size_are_rehearsed(rows: int, tokens: int, length: int) -> None:
    steps = rehearsed_steps(rows, tokens, length)
    assert len(set(steps)) == len(steps) < 32
    for num_rows, num_tokens in steps:
        assert num_rows <= rows
        assert num_rows <= num_tokens <= min(tokens, num_rows * length)
    assert steps[0] == (rows, tokens)
    singles = [num_rows for num_rows, num_tokens in steps if num_rows == num_tokens]
    for num_rows in range(1, rows + 1):
        assert any(num_rows <= num < 2 * num_rows for num in singles)
    for num_tokens in range(2, tokens + 1):  # each size has one within its factor of two
        assert any(num <= num_tokens < 2 * num for at, num in steps if at < num)


def test_replayed_steps_give_the_tokens_of_launched_ones(tmp_path: Path) -> None:
    launched = Engine(tmp_path, RecordedDevice(has_graphs=False))
    wanted = play(launched)
    engine = Engine(tmp_path, RecordedDevice())
    assert play(engine) == wanted
    of_prompts = set(engine.replayed) - set(decode_sizes(NUM_ROWS))
    assert len(of_prompts) == len(set(engine.replayed)) - len(decode_sizes(NUM_ROWS))
    assert {size.num_requests for size in of_prompts} == {2, 6}
    assert len({*map(tuple, wanted.values())}) == 9
    torch.testing.assert_close(engine.kv, launched.kv, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_tokens_chosen_on_a_device_are_those_chosen_on_the_host(tmp_path: Path) -> None:
    host = Engine(tmp_path, HostDevice(CPU))
    assert play(Engine(tmp_path, RecordedDevice())) == play(host)


def test_a_step_is_one_copy_to_the_device_and_one_of_tokens_back(tmp_path: Path) -> None:
    engine = Engine(tmp_path, RecordedDevice())
    engine.add("r", [1, 2, 3])
    engine.device.copies.clear()
    engine.run("r", 4)
    (_, *brought), came = engine.device.copies[::2], engine.device.copies[1::2]
    assert brought == [brought[0]] * 3
    assert came == [8] * 4  # a token
    assert len(engine.device.replays) == 4


def test_a_chunk_that_samples_nothing_is_replayed_with_prompts(tmp_path: Path) -> None:
    engine = Engine(tmp_path, RecordedDevice())
    engine.add("r", [7])
    engine.step({"r": 1})
    engine.add("cut", [7, 8])
    engine.step({"cut": 1})
    engine.step({"r": 1, "cut": 1})
    assert engine.replayed == [(1, 1), (16, 2), (2, 2)]


def test_tokens_whose_logits_a_larger_step_wanted_are_not_looked_for(tmp_path: Path) -> None:
    engine = Engine(tmp_path, RecordedDevice())
    for name in "abcd":
        engine.add(name, [5] * 40)
    for pair in ("ab", "cd"):  # both pieces of host memory
        engine.step(dict.fromkeys(pair, 40))
    engine.add("r", [1, 2, 3])
    engine.step({"r": 2})
    assert engine.replayed == [(96, 6), (96, 6), (16, 2)]


@pytest.mark.slow
def test_states_of_prompts_that_are_asked_for_are_those_of_launched_steps(tmp_path: Path) -> None:
    told = []
    for has_graphs in (True, False):
        engine = Engine(tmp_path, RecordedDevice(has_graphs=has_graphs))
        engine.add("described", [1, 2, 3, 4], params(prompt_logprobs=1))
        engine.add("r", [5, 6, 7])
        told.append(engine.step({"described": 4, "r": 3}))
        engine.drop("described")
        engine.add("s", [5, 6])
        engine.step({"s": 2})
        assert engine.replayed == ([(16, 2)] if has_graphs else [])
    assert told[0].prompt_logprobs == told[1].prompt_logprobs != {}


def test_no_graph_has_more_tokens_than_a_step_may_have(tmp_path: Path) -> None:
    engine = Engine(tmp_path, RecordedDevice(), scheduler=SchedulerConfig(max_num_batched_tokens=5))
    assert max(size.num_tokens for size in engine.sizes) == 5
    assert len(engine.device._graphs) == len(engine.sizes)


def test_capturing_computes_nothing(tmp_path: Path) -> None:
    engine = Engine(tmp_path, RecordedDevice())
    assert not engine.kv.any()
    assert engine.told == ["compiling the device's kernels", "capturing steps as graphs"]


def test_a_capture_and_the_run_before_it_tell_kernels_that_steps_are_padded(
    tmp_path: Path,
) -> None:
    told: list[bool] = []

    class Told(Attention):
        def after_norm(self, *args: Any) -> torch.Tensor:
            told.append(args[-1].is_padded)
            return super().after_norm(*args)

    kernels = replace(CAPTURABLE, attention=Told)
    engine = Engine(tmp_path, RecordedDevice(), kernels=kernels, num_rows=1, warms_up=False)
    engine.runner.rehearse(engine.told.append)
    assert not any(told)
    del told[:]
    engine.runner.capture(engine.told.append)
    num_layers = 2
    assert told == [True] * (2 * num_layers * len(engine.sizes))


def test_without_graphs_kernels_are_compiled_and_nothing_is_captured(tmp_path: Path) -> None:
    engine = Engine(tmp_path, RecordedDevice(has_graphs=False))
    assert engine.told == ["compiling the device's kernels"]
    assert not engine.kv.any()


def test_hooks_are_called_in_every_layer_of_the_steps_that_they_have_work_in(
    tmp_path: Path,
) -> None:
    hooks = Hooks(3)
    engine = Engine(tmp_path, RecordedDevice(), hooks=hooks)
    wanted = Engine(tmp_path, RecordedDevice(has_graphs=False))
    for each in (engine, wanted):
        each.add("r", [1, 2, 3])
        each.run("r", 5)
    assert engine.outputs == wanted.outputs
    assert hooks.calls == ["3 wait 0", "3 save 0", "3 wait 1", "3 save 1"]
    assert len(engine.device.replays) == 4


def test_a_model_that_cannot_be_captured_is_launched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(tmp_path, RecordedDevice(), kernels=REFERENCE)
    for what in ("decode steps", "steps with prompts"):
        assert f"{what} run without graphs" in caplog.text
    assert play(engine) == play(Engine(tmp_path, RecordedDevice(has_graphs=False)))
    assert not engine.device.replays


def test_a_closed_runner_has_given_its_graphs_back(tmp_path: Path) -> None:
    engine = Engine(tmp_path, RecordedDevice())
    engine.runner.close()
    assert all(graph.is_closed for graph in engine.device._graphs)


# ---- seeded faults -------------------------------------------------------------------


@pytest.mark.slow
def test_padding_that_is_left_from_an_earlier_step_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = Engine(tmp_path, RecordedDevice())
    wanted = play(sound)
    engine = Engine(tmp_path, RecordedDevice())
    monkeypatch.setattr(StepBuffers, "pad", lambda _, num_requests, *__: num_requests)
    with suppress(IndexError):  # of a token without a request
        assert play(engine) != wanted or not torch.equal(engine.kv, sound.kv)


def test_padding_that_stores_in_block_0_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pad = StepBuffers.pad

    def to_block_0(self: StepBuffers, num_requests: int, num_tokens: int, size: GraphSize) -> int:
        num_tables = pad(self, num_requests, num_tokens, size)
        self.arrays.slot_mapping[num_tokens : size.num_tokens] = 0
        return num_tables

    monkeypatch.setattr(StepBuffers, "pad", to_block_0)
    engine = Engine(tmp_path, RecordedDevice())
    assert engine.kv[0].any()


def buffers_on(device: RecordedDevice) -> StepBuffers:
    return StepBuffers(device, num_rows=4, max_blocks=3, max_num_tokens=8)


@pytest.mark.parametrize(("num_requests", "num_tokens"), [(0, 0), (1, 5), (3, 7), (2, 8)])
def test_padding_reads_no_context_and_stores_nothing(num_requests: int, num_tokens: int) -> None:
    buffers = buffers_on(RecordedDevice())
    for _ in range(2):  # both pieces of host memory
        arrays = buffers.begin()
        for field in (arrays.context_lens, arrays.slot_mapping, arrays.block_tables):
            field[:] = 3
        num_tables = buffers.pad(num_requests, num_tokens, GraphSize(8, 4))
        assert not arrays.context_lens[num_requests:4].any()
        assert (arrays.slot_mapping[num_tokens:8] == -1).all()
        starts = arrays.query_start[num_requests:5].tolist()
        assert starts == [min(num_tokens + i, 8) for i in range(4 - num_requests)] + [8]
        assert num_tables == min(4, num_requests + 8 - num_tokens)
        assert not arrays.block_tables[num_requests * 16 : num_tables * 16].any()


def graphs_of(
    device: RecordedDevice, num_rows: int, run: Callable[[int], Tensor]
) -> StepGraphs[Tensor]:
    sizes = decode_sizes(num_rows)
    return StepGraphs(device, sizes, lambda _: None, lambda size: run(size.num_tokens))


def fill(buffers: StepBuffers, token: int) -> None:
    buffers.begin().token_ids[:] = token
    buffers.upload(4)


def test_staging_memory_is_filled_again_only_behind_its_copy() -> None:
    device = RecordedDevice()
    buffers = buffers_on(device)
    for token in range(6):
        fill(buffers, token)
    assert device.num_pending == 2
    device.synchronize()
    assert buffers.inputs(8, 4, 16).token_ids.tolist() == [5] * 8


def test_staging_memory_that_is_filled_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    device = RecordedDevice()
    monkeypatch.setattr(device, "event", lambda: SimpleNamespace(wait=bool, record=bool))
    buffers = buffers_on(device)
    for token in range(3):
        fill(buffers, token)
    with pytest.raises(RecordedError, match="filled again"):
        device.synchronize()


def test_inputs_that_move_behind_a_capture_are_seen() -> None:
    device = RecordedDevice()
    moving = [buffers_on(device)]
    graphs = graphs_of(device, 1, lambda n: moving[0].inputs(n, n, 16).token_ids * 2)
    graphs.capture()
    moving[0] = buffers_on(device)
    fill(moving[0], 21)
    with pytest.raises(RecordedError, match="given back"):
        graphs.replay(GraphSize(1, 1))


def test_a_copy_that_is_captured_is_seen() -> None:
    device = RecordedDevice()
    buffers = buffers_on(device)

    def run(num_rows: int) -> Tensor:
        fill(buffers, 1)
        return buffers.inputs(num_rows, num_rows, 16).token_ids * 2

    with pytest.raises(RecordedError, match="host"):
        graphs_of(device, 1, run).capture()


@pytest.mark.parametrize(
    "read",
    [
        lambda x: torch.full((2,), x[0].item()),
        lambda x: torch.tensor(x.tolist()),
        lambda x: x[x > 0],
        lambda x: torch.from_numpy(x.numpy() + 1),
        lambda x: x if x.sum() > 0 else -x,
    ],
    ids=["item", "tolist", "mask", "numpy", "branch"],
)
def test_a_step_that_asks_the_device_for_a_value_is_not_captured(
    read: Callable[[Tensor], Tensor],
) -> None:
    device = RecordedDevice()
    values = torch.arange(3.0)
    graphs = graphs_of(device, 1, lambda _: read(values * 2))
    with pytest.raises(CannotBeCapturedError):
        graphs.capture()
    assert graphs.size_for(1, 1) is None


def test_results_of_a_graph_end_with_the_replay_of_another() -> None:
    device = RecordedDevice()
    values = torch.arange(2.0)
    graphs = graphs_of(device, 2, lambda n: values[:n] + 1)
    graphs.capture()
    first = graphs.replay(GraphSize(1, 1))
    assert first.tolist() == [1.0]
    assert graphs.replay(GraphSize(2, 2)).tolist() == [1.0, 2.0]
    assert np.isnan(first.tolist()).all()


def test_what_comes_from_the_device_is_read_behind_its_copy() -> None:
    device = RecordedDevice()
    host, event = device.staging(16).view(torch.int64), device.event()
    device.copy(host, torch.tensor([3, 4]))
    event.record()
    assert host.tolist() != [3, 4]
    event.wait()
    assert host.tolist() == [3, 4]


class Captures:
    """CUDA's graphs as far as torch's pools go: one whose graphs were all given back is gone."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.pools: list[int] = []
        self._num_alive: Counter[int] = Counter()
        self._gone: set[int] = set()
        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name, fake in {
            "Stream": lambda device: stream,
            "current_stream": lambda device: stream,
            "stream": nullcontext,
            "synchronize": lambda device: None,
            "graph_pool_handle": partial(next, count()),
            "CUDAGraph": self._graph,
        }.items():
            patch.setattr(torch.cuda, name, fake)

    def _graph(self) -> SimpleNamespace:
        def begin(pool: int, capture_error_mode: str) -> None:
            assert pool not in self._gone, "torch asserts that a pool has a graph"
            self.pools.append(pool)
            self._num_alive[pool] += 1
            graph.pool = pool

        def reset() -> None:
            self._num_alive[graph.pool] -= 1
            if not self._num_alive[graph.pool]:
                self._gone.add(graph.pool)

        graph = SimpleNamespace(capture_begin=begin, capture_end=lambda: None, reset=reset)
        return graph


def test_graphs_share_memory_while_there_are_some_and_new_ones_behind_them_have_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captures = Captures(monkeypatch)
    device = CudaDevice(torch.device("cuda", 0), has_graphs=True)
    first, second = (device.capture(lambda: None)[0] for _ in range(2))
    first.close()
    third, _ = device.capture(lambda: None)
    assert len({*captures.pools}) == 1
    second.close()
    third.close()
    device.capture(lambda: None)
    assert len({*captures.pools}) == 2
