"""Samples for requests with drafts: exactly the tokens they would get without.

A step has a row of logits behind a request's last token and behind each token of its draft. Row j
is valid only if the draft is right up to there, so rows are sampled in waves, each over all
requests that have come so far. A token is drawn with its own (seed, index) and its own rules, and
only if it is put out: a sampler never has to undo what it noted
(Daliri, Musco, Suresh, arXiv 2408.07978, call such drafts drafter-invariant).

Independent rows are sampled together, however far the draft turns out to be right: where a token
is simply the largest logit, and on a device, where an extra row costs next to nothing but another
wave costs a wait.

Attention gives what a row may not see a weight of 0, and 0 times NaN is NaN: a token of a draft
that makes values NaN or infinite spoils the rows before it as well. So where a request's first row
is not finite, its draft may be at fault, and the row is computed again without one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import numpy as np
import torch

from pdserve.worker.logit_rules import Hindered, Hindrance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from pdserve.wire.ids import RequestId
    from pdserve.wire.sampling import SamplingParams, TokenLogprobs
    from pdserve.wire.step import ModelRunnerOutput
    from pdserve.worker.sampler import Sampled

_SPOILED: Final = Hindered(Hindrance.SPOILED)


class RowSampler(Protocol):
    """`Sampler`, or several ranks' together."""

    def add(
        self, row: int, params: SamplingParams, prompt: Sequence[int], outputs: Sequence[int]
    ) -> None:
        """Give `row` to a request, with the tokens that it already has."""
        ...

    def remove(self, row: int) -> None:
        """Free `row`."""
        ...

    def forced(self, row: int) -> list[int]:
        """Return the tokens that the grammar of `row` forces, if it is known here."""
        ...

    def are_largest(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which rows simply take the largest logit and ask for nothing else."""
        ...

    def sample(
        self, logits: Tensor, rows: NDArray[np.int64], num_outputs: NDArray[np.int64]
    ) -> Sampled:
        """Choose a token for each row of logits."""
        ...

    def guess(
        self,
        logits: Tensor,
        rows: NDArray[np.int64],
        num_outputs: NDArray[np.int64],
        *,
        draws: bool,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Choose tokens for each row of a drafter's logits."""
        ...


@dataclass(frozen=True, slots=True)
class Verified:
    """Tokens that requests have sampled in a step.

    Attributes:
        token_ids: Tokens of each request; at least one, unless it is hindered.
        logprobs: By index into the requests, for those that asked: one entry per token.
        non_finite: Indices of requests without a draft whose row has a NaN or infinite logit. In a
            row behind a draft, that only ends the verification: it is first in the next step.
        hindered: By index, requests that have no token, and why.
    """

    token_ids: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    non_finite: set[int] = field(default_factory=set)
    hindered: dict[int, Hindered] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """Rows of logits that M requests sample from in a step.

    Attributes:
        rows: `[M]`, the batch row of each.
        num_outputs: `[M]`, number of tokens each has already put out.
        drafts: `M` drafts; some may be empty.
        lengths, first: `[M]`, number and first of each one's rows of logits: one row, and one
            for each token of its draft.
    """

    rows: NDArray[np.int64]
    num_outputs: NDArray[np.int64]
    drafts: Sequence[Sequence[int]]
    lengths: NDArray[np.int64] = field(init=False)
    first: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        """Count the rows."""
        lengths = np.fromiter(map(len, self.drafts), np.int64, len(self.drafts)) + 1
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "first", np.cumsum(lengths) - lengths)

    def depth(self) -> NDArray[np.int64]:
        """Return for each row of logits how many tokens of a draft it follows."""
        return np.arange(self.lengths.sum()) - np.repeat(self.first, self.lengths)

    def following(self) -> NDArray[np.int64]:
        """Return for each row of logits the token of a draft that it follows, -1 where none."""
        flat = itertools.chain.from_iterable((-1, *draft) for draft in self.drafts)
        return np.fromiter(flat, np.int64, int(self.lengths.sum()))

    def nothing(self) -> Verified:
        """Return a result with no token for any of them."""
        return Verified([[] for _ in self.drafts])


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


def told_of(
    output: ModelRunnerOutput,
    request_ids: list[RequestId],
    verified: Verified,
    drafts: Sequence[Sequence[int]] | None,
) -> ModelRunnerOutput:
    """Return the output of a step, with the tokens that its requests have sampled.

    Args:
        request_ids: Requests that sample; hindered ones are reported as such instead.
        drafts: Their drafts, if there are any.
    """
    lost = {*output.non_finite_ids, *(request_ids[i] for i in verified.non_finite)}
    drafted = zip(request_ids, drafts or [], strict=False)
    sampled = msgspec.structs.replace(
        output,
        request_ids=request_ids,
        sampled_token_ids=verified.token_ids,
        num_drafted={request_id: len(draft) for request_id, draft in drafted if draft},
        non_finite_ids=sorted(lost),
        logprobs={request_ids[i]: entries for i, entries in verified.logprobs.items()},
    )
    return _without(sampled, verified.hindered) if verified.hindered else sampled


