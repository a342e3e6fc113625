"""Replays decode steps as graphs, with the host up to one step behind the device.

Their tokens are on their way to the host when the next step is launched, which takes them on the
device. With grammars, only the forward pass of that step is launched then; its tokens are chosen
once those before have come and what may follow them is known. The host waits for steps that it
takes part in otherwise, as with drafts.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from pdserve.errors import InternalError
from pdserve.wire.step import ModelRunnerOutput
from pdserve.worker.device_sampler import asks_host
from pdserve.worker.graphs import StepGraphs
from pdserve.worker.step import StepAhead
from pdserve.worker.verifying import single, told_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from pdserve.wire.step import SchedulerOutput
    from pdserve.worker.device import Device
    from pdserve.worker.device_sampler import ComingTokens, DeviceSampler, StagedDraws
    from pdserve.worker.drafting.drafts import Drafts
    from pdserve.worker.input_batch import InputBatch
    from pdserve.worker.step import PreparedStep
    from pdserve.worker.step_buffers import GraphSize, StepBuffers


class ReplayedSteps:
    """The graphs of one rank, and the step that is ahead of the host.

    Args:
        forward: Computes a step of a size over the buffers' inputs: its logits and other outputs,
            a row each.
        sizes: Sizes of the decode steps to capture, rising.
        buffers: The inputs of steps.

    Attributes:
        graphs: Of decode steps; None until `capture`, and where a step cannot be captured.
    """

    def __init__(
        self,
        device: Device,
        sizes: Sequence[GraphSize],
        forward: Callable[[GraphSize], tuple[Tensor, ...]],
        *,
        sampler: DeviceSampler,
        batch: InputBatch,
        buffers: StepBuffers,
    ) -> None:
        self._forward = forward
        self._sampler = sampler
        self._batch = batch
        self._all = StepGraphs(device, sizes, buffers.stage_padding, self._run)
        self.graphs: StepGraphs[tuple[Tensor, ...]] | None = None
        self._ahead: StepAhead | None = None
        self._before: StepAhead | None = None
        self._deferred: Callable[[], None] | None = None
        self._collected_s = 0.0

    def capture(self) -> None:
        """Capture steps of every size.

        Raises:
            RuntimeError: One cannot be captured; then no graph is kept.
        """
        self._all.capture()
        self.graphs = self._all

    def close(self) -> None:
        """Release the graphs."""
        self._all.close()
        self.graphs = None

    def _run(self, size: GraphSize) -> tuple[Tensor, ...]:
        """Run a decode step over the buffers' inputs, and find the likeliest tokens."""
        logits, *read = self._forward(size)
        return logits, *self._sampler.choose(logits), *read

    def sampled_before(self, step: SchedulerOutput) -> Tensor | None:
        """Return the device's tokens of the previous step; None if it is already collected.

        Raises:
            InternalError: `step` may not follow that one.
        """
        if self._ahead is None:
            return None
        if not self.may_follow(step):
            raise InternalError(f"step {step.step_id} was launched before the one that it needs")
        self.complete()
        assert self._ahead.coming is not None
        return self._ahead.coming.tokens

    def may_follow(self, step: SchedulerOutput) -> bool:
        """Return whether `step` may be launched before the device's current one is collected.

        It may not if it depends on the host's part in the tokens before it, takes the host long,
        or may have drafts: those continue from tokens that the host knows. Nor if there are
        grammars and a part of a prompt: no graph leaves the choice of its tokens for later.
        """
        if self.graphs is None or step.num_tokens != len(step.num_scheduled_tokens):
            return False
        if step.num_draft_rows:
            return False
        is_connected = step.connector_metadata is not None or bool(step.loading_request_ids)
        asks = self._sampler.asks_host or any(asks_host(new.sampling) for new in step.new_requests)
        if is_connected or asks:
            return False
        is_masked = any(new.sampling.grammar is not None for new in step.new_requests)
        is_masked |= self._sampler.has_grammars
        return not (is_masked and self._batch.has_unfinished(step))

    def launch(
        self, prepared: PreparedStep, staged: StagedDraws
    ) -> tuple[Callable[[], ComingTokens], list[Tensor]]:
        """Replay a step whose inputs are uploaded.

        Returns:
            What launches the choice of its tokens, to be called before the next replay, and copies
            of the step's other outputs, for their reader to keep.
        """
        assert self.graphs is not None
        assert prepared.graph is not None
        results = self.graphs.replay(prepared.graph)
        logits, tokens, peaks, *read = (each[: prepared.num_tokens] for each in results)
        give = partial(self._sampler.give, logits, tokens, peaks, staged)
        return give, [each.clone() for each in read]

    def go_ahead(
        self,
        prepared: PreparedStep,
        give: Callable[[], ComingTokens],
        began_s: float,
        *,
        waits: bool,
    ) -> StepAhead:
        """Leave a launched step to the device, and let its requests go on meanwhile.

        Args:
            give: As returned by `launch`.
            waits: Whether the choice of its tokens depends on those of the step before.
        """
        self._before = self._ahead
        self._ahead = StepAhead(prepared.request_ids, prepared.rows, began_s, give)
        if self._before is None or not waits:
            self._choose(self._ahead)
        return self._ahead

    def complete(self) -> None:
        """Launch the choice of the last step's tokens, if it still waits for those before.

        Raises:
            InternalError: Those are not collected yet.
        """
        if self._ahead is None or self._ahead.coming is not None:
            return
        if self._before is not None:
            raise InternalError("tokens depend on those of the step before, which is not collected")
        with torch.inference_mode():
            self._choose(self._ahead)

    def _choose(self, ahead: StepAhead) -> None:
        ahead.coming = coming = ahead.give()
        hindered = list(coming.hindered)
        places = np.delete(np.arange(len(ahead.rows)), hindered)
        ahead.awaited = self._batch.wait_for(places, ahead.rows[places])
        if hindered:
            self._batch.sit_out(ahead.rows[hindered])

    def defers(self, note: Callable[[], None]) -> bool:
        """Put off what a later step notes until the tokens of the step ahead have been noted.

        Returns:
            False if there is no step ahead.
        """
        if self._ahead is None:
            return False
        self._deferred = note
        return True

    def collect(self, step_id: int, ahead: StepAhead, drafts: Drafts | None) -> ModelRunnerOutput:
        """Wait for the tokens of the oldest step, and give them to its requests and drafter."""
        if ahead is self._ahead:
            self.complete()
        assert ahead.coming is not None
        assert ahead.awaited is not None
        with torch.inference_mode():
            sampled = self._sampler.take(ahead.coming)
        # The device began with it when it was through with the one before.
        began_s, self._collected_s = max(ahead.began_s, self._collected_s), time.perf_counter()
        is_there = self._batch.settle(ahead.awaited, sampled.token_ids)
        if drafts is not None:
            there = ahead.awaited.rows[is_there].tolist()
            token_ids = sampled.token_ids[ahead.awaited.places[is_there]].tolist()
            drafts.note(there, [[token_id] for token_id in token_ids])
        if self._ahead is ahead:
            self._ahead = None
        if self._before is ahead:
            self._before = None
        if self._deferred is not None:
            self._deferred()
            self._deferred = None
        output = ModelRunnerOutput(step_id=step_id, forward_s=self._collected_s - began_s)
        return told_of(output, ahead.request_ids, single(sampled), None)
