"""Divides a device's memory: measures what steps need, and gives the rest to KV.

    before the weights -> with them -> after the largest steps -> with graphs of every size

The steps run over KV of one request, which is freed before the pool is planned. Knows only bytes:
the caller decides what runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import torch

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.worker.device import Device, DeviceMemory

_GIB: Final = 1 << 30
_MOST_OF_CONTEXT_BYTES: Final = _GIB
"""What CUDA takes of a device for a process before its first tensor, at most. It is there before
anything can be measured, and cannot be told from what other processes have."""


class Rehearsed(Protocol):
    """A runner of steps that keeps the graphs of some; its KV is freed with it."""

    def rehearse(self, progress: Callable[[str], None]) -> None:
        """Run the largest steps."""
        ...

    def capture(self, progress: Callable[[str], None]) -> None:
        """Capture graphs."""
        ...

    def close(self) -> None:
        """Release the graphs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShares:
    """Uses of a device's memory, in bytes.

    Attributes:
        total: Size of the memory.
        utilization: The fraction of it that this process may take.
        others: Used by other processes.
        weights: Used by the model.
        activations: Maximum use by a step, including its logits and sampling.
        graphs: Used by captured graphs.
        driver: Used by CUDA itself: its context, kernels, communicators.
    """

    total: int
    utilization: float
    others: int
    weights: int
    activations: int
    graphs: int
    driver: int

    @property
    def for_kv(self) -> int:
        """Return the bytes left in this process's share and on the device."""
        taken = self.weights + self.activations + self.graphs + self.driver
        allowed = min(int(self.total * self.utilization), self.total - self.others)
        return max(0, allowed - taken)

    def in_words(self, kv_bytes: int) -> str:
        """Describe the use of memory on one line.

        Args:
            kv_bytes: Size of the pool.
        """
        parts = {
            "weights": self.weights,
            "activations": self.activations,
            "graphs": self.graphs,
            "CUDA": self.driver,
            "KV": kv_bytes,
        }
        others = f"; other processes have {_gib(self.others)}" if self.others else ""
        return (
            f"GPU memory: {_gib(int(self.total * self.utilization))} of {_gib(self.total)} GiB by "
            f"--gpu-memory-utilization {self.utilization:g}: "
            f"{', '.join(f'{name} {_gib(size)}' for name, size in parts.items())}{others}"
        )


def measure(
    device: Device,
    before: DeviceMemory,
    begin: Callable[[], Rehearsed],
    progress: Callable[[str], None],
    *,
    kv_bytes: int,
    utilization: float,
) -> MemoryShares:
    """Run the largest steps, capture graphs, and measure the memory that they take.

    Args:
        before: The device's memory as it was before the weights were loaded.
        begin: Makes the runner of steps.
        progress: Called with messages on what takes long.
        kv_bytes: Size of the KV that the steps run over.
        utilization: The fraction of the device's memory that this process may take.

    Raises:
        ConfigError: There is no room for the largest step.
    """
    device.release()
    loaded = _looked(device)
    try:
        runner = begin()
        try:
            runner.rehearse(progress)
            rehearsed = _looked(device)
            runner.capture(progress)
            captured = _looked(device)
        finally:
            runner.close()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a step does not fit in the memory that the weights leave on {device.torch} "
            f"({error}): lower --max-num-batched-tokens, --max-num-seqs or --max-model-len",
            param="max-num-batched-tokens",
        ) from None
    del runner
    device.release()
    context = min(_outside(before), _MOST_OF_CONTEXT_BYTES)
    return MemoryShares(
        total=before.total_bytes,
        utilization=utilization,
        others=_outside(before) - context,
        weights=loaded.held_bytes,
        activations=max(0, rehearsed.peak_bytes - loaded.held_bytes - kv_bytes),
        graphs=captured.peak_bytes
        - rehearsed.peak_bytes
        + max(0, _outside(captured) - _outside(rehearsed)),
        driver=context + max(0, _outside(rehearsed) - _outside(before)),
    )


def _looked(device: Device) -> DeviceMemory:
    found = device.memory()
    assert found is not None, "the device has memory of its own, as it had before"
    return found


def _outside(memory: DeviceMemory) -> int:
    """Return the bytes in use other than for tensors of this process."""
    return memory.in_use_bytes - memory.held_bytes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f}"
