"""A slot of the store: one KV head of a chunk in all layers of a stage, and its digest.

    8 bytes   magic, written last
    32 bytes  identity: SHA-256 over model, layout, salt, all tokens up to the chunk's end, unit
    8 x L     a digest of each layer (`kernels.digest`)
    then      KV: [layers, planes, chunk tokens, bytes of a vector]

The bytes do not depend on the writer's TP size and block size. Digests are computed from the bytes
while they are copied, in both directions, so a load reads each byte only once. A slot whose
writing was begun but not finished has no magic.

A CUDA device accesses the server's memory directly: kernels read and write it at the host's
addresses. For this it is locked and registered with the driver as long as the mapping is in use.

Knows memory and shapes, but neither the server nor when to copy what.
"""

from __future__ import annotations

import hashlib
import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from pdserve.connectors.digests import beside_steps, byte_grid
from pdserve.connectors.slicing import shard_of
from pdserve.errors import ConfigError
from pdserve.kernels.digest import place_keys, word_constants

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from pdserve.connectors.base import ConnectorContext
    from pdserve.connectors.lmcache.messages import ChunkRange
    from pdserve.kernels.ops import Ops
    from pdserve.wire.ids import BlockId

    Pool = npt.NDArray[np.uint8]
    Table = npt.NDArray[np.int64]
    Digests = npt.NDArray[np.uint64]

_MAGIC: Final = b"pdserve1"
_DIGESTS_AT: Final = 40
_ALIGN: Final = 64
_WORD_BYTES: Final = 4
_MAPPED_BYTES: Final = 1 << 16
"""Bytes of a file that Linux maps when a page of them is read; when one is written, only that."""
# A flag of CUDA's `cudaHostRegister`.
_PORTABLE: Final = 1
_MAPPED: Final = 2


class Slots(NamedTuple):
    """Where chunks lie in the server's memory.

    Attributes:
        pool: All of that memory; it stays mapped as long as it is referenced.
        starts: `[chunks, units]` int64, in bytes; negative: no slot.
    """

    pool: Pool
    starts: Table


