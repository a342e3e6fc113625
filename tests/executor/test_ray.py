"""The Ray executor over a real cluster of two nodes on this machine."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import TYPE_CHECKING

import psutil
import pytest
import ray

from pdserve.config.schema import EngineConfig, ModelConfig, ParallelConfig
from pdserve.errors import ConfigError
from pdserve.executor.base import RankDiedError
from pdserve.executor.ray import RankActor, RayExecutor
from pdserve.parallel.place import CorePlace
from pdserve.wire.ids import EngineId, Incarnation
from pdserve.wire.step import SchedulerOutput
from tests.executor.driving import collect
from tests.executor.scripted_worker import PATH
from tests.ray_cluster import ray_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(240)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with ray_cluster(num_nodes=2, cpus_per_node=1):
        yield


def executor(tensor_parallel_size: int = 2) -> RayExecutor:
    return RayExecutor(
        EngineConfig(
            model=ModelConfig(model="none"),
            device="cpu",
            parallel=ParallelConfig(
                tensor_parallel_size=tensor_parallel_size, distributed_executor_backend="ray"
            ),
        ),
        core=CorePlace(),
        engine_id=EngineId("e"),
        incarnation=Incarnation("i"),
        progress=lambda text: None,
        worker=PATH,
    )


def step(step_id: int) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=step_id,
        num_scheduled_tokens={},
    )


def still_running(pids: list[int], wait_s: float = 30.0) -> list[int]:
    """Which of `pids` run after a while: Ray ends an actor's process some time after it is told."""
    until_s = time.monotonic() + wait_s
    while (alive := [pid for pid in pids if psutil.pid_exists(pid)]) and time.monotonic() < until_s:
        time.sleep(0.05)
    return alive


def test_ranks_lie_on_two_nodes_and_answer_steps_in_order() -> None:
    ranks = executor()
    try:
        assert len({place.node_id for place in ranks.places}) == 2
        infos = ranks.start()
        assert [info.rank for info in infos] == [0, 1]
        for step_id in range(0, 20, 2):
            ranks.submit(step(step_id))
            ranks.submit(step(step_id + 1))
            assert collect(ranks).step_id == step_id
            assert collect(ranks).step_id == step_id + 1
        pids = [place.pid for place in ranks.places]
    finally:
        ranks.close(1.0)
    assert not still_running(pids)


def test_a_killed_rank_ends_the_engine_with_its_story() -> None:
    ranks = executor()
    try:
        ranks.start()
        psutil.Process(ranks.places[1].pid).kill()
        started_s = time.monotonic()
        with pytest.raises(RankDiedError, match="rank 1"):
            while time.monotonic() < started_s + 60:
                ranks.poll_report()
                time.sleep(0.01)
        assert time.monotonic() - started_s < 60
    finally:
        ranks.close(1.0)
    assert not still_running([place.pid for place in ranks.places])


def test_a_cluster_without_room_says_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.executor.ray._GROW_TIMEOUT_S", 0.5)
    with pytest.raises(ConfigError, match=r"Ray did not find room for 3 CPUs .*it has 2\)"):
        executor(tensor_parallel_size=3)


def test_the_engine_goes_on_as_it_did_about_signals() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        ranks = executor()
        try:
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            ranks.close(1.0)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_address_where_nobody_listens_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    started_s = time.monotonic()
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS.*127.0.0.1:{port}"):
        executor()
    assert time.monotonic() - started_s < 60


def test_a_rank_that_dies_before_it_is_told_what_to_be_ends_the_start_with_its_story() -> None:
    ranks = executor()
    try:
        psutil.Process(ranks.places[1].pid).kill()
        with pytest.raises(RankDiedError, match=r"^rank 1 \(pid \d+ on [\d.]+ died: The actor"):
            ranks.start()
    finally:
        ranks.close(1.0)


def test_threads_of_torch_in_a_rank_spin_for_a_short_time_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {})
    RankActor()
    assert os.environ == {"GOMP_SPINCOUNT": "4000"}


def test_a_connection_to_ray_that_was_there_before_stays() -> None:
    ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False)
    try:
        executor().close(1.0)
        assert ray.is_initialized()
    finally:
        ray.shutdown()
