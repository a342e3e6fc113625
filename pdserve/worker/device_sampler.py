"""Samples on the device, so that only tokens travel to the host.

The likeliest token of each row is found at once, inside a graph if the step is one. Rows that are
drawn, and rows with rules, are handled after that; the host launches this work while the device
is still busy with the step. The semantics are those of `Sampler`, the weights are integers
(`kernels.reference.sampling`): a token depends neither on the batch nor on how a device sums.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pdserve.errors import InternalError
from pdserve.kernels.reference.sampling import NOT_FINITE, Draws
from pdserve.worker.device_masks import DeviceMasks
from pdserve.worker.device_rules import DeviceRules, are_kept
from pdserve.worker.logit_rules import LogitRules
from pdserve.worker.logprobs import token_logprobs
from pdserve.worker.sampler import PATIENCE_S, Sampled, Sampler, note_tokens
from pdserve.worker.verifying import DraftedRows, single, take_at_once, verify_in_waves

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from pdserve.kernels.ops import SamplingOps
    from pdserve.wire.sampling import SamplingParams
    from pdserve.worker.device import Device, DeviceEvent
    from pdserve.worker.device_rules import StagedRules
    from pdserve.worker.grammar import Constraint, GrammarPool
    from pdserve.worker.logit_rules import Hindered
    from pdserve.worker.step_buffers import StepBuffers
    from pdserve.worker.verifying import Verified

_AHEAD = 32
"""Uniform numbers made at a time for a row: few at once cost the host as much as these."""


@dataclass(frozen=True, slots=True)
class StagedDraws:
    """Inputs for sampling a step's tokens, by index into its rows of logits.

    Attributes:
        rows: `[L]`, the batch row of each.
        num_drawn: Number of rows that are drawn.
        by_k, by_p: Whether top-k or top-p applies to any of those.
        ruled: Rows with rules that the host applies.
        masked: Rows that a grammar alone rules, whose mask the host brings, and the number of
            tokens that it follows.
        kept: Rows with rules that are kept on the device; None if there are none.
        described: Rows that ask for log-probabilities.
        drafted: The rows of M requests, if any has a draft: one row follows its token, and one
            each token of its draft.
        is_in_waves: `[M]`, whether a request has both a draft and rules that the host applies;
            its rows are none of those above.
    """

    rows: list[int]
    num_drawn: int
    by_k: bool
    by_p: bool
    ruled: list[int]
    masked: dict[int, int]
    described: list[int]
    kept: StagedRules | None = None
    drafted: DraftedRows | None = None
    is_in_waves: NDArray[np.bool_] | None = None

    @property
    def asks_host(self) -> bool:
        """Whether the host takes part in choosing or describing the tokens, masks aside."""
        return bool(self.ruled or self.described or self.drafted is not None)


@dataclass(frozen=True, slots=True, eq=False)
class ComingTokens:
    """Tokens on their way to the host.

    Attributes:
        logits: `[L, vocab_size]`, on the device, until the next replay of a graph.
        tokens: `[L]`, likewise.
        host: `[L]`, their destination in host memory.
        came: The event after which they are there.
        staged: The inputs that they were chosen with.
        noting: By index, the rules that note their row's token.
        unmodified: Logits of the rows that are described, if there are any.
        hindered: By index, rows that have no token, and why.
    """

    logits: Tensor
    tokens: Tensor
    host: Tensor
    came: DeviceEvent
    staged: StagedDraws
    noting: dict[int, LogitRules]
    unmodified: Tensor | None
    hindered: dict[int, Hindered]


def asks_host(params: SamplingParams) -> bool:
    """Whether the host takes part in choosing or describing a request's tokens, masks aside."""
    if params.logprobs is not None:
        return True
    return LogitRules.needed(params) and not (are_kept(params) or LogitRules.only_grammar(params))


