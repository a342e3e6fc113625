"""A rank's device as its steps see it: copies to it, events, graphs.

A device works through what it is given in order, behind the host's back. Everything in the step
that depends on *when* the device does something goes through here, so that a test can put a device
in its place which checks the order. On a CPU there is no such order, and memory is shared.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

T = TypeVar("T")

_LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """What the memory of a device is used for, in bytes.

    Attributes:
        total_bytes: What there is.
        in_use_bytes: Used by this process and by others.
        held_bytes: Of those, used by this process's tensors, or kept for further ones.
        peak_bytes: The most that were held at once since the last `Device.release`.
    """

    total_bytes: int
    in_use_bytes: int
    held_bytes: int
    peak_bytes: int


class DeviceEvent(Protocol):
    """A point in the device's order."""

    def record(self) -> None:
        """Put it behind all that the device has been given so far."""
        ...

    def wait(self) -> None:
        """Return once the device has passed it; at once if it was never recorded."""
        ...

    def has_passed(self) -> bool:
        """Tell whether `wait` would return at once."""
        ...


class DeviceGraph(Protocol):
    """Work that was captured once."""

    def replay(self) -> None:
        """Give it to the device again: the same kernels, over the same addresses."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


class Device(Protocol):
    """Where a rank computes.

    Attributes:
        torch: As torch names it.
        shares_memory: Tensors on it are the host's memory: there is nothing to copy or to wait for.
        has_graphs: Work can be captured.
    """

    torch: torch.device
    shares_memory: bool
    has_graphs: bool

    def staging(self, num_bytes: int) -> Tensor:
        """Return zeros in host memory, `[num_bytes]` uint8, that the device can copy by itself."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Give the device a copy, to or from staging memory.

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
            work: Launches kernels on tensors that live as long as the graph. It asks nothing of the
                device, and its second run is that which is captured.

        Returns:
            The graph, and what the captured run returned: tensors that each replay fills.

        Raises:
            RuntimeError: It cannot be captured.
        """
        ...

    def synchronize(self) -> None:
        """Return once the device has done all that it was given."""
        ...

    def memory(self) -> DeviceMemory | None:
        """Look at its memory; None if that is the host's."""
        ...

    def release(self) -> None:
        """Give back what is kept for further tensors, and look for the peak from here on."""
        ...


def device_of(device: torch.device, *, has_graphs: bool = True) -> Device:
    """Return the device that torch names; `has_graphs` False has nothing captured on it.

    Raises:
        ConfigError: It is older than what kernels are compiled for.
    """
    if device.type != "cuda":
        return HostDevice(device)
    major, minor = capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        raise ConfigError(
            f"{device} is a {torch.cuda.get_device_name(device)} of compute capability "
            f"{major}.{minor}, and the kernels need 8.0 (A100, RTX 30 and later): use another "
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
        """See `Device`: pinned, as only from such memory a copy does not hold up the host."""
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `Device`."""
        target.copy_(source, non_blocking=True)

    def event(self) -> DeviceEvent:
        """See `Device`."""
        return _CudaEvent()

    def capture(self, work: Callable[[], T]) -> tuple[DeviceGraph, T]:
        """See `Device`.

        The run before it compiles kernels and makes what libraries keep for a stream. Other
        threads may use the device meanwhile: only this one's calls are held to what can be
        captured.
        """
        if self._side is None:
            self._side = torch.cuda.Stream(self.torch)  # type: ignore[no-untyped-call]
        if not self._num_graphs:  # torch takes no pool again whose graphs have all been given back
            self._pool = torch.cuda.graph_pool_handle()
        here = torch.cuda.current_stream(self.torch)
        graph = torch.cuda.CUDAGraph()
        self._side.wait_stream(here)
        with torch.cuda.stream(self._side):
            work()
            # An object that dies while work is captured may free device memory, which is an error.
            torch.cuda.synchronize(self.torch)
            gc.collect()
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
        """See `Device`; held is what torch's allocator has of the driver, split or not."""
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
