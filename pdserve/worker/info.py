"""Description of a rank that is ready. No torch: engine cores read it too."""

from __future__ import annotations

import msgspec

from pdserve.connectors.base import KVLayout
from pdserve.wire.transfer import Endpoint, KVShape, Numerics


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, ready.

    Attributes:
        rank: Within its engine.
        layout: Of this rank's KV memory; `num_blocks` is equal on all ranks.
        layout_digest: Digest of `layout_fields`; engines with equal ones can exchange KV,
            however it is shared out. Equal on all ranks.
        layout_fields: What the KV means: model, weights, dtype, sizes.
        shape: How the engine's KV is shared out over its ranks. Equal on all of them.
        can_push: Its connector takes tickets.
        endpoint: The connector's side channel, if it has one.
        numerics: How the engine rounds. Equal on all ranks, if their devices are of one kind.
        eos_token_ids: As in `config.json`.
        num_threads: CPU threads of its compute.
        row_costs: Seconds of a product of the model by its number of rows, rising, if drafts are
            verified and this rank makes logits.
        draft_cost: Time of a token of a draft here, over that of a token of the model.
    """

    rank: int
    layout: KVLayout
    layout_digest: str
    layout_fields: dict[str, str]
    shape: KVShape
    can_push: bool
    endpoint: Endpoint | None
    max_model_len: int
    architecture: str
    dtype: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device: str
    num_threads: int
    row_costs: tuple[tuple[int, float], ...] = ()
    draft_cost: float = 0.0
    numerics: Numerics | None = None
