"""SIGSTOP of one process at a time: it keeps its connections and says nothing.

Health checks and heartbeats are as they are by default. A client sees tokens again, or an error,
within ten seconds, but for those of a stopped proxy, whose own time-outs are all they have.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.chaos.stage import ENGINES, FENCED_S, LEASE_S, RECOVERY_S, Stage, started
from tests.chaos.streams import LATE, many, midway

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.chaos.streams import Stream

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.timeout(400)]

SILENCE_S = 10.0
SILENT_S = 1.0
"""Who has said nothing for so long is taken for stopped."""
MAX_STOPS = 5
PAUSE_S = LEASE_S + 1.0
PARTS = ["server", "core", "rank"]
ALONE = "core alone"
"""One that has no ranks: the model is in it."""


@pytest.fixture(scope="module")
def stage_of_ranks(
    transport: str, model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    """A deployment whose engines have two ranks each."""
    directory = tmp_path_factory.mktemp("stopped")
    with started(directory, model_of("llama"), transport, num_ranks=2) as stage:
        yield stage


@pytest.fixture
def stage(request: pytest.FixtureRequest, stage_of_transport: Stage, mode: str) -> Stage:
    """The deployment whose engines have ranks where these are at stake, whole and empty."""
    found = stage_of_transport
    if request.node.callspec.params.get("part", ALONE) != ALONE:
        found = request.getfixturevalue("stage_of_ranks")
    found.restore(mode)
    return found


def row(part: str) -> str:
    """Its name in the failure table."""
    return {"server": "an API server is stopped", "rank": "one TP rank is stopped"}.get(
        part, "an engine core is stopped"
    )


def assert_given_up(stage: Stage, name: str, part: str) -> None:
    """A core or rank took its engine along, which said why; a server only waits."""
    process = stage.deployment.processes[name]
    if part == "server":
        assert process.popen.poll() is None
    else:
        assert process.popen.wait(30) != 0
        assert "stopped" in process.log
        assert "--heartbeat-timeout" in process.log


def stopped_in_mid_stream(stage: Stage, part: str) -> tuple[list[Stream], list[list[int]], float]:
    """Streams of which one fell silent when a part of D was stopped; right answers; since when.

    How far they are when they are heard of is the machine's business, and so is which engine has
    them: where the stop came too late for all, it is undone, and others are begun.
    """
    for _ in range(MAX_STOPS):
        streams, right = many(stage, 4, 600, num_begun=4)
        since = time.monotonic()
        stage.stop_one("decode", part)
        while not all(stream.end for stream in streams):
            heard_s = [max(since, *each.heard_s) for each in streams if each.end is None]
            if heard_s and time.monotonic() - min(heard_s) > SILENT_S:
                return streams, right, since
            time.sleep(0.01)
        stage.restore()
    raise AssertionError(f"{MAX_STOPS} stops of D came after all streams")


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_p_is_stopped_before_the_hand_over(stage: Stage, part: str) -> None:
    prompts, right = stage.prompts(3)
    since = time.monotonic()
    stage.stop_one("prefill", part)
    streams = [stage.stream(prompt) for prompt in prompts]
    stage.settle(
        row(part),
        "before, of P",
        streams,
        right,
        since_s=since,
        bound_s=SILENCE_S + RECOVERY_S,
        alive=("decode", "decode1"),
        silence_s=SILENCE_S,
    )
    assert_given_up(stage, "prefill", part)


@pytest.mark.parametrize("side", ["P", "D"])
@pytest.mark.parametrize("part", [*PARTS, ALONE])
@pytest.mark.short_form(f"TCP-pull-{ALONE}-D")
def test_a_part_is_stopped_in_mid_hand_over(slow_stage: Stage, part: str, side: str) -> None:
    stage = slow_stage
    stream, right, receiver = midway(stage)
    name = "prefill" if side == "P" else receiver
    since = time.monotonic()
    stage.stop_one(name, part.removesuffix(" alone"))
    assert len(stream.tokens) == 1, LATE
    assert stage.network is not None
    stage.network.fast()
    stage.settle(
        row(part),
        f"during, of {side}",
        [stream],
        [right],
        since_s=since,
        bound_s=FENCED_S + SILENCE_S + RECOVERY_S,
        alive=ENGINES - {name},
        silence_s=SILENCE_S,
    )
    assert_given_up(stage, name, part)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_d_is_stopped_after_the_hand_over(stage: Stage, part: str) -> None:
    streams, right, since = stopped_in_mid_stream(stage, part)
    stage.settle(
        row(part),
        "after, of D",
        streams,
        right,
        since_s=since,
        bound_s=LEASE_S + SILENCE_S + RECOVERY_S,
        alive=ENGINES - {"decode"},
        silence_s=SILENCE_S,
    )
    assert_given_up(stage, "decode", part)


@pytest.mark.parametrize("phase", ["before", "during", "after"])
@pytest.mark.short_form("TCP-pull-after")
def test_the_proxy_is_stopped_and_goes_on(stage: Stage, phase: str) -> None:
    if phase == "before":
        prompts, right = stage.prompts(3)
        stage.stop_one("proxy", "server")
        streams = [stage.stream(prompt) for prompt in prompts]
    elif phase == "during":
        if stage.network is None:
            pytest.skip("a copy through shared memory is over before a fault can fall into it")
        stream, answer, _ = midway(stage)
        streams, right = [stream], [answer]
        stage.stop_one("proxy", "server")
    else:
        streams, right = many(stage, 6, 300, num_begun=6)
        stage.stop_one("proxy", "server")
    since = time.monotonic()
    time.sleep(PAUSE_S)
    stage.resume("proxy")
    stage.settle(
        "the proxy is stopped and goes on",
        f"{phase}, {PAUSE_S:g} s",
        streams,
        right,
        since_s=since,
        bound_s=PAUSE_S + FENCED_S + RECOVERY_S,
        silence_s=PAUSE_S + SILENCE_S,
    )
