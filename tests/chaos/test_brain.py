"""Rows of the failure table about what a proxy with `--split-policy predicted` decides by.

It has learned what engines take, and reads their KV events, when the fault comes; it goes on to
decide, and clients see nothing.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from tests.chaos.stage import LEASE_S, RECOVERY_S
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.chaos.stage import Stage

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.timeout(400)]

MAX_ROUNDS = 40
"""Of eight requests, from which a proxy learns enough: not all show how far tokens are apart."""
NUM_TAUGHT = 30
"""Prompts from which an engine learns enough for proxies that come then."""
HEARD_AGAIN_S = 30.0
"""TCP tries again ever more rarely what was lost; the events come with it."""
AHEAD_S = 3600
OF = {"prefill": "of P", "decode": "of D"}


@pytest.fixture
def stage(stage_of_transport: Stage, mode: str) -> Iterator[Stage]:
    """The deployment, whole and empty, and a proxy that predicts."""
    stage_of_transport.restore(mode, split_policy="predicted")
    teach(stage_of_transport)
    yield stage_of_transport
    stage_of_transport.restore(mode)


def teach(stage: Stage) -> None:
    """Have the proxy learn, and hear of all engines' KV."""
    for _ in range(MAX_ROUNDS):
        streams = [stage.stream(stage.prompt(64 + 64 * number), 60) for number in range(8)]
        for stream in streams:
            stream.join(60.0)
        if has_learned(stage):
            break
    assert has_learned(stage)
    wait_until(lambda: num_cores(stage, "live") == 3, 30.0)


def has_learned(stage: Stage) -> bool:
    """Whether the proxy knows enough to decide by."""
    series = (f'pdserve_route_model_error_ratio{{term="{term}"}}' for term in ("prefill", "step"))
    return all(stage.deployment.metric("proxy", each) > 0 for each in series)


def num_decided(stage: Stage) -> float:
    """How often it has chosen a pair."""
    return stage.deployment.metric("proxy", "pdserve_route_seconds_count")


def num_cores(stage: Stage, state: str) -> float:
    """Engine cores whose KV events are so."""
    return stage.deployment.metric("proxy", f'pdserve_index_cores{{state="{state}"}}')


def settle(stage: Stage, row: str, phase: str, since_s: float, bound_s: float = RECOVERY_S) -> None:
    """Ask for prompts of several lengths: all answers are right, and each was decided."""
    before = num_decided(stage)
    prompts = [stage.prompt(100 + 90 * n) for n in range(6)]
    right = [stage.right_answer(prompt) for prompt in prompts]
    streams = [stage.stream(prompt) for prompt in prompts]
    stage.settle(row, phase, streams, right, since_s=since_s, bound_s=bound_s)
    assert num_decided(stage) >= before + len(prompts)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_the_kv_events_of_an_engine_are_cut_off(stage: Stage, name: str) -> None:
    if stage.network is None:
        pytest.skip("on loopback nothing can be cut off")
    stage.silence_events(name)
    wait_until(lambda: num_cores(stage, "stale") >= 1, 30.0)
    settle(stage, "an engine's KV events are cut off", OF[name], time.monotonic())
    stage.network.heal()
    wait_until(lambda: num_cores(stage, "live") == 3, HEARD_AGAIN_S)


def test_a_proxy_that_predicts_is_restarted(stage: Stage) -> None:
    for number in range(NUM_TAUGHT):  # one after the other: some at once may share a step
        known = stage.prompt(100 + 10 * number)
        stage.stream(known).join(60.0)
    since_s = time.monotonic()
    stage.kill("proxy")
    stage.restore(split_policy="predicted")
    wait_until(lambda: num_cores(stage, "live") == 3, 30.0)
    wait_until(lambda: has_learned(stage), 10.0)  # of engines: it has served nothing yet
    prompts = [stage.prompt(), known]
    right = [stage.right_answer(prompt) for prompt in prompts]
    stage.settle(
        "a proxy that predicts is restarted",
        "its first requests",
        [stage.stream(prompt) for prompt in prompts],
        right,
        since_s=since_s,
        bound_s=LEASE_S + RECOVERY_S,
    )
    assert num_decided(stage) >= len(prompts)
    series = 'pdserve_index_hit_error_tokens_count{known_by="events"}'
    wait_until(lambda: stage.deployment.metric("proxy", series) >= 2, 10.0)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_the_clocks_of_an_engine_are_an_hour_ahead(stage: Stage, name: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("time namespaces need root")
    stage.skew(name, AHEAD_S)
    stage.deployment.wait(name)
    stage.deployment.wait_routable(1, 2)
    told = f"its wall clock differs from this host's engine={stage.deployment.url(name)}"
    wait_until(lambda: told in stage.deployment.processes["proxy"].log, 30.0)
    wait_until(lambda: num_cores(stage, "live") == 3, 30.0)
    teach(stage)
    settle(stage, "an engine's clocks are an hour ahead", OF[name], time.monotonic())
