"""The reading side alone: one thread, a clock that is moved by hand, an agent that is told
when a transfer ends. P is the real serving side, over real sockets, in the same reactor."""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from pdserve.connectors.digests import BlockDigests
from pdserve.connectors.handover.instructions import Grant, Load, Watch
from pdserve.connectors.nixl.agent import AgentError, Prepared, Transfer
from pdserve.connectors.nixl.lanes import Lanes
from pdserve.connectors.side_channel.channel import Listener, SideChannel
from pdserve.connectors.side_channel.reactor import Reactor
from pdserve.connectors.slicing import routes_to
from pdserve.connectors.transfer.machine import TransferMachine
from pdserve.connectors.transfer.peering import MAX_REST_S, BackOff
from pdserve.connectors.transfer.protocol import Refuse, RefuseReason, Region
from pdserve.connectors.transfer.seams import Direction, ExposedMemory, Seams, UnreachableError
from pdserve.connectors.transfer_thread.host import HostProcesses
from pdserve.connectors.transfer_thread.thread import PIECE_BYTES, BackgroundThread
from pdserve.observe.clock import ManualClock
from pdserve.wire.ids import BlockId, EngineId, RequestId, request_id_of
from pdserve.wire.transfer import Endpoint, EngineRef, Failed, LoadFailure, Received
from tests.connectors.engines import context, layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    import numpy.typing as npt

    from pdserve.connectors.base import ConnectorContext
    from pdserve.connectors.transfer.seams import PeerLink

SHAPE = layout()
NUM_TOKENS = 2 * SHAPE.block_size


class ScriptedAgent:
    """Moves nothing. `outcome` says whether READs that were posted are done once polled."""

    def __init__(self) -> None:
        self.outcome: bool | AgentError = True
        self.known: set[str] = set()
        self.met: list[str] = []
        self.refuses_to_prepare = False
        self.refuses_to_unprepare = False
        self.num_posted = 0

    def add_peer(self, metadata: bytes) -> str:
        if metadata.decode() in self.known:
            raise AgentError("NIXL add_remote_agent: nixlNotAllowedError")
        self.known.add(metadata.decode())
        self.met.append(metadata.decode())
        return metadata.decode()

    def prepare(self, region: Region, peer: str | None = None) -> Prepared:
        if peer is not None and self.refuses_to_prepare:
            raise AgentError("NIXL prep_xfer_dlist: nixlInvalidParamError")
        return Prepared(1)

    def unprepare(self, prepared: Prepared) -> None:
        if self.refuses_to_unprepare:
            raise AgentError("NIXL release_dlist_handle: nixlInvalidParamError")

    def remove_peer(self, peer: str) -> None:
        self.known.remove(peer)

    def read_once(
        self, local: Region, peer: str, remote: Region, num_bytes: int
    ) -> tuple[Transfer, bool]:
        return Transfer(0), True

    def post(
        self,
        direction: Direction,
        local: Prepared,
        local_units: npt.NDArray[np.int32],
        remote: Prepared,
        remote_units: npt.NDArray[np.int32],
    ) -> tuple[Transfer, bool]:
        self.num_posted += 1
        return Transfer(1), False

    def poll(self, transfer: Transfer) -> bool:
        if isinstance(self.outcome, AgentError):
            raise self.outcome
        return self.outcome

    def release(self, transfer: Transfer) -> None:
        return None

    def close(self) -> None:
        self.known.clear()


class MoverOver:
    """Lanes, and a target that there always is. See `Mover`."""

    def __init__(self, lanes: Lanes, target: Callable[[], ExposedMemory]) -> None:
        self._lanes, self._target = lanes, target

    @property
    def target(self) -> ExposedMemory:
        return self._target()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lanes, name)


