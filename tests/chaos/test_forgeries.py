"""The failure table without the proxy: what comes late, twice, forged, garbled, or never."""

from __future__ import annotations

import importlib.util
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pdserve.wire.seal import PROTOCOL
from tests.chaos.driving import (
    Call,
    ends_of_leases,
    leased,
    read_late,
    remote_decode,
    remote_prefill,
    ticket_for,
)
from tests.chaos.stage import FENCED_S, LEASE_S, RECOVERY_S, Stage
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.chaos.streams import Stream

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.timeout(400)]

ANY_END = {"finished", "kv_transfer_failed", "handoff_refused", "connection lost"}


def edited(sealed: str) -> str:
    """The same with another character in its middle."""
    middle = len(sealed) // 2
    other = "A" if sealed[middle] != "A" else "B"
    return sealed[:middle] + other + sealed[middle + 1 :]


@pytest.fixture
def push_stage(stage: Stage) -> Stage:
    """The stage once per transport: tickets are given to the engines by the test."""
    if stage.mode != "push":
        pytest.skip("a ticket is a push")
    return stage


def opened(stage: Stage, prompt: list[int]) -> tuple[list[Call], list[list[int]]]:
    """Requests to P and D between which a transfer has begun and cannot end: P is stopped.

    By push, D has registered its blocks at P, and P has a request to write into them.
    """
    right = stage.right_answer(prompt)
    if stage.mode == "pull":
        handoff = leased(stage, prompt)
        stage.stop("prefill")
        calls = [Call(stage, "decode", prompt, handoff)]
    else:
        ticket = ticket_for(stage)
        calls = [Call(stage, "decode", prompt, remote_prefill(ticket))]
        wait_until(lambda: stage.is_receiving("decode"), 60.0)
        stage.stop("prefill")
        calls.append(Call(stage, "prefill", prompt, remote_decode(ticket)))
    wait_until(lambda: stage.is_receiving("decode"), 60.0)
    return calls, [right] * len(calls)


def test_p_dies_with_a_transfer_open(stage: Stage) -> None:
    calls, right = opened(stage, stage.prompt())
    before = stage.num_failed_loads("decode")
    assert calls[0].end is None
    since = time.monotonic()
    stage.kill("prefill")
    stage.settle(
        "P dies in mid transfer",
        "during, no proxy",
        calls,
        right,
        since_s=since,
        bound_s=FENCED_S + RECOVERY_S,
        expect=ANY_END,
        alive=("decode", "decode1"),
    )
    assert stage.num_failed_loads("decode") > before


def test_d_dies_with_a_transfer_open(stage: Stage) -> None:
    calls, right = opened(stage, stage.prompt())
    assert calls[0].end is None
    since = time.monotonic()
    stage.kill("decode")
    stage.resume("prefill")
    stage.settle(
        "D dies before the first token",
        "during, no proxy",
        calls[1:],
        [answer[:1] for answer in right[1:]],
        since_s=since,
        bound_s=LEASE_S + FENCED_S + RECOVERY_S,
        expect=ANY_END,
        alive=("prefill", "decode1"),
    )


def test_d_never_pulls(stage: Stage) -> None:
    since = time.monotonic()
    leased(stage, stage.prompt())
    assert stage.deployment.held_blocks("prefill").get("leased")
    before = ends_of_leases(stage, "expired")
    stage.settle(
        "D never pulls", "before", [], [], since_s=since, bound_s=LEASE_S + 3.0, expect=set()
    )
    assert ends_of_leases(stage, "expired") == before + 1


@pytest.mark.short_form("TCP-pull")
def test_the_lease_expired_and_d_reads_late(stage: Stage) -> None:
    prompt = stage.prompt()
    right = stage.right_answer(prompt)
    handoff = leased(stage, prompt)
    time.sleep(LEASE_S + 0.5)
    # The blocks have other contents by now.
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda p: stage.stream(p, 2).join(90), [stage.prompt() for _ in range(16)]))
    since = time.monotonic()
    tokens, failures = read_late(stage, prompt, handoff)
    assert tokens in (right, None)
    assert failures > 0, "the late read was not noticed"
    stage.settle(
        "lease expired, D reads late",
        "after",
        [],
        [],
        since_s=since,
        bound_s=RECOVERY_S,
        expect=set(),
    )


@pytest.mark.parametrize("which", ["forged", "replayed"])
@pytest.mark.short_form("TCP-pull")
def test_a_handoff_that_is(stage: Stage, which: str) -> None:
    prompt = stage.prompt()
    right = stage.right_answer(prompt)
    handoff = leased(stage, prompt)
    since = time.monotonic()
    if which == "replayed":
        tokens, _ = read_late(stage, prompt, handoff)
        assert tokens == right
    else:
        handoff["pdserve"]["handoffs"][0] = edited(handoff["pdserve"]["handoffs"][0])
    tokens, failures = read_late(stage, prompt, handoff, salt="another cache")
    assert tokens in (right, None)
    assert failures > 0, f"a {which} handoff was believed"
    stage.settle(
        f"a {which} handoff", "-", [], [], since_s=since, bound_s=LEASE_S + 3.0, expect=set()
    )


