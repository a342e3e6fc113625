"""What the ranks of an engine agree on: memory, layout, errors, waves."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from pdserve.config.schema import CacheConfig, EngineConfig
from pdserve.errors import ConfigError, InternalError
from pdserve.parallel.group import World
from pdserve.parallel.mesh import Axis, Mesh, MeshShape
from pdserve.parallel.place import RankPlace
from pdserve.wire.step import ExpertBalance, SchedulerOutput, WaveStep
from pdserve.worker import kv_memory, worker
from pdserve.worker.expert_steps import ExpertSteps
from tests.ranks import run_ranks
from tests.worker.driver import TINY, Driver, params
from tests.worker.spread import config_of, start_rank

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pdserve.worker.info import WorkerInfo
    from pdserve.worker.worker import Worker

pytestmark = pytest.mark.slow

TP2_PP2 = MeshShape(tp=2, pp=2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of three layers."""
    found = tmp_path_factory.mktemp("model")
    (found / "config.json").write_text(json.dumps({**TINY, "num_hidden_layers": 3}))
    return found


# ---- layout --------------------------------------------------------------------------


def _info(world: World, config: EngineConfig) -> tuple[WorkerInfo, tuple[int, ...]]:
    rank, info, _ = start_rank(world, config)
    assert rank._runner is not None
    shape = tuple(rank._runner._kv_layers[0].shape)
    rank.close(1.0)
    return info, shape


def infos(shape: MeshShape, config: EngineConfig) -> list[WorkerInfo]:
    return [info for info, _ in run_ranks(shape, _info, config)]


def test_each_rank_has_its_layers_and_heads_of_equally_many_blocks(directory: Path) -> None:
    config = config_of(directory, TP2_PP2, pipeline_layers=(1, 2))
    found = run_ranks(TP2_PP2, _info, config)
    layouts = [info.layout for info, _ in found]
    assert [layout.num_layers for layout in layouts] == [1, 1, 2, 2]
    assert [layout.num_kv_heads for layout in layouts] == [1] * 4
    assert [layout.num_blocks for layout in layouts] == [64] * 4
    assert [shape for _, shape in found] == [(64, 2, 1, 16, 16)] * 4
    assert [info.rank for info, _ in found] == [0, 1, 2, 3]


def test_all_ranks_have_the_layout_digest_of_the_whole_engine(directory: Path) -> None:
    found = infos(TP2_PP2, config_of(directory, TP2_PP2, pipeline_layers=(1, 2)))
    assert len({info.layout_digest for info in found}) == 1
    assert all(info.layout_fields == found[0].layout_fields for info in found)
    fields = found[0].layout_fields
    assert (fields["num_layers"], fields["num_kv_heads"], fields["num_planes"]) == ("3", "2", "2")
    assert all(info.shape == found[0].shape for info in found)
    assert (found[0].shape.tp_size, found[0].shape.stages) == (2, ((0, 1), (1, 3)))
    assert (found[0].shape.num_layers, found[0].shape.num_kv_heads) == (3, 2)


def test_engines_that_share_their_kv_out_otherwise_have_the_same_digest(directory: Path) -> None:
    pp2 = MeshShape(pp=2)
    found = [
        infos(shape, config)[0]
        for shape, config in (
            (MeshShape(tp=2), config_of(directory, MeshShape(tp=2))),
            (pp2, config_of(directory, pp2, pipeline_layers=(1, 2))),
            (pp2, config_of(directory, pp2, pipeline_layers=(2, 1))),
        )
    ]
    assert len({info.layout_digest for info in found}) == 1
    assert [(info.shape.tp_size, info.shape.stages) for info in found] == [
        (2, ((0, 3),)),
        (1, ((0, 1), (1, 3))),
        (1, ((0, 2), (2, 3))),
    ]
    assert [info.numerics and info.numerics.tp_size for info in found] == [2, 1, 1]


def test_engines_whose_experts_lie_elsewhere_do_not_say_that_they_round_alike(
    tmp_path: Path,
) -> None:
    arch = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2}
    arch |= {"moe_intermediate_size": 32, "mlp_only_layers": [0]}  # the first stage has no experts
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **arch}))
    sliced = config_of(tmp_path, TP2_PP2)

    def whole(**fields: Any) -> EngineConfig:
        parallel = msgspec.structs.replace(sliced.parallel, enable_expert_parallel=True, **fields)
        return msgspec.structs.replace(sliced, parallel=parallel)

    balanced = whole(enable_eplb=True)
    configs = [sliced, whole(), whole(all2all_backend="all_to_all"), balanced]
    configs.append(msgspec.structs.replace(balanced, engine_id="another, with a load of its own"))
    found = [{str(info.numerics) for info in infos(TP2_PP2, config)} for config in configs]
    assert [len(said) for said in found] == [1] * 5, "all ranks say the same"
    assert len(set.union(*found)) == 5


