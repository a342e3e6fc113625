"""How large the jobs of a transfer thread are, and what is said of them for traces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.wire.trace import RankSlice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.connectors.transfer.mover import Job, JobEnd

# Small enough for the last-level cache, where a digest finds it, and for all lanes to work on
# one load; large enough to hide the 50 us of a post.
PIECE_BYTES = 8 << 20

# A GPU digests this in 30 us, and the host launches that in ten times as long.
DEVICE_PIECE_BYTES = 64 << 20

MAX_SLICES = 4096
"""Kept for the next report by each kind of thread: some seconds of pieces, about 1 MB."""


def slices_of(job: Job, end: JobEnd) -> Iterator[RankSlice]:
    """What a lane did for a job, for traces: it moved bytes, and worked on them."""
    facts: dict[str, int | float | str] = {
        "request": job.request_id,
        "bytes": job.num_bytes,
        "descriptors": end.num_descriptors,
    }
    if end.failure is not None:
        facts["failure"] = end.failure
    yield RankSlice(end.posted_s, end.moved_s, "KV lanes", job.direction.value, facts)
    if end.settled_s > end.moved_s:
        yield RankSlice(
            end.moved_s, end.settled_s, "KV lanes", "digest", {"request": job.request_id}
        )
