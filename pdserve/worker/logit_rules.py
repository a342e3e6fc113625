"""Logit rules of one request: what it forbids, favours and penalises.

Order and formulas are vLLM's: bias, then repetition, frequency and presence penalties,
then masks, a grammar's behind that of allowed ids. Requests without any of these have no
`LogitRules` and cost nothing. What does not change from token to token is made once, when a request
joins the batch; a token costs a few operations on its row, however many rules there are.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from pdserve.errors import InternalError
from pdserve.worker.grammar import Constraint

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from pdserve.wire.sampling import SamplingParams
    from pdserve.worker.grammar import GrammarPool


_MIN_GROWTH = 64


class Hindrance(enum.Enum):
    """Why a row has no token.

    UNREADY: the grammar's mask is not ready. DEAD_END: no token may follow. REJECTED: the grammar
    does not allow the tokens so far. SPOILED: its logits are not finite, and it has a draft.
    """

    UNREADY = enum.auto()
    DEAD_END = enum.auto()
    REJECTED = enum.auto()
    SPOILED = enum.auto()


class Hindered(NamedTuple):
    """Reason why a row has no token, in words for DEAD_END."""

    by: Hindrance
    why: str = ""


class LogitRules:
    """The rules of one request and the state they need about its tokens so far.

    Token ids outside the vocabulary are left out: they can be neither made nor forbidden.

    Args:
        prompt: The prompt's token ids.
        outputs: Token ids already put out.
        grammars: Computes the tokens that grammars allow.

    Raises:
        InternalError: `allowed_token_ids` leaves nothing of the vocabulary, or there is a grammar
            and no pool to evaluate it.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        outputs: Sequence[int],
        *,
        vocab_size: int,
        device: torch.device,
        grammars: GrammarPool | None = None,
    ) -> None:
        self._device = device
        self._vocab_size = vocab_size
        biased = {t: b for t, b in params.logit_bias.items() if 0 <= t < vocab_size}
        self._bias: tuple[Tensor, Tensor] | None = None
        if biased:
            index = torch.tensor(list(biased), dtype=torch.int64, device=device)
            bias = torch.tensor(list(biased.values()), dtype=torch.float32, device=device)
            self._bias = index, bias
        self._forbidden: Tensor | None = None
        if params.allowed_token_ids is not None:
            allowed = self._indices(params.allowed_token_ids)
            if allowed is None:
                raise InternalError(
                    f"a request allows only {params.allowed_token_ids} of {vocab_size} tokens: "
                    "the server should have refused it"
                )
            self._forbidden = torch.ones(vocab_size, dtype=torch.bool, device=device)
            self._forbidden[allowed] = False
        self._bad_words = _BadWords(params.bad_words)
        self._min_tokens, self._max_tokens = params.min_tokens, params.max_tokens
        singles = self._bad_words.singles
        stops = params.eos_token_ids + params.stop_token_ids if params.min_tokens else ()
        self._avoided = self._indices(singles)
        self._avoided_at_first = self._indices({*singles, *stops})
        self._outputs = list(outputs)
        self._penalties = (
            _Penalties(params, prompt, outputs, device) if _has_penalties(params) else None
        )
        self._constraint = self._constraint_of(params, grammars)

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether a request has any rule."""
        return bool(
            _has_penalties(params)
            or params.logit_bias
            or params.allowed_token_ids is not None
            or params.bad_words
            or params.min_tokens > 0
            or params.grammar is not None
        )

    @staticmethod
    def only_grammar(params: SamplingParams) -> bool:
        """Whether a request has a grammar and no other rule."""
        without = msgspec.structs.replace(params, grammar=None)
        return params.grammar is not None and not LogitRules.needed(without)

    @property
    def num_outputs(self) -> int:
        """Output tokens so far."""
        return len(self._outputs)

    @property
    def constraint(self) -> Constraint | None:
        """The grammar, if it governs the next token."""
        constraint = self._constraint
        return constraint if constraint is not None and constraint.has_begun else None

    def note(self, token_id: int) -> None:
        """Note an output token."""
        self._outputs.append(token_id)
        if self._penalties is not None:
            self._penalties.note(token_id)
        if self._constraint is not None:
            is_last = len(self._outputs) >= self._max_tokens
            self._constraint.note(token_id, is_last=is_last)

    def forced(self) -> list[int]:
        """Return the tokens that the grammar forces, as far as they are known."""
        return [] if self._constraint is None else self._constraint.forced()

    def hindered(self, until_s: float) -> Hindered | None:
        """Return why the grammar lets the row have no token, if that is so; see `apply`."""
        constraint = self.constraint
        if constraint is None:
            return None
        if not constraint.is_known(until_s):
            return Hindered(Hindrance.UNREADY)
        if constraint.is_rejected:
            return Hindered(Hindrance.REJECTED)
        return Hindered(Hindrance.DEAD_END, constraint.error) if constraint.error else None

    def apply(self, row: Tensor, until_s: float = 0.0) -> Hindered | None:
        """Change `row`, `[vocab_size]` fp32, in place.

        `allowed_token_ids` and the grammar always hold. Where bad words and minimum tokens would
        leave no token at all, they give way.

        Args:
            until_s: End of the wait for the grammar's mask, in monotonic seconds.

        Returns:
            Reason why the row has no token, if it has none: then do not call `note`.
        """
        constraint = self.constraint
        if (hindered := self.hindered(until_s)) is not None:
            return hindered
        if self._bias is not None:
            index, bias = self._bias
            row[index] += bias
        if self._penalties is not None:
            self._penalties.apply(row)
        if self._forbidden is not None:
            row.masked_fill_(self._forbidden, -torch.inf)
        if constraint is not None:
            if constraint.is_over:  # nothing is left to choose: no other rule keeps it from ending
                row.zero_()
            constraint.apply(row)
            # On its own, a grammar always allows something.
            if self._forbidden is not None and row.max() == -torch.inf:
                why = "no token is left of those that the other fields of the request allow"
                return Hindered(Hindrance.DEAD_END, why)
        is_at_first = len(self._outputs) < self._min_tokens
        avoided = self._avoided_at_first if is_at_first else self._avoided
        completed = self._bad_words.completed_by(self._outputs)
        if (more := self._indices(completed)) is not None:
            avoided = more if avoided is None else torch.cat([avoided, more])
        if avoided is not None:
            before = row[avoided]
            row[avoided] = -torch.inf
            if row.max() == -torch.inf:
                row[avoided] = before
        return None

    def _constraint_of(
        self, params: SamplingParams, grammars: GrammarPool | None
    ) -> Constraint | None:
        if params.grammar is None:
            return None
        if grammars is None:
            raise InternalError("a request has a grammar on a rank that works out none")
        return Constraint(
            grammars,
            params.grammar,
            self._outputs,
            vocab_size=self._vocab_size,
            ends=params.eos_token_ids,
            device=self._device,
        )

    def _indices(self, token_ids: Iterable[int]) -> Tensor | None:
        """Return the ids in the vocabulary; None if none: a tensor takes some microseconds."""
        inside = sorted({t for t in token_ids if 0 <= t < self._vocab_size})
        return torch.tensor(inside, dtype=torch.int64, device=self._device) if inside else None


class _BadWords:
    """Token sequences by their prefix. A look-up takes one step per distinct prefix length.

    Attributes:
        singles: Words of one token, which are always avoided.
    """

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self.singles: set[int] = set()
        self._lasts: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for *head, last in filter(None, words):
            if head:
                self._lasts[tuple(head)].add(last)
            else:
                self.singles.add(last)
        self._lengths = sorted({len(head) for head in self._lasts})

    def completed_by(self, outputs: Sequence[int]) -> set[int]:
        """Return the tokens that would complete a word of several tokens."""
        found: set[int] = set()
        for length in self._lengths:
            if length > len(outputs):
                break
            found |= self._lasts.get(tuple(outputs[-length:]), set())
        return found


class _Penalties:
    """Distinct tokens seen, with how often each is in the output. O(1) per token in Python.

    Prompt and output ids are in `_index[:_num]`, their counts beside them; there is room for more.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        outputs: Sequence[int],
        device: torch.device,
    ) -> None:
        self._repetition = params.repetition_penalty
        self._frequency = params.frequency_penalty
        self._presence = params.presence_penalty
        counts = dict.fromkeys(prompt, 0)
        for token_id in outputs:
            counts[token_id] = counts.get(token_id, 0) + 1
        self._place = {token_id: place for place, token_id in enumerate(counts)}
        self._index = torch.tensor(list(counts), dtype=torch.int64, device=device)
        self._count = torch.tensor(list(counts.values()), dtype=torch.float32, device=device)

    def note(self, token_id: int) -> None:
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._index):
            more = max(_MIN_GROWTH, place)
            self._index = torch.cat([self._index, self._index.new_zeros(more)])
            self._count = torch.cat([self._count, self._count.new_zeros(more)])
        self._index[place] = token_id
        self._count[place] += 1

    def apply(self, row: Tensor) -> None:
        num_seen = len(self._place)
        index, count = self._index[:num_seen], self._count[:num_seen]
        seen = row[index]
        # Most requests have one of the three: the others would change nothing in twice the time.
        if self._repetition != 1.0:
            seen = torch.where(seen > 0, seen / self._repetition, seen * self._repetition)
        if self._frequency:
            seen -= self._frequency * count
        if self._presence:
            seen -= self._presence * (count > 0)
        row[index] = seen


def _has_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )
