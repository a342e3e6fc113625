"""One step: from what the scheduler asks to what the model and the sampler answer.

    SchedulerOutput -> forget, take, update rows -> inputs -> forward (KV is written)
    -> logits of the rows that sample -> tokens -> ModelRunnerOutput

Owns the batch, the sampler and the views of KV. Knows no connector but the two hooks
around a layer, and makes no choice about who runs.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import torch

from pdserve.errors import InternalError
from pdserve.wire.step import ModelRunnerOutput
from pdserve.worker.input_batch import InputBatch, Prepared
from pdserve.worker.logprobs import token_logprobs
from pdserve.worker.sampler import NonFiniteLogitsError, Sampler

if TYPE_CHECKING:
    from torch import Tensor

    from pdserve.config.schema import SchedulerConfig
    from pdserve.connectors.base import KVLayout
    from pdserve.models.decoder import LayerHooks
    from pdserve.models.registry import LoadedModel
    from pdserve.wire.ids import RequestId
    from pdserve.wire.outputs import TokenLogprobs
    from pdserve.wire.step import NewRequest, SchedulerOutput

_LOGITS_CHUNK_BYTES = 64 << 20


class ModelRunner:
    """Runs steps of one model over one pool of KV blocks.

    Args:
        kv: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`.
        hooks: Called around each layer, if the connector works layer by layer.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        kv: Tensor,
        layout: KVLayout,
        scheduler: SchedulerConfig,
        *,
        device: torch.device,
        hooks: LayerHooks | None = None,
    ) -> None:
        self._model = loaded.model
        self._vocab_size = loaded.arch.vocab_size
        self._kv_layers = [kv[:, layer] for layer in range(layout.num_layers)]
        self._device = device
        self._hooks = hooks
        self._batch = InputBatch(
            num_rows=scheduler.max_num_seqs,
            max_model_len=loaded.max_model_len,
            max_num_tokens=max(
                scheduler.max_num_batched_tokens,
                0 if scheduler.enable_chunked_prefill else loaded.max_model_len,
            ),
            block_size=layout.block_size,
            device=device,
        )
        self._sampler = Sampler(scheduler.max_num_seqs, self._vocab_size, device)
        self._num_prompt_logprobs: dict[RequestId, int] = {}

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; when it returns, the device has finished it.

        Raises:
            InternalError: The step does not fit what the worker knows, or a request's
                logits are not finite: no token of this step may leave then.
        """
        with torch.inference_mode():
            self._apply(step)
            if not step.num_scheduled_tokens:
                return ModelRunnerOutput(step_id=step.step_id)
            prepared = self._batch.prepare(step.num_scheduled_tokens)
            started_s = time.perf_counter()
            hidden = self._model.forward(prepared.inputs, self._kv_layers, self._hooks)
            prompt_logprobs = self._prompt_logprobs(prepared, hidden)
            if not len(prepared.sampling):
                self._synchronize()
                return ModelRunnerOutput(
                    step_id=step.step_id,
                    prompt_logprobs=prompt_logprobs,
                    forward_s=time.perf_counter() - started_s,
                )
            last = hidden if prepared.logit_rows is None else hidden[prepared.logit_rows]
            logits = self._model.logits(last)
            self._synchronize()
            forward_s = time.perf_counter() - started_s
            request_ids = [prepared.request_ids[i] for i in prepared.sampling.tolist()]
            rows = prepared.rows[prepared.sampling]
            try:
                sampled = self._sampler.sample(logits, rows, prepared.num_outputs)
            except NonFiniteLogitsError as error:
                raise _not_finite(", ".join(request_ids[i] for i in error.indices)) from error
            self._batch.append(rows, sampled.token_ids)
            return ModelRunnerOutput(
                step_id=step.step_id,
                request_ids=request_ids,
                sampled_token_ids=sampled.token_ids.tolist(),
                logprobs={request_ids[i]: entry for i, entry in sampled.logprobs.items()},
                prompt_logprobs=prompt_logprobs,
                forward_s=forward_s,
            )

    def _apply(self, step: SchedulerOutput) -> None:
        for request_id in step.gone_request_ids:
            row = self._batch.remove(request_id)
            if row is not None:
                self._sampler.remove(row)
                self._num_prompt_logprobs.pop(request_id, None)
        for request in step.new_requests:
            self._add(request)
        self._batch.update(step.known_requests)

    def _add(self, request: NewRequest) -> None:
        row = self._batch.add(request)
        self._sampler.add(row, request.sampling, request.prompt_token_ids, request.output_token_ids)
        if request.sampling.prompt_logprobs is not None:
            self._num_prompt_logprobs[request.request_id] = request.sampling.prompt_logprobs

    def _prompt_logprobs(
        self, prepared: Prepared, hidden: Tensor
    ) -> dict[RequestId, list[TokenLogprobs]]:
        """Describe the prompt tokens that follow the positions of this step.

        In pieces, so that logits of a long prompt are never all in memory.
        """
        if not self._num_prompt_logprobs:
            return {}
        piece = max(1, _LOGITS_CHUNK_BYTES // (4 * self._vocab_size))
        found: dict[RequestId, list[TokenLogprobs]] = {}
        for i, request_id in enumerate(prepared.request_ids):
            num_top = self._num_prompt_logprobs.get(request_id)
            if num_top is None:
                continue
            targets = torch.from_numpy(
                self._batch.prompt_targets(
                    int(prepared.rows[i]), int(prepared.start[i]), int(prepared.end[i])
                ).astype("int64")
            ).to(self._device)
            first = int(prepared.query_start[i])
            entries: list[TokenLogprobs] = []
            for at in range(0, len(targets), piece):
                wanted = targets[at : at + piece]
                logits = self._model.logits(hidden[first + at : first + at + len(wanted)])
                entries += token_logprobs(logits, wanted, [num_top] * len(wanted))
            if any(math.isnan(entry.logprob) for entry in entries):
                raise _not_finite(request_id)
            if entries:
                found[request_id] = entries
        return found

    def _synchronize(self) -> None:
        """Wait for the device: staged inputs may be rewritten, and KV may leave."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _not_finite(names: str) -> InternalError:
    return InternalError(
        f"logits of {names} are not finite: the model's weights or its KV are corrupt, or its "
        "dtype overflows"
    )
