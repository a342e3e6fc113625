"""What two movers do to blocks when a copy is given up, cut off, or asked for by nobody."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import torch

from pdserve.connectors.base import KVLayout
from pdserve.connectors.transfer.protocol import Region
from pdserve.connectors.transfer.seams import Direction, FrameError, Job, JobEnd, MoverLink, WarmUp
from pdserve.connectors.ucx.frames import (
    MAX_COPY_BYTES,
    CopyLanded,
    DropCopy,
    FetchCopy,
    OfferCopy,
    SendBroken,
    TakeCopy,
    WithdrawCopy,
    encode,
)
from pdserve.connectors.ucx.mover import UcxMover
from pdserve.connectors.ucx.staging import Staging
from pdserve.observe.clock import SystemClock
from pdserve.wire.ids import BlockId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LAYOUT = KVLayout(
    num_blocks=16,
    num_layers=2,
    num_kv_heads=2,
    block_size=16,
    head_dim=64,
    dtype="float32",
    dtype_bytes=4,
)
BLOCKS = np.array([3, 1, 7], dtype=np.int32)


class Side:
    """A mover, and what comes to it: frames are heard when `hear` is called."""

    def __init__(self, value: float, layout: KVLayout = LAYOUT, *, timeout_s: float = 60.0) -> None:
        self.kv = torch.full((layout.num_blocks, layout.block_bytes // 4), value)
        self.mover = UcxMover(
            kv=self.kv,
            layout=layout,
            watch=lambda descriptor: None,
            clock=SystemClock(),
            options={"NET_DEVICES": "lo"},
            max_messages=4,
            timeout_s=timeout_s,
        )
        self.mover.start()
        self.inbox: deque[bytes] = deque()
        self.exposed: set[BlockId] = set()
        self.ends: list[JobEnd] = []
        self.link: MoverLink

    def meet(self, other: Side) -> None:
        self.link = MoverLink(
            other.mover.target.metadata, say=other.inbox.append, exposed=lambda: self.exposed
        )

    def hear(self) -> None:
        while self.inbox:
            self.mover.hear(self.link, self.inbox.popleft())

    def copy(self, direction: Direction, tag: str = "copy") -> Job:
        """Submit a copy of `BLOCKS` of the peer's, from or to the same of ours."""
        remote = self.mover.meet(self.link.metadata, self.mover.target.pool)
        job = Job(
            tag=tag,
            direction=direction,
            remote=remote,
            unit_bytes=LAYOUT.block_bytes,
            local_units=BLOCKS,
            remote_units=BLOCKS,
            on_settled=self.ends.append,
            link=self.link,
        )
        self.mover.submit(job)
        return job

    def holds(self, value: float) -> bool:
        return bool((self.kv[BLOCKS.tolist()] == value).all())


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    ours, theirs = Side(1.0), Side(2.0)
    ours.meet(theirs)
    theirs.meet(ours)
    yield ours, theirs
    for side in (ours, theirs):
        side.mover.close(1.0)


def turn(sides: tuple[Side, Side], *, deaf: Side | None = None) -> None:
    for side in sides:
        side.mover.tick()
        if side is not deaf:
            side.hear()
        side.mover.deliver()


def until(
    sides: tuple[Side, Side], condition: Callable[[], object], *, deaf: Side | None = None
) -> None:
    deadline_s = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline_s, "it has not come to that"
        turn(sides, deaf=deaf)


def idle(sides: tuple[Side, Side]) -> None:
    """Let come whatever still comes."""
    ends_s = time.monotonic() + 0.3
    while time.monotonic() < ends_s:
        turn(sides)
        time.sleep(0.001)


def test_what_is_read_is_what_the_peer_has_and_nothing_else_changes(
    sides: tuple[Side, Side],
) -> None:
    ours, _ = sides
    ours.copy(Direction.READ)
    until(sides, lambda: ours.ends)
    assert ours.ends[0].failure is None
    assert ours.holds(2.0)
    others = np.setdiff1d(np.arange(LAYOUT.num_blocks), BLOCKS)
    assert (ours.kv[others.tolist()] == 1.0).all()


def test_what_is_written_lands_in_the_blocks_that_are_exposed(sides: tuple[Side, Side]) -> None:
    ours, theirs = sides
    theirs.exposed = {BlockId(int(block)) for block in BLOCKS}
    ours.copy(Direction.WRITE)
    until(sides, lambda: ours.ends)
    assert ours.ends[0].failure is None
    assert theirs.holds(1.0)


