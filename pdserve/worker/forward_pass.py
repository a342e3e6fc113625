"""The forward pass of a rank's steps, launched kernel by kernel or replayed as a graph.

A graph of a step with prompts ends with the final states; logits and sampling are a few launches
behind it. Unless a drafter reads the states of all tokens, the graph computes the second half of
the last layer only for the tokens whose logits are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.models.decoder import StreamTap, WantedStates
from pdserve.worker.graphs import StepGraphs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pdserve.models.decoder import LayerHooks
    from pdserve.models.registry import CausalLM
    from pdserve.worker.device import Device
    from pdserve.worker.step import PreparedStep
    from pdserve.worker.step_buffers import GraphSize, StepBuffers


@dataclass(frozen=True, slots=True)
class FinalStates:
    """What a step's forward pass returns. T tokens, M of which have their logits wanted.

    Attributes:
        hidden: `[M, hidden_size]` if `sums` are there, else `[T, hidden_size]`; final states, or
            on a stage before the last what is sent on.
        sums: `[T]` fp32, as `WantedStates` has them; None if all tokens have final states.
        read: What a drafter reads, `[T, hidden_size]` each; None if nothing does.
    """

    hidden: Tensor
    sums: Tensor | None
    read: list[Tensor] | None


class ForwardPass:
    """Computes steps over one rank's part of a model and its KV.

    Args:
        narrows: Whether states that nothing reads may be left out.
        aux_layers: As of `StreamTap`, if a drafter reads the stream; else None.

    Attributes:
        prompt_graphs: Graphs of steps with prompts; None until `capture`, and if one cannot be
            captured.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_layers: list[Tensor],
        buffers: StepBuffers,
        narrows: bool,
        aux_layers: tuple[int, ...] | None,
    ) -> None:
        self._model = model
        self._kv_layers = kv_layers
        self._buffers = buffers
        self._narrows = narrows
        self._aux_layers = aux_layers
        self.prompt_graphs: StepGraphs[tuple[Tensor, ...]] | None = None

    def capture(self, device: Device, sizes: Sequence[GraphSize]) -> None:
        """Capture steps with prompts.

        Raises:
            RuntimeError: One cannot be captured; then no graph is kept.
        """
        graphs = StepGraphs(device, sizes, self._buffers.stage_padding, self._with_prompts)
        graphs.capture()
        self.prompt_graphs = graphs

    def close(self) -> None:
        """Release the graphs."""
        if self.prompt_graphs is not None:
            self.prompt_graphs.close()
        self.prompt_graphs = None

    def decode(self, size: GraphSize) -> tuple[Tensor, ...]:
        """Return the logits of the buffers' tokens, and what a drafter reads."""
        inputs, tap = self._buffers.graph_inputs(size), self._tap()
        hidden = self._model.forward(inputs, self._kv_layers, tap=tap)
        states = [] if tap is None else tap.states
        read = () if self._aux_layers is None else (hidden, *states)
        return self._model.logits(hidden), *read

    def _with_prompts(self, size: GraphSize) -> tuple[Tensor, ...]:
        """Return the buffers' final states, and sums or what a drafter reads."""
        inputs, tap = self._buffers.graph_inputs(size), self._tap()
        if self._aux_layers is not None:
            hidden = self._model.forward(inputs, self._kv_layers, tap=tap)
            return hidden, *([] if tap is None else tap.states)
        wanted = WantedStates(self._buffers.logit_rows(size.num_requests))
        hidden = self._model.forward(inputs, self._kv_layers, wanted=wanted)
        return hidden, wanted.sums

    def run(
        self,
        prepared: PreparedStep,
        hooks: LayerHooks | None = None,
        received: Tensor | None = None,
        *,
        reads_all: bool,
    ) -> FinalStates:
        """Compute a step, as a graph if it was prepared for one.

        Args:
            hooks, received: As of `CausalLM.forward`.
            reads_all: Whether the final states of all tokens are wanted; no graph has them.
        """
        if prepared.graph is not None:
            return self._replay(prepared, prepared.graph)
        rows, tap = prepared.few_logit_rows, self._tap()
        wanted = None
        if rows is not None and self._narrows and self._aux_layers is None and not reads_all:
            wanted = WantedStates(rows)
        hidden = self._model.forward(prepared.inputs, self._kv_layers, hooks, received, tap, wanted)
        sums = None if wanted is None else wanted.sums
        read: list[Tensor] | None = None if self._aux_layers is None else []
        return FinalStates(hidden, sums, read if tap is None else tap.states)

    def _replay(self, prepared: PreparedStep, size: GraphSize) -> FinalStates:
        assert self.prompt_graphs is not None
        assert prepared.logit_rows is not None
        hidden, *others = self.prompt_graphs.replay(size)
        if self._aux_layers is None:
            (sums,) = others
            return FinalStates(
                hidden[: len(prepared.logit_rows)], sums[: prepared.num_tokens], None
            )
        # They last until the next replay, and what reads them may keep them.
        hidden, *read = (each[: prepared.num_tokens].clone() for each in (hidden, *others))
        return FinalStates(hidden, None, read)

    def _tap(self) -> StreamTap | None:
        return StreamTap(self._aux_layers) if self._aux_layers else None
