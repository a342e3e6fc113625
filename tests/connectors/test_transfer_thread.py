"""The transfer thread itself: cutting loads, refusing bad starts, dying loudly, ending."""

from __future__ import annotations

import functools
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.connectors.conformance.engines import prompt_of
from pdserve.connectors.handover.instructions import Instructions
from pdserve.connectors.nixl import NixlConnector, NixlSettings
from pdserve.connectors.nixl.agent import AgentError, NixlAgent
from pdserve.connectors.pieces import count_runs
from pdserve.connectors.transfer_thread import thread
from pdserve.errors import ConfigError, InternalError
from pdserve.wire.transfer import ConnectorMetadata, Endpoint, LeaseEnd, LoadFailure
from tests.connectors.engines import Engine, layout
from tests.connectors.making import making

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.slow

PROMPT = prompt_of(40)


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    with making(functools.partial(Engine, NixlConnector())) as make:
        yield make


@given(
    pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12),
)
def test_runs_are_what_is_left_when_neighbours_on_both_sides_are_merged(
    pairs: list[tuple[int, int]],
) -> None:
    merged: list[tuple[int, int, int]] = []
    for mine, theirs in pairs:
        if merged and (mine, theirs) == (sum(merged[-1][::2]), sum(merged[-1][1:])):
            merged[-1] = (merged[-1][0], merged[-1][1], merged[-1][2] + 1)
        else:
            merged.append((mine, theirs, 1))
    columns = np.array(pairs, dtype=np.int32).reshape(-1, 2)
    assert count_runs(columns[:, 0], columns[:, 1]) == len(merged)


def test_a_load_in_many_chunks_arrives_whole_and_its_descriptors_are_counted(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread, "PIECE_BYTES", 2 * layout().block_bytes)
    p, d = make("P"), make("D")
    prompt = prompt_of(16 * 7)
    source, target = [9, 8, 7, 3, 4, 5, 6], [19, 18, 17, 30, 31, 2, 3]
    d.load(d.queue(prompt, p.prefill(prompt, source), "r"), target)
    d.until(lambda: d.received)
    assert d.holds(target, source)
    # Two blocks at a time, ordered by source: 8-18 9-19 | 3-30, 7-17 | 4-31, 5-2 | 6-3
    assert d.received[0].num_descriptors == 6


def test_64_kib_blocks_in_a_row_need_few_descriptors_per_gb(make: Callable[..., Engine]) -> None:
    shape = layout(num_blocks=512)
    p, d = make("P", shape=shape), make("D", shape=shape)
    prompt = prompt_of(16 * 512)
    d.load(d.queue(prompt, p.prefill(prompt, range(512)), "r"), range(512))
    d.until(lambda: d.received)
    assert d.received[0].num_descriptors / d.received[0].num_bytes * 1e9 < 1000


def test_a_transfer_thread_waits_less_than_a_millisecond_for_a_busy_interpreter(
    make: Callable[..., Engine],
) -> None:
    # Each of its turns waits for the lock until the interval has passed: 5 ms by default.
    sys.setswitchinterval(0.005)
    make("P")
    assert sys.getswitchinterval() < 0.001


def test_a_mute_peer_delays_nobody_elses_heartbeats(make: Callable[..., Engine]) -> None:
    p, d = make("P", lease_s=1.0), make("D", handshake_timeout_s=3.0)
    waits = d.queue(PROMPT, p.prefill(PROMPT, [1, 2, 3]), "waits")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        elsewhere = Endpoint(host="127.0.0.1", port=mute.getsockname()[1])
        other = msgspec.structs.replace(
            p.prefill(PROMPT, [4, 5, 6]), endpoints=[elsewhere], engine_id="mute"
        )
        d.load(d.queue(PROMPT, other, "stuck"), [7, 8, 9])
        d.until(lambda: d.failed)
    d.load(waits, [4, 5, 6])  # after three times its lease
    d.until(lambda: d.received)
    assert [f.reason for f in d.failed] == [LoadFailure.HANDSHAKE]


def test_a_thread_that_died_wakes_the_engine_and_ends_it_with_the_reason(
    make: Callable[..., Engine],
) -> None:
    p = make("P")
    p.worker.post(ConnectorMetadata(b"no instructions"))
    assert p.news.wait(30.0)
    with pytest.raises(InternalError, match="transfer thread died: ValidationError"):
        p.worker.get_finished()
    with pytest.raises(InternalError, match="transfer thread died: ValidationError"):
        p.worker.post(Instructions().to_metadata())


def test_a_backend_that_nixl_does_not_have_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="NOT_A_BACKEND"):
        Engine(NixlConnector(settings=NixlSettings(backends=("NOT_A_BACKEND",))), "P")