# ---- memory --------------------------------------------------------------------------


def _blocks_with(world: World, config: EngineConfig, offers: list[int]) -> int | str:
    """How many blocks a rank has where each is offered so many bytes, or why it has none."""
    num_bytes = offers[world.mesh.rank]
    kv_memory.host_offer = lambda **_named: kv_memory.Offer(num_bytes, num_bytes)
    try:
        return start_rank(world, config)[1].layout.num_blocks
    except ConfigError as error:
        return error.message


BLOCK_BYTES = 4 * 2 * 16 * 16  # of one layer and one head


@pytest.mark.parametrize("scarce", range(4))
def test_the_scarcest_rank_says_how_many_blocks_all_have(directory: Path, scarce: int) -> None:
    config = config_of(directory, TP2_PP2, cache=CacheConfig(), pipeline_layers=(1, 2))
    offers = [200 * BLOCK_BYTES] * 4
    offers[scarce] = 40 * BLOCK_BYTES
    num_layers = 1 if scarce < 2 else 2
    assert run_ranks(TP2_PP2, _blocks_with, config, offers) == [40 // num_layers] * 4


@pytest.mark.parametrize("scarce", [0, 3])
def test_too_little_memory_on_one_rank_is_the_same_error_on_all(
    directory: Path, scarce: int
) -> None:
    config = config_of(directory, TP2_PP2, cache=CacheConfig(), pipeline_layers=(1, 2))
    offers = [200 * BLOCK_BYTES] * 4
    offers[scarce] = 10 * BLOCK_BYTES
    said = run_ranks(TP2_PP2, _blocks_with, config, offers)
    assert len(set(said)) == 1
    assert f"gives {10 if scarce < 2 else 5}: set --max-model-len" in said[0]


def test_ranks_of_one_machine_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "_free_host_bytes", lambda: 800)
    assert kv_memory.host_offer(num_local=1).limit_bytes == 400
    assert kv_memory.host_offer(num_local=4).limit_bytes == 100


# ---- devices and threads -------------------------------------------------------------


def place_of(local_index: int, num_local: int) -> RankPlace:
    return RankPlace(
        mesh=Mesh(MeshShape(tp=num_local), local_index),
        local_index=local_index,
        num_local=num_local,
    )


class Cuda:
    """Devices that this machine may not have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_devices: int) -> None:
        self.chosen: list[torch.device] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: num_devices > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
        monkeypatch.setattr(torch.cuda, "set_device", self.chosen.append)


def test_each_rank_of_a_machine_takes_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, 4)
    devices = [worker._device("auto", place_of(index, 4)) for index in range(4)]
    assert [str(device) for device in devices] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert cuda.chosen == devices


def test_fewer_devices_than_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(monkeypatch, 2)
    with pytest.raises(ConfigError, match=r"4 ranks on this machine need .* only 2 are visible"):
        worker._device("cuda", place_of(0, 4))


def test_ranks_without_a_device_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    from pdserve.config.schema import ParallelConfig

    set_to: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(6)))
    for num_local in (1, 2, 4, 12):
        worker._set_threads(ParallelConfig(), place_of(0, num_local))
    worker._set_threads(ParallelConfig(num_threads=5), place_of(0, 2))
    assert set_to == [6, 3, 1, 1, 5]


# ---- errors --------------------------------------------------------------------------


def _lost(world: World, config: EngineConfig) -> list[tuple[list[str], list[int]]]:
    """Whom a rank names where the last one's logits are bad, for several kinds of requests."""
    rank, info, _ = start_rank(world, config)
    driver = Driver(rank, info)
    runner = rank._runner
    assert runner is not None
    assert rank._world is not None
    model, is_bad = runner._model, rank._world.tp.is_last
    compute = model.logits

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        logits[-1, 0] = float("nan")
        return logits

    found = []
    driver.add("alone", [4] * 9)
    alone = driver.step({"alone": 9}).sampled_token_ids
    if is_bad:
        model.logits = poisoned  # type: ignore[method-assign]
    for name, sampling, num_tokens in (
        ("greedy", params(), 9),
        ("random", params(temperature=1.0), 9),
        ("prompt", params(prompt_logprobs=1), 5),
    ):
        driver.add("sound", [4] * 9)
        driver.add(name, [5] * 9, sampling)
        output = driver.step({"sound": 9, name: num_tokens})
        if name != "prompt":  # which samples nothing: the bad row was the sound one's
            assert output.sampled_token_ids[:1] == alone
        found.append((list(map(str, output.non_finite_ids)), output.sampled_token_ids[:1]))
        driver.drop("sound")
        driver.drop(name)
    rank.close(1.0)
    return found


