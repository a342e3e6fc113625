"""Runs one step on one rank: inputs, model, sampler, answer.

    SchedulerOutput -> forget, take, update rows -> inputs -> forward (KV is written)
    -> logits of the rows that sample, and of drafts -> tokens -> ModelRunnerOutput
       (forward and the logits of decode are a graph's, where the device has graphs)
    -> finish_step: work that the answer need not wait for, such as the next drafts

Every rank of an engine runs the same steps in the same order. A pipeline stage receives what
the one before computed, and sends on what it has; the last one samples. Its ranks share the
vocabulary, and end with the same tokens. Owns the batch, the sampler and the views of KV. Knows
no connector but the two hooks around a layer, and makes no choice about who runs.

A request whose values are NaN or infinite is reported, and gets no token. No other request is
affected: rows do not mix, and KV that it left in blocks is masked for the next owner.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from pdserve.parallel.dispatch import SlicedExperts
from pdserve.parallel.pipeline import StageLink
from pdserve.wire.step import ModelRunnerOutput
from pdserve.worker.device_sampler import DeviceSampler
from pdserve.worker.drafting.drafts import ForcedTokens, drafts_of, measure_rows
from pdserve.worker.drafting.loading import drafter_of
from pdserve.worker.drafting.model import FirstRanksDrafts
from pdserve.worker.expert_steps import ExpertSteps
from pdserve.worker.final_states import PromptLogprobs, PromptPooler, not_a_number, not_finite
from pdserve.worker.forward_pass import ForwardPass
from pdserve.worker.graphs import (
    decode_sizes,
    num_graph_rows,
    prompt_sizes,
    rehearse,
    rehearsed_steps,
)
from pdserve.worker.input_batch import InputBatch
from pdserve.worker.replays import ReplayedSteps
from pdserve.worker.step import LaunchedStep, PreparedStep, StepAhead
from pdserve.worker.step_buffers import StepBuffers
from pdserve.worker.step_sampler import sampler_of
from pdserve.worker.verifying import told_of
from pdserve.worker.vocabulary import SpreadVocabulary

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from pdserve.config.schema import EngineConfig
    from pdserve.models.decoder import LayerHooks
    from pdserve.models.registry import LoadedModel
    from pdserve.parallel.group import World
    from pdserve.wire.step import NewRequest, SchedulerOutput
    from pdserve.worker.device import Device
    from pdserve.worker.device_sampler import StagedDraws
    from pdserve.worker.grammar import GrammarPool
    from pdserve.worker.step_sampler import StepSampler
    from pdserve.worker.verifying import Verified

_log = logging.getLogger(__name__)


class ModelRunner:
    """Runs steps of one rank's part of a model over its pool of KV blocks.

    Args:
        kv: `[num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]`.
        grammars: On the engine's output rank.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        kv: Tensor,
        config: EngineConfig,
        *,
        device: Device,
        world: World,
        grammars: GrammarPool | None = None,
    ) -> None:
        self._model = loaded.model
        self._experts: ExpertSteps | None = None
        if loaded.experts is not None or world.dp.size > 1:
            self._experts = ExpertSteps(loaded.experts, world.dp)
        self._vocab_size = loaded.arch.vocab_size
        self._hidden_size = loaded.arch.hidden_size
        self._kv_layers = list(kv.unbind(1))
        self._device = device
        scheduler, max_drafted = config.scheduler, config.speculative.max_drafted
        num_rows, block_size = scheduler.max_num_seqs, kv.shape[-2]
        self._max_logits = num_rows * (1 + max_drafted)
        max_num_tokens = max(
            scheduler.max_num_batched_tokens,
            0 if scheduler.enable_chunked_prefill else loaded.max_model_len,
        )
        max_graph_rows = min(num_graph_rows(num_rows, max_drafted), max_num_tokens)
        self._rehearsed = rehearsed_steps(num_rows, max_num_tokens, loaded.max_model_len)
        buffers = self._buffers = StepBuffers(
            device,
            num_rows=max_graph_rows + 1,  # padding may need a request of its own
            max_blocks=-(-loaded.max_model_len // block_size),
            max_num_tokens=max_num_tokens,
            max_logits=self._max_logits + 1,
        )
        self._batch = InputBatch(
            num_rows=num_rows,
            max_model_len=loaded.max_model_len,
            block_size=block_size,
            buffers=buffers,
        )
        pp, tp = world.pp, world.tp
        self._link = None if pp.size == 1 else StageLink(pp, device.torch, loaded.dtype)
        self._receives, self._sends = not pp.is_first, not pp.is_last
        self._is_output = pp.is_last and tp.is_first
        # The ranks of the last stage share out the vocabulary.
        self._vocabulary: SpreadVocabulary | None = None
        if pp.is_last and tp.size > 1:
            self._vocabulary = SpreadVocabulary(
                tp, loaded.vocab, vocab_size=self._vocab_size, device=device.torch
            )
        self._steps: StepSampler | None = None
        if pp.is_last:
            self._steps = sampler_of(
                device,
                loaded,
                num_rows,
                vocabulary=self._vocabulary,
                buffers=buffers,
                grammars=grammars,
            )
        self._sampler = sampler = None if self._steps is None else self._steps.rows
        on_device = sampler if isinstance(sampler, DeviceSampler) else None
        self._device_sampler = on_device
        forced = None if sampler is None else ForcedTokens(sampler.forced, tp)
        self._by_model = drafter_of(config, loaded, self._batch, len(kv), device, world, sampler)
        self._drafts = drafts_of(config.speculative, self._vocab_size, forced, self._by_model, pp)
        self._described = PromptLogprobs(
            self._batch,
            lambda hidden: self._whole(self._model.logits(hidden)),
            loaded.sampling,
            vocab_size=self._vocab_size,
        )
        self._pooler = PromptPooler()
        self.began_s = 0.0
        # Shared experts learn of a step before it, and the host synchronizes with other ranks.
        slices = isinstance(loaded.experts, SlicedExperts | None)
        self._rehearses = slices and not device.shares_memory
        reader = self._drafts and self._drafts.reader
        aux_layers = reader.aux_layers if reader else None
        self._forward = ForwardPass(
            self._model, self._kv_layers, buffers, slices and pp.is_last, aux_layers
        )
        is_alone = world.dp.size == pp.size == tp.size == 1
        self._replays: ReplayedSteps | None = None
        if device.has_graphs and slices and is_alone and on_device is not None:
            self._replays = ReplayedSteps(
                device,
                decode_sizes(max_graph_rows),
                self._forward.decode,
                sampler=on_device,
                batch=self._batch,
                buffers=buffers,
            )
        self._prompt_sizes = prompt_sizes(num_rows, max_num_tokens)

    def rehearse(self, progress: Callable[[str], None]) -> None:
        """Run every kind of step, the largest first, and report it to `progress`."""
        if not self._rehearses:
            return
        progress("compiling the device's kernels")
        kv_layers, width = self._kv_layers, self._hidden_size if self._receives else None
        kept = None if self._device_sampler is None else self._device_sampler.kept_for_rules()
        with torch.inference_mode():
            rehearse(self._model, kv_layers, self._buffers, self._rehearsed, width)
            if not self._sends:
                hidden = kv_layers[0].new_zeros(self._max_logits, self._hidden_size)
                self._whole(self._model.logits(hidden))
            if self._device_sampler is not None:
                self._device_sampler.warm_up()
            if self._by_model is not None:
                self._by_model.warm_up(self._rehearsed)
        del kept  # the other allocations had to fit beside it

    def capture(self, progress: Callable[[str], None]) -> None:
        """Capture graphs; a model that uses some reference operations may have none."""
        if self._replays is None:
            return
        progress("capturing steps as graphs")
        captures: dict[str, Callable[[], None]] = {
            "steps with prompts": partial(self._forward.capture, self._device, self._prompt_sizes),
            "decode steps": self._replays.capture,
        }
        if isinstance(self._by_model, FirstRanksDrafts):
            captures["drafts"] = self._by_model.capture
        for what, capture in captures.items():
            try:
                with torch.inference_mode():
                    capture()
            except RuntimeError as error:
                _log.warning("%s run without graphs: %s", what, error)

    def row_costs(self) -> tuple[tuple[int, float], ...]:
        """Time the largest product of the model for several numbers of rows, if there are drafts.

        Returns:
            Rows and seconds, rising; empty on a rank that has no part of the vocabulary.
        """
        if self._drafts is None or self._sampler is None:
            return ()
        hidden = self._kv_layers[0].new_zeros(128, self._hidden_size)
        with torch.inference_mode():
            return measure_rows(self._model.logits, hidden, self._device.synchronize)

    def close(self) -> None:
        """Release the graphs."""
        self._forward.close()
        if self._replays is not None:
            self._replays.close()
        if isinstance(self._by_model, FirstRanksDrafts):
            self._by_model.close()

    def execute(self, step: SchedulerOutput, hooks: LayerHooks | None = None) -> ModelRunnerOutput:
        """Launch one step, and collect it."""
        return self.collect(self.launch(step, hooks))

    @property
    def runs_ahead(self) -> bool:
        """Whether any step may run ahead; not with a draft model, which reads every token."""
        waits = self._drafts is not None and self._drafts.is_by_model
        return self._replays is not None and self._replays.graphs is not None and not waits

    def may_follow(self, step: SchedulerOutput) -> bool:
        """See `ReplayedSteps`; no graph has the states that pooling needs."""
        asks = any(new.sampling.pooling is not None for new in step.new_requests)
        is_ready = self.runs_ahead and self._pooler.is_idle and not asks
        return is_ready and self._replays is not None and self._replays.may_follow(step)

    def complete(self) -> None:
        """Launch what the last step left for when the one before it is collected, if anything."""
        if self._replays is not None:
            self._replays.complete()

    def launch(self, step: SchedulerOutput, hooks: LayerHooks | None = None) -> LaunchedStep:
        """Run one step; if a graph runs it and only its tokens are wanted, just begin it.

        At most one step may be launched and not collected, and only if this one `may_follow` it.

        Args:
            hooks: Called around each layer of this step, if the connector has work in it.

        Raises:
            InternalError: The step does not fit what the worker knows.
        """
        ahead = None if self._replays is None else self._replays.sampled_before(step)
        with torch.inference_mode():
            return LaunchedStep(step, self._launch(step, ahead, hooks))

    def collect(self, launched: LaunchedStep) -> ModelRunnerOutput:
        """Wait until the device has finished a step, whose KV may leave from here on.

        Returns:
            On the engine's output rank, the results; on the others, that it is done.
        """
        result = launched.result
        if not isinstance(result, StepAhead):
            return result
        assert self._replays is not None
        return self._replays.collect(launched.step.step_id, result, self._drafts)

    def _launch(
        self, step: SchedulerOutput, ahead: Tensor | None, hooks: LayerHooks | None
    ) -> ModelRunnerOutput | StepAhead:
        if self._drafts is not None:
            self._drafts.begin(step.num_draft_rows)
        self._apply(step)
        if not step.num_scheduled_tokens:
            return self._run_empty(step)
        # A replay calls no hook, and a graph of prompts has no states of all their tokens.
        replays = self._replays if hooks is None and self._pooler.is_idle else None
        graphs = None if replays is None else replays.graphs
        by_graph = self._forward.prompt_graphs if hooks is None and not self._reads_all else None
        drafts = self._drafts.take(step.num_draft_rows) if self._drafts else None
        prepared = self._batch.prepare(step.num_scheduled_tokens, graphs, by_graph, drafts)
        staged = None if self._steps is None else self._steps.stage(prepared)
        self._batch.upload(prepared, ahead)
        is_decode = prepared.graph is not None and prepared.logit_rows is None
        if replays is None or staged is None or not is_decode:
            return self._run(step, prepared, staged, hooks)
        return self._replay(step, prepared, staged, replays)

    @property
    def _reads_all(self) -> bool:
        """Whether requests ask for what the final states of all their tokens tell."""
        return not (self._described.is_idle and self._pooler.is_idle)

    def _replay(
        self,
        step: SchedulerOutput,
        prepared: PreparedStep,
        staged: StagedDraws,
        replays: ReplayedSteps,
    ) -> ModelRunnerOutput | StepAhead:
        """Replay a step as a graph, to its end if the host takes part in it."""
        assert self._device_sampler is not None
        self._begin(step, prepared.num_tokens)
        began_s = time.perf_counter()
        give, read = replays.launch(prepared, staged)
        if not staged.asks_host and self.runs_ahead:
            return replays.go_ahead(prepared, give, began_s, waits=bool(staged.masked))
        verified = self._device_sampler.verified(give())
        forward_s = time.perf_counter() - began_s
        if read and self._drafts is not None:
            hidden, *aux = read
            self._drafts.observe(prepared, hidden, aux, verified.token_ids)
        output = ModelRunnerOutput(step_id=step.step_id, forward_s=forward_s)
        return self._with_tokens(output, prepared, verified)

    def _run(
        self,
        step: SchedulerOutput,
        prepared: PreparedStep,
        staged: StagedDraws | None,
        hooks: LayerHooks | None,
    ) -> ModelRunnerOutput:
        """Run a step to its end, all but the graphs of decode."""
        is_wave_over = self._begin(step, prepared.num_tokens)
        hidden_before: Tensor | None = None
        if self._link is not None and self._receives:
            num_rows = self._model.hidden_rows(prepared.num_tokens)
            hidden_before = self._link.recv(num_rows, self._hidden_size)
        started_s = time.perf_counter()
        self.began_s = time.monotonic()
        states = self._forward.run(prepared, hooks, hidden_before, reads_all=self._reads_all)
        hidden = states.hidden
        if self._sends:
            assert self._link is not None
            self._device.synchronize()
            self._link.send(hidden)
            return ModelRunnerOutput(step_id=step.step_id)
        prompt_logprobs = self._described.take(prepared, hidden)
        pooled = self._pooler.take(prepared, hidden)
        lost = not_a_number(prompt_logprobs)
        if self._is_output and prepared.logit_rows is not None:
            sums = hidden.sum(-1, dtype=torch.float32) if states.sums is None else states.sums
            lost |= not_finite(prepared, sums)
        choosing: Callable[[], Verified] | None = None
        if len(prepared.sampling):
            assert self._steps is not None
            is_narrow = states.sums is not None or prepared.logit_rows is None
            last = hidden if is_narrow else hidden[prepared.logit_rows]
            choosing = self._steps.begin(self._model.logits(last), prepared, staged)
        # Staged inputs may be rewritten then, and KV may leave.
        self._device.synchronize()
        forward_s = time.perf_counter() - started_s
        verified = None if choosing is None else choosing()
        if states.read is not None and self._drafts is not None:
            token_ids = verified.token_ids if verified else []
            self._drafts.observe(prepared, hidden, states.read, token_ids)
        output = ModelRunnerOutput(
            step_id=step.step_id,
            non_finite_ids=sorted(lost),
            prompt_logprobs=prompt_logprobs,
            pooled=pooled,
            forward_s=forward_s,
            is_wave_over=is_wave_over,
        )
        if verified is None:
            return self._answer(output)
        return self._with_tokens(output, prepared, verified)

    def _with_tokens(
        self, output: ModelRunnerOutput, prepared: PreparedStep, verified: Verified
    ) -> ModelRunnerOutput:
        """Take the tokens sampled in a step, and add them to its output."""
        rows = prepared.rows[prepared.sampling]
        request_ids = [prepared.request_ids[i] for i in prepared.sampling.tolist()]
        if self._link is None:
            self._batch.extend(rows, verified.token_ids)
            if self._drafts is not None:
                note = partial(self._drafts.note, rows.tolist(), verified.token_ids)
                if self._replays is None or not self._replays.defers(note):
                    note()
            self._batch.sit_out(rows[list(verified.hindered)])
        return self._answer(told_of(output, request_ids, verified, prepared.drafts))

    def finish_step(self) -> None:
        """Do the work that the step's answer need not wait for: make drafts, maybe move experts.

        A collective of all ranks that share experts, which run the same steps, each at the latest
        before its next one. If a step raised on one rank, the others wait no longer than usual.
        """
        if self._drafts is not None:
            self._drafts.finish()
        if self._experts is not None:
            self._experts.end()

    def _answer(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        if not self._is_output:
            return ModelRunnerOutput(step_id=output.step_id)
        return output if self._experts is None else self._experts.told_in(output)

    def _run_empty(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step without tokens: in a wave, only the layers shared with other engines."""
        if step.wave is None:
            return ModelRunnerOutput(step_id=step.step_id)
        is_wave_over = self._begin(step, 0)
        self._model.idle_forward()
        self._device.synchronize()
        return self._answer(ModelRunnerOutput(step_id=step.step_id, is_wave_over=is_wave_over))

    def _begin(self, step: SchedulerOutput, num_tokens: int) -> bool:
        """Begin a step's forward pass; return whether its wave is over."""
        self.finish_step()
        return self._experts is not None and self._experts.begin(step, num_tokens)

    def _apply(self, step: SchedulerOutput) -> None:
        for request_id in step.gone_request_ids:
            row = self._batch.remove(request_id)
            if self._drafts is not None:
                self._drafts.remove(request_id)
            if row is not None and self._sampler is not None:
                self._sampler.remove(row)
                self._described.remove(request_id)
                self._pooler.remove(request_id)
        for request in step.new_requests:
            self._add(request)
        rows = self._batch.update(step)
        if self._drafts is not None and step.sampled_token_ids:
            self._drafts.note(rows.tolist(), step.sampled_token_ids)

    def _add(self, request: NewRequest) -> None:
        row = self._batch.add(request)
        if self._drafts is not None:
            self._drafts.add(row, request)
        if self._sampler is None:
            return
        self._sampler.add(row, request.sampling, request.prompt_token_ids, request.output_token_ids)
        self._pooler.add(request)
        self._described.add(request)

    def _whole(self, logits: Tensor) -> Tensor | None:
        """Return `[M, vocab_size]` on the rank that answers, None on the others of its stage."""
        return logits if self._vocabulary is None else self._vocabulary.whole(logits)
