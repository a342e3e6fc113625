"""Every byte of a checkpoint is in its digest, whichever ranks read it; no memory of it lies."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import ConfigError
from pdserve.models import file_digest
from pdserve.models.file_digest import DigestCache, FileDigest, FileIdentity
from pdserve.parallel.group import World
from pdserve.parallel.mesh import MeshShape
from tests.ranks import RankError, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PIECE_BYTES = 2 << 20
"""Instead of 32 MiB, which take their time: a piece is two reads."""
SIZE = 2 * PIECE_BYTES + 12345  # three pieces


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digest, "PIECE_BYTES", PIECE_BYTES)


def digest(paths: list[Path], cache: DigestCache | None = None, world: World | None = None) -> str:
    files = FileDigest(
        paths, cache=cache or DigestCache(None), world=world or World.alone(), num_threads=2
    )
    with closing(files):
        return files.result()


def poke(path: Path, offset: int, value: bytes = b"\x01") -> None:
    """Change a byte in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of zeros, which takes no room."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as made:
        made.truncate(SIZE)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> DigestCache:
    """A memory to which every file has been left alone for long."""
    return DigestCache(tmp_path / "cache", now_ns=lambda: 1 << 62)


FURTHER = (70_000, PIECE_BYTES - 1, SIZE // 2, SIZE - 70_000)


@pytest.mark.parametrize(
    "offset",
    [0, PIECE_BYTES, SIZE - 1, *(pytest.param(at, marks=pytest.mark.slow) for at in FURTHER)],
)
def test_any_byte_changes_the_digest(file: Path, offset: int) -> None:
    before = digest([file])
    poke(file, offset)
    assert digest([file]) != before
    poke(file, offset, b"\0")
    assert digest([file]) == before


def test_bytes_that_move_from_one_file_to_the_next_change_the_digest(tmp_path: Path) -> None:
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    first.write_bytes(b"abc")
    second.write_bytes(b"def")
    before = digest([first, second])
    first.write_bytes(b"ab")
    second.write_bytes(b"cdef")
    assert digest([first, second]) != before


def test_a_file_that_was_left_alone_is_not_read_again(file: Path, cache: DigestCache) -> None:
    found = digest([file], cache)
    pieces = cache.find(FileIdentity.of(file))
    assert pieces is not None
    assert digest([file], cache) == found
    cache.keep(FileIdentity.of(file), [b"\x01" * 32, *pieces[1:]])
    assert digest([file], cache) != found  # it is the memory that speaks


def test_an_edit_in_place_that_restores_size_and_mtime_is_noticed(
    file: Path, cache: DigestCache
) -> None:
    before = digest([file], cache)
    status = file.stat()
    poke(file, SIZE // 2)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_mtime_ns == status.st_mtime_ns
    assert digest([file], cache) == digest([file]) != before


def test_a_file_written_to_less_than_a_minute_ago_is_not_remembered(
    file: Path, tmp_path: Path
) -> None:
    changed_ns = FileIdentity.of(file).ctime_ns
    for age_s, is_remembered in ((0, False), (59, False), (60, True)):
        cache = DigestCache(tmp_path / "cache", now_ns=lambda age=age_s: changed_ns + age * 10**9)
        digest([file], cache)
        assert (cache.find(FileIdentity.of(file)) is not None) == is_remembered


def test_a_file_that_changes_while_it_is_loaded_is_refused(file: Path, cache: DigestCache) -> None:
    files = FileDigest([file], cache=cache, world=World.alone(), num_threads=1)
    with closing(files):
        poke(file, 5)
        os.utime(file, ns=(0, 0))  # a clock too coarse to tell is no help to the test
        with pytest.raises(ConfigError, match=r"model\.safetensors changed while"):
            files.result()
    assert cache.find(FileIdentity.of(file)) is None


def test_a_file_that_goes_while_it_is_loaded_is_named(file: Path) -> None:
    files = FileDigest([file], cache=DigestCache(None), world=World.alone(), num_threads=1)
    with closing(files):
        file.unlink()
        with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read: No such file"):
            files.result()


def _occupied(folder: Path) -> None:
    folder.write_text("a file where the folder should be")


def _read_only(folder: Path) -> None:
    folder.symlink_to("/proc/1")  # nobody makes files there, not even root


def _garbage(folder: Path) -> None:
    for entry in folder.glob("*.json"):
        entry.write_bytes(entry.read_bytes()[:-20])


def _foreign(folder: Path) -> None:
    for entry in folder.glob("*.json"):
        entry.write_text('{"identity": 1}')


@pytest.mark.parametrize("spoil", [_occupied, _read_only])
def test_without_a_folder_to_write_to_nothing_is_remembered_and_nothing_is_wrong(
    file: Path, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(tmp_path / "cache")
    cache = DigestCache(tmp_path / "cache", now_ns=lambda: 1 << 62)
    assert digest([file], cache) == digest([file], cache) == digest([file])
    assert cache.find(FileIdentity.of(file)) is None


def test_what_cannot_be_remembered_leaves_no_file_behind(
    file: Path, cache: DigestCache, tmp_path: Path
) -> None:
    digest([file], cache)
    [entry] = (tmp_path / "cache").iterdir()
    entry.unlink()
    entry.mkdir()  # where the file should go, as when a disk is full
    digest([file], cache)
    assert list((tmp_path / "cache").iterdir()) == [entry]


@pytest.mark.parametrize("spoil", [_garbage, _foreign])
def test_what_is_no_memory_of_a_file_is_overwritten(
    file: Path, cache: DigestCache, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    digest([file], cache)
    spoil(tmp_path / "cache")
    assert cache.find(FileIdentity.of(file)) is None
    assert digest([file], cache) == digest([file])
    assert cache.find(FileIdentity.of(file)) is not None


def _of_rank(world: World, paths: list[Path], folder: Path) -> str:
    """The digest of this rank's own copy; a rank is another process."""
    file_digest.PIECE_BYTES = PIECE_BYTES
    path = paths[world.engine_rank % len(paths)]
    return digest([path], DigestCache(folder, now_ns=lambda: 1 << 62), world)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        (MeshShape(tp=2), {}),
        (MeshShape(pp=3), {}),
        (MeshShape(tp=2, pp=2), {}),
        (MeshShape(dp=2, tp=2), {"use_shared_memory": False}),
    ],
    ids=["tp 2", "pp 3", "tp 2, pp 2", "dp 2, tp 2, gloo"],
)
def test_every_rank_of_every_shape_has_the_digest_of_one_alone(
    file: Path, tmp_path: Path, shape: MeshShape, fields: dict[str, Any]
) -> None:
    poke(file, SIZE // 2)
    folder = tmp_path / "shared"
    alone = digest([file])
    for _ in range(2):  # hashed together, then remembered
        assert set(run_ranks(shape, _of_rank, [file], folder, **fields)) == {alone}
    assert digest([file], DigestCache(folder)) == alone
    assert DigestCache(folder).find(FileIdentity.of(file)) is not None


@pytest.mark.slow
def test_copies_of_ranks_on_several_machines_must_not_differ(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    copy = shutil.copy(file, other / file.name)
    paths, cache = [file, copy], tmp_path / "shared"
    assert set(run_ranks(MeshShape(tp=2), _of_rank, paths, cache)) == {digest([file])}
    poke(copy, SIZE // 2)
    with pytest.raises(RankError, match="machines of this engine have weights that differ"):
        run_ranks(MeshShape(tp=2), _of_rank, paths, cache)
    poke(copy, SIZE)
    with pytest.raises(RankError, match="weights of different sizes"):
        run_ranks(MeshShape(tp=2), _of_rank, paths, cache)
