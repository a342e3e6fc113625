"""Samples on the device, so that only tokens travel to the host.

The likeliest token of each row is found at once, inside a graph if the step is one. Rows that are
drawn, and rows with rules, are looked at again behind it; the host launches that while the device
is still busy with the step. The semantics are those of `Sampler`, the weights are integers
(`kernels.reference.sampling`): a token depends neither on the batch nor on how a device sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pdserve.kernels.reference.sampling import FRACTION_BITS, NOT_FINITE, Draws
from pdserve.worker.device_rules import DeviceRules, are_kept
from pdserve.worker.logit_rules import LogitRules
from pdserve.worker.logprobs import token_logprobs
from pdserve.worker.philox import uniforms
from pdserve.worker.sampler import Sampled, Sampler
from pdserve.worker.verifying import DraftedRows, single, take_at_once, verify_in_waves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from pdserve.kernels.ops import SamplingOps
    from pdserve.wire.sampling import SamplingParams
    from pdserve.worker.device import Device, DeviceEvent
    from pdserve.worker.device_rules import StagedRules
    from pdserve.worker.grammar import GrammarPool
    from pdserve.worker.logit_rules import Hindered
    from pdserve.worker.step_buffers import StepBuffers
    from pdserve.worker.verifying import Verified

_AHEAD = 32
"""Uniform numbers made at a time for a row: few at once cost the host as much as these."""
_WHOLE = 1 << FRACTION_BITS


@dataclass(frozen=True, slots=True)
class StagedDraws:
    """What a step's tokens take, by index into its rows of logits.

    Attributes:
        rows: `[L]`, the batch row of each.
        num_drawn: Rows that are drawn.
        by_k, by_p: Whether any of those is cut off so.
        ruled: Those with rules that the host applies.
        kept: Those with rules that are kept on the device; None if there are none.
        described: Those that ask for log-probabilities.
        drafted: What M requests sample, if any has a draft: a row follows its token and each of
            its draft.
        is_in_waves: `[M]`, requests whose rows are none of those above: with rules of the host's
            and a draft.
    """

    rows: list[int]
    num_drawn: int
    by_k: bool
    by_p: bool
    ruled: list[int]
    described: list[int]
    kept: StagedRules | None = None
    drafted: DraftedRows | None = None
    is_in_waves: NDArray[np.bool_] | None = None

    @property
    def asks_host(self) -> bool:
        """Whether the host has a part in the tokens, or in what is said of them."""
        return bool(self.ruled or self.described or self.drafted is not None)


@dataclass(frozen=True, slots=True, eq=False)
class ComingTokens:
    """Tokens on their way to the host.

    Attributes:
        logits: `[L, vocab_size]`, on the device, until the next replay of a graph.
        tokens: `[L]`, likewise.
        host: `[L]`, where they come to.
        came: When they are there.
        staged: What they were chosen by.
        unmodified: Logits of the rows that are described, if there are any.
        hindered: By index, rows that have no token, and why.
    """

    logits: Tensor
    tokens: Tensor
    host: Tensor
    came: DeviceEvent
    staged: StagedDraws
    unmodified: Tensor | None
    hindered: dict[int, Hindered]


def asks_host(params: SamplingParams) -> bool:
    """Whether the host has a part in a request's tokens, or in what is said of them."""
    has_rules = LogitRules.needed(params) and not are_kept(params)
    return params.logprobs is not None or has_rules