class Pair:
    """P's serving side and D's reading side on one reactor."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.reactor = Reactor()
        self.agent = ScriptedAgent()
        self.listener = Listener("127.0.0.1", 0)
        self.metadata = b"agent-of-P"
        p, d = context("P"), context("D")
        self.kv = torch.zeros(
            *(SHAPE.num_blocks, SHAPE.num_layers, SHAPE.num_planes, SHAPE.num_kv_heads),
            *(SHAPE.block_size, SHAPE.head_dim),
        )
        pool = Region(self.kv.data_ptr(), SHAPE.block_bytes, SHAPE.num_blocks, "DRAM", 0)
        scratch = Region(0, 4096, 1, "DRAM", 0)
        self.lanes, self.background = (
            self.make_lanes(pool, scratch),
            BackgroundThread("digests", self.wake, self.clock, deque()),
        )
        route = routes_to(p.shape, p.shape, 0)[0]  # has the kernel compiled
        # P's memory is D's here: what "arrives" has the right digests.
        digests = BlockDigests(self.kv, p.shape, 0)
        digests.found(p.shape, route, [BlockId(0)], first_token=0, num_tokens=1)
        self.network = SideChannel(self.reactor, b"")

        def seams(context: ConnectorContext, target: Callable[[], bytes], lanes: Any) -> Seams:
            return Seams(
                context=context,
                clock=self.clock,
                connect=lambda endpoint, peer: self.network.connect(endpoint, peer),
                mover=MoverOver(lanes, lambda: ExposedMemory(target(), pool, scratch)),
                digests=digests,
                background=self.background,
                processes=HostProcesses(is_direct=True),
                piece_bytes=PIECE_BYTES,
                slices=deque(),
            )

        lanes_of_p = self.make_lanes(pool, scratch)
        self.server = TransferMachine(seams(p, lambda: self.metadata, lanes_of_p)).server
        self.network.listen(self.listener, self.server.accept)
        self.machine = TransferMachine(seams(d, lambda: b"agent-of-D", self.lanes))
        self.peers, self.loads = self.machine.peers, self.machine.loads
        self.owner = EngineRef(
            engine_id=EngineId("P"),
            incarnation=p.incarnation,
            endpoints=(self.listener.endpoint,),
            shape=p.shape,
        )
        self._num_loads = 0

    def make_lanes(self, pool: Region, scratch: Region) -> Lanes:
        return Lanes(
            num_lanes=1,
            make_agent=lambda number: self.agent,  # type: ignore[arg-type,return-value]
            pool=pool,
            scratch=scratch,
            wake=self.wake,
            clock=self.clock,
            quarantine_s=30.0,
        )

    def wake(self) -> None:
        self.reactor.wake()

    def away(self, name: str, where: Endpoint) -> EngineRef:
        """Another engine, which is not there or not one."""
        return msgspec.structs.replace(self.owner, engine_id=EngineId(name), endpoints=(where,))

    def load(self, owner: EngineRef | None = None, *, name: str = "") -> RequestId:
        """Queue a request and begin to load it."""
        self._num_loads += 1
        owner = owner or self.owner
        nonce, request_id = f"n{self._num_loads}", RequestId(name or f"r{self._num_loads}")
        blocks = [BlockId(1), BlockId(2)]
        self.server.grant(Grant(nonce, request_id, blocks, [self._num_loads] * 2, NUM_TOKENS))
        self.peers.watch(Watch(nonce, owner, 30.0))
        self.loads.begin(
            Load(self._num_loads, request_id, nonce, owner, blocks, blocks, 0, NUM_TOKENS)
        )
        return request_id

    def until(self, condition: Callable[[], object], *, timeout_s: float = 30.0) -> None:
        """Let both sides go on, without any time passing on their clock."""
        ends_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < ends_s, f"{self.received} {self.failed}"
            self.turn(0.005 if self.machine.due_s() > self.clock.now_s else 0)

    def turn(self, timeout_s: float) -> None:
        self.reactor.wait(timeout_s)
        self.background.deliver()
        self.lanes.deliver()
        self.server.tick()
        self.machine.tick()

    @property
    def received(self) -> list[Received]:
        return self.machine.facts.received

    @property
    def failed(self) -> list[Failed]:
        return self.machine.facts.failed

    @property
    def reasons(self) -> list[LoadFailure]:
        return [failed.reason for failed in self.failed]

    def close(self) -> None:
        self.peers.close()
        self.server.drop_all("closing")
        assert self.lanes.close(5.0)
        assert self.background.close(5.0)
        self.reactor.close()
        self.listener.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    both = Pair()
    yield both
    both.close()


def nowhere() -> Endpoint:
    """Where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        return Endpoint(host="127.0.0.1", port=gone.getsockname()[1])


