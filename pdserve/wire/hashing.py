"""Names for prefixes: a block's hash covers its tokens and everything before them."""

from __future__ import annotations

import array
import hashlib
from typing import TYPE_CHECKING

from pdserve.wire.ids import BlockHash

if TYPE_CHECKING:
    from collections.abc import Sequence


def root_hash(salt: str) -> BlockHash:
    """The parent of every first block of requests with this salt."""
    return BlockHash(hashlib.sha256(b"pdserve-prefix\0" + salt.encode()).digest())


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """SHA-256 over the parent's hash and the block's token ids (uint32, host order)."""
    return BlockHash(hashlib.sha256(parent + array.array("I", token_ids).tobytes()).digest())


def prompt_digest(token_ids: Sequence[int], salt: str) -> str:
    """Short name of a whole prompt, to pair a handoff with the prompt it was made from."""
    return block_hash(root_hash(salt), token_ids).hex()[:32]
