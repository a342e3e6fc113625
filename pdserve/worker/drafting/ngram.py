"""Drafts by looking up where the last tokens stood before (prompt lookup decoding).

Looks for the longest run of the last tokens that also occurs elsewhere in the prompt, the
prediction or the answer so far; the latest occurrence wins, and the tokens that followed it there
are the draft. Costs a few operations over the tokens, no memory beyond a copy of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from pdserve.wire.step import NewRequest

_SPARE = 256
"""Tokens that a corpus has room for beyond its first ones; it doubles when they are used up."""


class NgramDrafter:
    """See the module.

    Args:
        longest, shortest: Maximum number of tokens to compare, and minimum that must match.
    """

    def __init__(self, *, longest: int, shortest: int) -> None:
        self._longest, self._shortest = longest, shortest
        self._corpora: dict[int, Corpus] = {}

    def add(self, row: int, request: NewRequest) -> None:
        """See `Drafter`."""
        self._corpora[row] = Corpus(request, self._longest)

    def remove(self, row: int) -> None:
        """See `Drafter`."""
        self._corpora.pop(row, None)

    def note(self, row: int, token_ids: Sequence[int]) -> None:
        """See `Drafter`."""
        self._corpora[row].append(token_ids)

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        """See `Drafter`."""
        return {row: self._follow(row, max_tokens) for row, max_tokens in wanted.items()}

    def _follow(self, row: int, max_tokens: int) -> list[int]:
        """Look up what followed. A run that reaches the newest token repeats from its start."""
        corpus = self._corpora[row]
        tokens = corpus.tokens
        ends, length = longest_runs(tokens, corpus.last)
        if length < self._shortest:
            return []
        followed: list[int] = np.resize(tokens[ends[-1] + 1 :], max_tokens).tolist()
        return followed


def longest_runs(tokens: NDArray[np.int32], last: Sequence[int]) -> tuple[NDArray[np.int64], int]:
    """Find the longest runs in `tokens` that are also the end of `last`.

    Returns:
        The end of each run, rising, without the end of `tokens` itself; and their length, 0 if
        even the last token of `last` is not found.
    """
    if not last:
        return np.zeros(0, np.int64), 0
    ends = np.flatnonzero(tokens[:-1] == last[-1])
    if not ends.size:
        return ends, 0
    length = 1
    while length < len(last):
        earlier = ends[ends >= length]
        earlier = earlier[tokens[earlier - length] == last[-1 - length]]
        if not earlier.size:
            break
        ends = earlier
        length += 1
    return ends, length


class Corpus:
    """Concatenation of the prompt, prediction and answer of one request.

    The prediction follows a copy of the prompt's end, as the answer does: its first tokens are
    found by the tokens before them.

    Attributes:
        last: The newest tokens of prompt and answer, as many as may be compared.
    """

    def __init__(self, request: NewRequest, num_compared: int) -> None:
        prompt, outputs = request.prompt_token_ids, request.output_token_ids
        prediction = request.prediction_token_ids
        tail = prompt[-num_compared:] if prediction else []
        known = [prompt, tail, prediction, outputs]
        self._num = sum(map(len, known))
        self._tokens = np.zeros(self._num + _SPARE, dtype=np.int32)
        self._tokens[: self._num] = [token for part in known for token in part]
        self._num_compared = num_compared
        self.last = [*prompt[-num_compared:], *outputs[-num_compared:]][-num_compared:]

    @property
    def tokens(self) -> NDArray[np.int32]:
        """All of them."""
        return self._tokens[: self._num]

    def append(self, token_ids: Sequence[int]) -> None:
        """Add output tokens."""
        end = self._num + len(token_ids)
        if end > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros(end + _SPARE, dtype=np.int32)])
        self._tokens[self._num : end] = token_ids
        self._num = end
        self.last = [*self.last, *token_ids][-self._num_compared :]
