"""A rank's device as its steps see it: copies to it, events, graphs.

A device works through its queue in order, asynchronously to the host. Everything in the step that
depends on *when* the device does something goes through here, so that a test can substitute a
device that checks the order. On a CPU there is no such order, and memory is shared.
"""

from __future__ import annotations

import gc
import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

T = TypeVar("T")

_LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory use of a device, in bytes.

    Attributes:
        total_bytes: Size of the memory.
        in_use_bytes: Used by this process and by others.
        held_bytes: The part of it used by this process's tensors, or kept for further ones.
        peak_bytes: Maximum of `held_bytes` since the last `Device.release`.
    """

    total_bytes: int
    in_use_bytes: int
    held_bytes: int
    peak_bytes: int


class DeviceEvent(Protocol):
    """A point in the device's order."""

    def record(self) -> None:
        """Put the event behind all work that the device has been given so far."""
        ...

    def wait(self) -> None:
        """Return once the device has passed the event; at once if it was never recorded."""
        ...

    def has_passed(self) -> bool:
        """Return whether `wait` would return at once."""
        ...


class DeviceGraph(Protocol):
    """Work that was captured once."""

    def replay(self) -> None:
        """Launch it again: the same kernels, over the same addresses."""
        ...

    def close(self) -> None:
        """Release its resources."""
        ...


class Device(Protocol):
    """Where a rank computes.

    Attributes:
        torch: The torch device.
        shares_memory: Whether its tensors are in host memory: nothing to copy or to wait for.
        has_graphs: Whether work can be captured.
    """

    torch: torch.device
    shares_memory: bool
    has_graphs: bool

    def staging(self, num_bytes: int) -> Tensor:
        """Return zeros in host memory, `[num_bytes]` uint8, for asynchronous copies."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy on the device, to or from staging memory.

        The host may change the source, or read the target, once an event behind it has passed.
        """
        ...

    def event(self) -> DeviceEvent:
        """Make an event."""
        ...

    def capture(self, work: Callable[[], T]) -> tuple[DeviceGraph, T]:
        """Run `work` once, then capture it.

        The graphs of a device share one pool of memory: a replay may overwrite what others left.

        Args:
            work: Launches kernels on tensors that live as long as the graph. It reads nothing from
                the device, and its second run is the one captured.

        Returns:
            The graph, and what the captured run returned: tensors that each replay fills.

        Raises:
            RuntimeError: The work cannot be captured.
        """
        ...

    def synchronize(self) -> None:
        """Return once the device has finished all its work."""
        ...

    def memory(self) -> DeviceMemory | None:
        """Return its memory use; None if it shares the host's memory."""
        ...

    def release(self) -> None:
        """Free the memory kept for further tensors, and reset the peak."""
        ...


def device_of(device: torch.device, *, has_graphs: bool = True) -> Device:
    """Return the `Device` for a torch device; with `has_graphs` False it captures nothing.

    Raises:
        ConfigError: The device is older than those that kernels are compiled for.
    """
    if device.type != "cuda":
        return HostDevice(device)
    major, minor = capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        raise ConfigError(
            f"{device} is a {torch.cuda.get_device_name(device)} with compute capability "
            f"{major}.{minor}, but the kernels need 8.0 or later (A100, RTX 30): use another "
            "device, or --device cpu",
            param="device",
        )
    return CudaDevice(device, has_graphs=has_graphs)


class HostDevice:
    """A CPU: work is done when its call returns."""

    shares_memory = True
    has_graphs = False

    def __init__(self, device: torch.device) -> None:
        self.torch = device

    def staging(self, num_bytes: int) -> Tensor:
        """See `Device`."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `Device`."""
        target.copy_(source)

    def event(self) -> DeviceEvent:
        """See `Device`."""
        return _Passed()

    def capture(self, work: Callable[[], T]) -> tuple[DeviceGraph, T]:
        """See `Device`."""
        raise RuntimeError(f"work on {self.torch} cannot be captured")

    def synchronize(self) -> None:
        """See `Device`."""

    def memory(self) -> DeviceMemory | None:
        """See `Device`."""
        return None

    def release(self) -> None:
        """See `Device`."""


