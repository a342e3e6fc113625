"""Shared memory of the store does not outlive whoever made it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil

from pdserve.commands.segments import remove_ownerless
from tests.cli.process import ROOT, environment
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOLDS_ONE = """
import sys, time
from pathlib import Path
from pdserve.commands.segments import own_segment
segment = own_segment(Path(sys.argv[1]))
segment.write_bytes(b"kv")
print(segment.name, flush=True)
sys.stdin.read()
"""


class Owner:
    """A process that owns a segment; it ends when its stdin does.

    Attributes:
        segment: Its path.
        remover: The process that waits for its end.
    """

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        assert process.stdout is not None
        self.process = process
        self.segment = folder / process.stdout.readline().strip()
        (self.remover,) = psutil.Process(process.pid).children()


@contextmanager
def owner_in(folder: Path) -> Iterator[Owner]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS_ONE, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
        start_new_session=True,
    )
    try:
        yield Owner(process, folder)
    finally:
        process.kill()
        process.communicate()


def is_empty(folder: Path) -> bool:
    return not any(folder.iterdir())


def test_it_is_removed_when_its_owner_ends(tmp_path: Path) -> None:
    with owner_in(tmp_path) as owner:
        assert owner.segment.exists()
        owner.process.communicate("")
        wait_until(lambda: is_empty(tmp_path))


def test_it_is_removed_when_all_of_its_owners_service_is_told_to_end_and_killed(
    tmp_path: Path,
) -> None:
    with owner_in(tmp_path) as owner:
        owner.remover.terminate()
        os.killpg(owner.process.pid, signal.SIGKILL)
        wait_until(lambda: is_empty(tmp_path))


def test_that_of_a_living_owner_stays_and_that_of_one_killed_with_its_remover_goes(
    tmp_path: Path,
) -> None:
    with owner_in(tmp_path) as owner, owner_in(tmp_path) as other:
        owner.remover.kill()
        owner.process.kill()
        owner.process.wait()
        assert owner.segment.exists()
        remove_ownerless(tmp_path)
        assert not owner.segment.exists()
        assert other.segment.exists()


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    others = tmp_path / "lmcache_l1_pool_of_somebody"
    others.write_bytes(b"kv")
    remove_ownerless(tmp_path)
    assert others.exists()
