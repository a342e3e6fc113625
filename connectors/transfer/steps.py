"""What steps of P have made complete in memory: whoever is waiting for it is told.

A chunk of a push is written; of a prompt that will be pulled the digests are taken, so that they
are known when its lease begins, but for those of its last chunk. That holds no block: one that
has been handed out meanwhile is of another generation, and the digests of the one before are
never asked for again.

It knows neither leases nor sockets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.connectors.handover.instructions import Chunk
    from pdserve.connectors.transfer.pushes import ChunkStep
    from pdserve.connectors.transfer.seams import Seams


class Steps:
    """Chunks of this rank, in the order of their steps.

    Args:
        on_pushed: Takes a chunk of a push.
    """

    def __init__(self, seams: Seams, *, on_pushed: Callable[[ChunkStep], None]) -> None:
        self._on_pushed = on_pushed
        self._digests = seams.digests
        self._background = seams.background
        self._block_size = seams.context.shape.block_size

    def add(self, step: ChunkStep) -> None:
        """Part of a chunk, or all of it, is complete."""
        if step.chunk.nonce:
            self._on_pushed(step)
        elif step.is_over:
            self._take_digests(step.chunk)

    def _take_digests(self, chunk: Chunk) -> None:
        """Of its whole blocks; the last one may be written on."""
        first_token = chunk.start_token - chunk.start_token % self._block_size
        end_token = chunk.end_token - chunk.end_token % self._block_size

        def work() -> Callable[[], None]:
            self._digests.take(
                chunk.block_ids, chunk.generations, end_token, first_token=first_token
            )
            return _nothing

        self._background.submit(work, chunk.request_id)


def _nothing() -> None:
    """Nobody waits for these digests."""
