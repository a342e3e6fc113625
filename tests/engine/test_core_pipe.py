"""The connection between a server and its engine core: whole frames, in order, and nobody waits."""

from __future__ import annotations

import itertools
import select
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from pdserve.engine.core_pipe import CorePipe

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZES = [0, 1, 3, 4, 5, 70_000, 2, (1 << 20) + 7, 0, 12]


@pytest.fixture
def pair() -> Iterator[tuple[CorePipe, CorePipe]]:
    ends = [CorePipe(end) for end in socket.socketpair()]
    yield ends[0], ends[1]
    for end in ends:
        end.close()


def frames_in(pipe: CorePipe) -> list[bytes]:
    """Everything that has come by now."""
    frames: list[bytes] = []
    while select.select([pipe], [], [], 0)[0] and not pipe.has_ended:
        pipe.receive()
        frames += iter(pipe.take, None)
    return frames


def test_frames_of_any_size_come_whole_and_in_order(pair: tuple[CorePipe, CorePipe]) -> None:
    here, there = pair
    sent = [bytes([index]) * size for index, size in enumerate(SIZES)]
    for frame in sent:
        here.send(frame)
    came: list[bytes] = []
    while len(came) < len(sent):
        came += frames_in(there)
        here.flush()
    assert came == sent
    assert not here.has_unsent


def test_who_sends_waits_for_no_reader_and_loses_nothing(
    pair: tuple[CorePipe, CorePipe],
) -> None:
    here, there = pair
    sent = [bytes([index % 256]) * 5000 for index in range(500)]
    for frame in sent:
        here.send(frame)
    assert here.has_unsent
    came = frames_in(there)
    while here.has_unsent:
        here.flush()
        came += frames_in(there)
    assert came == sent


def test_frames_are_taken_one_by_one_and_the_rest_stays(pair: tuple[CorePipe, CorePipe]) -> None:
    here, there = pair
    for frame in (b"a", b"bc", b"def"):
        here.send(frame)
    there.receive()
    assert there.take() == b"a"
    there.receive()
    assert there.has_frame
    assert [there.take(), there.take(), there.take()] == [b"bc", b"def", None]
    assert not there.has_frame


def test_what_came_before_the_end_is_received(pair: tuple[CorePipe, CorePipe]) -> None:
    here, there = pair
    here.send(b"last words")
    here.close()
    assert frames_in(there) == [b"last words"]
    assert there.has_ended


@pytest.mark.parametrize("is_read", [True, False])
def test_after_the_other_end_has_gone_sending_does_nothing(
    pair: tuple[CorePipe, CorePipe], is_read: bool
) -> None:
    here, there = pair
    if not is_read:
        here.send(b"never read")  # the next one finds a connection that was reset
    there.close()
    here.send(b"too late")
    here.receive()
    assert here.has_ended
    assert not here.has_unsent


def test_who_closes_lets_the_other_end_read_for_a_while(pair: tuple[CorePipe, CorePipe]) -> None:
    here, there = pair
    frame = b"x" * (1 << 20)
    here.send(frame)
    assert here.has_unsent
    closing = threading.Thread(target=here.close, kwargs={"linger_s": 20.0})
    closing.start()
    came = next(filter(None, (frames_in(there) for _ in itertools.count())))
    closing.join()
    assert came == [frame]


def test_who_closes_does_not_wait_long_for_a_reader(pair: tuple[CorePipe, CorePipe]) -> None:
    here, there = pair
    here.send(b"x" * (1 << 20))
    here.close(linger_s=0.05)
    assert here.fileno() == -1
    assert frames_in(there) == []
