"""Messages between the two halves of the LMCache connector.

A *chunk* is what the server keeps under one name: a fixed number of tokens (the server's setting),
named by all tokens up to its end. A *session* is one lookup, or one save, for one request; it is
identified by a number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.wire.ids import BlockId, RequestId
from pdserve.wire.request import KVStoreStats

if TYPE_CHECKING:
    from collections.abc import Callable


class ChunkRange(msgspec.Struct, frozen=True, array_like=True):
    """Chunks of one prompt.

    Attributes:
        session: The lookup that holds their read locks, or a number of its own for a save.
        token_ids: All tokens up to the end of the last chunk, or more, as uint32.
        salt: Salt of the prompt, within which its prefixes are shared.
        first: Index of the first chunk.
        end: Index after the last chunk.
    """

    session: int
    request_id: RequestId
    token_ids: bytes
    salt: str
    first: int
    end: int


class ChunkLoad(msgspec.Struct, frozen=True, array_like=True):
    """Chunks to load inside the next step.

    Attributes:
        first_token: The first token to load; its block edge may lie inside the first chunk.
        block_ids: The table up to the end of the last chunk.
    """

    chunks: ChunkRange
    first_token: int
    block_ids: list[BlockId]


class ChunkSave(msgspec.Struct, frozen=True, tag="save", array_like=True):
    """Chunks whose KV is computed, and that the server probably lacks.

    Attributes:
        block_ids: The table up to the end of the last chunk.
        replaced: Chunks that the server has with wrong bytes.
    """

    chunks: ChunkRange
    block_ids: list[BlockId]
    replaced: list[int]


class ChunkRelease(msgspec.Struct, frozen=True, array_like=True):
    """Read locks that are no longer needed.

    Attributes:
        chunks: The locked chunks; may be none.
        is_last: Whether the session has no others.
    """

    chunks: ChunkRange
    is_last: bool


class SaveBarrier(msgspec.Struct, frozen=True, tag="barrier", array_like=True):
    """Report `hold_id` as settled once all saves up to `session` are over."""

    hold_id: str
    request_id: RequestId
    session: int


class StoreInstructions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Instructions that need not wait for a step, in the order in which they were decided."""

    lookups: list[ChunkRange] = []
    releases: list[ChunkRelease] = []
    saves: list[ChunkSave | SaveBarrier] = []

    def __bool__(self) -> bool:
        return bool(self.lookups or self.releases or self.saves)


class ServerState(msgspec.Struct, frozen=True, tag="server", array_like=True):
    """The number of tokens in the server's chunks; 0 while the server does not answer."""

    chunk_tokens: int


class LookupDone(msgspec.Struct, frozen=True, tag="found", array_like=True):
    """How many leading chunks of a prompt can be loaded.

    Attributes:
        is_late: Whether there was no answer in time, so that no chunk can be loaded.
    """

    session: int
    num_chunks: int
    seconds: float
    is_late: bool = False


class LoadDone(msgspec.Struct, frozen=True, tag="loaded", array_like=True):
    """A load inside a step is over on one rank.

    Attributes:
        first: The first chunk that was loaded.
        num_chunks: Number of valid leading chunks of the prompt.
        num_bytes: Bytes copied.
    """

    session: int
    first: int
    num_chunks: int
    num_bytes: int
    seconds: float


class LoadUnlocked(msgspec.Struct, frozen=True, tag="unlocked", array_like=True):
    """The server knows that a rank has read what it loaded; follows its `LoadDone`."""

    session: int


class RankProgress(msgspec.Struct, frozen=True, tag="progress", array_like=True):
    """Progress of one rank.

    Attributes:
        saved_up_to: The session up to which all saves are over.
        stats: Counts since the rank's last report.
    """

    rank: int
    saved_up_to: int
    stats: KVStoreStats


StoreNews = ServerState | LookupDone | LoadDone | LoadUnlocked | RankProgress

# Decoders for the worker halves' reports, the scheduler half's posts, and the messages of a step.
read_news: Final[Callable[[bytes], StoreNews]] = msgspec.msgpack.Decoder(StoreNews).decode
read_instructions: Final = msgspec.msgpack.Decoder(StoreInstructions).decode
read_loads: Final = msgspec.msgpack.Decoder(list[ChunkLoad]).decode
