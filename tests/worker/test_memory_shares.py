"""How the memory of a device is shared out, on one that says what it would take."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import torch

from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pdserve.errors import ConfigError
from pdserve.parallel.mesh import MeshShape
from pdserve.parallel.place import RankPlace
from pdserve.wire.ids import EngineId, Incarnation
from pdserve.worker import worker
from pdserve.worker.device import DeviceMemory
from pdserve.worker.memory_shares import MemoryShares, measure
from pdserve.worker.step_buffers import StepBuffers
from tests.ranks import run_ranks
from tests.worker.capturable import CAPTURABLE
from tests.worker.driver import TINY
from tests.worker.recorded_device import RecordedDevice
from tests.worker.spread import config_of, start_rank

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pdserve.kernels.step import StepInputs
    from pdserve.parallel.group import World

T = TypeVar("T")

BLOCK = 8192
"""Bytes of a block of `TINY`; a request of the greatest length has 16 of them."""
LARGEST = (2, 32)
NUM_GRAPHS = 6
CONTEXT, WEIGHTS, STEP, GRAPH, KERNELS = (size * BLOCK for size in (4, 100, 30, 2, 3))
TOTAL = 330 * BLOCK


class Measured(RecordedDevice):
    """A device that has a context, and then what has been done on it.

    Attributes:
        rehearsed: The steps of that.
        graphs_at_captures: How many there were when each graph was captured.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rehearsed: list[tuple[int, int]] = []
        self.graphs_at_captures: list[int] = []
        self._num_looks = 0
        self._peak = 0

    def memory(self) -> DeviceMemory:
        held = WEIGHTS if self._num_looks else 0
        if self.copies:
            held += 16 * BLOCK + (STEP if LARGEST in self.rehearsed else 0)
        held += GRAPH * self._num_graphs()
        self._num_looks += 1
        self._peak = max(self._peak, held)
        outside = CONTEXT + (KERNELS if self.copies else 0)
        return DeviceMemory(
            total_bytes=TOTAL,
            in_use_bytes=outside + held,
            held_bytes=held,
            peak_bytes=self._peak,
        )

    def release(self) -> None:
        self._peak = 0

    def capture(self, work: Callable[[], T]) -> tuple[Any, T]:
        self.graphs_at_captures.append(self._num_graphs())
        return super().capture(work)

    def _num_graphs(self) -> int:
        return sum(not graph.is_closed for graph in self._graphs)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """The device that workers find."""
    device, rehearse = Measured(), StepBuffers.rehearse

    def noted(self: StepBuffers, num_requests: int, num_tokens: int) -> StepInputs:
        device.rehearsed.append((num_requests, num_tokens))
        return rehearse(self, num_requests, num_tokens)

    monkeypatch.setattr(StepBuffers, "rehearse", noted)
    monkeypatch.setattr(worker, "device_of", lambda *_, **__: device)
    monkeypatch.setattr(worker, "kernels_on", lambda *_: CAPTURABLE)
    return device


def start(directory: Path, told: list[str], **cache: float) -> int:
    """Start a worker; returns its number of blocks."""
    (directory / "config.json").write_text(json.dumps(TINY))
    config = EngineConfig(
        model=ModelConfig(model=str(directory), load_format="dummy"),
        device="cpu",
        cache=CacheConfig(**cache),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(max_num_seqs=LARGEST[0], max_num_batched_tokens=LARGEST[1]),
    )
    begun = worker.Worker(
        config,
        place=RankPlace(),
        incarnation=Incarnation("life"),
        engine_id=EngineId("engine"),
        wake=lambda: None,
        progress=told.append,
    )
    try:
        return begun.start().layout.num_blocks
    finally:
        begun.close(1.0)


def test_kv_gets_what_weights_steps_graphs_and_cuda_leave_of_the_share(
    device: Measured, tmp_path: Path
) -> None:
    told: list[str] = []
    taken = CONTEXT + WEIGHTS + STEP + NUM_GRAPHS * GRAPH + KERNELS
    num_blocks = start(tmp_path, told, gpu_memory_utilization=0.5)
    assert num_blocks == 165 - taken // BLOCK
    assert device.graphs_at_captures == [*range(NUM_GRAPHS)] * 2  # the measured are given back
    assert len([text for text in told if text.startswith("GPU memory: ")]) == 1


