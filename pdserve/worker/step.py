"""One step of a rank: prepared, launched, and awaited.

A step that is launched behind another one takes the other's tokens where they are, on the device.
The host writes them to their requests once they have come, unless the request is gone by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from pdserve.wire.step import ModelRunnerOutput

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from pdserve.kernels.step import StepInputs
    from pdserve.wire.ids import RequestId
    from pdserve.wire.step import SchedulerOutput
    from pdserve.worker.device_sampler import ComingTokens
    from pdserve.worker.step_buffers import GraphSize

_WORTH_LEAVING_OUT: Final = 32
"""Tokens: picking out the others takes longer than fewer of them."""


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """One step's inputs and where its results belong. R requests, M of which sample.

    A request that samples wants the logits of its last token, and of its draft behind that.

    Attributes:
        inputs: Overwritten by the next step's.
        graph: Size of the graph that runs it, one with prompts unless all tokens sample. None if it
            is launched kernel by kernel.
        request_ids: `R`, in batch order.
        rows: `[R]`, their rows.
        start, end: `[R]`, positions computed: from `start` up to, excluding, `end`; drafts
            included.
        query_start: `[R + 1]`, first token of each request in the step.
        sampling: `[M]`, indices of those that reach the end of their tokens.
        num_outputs: `[M]`, number of tokens they have already put out.
        drafts: `M` drafts, some empty; None if all are.
        logit_rows: `[M + D]` int64 on the device, tokens whose logits are wanted, D of them in
            drafts; None if all are.
        num_fed: Number of requests whose last token is only on the device.
        num_tables: Number of requests with tokens, those of padding included.
    """

    inputs: StepInputs
    graph: GraphSize | None
    request_ids: list[RequestId]
    rows: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    query_start: NDArray[np.int64]
    sampling: NDArray[np.int64]
    num_outputs: NDArray[np.int64]
    drafts: list[list[int]] | None
    logit_rows: Tensor | None
    num_fed: int
    num_tables: int

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return int(self.query_start[-1])

    @property
    def few_logit_rows(self) -> Tensor | None:
        """`logit_rows`, if it pays to do the final computation for only those rows."""
        rows = self.logit_rows
        if rows is None or self.num_tokens - len(rows) < _WORTH_LEAVING_OUT:
            return None
        return rows


@dataclass(frozen=True, slots=True, eq=False)
class AwaitedTokens:
    """Where `M` tokens of a step belong.

    Attributes:
        places: `[M]`, the index of each among the step's tokens; rising.
        rows: `[M]`, of the batch; distinct.
        positions: `[M]`, in them.
        tenures: `[M]`, of the rows, when the step was launched.
    """

    places: NDArray[np.int64]
    rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    tenures: NDArray[np.int64]


class AwaitedRows:
    """Which rows of a batch await a token of the step that was launched last.

    Args:
        num_rows: Of the batch.
    """

    def __init__(self, num_rows: int) -> None:
        self._index = np.full(num_rows, -1, dtype=np.int64)
        self._tenure = np.zeros(num_rows, dtype=np.int64)
        self._last: AwaitedTokens | None = None

    def change_hands(self, row: int) -> None:
        """Note that `row` was freed or given to another request."""
        self._index[row] = -1
        self._tenure[row] += 1

    def index_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which of the step's tokens each of `rows` awaits; -1 = none."""
        return self._index[rows]

    def begin(
        self,
        places: NDArray[np.int64],
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> AwaitedTokens:
        """Await tokens of a step; only one step at a time is awaited. See `AwaitedTokens`."""
        self._index[:] = -1
        self._index[rows] = places
        self._last = AwaitedTokens(places, rows, positions, self._tenure[rows])
        return self._last

    def end(self, awaited: AwaitedTokens) -> NDArray[np.bool_]:
        """Return, `[M]`, which tokens still have the request that they were sampled for."""
        if self._last is awaited:
            self._index[:] = -1
            self._last = None
        is_there: NDArray[np.bool_] = self._tenure[awaited.rows] == awaited.tenures
        return is_there


@dataclass(slots=True, eq=False)
class StepAhead:
    """A replayed step that the device may still be computing.

    Attributes:
        request_ids, rows: `[M]`, all of which sample.
        began_s: When it was launched, by `time.perf_counter`.
        give: Launches the choice of their tokens, given what depends on those before.
        coming: Their tokens, once that is done.
        awaited: Where those belong, likewise.
    """

    request_ids: list[RequestId]
    rows: NDArray[np.int64]
    began_s: float
    give: Callable[[], ComingTokens]
    coming: ComingTokens | None = None
    awaited: AwaitedTokens | None = None

    @property
    def is_over(self) -> bool:
        """Whether its tokens have come."""
        return self.coming is not None and self.coming.came.has_passed()


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedStep:
    """A step between its launch and its collection.

    Attributes:
        step: The step as scheduled.
        result: Its output, or the step whose tokens are awaited.
    """

    step: SchedulerOutput
    result: ModelRunnerOutput | StepAhead

    @property
    def is_over(self) -> bool:
        """Whether collecting it waits for nothing."""
        result = self.result
        return isinstance(result, ModelRunnerOutput) or result.is_over
