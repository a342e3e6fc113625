"""The drafts of one rank.

While an answer is on its way, the drafter is given its tokens and makes the next drafts; a step
takes as much of them as the scheduler has room for. While no request has room, a drafter that can
catch up later is not called. A drafter that takes a forward pass drafts when the step begins, and
only as much as is verified. Then tokens are looked up only where there is a prediction, which
comes first, or where that drafter has no draft. Tokens that the model could not run, or that would
end the request, are cut off here, so that a drafter may propose anything.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from pdserve.worker.drafting.drafter import lists_from, states_of
from pdserve.worker.drafting.heads import HeadDrafter
from pdserve.worker.drafting.medusa import MedusaDrafter
from pdserve.worker.drafting.ngram import NgramDrafter
from pdserve.worker.drafting.suffix import SuffixDrafter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from pdserve.config.speculative import SpeculativeConfig
    from pdserve.parallel.group import Group
    from pdserve.wire.ids import RequestId
    from pdserve.wire.step import NewRequest
    from pdserve.worker.drafting.drafter import Drafter, StateDrafter
    from pdserve.worker.drafting.model import FirstRanksDrafts
    from pdserve.worker.step import PreparedStep

    _Seen = tuple[PreparedStep, Tensor, Sequence[Tensor], Sequence[list[int]]]

_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
_NUM_ROUNDS: Final = 5
"""Of all numbers of rows, so that what else runs for a moment is in no row's best time alone."""


