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


def request_id_of(client_id: str, index: int, suffix: str) -> RequestId:
    """The engine-level id of one choice of a client's request; `suffix` has no dash."""
    return RequestId(f"{client_id}-{index}-{suffix}")


def client_id_of(request_id: str) -> tuple[str, int | None]:
    """The inverse: the client's id and the choice's index; None for an id made elsewhere."""
    parts = request_id.rsplit("-", 2)
    if len(parts) < 3 or not parts[1].isdecimal():
        return request_id, None
    return parts[0], int(parts[1])
