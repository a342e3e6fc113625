"""The interface of drafters: they see a request's tokens and guess those that follow.

A guess is never trusted: a request's output is the same for every drafter, and without one.
So engines need not agree on a drafter, and no drafter state crosses between them. The ranks of one
engine run the same drafts in a step: those of a TP group make the same ones, because they get the
same inputs and do the same.

Order of the calls, for a step that samples and the one that verifies the draft made after it:

    execute(step n): add(new rows), remove(rows of gone requests)
                     the model runs; tokens are sampled
    behind the answer, or at the latest before the next step begins:
                     note(row, tokens) for each row that sampled
                     observe(states of step n), for a `StateDrafter`; of steps that sample nothing
                     too, as those of a prompt's first chunks
    execute(step n+1): add, remove
                     propose(rows that have room in this step, and how much)

The stages of a pipeline learn the tokens with the next step of a request, between its `add` and
`propose`; `observe` takes them from the states, which include them.

A request begins with `add` and ends with `remove`, whatever ends it. A preempted request is
removed, and added again with the tokens that it has by then; its `num_computed_tokens` is the first
position that this engine computes (earlier ones came from a prefix, or from another engine, and
their states were never seen here). After `remove` its row may be another request's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from pdserve.kernels.step import StepInputs
    from pdserve.parallel.group import Group
    from pdserve.wire.step import NewRequest
    from pdserve.worker.step import PreparedStep

Key = TypeVar("Key")


class Drafter(Protocol):
    """Drafts for the rows of a batch, from their tokens alone."""

    def add(self, row: int, request: NewRequest) -> None:
        """Give `row` to a request, with the tokens that it already has."""
        ...

    def remove(self, row: int) -> None:
        """Free `row`: its request is gone."""
        ...

    def note(self, row: int, token_ids: Sequence[int]) -> None:
        """Note tokens that the request of `row` has put out."""
        ...

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        """Return guesses at the tokens that follow those of some rows.

        Anything may be proposed: the caller cuts off excess or invalid tokens, and tokens that
        would end the request.

        Args:
            wanted: Maximum draft length by row. It may be empty: then a drafter with work to
                catch up on continues with that.

        Returns:
            Drafts by row; rows without a guess are left out, or empty.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepStates:
    """Results of a step: T tokens of R requests.

    For prompts these are any chunk, for other requests the last token and a draft.

    Tensors are on the model's device, bit-identical on all ranks of the TP group. Those of
    `inputs` are overwritten by the next step's; the others belong to the receiver.

    Attributes:
        rows: `[R]`, the requests' rows.
        start: `[R]`, position of each one's first token here; the others follow it.
        query_start: `[R + 1]`, where in T its tokens are.
        num_valid: `[R]`, number of its valid tokens, counted from the first. Tokens after them
            are of a draft that was wrong, or the last ones of a request that got no token: their
            KV and states are void, and the next step computes their positions again.
        sampled: `R`, tokens each put out: the last one follows its last valid token, and the
            earlier ones follow the valid tokens before that. Empty if its tokens do not end
            here, or it got none.
        inputs: Inputs of the model: token ids, positions, and the places of their KV.
        hidden: `[T, hidden_size]`, final states after the norm: the input of the head.
        aux: For each of the drafter's `aux_layers`, `[T, hidden_size]`: the residual stream
            before that layer, not normed.
    """

    rows: NDArray[np.int64]
    start: NDArray[np.int64]
    query_start: NDArray[np.int64]
    num_valid: NDArray[np.int64]
    sampled: list[list[int]]
    inputs: StepInputs
    hidden: Tensor
    aux: tuple[Tensor, ...]


class StateDrafter(Drafter, Protocol):
    """A drafter that also reads the states that the model computes.

    It runs only on the last pipeline stage, on each rank of its TP group, and drafts when the
    verifying step begins: only for requests that have room in it, since a model that drafts costs
    time. The blocks of a request then have room for its draft's tokens.

    Attributes:
        aux_layers: Layers whose input it reads (`StepStates.aux`), rising; the number of layers
            stands for what the final norm reads.
    """

    aux_layers: tuple[int, ...]

    def observe(self, states: StepStates) -> None:
        """Receive the results of a step; each step once, in order, right after its tokens."""
        ...


def states_of(
    prepared: PreparedStep, hidden: Tensor, aux: Sequence[Tensor], token_ids: Sequence[list[int]]
) -> StepStates:
    """Return the results of a step.

    Args:
        hidden, aux: See `StepStates`.
        token_ids: Output tokens of the requests that sample, in their order.
    """
    num_valid = prepared.query_start[1:] - prepared.query_start[:-1]
    sampled: list[list[int]] = [[] for _ in prepared.request_ids]
    drafts = prepared.drafts or [[]] * len(prepared.sampling)
    for index, tokens, draft in zip(prepared.sampling.tolist(), token_ids, drafts, strict=True):
        sampled[index] = tokens
        num_valid[index] -= len(draft) - (len(tokens) - 1)
    return StepStates(
        rows=prepared.rows,
        start=prepared.start,
        query_start=prepared.query_start,
        num_valid=num_valid,
        sampled=sampled,
        inputs=prepared.inputs,
        hidden=hidden,
        aux=tuple(aux),
    )


def lists_from(
    group: Group, source: int, lengths: Mapping[Key, int], lists: Mapping[Key, list[int]]
) -> dict[Key, list[int]]:
    """Return one rank's lists of integers on all ranks of a group, without the empty ones.

    Args:
        source: The rank that sends.
        lengths: Maximum length of each; the same on all.
        lists: The lists to send; ignored on other ranks.
    """
    if group.size > 1 and lengths:
        width = 1 + max(lengths.values())
        mine: list[int] = []
        for key in lengths:
            each = lists.get(key, [])
            mine += [len(each), *each, *[0] * (width - 1 - len(each))]
        sent = group.gather_ints(mine)[source]
        lines = [sent[start : start + width] for start in range(0, len(sent), width)]
        lists = {key: line[1 : 1 + line[0]] for key, line in zip(lengths, lines, strict=True)}
    return {key: lists[key] for key in lengths if lists.get(key)}
