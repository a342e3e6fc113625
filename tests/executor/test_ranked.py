"""Executors of several ranks: real rank processes with a worker that follows a script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest

from pdserve.config.log import LogConfig
from pdserve.config.schema import EngineConfig, LivenessConfig, ModelConfig, ParallelConfig
from pdserve.errors import ConfigError, InternalError
from pdserve.executor import ranked
from pdserve.executor.base import RankDiedError
from pdserve.executor.messages import Launch
from pdserve.executor.multiprocess import MultiprocessExecutor, RankProcesses
from pdserve.executor.ranked import RankedExecutor
from pdserve.executor.zmq_links import ZmqHub
from pdserve.observe.liveness import NUM_LOOKS
from pdserve.parallel.place import CorePlace, rank_places
from pdserve.parallel.rendezvous import listen
from pdserve.wire.ids import EngineId, Incarnation, RequestId
from pdserve.wire.step import SchedulerOutput
from pdserve.wire.transfer import ConnectorMetadata
from tests.executor import scripted_worker
from tests.executor.driving import collect, names, sleep_until_woken, wait_report
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# A hang is the other way to fail: nothing else here takes as long.
SOON_S = 15.0


@pytest.fixture(autouse=True)
def _ranks_find_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    fds, segments = _open_fds(), set(os.listdir("/dev/shm"))
    # Children of other tests, which may start some of their own at any time, as browsers do.
    others = set(psutil.Process().children())
    yield
    assert _open_fds() <= fds
    assert set(psutil.Process().children()) <= others
    assert not [
        name for name in set(os.listdir("/dev/shm")) - segments if name.startswith("pdserve")
    ]


def _open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def config(script: str = "nothing", *, tp: int = 1, pp: int = 1) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=script),
        parallel=ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp),
    )


def over_rings(config: EngineConfig, lines: list[str]) -> RankedExecutor:
    return MultiprocessExecutor(
        config,
        core=CorePlace(),
        engine_id=EngineId("e"),
        incarnation=Incarnation("i"),
        progress=lines.append,
        worker=scripted_worker.PATH,
    )


def over_zmq(config: EngineConfig, lines: list[str]) -> RankedExecutor:
    """Ranks of this machine that are reached as if they were elsewhere."""
    num_ranks = config.parallel.num_ranks
    hub, posts = (ZmqHub(num_ranks, host="127.0.0.1") for _ in range(2))
    places = rank_places(config.parallel, CorePlace(), None)
    launches = [
        Launch(
            log=LogConfig(level="warning"),
            config=config,
            place=place,
            engine_id=EngineId("e"),
            incarnation=Incarnation("i"),
            ends=hub.ends(place.engine_rank),
            post_ends=posts.ends(place.engine_rank),
            worker=scripted_worker.PATH,
        )
        for place in places
    ]
    return RankedExecutor(
        hub,
        posts,
        RankProcesses(launches),
        places=places,
        max_in_flight=2,
        look_s=config.liveness.heartbeat_timeout_s / NUM_LOOKS,
        progress=lines.append,
    )


TRANSPORTS = [pytest.param(over_rings, id="rings"), pytest.param(over_zmq, id="zmq")]


@contextmanager
def made(
    make: Callable[[EngineConfig, list[str]], RankedExecutor],
    config: EngineConfig,
    lines: list[str] | None = None,
) -> Iterator[RankedExecutor]:
    executor = make(config, [] if lines is None else lines)
    try:
        yield executor
    finally:
        executor.close(1.0)


@contextmanager
def running(
    make: Callable[[EngineConfig, list[str]], RankedExecutor], config: EngineConfig
) -> Iterator[RankedExecutor]:
    with made(make, config) as executor:
        executor.start()
        yield executor


def step(step_id: int, *script: str, payload: bytes = b"") -> SchedulerOutput:
    return SchedulerOutput(
        step_id=step_id,
        num_scheduled_tokens={},
        gone_request_ids=[RequestId(line) for line in script],
        connector_metadata=ConnectorMetadata(payload),
    )


@pytest.mark.parametrize("make", TRANSPORTS)
def test_every_rank_gets_every_step_in_order_and_the_output_rank_alone_answers(
    make: Callable[[EngineConfig, list[str]], RankedExecutor],
) -> None:
    with running(make, config(tp=2, pp=2)) as executor:
        # From nothing to more than a ring holds.
        sizes = [0, 1, 1000, 5 << 20, 13 << 20, 7]
        outputs = []
        for step_id, size in enumerate(sizes):
            executor.submit(step(step_id, payload=os.urandom(size)))
            outputs.append(collect(executor))
        executor.submit(step(len(sizes)))
        executor.submit(step(len(sizes) + 1, "digest"))
        outputs += [collect(executor), collect(executor)]
        assert [output.step_id for output in outputs] == list(range(8))
        answering = {output.sampled_token_ids[0][0] for output in outputs}
        assert len(answering) == 1
        # A report is complete when all ranks name the same request: the digest of all steps.
        assert len(wait_report(executor).settled) == 1


@pytest.mark.parametrize("make", TRANSPORTS)
def test_a_fact_is_reported_once_when_the_last_rank_has_it(
    make: Callable[[EngineConfig, list[str]], RankedExecutor],
) -> None:
    with running(make, config(tp=2)) as executor:
        executor.submit(step(0, "report 0 a", "report 1 b"))
        collect(executor)
        time.sleep(0.05)
        assert executor.poll_report() is None
        executor.submit(step(1, "later 1 a", "later 0 b"))
        collect(executor)
        facts = names(wait_report(executor))
        if len(facts) < 2:
            facts += names(wait_report(executor))
        assert sorted(facts) == ["a", "b"]
        executor.submit(step(2))
        collect(executor)
        assert executor.poll_report() is None


@pytest.mark.parametrize("make", TRANSPORTS)
def test_a_post_reaches_every_rank_and_is_reported_while_a_step_runs(
    make: Callable[[EngineConfig, list[str]], RankedExecutor], tmp_path: Path
) -> None:
    with running(make, config(tp=2)) as executor:
        executor.submit(step(0, f"until 0 {tmp_path}/end", f"until 1 {tmp_path}/end"))
        executor.post(ConnectorMetadata(b"x"))
        assert names(wait_report(executor)) == ["x"]
        assert executor.poll_result() is None, "the step is still under way"
        (tmp_path / "end").touch()
        collect(executor)


@pytest.mark.parametrize("make", TRANSPORTS)
def test_a_report_that_was_seen_by_who_looked_for_results_wakes_the_core_again(
    make: Callable[[EngineConfig, list[str]], RankedExecutor],
) -> None:
    with running(make, config(tp=2)) as executor:
        executor.post(ConnectorMetadata(b"x"))
        time.sleep(0.3)  # the report is there, and nothing comes after it
        assert executor.poll_result() is None
        began_s = time.monotonic()
        sleep_until_woken(executor, began_s + 2.0 * SOON_S)
        report = executor.poll_report()
        assert report is not None
        assert names(report) == ["x"]
        assert time.monotonic() - began_s < SOON_S
        sleep_until_woken(executor, time.monotonic() + 0.05)  # asleep again, and not for ever
        assert executor.poll_report() is None


def test_a_report_that_was_seen_while_the_core_waited_for_room_wakes_it_again() -> None:
    with running(over_rings, config(tp=2)) as executor:
        executor.post(ConnectorMetadata(b"x"))
        time.sleep(0.3)  # the report is there, and nothing comes after it
        executor.post(ConnectorMetadata(b"sleep 0 0 " + b"-" * (1 << 20)))
        assert executor.poll_result() is None
        began_s = time.monotonic()
        sleep_until_woken(executor, began_s + 2.0 * SOON_S)
        report = executor.poll_report()
        assert report is not None
        assert names(report) == ["x"]
        assert time.monotonic() - began_s < SOON_S


@pytest.mark.parametrize("make", TRANSPORTS)
def test_a_step_runs_once_the_posts_before_it_were_taken(
    make: Callable[[EngineConfig, list[str]], RankedExecutor],
) -> None:
    with running(make, config(tp=2)) as executor:
        executor.post(ConnectorMetadata(b"sleep 0 0.2"))
        executor.post(ConnectorMetadata(b"a"))
        executor.submit(step(0, "posted sleep_0_0.2 a"))
        collect(executor)


def test_posts_that_outgrow_their_ring_pass_by_a_step(tmp_path: Path) -> None:
    with running(over_rings, config(tp=2)) as executor:
        executor.submit(step(0, f"until 0 {tmp_path}/end", f"until 1 {tmp_path}/end"))
        sizes = (1, 1 << 20, 3, 3 << 20)
        for size in sizes:
            executor.post(ConnectorMetadata(b"x" * size))
        reported: list[str] = []
        while len(reported) < len(sizes):
            reported += names(wait_report(executor))
        assert executor.poll_result() is None, "the step is still under way"
        assert [len(name) for name in reported] == list(sizes)
        (tmp_path / "end").touch()
        collect(executor)


@pytest.mark.parametrize("make", TRANSPORTS)
@pytest.mark.parametrize(
    ("script", "story"),
    [
        (b"raise 1", r"rank 1 failed: [\s\S]*RuntimeError: the script says so[\s\S]*steps \[0\]"),
        (b"kill 1", r"rank 1 \(pid \d+ was killed by SIGKILL[^)]*\).*with steps \[0\] in flight"),
    ],
)
def test_a_rank_that_ends_over_a_post_raises_at_once_with_its_story_while_a_step_runs(
    make: Callable[[EngineConfig, list[str]], RankedExecutor], script: bytes, story: str
) -> None:
    with running(make, config(tp=2)) as executor:
        executor.submit(step(0, "sleep 0 30", "sleep 1 30"))
        time.sleep(0.05)
        executor.post(ConnectorMetadata(script))
        began_s = time.monotonic()
        with pytest.raises(RankDiedError, match=story):
            wait_report(executor)
        assert time.monotonic() - began_s < SOON_S
        with pytest.raises(RankDiedError):
            executor.post(ConnectorMetadata(b"x"))


def test_an_answer_does_not_wait_for_what_its_rank_does_after_it(tmp_path: Path) -> None:
    with running(over_rings, config(tp=2)) as executor:
        executor.submit(step(0, f"finish 0 {tmp_path}/end", f"finish 1 {tmp_path}/end"))
        collect(executor)
        executor.submit(step(1))
        with pytest.raises(AssertionError, match="no result came"):
            collect(executor, timeout_s=0.1)
        (tmp_path / "end").touch()
        collect(executor)


def test_ranks_start_side_by_side_and_say_things_once() -> None:
    lines: list[str] = []
    with made(over_rings, config("sleep 0 0.3", tp=2), lines) as executor:
        infos = executor.start()
    assert [info.rank for info in infos] == [0, 1]
    assert lines == ["all 2 ranks: weights 50 %", "all 2 ranks: weights 100 %"]


def test_a_config_error_of_one_rank_ends_the_start_with_its_message() -> None:
    with made(over_rings, config("config 1", tp=3)) as executor:
        with pytest.raises(ConfigError, match=r"^--model is not to be had$"):
            executor.start()
        _all_end_at_once(executor)


@pytest.mark.parametrize("make", TRANSPORTS)
@pytest.mark.parametrize(
    ("script", "story"),
    [
        ("kill 1", r"rank 1 \(pid \d+ was killed by SIGKILL[^)]*\).*while the engine started"),
        ("exit 1", r"rank 1 \(pid \d+ ended with code 7\)"),
        ("raise 1", r"rank 1 failed: [\s\S]*RuntimeError: the script says so"),
        ("refuse 1", r"^rank 1 failed: can't start new thread: raise the limit of processes with"),
        ("lost 1", r"^rank 1 failed: rank 5 has ended \(while the engine started"),
    ],
)
def test_a_rank_that_ends_while_it_starts_ends_the_start_with_its_story(
    make: Callable[[EngineConfig, list[str]], RankedExecutor], script: str, story: str
) -> None:
    with made(make, config(script, tp=2)) as executor:
        with pytest.raises(RankDiedError, match=story):
            executor.start()


def test_what_a_rank_said_last_is_part_of_the_story_of_its_start() -> None:
    with made(over_rings, config("kill 1", tp=2)) as executor:
        with pytest.raises(RankDiedError, match=r"last heard: .*rank 1: weights 50 %"):
            executor.start()


def test_equal_errors_of_all_ranks_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranked, "_ECHO_S", SOON_S)
    with running(over_rings, config(tp=2)) as executor:
        executor.submit(step(0, "raise 0", "raise 1"))
        with pytest.raises(RankDiedError) as caught:
            collect(executor)
        assert str(caught.value).startswith("ranks 0, 1 failed: Traceback")
        assert str(caught.value).count("Traceback") == 1


def _are_gone(executor: RankedExecutor) -> bool:
    assert isinstance(executor, MultiprocessExecutor)
    return not any(psutil.pid_exists(pid) for pid in executor.pids)


def _all_end_at_once(executor: RankedExecutor) -> None:
    """The ranks have been killed; only `close` waits until they have ended."""
    assert isinstance(executor, MultiprocessExecutor)
    wait_until(lambda: len(executor._ranks.ended()) == len(executor.pids), SOON_S)


@pytest.mark.chaos
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_in_mid_step_raises_at_once_and_takes_the_others_along(victim: int) -> None:
    with running(over_rings, config(tp=2)) as executor:
        assert isinstance(executor, MultiprocessExecutor)
        executor.submit(step(0))
        collect(executor)
        executor.submit(step(1, "sleep 0 30", "sleep 1 30"))
        executor.submit(step(2))
        time.sleep(0.05)
        os.kill(executor.pids[victim], signal.SIGKILL)
        start = time.monotonic()
        story = rf"rank {victim} \(pid \d+ was killed by SIGKILL[^)]*\).*steps \[1, 2\] in flight"
        with pytest.raises(RankDiedError, match=story):
            collect(executor)
        assert time.monotonic() - start < SOON_S
        _all_end_at_once(executor)
        with pytest.raises(RankDiedError):
            executor.submit(step(3))


@pytest.mark.chaos
def test_a_rank_killed_while_idle_wakes_the_core_and_raises() -> None:
    with running(over_rings, config(tp=2)) as executor:
        assert isinstance(executor, MultiprocessExecutor)
        executor.submit(step(41))
        collect(executor)
        assert executor.poll_report() is None
        os.kill(executor.pids[1], signal.SIGKILL)
        start = time.monotonic()
        sleep_until_woken(executor, start + 10)
        with pytest.raises(RankDiedError, match="no step in flight; the last one was 41"):
            executor.poll_report()
        assert time.monotonic() - start < SOON_S
        _all_end_at_once(executor)


@pytest.mark.chaos
@pytest.mark.parametrize("payload", [b"", bytes(9 << 20)], ids=["in mid step", "short of room"])
def test_a_rank_that_is_stopped_is_given_up_and_takes_the_others_along(payload: bytes) -> None:
    impatient = msgspec.structs.replace(
        config(tp=2), liveness=LivenessConfig(heartbeat_timeout_s=0.5)
    )
    with running(over_rings, impatient) as executor:
        assert isinstance(executor, MultiprocessExecutor)
        os.kill(executor.pids[1], signal.SIGSTOP)
        executor.submit(step(0, "sleep 0 30"))
        start = time.monotonic()
        story = r"^rank 1 \(pid \d+ was stopped .*--heartbeat-timeout\)"
        with pytest.raises(RankDiedError, match=story):
            if payload:
                executor.submit(step(1, payload=payload))
            while True:
                executor.poll_result()
                time.sleep(0.02)
        assert time.monotonic() - start < SOON_S
        _all_end_at_once(executor)


@pytest.mark.chaos
def test_a_rank_elsewhere_that_is_stopped_is_lost() -> None:
    with running(over_zmq, config(tp=2)) as executor:
        ranks = executor._ranks
        assert isinstance(ranks, RankProcesses)
        os.kill(ranks.pids[1], signal.SIGSTOP)
        executor._next_look_s = float("inf")  # nobody looks at processes of another machine
        executor.submit(step(0, "sleep 0 30"))
        with pytest.raises(RankDiedError, match="rank 1 lost its connection"):
            collect(executor)


@pytest.mark.chaos
def test_a_rank_killed_while_the_core_waits_for_room_raises() -> None:
    with running(over_rings, config(tp=2)) as executor:
        assert isinstance(executor, MultiprocessExecutor)
        executor.submit(step(0, "sleep 1 30"))
        os.kill(executor.pids[0], signal.SIGKILL)
        with pytest.raises(RankDiedError, match="rank 0"):
            executor.submit(step(1, payload=bytes(9 << 20)))


def test_the_first_cause_is_told_before_its_echo_on_another_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranked, "_ECHO_S", SOON_S)
    with running(over_rings, config(tp=2)) as executor:
        # Rank 0 says that something went wrong; a moment later rank 1 turns out to be dead.
        executor.submit(step(0, "raise 0", "sleep 1 0.03", "kill 1"))
        with pytest.raises(RankDiedError, match=r"^rank 1 \(pid \d+ was killed by SIGKILL"):
            collect(executor)


@pytest.mark.chaos
def test_a_rank_behind_zmq_that_is_killed_is_noticed_by_its_connection_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running(over_zmq, config(tp=2)) as executor:
        # As if nobody could see the process: only the link is left to tell.
        processes = executor._ranks
        assert isinstance(processes, RankProcesses)
        monkeypatch.setattr(processes, "ended", dict)
        executor.submit(step(0, "sleep 0 30"))
        os.kill(processes.pids[1], signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(RankDiedError, match="rank 1 lost its connection"):
            collect(executor)
        assert time.monotonic() - start < SOON_S
        monkeypatch.undo()


def test_closing_kills_a_rank_that_hangs() -> None:
    with running(over_rings, config(tp=2)) as executor:
        executor.submit(step(0, "stuck 1"))
        collect(executor)
        start = time.monotonic()
        executor.close(0.1)
        assert time.monotonic() - start < SOON_S
        assert _are_gone(executor)


def test_closing_hears_out_a_rank_that_says_more_than_there_is_room_for() -> None:
    with running(over_rings, config(tp=2)) as executor:
        executor.submit(step(0, "chatter 1"))
        collect(executor)
        start = time.monotonic()
        executor.close(40.0)
        assert time.monotonic() - start < 30.0


def test_closing_kills_a_rank_that_never_comes_back_from_a_step() -> None:
    with running(over_rings, config(tp=2)) as executor:
        executor.submit(step(0, "sleep 0 30"))
        executor.close(0.0)
        assert _are_gone(executor)


def test_closing_before_the_start_leaves_nothing() -> None:
    over_rings(config(tp=2), []).close(1.0)


@pytest.mark.parametrize("index", [0, 1])
def test_rank_0_of_the_world_alone_inherits_the_socket_where_it_meets(index: int) -> None:
    listener, rendezvous = listen("127.0.0.1")
    core = CorePlace(index=index, num_cores=2, rendezvous=rendezvous)
    executor = MultiprocessExecutor(
        config("meet", tp=2),
        core=core,
        engine_id=EngineId("e"),
        incarnation=Incarnation("i"),
        progress=lambda line: None,
        worker=scripted_worker.PATH,
    )
    try:
        executor.start()
    finally:
        executor.close(1.0)
        listener.close()


def test_a_core_that_shares_a_world_must_be_told_where_it_meets() -> None:
    with pytest.raises(InternalError, match="core 1 of 2 has no rendezvous"):
        MultiprocessExecutor(
            config(),
            core=CorePlace(index=1, num_cores=2),
            engine_id=EngineId("e"),
            incarnation=Incarnation("i"),
            progress=lambda line: None,
        )


ORPHANING = """
import os, sys
from tests.executor.test_ranked import config, over_rings
executor = over_rings(config(tp=2), [])
executor.start()
print(*executor.pids, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.chaos
def test_ranks_end_with_the_process_that_started_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ORPHANING], cwd=ROOT, capture_output=True, check=False
    )
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    wait_until(lambda: not any(_runs(pid) for pid in pids))


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_engine_core_with_ranks_in_other_processes_loads_no_torch() -> None:
    code = """
import sys
import pdserve.engine.process
import pdserve.executor.multiprocess, pdserve.executor.rank
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
