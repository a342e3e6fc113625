"""The executor of tests and of benchmarks of parts: ranks without weights, in the caller's thread.

The KV of a position is a hash of every token up to it, with an offset of its own for each layer,
plane, head and dimension, and the next token is a function of the last position's KV. Before a
step computes, all KV that its requests depend on is read through their block tables and compared,
on every rank. So a stale, misplaced, missing or wrongly sliced block ends the step that reads it,
and can never give a right token.

A grammar allows even tokens only, whatever its text is, and is late now and then, for one step.

A step computes when its result is asked for, as on an asynchronous device: what was planned
meanwhile must not have touched its blocks. Everything around the model is real: connectors' worker
halves over KV memory of any shape, and their quorum.
"""

from __future__ import annotations

import hashlib
from collections import deque
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pdserve.connectors.base import ConnectorContext, KVLayout
from pdserve.connectors.quorum import Quorum
from pdserve.errors import InternalError
from pdserve.wire.sampling import TokenLogprobs
from pdserve.wire.step import ModelRunnerOutput
from pdserve.wire.transfer import ConnectorReport
from pdserve.worker.info import WorkerInfo
from tests.toy_memory import TOY_DTYPE, ToyMemory
from tests.toy_request import ToyRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.config.schema import EngineConfig
    from pdserve.connectors.base import KVConnectorBase, KVConnectorWorker
    from pdserve.wire.ids import EngineId, Incarnation, RequestId
    from pdserve.wire.sampling import SamplingParams
    from pdserve.wire.step import SchedulerOutput
    from pdserve.wire.transfer import ConnectorMetadata, Failed, KVShape

TOY_VOCAB_SIZE = 7
TOY_EOS = 6
TOY_NAN = TOY_VOCAB_SIZE
"""In a draft: what makes the values of its request NaN."""
_SEED_MASK = (1 << 64) - 1


class WrongKVError(InternalError):
    """A step was about to read KV that is not what its tokens make it."""


def chain(parent: int, token_id: int) -> int:
    """Return the value of a position, from that of the one before it (0 for none); 55 bits."""
    said = parent.to_bytes(8, "little") + token_id.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little") >> 9


class ToyModel:
    """What the toy samples.

    Args:
        vocab_size: Tokens are below it.
        first_token_id: Tokens are at or above it (special ids usually come first).
    """

    def __init__(self, vocab_size: int = TOY_VOCAB_SIZE, first_token_id: int = 0) -> None:
        self.vocab_size = vocab_size
        self._first_token_id = first_token_id

    def next_token(self, value: int, request: ToyRequest) -> int:
        """Return what a request samples after a position of this value."""
        return self.sample(value, request.sampling)

    def sample(self, value: int, sampling: SamplingParams) -> int:
        """Return what follows from the value, and from the seed unless the temperature is 0."""
        seed = sampling.seed if sampling.temperature > 0 else 0
        said = value.to_bytes(8, "little") + (seed & _SEED_MASK).to_bytes(8, "little")
        digest = hashlib.blake2b(said, digest_size=4).digest()
        num_choices = self.vocab_size - self._first_token_id
        token_id = self._first_token_id + int.from_bytes(digest, "little") % num_choices
        return token_id if sampling.grammar is None else token_id - token_id % 2

    def vector(self, prompt: Sequence[int]) -> bytes:
        """Return what a prompt is pooled to: how many of its tokens have each rest by 8."""
        return np.bincount(np.asarray(prompt) % 8, minlength=8).astype("<f4").tobytes()

    def logprobs(self, token_id: int, num_top: int, named: Sequence[int] = ()) -> TokenLogprobs:
        """Return log-probabilities that depend on the token alone, which is the likeliest.

        Args:
            named: Tokens to tell of in place of the likeliest ones.
        """
        logprob = -1.0 - (token_id % 8) / 8
        if named:
            told = [(other, logprob - abs(other - token_id)) for other in named]
            return TokenLogprobs(token_id, logprob, 1, told)
        top = [((token_id + rank) % self.vocab_size, logprob - rank) for rank in range(num_top)]
        return TokenLogprobs(token_id, logprob, 1, top)


