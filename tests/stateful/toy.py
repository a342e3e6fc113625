"""A worker whose KV is a proof: any stale, misplaced or missing block changes the output.

The KV of position p, layer l is a hash of (every token up to p, l). Before a token is
computed, all earlier positions of its request are read through the block table and
compared; the next token is a function of the last one's KV. So a wrong block can never
give a right token, whatever the tokens are.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec
import torch

from pdserve.connectors.base import KVLayout
from pdserve.wire.sampling import SamplingParams
from pdserve.wire.step import ModelRunnerOutput, NewRequest, SchedulerOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.connectors.base import KVConnectorWorker
    from pdserve.wire.ids import RequestId
    from pdserve.wire.transfer import KVShape

NUM_LAYERS = 2
VOCAB = 7
EOS = 6


def chain(parent: int, token_id: int) -> int:
    """KV of a position from the KV of the one before it."""
    digest = hashlib.blake2b(f"{parent}/{token_id}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def next_token(kv: int, seed: int) -> int:
    """What the toy model samples after a position with this KV."""
    return chain(kv, -1 - seed) % VOCAB


def expected_output(prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    """The one right answer."""
    kv = 0
    for token_id in prompt:
        kv = chain(kv, token_id)
    output: list[int] = []
    while len(output) < sampling.max_tokens:
        token_id = next_token(kv, sampling.seed)
        output.append(token_id)
        if not sampling.ignore_eos and token_id in sampling.eos_token_ids:
            break
        kv = chain(kv, token_id)
    return output


def toy_layout(num_blocks: int, block_size: int) -> KVLayout:
    """Layout of the toy's KV: one 8-byte value per position, layer and K/V."""
    return KVLayout(
        num_blocks=num_blocks,
        num_layers=NUM_LAYERS,
        num_kv_heads=1,
        block_size=block_size,
        head_dim=1,
        dtype="int64",
        dtype_bytes=8,
    )


def toy_shape(num_blocks: int, block_size: int, num_ranks: int = 1) -> KVShape:
    """How a toy engine's KV lies on its ranks: each writes `NUM_LAYERS` layers of its own."""
    return msgspec.structs.replace(
        toy_layout(num_blocks, block_size).shape_of_one_rank(),
        num_layers=NUM_LAYERS * num_ranks,
        stages=tuple((NUM_LAYERS * rank, NUM_LAYERS * (rank + 1)) for rank in range(num_ranks)),
    )


class ToyWorker:
    """Executes steps in memory, with a connector's worker half beside it.

    Args:
        connector: Registers the KV; what it moves, and when, is up to whoever made it.
        rank: Workers of other ranks write other KV.
        num_stages: With several, it knows of its own tokens only what steps tell it, as the
            stages do that do not sample.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        connector: KVConnectorWorker | None = None,
        *,
        rank: int = 0,
        num_stages: int = 1,
    ) -> None:
        self._first_layer = rank * NUM_LAYERS
        self._is_told = num_stages > 1
        self.layout = toy_layout(num_blocks, block_size)
        self.block_size = block_size
        self.kv = torch.full((num_blocks, NUM_LAYERS, 2, 1, block_size, 1), -1, dtype=torch.int64)
        self._array = self.kv.numpy()
        self._requests: dict[RequestId, tuple[list[int], list[int], SamplingParams]] = {}
        if connector is not None:
            connector.register_kv_caches(self.kv, self.layout)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step, checking every KV value it depends on."""
        for request_id in step.gone_request_ids:
            del self._requests[request_id]
        computed = dict(
            zip(
                step.known_requests.request_ids,
                step.known_requests.num_computed_tokens,
                strict=True,
            )
        )
        for request_id, blocks in zip(
            step.known_requests.request_ids, step.known_requests.new_block_ids, strict=True
        ):
            self._requests[request_id][1].extend(blocks)
        for request_id, token_ids in self._told(step):
            self._requests[request_id][0].extend(token_ids)
        for request in step.new_requests:
            self._introduce(request)
            computed[request.request_id] = request.num_computed_tokens
        ids: list[RequestId] = []
        sampled: list[int] = []
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            tokens, blocks, sampling = self._requests[request_id]
            end = computed[request_id] + num_tokens
            assert end <= len(tokens), "a step needs tokens that nobody told this worker"
            kv = self._compute(tokens, blocks, computed[request_id], end)
            if end == len(tokens):
                token_id = next_token(kv, sampling.seed)
                if not self._is_told:
                    tokens.append(token_id)
                ids.append(request_id)
                sampled.append(token_id)
        return ModelRunnerOutput(
            step_id=step.step_id,
            request_ids=ids,
            sampled_token_ids=sampled,
        )

    def _told(self, step: SchedulerOutput) -> list[tuple[RequestId, list[int]]]:
        known = step.known_requests
        if not self._is_told:
            assert not known.sampled_token_ids, "told what it knows"
            return []
        return list(zip(known.request_ids, known.sampled_token_ids, strict=True))

    def _introduce(self, request: NewRequest) -> None:
        assert request.request_id not in self._requests
        self._requests[request.request_id] = (
            [*request.prompt_token_ids, *request.output_token_ids],
            list(request.block_ids),
            request.sampling,
        )

    def _compute(self, tokens: list[int], blocks: list[int], start: int, end: int) -> int:
        kv = 0
        assert len(blocks) * self.block_size >= end, "a step without blocks for its tokens"
        for position in range(end):
            kv = chain(kv, tokens[position])
            block, offset = blocks[position // self.block_size], position % self.block_size
            for layer in range(NUM_LAYERS):
                slot = self._array[block, layer, :, 0, offset, 0]
                value = kv + self._first_layer + layer
                if position >= start:
                    slot[:] = value
                else:
                    found = [int(each) for each in slot]
                    assert found == [value] * 2, (
                        f"position {position} of {end}, block {block}, layer {layer}: "
                        f"found {found}, expected {value}"
                    )
        return kv


def sampling(max_tokens: int, *, seed: int = 0, ignore_eos: bool = False) -> SamplingParams:
    """Toy sampling parameters."""
    return SamplingParams(
        max_tokens=max_tokens, seed=seed, eos_token_ids=(EOS,), ignore_eos=ignore_eos
    )
