"""Collectives as custom operations `pdserve::*`, with fakes, so that torch.compile sees through.

An operation names its group, because an operator's arguments are tensors and plain values;
`remember` ties the name to what carries the group's tensors in this process. Called through
`Group`, which skips groups of one. Where nothing is being compiled, a call goes straight to the
implementation: torch's dispatcher costs a decode step of 61 sums 0.6 ms of 12.

A sum adds the ranks' values in rank order, in fp32 for narrower types, whatever carries them: all
ranks get the same bits, and a row's bits do not depend on the other rows. Gloo's own sums promise
neither, nor do NCCL's, whose order depends on the algorithm that it chooses by size: both only move
the values, and each rank adds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.compiler import is_compiling

from pdserve.errors import InternalError
from pdserve.parallel.shared_memory import SUMMED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from pdserve.parallel.shared_memory import SharedExchange

# Up to this size all ranks send everything to all, and each adds everything; beyond it, each adds a
# part. The bits are the same. For GPUs it is an estimate: what NVLink carries while a second NCCL
# call starts.
_GATHERED_BYTES = {"cpu": 64 << 10, "cuda": 512 << 10}


@dataclass(frozen=True)
class _Carrier:
    """What carries a group's tensors.

    Attributes:
        device: The process group for tensors of the world's device.
        host: The one for CPU tensors, on gloo.
        shared: For CPU tensors, instead of `host`, where all ranks are on one host.
        sum_ranks: Adds the values of all ranks (`kernels.ops`).
    """

    ranks: tuple[int, ...]
    device: dist.ProcessGroup
    host: dist.ProcessGroup
    shared: SharedExchange | None
    sum_ranks: Callable[[Tensor], Tensor]

    def group_of(self, x: Tensor) -> dist.ProcessGroup:
        return self.device if x.is_cuda else self.host

    def sharing(self, x: Tensor) -> SharedExchange | None:
        return None if x.is_cuda else self.shared


_carriers: dict[str, _Carrier] = {}


def remember(
    name: str,
    ranks: tuple[int, ...],
    *,
    device: dist.ProcessGroup,
    host: dist.ProcessGroup,
    shared: SharedExchange | None,
    sum_ranks: Callable[[Tensor], Tensor],
) -> None:
    """Tie `name` to what carries and adds the tensors of `ranks`, until `forget`."""
    _carriers[name] = _Carrier(ranks, device, host, shared, sum_ranks)


def forget(name: str) -> None:
    """Untie `name`; unknown names are ignored."""
    _carriers.pop(name, None)


_library = torch.library.Library("pdserve", "FRAGMENT")  # type: ignore[no-untyped-call]


def _define(
    schema: str, implementation: Callable[..., Tensor], fake: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Register an operation, and return what calls it."""
    name = schema.split("(", 1)[0]
    _library.define(schema)  # type: ignore[no-untyped-call]
    for key in ("CPU", "CUDA"):
        _library.impl(name, implementation, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"pdserve::{name}", fake, lib=_library)
    operation = getattr(torch.ops.pdserve, name).default

    def call(*args: object) -> Tensor:
        found: Tensor = operation(*args) if is_compiling() else implementation(*args)
        return found

    return call


def _all_reduce(x: Tensor, group: str) -> Tensor:
    carrier = _carriers[group]
    shared = carrier.sharing(x)
    if shared is not None and x.dtype in SUMMED:
        return shared.all_reduce(x)
    num_ranks = len(carrier.ranks)
    flat = x.contiguous().view(-1)
    if x.nbytes <= _GATHERED_BYTES[x.device.type]:
        return carrier.sum_ranks(_gather(flat, carrier)).view(x.shape)
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % num_ranks))
    parts = torch.empty_like(padded)
    dist.all_to_all_single(parts, padded, group=carrier.group_of(x))
    sums = _gather(carrier.sum_ranks(parts.view(num_ranks, -1)), carrier)
    return sums.view(-1)[: flat.numel()].view(x.shape).clone()


