"""The worker in the engine core's own process."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from pdserve.config.schema import EngineConfig, ModelConfig
from pdserve.errors import ConfigError, InternalError
from pdserve.executor import inline
from pdserve.executor.base import RankDiedError
from pdserve.parallel.place import CorePlace
from pdserve.parallel.rendezvous import Rendezvous
from pdserve.wire.ids import EngineId, Incarnation, RequestId
from pdserve.wire.step import SchedulerOutput
from pdserve.wire.transfer import ConnectorMetadata
from tests.executor.driving import collect, names, sleep_until_woken, wait_report
from tests.executor.scripted_worker import ScriptedWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdserve.executor.inline import InlineExecutor
    from pdserve.wire.step import ModelRunnerOutput
    from tests.executor.scripted_worker import ScriptedStep


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., InlineExecutor]]:
    """Executors around a worker that follows a script; closed at the end, with their threads."""
    monkeypatch.setattr(inline, "Worker", ScriptedWorker)
    made: list[InlineExecutor] = []

    def make(core: CorePlace | None = None, script: str = "nothing") -> InlineExecutor:
        executor = inline.InlineExecutor(
            EngineConfig(model=ModelConfig(model=script)),
            core=core or CorePlace(),
            engine_id=EngineId("e"),
            incarnation=Incarnation("i"),
            progress=lambda line: None,
        )
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.close(1.0)
    assert "steps" not in [thread.name for thread in threading.enumerate()]


def step(*script: str, step_id: int = 0) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=step_id,
        num_scheduled_tokens={},
        gone_request_ids=[RequestId(line) for line in script],
    )


def test_news_without_a_step_wake_the_core_once(make: Callable[..., InlineExecutor]) -> None:
    executor = make()
    (info,) = executor.start()
    assert info.rank == 0
    executor.submit(step("later 0 x"))
    assert collect(executor).step_id == 0
    assert names(wait_report(executor)) == ["x"]
    assert executor.poll_report() is None


def test_what_is_reported_twice_counts_once(make: Callable[..., InlineExecutor]) -> None:
    executor = make()
    executor.start()
    executor.submit(step("report 0 x"))
    assert names(wait_report(executor)) == ["x"]
    executor.submit(step("report 0 x", "report 0 y", step_id=1))
    report = wait_report(executor)
    while "y" not in names(report):
        assert not names(report)
        report = wait_report(executor)
    assert names(report) == ["y"]


def test_a_post_is_reported_while_a_step_runs(
    make: Callable[..., InlineExecutor], tmp_path: Path
) -> None:
    executor = make()
    executor.start()
    executor.submit(step(f"until 0 {tmp_path}/end"))
    executor.post(ConnectorMetadata(b"x"))
    assert names(wait_report(executor)) == ["x"]
    assert executor.poll_result() is None, "the step is still under way"
    (tmp_path / "end").touch()
    collect(executor)


def test_a_step_finds_what_was_posted_before_it(make: Callable[..., InlineExecutor]) -> None:
    executor = make()
    executor.start()
    executor.post(ConnectorMetadata(b"a"))
    executor.post(ConnectorMetadata(b"b"))
    executor.submit(step("posted a b"))
    collect(executor)


def test_steps_run_on_the_thread_that_the_worker_was_started_on(
    make: Callable[..., InlineExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, int] = {}

    def spy_on(name: str) -> None:
        original = getattr(ScriptedWorker, name)

        def spy(self: ScriptedWorker, *args: object) -> object:
            threads[name] = threading.get_ident()
            return original(self, *args)

        monkeypatch.setattr(ScriptedWorker, name, spy)

    on_the_step_thread = ("start", "launch", "collect", "execute", "finish_step", "close")
    for name in (*on_the_step_thread, "post", "poll"):
        spy_on(name)
    executor = make()
    executor.start()
    executor.post(ConnectorMetadata(b"x"))
    wait_report(executor)
    executor.submit(step())
    collect(executor)
    executor.close(1.0)
    here = threading.get_ident()
    assert threads["post"] == threads["poll"] == here
    assert len({threads[name] for name in on_the_step_thread}) == 1
    assert threads["execute"] != here


@pytest.mark.parametrize(
    ("script", "error", "story"),
    [
        ("raise 0", RuntimeError, "the script says so"),
        ("lost 0", RankDiedError, "rank 5 has ended"),
    ],
)
def test_a_step_that_fails_wakes_the_core_and_is_raised_there_and_for_ever(
    make: Callable[..., InlineExecutor], script: str, error: type[Exception], story: str
) -> None:
    executor = make()
    executor.start()
    executor.submit(step(script))
    deadline = time.monotonic() + 30
    sleep_until_woken(executor, deadline)
    assert time.monotonic() < deadline
    for call in (
        executor.poll_result,
        executor.poll_report,
        lambda: executor.post(ConnectorMetadata(b"x")),
        lambda: executor.submit(step()),
    ):
        with pytest.raises(error, match=story):
            call()


def test_what_fails_behind_an_answer_is_raised_after_it(
    make: Callable[..., InlineExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish_step(self: ScriptedWorker) -> None:
        raise RuntimeError("experts are lost")

    monkeypatch.setattr(ScriptedWorker, "finish_step", finish_step)
    executor = make()
    executor.start()
    executor.submit(step())
    assert collect(executor).step_id == 0
    with pytest.raises(RuntimeError, match="experts are lost"):
        collect(executor)


def test_a_post_that_fails_is_raised_at_once(make: Callable[..., InlineExecutor]) -> None:
    executor = make()
    executor.start()
    with pytest.raises(RuntimeError, match="the script says so"):
        executor.post(ConnectorMetadata(b"raise 0"))


def test_a_worker_that_cannot_start_says_why(make: Callable[..., InlineExecutor]) -> None:
    with pytest.raises(ConfigError, match="--model is not to be had"):
        make(script="config 0").start()


def test_closing_waits_for_the_step_that_runs_and_closes_the_worker_behind_it(
    make: Callable[..., InlineExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[float] = []
    monkeypatch.setattr(ScriptedWorker, "close", lambda self, timeout_s: closed.append(timeout_s))
    executor = make()
    executor.start()
    executor.submit(step("sleep 0 0.1"))
    executor.close(40.0)
    executor.close(40.0)
    assert len(closed) == 1
    assert 0.0 < closed[0] < 40.0, "what is left of the time"


def test_closing_leaves_a_step_behind_that_does_not_end(
    make: Callable[..., InlineExecutor], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(inline, "_EXIT_S", 0.1)
    executor = make()
    executor.start()
    executor.submit(step(f"until 0 {tmp_path}/end"))
    executor.close(0.1)
    assert executor._thread.is_alive()
    (tmp_path / "end").touch()
    executor._thread.join(30.0)


def test_closing_before_the_start_leaves_nothing(make: Callable[..., InlineExecutor]) -> None:
    make().close(1.0)


def test_a_core_of_a_shared_world_has_its_rank_there(
    make: Callable[..., InlineExecutor],
) -> None:
    meets = Rendezvous(host="127.0.0.1", port=1)
    executor = make(CorePlace(index=1, num_cores=2, rendezvous=meets))
    place = executor._worker._place
    assert (place.mesh.rank, place.mesh.shape.world_size, place.engine_rank) == (1, 2, 0)
    assert place.is_output
    assert place.rendezvous == meets


def test_a_core_of_a_shared_world_must_be_told_where_it_meets(
    make: Callable[..., InlineExecutor],
) -> None:
    with pytest.raises(InternalError, match="core 1 of 2 has no rendezvous"):
        make(CorePlace(index=1, num_cores=2))


def spied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the worker is asked for from now on, with the ids of steps."""
    story: list[str] = []
    launch, collect_step = ScriptedWorker.launch, ScriptedWorker.collect

    def spy_launch(self: ScriptedWorker, asked: SchedulerOutput) -> ScriptedStep:
        story.append(f"launch {asked.step_id}")
        return launch(self, asked)

    def spy_collect(self: ScriptedWorker, launched: ScriptedStep) -> ModelRunnerOutput:
        story.append(f"collect {launched.output.step_id}")
        return collect_step(self, launched)

    monkeypatch.setattr(ScriptedWorker, "complete", lambda _: story.append("complete"))
    monkeypatch.setattr(ScriptedWorker, "launch", spy_launch)
    monkeypatch.setattr(ScriptedWorker, "collect", spy_collect)
    return story


