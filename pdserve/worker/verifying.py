"""Sampling for requests with drafts: all their tokens of one step, exactly those without drafts.

A step has a row of logits behind a request's last token and behind each token of its draft. Row
j says what follows only if the draft is right up to there, so rows are sampled one wave after the
other, each over all requests that have come so far. A token is drawn with its own (seed, index) and
its own rules, and only if it is put out: nothing that a sampler notes ever has to be taken back
(Daliri, Musco, Suresh, arXiv 2408.07978, call such drafts drafter-invariant).

Where a token is the largest logit and nothing else, all rows of a request are looked at together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
import torch

from pdserve.worker.logit_rules import Hindrance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from pdserve.wire.ids import RequestId
    from pdserve.wire.outputs import TokenLogprobs
    from pdserve.wire.sampling import SamplingParams
    from pdserve.wire.step import ModelRunnerOutput
    from pdserve.worker.logit_rules import Hindered
    from pdserve.worker.sampler import Sampled


class RowSampler(Protocol):
    """`Sampler`, or several ranks' together."""

    def add(
        self, row: int, params: SamplingParams, prompt: Sequence[int], outputs: Sequence[int]
    ) -> None:
        """Give `row` to a request, with the tokens it has already."""
        ...

    def remove(self, row: int) -> None:
        """Free `row`."""
        ...

    def forced(self, row: int) -> list[int]:
        """Return the tokens that the grammar of `row` leaves no choice of, if it is known here."""
        ...

    def are_largest(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell which rows' tokens are the largest logit, of which nothing else is asked."""
        ...

    def sample(
        self, logits: Tensor, rows: NDArray[np.int64], num_outputs: NDArray[np.int64]
    ) -> Sampled:
        """Choose a token for each row of logits."""
        ...


@dataclass(frozen=True, slots=True)
class Verified:
    """What requests have sampled in a step.

    Attributes:
        token_ids: Of each request; at least one, if it is not hindered.
        logprobs: By index into the requests, for those that asked: one entry per token.
        non_finite: Indices of requests of whose first row a logit is NaN or infinite. Of a row
            behind a draft that only ends what is known of the draft: the next step has it first.
        hindered: By index, requests that have no token, and why.
    """

    token_ids: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    non_finite: set[int] = field(default_factory=set)
    hindered: dict[int, Hindered] = field(default_factory=dict)


def single(sampled: Sampled) -> Verified:
    """Return one token of each request."""
    verified = Verified(
        sampled.token_ids[:, None].tolist(),
        {index: [entry] for index, entry in sampled.logprobs.items()},
        set(sampled.non_finite),
        sampled.hindered,
    )
    for index in sampled.hindered:
        verified.token_ids[index] = []
    return verified


def without_hindered(
    output: ModelRunnerOutput, hindered: Mapping[int, Hindered]
) -> ModelRunnerOutput:
    """Return a step's results with requests that have no token named for that.

    Args:
        hindered: By index into the output's requests.
    """
    if not hindered:
        return output
    ids = output.request_ids
    having = [index for index in range(len(ids)) if index not in hindered]

    def named(by: Hindrance) -> list[RequestId]:
        return [ids[index] for index, each in hindered.items() if each.by is by]

    why = {ids[index]: each.why for index, each in hindered.items()}
    return msgspec.structs.replace(
        output,
        request_ids=[ids[index] for index in having],
        sampled_token_ids=[output.sampled_token_ids[index] for index in having],
        unready_ids=named(Hindrance.UNREADY),
        dead_ends={each: why[each] for each in named(Hindrance.DEAD_END)},
        rejected_ids=named(Hindrance.REJECTED),
    )


def verify(
    sampler: RowSampler,
    logits: Tensor,
    rows: NDArray[np.int64],
    num_outputs: NDArray[np.int64],
    drafts: Sequence[Sequence[int]],
) -> Verified:
    """Sample M requests, each as far as its draft is right, and one token beyond.

    Args:
        logits: `[L, vocab_size]` fp32: for each request a row, and one for each token of its draft.
        rows: `[M]`, the batch row of each request.
        num_outputs: `[M]`, tokens each has put out before.
        drafts: `M` of them; may be empty.
    """
    lengths = np.fromiter(map(len, drafts), np.int64, len(drafts)) + 1
    first = np.cumsum(lengths) - lengths
    verified = Verified([[] for _ in drafts])
    is_largest = sampler.are_largest(rows)
    largest = np.flatnonzero(is_largest)
    if len(largest):
        num = lengths[largest]
        at = np.repeat(first[largest] - np.cumsum(num) + num, num) + np.arange(num.sum())
        repeated = np.repeat(largest, num)
        sampled = sampler.sample(_rows_of(logits, at), rows[repeated], num_outputs[repeated])
        _take_largest(verified, sampled, largest.tolist(), drafts)
    alive = np.flatnonzero(~is_largest)
    depth = 0
    while len(alive):
        at = first[alive] + depth
        sampled = sampler.sample(_rows_of(logits, at), rows[alive], num_outputs[alive] + depth)
        alive = np.array(_take_wave(verified, sampled, alive.tolist(), drafts, depth), np.int64)
        depth += 1
    return verified


def _rows_of(logits: Tensor, at: NDArray[np.int64]) -> Tensor:
    """Return some rows, for a sampler to own: whoever asks for all needs them no more."""
    if len(at) == len(logits):
        return logits
    return logits[torch.from_numpy(at).to(logits.device)]


def _take_largest(
    verified: Verified, sampled: Sampled, requests: list[int], drafts: Sequence[Sequence[int]]
) -> None:
    """Take the tokens of requests whose rows were all sampled at once."""
    tokens, lost = sampled.token_ids.tolist(), set(sampled.non_finite)
    at = 0
    for index in requests:
        draft, taken = drafts[index], verified.token_ids[index]
        for place, drafted in enumerate((*draft, None), at):
            if place in lost and taken:
                break
            taken.append(tokens[place])
            if place in lost:
                verified.non_finite.add(index)
            if tokens[place] != drafted or place in lost:
                break
        at += len(draft) + 1


def _take_wave(
    verified: Verified,
    sampled: Sampled,
    requests: list[int],
    drafts: Sequence[Sequence[int]],
    depth: int,
) -> list[int]:
    """Take a token of each request; return those whose next row counts."""
    without = set(sampled.hindered)
    if depth == 0:
        verified.non_finite.update(requests[place] for place in sampled.non_finite)
        verified.hindered.update({requests[at]: why for at, why in sampled.hindered.items()})
    else:
        without.update(sampled.non_finite)
    for place, entry in sampled.logprobs.items():
        if place not in without:
            verified.logprobs.setdefault(requests[place], []).append(entry)
    going_on = []
    for place, token_id in enumerate(sampled.token_ids.tolist()):
        if place in without:
            continue  # further in, it only ends what is known of the draft
        index = requests[place]
        verified.token_ids[index].append(token_id)
        draft = drafts[index]
        is_right = depth < len(draft) and draft[depth] == token_id
        if is_right and index not in verified.non_finite:
            going_on.append(index)
    return going_on