def _all_gather(x: Tensor, dim: int, group: str) -> Tensor:
    carrier = _carriers[group]
    dim %= x.dim()
    shared = carrier.sharing(x)
    if shared is not None:
        return shared.all_gather(x, dim)
    parts = _gather(x.contiguous().view(-1), carrier).view(len(carrier.ranks), *x.shape)
    return torch.cat(parts.unbind(0), dim=dim) if dim else parts.flatten(0, 1)


def _reduce_scatter(x: Tensor, dim: int, group: str) -> Tensor:
    carrier = _carriers[group]
    num_ranks = len(carrier.ranks)
    dim %= x.dim()
    _check_divides(x.shape, dim, num_ranks)
    shared = carrier.sharing(x)
    if shared is not None and x.dtype in SUMMED:
        return shared.reduce_scatter(x, dim)
    cut = (*x.shape[:dim], num_ranks, x.shape[dim] // num_ranks, *x.shape[dim + 1 :])
    parts = x.reshape(cut).movedim(dim, 0).contiguous()
    if not x.numel():
        return parts.new_empty(parts.shape[1:])
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=carrier.group_of(x))
    return carrier.sum_ranks(received.view(num_ranks, -1)).view(parts.shape[1:])


def _all_to_all(x: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
    carrier = _carriers[group]
    if len(sent) != len(carrier.ranks) or len(received) != len(sent) or sum(sent) != len(x):
        raise InternalError(
            f"{len(x)} rows cannot go as {sent} to {len(carrier.ranks)} ranks, {received} coming"
        )
    shared = carrier.sharing(x)
    if shared is not None:
        return shared.all_to_all(x, received, sent)
    out = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=carrier.group_of(x))
    return out


def _broadcast(x: Tensor, source: int, group: str) -> Tensor:
    carrier = _carriers[group]
    shared = carrier.sharing(x)
    if shared is not None:
        return shared.broadcast(x, source)
    out = x.clone(memory_format=torch.contiguous_format)
    dist.broadcast(out, src=carrier.ranks[source], group=carrier.group_of(x))
    return out


def _gather(flat: Tensor, carrier: _Carrier) -> Tensor:
    """Return every rank's `flat` `[n]`, as `[num_ranks, n]`."""
    out = flat.new_empty((len(carrier.ranks), flat.numel()))
    if flat.numel():
        dist.all_gather_single(out.view(-1), flat, group=carrier.group_of(flat))
    return out


def _check_divides(shape: Sequence[int], dim: int, num_ranks: int) -> None:
    if shape[dim] % num_ranks:
        raise InternalError(
            f"dim {dim} of {tuple(shape)} cannot be cut for {num_ranks} ranks: pad it"
        )


def _num_ranks(group: str) -> int:
    return len(_carriers[group].ranks)


def _fake_all_gather(x: Tensor, dim: int, group: str) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= _num_ranks(group)
    return x.new_empty(shape)


def _fake_reduce_scatter(x: Tensor, dim: int, group: str) -> Tensor:
    shape = list(x.shape)
    _check_divides(shape, dim, _num_ranks(group))
    shape[dim] //= _num_ranks(group)
    return x.new_empty(shape)


all_reduce = _define(
    "all_reduce(Tensor x, str group) -> Tensor", _all_reduce, lambda x, group: x.new_empty(x.shape)
)
all_gather = _define(
    "all_gather(Tensor x, int dim, str group) -> Tensor", _all_gather, _fake_all_gather
)
reduce_scatter = _define(
    "reduce_scatter(Tensor x, int dim, str group) -> Tensor",
    _reduce_scatter,
    _fake_reduce_scatter,
)
all_to_all = _define(
    "all_to_all(Tensor x, SymInt[] received, SymInt[] sent, str group) -> Tensor",
    _all_to_all,
    lambda x, received, sent, group: x.new_empty((sum(received), *x.shape[1:])),
)
broadcast = _define(
    "broadcast(Tensor x, int source, str group) -> Tensor",
    _broadcast,
    lambda x, source, group: x.new_empty(x.shape),
)
