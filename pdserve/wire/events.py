"""KV events: what an engine's caches gain and lose, and the wire that tells proxies of it.

Caches deal in blocks, whose size each engine chooses. The wire deals in *grains*: prefixes that
each add `ids.GRAIN_TOKENS` tokens and have the same names at every engine. A grain is present
while all its blocks can be found.

    PUB     `Batch`, msgpack: numbered without gaps within an epoch; an empty one is a heartbeat.
            Besides the KV events, each has the core's load, and some have the step times that
            it has learned
    ROUTER  `Ask` in; out `MissingBatches`, or a snapshot in `SnapshotPart`s, of that `ask`

An epoch is one uninterrupted stream of one life of an engine. It ends with the engine, or when the
publisher cannot keep up with the events. Both sockets are encrypted (CurveZMQ,
rfc.zeromq.org/spec/26) with keys derived from the deployment's secret: a process that does not
know it can neither read nor forge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from pdserve.wire.ids import GRAIN_TOKENS, BlockHash
from pdserve.wire.learned import LearnedTimes
from pdserve.wire.seal import Purpose, key_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.wire.ids import Incarnation

HASH_VERSION: Final = 1
"""Version of `ids.grain_hashes`: readers that name grains otherwise find none."""
HEARTBEAT_S: Final = 0.25
"""Longest interval between two batches, in seconds."""
LEARNED_S: Final = 1.0
"""Interval at which a core repeats what it has learned, for new readers, in seconds."""
DEVICE: Final = "GPU"
"""The medium of an engine's own blocks, whatever its device: readers of vLLM's events expect it."""

_RESTART_BITS: Final = 16
_INCARNATION_BITS: Final = 47


class Grain(msgspec.Struct, frozen=True):
    """A grain and its blocks, in token order."""

    grain_hash: int
    blocks: tuple[BlockHash, ...]


class BlocksStored(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive blocks of a prefix have become findable.

    Attributes:
        parent: Parent of the first block; None if the blocks begin the prefix.
        token_ids: Tokens of the blocks, `block_size` for each.
        salt: Salt within which prefixes are shared.
        medium: Where the blocks are stored.
        grains: The grains that end with one of the blocks.
    """

    blocks: Sequence[BlockHash]
    parent: BlockHash | None
    token_ids: Sequence[int]
    block_size: int
    salt: str = ""
    medium: str = DEVICE
    grains: Sequence[Grain] = ()


class BlocksRemoved(msgspec.Struct, frozen=True):
    """The last copies of these blocks are gone from the medium."""

    blocks: list[BlockHash]
    medium: str = DEVICE


class BlocksCleared(msgspec.Struct, frozen=True):
    """The engine's own blocks no longer hold any prefix. Tiers name the blocks they lose."""


KVEvent: TypeAlias = BlocksStored | BlocksRemoved | BlocksCleared


class GrainsStored(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """These grains can now be found in the medium, too."""

    grains: list[int]
    medium: str = DEVICE


class GrainsRemoved(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """These grains can no longer be found in the medium."""

    grains: list[int]
    medium: str = DEVICE


class GrainsCleared(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """The engine's own blocks no longer hold any grains."""


GrainEvent: TypeAlias = GrainsStored | GrainsRemoved | GrainsCleared


class RoutingLoad(msgspec.Struct, frozen=True, array_like=True):
    """The part of engine cores' load that routing needs promptly.

    Attributes:
        num_requests: Requests that run, wait or receive KV.
        num_prompts: The number of these that `EngineLoad.num_prompts` counts.
        num_used_blocks: KV blocks that are neither free nor only cached.
        num_blocks: All KV blocks.
    """

    num_requests: int = 0
    num_prompts: int = 0
    num_used_blocks: int = 0
    num_blocks: int = 0

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that are used."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0

    def plus(self, other: RoutingLoad) -> RoutingLoad:
        """Return the sum of both loads."""
        return RoutingLoad(
            self.num_requests + other.num_requests,
            self.num_prompts + other.num_prompts,
            self.num_used_blocks + other.num_used_blocks,
            self.num_blocks + other.num_blocks,
        )


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """The events since the previous batch.

    Attributes:
        seq: Sequence number, from 0 in each epoch.
        load: The core's load when the batch is sent; None in a batch that is sent again.
        learned: The core's step times; None if unknown or already sent.
    """

    epoch: int
    seq: int
    events: list[GrainEvent] = []
    load: RoutingLoad | None = None
    learned: LearnedTimes | None = None


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """The question of a reader that lacks batches.

    Attributes:
        ask: The reader's own number for this question.
        next_seq: The first batch it lacks of this epoch; it has nothing of other epochs.
    """

    ask: int
    epoch: int
    next_seq: int


class MissingBatches(msgspec.Struct, frozen=True, array_like=True, tag="missing"):
    """The batches asked for, in order and without a gap, up to the newest."""

    ask: int
    batches: list[Batch]


class SnapshotPart(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """Part of all grains, as of the sending of the batch before `resume_seq`."""

    ask: int
    epoch: int
    resume_seq: int
    part: int
    num_parts: int
    stored: list[GrainsStored]


Answer: TypeAlias = MissingBatches | SnapshotPart


class EventEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where one engine core publishes its KV events.

    Attributes:
        port, snapshot_port: Ports of the PUB and the ROUTER socket.
        grain_tokens, hash_version: How its grains are named.
    """

    host: str
    port: int
    snapshot_port: int
    grain_tokens: int = GRAIN_TOKENS
    hash_version: int = HASH_VERSION


def first_epoch(incarnation: Incarnation) -> int:
    """Return an engine life's first epoch; the later ones of that life follow it."""
    return (int(incarnation, 16) & (1 << _INCARNATION_BITS) - 1) << _RESTART_BITS


def is_later_epoch(epoch: int, than: int) -> bool:
    """Return whether an epoch may follow another one; epochs of different lives may."""
    return epoch > than or epoch >> _RESTART_BITS != than >> _RESTART_BITS


def curve_secret(secret: str) -> bytes:
    """Return the listening sockets' secret key, in Z85; the public key follows from it."""
    import zmq.utils.z85

    return zmq.utils.z85.encode(key_for(secret, Purpose.EVENTS))
