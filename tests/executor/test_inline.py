"""The worker in the engine core's own process."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

import pytest

from pdserve.config.schema import EngineConfig, ModelConfig
from pdserve.errors import InternalError
from pdserve.executor import inline
from pdserve.parallel.rendezvous import Rendezvous
from pdserve.parallel.seat import CoreSeat
from pdserve.wire.ids import EngineId, Incarnation, RequestId
from pdserve.wire.step import KnownRequests, SchedulerOutput
from tests.executor.scripted_worker import ScriptedWorker

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.executor.inline import InlineExecutor


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[CoreSeat], InlineExecutor]:
    """Executors around a worker that follows a script."""
    monkeypatch.setattr(inline, "Worker", ScriptedWorker)

    def make(core: CoreSeat) -> InlineExecutor:
        return inline.InlineExecutor(
            EngineConfig(model=ModelConfig(model="nothing")),
            core=core,
            engine_id=EngineId("e"),
            incarnation=Incarnation("i"),
            progress=lambda line: None,
        )

    return make


def step(*script: str) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=0,
        new_requests=[],
        known_requests=KnownRequests(),
        num_scheduled_tokens={},
        gone_request_ids=[RequestId(line) for line in script],
    )


def test_news_without_a_step_wake_the_core_once(
    make: Callable[[CoreSeat], InlineExecutor],
) -> None:
    executor = make(CoreSeat())
    (info,) = executor.start()
    assert info.rank == 0
    executor.submit(step("later 0 x"))
    assert executor.collect().connector_report is None
    assert select.select(executor.wake_fds, [], [], 5)[0]
    report = executor.poll_report()
    assert report is not None
    assert [settled.request_id for settled in report.settled] == ["x"]
    assert executor.poll_report() is None
    executor.close(0.1)
    executor.close(0.1)


def test_a_core_of_a_shared_world_has_its_rank_there(
    make: Callable[[CoreSeat], InlineExecutor],
) -> None:
    meets = Rendezvous(host="127.0.0.1", port=1)
    executor = make(CoreSeat(index=1, num_cores=2, rendezvous=meets))
    seat = executor._worker._seat
    executor.close(0.1)
    assert (seat.mesh.rank, seat.mesh.shape.world_size, seat.engine_rank) == (1, 2, 0)
    assert seat.is_output
    assert seat.rendezvous == meets


def test_a_core_of_a_shared_world_must_be_told_where_it_meets(
    make: Callable[[CoreSeat], InlineExecutor],
) -> None:
    with pytest.raises(InternalError, match="core 1 of 2 has no rendezvous"):
        make(CoreSeat(index=1, num_cores=2))
