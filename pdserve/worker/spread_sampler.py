"""Sampling by the ranks of a TP group, each of which has some columns of the logits.

Greedy rows cost one value and one index per rank. Rows that need more are gathered on the
first rank, whose `Sampler` does with them what it does alone; their tokens go to all. So every
rank has every token, and knows of which rows the logits are not finite, and which have no token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdserve.worker.logit_rules import Hindered, Hindrance
from pdserve.worker.sampler import Sampled, Sampler, needs_whole_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from pdserve.wire.sampling import SamplingParams, TokenLogprobs
    from pdserve.worker.grammar import GrammarPool
    from pdserve.worker.vocabulary import SpreadVocabulary

_NOT_FINITE = -1
_NO_TOKEN = -2


class SpreadSampler:
    """A `Sampler` over the columns of several ranks.

    Args:
        num_rows: Rows of the batch.
        grammars: Of the first rank.
    """

    def __init__(
        self,
        vocabulary: SpreadVocabulary,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        grammars: GrammarPool | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._sampler = (
            Sampler(num_rows, vocab_size, device, grammars) if vocabulary.is_first else None
        )
        self._whole: set[int] = set()

    def add(
        self, row: int, params: SamplingParams, prompt: Sequence[int], outputs: Sequence[int]
    ) -> None:
        """See `Sampler`."""
        if needs_whole_row(params):
            self._whole.add(row)
            if self._sampler is not None:
                self._sampler.add(row, params, prompt, outputs)

    def remove(self, row: int) -> None:
        """See `Sampler`."""
        self._whole.discard(row)
        if self._sampler is not None:
            self._sampler.remove(row)

    def forced(self, row: int) -> list[int]:
        """See `Sampler`: on the first rank; the others know of none."""
        return [] if self._sampler is None else self._sampler.forced(row)

    def are_largest(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See `Sampler`."""
        return np.fromiter((row not in self._whole for row in rows.tolist()), np.bool_, len(rows))

    def sample(
        self, logits: Tensor, rows: NDArray[np.int64], num_outputs: NDArray[np.int64]
    ) -> Sampled:
        """Choose a token for each row, the same on every rank.

        Args:
            logits: `[M, len(vocab)]` fp32.
            rows: `[M]`, the batch row of each row of logits.
            num_outputs: `[M]`, tokens each request has put out before.

        Returns:
            Tokens; log-probabilities, and why rows have no token, on the first rank only.
        """
        is_whole = np.fromiter((row in self._whole for row in rows.tolist()), np.bool_, len(rows))
        if not is_whole.any():
            chosen, peaks = self._vocabulary.first_largest(logits)
            return Sampled(chosen, {}, np.flatnonzero(~np.isfinite(peaks)).tolist())
        whole, plain = np.flatnonzero(is_whole), np.flatnonzero(~is_whole)
        chosen = np.empty(len(rows), dtype=np.int64)
        described: dict[int, TokenLogprobs] = {}
        if len(plain):
            picked, peaks = self._vocabulary.first_largest(logits[plain])
            chosen[plain] = np.where(np.isfinite(peaks), picked, _NOT_FINITE)
        gathered = self._vocabulary.whole(logits[whole] if len(plain) else logits)
        told = np.zeros(len(whole), dtype=np.int64)
        hindered: dict[int, Hindered] = {}
        if gathered is not None:
            assert self._sampler is not None
            sampled = self._sampler.sample(gathered, rows[whole], num_outputs[whole])
            told = sampled.token_ids
            told[sampled.non_finite] = _NOT_FINITE
            told[list(sampled.hindered)] = _NO_TOKEN
            hindered = {int(whole[i]): why for i, why in sampled.hindered.items()}
            described = {int(whole[i]): entry for i, entry in sampled.logprobs.items()}
        chosen[whole] = self._vocabulary.announce(told)
        is_lost, has_none = chosen == _NOT_FINITE, chosen == _NO_TOKEN
        chosen[is_lost | has_none] = 0
        for i in np.flatnonzero(has_none).tolist():
            hindered.setdefault(i, Hindered(Hindrance.UNREADY))
        return Sampled(chosen, described, np.flatnonzero(is_lost).tolist(), hindered)