def test_kv_memory_of_another_size_than_its_layout_is_refused() -> None:
    engine = Engine("memory", "P")
    worker = NixlConnector().make_worker(engine.context, lambda: None)
    with pytest.raises(InternalError, match="not laid out as"):
        worker.register_kv_caches(torch.zeros(3), layout())


def test_close_with_a_load_in_flight_ends_in_time(make: Callable[..., Engine]) -> None:
    p, d = make("P"), make("D", handshake_timeout_s=60.0)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        elsewhere = Endpoint(host="127.0.0.1", port=mute.getsockname()[1])
        d.load(
            d.queue(
                PROMPT,
                msgspec.structs.replace(p.prefill(PROMPT, [1, 2, 3]), endpoints=[elsewhere]),
                "r",
            ),
            [4, 5, 6],
        )
        started_s = time.monotonic()
        d.worker.close(1.0)
        assert time.monotonic() - started_s < 20.0


def test_what_is_said_in_the_last_moment_before_the_end_is_carried_out(
    make: Callable[..., Engine],
) -> None:
    p, d = make("P"), make("D")
    d.load(d.queue(PROMPT, p.prefill(PROMPT, [1, 2, 3]), "meets"), [4, 5, 6])
    d.until(lambda: d.received)
    p.until(lambda: p.settled)
    d.abort(d.queue(PROMPT, p.prefill(PROMPT, [1, 2, 3]), "r"))
    release = d.scheduler.take_instructions()

    worker: Any = d.worker
    server, said = worker._runner._machine.server, []

    def tick() -> None:  # after this turn's instructions were taken
        if not said:
            said.append(release)
            worker.post(release)
            worker._runner._stop_at_s = time.monotonic() + 5.0

    server.tick = tick
    worker._runner._reactor.wake()
    p.until(lambda: len(p.settled) == 2)
    assert p.settled[1].end is LeaseEnd.RELEASED


def test_a_handoff_of_blocks_that_p_does_not_have_fails_as_a_value(
    make: Callable[..., Engine],
) -> None:
    p, d = make("P"), make("D")
    handoff = p.prefill(PROMPT, [1, 2, 3])
    larger = msgspec.structs.replace(handoff.shape, num_blocks=33)
    beyond = msgspec.structs.replace(handoff, block_ids=[1, 2, 32], shape=larger)
    d.load(d.queue(PROMPT, beyond, "r"), [4, 5, 6])
    d.until(lambda: d.failed)
    assert [f.reason for f in d.failed] == [LoadFailure.INCOMPATIBLE]
    assert "num_blocks=33" in d.failed[0].detail
    assert "num_blocks=32" in d.failed[0].detail
    d.load(d.queue(PROMPT, p.prefill(PROMPT, [1, 2, 3]), "r2"), [4, 5, 6])
    d.until(lambda: d.received)


def lose_target(engine: Engine) -> threading.Event:
    """Have the agent that peers reach `engine` by end; it is made again once the event is set."""
    runner, may_be_made = engine.worker._runner, threading.Event()  # type: ignore[attr-defined]
    mover, machine = runner._mover, runner._machine
    make_agent, tick = mover._make_agent, machine.server.tick

    def make_or_fail(part: str) -> NixlAgent:
        if not (part or may_be_made.is_set()):  # a lane's has a part
            raise AgentError("NIXL create_agent: nixlBackendError: no port is free")
        agent: NixlAgent = make_agent(part)
        return agent

    def tick_after_reset() -> None:  # on the transfer thread, once
        machine.server.tick = tick
        machine.fence("a test")

    mover._make_agent, machine.server.tick = make_or_fail, tick_after_reset
    runner._reactor.wake()
    engine.until(lambda: engine.faults["agent_not_made"])
    return may_be_made


@pytest.mark.parametrize("loser", ["P", "D"])
def test_an_agent_that_cannot_be_made_again_fails_loads_until_it_can(
    make: Callable[..., Engine], loser: str
) -> None:
    p, d = make("P"), make("D")
    engines = {"P": p, "D": d}
    may_be_made = lose_target(engines[loser])
    d.load(d.queue(PROMPT, p.prefill(PROMPT, [1, 2, 3]), "meanwhile"), [4, 5, 6])
    d.until(lambda: d.failed)
    assert d.failed[0].reason is LoadFailure.HANDSHAKE
    assert "no NIXL agent now" in d.failed[0].detail
    may_be_made.set()
    deadline_s = time.monotonic() + 30.0
    while not d.received:
        assert time.monotonic() < deadline_s, d.failed[-1]
        num_over = len(d.failed)
        d.load(d.queue(PROMPT, p.prefill(PROMPT, [1, 2, 3]), f"r{num_over}"), [4, 5, 6])
        d.until(lambda: d.received or len(d.failed) > num_over)  # noqa: B023
        time.sleep(0.05)
    assert d.holds([4, 5, 6], [1, 2, 3])
