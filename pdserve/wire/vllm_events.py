"""KV events in vLLM's shape, which the indexers of Dynamo, llm-d, vllm-router and others read.

A batch is an array `[seconds, events, rank]`, an event a map (vLLM since its #42892). The frames of
a batch are `[topic, seq, payload]`. A replayed batch has an empty frame before these, and the end
of a replay has the number -1 and no payload. pdserve itself does not read these messages.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, assert_never

import msgspec

from pdserve.wire.events import BlocksCleared, BlocksRemoved, BlocksStored

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pdserve.wire.events import KVEvent
    from pdserve.wire.ids import BlockHash

SEQ_BYTES: Final = 8
_END: Final = (-1).to_bytes(SEQ_BYTES, signed=True)


class VllmStored(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="BlockStored"):
    """See vLLM's `BlockStored`; `extra_keys` of the first block of a prefix has the salt."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None = None
    medium: str
    lora_name: str | None = None
    extra_keys: list[tuple[str] | None]
    group_idx: int = 0
    kv_cache_spec_kind: str = "full_attention"


class VllmRemoved(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="BlockRemoved"):
    """See vLLM's `BlockRemoved`."""

    block_hashes: list[int]
    medium: str
    group_idx: int = 0


class VllmCleared(msgspec.Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    """See vLLM's `AllBlocksCleared`; it has no medium, so readers forget tiers, too."""


class VllmBatch(msgspec.Struct, frozen=True, array_like=True):
    """See vLLM's `KVEventBatch`; covers one step of an engine core."""

    ts: float
    events: list[VllmStored | VllmRemoved | VllmCleared]
    data_parallel_rank: int


class VllmEvents:
    """Numbers the batches of one engine core, and keeps them for readers that miss some.

    Args:
        rank: The core's rank among those of its engine.
        topic: First frame of each batch.
        num_kept: Batches kept for replays.
        replay_topic: Whether replayed batches have the topic.
    """

    def __init__(self, *, rank: int, topic: str, num_kept: int, replay_topic: bool) -> None:
        self._rank = rank
        self._topic = topic.encode()
        self._replay_topic = [self._topic] if replay_topic else []
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=num_kept)
        self._encoder = msgspec.msgpack.Encoder()
        self._seq = 0

    def skip(self, num_batches: int) -> None:
        """Skip numbers, so that readers see that batches were lost."""
        self._seq += num_batches

    def frames(self, events: Iterable[KVEvent], *, wall_s: float) -> Sequence[bytes]:
        """Return the next batch as it is published."""
        batch = VllmBatch(wall_s, [_of(event) for event in events], self._rank)
        seq, payload = self._seq, self._encoder.encode(batch)
        self._kept.append((seq, payload))
        self._seq += 1
        return (self._topic, seq.to_bytes(SEQ_BYTES), payload)

    def replay(self, request: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
        """Yield the answers to a replay request, whose last frame is the first number wanted.

        Yields nothing if it has no such frame.
        """
        if not request or len(request[-1]) != SEQ_BYTES:
            return
        first = int.from_bytes(request[-1])
        for seq, payload in self._kept:
            if seq >= first:
                yield (b"", *self._replay_topic, seq.to_bytes(SEQ_BYTES), payload)
        yield (b"", *(b"" for _ in self._replay_topic), _END, b"")


def _name(block: BlockHash) -> int:
    """Return the low 64 bits, as vLLM sends them."""
    return int.from_bytes(block[-8:])


def _of(event: KVEvent) -> VllmStored | VllmRemoved | VllmCleared:
    match event:
        case BlocksStored():
            keys: list[tuple[str] | None] = [None] * len(event.blocks)
            if event.salt and event.parent is None:
                keys[0] = (event.salt,)
            return VllmStored(
                block_hashes=[_name(block) for block in event.blocks],
                parent_block_hash=None if event.parent is None else _name(event.parent),
                token_ids=event.token_ids,
                block_size=event.block_size,
                medium=event.medium,
                extra_keys=keys,
            )
        case BlocksRemoved(blocks, medium):
            return VllmRemoved(block_hashes=[_name(block) for block in blocks], medium=medium)
        case BlocksCleared():
            return VllmCleared()
        case _:
            assert_never(event)
