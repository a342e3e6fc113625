"""One vector for a prompt, from the final hidden states of its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pdserve.wire.sampling import Pooling

if TYPE_CHECKING:
    from torch import Tensor

    from pdserve.wire.ids import RequestId
    from pdserve.wire.step import NewRequest
    from pdserve.worker.prepared_step import PreparedStep


class PromptPooler:
    """Pools the prompts that are to be, whichever steps they are computed in.

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
        """Pool the prompt of a request, if it asks for that; it begins, or begins again."""
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
