"""KV events: what an engine's caches gain and lose, and the wire that tells proxies of it.

Caches speak of blocks, whose size is the engine's own; the wire speaks of *grains*, prefixes of
`hashing.GRAIN_TOKENS` tokens more each, which have the same names at every engine. A grain is there
while all its blocks can be found.

    PUB     `Batch`, msgpack: numbered without gaps within an epoch; an empty one is a heartbeat.
            Each says how much the core has to do, beside what has happened to its KV; some say
            what it has learned of its steps
    ROUTER  `Ask` in; out `MissingBatches`, or a snapshot in `SnapshotPart`s, of that `ask`

An epoch is one uninterrupted stream of one life of an engine: it ends with the engine, and when
more happens than the publisher takes. Both sockets are encrypted (CurveZMQ,
rfc.zeromq.org/spec/26) with keys that follow from the deployment's secret: who does not know it can
neither read nor forge.
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
"""Of `hashing.grain_hashes`: readers that name grains otherwise find none."""
HEARTBEAT_S: Final = 0.25
"""At least so often there is a batch."""
LEARNED_S: Final = 1.0
"""So often a core says what it has learned, for readers that have come since."""
DEVICE: Final = "GPU"
"""The medium of an engine's own blocks, whatever its device: readers of vLLM's events expect it."""

_RESTART_BITS: Final = 16
_INCARNATION_BITS: Final = 47


class Grain(msgspec.Struct, frozen=True):
    """A grain, and the blocks that it consists of, in token order."""

    grain_hash: int
    blocks: tuple[BlockHash, ...]


class BlocksStored(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that follow one another in a prefix can be found, and could not be before.

    Attributes:
        parent: Of the first one; None: they begin the prefix.
        token_ids: Theirs, `block_size` for each.
        salt: Prefixes are shared within it.
        medium: Where they lie.
        grains: Those that end with one of the blocks.
    """

    blocks: Sequence[BlockHash]
    parent: BlockHash | None
    token_ids: Sequence[int]
    block_size: int
    salt: str = ""
    medium: str = DEVICE
    grains: Sequence[Grain] = ()


class BlocksRemoved(msgspec.Struct, frozen=True):
    """The last copies of these are gone from the medium."""

    blocks: list[BlockHash]
    medium: str = DEVICE


class BlocksCleared(msgspec.Struct, frozen=True):
    """Nothing can be found in the engine's own blocks any more. A tier names what it loses."""


KVEvent: TypeAlias = BlocksStored | BlocksRemoved | BlocksCleared


class GrainsStored(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """These can be found in the medium, too."""

    grains: list[int]
    medium: str = DEVICE


class GrainsRemoved(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """These cannot be found in the medium any more."""

    grains: list[int]
    medium: str = DEVICE


class GrainsCleared(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """The engine's own blocks have none any more."""


GrainEvent: TypeAlias = GrainsStored | GrainsRemoved | GrainsCleared


class RoutingLoad(msgspec.Struct, frozen=True, array_like=True):
    """How much engine cores have to do: what of it routing is to know soon.

    Attributes:
        num_requests: That run, wait or receive KV.
        num_prompts: Of these, as of `EngineLoad`.
        num_used_blocks: Of KV, that are neither free nor only cached.
        num_blocks: All there are.
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
        """Return what both have to do."""
        return RoutingLoad(
            self.num_requests + other.num_requests,
            self.num_prompts + other.num_prompts,
            self.num_used_blocks + other.num_used_blocks,
            self.num_blocks + other.num_blocks,
        )


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """What happened since the batch before.

    Attributes:
        seq: From 0 in each epoch.
        load: What the core has to do as the batch is sent; None in one that is sent again.
        learned: What its steps take, as far as it knows; None: it does not, or said so before.
    """

    epoch: int
    seq: int
    events: list[GrainEvent] = []
    load: RoutingLoad | None = None
    learned: LearnedTimes | None = None


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """A reader lacks batches.

    Attributes:
        ask: Its own number for this question.
        next_seq: The first that it lacks of this epoch; of another epoch it knows nothing.
    """

    ask: int
    epoch: int
    next_seq: int


class MissingBatches(msgspec.Struct, frozen=True, array_like=True, tag="missing"):
    """What was asked for, in order and without a gap, up to the newest."""

    ask: int
    batches: list[Batch]


class SnapshotPart(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """A share of all grains, as they were when the batch before `resume_seq` had been sent."""

    ask: int
    epoch: int
    resume_seq: int
    part: int
    num_parts: int
    stored: list[GrainsStored]


Answer: TypeAlias = MissingBatches | SnapshotPart


class EventEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where one engine core tells of its KV.

    Attributes:
        port, snapshot_port: Of the PUB and of the ROUTER socket.
        grain_tokens, hash_version: How its grains are named.
    """

    host: str
    port: int
    snapshot_port: int
    grain_tokens: int = GRAIN_TOKENS
    hash_version: int = HASH_VERSION


def first_epoch(incarnation: Incarnation) -> int:
    """The epoch that an engine's life begins with; those of the same life follow it."""
    return (int(incarnation, 16) & (1 << _INCARNATION_BITS) - 1) << _RESTART_BITS


def is_later_epoch(epoch: int, than: int) -> bool:
    """Whether an epoch that is heard of follows another one: of another life, it may."""
    return epoch > than or epoch >> _RESTART_BITS != than >> _RESTART_BITS


def curve_secret(secret: str) -> bytes:
    """The secret key of the sockets that listen, in Z85; the public one is what it implies."""
    import zmq.utils.z85

    return zmq.utils.z85.encode(key_for(secret, Purpose.EVENTS))
