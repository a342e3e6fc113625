"""What every pulling connector does, through both of its halves, with one rank and with two."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.connectors.memory import MemoryFactory
from pdserve.connectors.memory.exchange import Exchange
from pdserve.connectors.nixl import NixlFactory
from pdserve.connectors.registry import find, names
from pdserve.errors import ConfigError
from pdserve.wire.transfer import LeaseEnd, LoadFailure
from tests.connectors.engines import EMPTY_STEP, Engine, layout, prompt_of, signed_with

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdserve.connectors.base import ConnectorFactory

PROMPT = prompt_of(40)
MakeEngine = "Callable[..., Engine]"


@pytest.fixture(
    params=[("memory", 1), ("nixl", 1), ("memory", 2), ("nixl", 2)],
    ids=["memory", "nixl", "memory, two ranks", "nixl, two ranks"],
)
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    """Makes engines that can meet, and closes them."""
    exchange = Exchange()
    engines: list[Engine] = []
    name, num_ranks = request.param

    def make(engine_id: str, **arguments: Any) -> Engine:
        factory: ConnectorFactory = MemoryFactory(exchange) if name == "memory" else NixlFactory()
        engine = Engine(factory, engine_id, num_ranks=num_ranks, **arguments)
        engines.append(engine)
        return engine

    threads = threading.active_count()
    yield make
    for engine in engines:
        engine.close()
    assert threading.active_count() == threads


def test_the_blocks_arrive_byte_for_byte_and_the_lease_settles_as_read(
    make: Callable[..., Engine],
) -> None:
    p, d = make("P"), make("D")
    handoff = p.prefill(PROMPT, [7, 2, 3])
    request = d.queue(PROMPT, handoff, "r")
    d.fill(range(32), seed=9)
    d.load(request, [4, 5, 6, 20])
    d.until(lambda: d.received)
    assert d.holds([4, 5, 6], [7, 2, 3])
    others = [b for b in range(32) if b not in (4, 5, 6)]
    assert d.holds(others, others, seed=9)  # nothing else was written
    assert d.received[0].num_bytes == 3 * d.block_bytes
    p.until(lambda: p.settled)
    assert [(s.request_id, s.end) for s in p.settled] == [(handoff.request_id, LeaseEnd.READ)]


def test_what_d_has_already_is_not_moved(make: Callable[..., Engine]) -> None:
    p, d = make("P"), make("D")
    request = d.queue(PROMPT, p.prefill(PROMPT, [7, 2, 3]), "r")
    d.fill([4], seed=9)
    d.load(request, [4, 5, 6], num_computed=16)
    d.until(lambda: d.received)
    assert d.holds([4], [4], seed=9)
    assert d.holds([5, 6], [2, 3])
    assert d.received[0].num_bytes == 2 * d.block_bytes


def test_a_lease_nobody_reads_expires_and_a_late_read_is_refused(
    make: Callable[..., Engine],
) -> None:
    p, d = make("P", lease_s=0.05), make("D")
    handoff = p.prefill(PROMPT, [1, 2, 3])
    p.until(lambda: p.settled)
    assert [s.end for s in p.settled] == [LeaseEnd.EXPIRED]
    p.fill([1, 2, 3], seed=5)  # the blocks have another owner now
    d.load(d.queue(PROMPT, handoff, "r"), [4, 5, 6])
    d.until(lambda: d.failed)
    assert [f.reason for f in d.failed] == [LoadFailure.LEASE_LOST]
    assert not d.received
    p.step()
    assert len(p.settled) == 1


def test_heartbeats_keep_a_lease_alive_while_its_request_waits(
    make: Callable[..., Engine],
) -> None:
    p, d = make("P", lease_s=0.5), make("D")
    request = d.queue(PROMPT, p.prefill(PROMPT, [1, 2, 3]), "r")
    for _ in range(16):
        d.news.wait(0.05)
        d.step()
        p.step()
    assert not p.settled
    d.load(request, [4, 5, 6])
    d.until(lambda: d.received)


def test_a_release_by_the_owner_frees_the_blocks_at_once(make: Callable[..., Engine]) -> None:
    p = make("P")
    handoff = p.prefill(PROMPT, [1, 2, 3])
    p.scheduler.release_lease(handoff.nonce)
    assert p.scheduler.has_staged()
    p.step()
    p.until(lambda: p.settled, timeout_s=1.0)
    assert [s.end for s in p.settled] == [LeaseEnd.RELEASED]


def test_an_abort_before_the_load_releases_the_lease_at_its_owner(
    make: Callable[..., Engine],
) -> None:
    p, d = make("P"), make("D")
    request = d.queue(PROMPT, p.prefill(PROMPT, [1, 2, 3]), "r")
    d.scheduler.request_aborted(request)
    d.step()
    p.until(lambda: p.settled, timeout_s=2.0)
    assert [s.end for s in p.settled] == [LeaseEnd.RELEASED]
    assert not d.received
    assert not d.failed


def test_an_abort_during_the_load_is_settled_by_exactly_one_report(
    make: Callable[..., Engine],
) -> None:
    p, d = make("P"), make("D")
    request = d.queue(PROMPT, p.prefill(PROMPT, [1, 2, 3]), "r")
    match = d.scheduler.get_num_new_matched_tokens(request, 0)
    assert match is not None
    d.scheduler.update_state_after_alloc(request, [4, 5, 6], match.num_tokens)
    d.scheduler.request_aborted(request)
    d.step()
    d.until(lambda: d.failed or d.received)
    assert [f.reason for f in d.failed] == [LoadFailure.ABORTED]
    p.until(lambda: p.settled, timeout_s=2.0)
    assert [s.end for s in p.settled] == [LeaseEnd.RELEASED]
    d.step()
    assert len(d.failed) + len(d.received) == 1


def test_a_handoff_of_an_earlier_life_is_never_loaded(make: Callable[..., Engine]) -> None:
    p, d = make("P"), make("D")
    stale = signed_with(p.prefill(PROMPT, [1, 2, 3]), incarnation="an earlier life")
    d.load(d.queue(PROMPT, stale, "r"), [4, 5, 6])
    d.until(lambda: d.failed)
    assert [f.reason for f in d.failed] == [LoadFailure.LEASE_LOST]
    assert "an earlier life" in d.failed[0].detail


def test_giving_back_a_handoff_of_an_earlier_life_ends_no_lease_of_this_one(
    make: Callable[..., Engine],
) -> None:
    p, d = make("P"), make("D")
    handoff = p.prefill(PROMPT, [1, 2, 3])
    stale = signed_with(handoff, incarnation="an earlier life")
    d.scheduler.request_aborted(d.queue(PROMPT, stale, "stale"))
    d.step()
    d.load(d.queue(PROMPT, handoff, "r"), [4, 5, 6])
    d.until(lambda: d.received)
    p.until(lambda: p.settled)
    assert [s.end for s in p.settled] == [LeaseEnd.READ]


def test_a_peer_with_another_layout_is_refused_and_both_values_are_named(
    make: Callable[..., Engine],
) -> None:
    p, d = make("P", shape=layout(dtype="bfloat16")), make("D")
    lying = signed_with(p.prefill(PROMPT, [1, 2, 3]), layout_digest=d.context.layout_digest)
    d.load(d.queue(PROMPT, lying, "r"), [4, 5, 6])
    d.until(lambda: d.failed)
    assert [f.reason for f in d.failed] == [LoadFailure.INCOMPATIBLE]
    assert "bfloat16" in d.failed[0].detail
    assert "float32" in d.failed[0].detail


def test_a_peer_that_is_not_there_is_lost_within_a_second(make: Callable[..., Engine]) -> None:
    p, d = make("P"), make("D")
    handoff = p.prefill(PROMPT, [1, 2, 3])
    p.close()
    d.load(d.queue(PROMPT, handoff, "r"), [4, 5, 6])
    d.until(lambda: d.failed, timeout_s=1.0)
    assert [f.reason for f in d.failed] == [LoadFailure.PEER_LOST]


def test_two_ds_read_from_one_p_at_the_same_time(make: Callable[..., Engine]) -> None:
    p, readers = make("P"), [make("D1"), make("D2")]
    for turn, d in enumerate(readers):
        source = [turn * 3 + i for i in range(3)]
        d.load(d.queue(PROMPT, p.prefill(PROMPT, source), f"r{turn}"), [4, 5, 6])
    for turn, d in enumerate(readers):
        d.until(lambda d=d: d.received)
        assert d.holds([4, 5, 6], [turn * 3 + i for i in range(3)])
    p.until(lambda: len(p.settled) == 2)


def test_of_two_ds_that_read_one_lease_at_most_one_is_confirmed(
    make: Callable[..., Engine],
) -> None:
    p, readers = make("P"), [make("D1"), make("D2")]
    handoff = p.prefill(PROMPT, [1, 2, 3])
    for d in readers:
        d.load(d.queue(PROMPT, handoff, "r"), [4, 5, 6])
    for d in readers:
        d.until(lambda d=d: d.received or d.failed)
    num_confirmed = sum(len(d.received) for d in readers)
    # With two ranks each D may have come first on one of them: then none has all of it.
    assert num_confirmed == 1 or (num_confirmed == 0 and p.context.num_ranks == 2)
    assert {f.reason for d in readers for f in d.failed} == {LoadFailure.LEASE_LOST}
    p.until(lambda: p.settled)
    assert [s.end for s in p.settled] == [LeaseEnd.READ]


def test_many_loads_at_once_all_arrive_and_each_is_reported_once(
    make: Callable[..., Engine],
) -> None:
    shape = layout(num_blocks=192)
    p, d = make("P", shape=shape), make("D", shape=shape)
    jobs = {
        f"r{i}": ([i * 3, i * 3 + 1, i * 3 + 2], [190 - i * 3 - j for j in range(3)])
        for i in range(60)
    }
    for name, (source, target) in jobs.items():
        d.load(d.queue(PROMPT, p.prefill(PROMPT, source), name), target)
    d.until(lambda: len(d.received) == len(jobs))
    assert sorted(r.request_id for r in d.received) == sorted(jobs)
    for source, target in jobs.values():
        assert d.holds(target, source)
    p.until(lambda: len(p.settled) == len(jobs))
    assert {s.end for s in p.settled} == {LeaseEnd.READ}
    assert not d.step()
    assert not p.step()


def test_neighbouring_blocks_need_one_descriptor(make: Callable[..., Engine]) -> None:
    p, d = make("P"), make("D")
    prompt = prompt_of(16 * 12)
    d.load(d.queue(prompt, p.prefill(prompt, range(12)), "r"), range(20, 32))
    d.until(lambda: d.received)
    assert d.holds(range(20, 32), range(12))
    # In one process nothing is posted.
    assert d.received[0].num_descriptors / d.context.num_ranks in (1, 12)


def test_the_engine_is_woken_when_there_is_news(make: Callable[..., Engine]) -> None:
    p, d = make("P"), make("D")
    request = d.queue(PROMPT, p.prefill(PROMPT, [1, 2, 3]), "r")
    p.step()
    p.news.clear()
    match = d.scheduler.get_num_new_matched_tokens(request, 0)
    assert match is not None
    d.scheduler.update_state_after_alloc(request, [4, 5, 6], match.num_tokens)
    metadata = d.scheduler.build_connector_meta(EMPTY_STEP)
    assert metadata is not None
    waiting = list(d.ranks)
    for rank in waiting:
        rank.start_load_kv(metadata)
    while waiting := [rank for rank in waiting if not rank.get_finished().received]:
        assert d.news.wait(5.0)
        d.news.clear()
    for rank in p.ranks:
        while not rank.get_finished().settled:
            assert p.news.wait(5.0)
            p.news.clear()


def test_close_may_come_twice_and_leaves_no_descriptor_open(make: Callable[..., Engine]) -> None:
    make("warm").close()  # libraries keep a few of their own after their first use
    before = len(os.listdir("/proc/self/fd"))
    segments = set(os.listdir("/dev/shm"))
    p, d = make("P"), make("D")
    d.load(d.queue(PROMPT, p.prefill(PROMPT, [1, 2, 3]), "r"), [4, 5, 6])
    d.until(lambda: d.received)
    for engine in (d, p):
        engine.close()
        engine.close()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert set(os.listdir("/dev/shm")) <= segments


def test_the_registry_knows_its_connectors_and_names_them_when_asked_for_another() -> None:
    assert {"null", "memory", "nixl"} <= set(names())
    with pytest.raises(ConfigError, match="memory, nixl, null"):
        find("nxil")


def test_the_null_connector_leases_nothing_and_takes_no_handoff() -> None:
    p = Engine("memory", "P")
    handoff = p.prefill(PROMPT, [1, 2, 3])
    factory = find("null")
    half = factory.scheduler(p.context, [])
    from tests.connectors.engines import FakeRequest

    request = FakeRequest("r", PROMPT, output_token_ids=[7], remote_decode=True, handoff=handoff)
    assert half.check_handoff(request) is not None
    assert half.request_finished(request, [1, 2, 3]) is None
    assert half.build_connector_meta(EMPTY_STEP) is None
    worker = factory.worker(p.context, lambda: None)
    assert worker.endpoint is None
    assert not worker.get_finished()
    worker.close(1.0)
