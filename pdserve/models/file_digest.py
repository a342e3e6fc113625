"""Hashes all bytes of a checkpoint's files while they load.

Files are hashed in pieces. The ranks of an engine that see the same files divide the pieces among
themselves, and each hashes its own in threads while its weights load. At the end they exchange the
results, so that every rank has the same digest, whatever the shape of the engine; if the copies on
several machines differ, this is an error.

A file's pieces are remembered by its identity (path, device, inode, size, times of change), in
files of the user. No write leaves a file's `st_ctime` unchanged; but its clock is coarse, and a
dirty mapped page updates it only once. So only a file that was unchanged for a minute is
remembered, and one that changes while it is read is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import struct
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pdserve.config.user_cache import user_cache
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.parallel.group import World

PIECE_BYTES = 32 << 20
_READ_BYTES = 1 << 20
_LEFT_ALONE_NS = 60 * 10**9
# A SHA-256 as the numbers that ranks exchange.
_FORMAT = "<4q"
_INTS = 4

_log = logging.getLogger(__name__)


class FileIdentity(msgspec.Struct, frozen=True):
    """The identity of a file, which changes when the file does.

    Attributes:
        path: Absolute, links resolved.
    """

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """Return the current identity of a file.

        Raises:
            ConfigError: The file does not exist.
        """
        try:
            found = path.stat()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", param="model") from None
        return cls(
            str(path.resolve()),
            found.st_dev,
            found.st_ino,
            found.st_size,
            found.st_mtime_ns,
            found.st_ctime_ns,
        )

    @property
    def num_pieces(self) -> int:
        """Number of pieces of the file, of which the last one may be shorter."""
        return -(-self.size // PIECE_BYTES)


class _Entry(msgspec.Struct, frozen=True):
    """The remembered data of a file: the SHA-256 of each piece, in hex."""

    identity: FileIdentity
    piece_bytes: int
    pieces: list[str]


class DigestCache:
    """Digests of files by their identity, kept between runs of one user.

    Errors in the folder or its files count as nothing remembered.

    Args:
        folder: Holds one small file per path; None remembers nothing.
        now_ns: The time of day.
    """

    def __init__(self, folder: Path | None, *, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._folder = folder
        self._now_ns = now_ns

    @classmethod
    def of_user(cls) -> DigestCache:
        """Return the cache in the user's cache folder."""
        folder = user_cache()
        return cls(None if folder is None else folder / "weights")

    def find(self, identity: FileIdentity) -> list[bytes] | None:
        """Return the pieces of a file; None if not remembered, or if the file has changed."""
        if self._folder is None:
            return None
        try:
            entry = msgspec.json.decode(self._path(identity).read_bytes(), type=_Entry)
            pieces = [bytes.fromhex(piece) for piece in entry.pieces]
        except (OSError, ValueError):
            return None
        fits = (entry.identity, entry.piece_bytes) == (identity, PIECE_BYTES)
        whole = len(pieces) == identity.num_pieces and all(len(piece) == 32 for piece in pieces)
        return pieces if fits and whole else None

    def keep(self, identity: FileIdentity, pieces: Sequence[bytes]) -> None:
        """Remember a file, unless it was written recently."""
        changed_ns = max(identity.mtime_ns, identity.ctime_ns)
        if self._folder is None or self._now_ns() - changed_ns < _LEFT_ALONE_NS:
            return
        entry = _Entry(identity, PIECE_BYTES, [piece.hex() for piece in pieces])
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
                written = Path(scratch, "digests")
                written.write_bytes(msgspec.json.encode(entry))
                written.replace(self._path(identity))
        except OSError as error:
            _log.info("digests of weights are not remembered: %s", error)

    def _path(self, identity: FileIdentity) -> Path:
        assert self._folder is not None
        return self._folder / f"{hashlib.sha256(identity.path.encode()).hexdigest()[:32]}.json"