def test_a_write_to_blocks_that_are_not_exposed_any_more_changes_nothing(
    sides: tuple[Side, Side],
) -> None:
    ours, theirs = sides
    theirs.exposed = {BlockId(int(block)) for block in BLOCKS[:2]}
    ours.copy(Direction.WRITE)
    until(sides, lambda: ours.ends)
    assert ours.ends[0].failure == "the blocks are not its to write"
    assert theirs.holds(2.0)
    assert theirs.mover.take_faults() == {"write_not_exposed": 1}


def test_a_read_that_was_given_up_changes_no_block_when_its_message_comes(
    sides: tuple[Side, Side],
) -> None:
    ours, theirs = sides
    ours.copy(Direction.READ)
    until(sides, lambda: theirs.inbox, deaf=theirs)
    assert ours.mover.abandon("copy") == 0
    idle(sides)
    assert ours.holds(1.0)
    assert not ours.ends
    # Its tag was told: the peer has sent something, so no receive is left behind.
    ours.copy(Direction.READ, "another")
    until(sides, lambda: ours.ends)
    assert ours.holds(2.0)


def test_a_write_that_was_withdrawn_changes_no_block_wherever_it_was(
    sides: tuple[Side, Side],
) -> None:
    ours, theirs = sides
    theirs.exposed = {BlockId(int(block)) for block in BLOCKS}
    ours.copy(Direction.WRITE)
    until(sides, lambda: ours.inbox, deaf=ours)  # the peer has posted a receive
    assert ours.mover.abandon("copy") == 0
    idle(sides)
    assert theirs.holds(2.0)
    assert not ours.ends
    ours.copy(Direction.WRITE, "another")
    until(sides, lambda: ours.ends)
    assert theirs.holds(1.0)


def test_what_was_offered_over_a_link_that_is_lost_changes_no_block(
    sides: tuple[Side, Side],
) -> None:
    ours, theirs = sides
    theirs.exposed = {BlockId(int(block)) for block in BLOCKS}
    ours.copy(Direction.WRITE)
    until(sides, lambda: ours.inbox, deaf=ours)
    theirs.mover.hang_up(theirs.link)
    ours.hear()  # it sends all the same
    theirs.meet(ours)
    idle(sides)
    assert theirs.holds(2.0)


def test_a_read_fails_as_a_value_when_its_link_is_lost_and_the_next_one_works(
    sides: tuple[Side, Side],
) -> None:
    ours, theirs = sides
    ours.copy(Direction.READ)
    until(sides, lambda: theirs.inbox, deaf=theirs)
    ours.mover.hang_up(ours.link)
    until(sides, lambda: ours.ends, deaf=theirs)
    assert ours.ends[0].failure is not None
    theirs.inbox.clear()
    theirs.mover.hang_up(theirs.link)
    warmed_up: list[str | None] = []
    remote = ours.mover.meet(ours.link.metadata, theirs.mover.target.pool)
    remote.link = ours.link
    ours.mover.warm_up(WarmUp("warm-up", remote, remote.pool, warmed_up.append))
    until(sides, lambda: warmed_up)
    assert warmed_up == [None]
    ours.copy(Direction.READ, "another")
    until(sides, lambda: len(ours.ends) == 2)
    assert ours.ends[1].failure is None
    assert ours.holds(2.0)


def test_an_empty_message_is_not_taken_for_kv(sides: tuple[Side, Side]) -> None:
    _, theirs = sides
    theirs.exposed = {BlockId(int(block)) for block in BLOCKS}
    # An offer that its owner knows nothing of is answered by an empty message.
    theirs.mover.hear(
        theirs.link, encode(OfferCopy(99, LAYOUT.block_bytes, BLOCKS.astype("<i4").tobytes()))
    )
    idle(sides)
    assert theirs.holds(2.0)


def test_a_peer_that_never_answers_leaves_the_others_their_buffers() -> None:
    ours, mute, theirs = Side(1.0), Side(0.0), Side(2.0)
    ours.meet(mute)
    for number in range(8):
        ours.copy(Direction.READ, f"mute {number}")
    ours.mover.tick()
    ours.meet(theirs)
    theirs.meet(ours)
    ours.copy(Direction.READ, "answered")
    until((ours, theirs), lambda: ours.ends)
    assert ours.ends[0].failure is None
    assert ours.holds(2.0)
    for side in (ours, mute, theirs):
        side.mover.close(1.0)


