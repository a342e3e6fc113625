"""What a rank says of itself once it is ready. No torch: engine cores read it too."""

from __future__ import annotations

import msgspec

from pdserve.connectors.base import KVLayout
from pdserve.wire.transfer import Endpoint


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, ready.

    Attributes:
        rank: Within its engine.
        layout: Of this rank's KV memory; `num_blocks` is equal on all ranks.
        layout_digest: Digest of `layout_fields`; engines with equal ones can exchange KV,
            rank by rank. Equal on all ranks.
        layout_fields: Of the whole engine: its model, KV layout and mesh.
        endpoint: The connector's side channel, if it has one.
        eos_token_ids: As in `config.json`.
        num_threads: CPU threads of its compute.
    """

    rank: int
    layout: KVLayout
    layout_digest: str
    layout_fields: dict[str, str]
    endpoint: Endpoint | None
    max_model_len: int
    architecture: str
    dtype: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device: str
    num_threads: int
