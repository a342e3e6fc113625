"""A store as a connector: saves the KV of prompts, layer by layer, and loads it into later ones."""

import msgspec

from pdserve.connectors import base
from pdserve.wire.transfer import ConnectorMetadata

KEPT = {}  # by block hash, and then by rank and layer; for halves that share a process


class StoreScheduler(base.KVConnectorScheduler):
    def __init__(self, shape):
        self._shape, self._loads = shape, []

    def _found(self, request):
        hashes, shape = request.prompt_block_hashes, self._shape
        lacks = [len(KEPT.get(h, ())) < shape.num_layers * shape.tp_size for h in hashes]
        return hashes[: [*lacks, True].index(True)]

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        num_tokens = len(self._found(request)) * self._shape.block_size
        return base.Match(max(0, num_tokens - num_computed_tokens), is_async=False)

    def update_state_after_alloc(self, request, block_ids, num_external_tokens, *, generations=()):
        found = list(zip(self._found(request), block_ids, strict=False))
        self._loads += found[len(found) - num_external_tokens // self._shape.block_size :]

    def build_connector_meta(self, step):
        saves, loads, self._loads = [], self._loads, []
        for view, blocks, _, start, end in map(step.get, step):
            if view.is_unproven:  # what a load may have failed for is not kept
                continue
            full = slice(start // self._shape.block_size, end // self._shape.block_size)
            saves += zip(view.prompt_block_hashes[full], blocks[full], strict=False)
        return ConnectorMetadata(msgspec.msgpack.encode((loads, saves)))


class StoreWorker(base.KVConnectorWorker):
    def __init__(self, rank):
        self._rank = rank

    def register_kv_caches(self, kv, layout):
        self._kv = kv

    def start_load_kv(self, metadata):
        self._loads, self._saves = msgspec.msgpack.decode(metadata.payload)
        return bool(self._loads or self._saves)

    def wait_for_layer_load(self, layer):
        for key, block in self._loads:
            self._kv[block, layer] = KEPT[key][self._rank, layer]

    def save_kv_layer(self, layer):
        for key, block in self._saves:
            KEPT.setdefault(key, {})[self._rank, layer] = self._kv[block, layer].clone()


class StoreConnector(base.KVConnectorBase):
    name: str = "store"

    def make_scheduler(self, context, endpoints):
        return StoreScheduler(context.shape)

    def make_worker(self, context, wake):
        return StoreWorker(context.rank)
