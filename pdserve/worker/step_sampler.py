"""The interface between a step's logits and the sampler.

    stage -> sampling inputs go to the device with the step's inputs
    begin -> the device chooses tokens, if it samples; the host waits for nothing
    the callable that `begin` returned -> the tokens, those of drafts as far as they are right

On a CPU, and where ranks share a vocabulary, the host chooses tokens once the logits are there; a
device with its own memory chooses them itself.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from pdserve.worker.device_sampler import DeviceSampler
from pdserve.worker.sampler import Sampler
from pdserve.worker.verifying import DraftedRows, single, verify
from pdserve.worker.vocabulary import SpreadSampler

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from pdserve.models.registry import LoadedModel
    from pdserve.worker.device import Device
    from pdserve.worker.device_sampler import StagedDraws
    from pdserve.worker.grammar import GrammarPool
    from pdserve.worker.step import PreparedStep
    from pdserve.worker.step_buffers import StepBuffers
    from pdserve.worker.verifying import RowSampler, Verified
    from pdserve.worker.vocabulary import SpreadVocabulary


class HostSteps:
    """Steps whose tokens are chosen once the logits are there.

    Attributes:
        rows: Keeps the sampling parameters of each row of the batch.
    """

    def __init__(self, rows: RowSampler) -> None:
        self.rows = rows

    def stage(self, prepared: PreparedStep) -> None:
        """Fill in sampling inputs before the step's inputs are uploaded: none here."""

    def begin(
        self, logits: Tensor, prepared: PreparedStep, staged: StagedDraws | None
    ) -> Callable[[], Verified]:
        """Begin to choose tokens; return a callable that returns them.

        Args:
            logits: `[L, vocab_size]` fp32, or this rank's columns; the sampler's from here on.
            staged: As returned by `stage`.
        """
        return partial(self._sample, logits, prepared)

    def _sample(self, logits: Tensor, prepared: PreparedStep) -> Verified:
        rows, num_outputs = prepared.rows[prepared.sampling], prepared.num_outputs
        if prepared.drafts is None:
            return single(self.rows.sample(logits, rows, num_outputs))
        return verify(self.rows, logits, DraftedRows(rows, num_outputs, prepared.drafts))


class DeviceSteps:
    """Steps whose tokens are chosen where their logits are; see `HostSteps`."""

    def __init__(self, rows: DeviceSampler) -> None:
        self.rows = rows

    def stage(self, prepared: PreparedStep) -> StagedDraws:
        """See `HostSteps`."""
        rows = prepared.rows[prepared.sampling]
        return self.rows.stage(rows, prepared.num_outputs, prepared.drafts)

    def begin(
        self, logits: Tensor, prepared: PreparedStep, staged: StagedDraws | None
    ) -> Callable[[], Verified]:
        """See `HostSteps`."""
        assert staged is not None
        coming = self.rows.give(logits, *self.rows.choose(logits), staged)
        return partial(self.rows.verified, coming)


StepSampler: TypeAlias = HostSteps | DeviceSteps


def sampler_of(
    device: Device,
    loaded: LoadedModel,
    num_rows: int,
    *,
    vocabulary: SpreadVocabulary | None,
    buffers: StepBuffers,
    grammars: GrammarPool | None,
) -> StepSampler:
    """Return the sampler for a rank of the last stage.

    Args:
        vocabulary: The ranks' shares of it; None where one rank has all of it.
        buffers: Buffers of the steps.
        grammars: Given on the engine's output rank.
    """
    vocab_size = loaded.arch.vocab_size
    if vocabulary is not None:
        own = Sampler(num_rows, vocab_size, device.torch, grammars, loaded.sampling)
        return HostSteps(SpreadSampler(vocabulary, own if vocabulary.is_first else None))
    if device.shares_memory:
        return HostSteps(Sampler(num_rows, vocab_size, device.torch, grammars, loaded.sampling))
    sampler = DeviceSampler(
        num_rows,
        vocab_size,
        device=device,
        buffers=buffers,
        ops=loaded.sampling,
        grammars=grammars,
    )
    return DeviceSteps(sampler)
