"""LMCache's own worker: the same server, its gather and scatter instead of ours.

What vLLM's connector for the server uses on a machine without a GPU: `transfer_context` of
lmcache 0.5.6, on KV tensors of vLLM's shape.
"""

from __future__ import annotations

import os
import secrets
import time
from typing import TYPE_CHECKING

import torch
import zmq
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.transfer_context.worker_transfer import EngineDrivenTransferContext
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

if TYPE_CHECKING:
    from collections.abc import Sequence

_TIMEOUT_S = 20.0
_MODEL = "lmcache-own"


class LMCacheWorker:
    """One worker with KV of its own, and the messages of its scheduler.

    Args:
        url: Of the server.
        num_layers, num_blocks, block_size, num_kv_heads, head_dim: Of the KV, which is bf16.
        chunk: Tokens of one of the server's objects.
    """

    def __init__(
        self,
        url: str,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        chunk: int,
    ) -> None:
        shape = (2, num_blocks, num_kv_heads, block_size, head_dim)  # as vLLM has it on a CPU
        self.kv = {
            f"layer.{i}": torch.zeros(shape, dtype=torch.bfloat16) for i in range(num_layers)
        }
        self._blocks_in_chunk = chunk // block_size
        self._client = RequestClientFactory.create(url, context=zmq.Context.instance())
        self._context = EngineDrivenTransferContext(os.getpid(), self._client)
        self._context.register(self.kv, _MODEL, 1, self._blocks_in_chunk, _TIMEOUT_S)

    def copy(self, tokens: Sequence[int], here: range, there: range) -> tuple[float, float]:
        """Save whole chunks from some blocks, and load them into others.

        Returns:
            Seconds of loading, and of saving.
        """
        layer = self.kv["layer.0"]
        layer[:, here.start : here.stop].view(torch.int16).random_(0, 1 << 14)
        saved_s = self._save(tokens, here)
        loaded_s = self._load(tokens, there)
        assert torch.equal(layer[:, list(here)], layer[:, list(there)])
        layer[:, there.start : there.stop].zero_()
        return loaded_s, saved_s

    def close(self) -> None:
        """Leave the server."""
        if (left := self._context.unregister()) is not None:
            left.result(timeout=_TIMEOUT_S)
        self._context.close()
        self._client.close()

    def _save(self, tokens: Sequence[int], blocks: range) -> float:
        key = self._key(tokens, secrets.token_hex(6), worker=0)
        began_s = time.perf_counter()
        saved = self._context.submit_store(
            "", key, self.kv, [list(blocks)], None, self._blocks_in_chunk
        )
        assert saved.result(timeout=_TIMEOUT_S)
        return time.perf_counter() - began_s

    def _load(self, tokens: Sequence[int], blocks: range) -> float:
        request_id = secrets.token_hex(6)
        looked_for = self._key(tokens, request_id, worker=None)
        self._client.lookup(looked_for, 1).result(timeout=_TIMEOUT_S)
        self._client.wait_prefetch_status(request_id, _TIMEOUT_S).result(timeout=_TIMEOUT_S)
        key = self._key(tokens, request_id, worker=0)
        began_s = time.perf_counter()
        loaded = self._context.submit_retrieve(
            request_id, key, self.kv, [list(blocks)], None, self._blocks_in_chunk
        )
        assert loaded.result(timeout=_TIMEOUT_S)
        taken_s = time.perf_counter() - began_s
        self._client.end_session(request_id).result(timeout=_TIMEOUT_S)
        return taken_s

    def _key(self, tokens: Sequence[int], request_id: str, worker: int | None) -> IPCCacheServerKey:
        return IPCCacheServerKey(
            model_name=_MODEL,
            world_size=1,
            worker_id=worker,
            token_ids=tuple(tokens),
            start=0,
            end=len(tokens),
            request_id=request_id,
            num_kv_readers=1,
        )
