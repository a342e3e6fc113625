"""One step as the host has prepared it: what the device reads, and where its results belong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from pdserve.kernels.step import StepInputs
    from pdserve.wire.ids import RequestId

_WORTH_LEAVING_OUT: Final = 32
"""Tokens: picking out the others takes longer than fewer of them."""


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """One step's inputs and where its results belong. R requests, M of which sample.

    A request that samples wants the logits of its last token, and of its draft behind that.

    Attributes:
        inputs: Overwritten by the next step's.
        graph_rows: Tokens of the graph that runs it: its own, and some behind them that compute
            nothing. None if it is launched kernel by kernel.
        request_ids: `R`, in batch order.
        rows: `[R]`, their rows.
        start, end: `[R]`, positions computed: from `start` up to and without `end`, drafts
            included.
        query_start: `[R + 1]`, first token of each request in the step.
        sampling: `[M]`, indices of those that reach the end of their tokens.
        num_outputs: `[M]`, tokens they have put out before.
        drafts: `M` of them, of which some are empty; None if all are.
        draft_tokens: `[D]`, the step's tokens that are of drafts.
        logit_rows: `[M + D]` int64 on the device, tokens whose logits are wanted; None if every
            one's are.
        num_fed: Requests whose last token is on the device alone.
    """

    inputs: StepInputs
    graph_rows: int | None
    request_ids: list[RequestId]
    rows: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    query_start: NDArray[np.int64]
    sampling: NDArray[np.int64]
    num_outputs: NDArray[np.int64]
    drafts: list[list[int]] | None
    draft_tokens: NDArray[np.int64]
    logit_rows: Tensor | None
    num_fed: int

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return int(self.query_start[-1])

    @property
    def few_logit_rows(self) -> Tensor | None:
        """`logit_rows`, if it pays to compute what only they need for them alone."""
        rows = self.logit_rows
        if rows is None or self.num_tokens - len(rows) < _WORTH_LEAVING_OUT:
            return None
        return rows
