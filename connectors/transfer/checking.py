"""What D finds in the blocks that a rank of P writes, taken piece by piece as P goes on.

Once P has said that the WRITEs of some tokens have settled, nobody writes these bytes: each
earlier registration of the blocks ended by P's word, or by a fence. So a digest taken then says
as much as one taken after the last byte; neither says anything of a moment later. Sums of layers
add up, so the last chunk, which may come layer by layer, is taken so, too.

It knows KV memory and what P has said; neither messages nor threads.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.connectors.digests import BlockDigests
    from pdserve.connectors.slicing import Route
    from pdserve.wire.ids import BlockId
    from pdserve.wire.transfer import KVShape

_DIGEST = np.dtype("<u8")


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `[first_token, end_token)` of some layers (absolute)."""

    first_token: int
    end_token: int
    layers: range


class Check:
    """The digests of what one rank of P writes to one rank of D.

        tokens:  first ........ taken ........ settled ........ num_tokens
        layers:  all            all            [.., layers_end) of those behind `settled`

    Of the tokens behind what was taken whole, some layers may be taken already; then they are of
    all these tokens.

    Args:
        digests: Of this rank's memory.
        block_ids: D's whole table.
        first_token: Where the transfer begins.
    """

    def __init__(
        self,
        digests: BlockDigests,
        source: KVShape,
        route: Route,
        block_ids: Sequence[BlockId],
        *,
        first_token: int,
        num_tokens: int,
    ) -> None:
        self._digests = digests
        self._source, self._route = source, route
        self._block_ids = block_ids
        self._first_block = first_token // source.block_size
        self._num_tokens = num_tokens
        is_empty = not route or first_token >= num_tokens
        num_blocks = 0 if is_empty else -(-num_tokens // source.block_size) - self._first_block
        self._sums = np.zeros(num_blocks, dtype=_DIGEST)
        self._taken = self._settled = num_tokens if is_empty else first_token
        self._taken_layers_end = self._settled_layers_end = route.layers.start

    @property
    def found(self) -> bytes:
        """What P's digests must be, once `next_piece` is None and all has settled."""
        return self._sums.tobytes()

    def settle(self, num_tokens: int, layers_end: int = 0) -> None:
        """P has said that so much is written, and is not written any more.

        Args:
            num_tokens: Tokens of which all layers are.
            layers_end: Of the tokens behind them, up to the last, the layers before this one.
        """
        if num_tokens < self._num_tokens:
            num_tokens -= num_tokens % self._source.block_size
        self._settled = min(max(self._settled, num_tokens), self._num_tokens)
        # What was said of the layers of more tokens holds for those behind `_settled`, too.
        layers_end = min(layers_end, self._route.layers.stop)
        self._settled_layers_end = max(self._settled_layers_end, layers_end)

    def settle_all(self) -> None:
        """P has said that everything is written."""
        self._settled = self._num_tokens

    def next_piece(self) -> Piece | None:
        """What can be taken now, and is to be added before the next one is asked for."""
        if self._taken >= self._num_tokens:
            return None
        layers = self._route.layers
        is_begun = self._taken_layers_end > layers.start
        if self._settled > self._taken and not is_begun:
            return Piece(self._taken, self._settled, layers)
        is_rest = self._settled >= self._num_tokens
        stop = layers.stop if is_rest else self._settled_layers_end
        if stop > self._taken_layers_end:
            return Piece(self._taken, self._num_tokens, range(self._taken_layers_end, stop))
        return None

    def take(self, piece: Piece) -> bytes:
        """Read memory. For any thread; heavy."""
        return self._digests.found(
            self._source,
            dataclasses.replace(self._route, layers=piece.layers),
            self._block_ids,
            first_token=piece.first_token,
            num_tokens=piece.end_token,
        )

    def add(self, piece: Piece, taken: bytes) -> None:
        """Keep what `take` has found."""
        size = self._source.block_size
        sums = np.frombuffer(taken, _DIGEST)
        start = piece.first_token // size - self._first_block
        self._sums[start : start + len(sums)] += sums
        if piece.layers.stop == self._route.layers.stop:
            self._taken = piece.end_token
        else:
            self._taken_layers_end = piece.layers.stop