def _without(output: ModelRunnerOutput, hindered: Mapping[int, Hindered]) -> ModelRunnerOutput:
    """Return a step's results with the requests that have no token reported as such.

    Args:
        hindered: Reasons by index into the output's requests.
    """
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
        spoiled_ids=named(Hindrance.SPOILED),
        dead_ends={each: why[each] for each in named(Hindrance.DEAD_END)},
        rejected_ids=named(Hindrance.REJECTED),
    )


def verify(sampler: RowSampler, logits: Tensor, asked: DraftedRows) -> Verified:
    """Sample M requests, each as far as its draft is right, and one token beyond.

    Args:
        logits: `[L, vocab_size]` fp32: for each request a row, and one for each token of its draft.
    """
    verified = asked.nothing()
    is_largest = sampler.are_largest(asked.rows)
    largest = np.flatnonzero(is_largest)
    if len(largest):
        num = asked.lengths[largest]
        places = np.cumsum(num) - num
        at = np.repeat(asked.first[largest] - places, num) + np.arange(num.sum())
        repeated = np.repeat(largest, num)
        sampled = sampler.sample(
            _rows_of(logits, at), asked.rows[repeated], asked.num_outputs[repeated]
        )
        take_at_once(verified, sampled, largest, places, asked.drafts)
    verify_in_waves(verified, sampler, logits, asked, np.flatnonzero(~is_largest))
    return verified


def verify_in_waves(
    verified: Verified,
    sampler: RowSampler,
    logits: Tensor,
    asked: DraftedRows,
    requests: NDArray[np.int64],
) -> None:
    """Sample some of the requests, each row only once the one before it is known to be right.

    Args:
        verified: Receives their tokens.
        logits: Logits of all requests.
        requests: Indices of the requests to sample.
    """
    alive, depth = requests, 0
    while len(alive):
        sampled = sampler.sample(
            _rows_of(logits, asked.first[alive] + depth),
            asked.rows[alive],
            asked.num_outputs[alive] + depth,
        )
        going_on = _take_wave(verified, sampled, alive.tolist(), asked.drafts, depth)
        alive, depth = np.array(going_on, np.int64), depth + 1


def _rows_of(logits: Tensor, at: NDArray[np.int64]) -> Tensor:
    """Return some rows, for a sampler to own; a caller that asks for all no longer needs them."""
    if len(at) == len(logits):
        return logits
    return logits[torch.from_numpy(at).to(logits.device)]


def take_at_once(
    verified: Verified,
    sampled: Sampled,
    requests: NDArray[np.int64],
    places: NDArray[np.int64],
    drafts: Sequence[Sequence[int]],
) -> None:
    """Take the tokens of requests all of whose rows were sampled.

    Args:
        verified: Receives them.
        requests: Indices of the requests.
        places: Each one's first row in `sampled`. Whether a row has a token at all is known only
            for those without a draft.
        drafts: Drafts of all requests.
    """
    tokens, lost = sampled.token_ids.tolist(), set(sampled.non_finite)
    for index, first in zip(requests.tolist(), places.tolist(), strict=True):
        if first in sampled.hindered:
            verified.hindered[index] = sampled.hindered[first]
            continue
        if first in lost and drafts[index]:
            verified.hindered[index] = _SPOILED
            continue
        taken = verified.token_ids[index]
        for place, drafted in enumerate((*drafts[index], None), first):
            if place in lost and taken:
                break
            taken.append(tokens[place])
            if place in sampled.logprobs:
                verified.logprobs.setdefault(index, []).append(sampled.logprobs[place])
            if place in lost:
                verified.non_finite.add(index)
            if tokens[place] != drafted or place in lost:
                break


def _take_wave(
    verified: Verified,
    sampled: Sampled,
    requests: list[int],
    drafts: Sequence[Sequence[int]],
    depth: int,
) -> list[int]:
    """Take a token for each request; return the requests whose next row is valid."""
    without = set(sampled.hindered)
    if depth == 0:
        verified.hindered.update({requests[at]: why for at, why in sampled.hindered.items()})
        for place in sampled.non_finite:
            if drafts[requests[place]]:
                verified.hindered[requests[place]] = _SPOILED
                without.add(place)
            else:
                verified.non_finite.add(requests[place])
    else:
        without.update(sampled.non_finite)
    for place, entry in sampled.logprobs.items():
        if place not in without:
            verified.logprobs.setdefault(requests[place], []).append(entry)
    going_on = []
    for place, token_id in enumerate(sampled.token_ids.tolist()):
        if place in without:
            continue  # behind the first row, it only ends the verification of the draft
        index = requests[place]
        verified.token_ids[index].append(token_id)
        draft = drafts[index]
        is_right = depth < len(draft) and draft[depth] == token_id
        if is_right and index not in verified.non_finite:
            going_on.append(index)
    return going_on