class DeviceSampler(Sampler):
    """A `Sampler` whose rows are sampled in four parts: `stage`, `choose`, `give` and `take`.

    With drafts, all rows of a request are chosen together: for the device an extra row costs next
    to nothing, but waiting for the previous one does. The same holds for rows with rules, except
    rules for which the host matches tokens: each such row waits for the one before it.

    Args:
        buffers: Bring the sampling parameters to the device, with the step's inputs.
        ops: Operations of the device.
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
        super().__init__(num_rows, vocab_size, device.torch, grammars, ops)
        self._there = device
        self._buffers = buffers
        max_logits = buffers.max_logits
        self._kept = DeviceRules(
            num_rows, vocab_size, device=device, ops=ops, max_logits=max_logits
        )
        self._masks = DeviceMasks(num_rows, vocab_size, device=device, ops=ops)
        self._only_grammar: set[int] = set()
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
        """Whether any row asks for it, in this step or not; see the function `asks_host`."""
        return bool(self._rules.keys() - self._only_grammar or self._alternatives)

    @property
    def has_grammars(self) -> bool:
        """Whether any row has a grammar as its only rule."""
        return bool(self._only_grammar)

    def remove(self, row: int) -> None:
        """See `Sampler`."""
        super().remove(row)
        self._kept.remove(row)
        self._only_grammar.discard(row)
        self._ahead_of[row] = -self._num_ahead

    def _add_rules(
        self, row: int, params: SamplingParams, prompt: Sequence[int], outputs: Sequence[int]
    ) -> None:
        if are_kept(params):
            self._kept.add(row, params, prompt, outputs)
            return
        super()._add_rules(row, params, prompt, outputs)
        if LogitRules.only_grammar(params):
            self._only_grammar.add(row)

    def stage(
        self,
        rows: NDArray[np.int64],
        num_outputs: NDArray[np.int64],
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> StagedDraws:
        """Fill in the sampling parameters of rows, before the step's inputs are uploaded.

        Args:
            rows: `[M]`, the batch row of each request.
            num_outputs: `[M]`, number of tokens each has already put out.
            drafts: `M` drafts, each token of which has a row of logits of its own; None if there
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
        """Fill in the parameters of `L` rows of logits; see `_plan` and `DeviceRules.stage`."""
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
        """Return the plan for rows of logits, and the fields of `Draws`; None if nothing is drawn.

        Args:
            rows: `[L]`, the batch row of each; equal ones are adjacent.
            num_outputs: `[L]`, the index of each token, rising within a batch row.
            left_out: Rows to skip.
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
            ruled=[i for i, row in here if row in self._rules and row not in self._only_grammar],
            masked={i: int(num_outputs[i]) for i, row in here if row in self._only_grammar},
            described=[i for i, row in here if row in self._alternatives],
        )
        if not drawn:
            return staged, None
        return staged, self._columns(drawn, mine, num_outputs[drawn], self._vocab_size)

    def _uniforms(
        self, rows: NDArray[np.int64], num_outputs: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """`[N]`, the number of each row's token, in `2**-53`; see `_plan`."""
        ahead = num_outputs - self._ahead_of[rows]
        if ((ahead < 0) | (ahead >= self._num_ahead)).any():
            # For all rows at once, so that they run out together.
            is_first = np.diff(rows, prepend=-1) != 0
            of, first = rows[is_first], num_outputs[is_first]
            index = first[:, None] + np.arange(self._num_ahead)
            made = super()._uniforms(np.repeat(of, self._num_ahead), index.ravel())
            self._ahead[of] = made.reshape(-1, self._num_ahead)
            self._ahead_of[of] = first
            ahead = num_outputs - self._ahead_of[rows]
        found: NDArray[np.int64] = self._ahead[rows, ahead]
        return found

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest token of each row and its logit, on the device; may be captured."""
        return self._ops.largest(logits)

    def give(
        self, logits: Tensor, tokens: Tensor, peaks: Tensor, staged: StagedDraws
    ) -> ComingTokens:
        """Launch the remaining choices and the copy of the tokens to the host; never waits.

        The tokens of two steps may be on their way. Rules, masks and log-probabilities depend on a
        row's token: with any of them, `take` must come before the next `give`.

        Args:
            logits: `[L, vocab_size]` fp32; owned by the sampler from here on.
            tokens: `[L]`, as `choose` returned them; changed.
            peaks: Likewise.
            staged: As `stage` returned it for the step.
        """
        return self._give(logits, tokens, peaks, staged, self._buffers.draws(staged.num_drawn))

    def _give(
        self, logits: Tensor, tokens: Tensor, peaks: Tensor, staged: StagedDraws, draws: Draws
    ) -> ComingTokens:
        unmodified = logits[staged.described] if staged.described else None
        noting = {i: self._rules[staged.rows[i]] for i in (*staged.ruled, *staged.masked)}
        if staged.kept is not None:
            self._kept.apply(logits, staged.kept)
        hindered = self._apply_rules(staged.rows, staged.ruled, logits)
        hindered |= self._apply_masks(staged, noting, logits)
        if staged.kept is not None or noting:
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
        return ComingTokens(logits, tokens, host, came, staged, noting, unmodified, hindered)

    def _apply_masks(
        self, staged: StagedDraws, noting: Mapping[int, LogitRules], logits: Tensor
    ) -> dict[int, Hindered]:
        """Mask rows by their grammars; return those that have no token."""
        until_s = time.monotonic() + PATIENCE_S
        hindered: dict[int, Hindered] = {}
        masked: list[tuple[int, Constraint]] = []
        for i, num_outputs in staged.masked.items():
            rules = noting[i]
            if rules.num_outputs != num_outputs:
                raise InternalError(f"a mask behind {rules.num_outputs} tokens, not {num_outputs}")
            if (why := rules.hindered(until_s)) is not None:
                hindered[i] = why
            elif rules.constraint is not None:
                masked.append((i, rules.constraint))
        if masked:
            self._masks.apply(logits, masked)
        return hindered

    def take(self, coming: ComingTokens) -> Sampled:
        """Wait for the tokens."""
        coming.came.wait()
        staged, unmodified, hindered = coming.staged, coming.unmodified, coming.hindered
        chosen = coming.host.numpy().copy()
        lost = np.flatnonzero(chosen == NOT_FINITE)
        chosen[lost] = 0
        non_finite = note_tokens(coming.noting, chosen, lost, hindered)
        if unmodified is None:
            return Sampled(chosen, {}, non_finite, hindered)
        described = token_logprobs(
            self._ops,
            unmodified,
            torch.from_numpy(chosen[staged.described]).to(self._device),
            [self._alternatives[staged.rows[i]] for i in staged.described],
        )
        logprobs = dict(zip(staged.described, described, strict=True))
        return Sampled(chosen, logprobs, non_finite, hindered)

    def verified(self, coming: ComingTokens) -> Verified:
        """Wait for the tokens of a step, and return the valid ones of each request."""
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
            draws = Draws(*map(self._uploaded, columns))
        return self.take(self._give(logits, *self.choose(logits), staged, draws))

    def kept_for_rules(self) -> Tensor:
        """Allocate as much memory as rules take once a request has any."""
        shape = 2, len(self._ahead), self._vocab_size
        return torch.zeros(shape, dtype=torch.int32, device=self._device)

    def warm_up(self) -> None:
        """Launch everything that a step with the most rows of logits, drafts' too, may launch."""
        num_rows, max_logits = len(self._ahead), self._buffers.max_logits
        logits = torch.zeros(max_logits, self._vocab_size, device=self._device)
        tokens, peaks = self._ops.largest(logits)
        draws = self._buffers.draws(max_logits)
        token_logprobs(self._ops, logits.clone(), tokens, [1] * max_logits)
        for by_k in (False, True):
            for by_p in (False, True):
                self._ops.draw(logits, peaks, draws, tokens, by_k=by_k, by_p=by_p)
        self._kept.warm_up(logits[:num_rows])
        self._masks.warm_up(logits)
