"""The interface of drafters: they see a request's tokens and guess those that follow.

A guess is never trusted: what a request puts out is the same for every drafter, and without one.
So engines need not agree on a drafter, and nothing of one crosses between them. The ranks of one
engine run the same drafts in a step: those of a TP group make the same ones, because they are told
the same and do the same.

Order of the calls. A step that samples, and the one that verifies what is drafted behind it:

    execute(step n): add(new rows), remove(rows of gone requests)
                     the model runs; tokens are sampled
    behind the answer, or at the latest before the next step begins:
                     note(row, tokens) for each row that sampled
                     observe(states of step n), for a `StateDrafter`; of steps that sample nothing
                     too, as those of a prompt's first chunks
    execute(step n+1): add, remove
                     propose(rows that have room in this step, and how much)

The stages of a pipeline are told the tokens with the next step of a request, between its `add` and
`propose`: what is done in `observe` takes them from the states, which have them, too.

A request begins with `add` and ends with `remove`, whatever ends it. One that is preempted is
removed, and added again with the tokens that it has by then; `num_computed_tokens` of what is added
says from which position on this engine computes (those before came from a prefix, or from another
engine, and nobody here has seen their states). After `remove` its row may be another request's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from pdserve.kernels.step import StepInputs
    from pdserve.wire.step import NewRequest
    from pdserve.worker.step import PreparedStep


class Drafter(Protocol):
    """Drafts for the rows of a batch, of the tokens alone."""

    def add(self, row: int, request: NewRequest) -> None:
        """Give `row` to a request, with the tokens it has already."""
        ...

    def remove(self, row: int) -> None:
        """Free `row`: its request is gone."""
        ...

    def note(self, row: int, token_ids: Sequence[int]) -> None:
        """Note tokens that the request of `row` has put out."""
        ...

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        """Return what may follow the tokens of some rows.

        Anything may be proposed: what is too long, no token, or would end the request is cut off.

        Args:
            wanted: By row, how many tokens of a draft there is a use for. There may be none: then a
                drafter that has to make up for something goes on with that.

        Returns:
            By row; rows without a guess are left out, or empty.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepStates:
    """What a step has computed: T tokens of R requests.

    Of prompts that is any chunk, of others the last token and a draft.

    Tensors are on the model's device, equal to the last bit on all ranks of the TP group. Those of
    `inputs` are overwritten by the next step's, the others are nobody else's.

    Attributes:
        rows: `[R]`, the requests' rows.
        start: `[R]`, position of each one's first token here; the others follow it.
        query_start: `[R + 1]`, where in T its tokens are.
        num_valid: `[R]`, how many of its tokens stand, from the first one on. Those behind them
            are of a draft that was wrong: their KV and states are void, and the next step
            computes their positions again.
        sampled: `R`, what each put out: what follows its last valid token is the last of these,
            and what follows the valid ones before that are those before. Empty if its tokens do
            not end here, or a rule left it none: the next step may then have the same token again.
        inputs: What the model read: token ids, positions, and where their KV lies.
        hidden: `[T, hidden_size]`, final states, normed: what the head reads.
        aux: For each of the drafter's `aux_layers` `[T, hidden_size]`, the residual stream before
            that layer, not normed.
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
    """Drafts of what the model computes, too.

    It is on the last pipeline stage alone, on each rank of its TP group, and drafts when the step
    that verifies is there: for the requests that have room in it, and for no others, since a model
    that drafts costs time. The blocks of a request then have room for its draft's tokens.

    Attributes:
        aux_layers: Layers whose input it reads (`StepStates.aux`), rising; the number of layers
            stands for what the final norm reads.
    """

    aux_layers: tuple[int, ...]

    def observe(self, states: StepStates) -> None:
        """See what a step has computed; each step once, in order, right after its tokens."""
        ...


def states_of(
    prepared: PreparedStep, hidden: Tensor, aux: Sequence[Tensor], token_ids: Sequence[list[int]]
) -> StepStates:
    """Return what a step has computed.

    Args:
        hidden, aux: See `StepStates`.
        token_ids: What those put out that sample, in their order.
    """
    num_valid = prepared.query_start[1:] - prepared.query_start[:-1]
    sampled: list[list[int]] = [[] for _ in prepared.request_ids]
    drafts = prepared.drafts or [[]] * len(prepared.sampling)
    for index, tokens, draft in zip(prepared.sampling.tolist(), token_ids, drafts, strict=True):
        sampled[index] = tokens
        num_valid[index] -= len(draft) - max(0, len(tokens) - 1)
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
