"""Drafts from earlier outputs, here and of other requests, by frequency (suffix decoding).

Looks for the longest run of the last tokens that occurs elsewhere, in the request itself and in
answers to former requests of the same salt; where it occurs several times, each token of the draft
is the one that followed most often, as long as that is often enough. The longer the run, the longer
the draft (SuffixDecoding: Oliaro et al., arXiv 2411.04975).

Output under one salt is never used under another: the speed of an answer would reveal it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import numpy as np

from pdserve.worker.drafting.ngram import Corpus, longest_runs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from pdserve.config.speculative import SpeculativeConfig
    from pdserve.wire.step import NewRequest

_MAX_SALTS: Final = 64
_MAX_TOKENS: Final = 1 << 16
"""Of former answers of a salt: to look through them takes 30 us."""
_BETWEEN: Final = -1
"""Behind each former answer; no token."""
_SHORTEST: Final = 2


class SuffixDrafter:
    """See the module.

    A former answer counts from when its request is forgotten until it comes again, having been
    preempted. Ranks and stages forget requests in the same steps, so they have the same ones.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._longest = config.suffix_decoding_max_tree_depth
        self._max_answers = config.suffix_decoding_max_cached_requests
        self._factor = config.suffix_decoding_max_spec_factor
        self._least = config.suffix_decoding_min_token_prob
        self._corpora: dict[int, Corpus] = {}
        self._salts: dict[int, str] = {}
        self._outputs: dict[int, list[int]] = {}
        self._former: OrderedDict[str, _FormerAnswers] = OrderedDict()

    def add(self, row: int, request: NewRequest) -> None:
        """See `Drafter`."""
        self._corpora[row] = Corpus(request, self._longest)
        self._salts[row] = request.cache_salt
        self._outputs[row] = outputs = list(request.output_token_ids)
        if len(outputs) >= _SHORTEST and request.cache_salt in self._former:
            self._former[request.cache_salt].remove(outputs)

    def remove(self, row: int) -> None:
        """See `Drafter`."""
        del self._corpora[row]
        salt, outputs = self._salts.pop(row), self._outputs.pop(row)
        if outputs and self._max_answers:
            former = self._former.setdefault(salt, _FormerAnswers(self._max_answers))
            former.add(outputs)
            self._former.move_to_end(salt)
            if len(self._former) > _MAX_SALTS:
                self._former.popitem(last=False)

    def note(self, row: int, token_ids: Sequence[int]) -> None:
        """See `Drafter`."""
        self._corpora[row].append(token_ids)
        self._outputs[row].extend(token_ids)

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        """See `Drafter`."""
        return {row: self._follow(row, max_tokens) for row, max_tokens in wanted.items()}

    def _follow(self, row: int, max_tokens: int) -> list[int]:
        """Look up what followed. Among runs of equal length the request's own wins."""
        corpus = self._corpora[row]
        tokens = corpus.tokens
        ends, length = longest_runs(tokens, corpus.last)
        former = self._former.get(self._salts[row])
        if former is not None:
            others, longer = longest_runs(former.tokens, corpus.last)
            if longer > length:
                tokens, ends, length = former.tokens, others, longer
        if length < _SHORTEST:
            return []
        return _most_often(tokens, ends, min(max_tokens, int(length * self._factor)), self._least)


def _most_often(
    tokens: NDArray[np.int32], ends: NDArray[np.int64], max_tokens: int, least: float
) -> list[int]:
    """Return the most frequent continuation, while the share of all of it is at least `least`.

    Args:
        ends: Ends of the runs; each has a token after it.
    """
    draft: list[int] = []
    num = len(ends)
    while len(draft) < max_tokens:
        ends = ends[ends + 1 < len(tokens)] + 1
        followers = tokens[ends]
        known = followers[followers != _BETWEEN]
        if not known.size:
            break
        found, first, counts = np.unique(known[::-1], return_index=True, return_counts=True)
        # Among equally frequent ones, the latest.
        best = np.lexsort((first, -counts))[0]
        if counts[best] < least * num:
            break
        draft.append(int(found[best]))
        ends = ends[followers == found[best]]
    return draft


class _FormerAnswers:
    """Concatenated answers, the oldest first.

    Args:
        max_answers: Maximum number of answers; older ones are forgotten.
    """

    def __init__(self, max_answers: int) -> None:
        self._max_answers = max_answers
        self._lengths: list[int] = []
        self.tokens: NDArray[np.int32] = np.zeros(0, np.int32)

    def add(self, token_ids: Sequence[int]) -> None:
        """Add an answer; only the end of a very long one."""
        added = _ended(token_ids)
        self._lengths.append(len(added))
        num_old = 0
        while (
            len(self._lengths) > self._max_answers
            or len(self.tokens) + len(added) - num_old > _MAX_TOKENS
        ):
            num_old += self._lengths.pop(0)
        self.tokens = np.concatenate([self.tokens[num_old:], added])

    def remove(self, token_ids: Sequence[int]) -> None:
        """Remove an answer, if it is there; of several that are equal, the newest."""
        removed, end = _ended(token_ids), len(self.tokens)
        for index in reversed(range(len(self._lengths))):
            start = end - self._lengths[index]
            is_as_long = end - start == len(removed)
            if is_as_long and np.array_equal(self.tokens[start:end], removed):
                self.tokens = np.delete(self.tokens, slice(start, end))
                del self._lengths[index]
                return
            end = start


def _ended(token_ids: Sequence[int]) -> NDArray[np.int32]:
    return np.array([*token_ids[1 - _MAX_TOKENS :], _BETWEEN], np.int32)
