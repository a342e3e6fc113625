"""Samples one token per row of logits, by that request's own parameters alone.

A request's token is a function of its logits, its parameters, its tokens so far and the
index of the output token. What is summed over the vocabulary is integers, so a row's result
depends neither on its batch nor on the number of threads.

Knows rows, not requests: rows belong to the `InputBatch`. Semantics are vLLM's:
penalties and masks, then temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from pdserve.kernels.ops import SamplingOps
from pdserve.kernels.reference.sampling import FRACTION_BITS, NOT_FINITE, Draws
from pdserve.worker.logit_rules import LogitRules
from pdserve.worker.logprobs import token_logprobs
from pdserve.worker.philox import uniforms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from pdserve.wire.sampling import SamplingParams, TokenLogprobs
    from pdserve.worker.grammar import GrammarPool
    from pdserve.worker.logit_rules import Hindered
    from pdserve.worker.logprobs import Alternatives

PATIENCE_S: Final = 0.002
"""How long a step waits for what grammars allow, all rows together. Masks that were begun behind
the step before are there by then, but for the slowest."""
_GREEDY_BELOW = 1e-5
_WHOLE = 1 << FRACTION_BITS
_REFERENCE = SamplingOps()
_SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per row.

    Attributes:
        token_ids: `[M]` int64.
        logprobs: By index into the rows, for those that asked.
        non_finite: Indices of rows whose logits are NaN or infinite; their other results are
            meaningless.
        hindered: By index, rows that have no token, and why.
    """

    token_ids: NDArray[np.int64]
    logprobs: dict[int, TokenLogprobs]
    non_finite: list[int] = field(default_factory=list)
    hindered: dict[int, Hindered] = field(default_factory=dict)


