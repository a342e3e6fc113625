"""Chooses the tokens of drafts from a drafter's logits, for requests that draw theirs.

A request draws a token with a random number of its own for that position. The same number picks
the same token from two distributions the more often, the more alike they are (Daliri, Musco,
Suresh, arXiv 2408.07978): drawn from a drafter that comes close to the model, a token is right
more often than the likeliest one, which is right as often as the model draws it. Of a drafter that
is far off, the likeliest is. So both are compared with what the requests draw, and the way that
was right more often of late is taken.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

_FADES: Final = 0.98
"""What a comparison still counts for at the next one: the last fifty decide."""
_EVERY: Final = 16
"""While the likeliest tokens are taken, others are drawn beside them once in so many choices."""


class Guess(Protocol):
    """As `Sampler.guess`."""

    def __call__(
        self,
        logits: Tensor,
        rows: NDArray[np.int64],
        num_outputs: NDArray[np.int64],
        *,
        draws: bool,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the likeliest tokens, and those that the rows' requests would draw."""
        ...


class _Guessed(NamedTuple):
    likeliest: int
    drawn: int
    taken: int


class Guesses:
    """See the module.

    Args:
        guess: Of the drafter's logits.
        offsets: See `DraftHead`.
    """

    def __init__(self, guess: Guess, offsets: Tensor | None = None) -> None:
        self._guess = guess
        self._offsets = None if offsets is None else offsets.numpy()
        self._lead = 0.0  # of drawn tokens over the likeliest
        self._num_choices = 0
        self._open: defaultdict[int, list[_Guessed]] = defaultdict(list)

    def choose(
        self, logits: Tensor, rows: NDArray[np.int64], num_outputs: NDArray[np.int64], depth: int
    ) -> NDArray[np.int64]:
        """Choose the next token of some drafts.

        Args:
            logits: `[M, N]` fp32.
            rows: `[M]`, the batch rows of the drafts.
            num_outputs: `[M]`, number of tokens that their requests have put out.
            depth: Number of tokens that each draft has.

        Returns:
            `[M]`, the model's tokens.
        """
        prefers_drawn = self._lead >= 0.0
        draws = prefers_drawn or self._num_choices % _EVERY == 0
        self._num_choices += 1
        likeliest, drawn = self._guess(logits, rows, num_outputs + depth, draws=draws)
        if self._offsets is not None:
            likeliest, drawn = (each + self._offsets[each] for each in (likeliest, drawn))
        taken = drawn if prefers_drawn else likeliest
        columns = (each.tolist() for each in (rows, likeliest, drawn, taken))
        for row, *guessed in zip(*columns, strict=True):
            if not depth:
                self._open[row].clear()
            self._open[row].append(_Guessed(*guessed))
        return taken

    def note(self, row: int, token_ids: Sequence[int]) -> None:
        """Compare the last draft of `row` with the tokens that its request has put out since."""
        for guessed, token_id in zip(self._open.pop(row, ()), token_ids, strict=False):
            if guessed.likeliest != guessed.drawn:
                lead = (guessed.drawn == token_id) - (guessed.likeliest == token_id)
                self._lead = self._lead * _FADES + lead
            if guessed.taken != token_id:
                break  # the others followed what was not put out

    def remove(self, row: int) -> None:
        """Forget a request."""
        self._open.pop(row, None)