@pytest.mark.parametrize("is_read", [True, False])
def test_peers_that_never_answer_leave_the_others_their_buffers_in_time(*, is_read: bool) -> None:
    ours, theirs, mutes = Side(1.0, timeout_s=0.5), Side(2.0), [Side(0.0) for _ in range(4)]
    for number, mute in enumerate(mutes):  # as many as there are buffers
        ours.meet(mute)
        if is_read:
            ours.copy(Direction.READ, f"mute {number}")
            continue
        fetch = FetchCopy(1, LAYOUT.block_bytes, BLOCKS.astype("<i4").tobytes())
        ours.mover.hear(ours.link, encode(fetch))
    ours.mover.tick()
    for number in range(len(mutes)):
        ours.mover.abandon(f"mute {number}")
    ours.meet(theirs)
    theirs.meet(ours)
    asks = ours if is_read else theirs
    asks.copy(Direction.READ, "answered")
    began_s = time.monotonic()
    until((ours, theirs), lambda: asks.ends)
    assert asks.ends[0].failure is None
    assert time.monotonic() - began_s > 0.2
    for side in (ours, theirs, *mutes):
        side.mover.close(1.0)


@pytest.mark.parametrize(
    "frame",
    [
        FetchCopy(1, LAYOUT.block_bytes, np.array([16], dtype="<i4").tobytes()),
        FetchCopy(1, LAYOUT.block_bytes, np.array([-1], dtype="<i4").tobytes()),
        FetchCopy(1, 1 << 30, b""),
        OfferCopy(1, 4095, np.array([0], dtype="<i4").tobytes()),
        OfferCopy(1, 4096, b""),
        OfferCopy(1, 4096, b"123"),
        OfferCopy(1, LAYOUT.block_bytes, np.zeros(17, dtype="<i4").tobytes()),
    ],
)
def test_what_no_peer_can_mean_ends_the_link(
    sides: tuple[Side, Side], frame: FetchCopy | OfferCopy
) -> None:
    ours, _ = sides
    with pytest.raises(FrameError):
        ours.mover.hear(ours.link, encode(frame))


