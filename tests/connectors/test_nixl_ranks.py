"""Engines of several ranks over NIXL: rank by rank, between processes, and when one is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.connectors.base import KVLayout
from pdserve.connectors.conformance.engines import prompt_of
from pdserve.connectors.handover.instructions import Instructions
from pdserve.connectors.nixl import NixlConnector, mover
from pdserve.connectors.nixl.agent import NixlAgent
from pdserve.wire.transfer import LeaseEnd, LoadFailure
from tests.connectors.engines import Engine, RemoteRank, layout, until_still
from tests.connectors.making import making
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

pytestmark = pytest.mark.slow

PROMPT = prompt_of(40)
# 4 MiB per block: a READ over TCP takes long enough to be interrupted.
BIG = KVLayout(
    num_blocks=16,
    num_layers=32,
    num_planes=1,
    num_kv_heads=16,
    block_size=16,
    head_dim=128,
    dtype="float32",
    dtype_bytes=4,
)
BLOCKS = range(16)
BIG_PROMPT = prompt_of(16 * len(BLOCKS))
TCP = {"UCX_TLS": "tcp"}


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    """Makes engines of two ranks, here or with a process for each rank, and closes them."""

    def engine(engine_id: str, *, processes: dict[str, str] | None = None, **fields: Any) -> Engine:
        fields = {"num_ranks": 2} | fields
        if processes is not None:
            fields["make_rank"] = lambda context: RemoteRank(context, processes)
        return Engine(NixlConnector(), engine_id, **fields)

    with making(engine) as make:
        yield make


def begin(d: Engine, p: Engine, prompt: list[int], blocks: Sequence[int], name: str) -> None:
    """Let D begin to load a prompt into the same blocks that P has it in."""
    d.load(d.queue(prompt, p.prefill(prompt, blocks), name), blocks)


def test_each_rank_of_d_gets_the_blocks_of_the_same_rank_of_p(make: Callable[..., Engine]) -> None:
    p, d = make("P", processes={}), make("D", processes={})
    d.load(d.queue(PROMPT, p.prefill(PROMPT, [7, 2, 3]), "r"), [4, 5, 6])
    d.until(lambda: d.received)
    assert d.holds([4, 5, 6], [7, 2, 3])
    assert d.received[0].num_bytes == 3 * d.block_bytes
    p.until(lambda: p.settled)
    assert [s.end for s in p.settled] == [LeaseEnd.READ]
    said = [rank for rank, report in p.said if report.settled]
    assert sorted(said) == [0, 1]  # each had a lease of its own


def test_a_rank_of_p_killed_in_mid_read_fails_the_load_once_every_rank_of_d_has_reported(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    p, d = make("P", processes=TCP, shape=BIG), make("D", shape=BIG)
    begin(d, p, PROMPT, [1, 2, 3], "meets")
    d.until(lambda: d.received)
    name = stop_rank_in_mid_read(p, d, rank=1)
    d.received.clear()
    d.said.clear()
    d.until(lambda: any(report.received for _, report in d.said))
    d.step()
    assert not d.failed  # rank 1 may still write into its share of the blocks
    assert not d.received
    p.ranks[1].kill()
    d.until(lambda: d.failed)
    assert [(rank, len(report.received)) for rank, report in d.said] == [(0, 1), (1, 0)]
    assert [(f.request_id, f.reason) for f in d.failed] == [(name, LoadFailure.PEER_LOST)]
    assert d.failed[0].detail.startswith("rank 1: ")
    assert "rank 0" not in d.failed[0].detail
    assert not d.received
    assert not d.quorum.num_open


def stop_rank_in_mid_read(p: Engine, d: Engine, *, rank: int) -> str:
    """Load until one rank of P is stopped with some of its bytes at D; return the request."""
    kv, pid = d.ranks[rank].kv, p.ranks[rank].process.pid
    for attempt in range(20):
        kv.zero_()
        begin(d, p, BIG_PROMPT, BLOCKS, f"r{attempt}")
        wait_until(lambda: kv[:, 0, 0, 0, 0, 0].any())
        os.kill(pid, signal.SIGSTOP)
        until_still(kv)  # what is in the sockets lands
        if not kv[:, -1, -1, -1, -1, -1].all():
            return f"r{attempt}"
        os.kill(pid, signal.SIGCONT)
        d.until(lambda n=attempt + 2: len(d.received) == n)  # type: ignore[misc]
    raise AssertionError("every read was over before the rank could be stopped")


def test_a_handoff_with_swapped_endpoints_is_refused_and_nothing_is_written(
    make: Callable[..., Engine],
) -> None:
    p, d = make("P"), make("D")
    handoff = p.prefill(PROMPT, [1, 2, 3])
    swapped = msgspec.structs.replace(handoff, endpoints=handoff.endpoints[::-1])
    d.fill(range(32), seed=9)
    d.load(d.queue(PROMPT, swapped, "swapped"), [4, 5, 6])
    d.until(lambda: d.failed)
    assert [f.reason for f in d.failed] == [LoadFailure.INCOMPATIBLE]
    # Whichever rank hears first fails the load; the other may be called off before its answer.
    refusals = (
        "rank 0 of D wants rank 0 of P, this is its rank 1",
        "rank 1 of D wants rank 1 of P, this is its rank 0",
    )
    assert any(refusal in d.failed[0].detail for refusal in refusals)
    assert d.holds(range(32), range(32), seed=9)  # nothing was written
    d.load(d.queue(PROMPT, handoff, "right"), [4, 5, 6])
    d.until(lambda: d.received)
    assert d.holds([4, 5, 6], [1, 2, 3])


def test_a_rank_that_alone_has_lost_its_lease_fails_the_load_of_all(
    make: Callable[..., Engine],
) -> None:
    p, d = make("P"), make("D")
    handoff = p.prefill(PROMPT, [1, 2, 3])
    ends = Instructions(ends=[handoff.nonce])
    p.ranks[1].post(ends.to_metadata())
    d.load(d.queue(PROMPT, handoff, "r"), [4, 5, 6])
    d.until(lambda: d.failed)
    assert [f.reason for f in d.failed] == [LoadFailure.LEASE_LOST]
    assert not d.received
    p.until(lambda: p.settled)
    assert [s.end for s in p.settled] == [LeaseEnd.RELEASED]


def test_the_name_of_an_agent_says_whose_rank_it_is(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def agent(name: str, backends: Sequence[str], **how: Any) -> NixlAgent:
        names.append(name)
        return NixlAgent(name, backends, **how)

    monkeypatch.setattr(mover, "NixlAgent", agent)
    make("P", num_ranks=3)
    host = socket.gethostname()
    assert [name.rpartition("-")[0] for name in names] == [f"both-{host}-{i}" for i in range(3)]


def test_ranks_take_the_ports_that_follow_the_configured_one(make: Callable[..., Engine]) -> None:
    port = first_of_free_ports(2)
    p = make("P", port=port, shape=layout(num_blocks=1))
    assert [rank.endpoint.port for rank in p.ranks] == [port, port + 1]


def first_of_free_ports(number: int) -> int:
    """The first of so many neighbouring ports that are free now."""
    for port in range(20_000, 30_000, number):
        with contextlib.ExitStack() as held:
            try:
                for each in range(port, port + number):
                    held.enter_context(socket.create_server(("127.0.0.1", each)))
            except OSError:
                continue
            return port
    raise AssertionError("no free ports")