class FileDigest:
    """A running digest of some files.

    Every rank of an engine creates one at the same time, and calls `result` at the same time.

    Args:
        paths: The files, in an order that does not depend on their location.
        cache: Remembers pieces.
        world: The ranks that share the work.
        num_threads: Threads that hash while the rank does other work.

    Raises:
        ConfigError: A file cannot be read, or the ranks' files have different sizes.
    """

    def __init__(
        self, paths: Sequence[Path], *, cache: DigestCache, world: World, num_threads: int
    ) -> None:
        self._paths, self._cache, self._world = tuple(paths), cache, world
        self._files = [FileIdentity.of(path) for path in self._paths]
        self._groups = self._ranks_by_files()
        self._sharers = next(ranks for ranks in self._groups if world.engine_rank in ranks)
        self._known: list[bytes | None] = []
        places: list[tuple[Path, int]] = []
        for path, identity in zip(self._paths, self._files, strict=True):
            self._known += cache.find(identity) or [None] * identity.num_pieces
            places += [(path, piece) for piece in range(identity.num_pieces)]
        share = self._sharers.index(world.engine_rank)
        self._share = range(share, len(places), len(self._sharers))
        self._is_stopping = threading.Event()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="weights-digest")
        self._hashed = {
            i: self._pool.submit(self._hash, *places[i])
            for i in self._share
            if self._known[i] is None
        }

    def close(self) -> None:
        """Release the threads; they end after their current read."""
        self._is_stopping.set()
        self._pool.shutdown(cancel_futures=True)

    def result(self) -> str:
        """Wait for all ranks; return the digest of every byte of the files.

        Raises:
            ConfigError: A file cannot be read or has changed meanwhile, or the files of machines
                differ.
        """
        mine = [0] * (_INTS * len(self._known))
        for i in self._share:
            piece = self._known[i] or self._hashed[i].result()
            mine[_INTS * i : _INTS * (i + 1)] = struct.unpack(_FORMAT, piece)
        for path, identity in zip(self._paths, self._files, strict=True):
            if FileIdentity.of(path) != identity:
                raise ConfigError(
                    f"{path} changed while it was being loaded: start again", param="model"
                )
        rows = self._world.gather_engine_ints(mine)
        totals = set()
        for ranks in self._groups:
            # A piece is one rank's; the others that share the files have zeros there.
            ints = [sum(column) for column in zip(*(rows[rank] for rank in ranks), strict=True)]
            pieces = [
                struct.pack(_FORMAT, *ints[i : i + _INTS]) for i in range(0, len(ints), _INTS)
            ]
            totals.add(self._total(pieces))
            if self._world.engine_rank == ranks[0]:
                self._remember(pieces)
        if len(totals) > 1:
            raise _different("weights that differ")
        return totals.pop()

    def _ranks_by_files(self) -> list[list[int]]:
        """Return the engine's ranks, grouped by the files that they see."""
        seen = hashlib.sha256(_boot_id() + msgspec.json.encode(self._files)).digest()
        rows = self._world.gather_engine_ints(
            [*struct.unpack(_FORMAT, seen), *(identity.size for identity in self._files)]
        )
        if len({tuple(row[_INTS:]) for row in rows}) > 1:
            raise _different("weights of different sizes")
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, row in enumerate(rows):
            found.setdefault(tuple(row[:_INTS]), []).append(rank)
        return list(found.values())

    def _hash(self, path: Path, piece: int) -> bytes:
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(_READ_BYTES))
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(piece * PIECE_BYTES)
                for _ in range(PIECE_BYTES // _READ_BYTES):
                    if self._is_stopping.is_set():
                        break
                    digest.update(buffer[: file.readinto(buffer)])
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", param="model") from None
        return digest.digest()

    def _total(self, pieces: list[bytes]) -> str:
        total = hashlib.sha256()
        for path, identity in zip(self._paths, self._files, strict=True):
            total.update(f"{path.name}\0{identity.size}\0".encode())
        for piece in pieces:
            total.update(piece)
        return total.hexdigest()[:32]

    def _remember(self, pieces: list[bytes]) -> None:
        start = 0
        for identity in self._files:
            end = start + identity.num_pieces
            if None in self._known[start:end]:
                self._cache.keep(identity, pieces[start:end])
            start = end


def _different(what: str) -> ConfigError:
    return ConfigError(
        f"the machines of this engine have {what}: copy the same checkpoint to all of them",
        param="model",
    )


def _boot_id() -> bytes:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return b""
