"""Steps that are run before there is a request: which ones, and how.

Kernels are compiled when they are first launched, for which no request is to wait; and what memory
steps take of a device has to be known before KV gets the rest of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from pdserve.models.registry import CausalLM
    from pdserve.worker.step_buffers import StepBuffers


def rehearsed_steps(
    max_num_rows: int, max_num_tokens: int, max_model_len: int
) -> list[tuple[int, int]]:
    """Requests and tokens of steps that together launch whatever steps with prompts launch.

    Kernels are compiled for a few ranges of sizes, all of them of a factor of 2 or more. The first
    step is the largest that there can be: those after it find room in the memory that it took.
    """
    largest = (max_num_rows, min(max_num_tokens, max_num_rows * max_model_len))
    doubled = [1 << i for i in range(max(max_num_rows, max_num_tokens).bit_length())]
    alone = [(-(-num // max_model_len), num) for num in [*doubled, max_num_tokens]]
    several = [(num, min(2 * num, max_num_tokens)) for num in [*doubled, max_num_rows]]
    return [
        (num_rows, num_tokens)
        for num_rows, num_tokens in dict.fromkeys([largest, *alone[::-1], *several[::-1]])
        if num_rows <= max_num_rows and num_rows < num_tokens <= max_num_tokens
    ]


def rehearse(
    model: CausalLM,
    kv_layers: list[Tensor],
    buffers: StepBuffers,
    steps: Iterable[tuple[int, int]],
    hidden_size: int | None,
) -> None:
    """Run steps that store nothing. The ranks of a TP group do so together, stages by themselves.

    Args:
        model: This rank's part.
        kv_layers: As of `CausalLM.forward`; at least a block.
        steps: Of `rehearsed_steps`.
        hidden_size: Of what a stage receives, zeros here; None on the first one.
    """
    for num_requests, num_tokens in steps:
        inputs = buffers.rehearse(num_requests, num_tokens)
        received = None
        if hidden_size is not None:
            received = kv_layers[0].new_zeros(model.hidden_rows(num_tokens), hidden_size)
        model.forward(inputs, kv_layers, None, received)
