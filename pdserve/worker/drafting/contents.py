"""Tracks the prefix each block's drafting KV belongs to, so that prefix hits apply to it.

A full block has a name: a digest of all tokens up to its end, and of the salt. A request that gets
the block later, with the same tokens up to its end, need not compute it again. Writing into a
block first removes its name. Knows nothing of the scheduler's cache: the name tells whether a
block came back with the same contents.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.worker.input_batch import InputBatch


class BlockContents:
    """Names of blocks, and of the prefixes of the rows that use them."""

    def __init__(self, batch: InputBatch, block_size: int) -> None:
        self._batch = batch
        self._block_size = block_size
        self._names: dict[int, bytes] = {}
        self._prefixes: dict[int, list[bytes]] = {}

    def add(self, row: int, salt: str) -> int:
        """Take the request of a row; return how many of its first tokens its blocks hold."""
        self._prefixes[row] = [hashlib.blake2b(salt.encode(), digest_size=16).digest()]
        blocks = self._batch.blocks(row)
        num = 0
        while num < len(blocks) and (name := self._name(row, num)):
            if self._names.get(int(blocks[num])) != name:
                break
            num += 1
        return num * self._block_size

    def remove(self, row: int) -> None:
        """Forget the request of a row; its blocks keep their names."""
        del self._prefixes[row]

    def write(self, row: int, start: int, end: int, *, is_prefix: bool = True) -> None:
        """Note that the positions of a row from `start` up to, excluding, `end` are written.

        Args:
            is_prefix: Whether they hold the result of computing all tokens up to there; then
                blocks that are full of the request's own tokens get a name.
        """
        blocks, size = self._batch.blocks(row), self._block_size
        for index in range(start // size, -(-end // size)):
            block = int(blocks[index])
            self._names.pop(block, None)
            if is_prefix and (index + 1) * size <= end:
                name = self._name(row, index)
                if name:
                    self._names[block] = name

    def _name(self, row: int, index: int) -> bytes:
        """Name the prefix that ends with a block; empty if there are fewer tokens."""
        prefixes, size = self._prefixes[row], self._block_size
        while len(prefixes) <= index + 1:
            first = (len(prefixes) - 1) * size
            tokens = self._batch.tokens(row, first, first + size)
            if len(tokens) < size:
                return b""
            text = prefixes[-1] + b"".join(each.to_bytes(4, "little") for each in tokens)
            prefixes.append(hashlib.blake2b(text, digest_size=16).digest())
        return prefixes[index + 1]
