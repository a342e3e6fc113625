"""What the two halves of the LMCache connector tell one another.

A *chunk* is what the server keeps under one name: so many tokens (the server's own setting), named
by all tokens up to its end. A *session* is one look at the server for one request, by number.
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
        session: Whose read locks they are, or a number of its own for a save.
        token_ids: All tokens up to the end of the last one, or more, as uint32.
        salt: What the prompt's prefixes are shared within.
        first: Index of the first chunk.
        end: Index behind the last one.
    """

    session: int
    request_id: RequestId
    token_ids: bytes
    salt: str
    first: int
    end: int


class ChunkLoad(msgspec.Struct, frozen=True, array_like=True):
    """Chunks to be loaded inside the next step.

    Attributes:
        first_token: The first one that is loaded; its block edge may lie inside the first chunk.
        block_ids: The table up to the end of the last chunk.
    """

    chunks: ChunkRange
    first_token: int
    block_ids: list[BlockId]


class ChunkSave(msgspec.Struct, frozen=True, tag="save", array_like=True):
    """Chunks whose KV is computed, and that the server is believed to lack.

    Attributes:
        block_ids: The table up to the end of the last chunk.
        replaced: Chunks that the server has, with bytes that are not theirs.
    """

    chunks: ChunkRange
    block_ids: list[BlockId]
    replaced: list[int]


class ChunkRelease(msgspec.Struct, frozen=True, array_like=True):
    """Read locks that nobody needs any more.

    Attributes:
        chunks: What they are on; may be none.
        is_last: The session has no others.
    """

    chunks: ChunkRange
    is_last: bool


class SaveBarrier(msgspec.Struct, frozen=True, tag="barrier", array_like=True):
    """Report `hold_id` as settled once all saves up to `session` are over."""

    hold_id: str
    request_id: RequestId
    session: int


class StoreInstructions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What need not wait for a step, in the order in which it was decided."""

    lookups: list[ChunkRange] = []
    releases: list[ChunkRelease] = []
    saves: list[ChunkSave | SaveBarrier] = []

    def __bool__(self) -> bool:
        return bool(self.lookups or self.releases or self.saves)


class ServerState(msgspec.Struct, frozen=True, tag="server", array_like=True):
    """The server answers, with chunks of so many tokens; or it does not: 0."""

    chunk_tokens: int


class LookupDone(msgspec.Struct, frozen=True, tag="found", array_like=True):
    """How many leading chunks of a prompt can be loaded.

    Attributes:
        is_late: Nobody said so in time, so there are none.
    """

    session: int
    num_chunks: int
    seconds: float
    is_late: bool = False


class LoadDone(msgspec.Struct, frozen=True, tag="loaded", array_like=True):
    """A load inside a step is over on one rank.

    Attributes:
        first: The first chunk that was loaded.
        num_chunks: Leading chunks of the prompt that are good.
        num_bytes: That were copied.
    """

    session: int
    first: int
    num_chunks: int
    num_bytes: int
    seconds: float


class RankProgress(msgspec.Struct, frozen=True, tag="progress", array_like=True):
    """What one rank has done.

    Attributes:
        saved_up_to: All saves up to this session are over.
        stats: What it has counted since it said so last.
    """

    rank: int
    saved_up_to: int
    stats: KVStoreStats


StoreNews = ServerState | LookupDone | LoadDone | RankProgress

# What worker halves report, what the scheduler half posts, and what goes with a step.
read_news: Final[Callable[[bytes], StoreNews]] = msgspec.msgpack.Decoder(StoreNews).decode
read_instructions: Final = msgspec.msgpack.Decoder(StoreInstructions).decode
read_loads: Final = msgspec.msgpack.Decoder(list[ChunkLoad]).decode