class DeviceSampler(Sampler):
    """A `Sampler` whose rows are sampled in four parts: `stage`, `choose`, `give` and `take`.

    With drafts all rows of a request are chosen together: to the device a row more is next to
    nothing, and waiting for the one before it is not. So are rules, but for those that the host
    matches tokens for: rows with such wait for one another.

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
        max_logits = buffers.max_logits
        self._kept = DeviceRules(
            num_rows, vocab_size, device=device, ops=ops, max_logits=max_logits
        )
        num_bytes = max_logits * torch.int64.itemsize
        self._memory = [device.staging(num_bytes) for _ in range(2)]
        self._came = [device.event() for _ in range(2)]
        self._turn = 0
        # Those of a draft among them, whatever comes first.
        self._num_ahead = max(_AHEAD, -(-max_logits // num_rows))
        self._ahead = np.zeros((num_rows, self._num_ahead), dtype=np.int64)
        self._ahead_of = np.full(num_rows, -self._num_ahead, dtype=np.int64)

    @property
    def asks_host(self) -> bool:
        """Whether any row asks for it, in this step or not."""
        return bool(self._rules or self._alternatives)

    def remove(self, row: int) -> None:
        """See `Sampler`."""
        super().remove(row)
        self._kept.remove(row)
        self._ahead_of[row] = -self._num_ahead

    def _add_rules(
        self, row: int, params: SamplingParams, prompt: Sequence[int], outputs: Sequence[int]
    ) -> None:
        if are_kept(params):
            self._kept.add(row, params, prompt, outputs)
        else:
            super()._add_rules(row, params, prompt, outputs)

    def stage(
        self,
        rows: NDArray[np.int64],
        num_outputs: NDArray[np.int64],
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> StagedDraws:
        """Fill in what rows are drawn by, before the step's inputs are uploaded.

        Args:
            rows: `[M]`, the batch row of each request.
            num_outputs: `[M]`, tokens each has put out before.
            drafts: `M` of them, each of whose tokens has a row of logits of its own; None: there
                are none.
        """
        if drafts is None:
            return self._stage(rows, num_outputs)
        drafted = DraftedRows(rows, num_outputs, drafts)
        waits = zip(rows.tolist(), drafts, strict=True)
        in_waves = np.array([bool(draft) and row in self._rules for row, draft in waits])
        lengths, depth = drafted.lengths, drafted.depth()
        staged = self._stage(
            np.repeat(rows, lengths),
            np.repeat(num_outputs, lengths) + depth,
            left_out=np.repeat(in_waves, lengths),
            behind=(depth, drafted.following()),
        )
        return replace(staged, drafted=drafted, is_in_waves=in_waves)

    def _stage(
        self,
        rows: NDArray[np.int64],
        num_outputs: NDArray[np.int64],
        left_out: NDArray[np.bool_] | None = None,
        behind: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
    ) -> StagedDraws:
        """Fill in what each of `L` rows of logits takes; see `_plan`, and `DeviceRules.stage`."""
        staged, columns = self._plan(rows, num_outputs, left_out)
        if columns is not None:
            fields = self._buffers.draws_to_fill(staged.num_drawn)
            for field, column in zip(fields, columns, strict=True):
                field[:] = column
        if ruled := self._kept.among(staged.rows):
            staged = replace(staged, kept=self._kept.stage(ruled, rows, num_outputs, behind))
        return staged

    def _plan(
        self,
        rows: NDArray[np.int64],
        num_outputs: NDArray[np.int64],
        left_out: NDArray[np.bool_] | None = None,
    ) -> tuple[StagedDraws, tuple[NDArray[Any], ...] | None]:
        """Return what rows of logits take, and what is drawn by, as `Draws` has it; None: nothing.

        Args:
            rows: `[L]`, the batch row of each; those of one follow one another.
            num_outputs: `[L]`, the index of each token, rising in a row.
            left_out: Nothing is asked of these.
        """
        at = rows.tolist()
        here = list(enumerate(at))
        if left_out is not None:
            here = [each for each in here if not left_out[each[0]]]
        drawn = [i for i, row in here if row in self._random]
        mine = rows[drawn]
        top_k, top_p = self._top_k[mine], self._top_p[mine]
        staged = StagedDraws(
            at,
            len(drawn),
            by_k=bool(top_k.any()),
            by_p=bool((top_p < 1.0).any()),
            ruled=[i for i, row in here if row in self._rules],
            described=[i for i, row in here if row in self._alternatives],
        )
        if not drawn:
            return staged, None
        return staged, (
            np.array(drawn, dtype=np.int32),
            (math.log2(math.e) / self._temperature[mine].astype(float)).astype(np.float32),
            self._min_p[mine],
            top_k.astype(np.int32),
            np.ceil(top_p * _WHOLE).astype(np.int64),
            self._uniforms(mine, num_outputs[drawn]),
        )

    def _uniforms(
        self, rows: NDArray[np.int64], num_outputs: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """`[N]`, the number of each row's token, in `2**-53`; see `_plan`."""
        ahead = num_outputs - self._ahead_of[rows]
        if ((ahead < 0) | (ahead >= self._num_ahead)).any():
            # Of all rows at once, so that they run out together.
            is_first = np.diff(rows, prepend=-1) != 0
            of, first = rows[is_first], num_outputs[is_first]
            index = first[:, None] + np.arange(self._num_ahead)
            made = uniforms(np.repeat(self._seed[of], self._num_ahead), index.ravel())
            self._ahead[of] = (made * _WHOLE).astype(np.int64).reshape(-1, self._num_ahead)
            self._ahead_of[of] = first
            ahead = num_outputs - self._ahead_of[rows]
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
            logits: `[L, vocab_size]` fp32; owned by the sampler from here on.
            tokens: `[L]` of `choose`; changed.
            peaks: Likewise.
            staged: The step's.
        """
        return self._give(logits, tokens, peaks, staged, self._buffers.draws(staged.num_drawn))

    def _give(
        self, logits: Tensor, tokens: Tensor, peaks: Tensor, staged: StagedDraws, draws: Draws
    ) -> ComingTokens:
        unmodified = logits[staged.described] if staged.described else None
        hindered: dict[int, Hindered] = {}
        if staged.kept is not None:
            self._kept.apply(logits, staged.kept)
        if staged.ruled:
            hindered = self._apply_rules(staged.rows, staged.ruled, logits)
        if staged.kept is not None or staged.ruled:
            # A rule may hide what is not finite.
            is_lost = tokens == NOT_FINITE
            tokens, peaks = self._ops.largest(logits)
            tokens.masked_fill_(is_lost, NOT_FINITE)
            peaks.masked_fill_(is_lost, math.nan)
        if staged.num_drawn:
            self._ops.draw(logits, peaks, draws, tokens, by_k=staged.by_k, by_p=staged.by_p)
        if staged.kept is not None and staged.drafted is None:
            self._kept.note_sampled(tokens, staged.kept)
        self._turn = 1 - self._turn
        host = self._memory[self._turn][: tokens.nbytes].view(torch.int64)
        self._there.copy(host, tokens)
        came = self._came[self._turn]
        came.record()
        return ComingTokens(logits, tokens, host, came, staged, unmodified, hindered)

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

    def verified(self, coming: ComingTokens) -> Verified:
        """Wait for the tokens of a step; of each request those that count."""
        sampled = self.take(coming)
        drafted, is_in_waves = coming.staged.drafted, coming.staged.is_in_waves
        if drafted is None or is_in_waves is None:
            return single(sampled)
        verified = drafted.nothing()
        at_once = np.flatnonzero(~is_in_waves)
        take_at_once(verified, sampled, at_once, drafted.first[at_once], drafted.drafts)
        verify_in_waves(verified, self, coming.logits, drafted, np.flatnonzero(is_in_waves))
        if coming.staged.kept is not None:
            self._kept.note(drafted.rows, verified.token_ids)
        return verified

    def sample(
        self, logits: Tensor, rows: NDArray[np.int64], num_outputs: NDArray[np.int64]
    ) -> Sampled:
        """See `Sampler`: the same tokens as in four parts, waited for."""
        staged, columns = self._plan(rows, num_outputs)
        draws = self._buffers.draws(0)
        if columns is not None:
            draws = Draws(*(torch.from_numpy(column).to(self._device) for column in columns))
        return self.take(self._give(logits, *self.choose(logits), staged, draws))

    def kept_for_rules(self) -> Tensor:
        """Take as much memory as rules do from the first request on that has any."""
        shape = 2, len(self._ahead), self._vocab_size
        return torch.zeros(shape, dtype=torch.int32, device=self._device)

    def warm_up(self) -> None:
        """Launch everything that a step of the most rows may launch."""
        logits = torch.zeros(len(self._ahead), self._vocab_size, device=self._device)
        tokens, peaks = self._ops.largest(logits)
        draws = self._buffers.draws(len(logits))
        token_logprobs(logits.clone(), tokens, [1] * len(logits))
        for by_k in (False, True):
            for by_p in (False, True):
                self._ops.draw(logits, peaks, draws, tokens, by_k=by_k, by_p=by_p)
        self._kept.warm_up(logits)
