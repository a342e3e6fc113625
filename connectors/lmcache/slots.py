"""What is in a slot of the store: one KV head of a chunk in all layers of a stage, and its proof.

    8 bytes   magic, written last
    32 bytes  identity: SHA-256 over model, layout, salt, all tokens up to the chunk's end, unit
    8 x L     a digest of each layer (`kernels.digest`)
    then      KV: [layers, planes, chunk tokens, bytes of a vector]

The bytes are the same whatever the TP size and block size of who wrote them. A digest is taken of
the blocks in the engine's own memory, before they are saved and after they were loaded, so that it
covers the way in and out, too; a slot that was begun and not finished has no magic.

Knows memory and shapes; no server, and not when what is copied.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from pdserve.connectors.digests import byte_grid
from pdserve.connectors.slicing import shard_of
from pdserve.kernels.digest import place_keys, word_constants
from pdserve.kernels.registry import kernels_on

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from pdserve.connectors.base import ConnectorContext
    from pdserve.connectors.lmcache.messages import ChunkRange
    from pdserve.wire.ids import BlockId

    Bytes = npt.NDArray[np.uint8]

_MAGIC: Final = np.frombuffer(b"pdserve1", np.uint8)
_IDENTITY: Final = slice(8, 40)
_DIGESTS_AT: Final = 40
_ALIGN: Final = 64
_WORD_BYTES: Final = 4


class StoreLayout:
    """How the KV of a rank is cut into units, and what names them.

    A unit is one KV head of one pipeline stage. So engines share KV whatever their TP sizes; of
    other stages they find nothing.

    Attributes:
        units: That this rank has, in the order of its heads.
        written: Of these, the ones that it saves: a head that several ranks have is one's.
        num_units: Of each chunk.
        num_readers: Ranks of an engine that read each unit.
        model: Names what must be equal for KV to be shared.
    """

    def __init__(self, context: ConnectorContext, namespace: str) -> None:
        shape = context.shape
        stages = shape.stages or ((0, shape.num_layers),)
        stage, tp_rank = divmod(context.rank, shape.tp_size)
        shard = shard_of(shape, context.rank)
        self.units = [stage * shape.num_kv_heads + head for head in shard.heads]
        self.num_units = len(stages) * shape.num_kv_heads
        self.num_readers = max(1, shape.tp_size // shape.num_kv_heads)
        self.written = self.units if tp_rank % self.num_readers == 0 else []
        named = f"{namespace}|{context.layout_digest}|{shape.stages}"
        self.model = f"pdserve-{hashlib.sha256(named.encode()).hexdigest()[:32]}"
        # The server has one size for all units.
        max_layers = max(end - first for first, end in stages)
        self.header_bytes = -(-(_DIGESTS_AT + 8 * max_layers) // _ALIGN) * _ALIGN
        self._bytes_per_token = max_layers * shape.num_planes * shape.head_dim * shape.dtype_bytes

    def slot_bytes(self, chunk_tokens: int) -> int:
        """Bytes of a slot, for chunks of so many tokens."""
        return self.header_bytes + self._bytes_per_token * chunk_tokens

    def prefixes(self, chunks: ChunkRange, chunk_tokens: int) -> list[bytes]:
        """What names the tokens up to the end of each chunk, the salt and the model."""
        taken = hashlib.sha256(self.model.encode())
        taken.update(hashlib.sha256(chunks.salt.encode()).digest())
        tokens, each = memoryview(chunks.token_ids), chunk_tokens * _WORD_BYTES
        taken.update(tokens[: chunks.first * each])
        found = []
        for index in range(chunks.first, chunks.end):
            taken.update(tokens[index * each : (index + 1) * each])
            found.append(taken.digest())
        return found


class ChunkMemory:
    """Copies chunks between the blocks of one rank and slots.

    Args:
        kv: This rank's KV memory, contiguous, on the CPU.
    """

    def __init__(
        self, kv: Tensor, context: ConnectorContext, layout: StoreLayout, chunk_tokens: int
    ) -> None:
        shape = context.shape
        shard = shard_of(shape, context.rank)
        self.chunk_tokens = chunk_tokens
        self.num_layers = len(shard.layers)
        self.bytes_per_chunk = layout.slot_bytes(chunk_tokens) - layout.header_bytes
        self._layout = layout
        self.block_size = shape.block_size
        self._grid = byte_grid(kv, shape, shard)
        self._bytes: Bytes = self._grid.numpy()
        vector_bytes = shape.head_dim * shape.dtype_bytes
        self._constants = word_constants(chunk_tokens, vector_bytes // _WORD_BYTES)
        self._keys = place_keys(shard.layers, shape.num_planes, shard.heads)
        self._kv_digests = kernels_on(kv.device).kv_digests
        num_blocks = chunk_tokens // shape.block_size
        self._body = (self.num_layers, shape.num_planes, num_blocks, shape.block_size, vector_bytes)

    def blocks_of(self, block_ids: Sequence[BlockId], chunk: int) -> npt.NDArray[np.int64]:
        """The blocks of one chunk, of a whole table."""
        each = self._body[2]
        return np.asarray(block_ids[chunk * each : (chunk + 1) * each], dtype=np.int64)

    # --- out

    def save(
        self, blocks: npt.NDArray[np.int64], slots: Sequence[Bytes | None], prefix: bytes
    ) -> int:
        """Fill the slots of a chunk, one for each of this rank's heads; None = it is not wanted.

        Returns:
            Bytes copied.
        """
        digests = self._digests_of_blocks(blocks, slice(None), 0)
        num_bytes = 0
        for head, slot in enumerate(slots):
            if slot is None:
                continue
            slot[: self._layout.header_bytes] = 0
            body = self._body_of(slot)
            found = self._bytes[:, :, :, head][blocks]  # [blocks, layers, planes, tokens, bytes]
            body[...] = found.transpose(1, 2, 0, 3, 4)
            num_bytes += body.nbytes
            at = slice(_DIGESTS_AT, _DIGESTS_AT + 8 * self.num_layers)
            slot[at] = np.ascontiguousarray(digests[:, head]).view(np.uint8)
            slot[_IDENTITY] = np.frombuffer(self._identity(prefix, head), np.uint8)
            slot[: len(_MAGIC)] = _MAGIC
        return num_bytes

    # --- in

    def names(self, slot: Bytes, prefix: bytes, head: int) -> bool:
        """Whether the slot says that it has this head of that chunk, and all of it."""
        is_whole = bool((slot[: len(_MAGIC)] == _MAGIC).all())
        return is_whole and slot[_IDENTITY].tobytes() == self._identity(prefix, head)

    def load_layer(
        self, blocks: npt.NDArray[np.int64], slots: Sequence[Bytes], layer: int, num_skipped: int
    ) -> bool:
        """Copy one layer of a chunk into its blocks, but for the first ones.

        Returns:
            Whether its digests are those that were saved.
        """
        wanted = blocks[num_skipped:]
        for head, slot in enumerate(slots):
            source = self._body_of(slot)[layer].transpose(1, 0, 2, 3)
            self._bytes[:, layer, :, head][wanted] = source[num_skipped:]
        found = self._digests_of_blocks(wanted, slice(layer, layer + 1), num_skipped)[0]
        if num_skipped:
            found = found + self._digests_of_slots(slots, layer, num_skipped)
        at = slice(_DIGESTS_AT + 8 * layer, _DIGESTS_AT + 8 * (layer + 1))
        saved = np.concatenate([slot[at] for slot in slots]).view(np.uint64)
        return bool((found == saved).all())

    # --- digests

    def _digests_of_blocks(
        self, blocks: npt.NDArray[np.int64], layers: slice, num_skipped: int
    ) -> npt.NDArray[np.uint64]:
        """`[layers, heads]`, of blocks that come behind so many others of their chunk."""
        size = self.block_size
        spans = np.zeros((len(blocks), 5), dtype=np.int64)
        spans[:, 1] = blocks
        spans[:, 3] = size
        spans[:, 4] = (np.arange(len(blocks)) + num_skipped) * size
        return self._sums(self._grid[:, layers], spans, self._keys[layers])

    def _digests_of_slots(
        self, slots: Sequence[Bytes], layer: int, num_blocks: int
    ) -> npt.NDArray[np.uint64]:
        """`[heads]`, of the first blocks of a layer as they lie in the slots."""
        spans = np.array([[0, 0, 0, num_blocks * self.block_size, 0]], dtype=np.int64)
        found = []
        for head, slot in enumerate(slots):
            body = torch.from_numpy(self._body_of(slot)[layer]).flatten(1, 2)[None, None, :, None]
            keys = self._keys[layer : layer + 1, :, head : head + 1].contiguous()
            found.append(self._sums(body, spans, keys)[0])
        return np.concatenate(found)

    def _sums(
        self, memory: Tensor, spans: npt.NDArray[np.int64], keys: Tensor
    ) -> npt.NDArray[np.uint64]:
        places = torch.from_numpy(spans)
        sums = self._kv_digests(memory, places, self._constants, keys, 1)[0]
        return sums.numpy().view(np.uint64)

    def _identity(self, prefix: bytes, head: int) -> bytes:
        return hashlib.sha256(prefix + self._layout.units[head].to_bytes(4, "little")).digest()

    def _body_of(self, slot: Bytes) -> Bytes:
        start = self._layout.header_bytes
        return slot[start : start + math.prod(self._body)].reshape(self._body)
