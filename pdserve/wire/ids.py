"""Names for the ids that travel, so that a type checker tells them apart."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
"""One engine-level request (one choice of one prompt); unique within a deployment."""

EngineId = NewType("EngineId", str)
"""An engine's stable name; the same after a restart."""

Incarnation = NewType("Incarnation", str)
"""Random per process start: the epoch that fences references to an earlier life."""

BlockId = NewType("BlockId", int)
"""Index of a KV block in one engine's pool."""

BlockHash = NewType("BlockHash", bytes)
"""Names the prefix that ends with a full block (see `wire.hashing`)."""
