"""One token per row of logits, chosen where the logits are: only tokens travel to the host.

The likeliest token of each row is found at once, inside a graph if the step is one. Rows that are
drawn, and rows with rules, are looked at again behind it; the host launches that while the device
is still busy with the step. The semantics are those of `Sampler`, the weights are integers
(`kernels.reference.sampling`): a token depends neither on the batch nor on how a device sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pdserve.kernels.reference.sampling import FRACTION_BITS, NOT_FINITE
from pdserve.worker.logit_rules import LogitRules
from pdserve.worker.logprobs import token_logprobs
from pdserve.worker.philox import uniforms
from pdserve.worker.sampler import Sampled, Sampler

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from pdserve.kernels.ops import SamplingOps
    from pdserve.wire.sampling import SamplingParams
    from pdserve.worker.device import Device, DeviceEvent
    from pdserve.worker.grammar import GrammarPool
    from pdserve.worker.logit_rules import Hindered
    from pdserve.worker.step_buffers import StepBuffers

_AHEAD = 32
"""Uniform numbers made at a time for a row: few at once cost the host as much as these."""
_WHOLE = 1 << FRACTION_BITS


@dataclass(frozen=True, slots=True)
class StagedDraws:
    """What a step's tokens take, by index into its rows.

    Attributes:
        rows: `[M]`, the batch row of each.
        num_drawn: Rows that are drawn.
        by_k, by_p: Whether any of those is cut off so.
        ruled: Those with rules.
        described: Those that ask for log-probabilities.
    """

    rows: list[int]
    num_drawn: int
    by_k: bool
    by_p: bool
    ruled: list[int]
    described: list[int]

    @property
    def asks_host(self) -> bool:
        """See the function of that name."""
        return bool(self.ruled or self.described)


@dataclass(frozen=True, slots=True, eq=False)
class ComingTokens:
    """Tokens on their way to the host.

    Attributes:
        tokens: `[M]`, on the device, until the next replay of a graph.
        host: `[M]`, where they come to.
        came: When they are there.
        staged: What they were chosen by.
        unmodified: Logits of the rows that are described, if there are any.
        hindered: By index, rows that have no token, and why.
    """

    tokens: Tensor
    host: Tensor
    came: DeviceEvent
    staged: StagedDraws
    unmodified: Tensor | None
    hindered: dict[int, Hindered]


def asks_host(params: SamplingParams) -> bool:
    """Whether the host has a part in a request's tokens, or in what is said of them."""
    return params.logprobs is not None or LogitRules.needed(params)