class _Passed:
    def record(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def has_passed(self) -> bool:
        return True


class CudaDevice:
    """A CUDA device: all work goes to the stream that is current when this rank's thread runs."""

    shares_memory = False

    def __init__(self, device: torch.device, *, has_graphs: bool) -> None:
        self.torch = device
        self.has_graphs = has_graphs
        self._pool: Any = None
        self._num_graphs = 0
        self._side: torch.cuda.Stream | None = None

    def staging(self, num_bytes: int) -> Tensor:
        """See `Device`: pinned, because a copy from other memory would block the host."""
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `Device`."""
        target.copy_(source, non_blocking=True)

    def event(self) -> DeviceEvent:
        """See `Device`."""
        return _CudaEvent()

    def capture(self, work: Callable[[], T]) -> tuple[DeviceGraph, T]:
        """See `Device`.

        The run before it compiles kernels and creates what libraries keep for a stream. Other
        threads may use the device meanwhile: only this thread's calls must be capturable.
        """
        if self._side is None:
            self._side = torch.cuda.Stream(self.torch)  # type: ignore[no-untyped-call]
        if not self._num_graphs:  # torch cannot reuse a pool whose graphs have all been freed
            self._pool = torch.cuda.graph_pool_handle()
        here = torch.cuda.current_stream(self.torch)
        graph = torch.cuda.CUDAGraph()
        self._side.wait_stream(here)
        with torch.cuda.stream(self._side):
            work()
            torch.cuda.synchronize(self.torch)
            with _nothing_collected():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = work()
                finally:
                    graph.capture_end()
        here.wait_stream(self._side)
        self._num_graphs += 1
        return _CudaGraph(graph, self._forget), result

    def _forget(self) -> None:
        self._num_graphs -= 1

    def synchronize(self) -> None:
        """See `Device`."""
        torch.cuda.current_stream(self.torch).synchronize()

    def memory(self) -> DeviceMemory | None:
        """See `Device`; held memory is all that torch's allocator has reserved, split or not."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.torch)
        return DeviceMemory(
            total_bytes=total_bytes,
            in_use_bytes=total_bytes - free_bytes,
            held_bytes=torch.cuda.memory_reserved(self.torch),
            peak_bytes=torch.cuda.max_memory_reserved(self.torch),
        )

    def release(self) -> None:
        """See `Device`."""
        gc.collect()
        torch.cuda.synchronize(self.torch)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Pause garbage collection: it could free device memory, which a capture does not allow."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _CudaEvent:
    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def has_passed(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, forget: Callable[[], None]) -> None:
        self._graph = graph
        self._forget = forget

    def replay(self) -> None:
        self._graph.replay()

    def close(self) -> None:
        self._graph.reset()
        self._forget()


class Upload:
    """A tensor on a device that the host fills, step after step.

    The host fills one of two pieces of its own, in turn, while the device may not yet have copied
    the other. Where memory is shared there is one, which the device reads itself.

    Attributes:
        pieces: On the host, each like `there`.
        there: On the device, at an address that never changes, as graphs require.
        turn: The piece that `begin` returned.
    """

    def __init__(self, device: Device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        num_bytes = math.prod(shape) * dtype.itemsize
        self.pieces = [
            device.staging(num_bytes).view(dtype).view(shape)
            for _ in range(1 if device.shares_memory else 2)
        ]
        self.there = self.pieces[0]
        if not device.shares_memory:
            self.there = torch.zeros(shape, dtype=dtype, device=device.torch)
        self.turn = 0
        self._device = device
        self._copied = [device.event() for _ in self.pieces]

    def begin(self) -> Tensor:
        """Return the next piece, with what an earlier step left, once nothing reads that."""
        self.turn = (self.turn + 1) % len(self.pieces)
        self._copied[self.turn].wait()
        return self.pieces[self.turn]

    def send(self, num: int | None = None) -> Tensor:
        """Bring the first `num` of the piece's first dim over, or all, and return them there."""
        there = self.there[:num]
        if not self._device.shares_memory:
            self._device.copy(there, self.pieces[self.turn][:num])
            self._copied[self.turn].record()
        return there