class Sampler:
    """Sampling parameters as columns over the rows of a batch, and the sampling itself.

    Args:
        num_rows: Rows of the batch.
        grammars: Computes the tokens that grammars allow; None where no request has one.
        ops: Operations of the device; without any, the reference's.
    """

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        grammars: GrammarPool | None = None,
        ops: SamplingOps = _REFERENCE,
    ) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._device = device
        self._grammars = grammars
        self._temperature = np.zeros(num_rows, dtype=np.float32)
        self._top_k = np.zeros(num_rows, dtype=np.int64)
        self._top_p = np.ones(num_rows, dtype=np.float64)
        self._min_p = np.zeros(num_rows, dtype=np.float32)
        self._seed = np.zeros(num_rows, dtype=np.uint64)
        self._random: set[int] = set()
        self._rules: dict[int, LogitRules] = {}
        self._alternatives: dict[int, Alternatives] = {}

    def add(
        self, row: int, params: SamplingParams, prompt: Sequence[int], outputs: Sequence[int]
    ) -> None:
        """Give `row` to a request, with the tokens that it already has."""
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k if 0 < params.top_k < self._vocab_size else 0
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seed[row] = params.seed & _SEED_MASK
        if is_random(params):
            self._random.add(row)
        if LogitRules.needed(params):
            self._add_rules(row, params, prompt, outputs)
        if params.logprobs is not None:
            self._alternatives[row] = params.logprob_token_ids or params.logprobs

    def _add_rules(
        self, row: int, params: SamplingParams, prompt: Sequence[int], outputs: Sequence[int]
    ) -> None:
        self._rules[row] = LogitRules(
            params,
            prompt,
            outputs,
            vocab_size=self._vocab_size,
            device=self._device,
            grammars=self._grammars,
        )

    def remove(self, row: int) -> None:
        """Free `row`: its request is gone."""
        self._random.discard(row)
        self._rules.pop(row, None)
        self._alternatives.pop(row, None)

    def forced(self, row: int) -> list[int]:
        """Return the tokens that the grammar of `row` forces, if it has one."""
        rules = self._rules.get(row)
        return [] if rules is None else rules.forced()

    def are_largest(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which rows simply take the largest logit and ask for nothing else.

        Args:
            rows: `[M]`.
        """
        others = self._random | self._rules.keys() | self._alternatives.keys()
        return np.fromiter((row not in others for row in rows.tolist()), np.bool_, len(rows))

    def sample(
        self, logits: Tensor, rows: NDArray[np.int64], num_outputs: NDArray[np.int64]
    ) -> Sampled:
        """Choose a token for each row.

        Args:
            logits: `[M, vocab_size]` fp32; owned by the sampler from here on.
            rows: `[M]`, the batch row of each row of logits.
            num_outputs: `[M]`, number of tokens each request has already put out.
        """
        chosen, peaks = _argmax(logits)
        is_finite = np.isfinite(peaks)
        if not is_finite.all():
            # Nothing can be drawn from them, and nothing may go wrong for the others.
            logits[torch.from_numpy(~is_finite).to(logits.device)] = 0.0
        if not (self._random or self._rules or self._alternatives):
            return Sampled(chosen, {}, np.flatnonzero(~is_finite).tolist())

        at = rows.tolist()
        ruled = [i for i, row in enumerate(at) if row in self._rules]
        reported = [i for i, row in enumerate(at) if row in self._alternatives]
        random = [i for i, row in enumerate(at) if row in self._random]
        unmodified: Tensor | None = None
        if reported:  # rules alone change logits
            unmodified = logits[reported] if ruled or len(reported) < len(at) else logits
        hindered = self._apply_rules(at, ruled, logits)
        if ruled:
            owned = logits if len(ruled) == len(at) else logits[ruled]
            chosen[ruled], peaks[ruled] = _argmax(owned)
            is_finite[ruled] &= np.isfinite(peaks[ruled])
        if random:
            chosen = self._draw(logits, chosen, peaks, (random, rows[random], num_outputs[random]))
            is_finite &= chosen != NOT_FINITE
            chosen[~is_finite] = 0
        noting = {i: self._rules[at[i]] for i in ruled}
        non_finite = note_tokens(noting, chosen, np.flatnonzero(~is_finite), hindered)
        if unmodified is None:
            return Sampled(chosen, {}, non_finite, hindered)
        described = token_logprobs(
            self._ops,
            unmodified,
            torch.from_numpy(chosen[reported]).to(self._device),
            [self._alternatives[at[i]] for i in reported],
        )
        logprobs = dict(zip(reported, described, strict=True))
        return Sampled(chosen, logprobs, non_finite, hindered)

    def guess(
        self,
        logits: Tensor,
        rows: NDArray[np.int64],
        num_outputs: NDArray[np.int64],
        *,
        draws: bool,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Choose tokens for drafts, without rules.

        Args:
            logits: `[M, N]` fp32, of a drafter. N may be less than `vocab_size`.
            rows: `[M]`, the batch rows whose parameters apply.
            num_outputs: `[M]`, the index of each token among its request's outputs.
            draws: Whether any tokens are drawn.

        Returns:
            `[M]` columns of the largest logits, and `[M]` of those that `sample` would choose with
            the same random numbers.
        """
        likeliest, peaks = _argmax(logits)
        random = [i for i, row in enumerate(rows.tolist()) if draws and row in self._random]
        if not random:
            return likeliest, likeliest
        those = random, rows[random], num_outputs[random]
        drawn = self._draw(logits, likeliest.copy(), peaks, those)
        return likeliest, np.where(drawn == NOT_FINITE, likeliest, drawn)

    def _apply_rules(self, at: list[int], ruled: list[int], logits: Tensor) -> dict[int, Hindered]:
        """Apply the rules of the rows that have some; return those that have no token."""
        if not ruled:
            return {}
        until_s = time.monotonic() + PATIENCE_S
        said = ((i, self._rules[at[i]].apply(logits[i], until_s)) for i in ruled)
        return {i: hindered for i, hindered in said if hindered is not None}

    def _draw(
        self,
        logits: Tensor,
        chosen: NDArray[np.int64],
        peaks: NDArray[np.float32],
        draws: tuple[list[int], NDArray[np.int64], NDArray[np.int64]],
    ) -> NDArray[np.int64]:
        """Draw the tokens of some rows of logits.

        Args:
            logits: `[M, N]`.
            chosen: `[M]`, the tokens of the others.
            peaks: `[M]`, the largest logits.
            draws: The rows of logits, the batch rows whose parameters apply, and the index of each
                output token.

        Returns:
            `[M]`, `NOT_FINITE` where none could be drawn.
        """
        drawn, rows, num_outputs = draws
        columns = self._columns(drawn, rows, num_outputs, logits.shape[-1])
        tokens = self._uploaded(chosen)
        by_k, by_p = bool(self._top_k[rows].any()), bool((self._top_p[rows] < 1.0).any())
        given = Draws(*map(self._uploaded, columns))
        self._ops.draw(logits, self._uploaded(peaks), given, tokens, by_k=by_k, by_p=by_p)
        found: NDArray[np.int64] = tokens.cpu().numpy()
        return found

    def _columns(
        self, drawn: list[int], rows: NDArray[np.int64], num_outputs: NDArray[np.int64], size: int
    ) -> tuple[NDArray[Any], ...]:
        """Return the fields of `Draws`.

        Args:
            drawn: `N` rows of logits.
            rows: `[N]`, the batch row of each.
            num_outputs: `[N]`, the index of each token.
            size: Number of logits of a row.
        """
        return (
            np.array(drawn, dtype=np.int32),
            (math.log2(math.e) / self._temperature[rows].astype(float)).astype(np.float32),
            self._min_p[rows],
            np.minimum(self._top_k[rows], size).astype(np.int32),
            np.ceil(self._top_p[rows] * _WHOLE).astype(np.int64),
            self._uniforms(rows, num_outputs),
        )

    def _uniforms(
        self, rows: NDArray[np.int64], num_outputs: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """`[N]`, the number of each row's token, in `2**-53`."""
        return (uniforms(self._seed[rows], num_outputs) * _WHOLE).astype(np.int64)

    def _uploaded(self, column: NDArray[Any]) -> Tensor:
        return torch.from_numpy(column).to(self._device)


def note_tokens(
    noting: Mapping[int, LogitRules],
    chosen: NDArray[np.int64],
    non_finite: NDArray[np.int64],
    hindered: Mapping[int, Hindered],
) -> list[int]:
    """Note the tokens of rows with rules; return which of all rows are not finite.

    Args:
        noting: By index into the rows, the rules of each that has some.
    """
    lost = set(non_finite.tolist())
    for i, rules in noting.items():
        if i not in hindered and i not in lost:
            rules.note(int(chosen[i]))
    return [i for i in non_finite.tolist() if i not in hindered]


def is_random(params: SamplingParams) -> bool:
    """Whether a request's tokens are drawn."""
    return params.temperature >= _GREEDY_BELOW


def needs_whole_row(params: SamplingParams) -> bool:
    """Whether a request's token or report needs more than the largest logit."""
    return is_random(params) or params.logprobs is not None or LogitRules.needed(params)


def first_largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index of each row's maximum, and its value; NaN exceeds any number.

    Args:
        logits: `[M, N]` fp32, N above 0.

    Returns:
        `[M]` int64 and `[M]` fp32, where the logits are.
    """
    if logits.device.type == "cpu":
        chosen, peaks = _argmax(logits)
        return torch.from_numpy(chosen), torch.from_numpy(peaks)
    best = logits.argmax(-1)
    return best, logits.gather(-1, best[:, None]).squeeze(-1)


def _argmax(logits: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """`first_largest`, on the host."""
    if logits.device.type == "cpu":
        # numpy's is vectorised: 10 times quicker than torch's at 49 k logits.
        array = logits.numpy()
        chosen = array.argmax(-1)
        return chosen, array[np.arange(len(chosen)), chosen]
    best, peaks = first_largest(logits)
    return best.cpu().numpy(), peaks.cpu().numpy()