@pytest.mark.parametrize("which", ["edited", "signed by another"])
@pytest.mark.parametrize("victim", ["prefill", "decode"])
@pytest.mark.short_form("TCP-push")
def test_a_push_ticket_is_refused_that_is(push_stage: Stage, victim: str, which: str) -> None:
    stage = push_stage
    if which == "edited":
        ticket = edited(ticket_for(stage))
    else:
        ticket = ticket_for(stage, secret="not the deployment's")
    params = remote_decode(ticket) if victim == "prefill" else remote_prefill(ticket)
    since = time.monotonic()
    call = Call(stage, victim, stage.prompt(), params)
    stage.settle(
        "a forged push ticket",
        f"{which}, at {victim}",
        [call],
        [[]],
        since_s=since,
        bound_s=3.0,
        expect={"handoff_refused"},
    )


@pytest.mark.short_form("TCP-push")
def test_a_push_ticket_that_is_replayed_moves_nothing_again(push_stage: Stage) -> None:
    stage = push_stage
    prompt, other = stage.prompt(), stage.prompt()
    right, answer = stage.right_answer(prompt), stage.right_answer(other)
    ticket = ticket_for(stage)
    calls = [
        Call(stage, "decode", prompt, remote_prefill(ticket)),
        Call(stage, "prefill", prompt, remote_decode(ticket)),
    ]
    for call in calls:
        call.join(60.0)
    assert [call.end for call in calls] == ["finished", "finished"]
    assert calls[0].tokens == right
    bytes_before, since = stage.kv_bytes(), time.monotonic()
    again = [
        Call(stage, "decode", other, remote_prefill(ticket)),
        Call(stage, "prefill", other, remote_decode(ticket)),
    ]
    stage.settle(
        "a replayed push ticket",
        "-",
        again,
        [answer, answer[:1]],
        since_s=since,
        bound_s=LEASE_S + FENCED_S + RECOVERY_S,
        expect=ANY_END,
    )
    assert stage.kv_bytes() == bytes_before, "a ticket was good for two transfers"


@pytest.mark.short_form("TCP-pull")
def test_garbage_on_the_side_channel_disturbs_nobody(stage: Stage) -> None:
    endpoint = stage.deployment.info("prefill")["engine"]["endpoints"][0]
    address = (endpoint["host"], endpoint["port"])
    prompts, right = stage.prompts(4)
    before = num_faults(stage)
    since = time.monotonic()
    streams: list[Stream] = [stage.stream(prompt) for prompt in prompts]
    magic = b"pdserve" + bytes([PROTOCOL])
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(4096),
        magic + os.urandom(32) + (1 << 30).to_bytes(4, "big") + os.urandom(64),
        magic + os.urandom(32) + (64).to_bytes(4, "big") + os.urandom(32 + 64),
        magic[:4],
    ):
        with socket.create_connection(address, timeout=5) as sock:
            sock.sendall(data)
    stage.settle(
        "malformed or unauthenticated frame on the side channel",
        "amid 4 requests",
        streams,
        right,
        since_s=since,
        bound_s=RECOVERY_S,
    )
    assert num_faults(stage) >= before + 3
    again = stage.prompt()
    stream = stage.stream(again)
    stream.join(60)
    assert stream.tokens == stage.right_answer(again)


def num_faults(stage: Stage) -> float:
    """Frames that P has refused."""
    return sum(
        value
        for series, value in stage.deployment.metrics("prefill").items()
        if series.startswith("pdserve_kv_transfer_faults_total")
    )


@pytest.mark.parametrize(
    "kv_connector",
    [
        "nixl",
        pytest.param(
            "ucx",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("ucxx") is None, reason="pdserve[ucx] is not here"
            ),
        ),
    ],
)
def test_a_bit_flips_in_a_leased_block(
    kv_connector: str, model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    flip = tmp_path / "flip"
    stage = FlippableStage(tmp_path, model_of("llama"), None, "pull", kv_connector=kv_connector)
    stage.flip_file = flip
    try:
        stage.start()
        prompt = stage.prompt()
        right = stage.right_answer(prompt)
        handoff = leased(stage, prompt)
        time.sleep(0.3)  # the digests are taken
        since = time.monotonic()
        flip.write_text(str(handoff["remote_block_ids"][-3]))
        wait_until(lambda: not flip.exists(), 30.0)
        tokens, failures = read_late(stage, prompt, handoff)
        assert tokens in (right, None)
        assert failures > 0, "the flipped bit was not noticed"
        stage.settle(
            "a bit flips, a block is swapped",
            "before",
            [],
            [],
            since_s=since,
            bound_s=LEASE_S + RECOVERY_S,
            expect=set(),
        )
        found = stage.deployment.metric(
            "decode", 'pdserve_kv_transfer_failures_total{reason="digest"}'
        )
        assert found > 0
    finally:
        stage.deployment.end()


class FlippableStage(Stage):
    """Its prefill engine runs a connector in whose memory a bit can flip."""

    flip_file: Path

    def environment(self, name: str) -> dict[str, str]:
        """With the plugin, on P."""
        if name != "prefill":
            return super().environment(name)
        return {
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).parent / "plugin"), os.environ.get("PYTHONPATH", "")]
            ),
            "FLIP_FILE": str(self.flip_file),
            "FLIPPED": super().connector(name),
        }

    def connector(self, name: str) -> str:
        """The plugin, on P."""
        return "flipped" if name == "prefill" else super().connector(name)
