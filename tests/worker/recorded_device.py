"""A device whose work is done on the CPU, and which notices what a real one would get wrong.

Copies are done at once, but what they read and write is looked at again when the host has waited
for them: whoever changes their source before, or reads their target, is told. A graph records the
operations of a run one by one, with the addresses that they read; a replay runs these, no Python.
What a graph computed is destroyed by the replay of another one, as they share memory. Memory that
is watched looks to others as it did at the last point that the host has waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from pdserve.worker.device import DeviceMemory

T = TypeVar("T")
_Point: TypeAlias = "tuple[int, Tensor | None]"

_HOST_READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"}
_HOST_READS |= {"nonzero", "equal", "allclose", "is_nonzero"}
_DYNAMIC = ("nonzero", "masked_select", "_local_scalar_dense", "unique", "lift_fresh", "equal")


class RecordedError(AssertionError):
    """A real device would have computed something else, without a word."""


class CannotBeCapturedError(RuntimeError):
    """A real device would have refused to capture it."""


class RecordedDevice:
    """See `pdserve.worker.device.Device`.

    Attributes:
        replays: Index of each graph that was replayed, in the order of their captures.
        copies: Bytes of each copy.
    """

    torch = torch.device("cpu")
    shares_memory = False

    def __init__(self, *, has_graphs: bool = True) -> None:
        self.has_graphs = has_graphs
        self.replays: list[int] = []
        self.copies: list[int] = []
        self._staging: set[int] = set()
        self._all_staging: list[Tensor] = []
        self._pending: list[_Copy] = []
        self._graphs: list[_Graph] = []
        self._is_capturing = False
        self._num_points = self._num_passed = 0
        self._watched: tuple[Tensor, Tensor] | None = None

    def staging(self, num_bytes: int) -> Tensor:
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        self._all_staging.append(memory)  # no other memory shall have its address
        self._staging.add(memory.untyped_storage()._cdata)
        return memory

    def copy(self, target: Tensor, source: Tensor) -> None:
        if self._is_capturing:
            raise RecordedError("a copy to or from the host was captured: it is of one step alone")
        if not self._staging & {_storage(target), _storage(source)}:
            raise RecordedError("a copy between host and device needs staging memory")
        self.copies.append(source.nbytes)
        self._pending.append(_Copy(target, source, leaves=_storage(target) in self._staging))

    def event(self) -> RecordedEvent:
        return RecordedEvent(self)

    def capture(self, work: Callable[[], T]) -> tuple[_Graph, T]:
        work()
        recorder = _Recorder(self._staging)
        self._is_capturing = True
        try:
            with _NoHostReads(), recorder:
                results = work()
        finally:
            self._is_capturing = False
        graph = _Graph(self, len(self._graphs), recorder)
        self._graphs.append(graph)
        return graph, results

    def synchronize(self) -> None:
        self.complete(len(self._pending))
        self.passed(self.point())

    def watch(self, memory: Tensor) -> Tensor:
        """Return what others find in `memory` of this device; it changes as the host waits."""
        self._watched = memory, memory.clone()
        return self._watched[1]

    def point(self) -> _Point:
        """What the device has been given so far, and what is in its memory behind that."""
        self._num_points += 1
        return self._num_points, None if self._watched is None else self._watched[0].clone()

    def passed(self, point: _Point) -> None:
        """The host knows that the device has come there."""
        number, memory = point
        if self._watched is not None and memory is not None and number > self._num_passed:
            self._num_passed = number
            self._watched[1].copy_(memory)

    def memory(self) -> DeviceMemory | None:
        return None

    def release(self) -> None:
        pass

    @property
    def num_pending(self) -> int:
        """Copies that the host has not waited for."""
        return len(self._pending)

    def complete(self, num: int) -> None:
        """The first `num` copies are over."""
        done, self._pending = self._pending[:num], self._pending[num:]
        for copy in done:
            copy.complete()

    def replayed(self, graph: _Graph) -> None:
        """A graph runs: what the others left is gone."""
        self.replays.append(graph.index)
        for each in self._graphs:
            each.scramble()


class RecordedEvent:
    """Stands behind what the device had been given when it was recorded."""

    def __init__(self, device: RecordedDevice) -> None:
        self._device = device
        self._behind: list[_Copy] = []
        self._point: _Point = (0, None)

    def record(self) -> None:
        self._behind = list(self._device._pending)
        self._point = self._device.point()

    def wait(self) -> None:
        pending = self._device._pending
        left = [copy for copy in pending if copy not in self._behind]
        self._device.complete(len(pending) - len(left))
        self._device.passed(self._point)

    def has_passed(self) -> bool:
        return not any(copy in self._behind for copy in self._device._pending)


class _Copy:
    def __init__(self, target: Tensor, source: Tensor, *, leaves: bool) -> None:
        self._target, self._source, self._leaves = target, source, leaves
        self._content = source.clone()
        if leaves:
            target.view(torch.uint8).fill_(0xA5)  # the host would find what was there before
        else:
            target.copy_(source)

    def complete(self) -> None:
        if self._leaves:
            self._target.copy_(self._content)
        elif not torch.equal(self._source, self._content):
            raise RecordedError("staging memory was filled again before the device had copied it")


class _Outside:
    """A tensor that a graph reads by its address, and does not keep alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._view = tensor.storage_offset(), tensor.size(), tensor.stride()
        self._dtype = tensor.dtype

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise RecordedError("a graph reads memory that was given back since it was captured")
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._view)