def test_a_copy_that_is_larger_than_any_ends_the_link_before_memory_is_taken_for_it() -> None:
    layout = msgspec.structs.replace(LAYOUT, num_blocks=MAX_COPY_BYTES // LAYOUT.block_bytes + 1)
    side = Side(1.0, layout)
    side.meet(side)
    units = np.arange(layout.num_blocks, dtype="<i4").tobytes()
    for frame in (OfferCopy(1, layout.block_bytes, units), FetchCopy(1, layout.block_bytes, units)):
        with pytest.raises(FrameError, match="are more than one copy has"):
            side.mover.hear(side.link, encode(frame))
    side.mover.close(1.0)


def test_what_another_peer_says_of_a_copy_is_not_said_by_the_one_it_is_offered_to(
    sides: tuple[Side, Side],
) -> None:
    ours, theirs = sides
    theirs.exposed = {BlockId(int(block)) for block in BLOCKS}
    ours.copy(Direction.WRITE)
    other = MoverLink(b"other", deque[bytes]().append, frozenset)
    ours.mover.hear(other, encode(CopyLanded(1)))
    ours.mover.deliver()
    assert not ours.ends
    until(sides, lambda: ours.ends)
    assert ours.ends[0].failure is None
    assert theirs.holds(1.0)


@pytest.mark.parametrize("is_behind_a_copy", [False, True])
def test_a_warm_up_goes_on_over_the_latest_link_if_the_one_it_began_with_is_lost(
    sides: tuple[Side, Side], *, is_behind_a_copy: bool
) -> None:
    ours, theirs = sides
    latest = ours.link
    ours.link = MoverLink(latest.metadata, say=lambda _: None, exposed=frozenset)
    if is_behind_a_copy:
        ours.copy(Direction.READ)  # the only one that may be posted for this peer
    remote = ours.mover.meet(latest.metadata, theirs.mover.target.pool)
    remote.link = ours.link
    warmed_up: list[str | None] = []
    ours.mover.warm_up(WarmUp("warm-up", remote, remote.pool, warmed_up.append))
    idle(sides)
    remote.link = latest
    ours.mover.hang_up(ours.link)
    until(sides, lambda: warmed_up)
    assert warmed_up == [None]


def test_a_tag_is_told_once(sides: tuple[Side, Side]) -> None:
    ours, _ = sides
    for copy_id in (1, 2, 3):  # more than are posted at once
        ours.mover.hear(ours.link, encode(TakeCopy(copy_id, copy_id)))
    with pytest.raises(FrameError, match="sent twice"):
        for _ in range(2):
            ours.mover.hear(ours.link, encode(TakeCopy(9, 9)))


def test_rows_go_into_a_message_and_back_whatever_their_size_and_order() -> None:
    rng = np.random.default_rng(0)
    kv = torch.from_numpy(rng.integers(0, 255, 96 * 20, dtype=np.uint8))
    staging = Staging(kv.clone())
    for unit_bytes in (1, 4, 8, 24, 96):
        num_units = kv.numel() // unit_bytes
        for units in (
            rng.permutation(num_units)[: num_units // 2],
            np.arange(num_units // 4, num_units // 2),
        ):
            units = units.astype(np.int32)
            payload = torch.empty(len(units) * unit_bytes, dtype=torch.uint8)
            staging.gather(units, unit_bytes, payload)
            expected = kv.view(-1, unit_bytes)[torch.from_numpy(units).long()]
            assert torch.equal(payload.view(-1, unit_bytes), expected)
            blank = Staging(torch.zeros_like(kv))
            blank.scatter(payload, units, unit_bytes)
            again = torch.empty_like(payload)
            blank.gather(units, unit_bytes, again)
            assert torch.equal(again, payload)


def test_a_region_of_another_size_than_the_units_is_refused_as_a_value(
    sides: tuple[Side, Side],
) -> None:
    ours, _ = sides
    pool = Region(address=0, stride_bytes=LAYOUT.block_bytes, num_units=4, memory="DRAM", device=0)
    remote = ours.mover.meet(ours.link.metadata, pool)
    ours.mover.submit(
        Job("j", Direction.READ, remote, LAYOUT.block_bytes, BLOCKS, BLOCKS, ours.ends.append)
    )
    ours.mover.deliver()
    assert "are not in" in (ours.ends[0].failure or "")


def test_a_send_that_fails_ends_what_the_peer_awaits_and_the_next_one_works(
    sides: tuple[Side, Side],
) -> None:
    ours, theirs = sides
    ours.copy(Direction.READ)
    until(sides, lambda: theirs.inbox, deaf=theirs)
    # The peer cannot send: there is no such worker any more.
    theirs.mover.hear(MoverLink(b"nobody", ours.inbox.append, frozenset), theirs.inbox.popleft())
    until(sides, lambda: ours.ends)
    assert ours.ends[0].failure is not None
    assert ours.holds(1.0)
    idle(sides)
    ours.copy(Direction.READ, "another")
    until(sides, lambda: len(ours.ends) == 2)
    assert ours.ends[1].failure is None
    assert ours.holds(2.0)


def test_whatever_a_peer_says_is_done_or_ends_its_link(sides: tuple[Side, Side]) -> None:
    ours, theirs = sides
    rng = np.random.default_rng(7)
    before = ours.kv.clone()
    for _ in range(500):
        numbers = [int(rng.choice([0, 1, 2, 4096, LAYOUT.block_bytes, 1 << 40])) for _ in range(2)]
        units = rng.integers(-2, 18, int(rng.integers(0, 20)), dtype=np.int32).tobytes()
        kinds = [
            FetchCopy(numbers[0], max(1, numbers[1]), units),
            OfferCopy(numbers[0], max(1, numbers[1]), units),
            TakeCopy(numbers[0], numbers[1]),
            DropCopy(numbers[0]),
            CopyLanded(numbers[0]),
            WithdrawCopy(numbers[0]),
            SendBroken(),
        ]
        body = bytearray(encode(kinds[int(rng.integers(len(kinds)))]))
        if rng.random() < 0.3:
            body[int(rng.integers(len(body)))] ^= 1 << int(rng.integers(8))
        try:
            ours.mover.hear(ours.link, bytes(body))
        except FrameError:
            ours.mover.hang_up(ours.link)
        ours.mover.tick()
        ours.mover.deliver()
        theirs.mover.tick()
    assert torch.equal(ours.kv, before)
