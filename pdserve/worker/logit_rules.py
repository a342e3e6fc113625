"""What one request forbids, favours and penalises, applied to its row of logits.

Order and formulas are vLLM's: bias, then repetition, frequency and presence penalties,
then masks. Requests without any of these have no `LogitRules` and cost nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pdserve.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from pdserve.wire.sampling import SamplingParams


class LogitRules:
    """The rules of one request and what they need to know of its tokens so far.

    Token ids outside the vocabulary are left out: they can be neither made nor forbidden.

    Args:
        prompt: The prompt's token ids.
        outputs: Token ids already out.

    Raises:
        InternalError: `allowed_token_ids` leaves nothing of the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        outputs: Sequence[int],
        *,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._bias = {t: b for t, b in params.logit_bias.items() if 0 <= t < vocab_size}
        self._allowed = (
            None if params.allowed_token_ids is None else self._indices(params.allowed_token_ids)
        )
        if self._allowed is not None and not len(self._allowed):
            raise InternalError(
                f"a request allows only {params.allowed_token_ids} of {vocab_size} tokens: the "
                "server should have refused it"
            )
        self._bad_words = [word for word in params.bad_words if word]
        self._min_tokens = params.min_tokens
        self._stop_ids = params.eos_token_ids + params.stop_token_ids
        self._outputs = list(outputs)
        self._penalties = (
            _Penalties(params, prompt, outputs, device) if _has_penalties(params) else None
        )

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether a request has any rule."""
        return bool(
            _has_penalties(params)
            or params.logit_bias
            or params.allowed_token_ids is not None
            or params.bad_words
            or params.min_tokens > 0
        )

    def note(self, token_id: int) -> None:
        """A token is out."""
        self._outputs.append(token_id)
        if self._penalties is not None:
            self._penalties.note(token_id)

    def apply(self, row: Tensor) -> None:
        """Change `row`, `[vocab_size]` fp32, in place.

        `allowed_token_ids` always holds. Where bad words and minimum tokens would leave
        no token at all, they give way.
        """
        if self._bias:
            index = torch.tensor(list(self._bias), device=self._device)
            row[index] += torch.tensor(list(self._bias.values()), device=self._device)
        if self._penalties is not None:
            self._penalties.apply(row)
        if self._allowed is not None:
            kept = row[self._allowed]
            row.fill_(-torch.inf)
            row[self._allowed] = kept
        avoided = self._avoided()
        if avoided:
            index = self._indices(avoided)
            before = row[index]
            row[index] = -torch.inf
            if row.max() == -torch.inf:
                row[index] = before

    def _avoided(self) -> set[int]:
        avoided: set[int] = set()
        if len(self._outputs) < self._min_tokens:
            avoided.update(self._stop_ids)
        for *head, last in self._bad_words:
            if len(head) <= len(self._outputs) and (
                head == self._outputs[len(self._outputs) - len(head) :]
            ):
                avoided.add(last)
        return avoided

    def _indices(self, token_ids: Iterable[int]) -> Tensor:
        inside = sorted({t for t in token_ids if 0 <= t < self._vocab_size})
        return torch.tensor(inside, dtype=torch.int64, device=self._device)


class _Penalties:
    """Distinct tokens seen, with how often each is in the output. O(distinct) per step."""

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
        self._device = device
        self._counts = dict.fromkeys(prompt, 0)
        for token_id in outputs:
            self.note(token_id)

    def note(self, token_id: int) -> None:
        self._counts[token_id] = self._counts.get(token_id, 0) + 1

    def apply(self, row: Tensor) -> None:
        index = torch.tensor(list(self._counts), device=self._device)
        count = torch.tensor(list(self._counts.values()), dtype=torch.float32, device=self._device)
        seen = row[index]
        seen = torch.where(seen > 0, seen / self._repetition, seen * self._repetition)
        seen -= self._frequency * count
        seen -= self._presence * (count > 0)
        row[index] = seen


def _has_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )
