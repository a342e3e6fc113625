"""What the prefix cache has for a request, and what a request gives to it. Takes no blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.kvcache.manager import PrefixHit

if TYPE_CHECKING:
    from pdserve.kvcache.manager import KVCacheManager
    from pdserve.scheduler.request import Request

_NO_HIT = PrefixHit((), 0, 0)


class Prefixes:
    """The cache of `kv`, in terms of requests."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv

    def match(self, request: Request) -> PrefixHit:
        """The longest cached prefix that `request` may begin with."""
        if request.sampling.prompt_logprobs is not None:
            return _NO_HIT
        # At least one token is computed, so that there are logits to sample from; the
        # prompt of a handed-over request may be covered whole, for its next token is out.
        limit = request.num_tokens - 1
        return self._kv.match(
            request.chain, request.prompt_token_ids, request.output_token_ids, max_tokens=limit
        )

    def num_missing(self, request: Request) -> int:
        """Prompt tokens that would have to be computed if `request` started now."""
        return max(0, len(request.prompt_token_ids) - self.match(request).num_tokens)

    def publish(self, request: Request, num_tokens: int) -> None:
        """Let others find the blocks that the first `num_tokens` tokens fill."""
        assert request.holding is not None
        self._kv.publish(
            request.holding,
            request.chain,
            request.prompt_token_ids,
            request.output_token_ids,
            num_computed_tokens=num_tokens,
        )
