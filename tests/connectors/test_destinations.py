"""What P knows of the memory it writes to, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import cast

import pytest

from pdserve.connectors.transfer.protocol import Hello, Region
from pdserve.connectors.transfer.seams import Mover, Remote, WarmUp
from pdserve.connectors.transfer.writing import Destination, Destinations

POOL = Region(address=4096, stride_bytes=4096, num_units=4, memory="DRAM", device=0)


class ScriptedMover:
    """Warms up when it is told to."""

    def __init__(self) -> None:
        self.forgotten: list[bytes] = []
        self.abandoned: list[Hashable] = []
        self.warming: list[Callable[[str | None], None]] = []
        self.num_warm_ups = 0

    def meet(self, metadata: bytes, pool: Region) -> Remote:
        return Remote(metadata, pool)

    def forget(self, remote: Remote) -> None:
        self.forgotten.append(remote.metadata)

    def abandon(self, tag: Hashable) -> int:
        self.abandoned.append(tag)
        return 0

    def warm_up(self, warm_up: WarmUp) -> None:
        self.num_warm_ups += 1
        self.warming.append(warm_up.on_settled)

    def settle(self, failure: str | None = None) -> None:
        self.warming.pop(0)(failure)


class Bench:
    """A rank of D, seen over several connections."""

    def __init__(self) -> None:
        self.mover = ScriptedMover()
        self.all = Destinations(cast(Mover, self.mover))
        self.told: list[tuple[str, str | None]] = []

    def use(self, destination: Destination, user: str) -> None:
        self.all.use(destination, user, lambda failure: self.told.append((user, failure)))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def connection(metadata: bytes = b"agent") -> Destination:
    class Greeting:
        agent_metadata = metadata
        pool = POOL

    return Destination(cast(Hello, Greeting()), lambda message: None)


def test_only_the_first_push_over_a_connection_waits_for_the_wiring_up(bench):
    d = connection()
    bench.use(d, "first")
    bench.mover.settle()
    bench.all.let_go("first")
    bench.use(d, "second")
    assert bench.told == [("first", None), ("second", None)]
    assert bench.mover.num_warm_ups == 1
    assert not bench.mover.forgotten


def test_the_memory_is_forgotten_with_the_last_connection_if_nothing_is_written(bench):
    first, second = connection(), connection()
    for d in (first, second):
        bench.use(d, "push")
        bench.all.let_go("push")
    bench.mover.settle()
    bench.all.lost(first)
    assert not bench.mover.forgotten
    bench.all.lost(second)
    assert bench.mover.forgotten == [b"agent"]


def test_what_is_written_to_outlives_its_connection(bench):
    d = connection()
    bench.use(d, "push")
    bench.mover.settle()
    bench.all.lost(d)
    assert not bench.mover.forgotten
    bench.all.let_go("push")
    assert bench.mover.forgotten == [b"agent"]


def test_a_wiring_up_that_nobody_waits_for_is_given_up_and_then_forgotten(bench):
    d = connection()
    bench.use(d, "push")
    bench.all.let_go("push")
    assert not bench.mover.abandoned
    bench.all.lost(d)
    assert bench.mover.abandoned
    bench.mover.settle("given up")
    assert bench.told == []
    assert bench.mover.forgotten == [b"agent"]


def test_a_push_that_ends_because_the_wiring_up_failed_lets_go_of_a_lost_connection(bench):
    d = connection()

    def let_go(failure: str | None) -> None:
        bench.all.let_go("push")

    bench.all.use(d, "push", let_go)
    bench.all.lost(d)
    bench.mover.settle("no route")
    assert bench.mover.forgotten == [b"agent"]


def test_after_a_failure_the_next_push_wires_up_again(bench):
    d = connection()
    bench.use(d, "first")
    bench.mover.settle("no route")
    bench.use(d, "second")
    bench.mover.settle()
    assert bench.told == [("first", "no route"), ("second", None)]


def test_the_memory_of_an_agent_that_was_made_again_is_let_go_by_whoever_wrote_to_it(bench):
    before, after = connection(b"agent"), connection(b"made again")
    bench.use(before, "push")
    bench.mover.settle()
    bench.all.lost(before)
    bench.use(after, "other push")
    bench.mover.settle()
    bench.all.let_go("push")
    assert bench.mover.forgotten == [b"agent"]
