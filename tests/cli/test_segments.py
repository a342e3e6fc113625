"""Shared memory of the store does not outlive whoever made it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.commands.segments import owned_segment, remove_ownerless
from tests.cli.process import ROOT, environment

HOLDS_ONE = """
import sys, time
from pathlib import Path
from pdserve.commands.segments import owned_segment
with owned_segment(Path(sys.argv[1])) as segment:
    segment.write_bytes(b"kv")
    print(segment.name, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def owner(tmp_path: Path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS_ONE, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_it_is_removed_at_the_end_however_the_block_ends(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), owned_segment(tmp_path) as segment:
        segment.write_bytes(b"kv")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_that_of_a_living_owner_stays_and_that_of_one_that_was_killed_goes(
    tmp_path: Path, owner: subprocess.Popen[str]
) -> None:
    assert owner.stdout is not None
    segment = tmp_path / owner.stdout.readline().strip()
    with owned_segment(tmp_path) as other:
        other.write_bytes(b"mine")
        assert segment.exists()
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert segment.exists()
        remove_ownerless(tmp_path)
        assert not segment.exists()
        assert other.exists()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    others = tmp_path / "lmcache_l1_pool_of_somebody"
    others.write_bytes(b"kv")
    remove_ownerless(tmp_path)
    assert others.exists()
