"""The model of the simulation: its KV is a proof, for engines of any shape.

The KV of a position is a hash of every token up to it; each (layer, plane, head) has its own
offset to that. Before a step computes, everything that its requests depend on is read through
their block tables and compared, on every rank; the next token is a function of the last
position's KV. So a stale, misplaced, missing or wrongly sliced block is noticed by the step that
reads it, and could not give a right token either.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from pdserve.connectors.conformance.values import Share
from pdserve.wire.step import ModelRunnerOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.connectors.base import KVLayout
    from pdserve.wire.ids import RequestId
    from pdserve.wire.sampling import SamplingParams
    from pdserve.wire.step import NewRequest, SchedulerOutput
    from pdserve.wire.transfer import KVShape

NUM_LAYERS = 2
NUM_HEADS = 2
VOCAB = 7
EOS = 6
_LETTERS = "abcdefg"


class WrongKVError(Exception):
    """A step was about to read KV that is not what its tokens make it."""


def chain(parent: int, token_id: int) -> int:
    """What stands for a position, from the one before it; 55 bits."""
    digest = hashlib.blake2b(
        parent.to_bytes(8, "little") + bytes((token_id + 1,)), digest_size=8
    ).digest()
    return int.from_bytes(digest, "little") >> 9


def next_token(value: int, seed: int) -> int:
    """What is sampled after a position."""
    digest = hashlib.blake2b(
        value.to_bytes(8, "little") + seed.to_bytes(8, "little", signed=True), digest_size=2
    ).digest()
    return int.from_bytes(digest, "little") % VOCAB


def expected_output(
    prompt: Sequence[int], *, seed: int, max_tokens: int, ignore_eos: bool
) -> list[int]:
    """The one right answer."""
    value = 0
    for token_id in prompt:
        value = chain(value, token_id)
    output: list[int] = []
    while len(output) < max_tokens:
        token_id = next_token(value, seed)
        output.append(token_id)
        if token_id == EOS and not ignore_eos:
            break
        value = chain(value, token_id)
    return output


def text_of(output: Sequence[int], *, ignore_eos: bool) -> str:
    """What a client sees of it: the end mark has no text unless it is a token like others."""
    return "".join(_LETTERS[token_id] for token_id in output if token_id != EOS or ignore_eos)


class _Request:
    __slots__ = ("blocks", "sampling", "tokens", "values")

    def __init__(self, request: NewRequest) -> None:
        self.tokens = [*request.prompt_token_ids, *request.output_token_ids]
        self.blocks: list[int] = list(request.block_ids)
        self.sampling: SamplingParams = request.sampling
        self.values: list[int] = []

    def value_at(self, end: int) -> list[int]:
        """Values of the first `end` positions."""
        values = self.values
        while len(values) < end:
            values.append(chain(values[-1] if values else 0, self.tokens[len(values)]))
        return values[:end]


class ToyRank:
    """One rank's memory.

    Attributes:
        kv: `[num_blocks, layers, planes, heads, block_size, 1]`, int64.
    """

    def __init__(self, shape: KVShape, rank: int) -> None:
        share = Share(shape, rank)
        self.layout: KVLayout = share.layout("int64")
        layers, heads = list(share.layers), list(share.heads)
        self.kv = torch.full(
            (
                shape.num_blocks,
                len(layers),
                shape.num_planes,
                len(heads),
                shape.block_size,
                1,
            ),
            -1,
            dtype=torch.int64,
        )
        # [blocks, block_size, layers * planes * heads]: a token is a row.
        view = self.kv.numpy()[..., 0].transpose(0, 4, 1, 2, 3)
        self._view = view
        offsets = (
            np.array(layers)[:, None, None] * 1009
            + np.arange(shape.num_planes)[None, :, None] * 101
            + np.array(heads)[None, None, :] * 11
        )
        self._offsets = offsets.astype(np.int64)
        self._block_size = shape.block_size

    def check(self, blocks: Sequence[int], values: np.ndarray) -> str | None:
        """Whether the first positions of a table are as they must be; None if so."""
        size = self._block_size
        num_blocks = -(-len(values) // size)
        found = self._view[blocks[:num_blocks]]
        found = found.reshape(-1, *found.shape[2:])[: len(values)]
        right = found == values[:, None, None, None] + self._offsets
        if right.all():
            return None
        position = int(np.argmin(right.reshape(len(values), -1).all(axis=1)))
        return f"position {position} of {len(values)}, block {blocks[position // size]}"

    def write(self, blocks: Sequence[int], start: int, values: np.ndarray) -> None:
        """Write positions from `start` on."""
        size = self._block_size
        for offset, value in enumerate(values):
            block, slot = divmod(start + offset, size)
            self._view[blocks[block], slot] = value + self._offsets


class ToyWorker:
    """Executes steps on all ranks of an engine."""

    def __init__(self, shape: KVShape) -> None:
        self.ranks = [ToyRank(shape, rank) for rank in range(shape.num_ranks)]
        self._block_size = shape.block_size
        self._requests: dict[RequestId, _Request] = {}

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step.

        Raises:
            WrongKVError: It depends on KV that is not there.
        """
        for request_id in step.gone_request_ids:
            del self._requests[request_id]
        known = step.known_requests
        computed = dict(zip(known.request_ids, known.num_computed_tokens, strict=True))
        for request_id, blocks in zip(known.request_ids, known.new_block_ids, strict=True):
            self._requests[request_id].blocks.extend(blocks)
        for new in step.new_requests:
            assert new.request_id not in self._requests
            self._requests[new.request_id] = _Request(new)
            computed[new.request_id] = new.num_computed_tokens
        ids: list[RequestId] = []
        sampled: list[int] = []
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            request = self._requests[request_id]
            start = computed[request_id]
            end = start + num_tokens
            assert end <= len(request.tokens), "a step needs tokens that this worker has not"
            assert len(request.blocks) * self._block_size >= end, "tokens without blocks"
            values = np.array(request.value_at(end), dtype=np.int64)
            for number, rank in enumerate(self.ranks):
                wrong = rank.check(request.blocks, values[:start]) if start else None
                if wrong is not None:
                    raise WrongKVError(f"request {request_id} on rank {number}: {wrong}")
                rank.write(request.blocks, start, values[start:])
            if end == len(request.tokens):
                token_id = next_token(int(values[-1]), request.sampling.seed)
                request.tokens.append(token_id)
                ids.append(request_id)
                sampled.append(token_id)
        return ModelRunnerOutput(step_id=step.step_id, request_ids=ids, sampled_token_ids=sampled)