def test_the_start_says_on_one_line_what_went_where() -> None:
    assert SHARES.in_words(50 * GIB) == (
        "GPU memory: 72.0 of 80.0 GiB by --gpu-memory-utilization 0.9: weights 15.0, "
        "activations 2.0, graphs 1.0, CUDA 0.5, KV 50.0"
    )


def test_a_share_that_leaves_nothing_for_kv_is_refused(device: Measured, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--gpu-memory-utilization 0.25 leaves .* gives 0: raise"
    ):
        start(tmp_path, [], gpu_memory_utilization=0.25)


def test_a_pool_whose_size_is_given_needs_no_measuring(device: Measured, tmp_path: Path) -> None:
    told: list[str] = []
    assert start(tmp_path, told, kv_cache_memory_bytes=20 * BLOCK) == 20
    assert device.graphs_at_captures == [*range(NUM_GRAPHS)]
    assert not any(text.startswith("GPU memory") for text in told)


GIB = 1 << 30
SHARES = MemoryShares(
    total=80 * GIB,
    utilization=0.9,
    others=0,
    weights=15 * GIB,
    activations=2 * GIB,
    graphs=GIB,
    driver=GIB // 2,
)


@pytest.mark.parametrize(
    ("utilization", "others", "wanted"),
    [
        (0.9, 0, 53.5),
        (0.45, 40 * GIB, 17.5),
        (0.9, 40 * GIB, 21.5),
        (0.2, 0, 0),
        (0.9, 70 * GIB, 0),
    ],
    ids=["alone", "two halves", "no more than is free", "nothing left", "nothing free"],
)
def test_a_share_is_this_process_own_and_no_more_than_others_leave(
    utilization: float, others: int, wanted: float
) -> None:
    shares = replace(SHARES, utilization=utilization, others=others)
    assert shares.for_kv == int(wanted * GIB)


class Step:
    """Runs steps, or finds that there is no room for them."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self.is_closed = False

    def rehearse(self, _: Callable[[str], None]) -> None:
        if self._error is not None:
            raise self._error

    def capture(self, _: Callable[[str], None]) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class Shared(RecordedDevice):
    """A device of which another process has 30 GiB, and this one's context half a one."""

    def memory(self) -> DeviceMemory:
        outside = 61 * GIB // 2
        return DeviceMemory(total_bytes=80 * GIB, in_use_bytes=outside, held_bytes=0, peak_bytes=0)


def shares_on(device: Shared, step: Step) -> MemoryShares:
    before = device.memory()
    return measure(device, before, lambda: step, print, kv_bytes=0, utilization=0.5)


def test_what_others_have_is_not_of_this_share_but_for_a_context() -> None:
    shares = shares_on(Shared(), Step())
    assert (shares.others, shares.driver) == (59 * GIB // 2, GIB)
    assert "; other processes have 29.5" in shares.in_words(0)


def test_a_step_that_does_not_fit_says_what_to_lower() -> None:
    step = Step(torch.OutOfMemoryError("tried to allocate 2 GiB"))
    with pytest.raises(ConfigError, match=r"2 GiB.*lower --max-num-batched-tokens"):
        shares_on(Shared(), step)
    assert step.is_closed


def _num_rehearsed(world: World, config: EngineConfig) -> int:
    """How many steps a rank is given before it is ready, where it computes on a device."""
    device = RecordedDevice(has_graphs=False)
    worker.device_of = lambda *_args, **_named: device
    rank, *_ = start_rank(world, config)
    rank.close(1.0)
    return len(device.copies)


@pytest.mark.matrix
def test_ranks_that_compute_on_devices_rehearse_the_same_steps(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    shape = MeshShape(tp=2, pp=2)
    found = run_ranks(shape, _num_rehearsed, config_of(tmp_path, shape))
    assert len(set(found)) == 1
    assert found[0] > 10
