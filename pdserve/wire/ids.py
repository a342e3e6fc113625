"""Names: ids that travel, apart for the type checker, and prefixes.

A block's hash covers its tokens and everything before them.
"""

from __future__ import annotations

import array
import hashlib
from typing import TYPE_CHECKING, Final, NewType

if TYPE_CHECKING:
    from collections.abc import Sequence

GRAIN_TOKENS: Final = 256
"""The unit of KV events and of indexes made from them, a multiple of every block size."""

RequestId = NewType("RequestId", str)
"""One engine-level request (one choice of one prompt); unique within a deployment."""

EngineId = NewType("EngineId", str)
"""An engine's stable name; the same after a restart."""

Incarnation = NewType("Incarnation", str)
"""Random per process start: invalidates references to an earlier life."""

BlockId = NewType("BlockId", int)
"""Index of a KV block in one engine's pool."""

BlockHash = NewType("BlockHash", bytes)
"""Names the prefix that ends with a full block (see `block_hash`)."""


def request_id_of(client_id: str, index: int, suffix: str) -> RequestId:
    """Return the engine-level id of one choice of a client's request; `suffix` has no dash."""
    return RequestId(f"{client_id}-{index}-{suffix}")


def client_id_of(request_id: str) -> tuple[str, int | None]:
    """Return the client's id and the choice's index; None for an id made elsewhere."""
    parts = request_id.rsplit("-", 2)
    if len(parts) < 3 or not parts[1].isdecimal():
        return request_id, None
    return parts[0], int(parts[1])


def root_hash(salt: str) -> BlockHash:
    """Return the parent of every first block of requests with this salt."""
    return BlockHash(hashlib.sha256(b"pdserve-prefix\0" + salt.encode()).digest())


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Return SHA-256 over the parent's hash and the block's token ids (uint32, host order)."""
    return BlockHash(hashlib.sha256(parent + array.array("I", token_ids).tobytes()).digest())


def prompt_digest(token_ids: Sequence[int], salt: str) -> str:
    """Return a digest of a whole prompt, to pair a handoff with the prompt it was made from."""
    return block_hash(root_hash(salt), token_ids).hex()[:32]


def grain_hashes(token_ids: Sequence[int], salt: str, parent: int | None = None) -> list[int]:
    """Return the 64-bit names of the grains that `token_ids` fill: BLAKE2b (RFC 7693) in a chain.

    A name indicates where a prefix is likely to be found, but does not prove that it is the same
    one, as `block_hash` does.

    Args:
        parent: The grain before the tokens; None if they begin the prefix.
    """
    name = b"pdserve-grain\0" + salt.encode() if parent is None else parent.to_bytes(8)
    found = []
    for start in range(0, len(token_ids) - GRAIN_TOKENS + 1, GRAIN_TOKENS):
        tokens = array.array("I", token_ids[start : start + GRAIN_TOKENS]).tobytes()
        name = hashlib.blake2b(name + tokens, digest_size=8).digest()
        found.append(int.from_bytes(name))
    return found
