"""Logit rules on the device: the same as `LogitRules`, for all rows at once.

A request's rules and token counts are packed into one word per token of the vocabulary; tokens are
counted there as they are sampled, so a step needs nothing from the host about the one before it.
That takes four bytes for each row of the batch and token of the vocabulary, and biases as many
again; both are allocated when the first request needs them.

Grammars, and bad words of several tokens, are matched on the host: `are_kept` says which requests
have their rules here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pdserve.errors import InternalError
from pdserve.kernels.reference.rules import (
    AVOIDED,
    AVOIDED_AT_FIRST,
    FORBIDDEN,
    IN_PROMPT,
    Ruled,
    RuleTables,
)
from pdserve.worker.device import Upload
from pdserve.worker.logit_rules import LogitRules

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from pdserve.kernels.ops import SamplingOps
    from pdserve.wire.sampling import SamplingParams
    from pdserve.worker.device import Device

_ALIGNED = 64
"""Entries of a column are a multiple of these: kernels are compiled for aligned addresses."""
_FIELDS = Ruled._fields
_FLOATS = frozenset({"repetition", "frequency", "presence"})


def are_kept(params: SamplingParams) -> bool:
    """Whether a request has rules, and all of them can be kept on a device."""
    is_hosts = params.grammar is not None or any(len(word) > 1 for word in params.bad_words)
    return LogitRules.needed(params) and not is_hosts


@dataclass(frozen=True, slots=True)
class StagedRules:
    """Rows of logits that are ruled in a step.

    Attributes:
        num: Number of these rows.
        by_bias, avoids: See `rules.rule`.
    """

    num: int
    by_bias: bool
    avoids: bool


class DeviceRules:
    """The rules of a batch's rows.

    Args:
        max_logits: Maximum rows of logits in one step.
    """

    def __init__(
        self, num_rows: int, vocab_size: int, *, device: Device, ops: SamplingOps, max_logits: int
    ) -> None:
        self._shape = num_rows, vocab_size
        self._device = device
        self._ops = ops
        self._params: dict[int, SamplingParams] = {}
        self._words: Tensor | None = None
        self._bias: Tensor | None = None
        shape = len(_FIELDS), -(-max_logits // _ALIGNED) * _ALIGNED
        self._fields = Upload(device, shape, torch.int32)

    def among(self, rows: list[int]) -> list[int]:
        """Return which rows of logits have rules.

        Args:
            rows: `[L]`, the batch row of each.
        """
        if not self._params:
            return []
        return [i for i, row in enumerate(rows) if row in self._params]

    def add(
        self, row: int, params: SamplingParams, prompt: Sequence[int], outputs: Sequence[int]
    ) -> None:
        """Keep the rules of a request, and count the tokens that it already has.

        Raises:
            InternalError: `allowed_token_ids` leaves nothing of the vocabulary.
        """
        _, vocab_size = self._shape
        word = np.zeros(vocab_size, dtype=np.int32)
        word[_inside(prompt, vocab_size)] |= IN_PROMPT
        np.add.at(word, _inside(outputs, vocab_size), 1)
        if params.allowed_token_ids is not None:
            allowed = _inside(params.allowed_token_ids, vocab_size)
            if not len(allowed):
                raise InternalError(
                    f"a request allows only {params.allowed_token_ids} of {vocab_size} tokens: "
                    "the server should have refused it"
                )
            is_forbidden = np.ones(vocab_size, dtype=np.bool_)
            is_forbidden[allowed] = False
            word[is_forbidden] |= FORBIDDEN
        word[_inside((each[0] for each in params.bad_words if each), vocab_size)] |= AVOIDED
        if params.min_tokens:
            stops = params.eos_token_ids + params.stop_token_ids
            word[_inside(stops, vocab_size)] |= AVOIDED_AT_FIRST
        self._params[row] = params
        if self._words is None:
            self._words = self._table(torch.int32)
        self._words[row].copy_(torch.from_numpy(word))
        if params.logit_bias or self._bias is not None:
            bias = np.zeros(vocab_size, dtype=np.float32)
            biased = {t: b for t, b in params.logit_bias.items() if 0 <= t < vocab_size}
            bias[list(biased)] = list(biased.values())
            if self._bias is None:
                self._bias = self._table(torch.float32)
            self._bias[row].copy_(torch.from_numpy(bias))

    def _table(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self._shape, dtype=dtype, device=self._device.torch)

    def remove(self, row: int) -> None:
        """Free `row`, if it has rules here."""
        self._params.pop(row, None)

    def stage(
        self,
        ruled: list[int],
        rows: NDArray[np.int64],
        num_outputs: NDArray[np.int64],
        behind: tuple[NDArray[np.int64], NDArray[np.int64]] | None,
    ) -> StagedRules:
        """Bring the rules of some rows of logits to the device.

        Args:
            ruled: Indices of the rows, at least one.
            rows: `[L]`, the batch row of each.
            num_outputs: `[L]`, the index of each one's token.
            behind: `[L]` each, the number of draft tokens that a row follows, and the last one.
        """
        params = [self._params[row] for row in rows[ruled].tolist()]
        fields: Any = Ruled(*_columns(self._fields.begin().numpy(), len(ruled)))
        fields.rows[:] = ruled
        fields.kept[:] = rows[ruled]
        fields.depth[:] = 0 if behind is None else behind[0][ruled]
        is_at_first = num_outputs[ruled] < [each.min_tokens for each in params]
        fields.avoided[:] = np.where(is_at_first, AVOIDED | AVOIDED_AT_FIRST, AVOIDED)
        fields.repetition[:] = [each.repetition_penalty for each in params]
        fields.frequency[:] = [each.frequency_penalty for each in params]
        fields.presence[:] = [each.presence_penalty for each in params]
        if behind is not None:
            fields.drafted[: len(rows)] = behind[1]
        self._fields.send()
        return StagedRules(
            len(ruled),
            by_bias=any(each.logit_bias for each in params),
            avoids=bool(is_at_first.any()) or any(each.bad_words for each in params),
        )

    def apply(self, logits: Tensor, staged: StagedRules) -> None:
        """Apply the rules to rows of logits, `[L, vocab_size]`, in place."""
        assert self._words is not None
        # Any tensor does where there is no bias, of the dtype that kernels are compiled for.
        bias = self._words.view(torch.float32) if self._bias is None else self._bias
        tables = RuleTables(self._words, bias)
        self._ops.rule(
            logits, tables, self._ruled(staged.num), by_bias=staged.by_bias, avoids=staged.avoids
        )

    def note_sampled(self, tokens: Tensor, staged: StagedRules) -> None:
        """Count the tokens of rows with rules, on the device.

        Args:
            tokens: `[L]` int64.
        """
        assert self._words is not None
        ruled = self._ruled(staged.num)
        self._ops.note(self._words, ruled.kept, tokens, ruled.rows)

    def note(self, rows: NDArray[np.int64], token_ids: Sequence[Sequence[int]]) -> None:
        """Count the tokens of `rows` that the host has verified; some rows may have no rules."""
        pairs = [
            (row, token_id)
            for row, tokens in zip(rows.tolist(), token_ids, strict=True)
            if row in self._params
            for token_id in tokens
        ]
        if pairs:
            assert self._words is not None
            kept, tokens = torch.tensor(pairs, dtype=torch.int32).to(self._device.torch).unbind(1)
            every = torch.arange(len(pairs), dtype=torch.int32, device=self._device.torch)
            self._ops.note(self._words, kept.contiguous(), tokens.long(), every)

    def warm_up(self, logits: Tensor) -> None:
        """Compile the kernels that rules need, for logits `[M, vocab_size]`."""
        words, bias = torch.zeros_like(logits, dtype=torch.int32), torch.zeros_like(logits)
        ruled = self._ruled(1)
        for by_bias in (False, True):
            for avoids in (False, True):
                tables = RuleTables(words, bias)
                self._ops.rule(logits, tables, ruled, by_bias=by_bias, avoids=avoids)
        tokens = torch.zeros(1, dtype=torch.int64, device=logits.device)
        self._ops.note(words, ruled.kept, tokens, ruled.rows)

    def _ruled(self, num: int) -> Ruled:
        return Ruled(*_columns(self._fields.there, num))


def _columns(matrix: Any, num: int) -> list[Any]:
    """Return views of the fields of `Ruled` in an array or tensor: a line each, the last whole."""
    *lines, drafted = matrix
    float32 = np.float32 if isinstance(matrix, np.ndarray) else torch.float32
    named = zip(_FIELDS, lines, strict=False)
    return [
        *((line.view(float32) if name in _FLOATS else line)[:num] for name, line in named),
        drafted,
    ]


def _inside(token_ids: Iterable[int], vocab_size: int) -> NDArray[np.int64]:
    """Return the ids that are in the vocabulary, repetitions included."""
    found = np.fromiter(token_ids, np.int64)
    return found[(found >= 0) & (found < vocab_size)]
