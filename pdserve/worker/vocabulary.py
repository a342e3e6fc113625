"""The vocabulary shared out over a TP group: each rank computes some columns of the logits.

The likeliest token of a row needs one value and one index from each rank. Rows that need more are
gathered on the first rank, whose `Sampler` treats them as on a single rank; their tokens go to
all. So every rank has every token, and knows which rows have logits that are not finite, and
which have no token.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import torch

from pdserve.errors import InternalError
from pdserve.worker.logit_rules import Hindered, Hindrance
from pdserve.worker.sampler import (
    Sampled,
    Sampler,
    first_largest,
    is_random,
    needs_whole_row,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from pdserve.parallel.group import Group
    from pdserve.wire.sampling import SamplingParams, TokenLogprobs

_NOT_FINITE = -1
_NO_TOKEN = -2


class SpreadVocabulary:
    """The vocabulary as a TP group holds it. Every rank makes the same calls in the same order.

    Args:
        vocab: Token ids whose logits this rank computes; contiguous over the ranks, in order.
        device: The device that holds the logits.

    Raises:
        InternalError: The ranks' parts in order do not make up the vocabulary.
    """

    def __init__(self, tp: Group, vocab: range, *, vocab_size: int, device: torch.device) -> None:
        parts = tp.gather_ints([vocab.start, vocab.stop])
        if [0, *(stop for _, stop in parts)] != [*(start for start, _ in parts), vocab_size]:
            raise InternalError(f"parts {parts} are not a vocabulary of {vocab_size}, in order")
        self._tp = tp
        self._vocab = vocab
        self._device = device
        self._widths = [stop - start for start, stop in parts]

    @property
    def is_first(self) -> bool:
        """Whether this rank gets whole rows."""
        return self._tp.is_first

    def first_largest(self, logits: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the likeliest token of each row, on every rank.

        Args:
            logits: `[M, len(vocab)]` fp32.

        Returns:
            `[M]` token ids, the lowest on a tie; `[M]`, their logits. A NaN counts as larger
            than any number, on whichever rank.
        """
        found = self._tp.all_gather(self._mine(logits))
        peaks, token_ids = found.view(self._tp.size, 2, -1).cpu().numpy().swapaxes(0, 1)
        # A tie goes to the first rank, whose ids are the lowest.
        winner = peaks.argmax(0), np.arange(peaks.shape[1])
        return token_ids[winner].astype(np.int64), peaks[winner]

    def _mine(self, logits: Tensor) -> Tensor:
        """Return this rank's largest logits and their ids, `[2, M]` fp64, which is exact."""
        if not self._vocab:
            return logits.new_full((2, len(logits)), -torch.inf, dtype=torch.float64)
        index, peaks = first_largest(logits)
        return torch.stack([peaks.double(), (index + self._vocab.start).double()])

    def whole(self, logits: Tensor) -> Tensor | None:
        """Send columns to the first rank.

        Args:
            logits: `[M, len(vocab)]` fp32.

        Returns:
            `[M, vocab_size]` on the first rank, None on the others.
        """
        num_rows = len(logits)
        to_first = [0] * (self._tp.size - 1)
        if not self.is_first:
            self._tp.all_to_all(logits.reshape(-1), [0, *to_first], [logits.numel(), *to_first])
            return None
        sizes = [num_rows * width for width in self._widths]
        flat = self._tp.all_to_all(logits.reshape(-1), sizes, [logits.numel(), *to_first])
        ends = itertools.accumulate(sizes)
        parts = (flat[end - size : end] for size, end in zip(sizes, ends, strict=True) if size)
        return torch.cat([part.view(num_rows, -1) for part in parts], dim=-1)

    def announce(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first rank's `values` on every rank; the others pass an array as long."""
        received = self._tp.broadcast(torch.from_numpy(values).to(self._device))
        return received.cpu().numpy()


class SpreadSampler:
    """A `Sampler` over the columns of several ranks.

    Args:
        sampler: For whole rows, on the first rank.
    """

    def __init__(self, vocabulary: SpreadVocabulary, sampler: Sampler | None) -> None:
        self._vocabulary, self._sampler = vocabulary, sampler
        self._whole: set[int] = set()
        self._random: set[int] = set()

    def add(
        self, row: int, params: SamplingParams, prompt: Sequence[int], outputs: Sequence[int]
    ) -> None:
        """See `Sampler`."""
        if is_random(params):
            self._random.add(row)
        if needs_whole_row(params):
            self._whole.add(row)
            if self._sampler is not None:
                self._sampler.add(row, params, prompt, outputs)

    def remove(self, row: int) -> None:
        """See `Sampler`."""
        self._whole.discard(row)
        self._random.discard(row)
        if self._sampler is not None:
            self._sampler.remove(row)

    def forced(self, row: int) -> list[int]:
        """See `Sampler`; on other ranks than the first, always empty."""
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
            num_outputs: `[M]`, number of tokens each request has already put out.

        Returns:
            Tokens; on the first rank also log-probabilities, and why rows have no token.
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
        announced = np.zeros(len(whole), dtype=np.int64)
        hindered: dict[int, Hindered] = {}
        if gathered is not None:
            assert self._sampler is not None
            sampled = self._sampler.sample(gathered, rows[whole], num_outputs[whole])
            announced = sampled.token_ids
            announced[sampled.non_finite] = _NOT_FINITE
            announced[list(sampled.hindered)] = _NO_TOKEN
            hindered = {int(whole[i]): why for i, why in sampled.hindered.items()}
            described = {int(whole[i]): entry for i, entry in sampled.logprobs.items()}
        chosen[whole] = self._vocabulary.announce(announced)
        is_lost, has_none = chosen == _NOT_FINITE, chosen == _NO_TOKEN
        chosen[is_lost | has_none] = 0
        for i in np.flatnonzero(has_none).tolist():
            hindered.setdefault(i, Hindered(Hindrance.UNREADY))
        return Sampled(chosen, described, np.flatnonzero(is_lost).tolist(), hindered)

    def guess(
        self,
        logits: Tensor,
        rows: NDArray[np.int64],
        num_outputs: NDArray[np.int64],
        *,
        draws: bool,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `Sampler`; the same on every rank.

        Args:
            logits: `[M, len(vocab)]` fp32, this rank's columns.
        """
        likeliest, _ = self._vocabulary.first_largest(logits)
        random = [i for i, row in enumerate(rows.tolist()) if draws and row in self._random]
        if not random:
            return likeliest, likeliest
        drawn = likeliest.copy()
        gathered, guessed = self._vocabulary.whole(logits[random]), likeliest[random]
        if gathered is not None:
            guessed = self.guess_whole(gathered, rows[random], num_outputs[random], draws=True)[1]
        drawn[random] = self._vocabulary.announce(guessed)
        return likeliest, drawn

    def guess_whole(
        self,
        logits: Tensor,
        rows: NDArray[np.int64],
        num_outputs: NDArray[np.int64],
        *,
        draws: bool,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `Sampler`: from logits that each rank has whole; those of the first rank count."""
        if self._sampler is not None:
            return self._sampler.guess(logits, rows, num_outputs, draws=draws)
        likeliest = first_largest(logits)[0].cpu().numpy()
        return likeliest, likeliest