class DeviceSampler(Sampler):
    """A `Sampler` whose rows are sampled in four parts: `stage`, `choose`, `give` and `take`.

    Args:
        buffers: Bring what is drawn by to the device, with the step's inputs.
        ops: The device's.
    """

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        *,
        device: Device,
        buffers: StepBuffers,
        ops: SamplingOps,
        grammars: GrammarPool | None = None,
    ) -> None:
        super().__init__(num_rows, vocab_size, device.torch, grammars)
        self._there = device
        self._buffers = buffers
        self._ops = ops
        self._memory = [device.staging(num_rows * torch.int64.itemsize) for _ in range(2)]
        self._came = [device.event() for _ in range(2)]
        self._turn = 0
        self._ahead = np.zeros((num_rows, _AHEAD), dtype=np.int64)
        self._ahead_of = np.full(num_rows, -_AHEAD, dtype=np.int64)

    @property
    def asks_host(self) -> bool:
        """Whether any row asks for it, in this step or not."""
        return bool(self._rules or self._alternatives)

    def remove(self, row: int) -> None:
        """See `Sampler`."""
        super().remove(row)
        self._ahead_of[row] = -_AHEAD

    def stage(self, rows: NDArray[np.int64], num_outputs: NDArray[np.int64]) -> StagedDraws:
        """Fill in what rows are drawn by, before the step's inputs are uploaded.

        Args:
            rows: `[M]`, the batch row of each row of logits.
            num_outputs: `[M]`, tokens each request has put out before.
        """
        at = rows.tolist()
        drawn = [i for i, row in enumerate(at) if row in self._random]
        num_drawn = len(drawn)
        mine = rows[drawn]
        top_k, top_p = self._top_k[mine], self._top_p[mine]
        if drawn:
            arrays = self._buffers.arrays
            arrays.drawn_rows[:num_drawn] = drawn
            arrays.scale[:num_drawn] = math.log2(math.e) / self._temperature[mine].astype(float)
            arrays.min_p[:num_drawn] = self._min_p[mine]
            arrays.top_k[:num_drawn] = top_k
            arrays.top_p[:num_drawn] = np.ceil(top_p * _WHOLE)
            arrays.uniform[:num_drawn] = self._uniforms(mine, num_outputs[drawn])
        return StagedDraws(
            at,
            num_drawn,
            by_k=bool(top_k.any()),
            by_p=bool((top_p < 1.0).any()),
            ruled=[i for i, row in enumerate(at) if row in self._rules],
            described=[i for i, row in enumerate(at) if row in self._alternatives],
        )

    def _uniforms(
        self, rows: NDArray[np.int64], num_outputs: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """`[N]`, the number of each row's next token, in `2**-53`."""
        ahead = num_outputs - self._ahead_of[rows]
        if ((ahead < 0) | (ahead >= _AHEAD)).any():
            # Of all rows at once, so that they run out together.
            index = num_outputs[:, None] + np.arange(_AHEAD)
            made = uniforms(np.repeat(self._seed[rows], _AHEAD), index.ravel())
            self._ahead[rows] = (made * _WHOLE).astype(np.int64).reshape(-1, _AHEAD)
            self._ahead_of[rows] = num_outputs
            ahead = np.zeros_like(num_outputs)
        found: NDArray[np.int64] = self._ahead[rows, ahead]
        return found

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest token of each row and its logit, on the device; may be captured."""
        return self._ops.largest(logits)

    def give(
        self, logits: Tensor, tokens: Tensor, peaks: Tensor, staged: StagedDraws
    ) -> ComingTokens:
        """Have what is not chosen yet chosen, and the tokens brought; waits for nothing.

        The tokens of two steps may be on their way. Rules, and log-probabilities, are told of a
        row's token: with either, `take` must come before the next `give`.

        Args:
            logits: `[M, vocab_size]` fp32; owned by the sampler from here on.
            tokens: `[M]` of `choose`; changed.
            peaks: Likewise.
            staged: The step's.
        """
        unmodified = logits[staged.described] if staged.described else None
        hindered: dict[int, Hindered] = {}
        if staged.ruled:
            hindered = self._apply_rules(staged.rows, staged.ruled, logits)
            # A rule may hide what is not finite.
            is_lost = tokens == NOT_FINITE
            tokens, peaks = self._ops.largest(logits)
            tokens.masked_fill_(is_lost, NOT_FINITE)
            peaks.masked_fill_(is_lost, math.nan)
        if staged.num_drawn:
            draws = self._buffers.draws(staged.num_drawn)
            self._ops.draw(logits, peaks, draws, tokens, by_k=staged.by_k, by_p=staged.by_p)
        self._turn = 1 - self._turn
        host = self._memory[self._turn][: tokens.nbytes].view(torch.int64)
        self._there.copy(host, tokens)
        self._came[self._turn].record()
        return ComingTokens(tokens, host, self._came[self._turn], staged, unmodified, hindered)

    def take(self, coming: ComingTokens) -> Sampled:
        """Wait for the tokens."""
        coming.came.wait()
        staged, unmodified, hindered = coming.staged, coming.unmodified, coming.hindered
        chosen = coming.host.numpy().copy()
        lost = np.flatnonzero(chosen == NOT_FINITE)
        chosen[lost] = 0
        non_finite = self._note(staged.rows, staged.ruled, chosen, lost, hindered)
        if unmodified is None:
            return Sampled(chosen, {}, non_finite, hindered)
        described = token_logprobs(
            unmodified,
            torch.from_numpy(chosen[staged.described]).to(self._device),
            [self._alternatives[staged.rows[i]] for i in staged.described],
        )
        logprobs = dict(zip(staged.described, described, strict=True))
        return Sampled(chosen, logprobs, non_finite, hindered)

    def warm_up(self) -> None:
        """Have everything compiled that a step may launch."""
        logits = torch.zeros(1, self._vocab_size, device=self._device)
        tokens, peaks = self._ops.largest(logits)
        draws = self._buffers.draws(1)
        for by_k in (False, True):
            for by_p in (False, True):
                self._ops.draw(logits, peaks, draws, tokens, by_k=by_k, by_p=by_p)