def expected_output(prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    """Return the one right answer to a prompt."""
    value, model = 0, ToyModel()
    for token_id in prompt:
        value = chain(value, token_id)
    output: list[int] = []
    while len(output) < sampling.max_tokens:
        token_id = model.sample(value, sampling)
        output.append(token_id)
        if not sampling.ignore_eos and token_id in sampling.eos_token_ids:
            break
        value = chain(value, token_id)
    return output


def toy_shape(
    num_blocks: int, block_size: int, *, tp: int = 1, pp: int = 1, num_kv_heads: int = 2
) -> KVShape:
    """Return a shape for the toy's KV: int64, two layers per stage, K and V, one dimension."""
    layout = KVLayout(
        num_blocks=num_blocks,
        num_layers=2 * pp,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=1,
        dtype=TOY_DTYPE,
        dtype_bytes=8,
    )
    stages = tuple((2 * stage, 2 * stage + 2) for stage in range(pp))
    return msgspec.structs.replace(layout.shape_of_one_rank(), tp_size=tp, stages=stages)


class ToyExecutor:
    """See `Executor`. Steps come back when they are asked for, in order.

    Args:
        connector: Makes the worker half of each rank.
        shape: How the KV lies on the ranks; of 8 bytes a value. Independent of `config.parallel`,
            of which only the pipeline stages count: with several, a rank knows of its requests'
            own tokens only what steps tell.
        max_model_len: Tokens of prompt and output together, at most.
        wake: Called from any thread when `poll_report` has news.

    Attributes:
        model: What is sampled; may be set before `start`.
        drafter: Makes a draft of so many tokens, right or wrong, where steps have room for one.
        max_in_flight: May be set at any time.
        in_flight: Steps that have not come back, the oldest first.
        connectors: The worker halves, by rank.
        quorum: Makes one report out of theirs.
    """

    def __init__(
        self,
        config: EngineConfig,
        connector: KVConnectorBase,
        *,
        shape: KVShape,
        engine_id: EngineId,
        incarnation: Incarnation,
        max_model_len: int = 64,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = ToyModel()
        self.drafter: Callable[[ToyRequest, int], list[int]] | None = None
        self.max_in_flight = 2
        self.wake_fds: list[int] = []
        self.in_flight: deque[SchedulerOutput] = deque()
        self._config = config
        self._max_model_len = max_model_len
        self._block_size = shape.block_size
        self._is_told = config.parallel.pipeline_parallel_size > 1
        self._requests: dict[RequestId, ToyRequest] = {}
        self._ranks = [ToyMemory(shape, rank) for rank in range(shape.num_ranks)]
        whole = msgspec.structs.replace(
            self._ranks[0].layout, num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads
        )
        fields = whole.fields(model=config.model.model, weights="toy")
        self._contexts = [
            ConnectorContext(
                config=config,
                engine_id=engine_id,
                incarnation=incarnation,
                layout=rank.layout,
                layout_digest="|".join(f"{name}={value}" for name, value in sorted(fields.items())),
                layout_fields=fields,
                shape=shape,
                rank=number,
            )
            for number, rank in enumerate(self._ranks)
        ]
        self._can_push = connector.capabilities.push
        self.connectors = [connector.make_worker(context, wake) for context in self._contexts]
        self.quorum = Quorum(shape.num_ranks)

    def start(self) -> list[WorkerInfo]:
        """See `Executor`."""
        infos = []
        for context, rank, connector in zip(
            self._contexts, self._ranks, self.connectors, strict=True
        ):
            endpoint = connector.register_kv_caches(rank.kv, rank.layout)
            infos.append(
                WorkerInfo(
                    rank=context.rank,
                    layout=rank.layout,
                    layout_digest=context.layout_digest,
                    layout_fields=context.layout_fields,
                    shape=context.shape,
                    can_push=self._can_push,
                    endpoint=endpoint,
                    max_model_len=self._max_model_len,
                    architecture="toy",
                    dtype=TOY_DTYPE,
                    vocab_size=self.model.vocab_size,
                    eos_token_ids=(TOY_EOS,),
                    device="cpu",
                    num_threads=1,
                )
            )
        return infos

    def submit(self, step: SchedulerOutput) -> None:
        """See `Executor`."""
        self.in_flight.append(step)

    def post(self, metadata: ConnectorMetadata) -> None:
        """See `Executor`."""
        for connector in self.connectors:
            connector.post(metadata)

    def ask_for_slices(self) -> bool:
        """See `Executor`."""
        return False

    def poll_result(self) -> ModelRunnerOutput | None:
        """See `Executor`: the oldest step is computed now.

        Raises:
            WrongKVError: It depends on KV that is not there.
        """
        return self._execute(self.in_flight.popleft()) if self.in_flight else None

    def poll_report(self) -> ConnectorReport | None:
        """See `Executor`."""
        for rank in range(len(self.connectors)):
            report = self.quorum.add(rank, self._said(rank))
            if report:
                return report
        return None

    def write_prompt(self, token_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Write the KV of a prompt, or of its beginning, through a block table, as a peer would."""
        values = _values([], token_ids)
        for rank in self._ranks:
            rank.write(block_ids, 0, values)

    def close(self, timeout_s: float) -> None:
        """See `Executor`."""
        for connector in self.connectors:
            connector.close(timeout_s)

    def _said(self, rank: int) -> ConnectorReport:
        return self.connectors[rank].get_finished()

    # ---- the model ---------------------------------------------------------------------

    def _execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        metadata = step.connector_metadata
        layers = [] if metadata is None else self._begin_kv(metadata)
        if step.num_scheduled_tokens:
            for connector, layer in layers:
                connector.wait_for_layer_load(layer)
        computed = self._take(step)
        ids: list[RequestId] = []
        sampled: list[list[int]] = []
        drafted: dict[RequestId, int] = {}
        unready: list[RequestId] = []
        spoiled: list[RequestId] = []
        rejected: list[RequestId] = []
        logprobs: dict[RequestId, list[TokenLogprobs]] = {}
        prompt_logprobs: dict[RequestId, list[TokenLogprobs]] = {}
        pooled: dict[RequestId, bytes] = {}
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            request, start = self._requests[request_id], computed[request_id]
            if request.sat_out_at == len(request.tokens):
                start = min(start, len(request.tokens) - num_tokens)
            end = start + num_tokens
            draft = self._draft(request, step.num_draft_rows.get(request_id, 0))
            room = len(request.blocks) * self._block_size
            if end > len(request.tokens) or end + len(draft) > room:
                raise InternalError(f"a step for {request_id} without tokens or blocks for it")
            self._compute(request, start, end, draft)
            sampling = request.sampling
            if sampling.prompt_logprobs is not None and start < request.num_prompt:
                told = request.tokens[start + 1 : min(end + 1, request.num_prompt)]
                prompt_logprobs[request_id] = [
                    self.model.logprobs(each, sampling.prompt_logprobs) for each in told
                ]
            if sampling.pooling is not None and start < request.num_prompt <= end:
                pooled[request_id] = self.model.vector(request.tokens[: request.num_prompt])
            if end == len(request.tokens) and request.is_rejected:
                request.sat_out_at = end
                rejected.append(request_id)
            elif end == len(request.tokens) and request.sits_out():
                unready.append(request_id)
            elif end == len(request.tokens) and TOY_NAN in draft:
                spoiled.append(request_id)
                drafted[request_id] = len(draft)
            elif end == len(request.tokens):
                tokens = self._sample(request, draft)
                if sampling.logprobs is not None:
                    logprobs[request_id] = [
                        self.model.logprobs(each, sampling.logprobs, sampling.logprob_token_ids)
                        for each in tokens
                    ]
                if draft:
                    drafted[request_id] = len(draft)
                if not self._is_told:
                    request.tokens.extend(tokens)
                ids.append(request_id)
                sampled.append(tokens)
        failed = self._finish_kv(layers) if step.num_scheduled_tokens else []
        self._look_at_wrong_kv(failed)
        return ModelRunnerOutput(
            step_id=step.step_id,
            request_ids=ids,
            sampled_token_ids=sampled,
            num_drafted=drafted,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            pooled=pooled,
            unready_ids=unready,
            spoiled_ids=spoiled,
            rejected_ids=rejected,
            failed_loads=failed,
        )

    def _begin_kv(self, metadata: ConnectorMetadata) -> list[tuple[KVConnectorWorker, int]]:
        """Begin the step's loads; return the layers of each rank whose connector wants them."""
        return [
            (connector, layer)
            for connector, rank in zip(self.connectors, self._ranks, strict=True)
            if connector.start_load_kv(metadata)
            for layer in range(rank.layout.num_layers)
        ]

    def _finish_kv(self, layers: Sequence[tuple[KVConnectorWorker, int]]) -> list[Failed]:
        """End the step's loads and saves; return what has not come on some rank."""
        failed: dict[RequestId, Failed] = {}
        for connector, layer in layers:
            connector.save_kv_layer(layer)
        for connector in self.connectors:
            for each in connector.wait_for_save():
                other = failed.setdefault(each.request_id, each)
                if each.num_valid_tokens < other.num_valid_tokens:
                    failed[each.request_id] = each
        return list(failed.values())

    def _look_at_wrong_kv(self, failed: list[Failed]) -> None:
        """Pass over wrong KV of requests whose loads have failed, until they begin again.

        Raises:
            WrongKVError: Of any other's.
        """
        for each in failed:
            self._requests[each.request_id].is_lost = True
        for request in self._requests.values():
            if request.wrong is not None and not request.is_lost:
                raise WrongKVError(request.wrong)

    def _take(self, step: SchedulerOutput) -> dict[RequestId, int]:
        """Learn what the step says of its requests; return their computed tokens."""
        for request_id in step.gone_request_ids:
            del self._requests[request_id]
        known = step.known_ids
        computed = dict(zip(known, step.num_computed_tokens, strict=True))
        for request_id, blocks in step.new_block_ids.items():
            self._requests[request_id].blocks.extend(blocks)
        if step.sampled_token_ids and not self._is_told:
            raise InternalError("a step tells tokens that the ranks know")
        if self._is_told:
            for request_id, told in zip(known, step.sampled_token_ids, strict=True):
                self._requests[request_id].tokens.extend(told)
        for request in step.new_requests:
            if request.request_id in self._requests:
                raise InternalError(f"a step introduces {request.request_id} once more")
            self._requests[request.request_id] = ToyRequest(request)
            computed[request.request_id] = request.num_computed_tokens
        return computed

    def _draft(self, request: ToyRequest, num_rows: int) -> list[int]:
        if self.drafter is None or not num_rows:
            return []
        return self.drafter(request, num_rows)[:num_rows]

    def _sample(self, request: ToyRequest, draft: Sequence[int]) -> list[int]:
        """What follows its last token, and each token of the draft while that is right."""
        value = request.values[-1]
        sampled: list[int] = []
        for drafted in (*draft, None):
            token_id = self.model.next_token(value, request)
            sampled.append(token_id)
            if token_id != drafted:
                break
            value = chain(value, token_id)
        return sampled

    def _compute(self, request: ToyRequest, start: int, end: int, draft: Sequence[int]) -> None:
        values = _values(request.values, request.tokens[:end])
        if draft:  # whose KV may be wrong: it is nobody's until the tokens prove right
            values = _values(list(request.values), [*request.tokens[:end], *draft])
        if TOY_NAN in draft:
            values[end - 1 :] += 1  # no tokens make them that
        for number, rank in enumerate(self._ranks):
            wrong = rank.check(request.blocks, values[:start]) if start else None
            if wrong is not None:
                request.wrong = f"request {request.request_id} on rank {number}: {wrong}"
            rank.write(request.blocks, start, values[start:])


def _values(known: list[int], token_ids: Sequence[int]) -> np.ndarray:
    """The value of each position, `[len(token_ids)]` int64; `known` ones are not made again."""
    while len(known) < len(token_ids):
        known.append(chain(known[-1] if known else 0, token_ids[len(known)]))
    return np.array(known[: len(token_ids)], dtype=np.int64)
