"""What lies in slots: only whole chunks, with the bytes that were saved, count as loaded."""

from __future__ import annotations

import mmap
import resource
import tempfile

import numpy as np
import torch

from pdserve.connectors.lmcache.messages import ChunkRange
from pdserve.connectors.lmcache.slots import ChunkMemory, Slots, StoreLayout
from pdserve.kernels.backend import KernelBackend
from pdserve.wire.ids import BlockId, RequestId
from tests.connectors.engines import context, layout
from tests.kernels.builds import KERNELS

CHUNK, NUM_CHUNKS, NUM_LAYERS, NUM_HEADS = 32, 3, 2, 2
CHUNKS = ChunkRange(1, RequestId("r"), bytes(4 * CHUNK * NUM_CHUNKS), "", 0, NUM_CHUNKS)
EACH = CHUNK // layout().block_size
HERE = [BlockId(block) for block in range(NUM_CHUNKS * EACH)]
THERE = [BlockId(31 - block) for block in HERE]


class Stage:
    """Three chunks that were saved, and blocks to load them into."""

    def __init__(self, kernels: KernelBackend = KERNELS) -> None:
        self.kv = torch.randn(32, NUM_LAYERS, 2, NUM_HEADS, 16, 8)
        self.layout = StoreLayout(context("P"), "")
        self.memory = self.memory_of(kernels)
        size = self.layout.slot_bytes(CHUNK)
        starts = np.arange(NUM_CHUNKS * NUM_HEADS).reshape(NUM_CHUNKS, NUM_HEADS) * size
        self.slots = Slots(np.full(starts.size * size, 7, np.uint8), starts)
        self.prefixes = self.layout.prefixes(CHUNKS, CHUNK)
        blocks = self.memory.blocks_of(HERE, CHUNKS)
        for index, prefix in enumerate(self.prefixes):
            one = slice(index, index + 1)
            saved = self.memory.save(blocks[one], Slots(self.slots.pool, starts[one]), prefix)
            assert saved == NUM_HEADS * (size - self.layout.header_bytes)

    def memory_of(self, kernels: KernelBackend) -> ChunkMemory:
        return ChunkMemory(self.kv, context("P"), self.layout, CHUNK, kernels=kernels)

    def load(self) -> list[int]:
        """Load all; leading chunks that are right, in the headers and in each layer."""
        num_named, saved = self.memory.check(self.slots, self.prefixes)
        blocks = self.memory.blocks_of(THERE, CHUNKS)
        layers = [
            self.memory.load_layer(blocks, self.slots, layer, saved) for layer in range(NUM_LAYERS)
        ]
        return [num_named, *layers]


def test_what_was_saved_is_right_and_loaded() -> None:
    stage = Stage()
    assert stage.load() == [3, 3, 3]
    assert torch.equal(stage.kv[THERE], stage.kv[HERE])


def test_a_bit_that_differs_ends_what_is_right_in_its_layer_alone() -> None:
    stage = Stage()
    body = stage.layout.slot_bytes(CHUNK) - stage.layout.header_bytes
    of_chunk_1 = stage.slots.starts[1, 1] + stage.layout.header_bytes
    stage.slots.pool[of_chunk_1 + body // NUM_LAYERS + 5] ^= 8
    assert stage.load() == [3, 3, 1]


def test_a_slot_that_was_begun_or_is_another_chunks_is_none() -> None:
    stage = Stage()
    first, second = stage.slots.starts[1, 0], stage.slots.starts[2, 0]
    size = stage.layout.slot_bytes(CHUNK)
    kept = stage.slots.pool[first : first + size].copy()
    stage.slots.pool[first] = 0  # the magic
    assert stage.load()[0] == 1
    stage.slots.pool[first : first + size] = kept
    stage.slots.pool[second : second + size] = kept
    assert stage.load() == [2, 3, 3]  # its digests are its own: only its name tells


def test_blocks_that_are_here_already_stay_as_they_are_and_the_rest_is_right() -> None:
    stage = Stage()
    _, saved = stage.memory.check(stage.slots, stage.prefixes)
    blocks = stage.memory.blocks_of(THERE, CHUNKS)
    blocks[0, 0] = -1
    stage.kv[THERE[0]] = 5.0
    for layer in range(NUM_LAYERS):
        assert stage.memory.load_layer(blocks, stage.slots, layer, saved) == NUM_CHUNKS
    assert (stage.kv[THERE[0]] == 5.0).all()
    assert torch.equal(stage.kv[THERE[1:]], stage.kv[HERE[1:]])


def test_heads_without_a_slot_are_not_saved() -> None:
    stage = Stage()
    stage.slots.pool[:] = 7
    stage.slots.starts[0, 1] = -1
    one = Slots(stage.slots.pool, stage.slots.starts[:1])
    blocks = stage.memory.blocks_of(HERE, CHUNKS)[:1]
    size = stage.layout.slot_bytes(CHUNK)
    assert stage.memory.save(blocks, one, stage.prefixes[0]) == size - stage.layout.header_bytes
    assert (stage.slots.pool[size:] == 7).all()
    assert (stage.slots.pool[:size] != 7).any()


def test_a_save_maps_many_pages_of_the_servers_memory_at_a_time() -> None:
    """Writing alone would map each of them by a fault of its own."""
    stage, tokens = Stage(), 512
    chunk = ChunkRange(1, RequestId("r"), bytes(4 * tokens), "", 0, 1)
    memory = ChunkMemory(stage.kv, context("P"), stage.layout, tokens, kernels=KERNELS)
    blocks = memory.blocks_of([BlockId(block) for block in range(32)], chunk)
    size = NUM_HEADS * stage.layout.slot_bytes(tokens)
    starts = np.arange(NUM_HEADS)[None] * stage.layout.slot_bytes(tokens)
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.write(bytes(size))
        file.flush()
        num_faults = []
        for _ in range(2):  # the first save takes memory of its own, too
            pool = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            memory.save(blocks, Slots(pool, starts), b"")
            num_faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
    assert num_faults[1] < size // mmap.PAGESIZE // 2