class ForcedTokens:
    """Tokens that grammars force, as drafts that are always right; by row, on all ranks.

    Where ranks share a vocabulary, only the first of them evaluates grammars, and how far it has
    got depends on timing. So it sends its result to the others, only in steps that may draft for
    rows with a grammar: all ranks of a step have the same drafts.

    Args:
        known: Returns the forced tokens of a row, as far as they are known; on the first rank.
        tp: The TP group; all its ranks ask for the same rows.
    """

    def __init__(self, known: Callable[[int], list[int]], tp: Group) -> None:
        self._known = known
        self._tp = tp
        self._bound: set[int] = set()

    def add(self, row: int, request: NewRequest) -> None:
        """Take a request."""
        if request.sampling.grammar is not None:
            self._bound.add(row)

    def remove(self, row: int) -> None:
        """Free `row`: its request is gone."""
        self._bound.discard(row)

    def of(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        """Return the tokens that must follow, for rows that have some.

        Args:
            wanted: Maximum draft length by row.
        """
        lengths = {row: most for row, most in wanted.items() if row in self._bound}
        known = {row: self._known(row)[:most] for row, most in lengths.items()}
        return lists_from(self._tp, 0, lengths, known)


class Drafts:
    """Drafts by request.

    Args:
        drafter: Looks tokens up.
        max_tokens: Maximum length of a draft.
        forced: Tokens that must follow those of a row; None if unknown here. They come before
            a drafter's guesses.
        in_step: Drafts when the step begins.
        reader: The same drafter, if it reads the model's states.
        stages: Pipeline stages, the last of which sends its drafts to the others; None if each
            stage makes the same drafts itself.

    Attributes:
        reader: As given.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        vocab_size: int,
        max_tokens: int,
        forced: ForcedTokens | None = None,
        in_step: Drafter | None = None,
        reader: StateDrafter | None = None,
        stages: Group | None = None,
    ) -> None:
        self._drafter = drafter
        self.reader = reader
        self._forced = forced
        self._in_step = in_step
        self._stages = stages
        self._predicted: set[int] = set()
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._rows: dict[RequestId, int] = {}
        self._ends: dict[int, frozenset[int]] = {}
        self._told: dict[int, list[int]] = {}
        self._ready: dict[int, list[int]] = {}
        self._seen: _Seen | None = None
        self._forgetful = reader if isinstance(reader, MedusaDrafter) else None
        has_model = in_step is not None or reader is not None
        self._may_wait = self._forgetful is not None or not has_model
        self._is_used = True

    @property
    def is_by_model(self) -> bool:
        """Whether a draft takes a forward pass."""
        return self._in_step is not None

    def add(self, row: int, request: NewRequest) -> None:
        """Take a request."""
        sampling = request.sampling
        ends = sampling.stop_token_ids
        if not sampling.ignore_eos:
            ends += sampling.eos_token_ids
        self._rows[request.request_id] = row
        self._ends[row] = frozenset(ends)
        self._drafter.add(row, request)
        if self._forced is not None:
            self._forced.add(row, request)
        self._told[row] = []
        if request.prediction_token_ids:
            self._predicted.add(row)
        if self._in_step is not None:
            self._in_step.add(row, request)

    def remove(self, request_id: RequestId) -> None:
        """Forget a request, if it is known."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            del self._ends[row]
            self._drafter.note(row, self._told.pop(row, ()))
            self._ready.pop(row, None)
            self._predicted.discard(row)
            if self._forced is not None:
                self._forced.remove(row)
            self._drafter.remove(row)
            if self._in_step is not None:
                self._in_step.remove(row)

    def note(self, rows: Iterable[int], token_ids: Iterable[Sequence[int]]) -> None:
        """Note the output tokens of requests; their earlier drafts are void."""
        for row, tokens in zip(rows, token_ids, strict=True):
            self._told.setdefault(row, []).extend(tokens)

    def observe(
        self,
        prepared: PreparedStep,
        hidden: Tensor,
        aux: Sequence[Tensor],
        token_ids: Sequence[list[int]],
    ) -> None:
        """Keep the results of a step for the reader until the answer is on its way.

        Args:
            hidden, aux, token_ids: See `states_of`.
        """
        self._seen = prepared, hidden, aux, token_ids

    def begin(self, num_rows: Mapping[RequestId, int]) -> None:
        """Begin a step, before rows are reassigned.

        If no request has room for a draft, drafters that can catch up later are not called.

        Args:
            num_rows: Maximum draft length of each request.
        """
        self._is_used = bool(num_rows) or not self._may_wait
        if self._is_used:
            self._make()
        elif self._seen is not None:
            assert self._forgetful is not None
            self._forgetful.skip(self._seen[0].rows.tolist())
            self._seen = None

    def finish(self) -> None:
        """Make the next drafts after a step's answer, if that step had any."""
        if self._is_used:
            self._make()

    def _make(self) -> None:
        """Bring the drafters up to date, and make drafts if look-ups are enough."""
        noted, self._told = self._told, {}
        for row, tokens in noted.items():
            self._drafter.note(row, tokens)
            if self._in_step is not None:
                self._in_step.note(row, tokens)
        seen, self._seen = self._seen, None
        if self.reader is not None and seen is not None:
            self.reader.observe(states_of(*seen))
        if self._in_step is None:
            self._ready |= self._ask(self._drafter, dict.fromkeys(noted, self._max_tokens))

    def take(self, num_rows: Mapping[RequestId, int]) -> dict[RequestId, list[int]]:
        """Return the drafts of a step, by request; empty ones are left out.

        Args:
            num_rows: As passed to `begin`.
        """
        if not self._is_used:
            return {}
        self._make()
        wanted = {self._rows[each]: most for each, most in num_rows.items()}
        if self._in_step is not None:
            self._ready = self._make_in_step(self._in_step, wanted)
        known = {} if self._forced is None else self._forced.of(wanted)
        drafts = {}
        for request_id, most in num_rows.items():
            row = self._rows[request_id]
            draft = self._ready.get(row, [])
            forced = known.get(row, [])
            if forced and draft[: len(forced)] != forced:
                draft = self._cut(row, forced)
            if draft[:most]:
                drafts[request_id] = draft[:most]
        if self._stages is None:
            return drafts
        return lists_from(self._stages, self._stages.size - 1, num_rows, drafts)

    def _make_in_step(self, drafter: Drafter, wanted: dict[int, int]) -> dict[int, list[int]]:
        predicted = {row: most for row, most in wanted.items() if row in self._predicted}
        drafts = self._ask(self._drafter, predicted)
        drafts |= self._ask(drafter, _without(drafts, wanted))
        return drafts | self._ask(self._drafter, _without(drafts, wanted))

    def _ask(self, drafter: Drafter, wanted: dict[int, int]) -> dict[int, list[int]]:
        """Return a drafter's drafts by row; even for no rows it may still do some work."""
        drafts = drafter.propose(wanted)
        return {row: self._cut(row, drafts.get(row, [])) for row in wanted}

    def _cut(self, row: int, draft: list[int]) -> list[int]:
        ends, vocab_size = self._ends[row], self._vocab_size
        for index, token_id in enumerate(draft):
            if not 0 <= token_id < vocab_size or token_id in ends:
                return draft[:index]
        return draft


def _without(drafts: Mapping[int, list[int]], wanted: dict[int, int]) -> dict[int, int]:
    """Return the part of `wanted` whose rows have no draft."""
    return {row: most for row, most in wanted.items() if not drafts.get(row)}


def drafts_of(
    config: SpeculativeConfig,
    vocab_size: int,
    forced: ForcedTokens | None,
    by_model: FirstRanksDrafts | HeadDrafter | MedusaDrafter | None,
    pp: Group,
) -> Drafts | None:
    """Return drafts by the configured method; None if there is none.

    Args:
        forced: Given on ranks that sample. Stages that each make the same drafts have none:
            waiting for the last stage would keep them from working on several steps at once.
        by_model: The drafter that takes a forward pass, on the last pipeline stage.
    """
    if not config.method:
        return None
    drafter: Drafter
    if config.method == "suffix":
        drafter = SuffixDrafter(config)
    else:
        longest, shortest = config.lookup
        drafter = NgramDrafter(longest=longest, shortest=shortest)
    stages = pp if config.is_by_model and pp.size > 1 else None
    return Drafts(
        drafter,
        vocab_size=vocab_size,
        max_tokens=config.max_drafted,
        forced=forced if pp.size == 1 or stages is not None else None,
        in_step=by_model,
        reader=by_model if isinstance(by_model, HeadDrafter | MedusaDrafter) else None,
        stages=stages,
    )


def measure_rows(
    logits: Callable[[Tensor], Tensor], hidden: Tensor, wait: Callable[[], None]
) -> tuple[tuple[int, float], ...]:
    """Return the seconds of a product at several numbers of rows, the best of some rounds.

    Args:
        logits: The product.
        hidden: Its input, with as many rows as are tried at most.
        wait: Returns when the device has computed it.
    """

    def seconds(rows: int) -> float:
        start_s = time.perf_counter()
        logits(hidden[:rows])
        wait()
        return time.perf_counter() - start_s

    for rows in _ROWS:
        seconds(rows)
    rounds = [[seconds(rows) for rows in _ROWS] for _ in range(_NUM_ROUNDS)]
    return tuple(zip(_ROWS, map(min, zip(*rounds, strict=True)), strict=True))