def test_logits_that_are_not_finite_on_one_rank_fail_their_row_alone(directory: Path) -> None:
    shape = MeshShape(tp=2)
    first, _ = run_ranks(shape, _lost, config_of(directory, shape))
    assert [names for names, _ in first] == [["greedy"], ["random"], ["prompt", "sound"]]


def _beside_nan(world: World, config: EngineConfig) -> tuple[list[list[str]], list[int]]:
    """Whom the output rank names beside sound requests, and the sound ones' tokens."""
    rank, info, _ = start_rank(world, config)
    driver = Driver(rank, info)
    assert rank._runner is not None
    table = rank._runner._model._embedding._table  # type: ignore[attr-defined]
    if table is not None:
        table[-1] = float("nan")
    last = TINY["vocab_size"] - 1
    driver.add("bad", [5] * 10 + [last] + [6] * 19)
    named, tokens = [], []
    for num_bad in (10, 10, 10):
        sound = f"sound {len(named)}"
        driver.add(sound, [4, 9] * 10)
        output = driver.step({sound: 20, "bad": num_bad})
        named.append(list(map(str, output.non_finite_ids)))
        tokens += [token for each in output.sampled_token_ids[:1] for token in each]
    rank.close(1.0)
    return named, tokens


@pytest.mark.parametrize(
    "shape",
    [
        MeshShape(tp=2),
        pytest.param(MeshShape(pp=2), marks=pytest.mark.matrix),
        pytest.param(TP2_PP2, marks=pytest.mark.matrix),
    ],
    ids=["tp 2", "pp 2", "tp 2, pp 2"],
)
def test_ranks_name_a_request_that_becomes_nan_and_go_on_with_the_others(
    directory: Path, shape: MeshShape
) -> None:
    ((named, wanted),) = run_ranks(MeshShape(), _beside_nan, config_of(directory, MeshShape()))
    assert named == [[], ["bad"], ["bad"]]
    assert len(set(wanted)) == 1
    found = run_ranks(shape, _beside_nan, config_of(directory, shape))
    outputs = shape.world_size - shape.tp  # the first rank of the last stage answers
    assert found[outputs] == (named, wanted)


def _illegal(world: World, config: EngineConfig) -> str:
    rank, info, _ = start_rank(world, config)
    driver = Driver(rank, info)
    driver.add("r", [1, 2, 3])
    try:
        driver.step({"r": 4})
    except InternalError as error:
        return str(error)
    return ""


def test_an_illegal_step_is_refused_by_every_rank_before_it_waits_for_another(
    directory: Path,
) -> None:
    said = run_ranks(TP2_PP2, _illegal, config_of(directory, TP2_PP2))
    assert len(set(said)) == 1
    assert "cannot compute tokens 0 to 4" in said[0]


# ---- waves ---------------------------------------------------------------------------