class StoreLayout:
    """How the KV of a rank is cut into units, and their names.

    A unit is one KV head of one pipeline stage. So engines share KV whatever their TP sizes, but
    only with equal stages.

    Attributes:
        units: The units that this rank has, in the order of its heads.
        written: Those that it saves: only one of the ranks that share a head saves it.
        num_units: Units per chunk.
        num_readers: Ranks of an engine that read each unit.
        model: Name of everything that must be equal for KV to be shared.
        stages: The layers at which stages begin, and the last one's end; the suffix of `model`.
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
        named = f"{namespace}|{context.layout_digest}"
        self._any_stages = f"pdserve-{hashlib.sha256(named.encode()).hexdigest()[:32]}-"
        self.stages = "-".join(str(first) for first, _ in stages) + f"-{shape.num_layers}"
        self.model = self._any_stages + self.stages
        # The server uses one size for all units.
        max_layers = max(end - first for first, end in stages)
        self.header_bytes = -(-(_DIGESTS_AT + 8 * max_layers) // _ALIGN) * _ALIGN
        self._bytes_per_token = max_layers * shape.num_planes * shape.head_dim * shape.dtype_bytes

    def slot_bytes(self, chunk_tokens: int) -> int:
        """Return the bytes of a slot, for chunks of `chunk_tokens` tokens."""
        return self.header_bytes + self._bytes_per_token * chunk_tokens

    def stages_of(self, model: str) -> str:
        """Return an engine's stages if only they prevent sharing KV; otherwise empty."""
        is_like = model.startswith(self._any_stages) and model != self.model
        return model.removeprefix(self._any_stages) if is_like else ""

    def prefixes(self, chunks: ChunkRange, chunk_tokens: int) -> list[bytes]:
        """Return, for each chunk, a name of all tokens up to its end, the salt and the model."""
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
    """Copies chunks between the blocks of one rank and slots, all of its heads at once.

    A copy is complete when its call returns, on any device: on CUDA it runs on a stream of the
    calling thread and waits for it.

    Args:
        kv: This rank's KV memory, contiguous. If it lies on a CUDA device, every `Slots.pool` must
            be registered with the driver.
        kernels: Kernels for the device of `kv`.
    """

    def __init__(
        self,
        kv: Tensor,
        context: ConnectorContext,
        layout: StoreLayout,
        chunk_tokens: int,
        *,
        kernels: Ops,
    ) -> None:
        shape = context.shape
        shard = shard_of(shape, context.rank)
        self.chunk_tokens = chunk_tokens
        self.num_layers = len(shard.layers)
        self.bytes_per_chunk = layout.slot_bytes(chunk_tokens) - layout.header_bytes
        self.block_size = shape.block_size
        self._layout = layout
        self._grid = byte_grid(kv, shape, shard)
        vector_bytes = shape.head_dim * shape.dtype_bytes
        self._layer_bytes = shape.num_planes * chunk_tokens * vector_bytes
        self._constants = word_constants(chunk_tokens, vector_bytes // _WORD_BYTES)
        self._keys = place_keys(shard.layers, shape.num_planes, shard.heads)
        self._kv = kv
        self._gather, self._scatter = kernels.gather_chunks, kernels.scatter_chunks
        if kv.is_cuda:
            self._compile(len(shard.heads))

    def blocks_of(self, block_ids: Sequence[BlockId], chunks: ChunkRange) -> Table:
        """Return the blocks of some chunks from a whole table, `[chunks, blocks]`."""
        each = self.chunk_tokens // self.block_size
        ids = block_ids[chunks.first * each : chunks.end * each]
        return np.array(ids, dtype=np.int64).reshape(-1, each)

    def save(self, blocks: Table, slots: Slots, prefix: bytes) -> int:
        """Fill the slots of one chunk, for those heads of this rank that have one.

        Returns:
            Bytes copied.
        """
        starts, size = slots.starts[0], self._layout.header_bytes
        heads = [(head, at) for head, at in enumerate(starts.tolist()) if at >= 0]
        headers = {head: slots.pool[at : at + size] for head, at in heads}
        places = np.arange(0, size + self.bytes_per_chunk, _MAPPED_BYTES)
        np.take(slots.pool, starts[starts >= 0, None] + places)
        for header in headers.values():
            header[:] = 0
        digests = self._pass(self._gather, blocks, slots, slice(0, self.num_layers))[0]
        for head, header in headers.items():
            found = np.ascontiguousarray(digests[:, head]).view(np.uint8)
            header[_DIGESTS_AT : _DIGESTS_AT + len(found)] = found
            header[len(_MAGIC) : _DIGESTS_AT] = np.frombuffer(self._identity(prefix, head), "u1")
            header[: len(_MAGIC)] = np.frombuffer(_MAGIC, "u1")
        return len(headers) * self._layer_bytes * self.num_layers

    def check(self, slots: Slots, prefixes: Sequence[bytes]) -> tuple[int, Digests]:
        """Read the headers of chunks.

        Returns:
            How many leading chunks are complete and have the right names; and the digests that
            were saved with all chunks, `[chunks, layers, heads]`.
        """
        end = _DIGESTS_AT + 8 * self.num_layers
        headers = slots.pool[slots.starts[:, :, None] + np.arange(end)]
        heads = range(slots.starts.shape[1])
        named = b"".join(_MAGIC + self._identity(prefix, i) for prefix in prefixes for i in heads)
        wanted = np.frombuffer(named, "u1").reshape(*slots.starts.shape, _DIGESTS_AT)
        is_there = (headers[:, :, :_DIGESTS_AT] == wanted).all((1, 2))
        digests = np.ascontiguousarray(headers[:, :, _DIGESTS_AT:]).view(np.uint64)
        return _num_leading(is_there), digests.transpose(0, 2, 1)

    def load_layer(self, blocks: Table, slots: Slots, layer: int, saved: Digests) -> int:
        """Copy one layer of chunks into their blocks, skipping negative block ids.

        Args:
            saved: The digests of these chunks, as returned by `check`.

        Returns:
            How many leading chunks match their saved digests.
        """
        found = self._pass(self._scatter, blocks, slots, slice(layer, layer + 1))
        return _num_leading((found[:, 0] == saved[:, layer]).all(1))

    def _pass(
        self, copy: Callable[..., Tensor], blocks: Table, slots: Slots, layers: slice
    ) -> Digests:
        """Copy some layers of chunks; return their digests, `[chunks, layers, heads]`."""
        within = self._layout.header_bytes + layers.start * self._layer_bytes
        starts = np.where(slots.starts < 0, -1, slots.starts + within)
        tables = [torch.from_numpy(each) for each in (blocks, slots.pool, starts)]
        with beside_steps(self._kv):
            sums = copy(self._grid[:, layers], *tables, self._constants, self._keys[layers])
        return sums.numpy().view(np.uint64)

    def _compile(self, num_heads: int) -> None:
        """Compile the kernels by an empty copy, so that this does not delay the first load."""
        pool = torch.zeros(_ALIGN, dtype=torch.uint8, pin_memory=True).numpy()
        nowhere = Slots(pool, np.full((1, num_heads), -1, np.int64))
        blocks = np.zeros((1, self.chunk_tokens // self.block_size), np.int64)
        self._pass(self._gather, blocks, nowhere, slice(0, self.num_layers))
        self._pass(self._scatter, blocks, nowhere, slice(0, 1))

    def _identity(self, prefix: bytes, head: int) -> bytes:
        return hashlib.sha256(prefix + self._layout.units[head].to_bytes(4, "little")).digest()


def _num_leading(is_good: npt.NDArray[np.bool_]) -> int:
    return len(is_good) if is_good.all() else int(is_good.argmin())


def reach_from(device: torch.device, pool: Pool) -> None:
    """Make a mapping accessible to a device.

    Raises:
        ConfigError: See `lock`.
    """
    with torch.cuda.device(device):
        lock(pool, torch.cuda.cudart())  # type: ignore[no-untyped-call]


def lock(pool: Pool, runtime: Any) -> None:
    """Register a mapping with the driver until the mapping is garbage-collected.

    Args:
        runtime: The CUDA runtime, as returned by `torch.cuda.cudart`.

    Raises:
        ConfigError: The driver refuses to lock that much memory.
    """
    address = pool.ctypes.data
    status = runtime.cudaHostRegister(address, pool.nbytes, _PORTABLE | _MAPPED)
    if int(status):
        raise ConfigError(
            f"CUDA cannot lock the LMCache server's memory of {pool.nbytes / (1 << 30):.1f} GiB "
            f"({runtime.cudaGetErrorString(status)}): raise the limit on locked memory (`ulimit "
            "-l unlimited`, `docker run --ulimit memlock=-1`), or give the server less memory "
            "(--kv-tiers cpu:SIZE)",
            param="kv-transfer-config.lmcache.url",
        )
    end = weakref.finalize(pool, runtime.cudaHostUnregister, address)
    end.atexit = False  # the registration ends with the process
