"""Prefix matching and admission arithmetic over the pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdserve.kvcache.block_pool import BlockPool, EventLog
from pdserve.kvcache.lease import Holding, Ledger
from pdserve.wire.events import BlocksStored, Grain
from pdserve.wire.ids import GRAIN_TOKENS, block_hash, grain_hashes, root_hash

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdserve.wire.ids import BlockHash, BlockId


class PrefixHit(msgspec.Struct, frozen=True):
    """Cached blocks that begin a request. Holds nothing; valid until the next allocation.

    Attributes:
        num_tokens: Tokens they hold, a multiple of the block size.
        num_free: How many of them are free now, and would leave the free list.
    """

    blocks: Sequence[BlockId]
    num_tokens: int
    num_free: int


class SharedPrompt:
    """Data shared by the requests for one prompt's choices.

    Attributes:
        hashes: Hashes of the blocks that the prompt fills, as far as a request needed them.
        num_cached_tokens: Prompt tokens that a prefix cache had when the first of the requests
            was prefilled, at any engine; None before that. Blocks that it then left in the cache
            for the others do not count.
    """

    def __init__(self, num_cached_tokens: int | None = None) -> None:
        self.num_cached_tokens = num_cached_tokens
        self.hashes: list[BlockHash] = []


class HashChain:
    """One request's tokens, and the hashes of the blocks that they fill. O(new tokens).

    Args:
        shared: Data of the prompt.

    Attributes:
        output: The tokens behind the prompt; they only grow.
    """

    def __init__(
        self,
        block_size: int,
        prompt: Sequence[int],
        salt: str,
        shared: SharedPrompt | None = None,
    ) -> None:
        self.output: list[int] = []
        self.hashes: list[BlockHash] = []
        self._block_size = block_size
        self._prompt = prompt
        self._salt = salt
        self._root = root_hash(salt)
        self._of_prompt = [] if shared is None else shared.hashes
        self._grains: list[int] = []

    def of_prompt(self) -> Sequence[BlockHash]:
        """Return the hashes of the blocks that the prompt fills."""
        num_blocks = len(self._prompt) // self._block_size
        self.extend_to(num_blocks)
        return self.hashes[:num_blocks]

    def extend_to(self, num_blocks: int) -> None:
        """Hash blocks until there are `num_blocks`; all their tokens must exist."""
        size, num_prompt = self._block_size, len(self._prompt)
        self.hashes += self._of_prompt[len(self.hashes) : num_blocks]
        for index in range(len(self.hashes), num_blocks):
            start, stop = index * size, (index + 1) * size
            parent = self.hashes[-1] if self.hashes else self._root
            self.hashes.append(block_hash(parent, self._tokens(start, stop)))
            if stop <= num_prompt:
                self._of_prompt.append(self.hashes[-1])

    def stored(self, first: int, stop: int) -> BlocksStored:
        """Describe the blocks `first` to `stop`, whose hashes are known."""
        size, per_grain = self._block_size, GRAIN_TOKENS // self._block_size
        grains = range(first // per_grain, stop // per_grain)
        if len(self._grains) < grains.stop:
            rest = self._tokens(len(self._grains) * GRAIN_TOKENS, stop * size)
            parent = self._grains[-1] if self._grains else None
            self._grains += grain_hashes(rest, self._salt, parent)
        hashes = self.hashes
        return BlocksStored(
            blocks=hashes[first:stop],
            parent=hashes[first - 1] if first else None,
            token_ids=self._tokens(first * size, stop * size),
            block_size=size,
            salt=self._salt,
            grains=[
                Grain(self._grains[i], tuple(hashes[i * per_grain : (i + 1) * per_grain]))
                for i in grains
            ],
        )

    def _tokens(self, start: int, stop: int) -> Sequence[int]:
        num_prompt = len(self._prompt)
        tokens = self._prompt[start:stop]
        if stop <= num_prompt:
            return tokens
        return [*tokens, *self.output[max(0, start - num_prompt) : stop - num_prompt]]


class KVCacheManager:
    """Finds cached prefixes, says whether a request fits, opens its holding.

    Args:
        num_blocks: Size of the pool.
        block_size: Tokens per block.
        enable_prefix_caching: Whether blocks are published, so that `match` can find them.
        log_events: Whether to log `events`, which the caller must drain.

    Attributes:
        events: Log of blocks that became findable or were lost; None: nothing is logged.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        log_events: bool = False,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.events = EventLog() if log_events else None
        self.pool = BlockPool(num_blocks, self.events)
        self.ledger = Ledger(self.pool)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def chain(
        self, prompt: Sequence[int], salt: str, shared: SharedPrompt | None = None
    ) -> HashChain:
        """Return the hash chain of one request, without output."""
        return HashChain(self.block_size, prompt, salt, shared)

    def match(self, chain: HashChain, *, max_tokens: int) -> PrefixHit:
        """Return the longest cached prefix of at most `max_tokens` tokens."""
        if not self.enable_prefix_caching:
            return PrefixHit((), 0, 0)
        num_blocks = max_tokens // self.block_size
        chain.extend_to(num_blocks)
        blocks = self.pool.find(chain.hashes[:num_blocks])
        return PrefixHit(blocks, len(blocks) * self.block_size, self.pool.num_free_among(blocks))

    def open(self, hit: PrefixHit, num_tokens: int) -> Holding:
        """Hold the hit and fresh blocks behind it, for `num_tokens` in all.

        Raises:
            OutOfBlocksError: Nothing was held or taken.
        """
        return self.ledger.open(hit.blocks, self.blocks_for(num_tokens) - len(hit.blocks))

    def publish(self, holding: Holding, chain: HashChain, *, num_computed_tokens: int) -> None:
        """Make the blocks that `num_computed_tokens` fill findable."""
        if self.enable_prefix_caching:
            num_full = num_computed_tokens // self.block_size
            if num_full > holding.num_published:
                chain.extend_to(num_full)
                first = holding.publish(chain.hashes, num_full)
                if self.events is not None:
                    for start, stop in _runs(first):
                        self.events.stored(chain.stored(start, stop))


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield first and end of each run of consecutive numbers among ascending ones."""
    start = 0
    for i in range(1, len(indices) + 1):
        if i == len(indices) or indices[i] != indices[i - 1] + 1:
            yield indices[start], indices[i - 1] + 1
            start = i
