"""The lease table against a model, and its rules one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdserve.connectors.pull.lease import LeaseTable, Verdict
from pdserve.errors import InternalError
from pdserve.wire.ids import RequestId
from pdserve.wire.transfer import LeaseEnd, Settled

LEASE_S = 6.0
R1 = RequestId("r1")


def table_with_a_lease() -> LeaseTable:
    table = LeaseTable(LEASE_S)
    table.grant("n", R1, 0.0)
    return table


def test_a_confirmed_lease_settles_as_read_and_is_confirmed_once() -> None:
    table = table_with_a_lease()
    table.begin_read("n", "d", 1.0, until_s=10.0)
    assert table.confirm("n", "d", 2.0) is Verdict.VALID
    assert table.take_settled() == [Settled(request_id=R1, end=LeaseEnd.READ, nonce="n")]
    assert table.confirm("n", "d", 2.0) is Verdict.LOST
    assert table.take_settled() == []


def test_a_lease_without_heartbeats_expires() -> None:
    table = table_with_a_lease()
    table.expire(LEASE_S - 0.01)
    assert table.take_settled() == []
    table.expire(LEASE_S)
    assert table.take_settled() == [Settled(request_id=R1, end=LeaseEnd.EXPIRED, nonce="n")]


def test_a_heartbeat_renews_and_one_that_is_late_does_not() -> None:
    table = table_with_a_lease()
    table.heartbeat(["n", "unknown"], 5.0)
    table.expire(LEASE_S + 1)
    assert len(table) == 1
    table.heartbeat(["n"], 5.0 + LEASE_S)
    table.expire(5.0 + LEASE_S)
    assert len(table) == 0


def test_a_read_that_ends_after_expiry_is_lost_even_before_anybody_noticed_the_expiry() -> None:
    table = table_with_a_lease()
    assert table.confirm("n", "d", LEASE_S) is Verdict.LOST
    table.expire(LEASE_S)
    assert table.take_settled() == [Settled(request_id=R1, end=LeaseEnd.EXPIRED, nonce="n")]


def test_a_release_waits_for_the_reader() -> None:
    table = table_with_a_lease()
    table.begin_read("n", "d", 1.0, until_s=10.0)
    table.release("n")
    assert table.take_settled() == []
    table.end_read("n", "d")
    assert table.take_settled() == [Settled(request_id=R1, end=LeaseEnd.RELEASED, nonce="n")]


def test_a_reader_that_hangs_holds_a_release_off_until_its_deadline_only() -> None:
    table = table_with_a_lease()
    table.begin_read("n", "d", 1.0, until_s=10.0)
    table.release("n")
    table.expire(9.9)
    assert table.take_settled() == []
    assert table.due_s == 10.0
    table.expire(10.0)
    assert table.take_settled() == [Settled(request_id=R1, end=LeaseEnd.RELEASED, nonce="n")]


def test_a_second_reader_holds_off_the_settling_but_gets_no_confirmation() -> None:
    table = table_with_a_lease()
    for reader in ("d1", "d2"):
        table.begin_read("n", reader, 1.0, until_s=10.0)
    assert table.confirm("n", "d1", 2.0) is Verdict.VALID
    assert table.take_settled() == []
    assert table.confirm("n", "d2", 2.0) is Verdict.LOST
    assert table.take_settled() == [Settled(request_id=R1, end=LeaseEnd.READ, nonce="n")]


def test_a_release_that_overtakes_its_grant_is_not_forgotten() -> None:
    table = LeaseTable(LEASE_S)
    table.release("n")
    assert table.confirm("n", "d", 0.0) is Verdict.UNKNOWN
    table.grant("n", R1, 0.0)
    assert table.take_settled() == [Settled(request_id=R1, end=LeaseEnd.RELEASED, nonce="n")]


def test_a_nonce_is_granted_once() -> None:
    table = table_with_a_lease()
    with pytest.raises(InternalError, match="granted twice"):
        table.grant("n", R1, 0.0)
    table.release("n")
    with pytest.raises(InternalError, match="granted twice"):
        table.grant("n", R1, 0.0)


def test_nothing_is_due_when_there_is_no_lease() -> None:
    table = table_with_a_lease()
    assert table.due_s == LEASE_S
    table.release("n")
    table.expire(LEASE_S)
    assert table.due_s == math.inf


@dataclass
class Model:
    """One lease as the rules of its docstring say, kept in the most naive way."""

    expires_s: float
    end: LeaseEnd | None = None
    readers: dict[str, float] = field(default_factory=dict)
    is_settled: bool = False

    def is_live(self, now_s: float) -> bool:
        return self.end is None and now_s < self.expires_s

    def settle(self) -> None:
        self.is_settled = self.is_settled or (self.end is not None and not self.readers)


NONCES = st.sampled_from(["n1", "n2", "n3"])
READERS = st.sampled_from(["d1", "d2"])


class LeaseMachine(RuleBasedStateMachine):
    """Three nonces that collide, two readers, and a clock that jumps."""

    @initialize()
    def start(self) -> None:
        self.table = LeaseTable(LEASE_S)
        self.now_s = 0.0
        self.model: dict[str, Model] = {}
        self.early: set[str] = set()
        self.settled: list[Settled] = []

    @rule(by_s=st.sampled_from([0.5, 2.0, 5.5, 7.0]))
    def let_time_pass(self, by_s: float) -> None:
        self.now_s += by_s

    @rule(nonce=NONCES)
    def grant(self, nonce: str) -> None:
        if nonce in self.model:
            with pytest.raises(InternalError):
                self.table.grant(nonce, RequestId(nonce), self.now_s)
            return
        self.table.grant(nonce, RequestId(nonce), self.now_s)
        lease = self.model[nonce] = Model(self.now_s + LEASE_S)
        if nonce in self.early:
            lease.end = LeaseEnd.RELEASED
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
            assert verdict is Verdict.UNKNOWN
            return
        lease.readers.pop(reader, None)
        live = lease.is_live(self.now_s)
        assert verdict is (Verdict.VALID if live else Verdict.LOST)
        if live:
            assert not lease.is_settled  # bytes of freed blocks are never confirmed
            lease.end = LeaseEnd.READ
        lease.settle()

    @rule(nonce=NONCES, end=st.sampled_from([LeaseEnd.RELEASED, LeaseEnd.ABORTED]))
    def release(self, nonce: str, end: LeaseEnd) -> None:
        self.table.release(nonce, end)
        lease = self.model.get(nonce)
        if lease is None:
            self.early.add(nonce)
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
    def expire_is_never_due_too_late(self) -> None:
        for lease in self.model.values():
            if not lease.is_settled:
                times = [*lease.readers.values(), *([] if lease.end else [lease.expires_s])]
                assert self.table.due_s <= min(times)


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