def test_a_step_is_launched_while_the_device_is_busy_with_the_one_before(
    make: Callable[..., InlineExecutor], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    story = spied(monkeypatch)
    executor = make(script="ahead")
    executor.start()
    executor.submit(step(f"busy {tmp_path}/end"))
    assert executor.max_in_flight == 2
    executor.submit(step("later 0 launched", step_id=1))
    wait_report(executor)
    assert story[:2] == ["launch 0", "launch 1"]
    assert executor.poll_result() is None
    (tmp_path / "end").touch()
    assert [collect(executor).step_id for _ in range(2)] == [0, 1]
    assert story == ["launch 0", "launch 1", "collect 0", "complete", "collect 1"]


def test_a_step_that_needs_the_one_before_is_launched_once_that_is_collected(
    make: Callable[..., InlineExecutor], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    story = spied(monkeypatch)
    executor = make(script="ahead")
    executor.start()
    executor.submit(step(f"busy {tmp_path}/end"))
    executor.submit(step("alone", step_id=1))
    (tmp_path / "end").touch()
    assert [collect(executor).step_id for _ in range(2)] == [0, 1]
    assert story == ["launch 0", "collect 0", "launch 1", "collect 1"]


def test_what_is_launched_is_collected_before_the_worker_closes(
    make: Callable[..., InlineExecutor], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    story = spied(monkeypatch)
    executor = make(script="ahead")
    executor.start()
    executor.submit(step("later 0 launched", f"busy {tmp_path}/end"))
    wait_report(executor)
    threading.Timer(0.05, (tmp_path / "end").touch).start()
    executor.close(5.0)
    assert story == ["launch 0", "collect 0"]


def test_nothing_is_planned_behind_a_prompt_or_drafts_nor_where_the_host_computes(
    make: Callable[..., InlineExecutor],
) -> None:
    r = RequestId("r")
    cases: list[tuple[str, int, dict[RequestId, int], int]] = [
        ("ahead", 1, {}, 2),
        ("ahead", 1, {r: 3}, 1),
        ("ahead", 2, {}, 1),
        ("nothing", 1, {}, 1),
    ]
    for script, num_tokens, rows, max_in_flight in cases:
        executor = make(script=script)
        executor.start()
        assert executor.max_in_flight == (2 if script == "ahead" else 1)
        asked = msgspec.structs.replace(
            step(), num_scheduled_tokens={r: num_tokens}, num_draft_rows=rows
        )
        executor.submit(asked)
        assert executor.max_in_flight == max_in_flight
        collect(executor)
