"""Results read from final hidden states: prompt log-probabilities, pooling, NaN checks.

Log-probabilities of prompt tokens, a vector for a prompt, and requests with non-finite values.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from pdserve.wire.sampling import Pooling
from pdserve.worker.logprobs import token_logprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from pdserve.kernels.ops import SamplingOps
    from pdserve.wire.ids import RequestId
    from pdserve.wire.sampling import TokenLogprobs
    from pdserve.wire.step import NewRequest
    from pdserve.worker.input_batch import InputBatch
    from pdserve.worker.step import PreparedStep

_LOGITS_CHUNK_BYTES: Final = 64 << 20


class PromptLogprobs:
    """Computes the log-probabilities of prompts that ask for them, step by step.

    Args:
        batch: Holds the prompts.
        logits: Maps final states `[M, hidden_size]` to logits `[M, vocab_size]` on the rank that
            answers, to None on the others of its stage, which make the same calls.
        ops: Describe tokens where the logits are.
    """

    def __init__(
        self,
        batch: InputBatch,
        logits: Callable[[Tensor], Tensor | None],
        ops: SamplingOps,
        *,
        vocab_size: int,
    ) -> None:
        self._batch = batch
        self._ops = ops
        self._logits = logits
        self._piece = max(1, _LOGITS_CHUNK_BYTES // (4 * vocab_size))
        self._wanted: dict[RequestId, tuple[int, int]] = {}

    @property
    def is_idle(self) -> bool:
        """Whether nothing is described."""
        return not self._wanted

    def add(self, request: NewRequest) -> None:
        """Begin to describe the prompt of a request, if it asks for that and has no output."""
        num_top = request.sampling.prompt_logprobs
        if num_top is not None and not request.output_token_ids:
            self._wanted[request.request_id] = num_top, len(request.prompt_token_ids)

    def remove(self, request_id: RequestId) -> None:
        """Forget a request."""
        self._wanted.pop(request_id, None)

    def take(self, prepared: PreparedStep, hidden: Tensor) -> dict[RequestId, list[TokenLogprobs]]:
        """Describe the prompt tokens that follow the positions of a step.

        It works in pieces, so that logits of a long prompt are never all in memory. A prompt is
        forgotten with its last token, as steps that describe none need fewer final states.

        Args:
            hidden: `[T, hidden_size]`, final states of the step's tokens.
        """
        if self.is_idle:
            return {}
        found: dict[RequestId, list[TokenLogprobs]] = {}
        for i, request_id in enumerate(prepared.request_ids):
            num_top, num_prompt = self._wanted.get(request_id, (None, 0))
            if num_top is None:
                continue
            row, start, end = int(prepared.rows[i]), int(prepared.start[i]), int(prepared.end[i])
            if end >= num_prompt - 1:
                self.remove(request_id)
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
                    tops = [num_top] * len(wanted)
                    entries += token_logprobs(self._ops, logits, wanted, tops)
            found[request_id] = entries
        return found


class PromptPooler:
    """Pools the prompts of requests that ask for it, over all steps that compute them.

    The states of a prompt are summed chunk by chunk, in fp32.
    """

    def __init__(self) -> None:
        self._wanted: dict[RequestId, tuple[Pooling, int]] = {}
        self._sums: dict[RequestId, Tensor] = {}

    @property
    def is_idle(self) -> bool:
        """Whether nothing is pooled."""
        return not self._wanted

    def add(self, request: NewRequest) -> None:
        """Begin, or begin again, to pool the prompt of a request, if it asks for that."""
        pooling = request.sampling.pooling
        if pooling is not None:
            self._wanted[request.request_id] = pooling, len(request.prompt_token_ids)

    def remove(self, request_id: RequestId) -> None:
        """Forget a request."""
        self._wanted.pop(request_id, None)
        self._sums.pop(request_id, None)

    def take(self, prepared: PreparedStep, hidden: Tensor) -> dict[RequestId, bytes]:
        """Take a step's states; return the vectors of the prompts that end in it.

        Args:
            hidden: `[T, hidden_size]`, final states of the step's tokens.

        Returns:
            `[hidden_size]` fp32 each, little endian.
        """
        if self.is_idle:
            return {}
        pooled: dict[RequestId, bytes] = {}
        for i, request_id in enumerate(prepared.request_ids):
            pooling, num_prompt = self._wanted.get(request_id, (None, 0))
            start, end = int(prepared.start[i]), min(int(prepared.end[i]), num_prompt)
            if pooling is None or start >= end:
                continue
            first = int(prepared.query_start[i])
            states = hidden[first : first + end - start]
            if pooling is Pooling.MEAN:
                total = states.sum(0, dtype=torch.float32)
                if start > 0:
                    total += self._sums[request_id]
                self._sums[request_id] = total
            if end == num_prompt:
                vector = states[-1].float()
                if pooling is Pooling.MEAN:
                    vector = self._sums.pop(request_id) / num_prompt
                pooled[request_id] = vector.cpu().numpy().astype("<f4").tobytes()
        return pooled


def not_a_number(entries: Mapping[RequestId, Sequence[TokenLogprobs]]) -> set[RequestId]:
    """Return the requests with a token whose log-probability is NaN."""
    return {
        request_id
        for request_id, described in entries.items()
        if any(math.isnan(entry.logprob) for entry in described)
    }


def not_finite(prepared: PreparedStep, sums: Tensor) -> set[RequestId]:
    """Return the requests without a draft that have a token with non-finite states.

    A token attends to itself, so its states reveal its KV in every layer. Where there is a draft,
    which may be at fault, the logits of the request's last token tell.

    Args:
        sums: `[T]` fp32, sums of each token's states after the last attention.
    """
    found = np.flatnonzero(~np.isfinite(sums.cpu().numpy()))
    requests = np.searchsorted(prepared.query_start, found, side="right") - 1
    drafts = zip(prepared.sampling.tolist(), prepared.drafts or [], strict=False)
    drafted = {index for index, draft in drafts if draft}
    return {prepared.request_ids[i] for i in set(requests.tolist()) - drafted}
