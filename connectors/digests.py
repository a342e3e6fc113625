"""Digests of KV blocks, which P sends and D compares with its own.

A digest of a block, layer and KV head is a sum over the block's words, each times a constant of
its place (token in P's block, element), times keys of its absolute layer, plane and head
(`kernels.digest`). Sums add up mod 2^64, so one number says what a rank of P has of a block for
a rank of D, and either can take it from memory of its own shape. It finds faults, not forgeries.

It knows KV memory and shapes; not who compares what, nor when.
"""

from __future__ import annotations

import itertools
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch

from pdserve.connectors.pieces import block_table
from pdserve.connectors.slicing import Shard, shard_of
from pdserve.errors import ConfigError, InternalError
from pdserve.kernels.digest import place_keys, word_constants
from pdserve.kernels.registry import kernels_on
from pdserve.wire.transfer import BlockOrder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from pdserve.connectors.slicing import Route
    from pdserve.wire.ids import BlockId
    from pdserve.wire.transfer import KVShape

_WORD_BYTES = 4
_DIGEST = np.dtype("<u8")
_of_thread = threading.local()


class BlockDigests:
    """The digests of one rank's blocks; as P's, taken once for each generation of a block.

    Thread-safe; neither the interpreter lock nor its own is held while memory is read. Keeps one
    generation per block and layer: `num_blocks x layers x (heads x 8 + 12)` bytes.

    A generation that is over is never asked for again (`kvcache.BlockPool`), so what was found in
    a block that was handed out anew meanwhile, whatever that is, does no harm.

    Args:
        kv: This rank's KV memory, contiguous.
        shape, rank: How it lies.

    Raises:
        ConfigError: A vector of this shape is no whole number of 32-bit words.
    """

    def __init__(self, kv: Tensor, shape: KVShape, rank: int) -> None:
        self._kv = kv
        self._shape = shape
        self._shard = shard_of(shape, rank)
        self._memory = byte_grid(kv, shape, self._shard)
        self._keys = _keys(shape, self._shard)
        self._kv_digests = kernels_on(kv.device).kv_digests
        self._lock = threading.Lock()
        # Of which generation of a block, and of how many of its tokens, a layer's digests are.
        places = (shape.num_blocks, len(self._shard.layers))
        self._generations = np.full(places, -1, dtype=np.int64)
        self._num_tokens = np.zeros(places, dtype=np.int32)
        self._digests = np.zeros((*places, len(self._shard.heads)), dtype=np.uint64)

    def take(
        self,
        block_ids: Sequence[BlockId],
        generations: Sequence[int],
        num_tokens: int,
        *,
        first_token: int = 0,
        num_layers: int | None = None,
    ) -> npt.NDArray[np.uint64]:
        """Return the digests of the blocks of the tokens `[first_token, num_tokens)`.

        Those that are not known are computed, and kept if the block has no newer generation.
        Both tables are whole. The KV of these tokens, and of those before them in the first
        block, is complete in memory, and stays there for as long as the blocks have these
        generations. For any thread; heavy.

        Args:
            num_layers: So many of this rank's are complete; None = all.

        Returns:
            `[blocks, layers, heads]`.

        Raises:
            PeerError: The table is too short, or names a block that is not there.
        """
        if first_token >= num_tokens:
            return self._digests[:0, :num_layers]
        size = self._shape.block_size
        first_block = first_token // size
        blocks = block_table(self._shape, block_ids, num_tokens, "P")[first_block:]
        wanted = np.asarray(generations, dtype=np.int64)[first_block : first_block + len(blocks)]
        if len(wanted) < len(blocks):
            raise InternalError(f"{len(wanted)} generations for {len(blocks)} blocks")
        counts = np.full(len(blocks), size, dtype=np.int32)
        counts[-1] = num_tokens - (first_block + len(blocks) - 1) * size
        with self._lock:
            is_known = (self._generations[blocks, :num_layers] == wanted[:, None]) & (
                self._num_tokens[blocks, :num_layers] == counts[:, None]
            )
            found = self._digests[blocks, :num_layers]
        for layers in _equal_columns(is_known):
            missing = np.flatnonzero(~is_known[:, layers.start])
            if not len(missing):
                continue
            spans = np.zeros((len(missing), 5), dtype=np.int64)
            spans[:, 0] = np.arange(len(missing))
            spans[:, 1] = blocks[missing]
            spans[:, 3] = counts[missing]
            found[missing, layers] = self._sums(spans, num_rows=len(missing), layers=layers)
            with self._lock:
                there = self._generations[blocks[missing], layers].max(1)
                is_newest = there <= wanted[missing]
                newest = missing[is_newest]
                self._generations[blocks[newest], layers] = wanted[newest, None]
                self._num_tokens[blocks[newest], layers] = counts[newest, None]
                self._digests[blocks[newest], layers] = found[newest, layers]
        return found

    def of(
        self,
        block_ids: Sequence[BlockId],
        generations: Sequence[int],
        num_tokens: int,
        route: Route,
        *,
        first_token: int = 0,
    ) -> bytes:
        """Digests for D: a little-endian uint64 per block, from the one of `first_token` on.

        Of the route's layers and heads. The first one covers its block from `first_token` on, the
        last one the tokens before `num_tokens`: D may have computed what lies before `first_token`
        itself, in other bits. What was not taken is computed now. The blocks are held by the
        caller until this returns.

        Raises:
            PeerError: As `take`.
        """
        if not route or first_token >= num_tokens:
            return b""
        taken = self.take(block_ids, generations, num_tokens, first_token=first_token)
        size = self._shape.block_size
        if first_token % size:
            # What is left of a sum of the time when the block was taken, not of what is there now.
            taken[0] -= self._sums(
                [(0, block_ids[first_token // size], 0, first_token % size, 0)], num_rows=1
            )[0]
        layers, heads = self._part(route)
        return _bytes_of(taken[:, layers, heads])

    def found(
        self,
        source: KVShape,
        route: Route,
        block_ids: Sequence[BlockId],
        *,
        first_token: int,
        num_tokens: int,
    ) -> bytes:
        """Return what P's `of` must have returned for KV that came here, to D, over a route.

        One per block of P, whatever D's block size. For any thread; heavy.

        Args:
            block_ids: D's whole table.
            first_token: Where the transfer began, or any edge of P's blocks behind that. D has the
                tokens before it in its table, too; they do not count.

        Raises:
            PeerError: The table is too short, or names a block that is not there.
        """
        if not route or first_token >= num_tokens:
            return b""
        dest = self._shape
        table = block_table(dest, block_ids, num_tokens, "D")
        first_block = first_token // source.block_size
        start_d = first_token - first_token % dest.block_size
        edges = np.unique(
            np.concatenate(
                (
                    np.arange(first_block * source.block_size, num_tokens, source.block_size),
                    np.arange(start_d, num_tokens, dest.block_size),
                    [first_token, num_tokens],
                )
            )
        )
        edges = edges[edges >= first_token]
        starts = edges[:-1]
        spans = np.empty((len(starts), 5), dtype=np.int64)
        spans[:, 0] = starts // source.block_size - first_block
        spans[:, 1] = table[starts // dest.block_size]
        spans[:, 2] = starts % dest.block_size
        spans[:, 3] = np.diff(edges)
        spans[:, 4] = starts % source.block_size
        layers, heads = self._part(route)
        with beside_steps(self._kv):
            found = self._kv_digests(
                self._memory[:, layers, :, heads],
                torch.from_numpy(spans),
                word_constants(source.block_size, _words(source)),
                _keys(source, Shard(route.layers, route.heads)),
                int(spans[-1, 0]) + 1,
            )
        return _bytes_of(found.numpy().view(np.uint64))

    def _part(self, route: Route) -> tuple[slice, slice]:
        """Return the route's layers and heads among those of this rank."""
        shard = self._shard
        return _within(route.layers, shard.layers), _within(route.heads, shard.heads)

    def _sums(
        self, spans: npt.ArrayLike, *, num_rows: int, layers: slice = slice(None)
    ) -> npt.NDArray[np.uint64]:
        """Read memory: digests `[num_rows, layers, heads]` of spans as `kv_digests` takes them."""
        constants = word_constants(self._shape.block_size, _words(self._shape))
        places = torch.from_numpy(np.asarray(spans, dtype=np.int64))
        with beside_steps(self._kv):
            sums = self._kv_digests(
                self._memory[:, layers], places, constants, self._keys[layers], num_rows
            )
        return sums.numpy().view(np.uint64)


def num_valid_tokens(
    source: KVShape, expected: bytes, found: bytes, *, first_token: int, num_tokens: int
) -> int:
    """Leading tokens of the prompt before the first block of P whose digests differ.

    `num_tokens` if all are equal; `first_token` if there are not as many of the one as of the
    other, which says nothing of any block.
    """
    if expected == found:
        return num_tokens
    if len(expected) != len(found):
        return first_token
    differ = np.frombuffer(expected, _DIGEST) != np.frombuffer(found, _DIGEST)
    good_blocks = first_token // source.block_size + int(differ.argmax())
    return max(first_token, good_blocks * source.block_size)


def byte_grid(kv: Tensor, shape: KVShape, shard: Shard) -> Tensor:
    """A view as bytes, `[num_blocks, layers, planes, heads, block_size, bytes of a vector]`."""
    vector_bytes = shape.head_dim * shape.dtype_bytes
    if vector_bytes % _WORD_BYTES:
        raise ConfigError(
            f"KV vectors of {shape.head_dim} elements with {shape.dtype_bytes} bytes each cannot "
            f"be digested: a vector's size must be a multiple of {_WORD_BYTES} bytes"
        )
    heads, tokens = len(shard.heads), shape.block_size
    is_hnd = shape.order is BlockOrder.HND
    inner = (heads, tokens) if is_hnd else (tokens, heads)
    dims = (shape.num_blocks, len(shard.layers), shape.num_planes, *inner, vector_bytes)
    blocks = kv.view(-1).view(torch.uint8).view(dims)
    return blocks if is_hnd else blocks.transpose(3, 4)


def beside_steps(kv: Tensor) -> AbstractContextManager[object]:
    """On CUDA, a stream of this thread's own.

    A step that the model's thread has queued has nothing to do with the blocks that others read
    or write beside it: there is no reason to wait until it is over.
    """
    if not kv.is_cuda:
        return nullcontext()
    streams: dict[torch.device, torch.cuda.Stream] = _of_thread.__dict__.setdefault("streams", {})
    if kv.device not in streams:
        streams[kv.device] = torch.cuda.Stream(kv.device, priority=-1)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(streams[kv.device])


def _equal_columns(table: npt.NDArray[np.bool_]) -> Iterator[slice]:
    """Cut the columns of `[rows, columns]` where one differs from the one before it."""
    cuts = np.flatnonzero((table[:, 1:] != table[:, :-1]).any(0)) + 1
    edges = [0, *cuts.tolist(), table.shape[1]]
    for start, stop in itertools.pairwise(edges):
        yield slice(start, stop)


def _bytes_of(taken: npt.NDArray[np.uint64]) -> bytes:
    """What goes over the wire of digests `[blocks, layers, heads]`."""
    sums: npt.NDArray[np.uint64] = taken.sum((1, 2), dtype=np.uint64)
    return sums.astype(_DIGEST).tobytes()


def _keys(shape: KVShape, share: Shard) -> Tensor:
    return place_keys(share.layers, shape.num_planes, share.heads)


def _words(shape: KVShape) -> int:
    return shape.head_dim * shape.dtype_bytes // _WORD_BYTES


def _within(part: range, whole: range) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start)