def test_a_read_that_completes_later_is_received_once(pair: Pair) -> None:
    pair.agent.outcome = False
    pair.load()
    pair.until(lambda: pair.agent.num_posted)
    pair.agent.outcome = True
    pair.until(lambda: pair.received)
    assert not len(pair.loads)
    assert not pair.failed


def test_a_read_that_fails_before_the_side_channel_does_is_reported_once(pair: Pair) -> None:
    pair.agent.outcome = AgentError("nixlRemoteDisconnectError")
    pair.load()
    pair.until(lambda: pair.failed)
    assert pair.reasons == [LoadFailure.PEER_LOST]
    assert not len(pair.loads)
    pair.agent.outcome = True
    pair.load()
    pair.until(lambda: pair.received)
    assert len(pair.failed) == 1


def test_a_peer_out_of_reach_fails_loads_at_once_until_the_next_try_is_due(pair: Pair) -> None:
    away = pair.away("away", nowhere())
    pair.load(away)
    pair.until(lambda: pair.failed)
    pair.clock.advance(0.9)
    pair.load(away)
    pair.until(lambda: len(pair.failed) == 2)
    assert pair.reasons == [LoadFailure.PEER_LOST] * 2
    assert "next try in 0.1 s" in pair.failed[1].detail


def test_a_peer_that_is_mute_is_out_of_reach_after_the_handshake_timeout(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        where = Endpoint(host="127.0.0.1", port=mute.getsockname()[1])
        away = pair.away("mute", where)
        pair.load(away)
        pair.until(lambda: pair.machine.due_s() > pair.clock.now_s)
        assert not pair.failed
        # Whether it is connected by now is not for us to say, and the timeout begins with that.
        pair.until(lambda: pair.failed or pair.clock.advance(5.0))
        pair.load(away)
        pair.until(lambda: len(pair.failed) == 2)
    assert pair.reasons == [LoadFailure.HANDSHAKE] * 2


def test_a_peer_that_refuses_after_its_welcome_is_not_forgotten_under_a_read(pair: Pair) -> None:
    pair.agent.outcome = False
    pair.load()
    pair.until(lambda: pair.agent.num_posted)
    (client,) = pair.server._clients
    client.link.send(Refuse(RefuseReason.STALE, "after all"))
    pair.server.drop_all("closing")
    time.sleep(0.05)
    for _ in range(10):
        pair.turn(0.01)
    time.sleep(0.05)
    assert pair.agent.known == {"agent-of-P"}
    pair.agent.outcome = True
    pair.until(lambda: pair.failed)


def test_a_peer_that_was_dropped_on_purpose_is_met_again_by_the_same_agent(pair: Pair) -> None:
    for number in range(3):
        pair.load()
        pair.until(lambda number=number: len(pair.received) == number + 1)
        pair.peers.drop_all("this side has another agent")
    assert pair.agent.met == ["agent-of-P"]


def test_an_agent_that_was_renewed_meanwhile_takes_the_place_of_the_one_that_was_kept(
    pair: Pair,
) -> None:
    pair.load()
    pair.until(lambda: pair.received)
    pair.peers.drop_all("this side has another agent")
    pair.metadata = b"next-agent-of-P"
    pair.load()
    pair.until(lambda: len(pair.received) == 2)
    assert pair.agent.met == ["agent-of-P", "next-agent-of-P"]
    assert pair.agent.known == {"next-agent-of-P"}


def test_a_kept_agent_is_forgotten_when_its_peer_cannot_be_met_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.load()
    pair.until(lambda: pair.received)
    pair.peers.drop_all("this side has another agent")

    def refused(endpoint: Endpoint, peer: str) -> PeerLink:
        raise UnreachableError(f"{endpoint}: Connection refused")

    monkeypatch.setattr(pair.network, "connect", refused)
    pair.load()
    pair.until(lambda: pair.failed and not pair.agent.known)


def test_the_back_off_ends_at_its_maximum_however_often_a_peer_is_tried() -> None:
    back_off = BackOff()
    for _ in range(1100):
        back_off.begin(LoadFailure.PEER_LOST, "", 0.0)
    assert back_off.until_s == MAX_REST_S


def test_no_free_descriptor_for_a_connection_fails_the_load_as_a_value(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", exhausted)
        pair.load()
        pair.until(lambda: pair.failed)
    assert pair.reasons == [LoadFailure.PEER_LOST]
    pair.clock.advance(1.0)
    pair.load()
    pair.until(lambda: pair.received)


def test_an_endpoint_with_an_impossible_port_fails_the_load_as_a_value(pair: Pair) -> None:
    where = Endpoint(host="127.0.0.1", port=70_000)
    pair.load(pair.away("away", where))
    pair.until(lambda: pair.failed)
    assert pair.reasons == [LoadFailure.PEER_LOST]


@pytest.mark.parametrize("refusal", ["refuses_to_prepare", "refuses_to_unprepare"])
def test_a_peer_that_nixl_half_learned_or_half_forgot_can_be_met_again(
    pair: Pair, refusal: str
) -> None:
    setattr(pair.agent, refusal, True)
    pair.load()
    pair.until(lambda: pair.failed or pair.received)
    pair.server.drop_all("closing")
    pair.until(lambda: not pair.agent.known)
    setattr(pair.agent, refusal, False)
    pair.clock.advance(1.0)
    pair.received.clear()
    pair.load()
    pair.until(lambda: pair.received)


@pytest.mark.slow
def test_more_leases_than_fit_into_one_frame_are_all_kept_alive(pair: Pair) -> None:
    pair.load()
    pair.until(lambda: pair.received)
    nonces = [f"{n:043}" for n in range(24_000)]  # as long as those of production
    for number, nonce in enumerate(nonces):
        pair.server.grant(Grant(nonce, RequestId(nonce), [], [], 0))
        pair.peers.watch(Watch(nonce, pair.owner, 30.0))
        if number % 50 == 0:
            pair.reactor.wait(0)
    for _ in range(6):
        pair.clock.advance(10.0)
        pair.machine.tick()
        for _ in range(60):
            pair.reactor.wait(0)
        pair.server.tick()
    assert len(pair.server.leases) == len(nonces) + 1  # that of the load, too


def test_a_request_that_was_given_up_here_is_no_warning(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="pdserve.connectors"):
        pair.agent.outcome = False
        request_id = pair.load()
        pair.until(lambda: pair.agent.num_posted)
        pair.loads.abort(request_id)
        pair.agent.outcome = True
        pair.until(lambda: pair.failed)
    assert pair.reasons == [LoadFailure.ABORTED]
    about = [record for record in caplog.records if "kv load" in record.message]
    assert [record.levelno for record in about] == [logging.DEBUG]


def test_kv_that_is_lost_of_all_choices_of_a_request_is_one_warning(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    away = pair.away("away", nowhere())
    with caplog.at_level(logging.DEBUG, logger="pdserve.connectors.transfer.loads"):
        for index in range(3):
            pair.load(away, name=request_id_of("asked", index, "aa"))
        pair.load(away, name=request_id_of("another", 0, "aa"))
        pair.until(lambda: len(pair.failed) == 4)
    about = [record for record in caplog.records if "kv load ended" in record.message]
    named = [record.message.split()[5] for record in about if record.levelno == logging.WARNING]
    assert named == ["request=asked-0-aa", "request=another-0-aa"]
    assert len(about) == 4


def test_a_listener_without_free_descriptors_rests_and_serves_again_later(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    def exhausted(listening: socket.socket) -> tuple[socket.socket, object]:
        attempts.append(1)
        raise OSError(errno.EMFILE, "Too many open files")

    pair.peers.watch(Watch("n", pair.owner, 30.0))
    pair.machine.tick()
    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "accept", exhausted)
        for _ in range(4):
            pair.reactor.wait(None)  # a rest ends by itself
    assert len(attempts) == 2
    pair.load()
    pair.until(lambda: pair.received)
