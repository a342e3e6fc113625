"""The lease table against a model, and its rules one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdserve.connectors.handover.lease import LeaseTable, ReadVerdict
from pdserve.wire.ids import BlockId, RequestId
from pdserve.wire.transfer import LeaseEnd, Settled
from tests.stateful.reaching import in_ci

LEASE_S = 6.0
R1 = RequestId("r1")


def blocks(*ids: int) -> list[BlockId]:
    return [BlockId(i) for i in ids]


def table_with_a_lease() -> LeaseTable:
    table = LeaseTable(LEASE_S)
    table.grant("n", R1, 0.0)
    return table


def test_a_heartbeat_renews_and_one_that_is_late_does_not() -> None:
    table = table_with_a_lease()
    table.heartbeat(["n", "unknown"], 5.0)
    table.expire(LEASE_S + 1)
    assert len(table) == 1
    table.heartbeat(["n"], 5.0 + LEASE_S)
    table.expire(5.0 + LEASE_S)
    assert len(table) == 0


def test_a_release_waits_for_the_reader() -> None:
    table = table_with_a_lease()
    table.begin_read("n", "d", 1.0, until_s=10.0)
    table.release("n", 2.0)
    assert table.take_settled() == []
    table.end_read("n", "d")
    assert table.take_settled() == [Settled(request_id=R1, end=LeaseEnd.RELEASED, nonce="n")]


def test_a_reader_that_hangs_holds_a_release_off_until_its_deadline_only() -> None:
    table = table_with_a_lease()
    table.begin_read("n", "d", 1.0, until_s=10.0)
    table.release("n", 2.0)
    table.expire(9.9)
    assert table.take_settled() == []
    assert table.due_s == 10.0
    table.expire(10.0)
    assert table.take_settled() == [Settled(request_id=R1, end=LeaseEnd.RELEASED, nonce="n")]


def test_several_readers_are_confirmed_while_the_lease_lives_and_hold_off_its_settling() -> None:
    table = table_with_a_lease()
    for reader in ("d1", "d2", "d3"):
        table.begin_read("n", reader, 1.0, until_s=10.0)
    assert table.confirm("n", "d1", 2.0) is ReadVerdict.VALID
    assert table.confirm("n", "d2", 2.0) is ReadVerdict.VALID
    table.release("n", 2.0, LeaseEnd.READ)
    assert table.take_settled() == []
    assert table.confirm("n", "d3", 2.0) is ReadVerdict.LOST
    assert table.take_settled() == [Settled(request_id=R1, end=LeaseEnd.READ, nonce="n")]


def test_a_writer_holds_off_the_settling_however_long_it_takes() -> None:
    table = LeaseTable(LEASE_S)
    table.begin_write(R1, "chunk 1")  # before there is a lease
    table.grant("n", R1, 0.0)
    table.begin_write(R1, "chunk 2")
    table.expire(100 * LEASE_S)
    table.end_write(R1, "chunk 1")
    table.end_write(R1, "chunk 1")
    assert table.take_settled() == []
    table.end_write(R1, "chunk 2")
    assert table.take_settled() == [Settled(request_id=R1, end=LeaseEnd.EXPIRED, nonce="n")]


def test_a_nonce_is_granted_once_and_again_changes_nothing() -> None:
    table = table_with_a_lease()
    assert not table.grant("n", R1, 3.0)
    table.expire(LEASE_S)
    assert [settled.end for settled in table.take_settled()] == [LeaseEnd.EXPIRED]
    assert not table.grant("n", R1, LEASE_S)
    assert table.confirm("n", "d", LEASE_S) is ReadVerdict.LOST
    assert len(table) == 0


def test_a_lease_that_is_over_is_known_as_such_for_its_time_and_never_valid_after_it() -> None:
    table = LeaseTable(LEASE_S, remembered_s=30.0)
    table.grant("n", R1, 0.0)
    table.release("n", 5.0)
    table.grant("m", RequestId("r2"), 34.9)
    table.release("m", 34.9)
    assert table.confirm("n", "d", 34.9) is ReadVerdict.LOST
    table.grant("k", RequestId("r3"), 35.0)
    table.release("k", 35.0)
    assert table.confirm("n", "d", 35.0) is ReadVerdict.UNKNOWN
    assert table.confirm("m", "d", 35.0) is ReadVerdict.LOST


def test_a_release_that_no_grant_follows_is_forgotten_after_its_time() -> None:
    table = LeaseTable(LEASE_S, remembered_s=30.0)
    table.release("n", 5.0)
    table.release("m", 35.0)
    table.grant("n", R1, 35.0)
    assert table.confirm("n", "d", 35.0) is ReadVerdict.VALID
    table.grant("m", RequestId("r2"), 35.0)
    assert table.confirm("m", "d", 35.0) is ReadVerdict.LOST


def test_nothing_is_due_when_there_is_no_lease() -> None:
    table = table_with_a_lease()
    assert table.due_s == LEASE_S
    table.release("n", 2.0)
    table.expire(LEASE_S)
    assert table.due_s == math.inf


@dataclass
class Model:
    """One lease as the rules of its docstring say, kept in the most naive way."""

    expires_s: float
    block: int
    generation: int
    end: LeaseEnd | None = None
    readers: dict[str, float] = field(default_factory=dict)
    writers: set[str] = field(default_factory=set)
    is_settled: bool = False

    def is_live(self, now_s: float) -> bool:
        return self.end is None and now_s < self.expires_s

    def settle(self) -> None:
        is_over = self.end is not None and not self.readers and not self.writers
        self.is_settled = self.is_settled or is_over


NONCES = st.sampled_from(["n1", "n2", "n3"])
READERS = st.sampled_from(["d1", "d2"])


class LeaseMachine(RuleBasedStateMachine):
    """Three nonces that collide, two readers, writers, one block, and a clock that jumps.

    Each nonce is of a request of the same name.
    """

    @initialize()
    def start(self) -> None:
        self.table = LeaseTable(LEASE_S, remembered_s=math.inf)
        self.now_s = 0.0
        self.model: dict[str, Model] = {}
        self.early: dict[str, LeaseEnd] = {}
        self.writers: dict[str, set[str]] = {}
        self.generation = 1
        self.num_reused = 0
        self.settled: list[Settled] = []

    @rule(by_s=st.sampled_from([0.5, 2.0, 5.5, 7.0]))
    def let_time_pass(self, by_s: float) -> None:
        self.now_s += by_s

    @rule(nonce=NONCES, is_reused=st.booleans())
    def grant(self, nonce: str, is_reused: bool) -> None:
        self.generation += is_reused
        is_new = self.table.grant(
            nonce,
            RequestId(nonce),
            self.now_s,
            block_ids=blocks(0),
            generations=[self.generation],
        )
        assert is_new == (nonce not in self.model)
        if not is_new:
            return
        self._hand_out()
        lease = self._model_of(nonce)
        if nonce in self.early:
            lease.end = self.early[nonce]
        lease.settle()

    @rule()
    def hand_out(self) -> None:
        self.generation += 1
        self.table.hand_out(blocks(0), [self.generation])
        self._hand_out()

    def _hand_out(self) -> None:
        for lease in self.model.values():
            if lease.block == 0 and lease.generation < self.generation and lease.end is None:
                lease.end = LeaseEnd.ABORTED
                self.num_reused += 1
                lease.settle()

    def _model_of(self, nonce: str, block: int = 0) -> Model:
        lease = self.model[nonce] = Model(self.now_s + LEASE_S, block, self.generation)
        lease.writers = self.writers.setdefault(nonce, set())
        return lease

    @rule(nonce=NONCES, writer=READERS)
    def begin_write(self, nonce: str, writer: str) -> None:
        if nonce in self.model and self.model[nonce].is_settled:
            return  # its blocks are free: nobody writes from them
        self.table.begin_write(RequestId(nonce), writer)
        self.writers.setdefault(nonce, set()).add(writer)

    @rule(nonce=NONCES, writer=READERS)
    def end_write(self, nonce: str, writer: str) -> None:
        self.table.end_write(RequestId(nonce), writer)
        self.writers.setdefault(nonce, set()).discard(writer)
        if nonce in self.model:
            self.model[nonce].settle()

    @rule(nonce=NONCES)
    def stop(self, nonce: str) -> None:
        self.table.stop(nonce, RequestId(nonce), self.now_s)
        lease = self.model.get(nonce) or self._model_of(nonce, block=-1)
        lease.end = lease.end or LeaseEnd.ABORTED
        lease.settle()

    @rule(nonces=st.lists(NONCES, max_size=3))
    def heartbeat(self, nonces: list[str]) -> None:
        self.table.heartbeat(nonces, self.now_s)
        for nonce in nonces:
            lease = self.model.get(nonce)
            if lease and lease.is_live(self.now_s):
                lease.expires_s = self.now_s + LEASE_S

    @rule(nonce=NONCES, reader=READERS, for_s=st.sampled_from([1.0, 9.0]))
    def begin_read(self, nonce: str, reader: str, for_s: float) -> None:
        self.table.begin_read(nonce, reader, self.now_s, until_s=self.now_s + for_s)
        lease = self.model.get(nonce)
        if lease and lease.is_live(self.now_s):
            lease.expires_s = self.now_s + LEASE_S
            lease.readers[reader] = self.now_s + for_s

    @rule(nonce=NONCES, reader=READERS)
    def end_read(self, nonce: str, reader: str) -> None:
        self.table.end_read(nonce, reader)
        lease = self.model.get(nonce)
        if lease:
            lease.readers.pop(reader, None)
            lease.settle()

    @rule(nonce=NONCES, reader=READERS)
    def confirm(self, nonce: str, reader: str) -> None:
        verdict = self.table.confirm(nonce, reader, self.now_s)
        lease = self.model.get(nonce)
        if lease is None:
            assert verdict is ReadVerdict.UNKNOWN
            return
        lease.readers.pop(reader, None)
        live = lease.is_live(self.now_s)
        assert verdict is (ReadVerdict.VALID if live else ReadVerdict.LOST)
        if live:
            assert not lease.is_settled  # bytes of freed blocks are never confirmed
        lease.settle()

    @rule(nonce=NONCES, end=st.sampled_from([LeaseEnd.READ, LeaseEnd.RELEASED]))
    def release(self, nonce: str, end: LeaseEnd) -> None:
        self.table.release(nonce, self.now_s, end)
        lease = self.model.get(nonce)
        if lease is None:
            self.early[nonce] = end
        else:
            lease.end = lease.end or end
            lease.settle()

    @rule()
    def expire(self) -> None:
        self.table.expire(self.now_s)
        for lease in self.model.values():
            lease.readers = {r: t for r, t in lease.readers.items() if t > self.now_s}
            if lease.end is None and lease.expires_s <= self.now_s:
                lease.end = LeaseEnd.EXPIRED
            lease.settle()

    @invariant()
    def each_lease_settles_once_and_as_it_ended(self) -> None:
        self.settled += self.table.take_settled()
        assert sorted((s.request_id, s.end.value) for s in self.settled) == sorted(
            (nonce, lease.end.value)
            for nonce, lease in self.model.items()
            if lease.is_settled and lease.end
        )
        open_leases = [lease for lease in self.model.values() if not lease.is_settled]
        assert len(self.table) == len(open_leases)

    @invariant()
    def every_reuse_of_a_leased_block_is_counted(self) -> None:
        assert self.table.num_reused == self.num_reused

    @invariant()
    def expire_is_never_due_too_late(self) -> None:
        for lease in self.model.values():
            if not lease.is_settled:
                times = [*lease.readers.values(), *([] if lease.end else [lease.expires_s])]
                assert self.table.due_s <= min(times, default=math.inf)


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = in_ci(75)
