"""Log-probabilities of chosen tokens and the likeliest ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pdserve.wire.sampling import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pdserve.kernels.ops import SamplingOps


Alternatives = int | tuple[int, ...]
"""What is reported beside a token: so many of the likeliest ones, or those with these ids."""


def token_logprobs(
    ops: SamplingOps, logits: Tensor, token_ids: Tensor, alternatives: Sequence[Alternatives]
) -> list[TokenLogprobs]:
    """Describe one token per row.

    Args:
        ops: Those of where the logits are.
        logits: `[M, vocab_size]` fp32, unmodified.
        token_ids: `[M]` int64, the tokens that stand there.
        alternatives: Alternatives to report, per row; ids are in the vocabulary.
    """
    counts = [min(each, logits.shape[-1]) if isinstance(each, int) else 0 for each in alternatives]
    found = ops.describe(logits, token_ids, torch.tensor(counts, dtype=torch.int32))
    normalisers = found.normalisers[:, None]
    values = (logits.gather(-1, token_ids[:, None]) - normalisers).squeeze(-1).tolist()
    top_values, top_ids = (logits.gather(-1, found.top) - normalisers).tolist(), found.top.tolist()
    ranks, described = found.ranks.tolist(), []
    for row, token_id in enumerate(token_ids.tolist()):
        named, count = alternatives[row], counts[row]
        if isinstance(named, int):
            top = list(zip(top_ids[row][:count], top_values[row][:count], strict=True))
        else:
            logprobs = (logits[row, list(named)] - normalisers[row]).tolist()
            top = list(zip(named, logprobs, strict=True))
        described.append(
            TokenLogprobs(token_id=token_id, logprob=values[row], rank=ranks[row], top=top)
        )
    return described