class RecordingExperts:
    """Writes down when it is called; what it says of its balance changes at the end of steps."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.balance = ExpertBalance()
        self.changes: list[int] = []

    def begin_step(self, num_tokens: Sequence[int]) -> None:
        self.calls.append(f"begin {list(num_tokens)}")

    def end_step(self) -> None:
        self.calls.append("end")
        if self.changes:
            self.balance = ExpertBalance(num_moved=self.changes.pop(0))


def share_experts(rank: Worker, experts: RecordingExperts) -> None:
    """Have a rank share these, whatever its model has."""
    assert rank._runner is not None
    assert rank._world is not None
    rank._runner._experts = ExpertSteps(experts, rank._world.dp)  # type: ignore[arg-type]


def in_wave(step: SchedulerOutput, *, is_unfinished: bool) -> SchedulerOutput:
    return msgspec.structs.replace(step, wave=WaveStep(1, is_unfinished))


def _wave(world: World, config: EngineConfig) -> tuple[list[str], list[bool], list[int]]:
    """Engine 0 has a request, engine 1 none; who is unfinished changes from step to step."""
    rank, info, _ = start_rank(world, config)
    runner = rank._runner
    assert runner is not None
    assert rank._world is not None
    experts = RecordingExperts()
    share_experts(rank, experts)
    forward, idle = runner._model.forward, runner._model.idle_forward

    def spy(*args: Any) -> torch.Tensor:
        experts.calls.append("forward")
        return forward(*args)

    def spy_idle() -> None:
        experts.calls.append("idle")
        idle()

    runner._model.forward = spy  # type: ignore[method-assign]
    runner._model.idle_forward = spy_idle  # type: ignore[method-assign]
    engine = rank._world.mesh.index(Axis.DP)
    execute, over, sampled = rank.execute, [], []
    for unfinished in ([True, False], [False, True], [False, False]):

        def run(step: SchedulerOutput, is_unfinished: bool = unfinished[engine]) -> Any:
            return execute(in_wave(step, is_unfinished=is_unfinished))

        rank.execute = run  # type: ignore[method-assign]
        driver = Driver(rank, info)
        if engine == 0:
            driver.add(f"r {unfinished}", [1, 2, 3])
            answer = driver.step({f"r {unfinished}": 3})
        else:
            answer = rank.execute(empty_step())
        rank.finish_step()
        over.append(answer.is_wave_over)
        sampled.append(len(answer.sampled_token_ids))
    rank.close(1.0)
    return experts.calls, over, sampled


def empty_step() -> SchedulerOutput:
    return SchedulerOutput(
        step_id=1,
        num_scheduled_tokens={},
    )


def _balance(world: World, config: EngineConfig) -> tuple[list[str], list[int | None]]:
    """A request of four steps, after the first two of which the balance changes."""
    rank, info, _ = start_rank(world, config)
    experts = RecordingExperts()
    experts.changes = [7, 9]
    share_experts(rank, experts)
    driver = Driver(rank, info)
    driver.add("r", [1, 2, 3])
    told: list[int | None] = []
    for num_tokens in (3, 1, 1, 1):
        answer = driver.step({"r": num_tokens})
        experts.calls.append("answer")
        told.append(answer.experts.num_moved if answer.experts is not None else None)
        if num_tokens > 1:  # later it is forgotten
            rank.finish_step()
            rank.finish_step()
    rank.close(1.0)
    return experts.calls, told


def test_experts_move_once_a_step_is_answered_and_the_output_rank_tells_what_changed(
    directory: Path,
) -> None:
    shape = MeshShape(tp=2)
    first, second = run_ranks(shape, _balance, config_of(directory, shape))
    steps = [step for n in (3, 1, 1, 1) for step in (f"begin [{n}]", "answer", "end")]
    assert first[0] == second[0] == steps[:-1], "at the latest before the next step begins"
    assert first[1] == [0, 7, 9, None], "told once"
    assert second[1] == [None] * 4, "only one rank answers"


def test_engines_of_a_wave_step_together_and_learn_when_it_is_over(directory: Path) -> None:
    shape = MeshShape(dp=2)
    busy, idle = run_ranks(shape, _wave, config_of(directory, shape))
    assert busy[0] == ["begin [3, 0]", "forward", "end"] * 3
    assert idle[0] == ["begin [3, 0]", "idle", "end"] * 3
    assert busy[1] == idle[1] == [False, False, True]
    assert (busy[2], idle[2]) == ([1, 1, 1], [0, 0, 0])


def test_ranks_of_an_engine_without_tokens_take_part_and_its_output_rank_tells(
    directory: Path,
) -> None:
    shape = MeshShape(dp=2, tp=2)
    found = run_ranks(shape, _wave, config_of(directory, shape))
    assert [over for _, over, _ in found] == [[False, False, True], [False] * 3] * 2
    assert [calls[1] for calls, _, _ in found] == ["forward", "forward", "idle", "idle"]


def _outside(world: World, config: EngineConfig) -> str:
    rank, info, _ = start_rank(world, config)
    share_experts(rank, RecordingExperts())
    driver = Driver(rank, info)
    driver.add("r", [1, 2, 3])
    with pytest.raises(InternalError) as raised:
        driver.step({"r": 3})
    return str(raised.value)


def test_experts_of_several_engines_run_in_waves_only(directory: Path) -> None:
    shape = MeshShape(dp=2)
    said = run_ranks(shape, _outside, config_of(directory, shape))
    assert "is in no wave: its experts are shared by 2 engines" in said[0]


def test_experts_of_one_engine_are_told_its_tokens(directory: Path) -> None:
    rank, info, _ = start_rank(World.alone(), config_of(directory, MeshShape()))
    experts = RecordingExperts()
    share_experts(rank, experts)
    driver = Driver(rank, info)
    driver.add("r", [1, 2, 3])
    driver.step({"r": 3})
    rank.finish_step()
    rank.close(1.0)
    assert experts.calls == ["begin [3]", "end"]
