"""A store as a connector: blocks of prompts, kept in memory under their hashes.

It saves what steps compute and loads the longest prefix that it has, both layer by layer inside
the step. What another package would add is this file, and a line that registers `StoreConnector`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdserve.connectors.base import (
    Capabilities,
    KVConnectorBase,
    KVConnectorScheduler,
    KVConnectorWorker,
    Match,
)
from pdserve.wire.ids import BlockHash, BlockId, RequestId
from pdserve.wire.transfer import ConnectorMetadata

if TYPE_CHECKING:
    from torch import Tensor


class Transfers(msgspec.Struct):
    """What one step loads and saves, block by block."""

    loads: list[tuple[RequestId, BlockHash, BlockId]] = []
    saves: list[tuple[BlockHash, BlockId]] = []


class StoreScheduler(KVConnectorScheduler):
    def __init__(self, context, stored):
        self._ranks, self._stored = range(context.num_ranks), stored
        self._block_size = context.layout.block_size
        self._staged = Transfers()

    def _stored_of(self, request):
        hashes = request.prompt_block_hashes
        missing = (
            i for i, h in enumerate(hashes) if {(r, h) for r in self._ranks} - self._stored.keys()
        )
        return hashes[: next(missing, len(hashes))]

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        num_tokens = len(self._stored_of(request)) * self._block_size
        return Match(max(0, num_tokens - num_computed_tokens), is_async=False)

    def update_state_after_alloc(self, request, block_ids, num_external_tokens, *, generations=()):
        pairs = list(zip(self._stored_of(request), block_ids, strict=False))
        for block_hash, block in pairs[len(pairs) - num_external_tokens // self._block_size :]:
            self._staged.loads.append((request.request_id, block_hash, block))

    def build_connector_meta(self, step):
        for view, blocks, _, start, end in map(step.get, step):
            full = slice(start // self._block_size, end // self._block_size)
            self._staged.saves += zip(view.prompt_block_hashes[full], blocks[full], strict=False)
        staged, self._staged = self._staged, Transfers()
        return ConnectorMetadata(msgspec.msgpack.encode(staged))


class StoreWorker(KVConnectorWorker):
    def __init__(self, context, stored):
        self._rank, self._stored, self._step = context.rank, stored, Transfers()
        self._saving: dict[BlockHash, dict[int, Tensor]] = {}

    def register_kv_caches(self, kv, layout):
        self._kv, self._num_layers = kv, layout.num_layers

    def start_load_kv(self, metadata):
        self._step = msgspec.msgpack.decode(metadata.payload, type=Transfers)

    def wait_for_layer_load(self, layer):
        self._load(self._step, layer)

    def save_kv_layer(self, layer):
        self._save(self._step, layer)

    def wait_for_save(self):
        self._step = Transfers()
        return ()

    def _load(self, step, layer):
        for _, block_hash, block in step.loads:
            self._kv[block, layer] = self._stored[self._rank, block_hash][layer]

    def _save(self, step, layer):
        for block_hash, block in step.saves:
            layers = self._saving.setdefault(block_hash, {})
            layers[layer] = self._kv[block, layer].clone()
            if len(layers) == self._num_layers:
                self._stored[self._rank, block_hash] = self._saving.pop(block_hash)


class StoreConnector(KVConnectorBase, frozen=True, kw_only=True):
    name: str = "store"
    capabilities: Capabilities = Capabilities(layerwise_load=True, layerwise_save=True)
    stored: dict = msgspec.field(default_factory=dict)

    def make_scheduler(self, context, endpoints):
        return StoreScheduler(context, self.stored)

    def make_worker(self, context, wake):
        return StoreWorker(context, self.stored)
