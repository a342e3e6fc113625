"""Log-probabilities of prompt tokens, from the final hidden states of those before them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from pdserve.worker.logprobs import token_logprobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from pdserve.wire.ids import RequestId
    from pdserve.wire.outputs import TokenLogprobs
    from pdserve.wire.step import NewRequest
    from pdserve.worker.input_batch import InputBatch
    from pdserve.worker.prepared_step import PreparedStep

_LOGITS_CHUNK_BYTES: Final = 64 << 20


class PromptLogprobs:
    """Describes the prompts that are to be, step by step.

    Args:
        batch: Has the prompts.
        logits: From final states `[M, hidden_size]` to logits `[M, vocab_size]`, on the rank that
            answers; None on the others of its stage, which make the same calls.
    """

    def __init__(
        self, batch: InputBatch, logits: Callable[[Tensor], Tensor | None], *, vocab_size: int
    ) -> None:
        self._batch = batch
        self._logits = logits
        self._piece = max(1, _LOGITS_CHUNK_BYTES // (4 * vocab_size))
        self._num_top: dict[RequestId, int] = {}

    @property
    def is_idle(self) -> bool:
        """Whether nothing is described."""
        return not self._num_top

    def add(self, request: NewRequest) -> None:
        """Describe the prompt of a request, if it asks for that."""
        if request.sampling.prompt_logprobs is not None:
            self._num_top[request.request_id] = request.sampling.prompt_logprobs

    def remove(self, request_id: RequestId) -> None:
        """Forget a request."""
        self._num_top.pop(request_id, None)

    def take(self, prepared: PreparedStep, hidden: Tensor) -> dict[RequestId, list[TokenLogprobs]]:
        """Describe the prompt tokens that follow the positions of a step.

        In pieces, so that logits of a long prompt are never all in memory.

        Args:
            hidden: `[T, hidden_size]`, final states of the step's tokens.
        """
        if self.is_idle:
            return {}
        found: dict[RequestId, list[TokenLogprobs]] = {}
        for i, request_id in enumerate(prepared.request_ids):
            num_top = self._num_top.get(request_id)
            if num_top is None:
                continue
            row, start, end = int(prepared.rows[i]), int(prepared.start[i]), int(prepared.end[i])
            targets = torch.from_numpy(
                self._batch.prompt_targets(row, start, end).astype("int64")
            ).to(hidden.device)
            if not len(targets):
                continue
            first = int(prepared.query_start[i])
            entries: list[TokenLogprobs] = []
            for at in range(0, len(targets), self._piece):
                wanted = targets[at : at + self._piece]
                logits = self._logits(hidden[first + at : first + at + len(wanted)])
                if logits is not None:
                    entries += token_logprobs(logits, wanted, [num_top] * len(wanted))
            found[request_id] = entries
        return found