class _Recorder(TorchDispatchMode):
    """Writes operations down while they run."""

    def __init__(self, staging: set[int]) -> None:
        super().__init__()
        self._staging = staging
        self._made: dict[int, Tensor] = {}
        self.operations: list[tuple[Any, Any, Any, list[Tensor | None]]] = []

    @property
    def made(self) -> list[Tensor]:
        """One tensor of each storage that the run has allocated."""
        return list(self._made.values())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would be imported for that, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = _tensors((args, *kwargs.values()))
        is_masked = name.startswith("index") and any(t.dtype == torch.bool for t in given[1:])
        if name.startswith(_DYNAMIC) or is_masked:
            raise CannotBeCapturedError(f"{name} asks the device for a value")
        if self._staging & {_storage(each) for each in given}:
            raise RecordedError(f"{name} reads or writes the host's memory")
        kept = self._keep(args), {key: self._keep(each) for key, each in kwargs.items()}
        known = {_storage(each) for each in given}
        result = func(*args, **kwargs)
        outputs: list[Tensor | None] = []
        for tensor in _tensors(result):
            is_fresh = _storage(tensor) not in known
            outputs.append(tensor if is_fresh else None)
            if is_fresh:
                self._made[_storage(tensor)] = tensor
        self.operations.append((func, *kept, outputs))
        return result

    def _keep(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return argument if _storage(argument) in self._made else _Outside(argument)
        return [*map(self._keep, argument)] if isinstance(argument, tuple | list) else argument


class _NoHostReads(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _HOST_READS:
            raise CannotBeCapturedError(f"{func.__name__} waits for the device")
        return func(*args, **(kwargs or {}))


class _Graph:
    def __init__(self, device: RecordedDevice, index: int, recorder: _Recorder) -> None:
        self.index = index
        self._device = device
        self._operations = recorder.operations
        self._made = recorder.made
        self._has_results = True
        self.is_closed = False

    def replay(self) -> None:
        if self.is_closed:
            raise RecordedError("a graph that was given back is replayed")
        self._device.replayed(self)
        for func, args, kwargs, outputs in self._operations:
            result = func(*map(_found, args), **{key: _found(each) for key, each in kwargs.items()})
            results = result if isinstance(result, tuple | list) else [result]
            tensors = [each for each in results if torch.is_tensor(each)]
            for kept, tensor in zip(outputs, tensors, strict=True):
                if kept is not None:
                    kept.copy_(tensor)
        self._has_results = True

    def scramble(self) -> None:
        """Another graph's replay has used its memory."""
        for tensor in self._made if self._has_results else ():
            tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
        self._has_results = False

    def close(self) -> None:
        self.is_closed = True


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors of arguments or results. torch's own walk takes most of a capture."""
    if isinstance(value, tuple | list):
        return [tensor for each in value for tensor in _tensors(each)]
    return [value] if isinstance(value, torch.Tensor) else []


def _found(argument: Any) -> Any:
    """Return an argument of an operation with the tensors that lie outside its graph."""
    if isinstance(argument, _Outside):
        return argument.tensor()
    if isinstance(argument, tuple | list):
        return [_found(each) for each in argument]
    return argument


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
