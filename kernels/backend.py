"""A kernel backend: the implementation of all operations on one kind of device.

A backend is a value, a table of functions and classes. What its author leaves out is the
reference's, in plain torch; a twin that cannot run a call raises `NotTakenError`, and the
reference runs it (`registry`). To add one: a module with ``load(device, progress) ->
KernelBackend``, and its line in `registry.BACKENDS`.

A backend for serving is *batch invariant*, bit for bit, as that of the CPU is: a row of any result
depends on that row's own inputs alone, not on the other rows, their number, the number of threads,
the chunks a prompt was cut in, or the ids of the blocks. Each element has one accumulation order,
fixed by K or by the positions of the context. That is what makes the tokens of disaggregated and of
colocated serving the same. The reference promises no such thing, nor do those of fast numerics.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pdserve.kernels.ops import Ops, SamplingOps
from pdserve.kernels.reference.halves import Attention, AttentionWeights, Mlp, MlpWeights
from pdserve.kernels.reference.linear import PackedLinear
from pdserve.kernels.reference.mla import PackedHeads
from pdserve.kernels.reference.moe import PackedExperts


class NotTakenError(Exception):
    """A twin does not take these shapes or dtypes; the message says which it takes.

    Raised before anything is written. The message names what the model and the configuration fix,
    never what varies from step to step: each message is logged once.
    """


class KernelsUnavailableError(Exception):
    """A backend cannot be used on this machine; the message says why."""


class MakeLinear(Protocol):
    """Makes a `PackedLinear`, whose arguments these are."""

    def __call__(
        self,
        out_features: int,
        in_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        has_bias: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> PackedLinear:
        """Allocate it."""
        ...


class MakeExperts(Protocol):
    """Makes `PackedExperts`, whose arguments these are."""

    def __call__(
        self, num_experts: int, width: int, inner: int, *, dtype: torch.dtype, device: torch.device
    ) -> PackedExperts:
        """Allocate them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBackend(Ops):
    """The operations, and what is made once and called often.

    A half layer is made of the backend itself, so that what it does not do in fewer calls, it does
    by the backend's own operations in turn: ``kernels.mlp(kernels, weights)``.

    Attributes:
        name: As in logs.
        description: For `pdserve doctor`: what it is, and where it lies.
        arch, sources, compiler: What the bits of results depend on, beside its arguments: what the
            device multiplies with, a hash of the kernels (`hash_of_sources`), what compiled
            them, and the libraries they call.
        linear: A weight laid out once.
        heads: One weight per attention head, likewise; its argument is ``[H, N, K]``.
        experts: A layer's experts, likewise.
        mlp: A half layer.
        attention: The other half.
        sampling: What is asked of it only where logits are not in the host's memory.
    """

    name: str
    description: str
    arch: str = ""
    sources: str = ""
    compiler: str = ""
    linear: MakeLinear = PackedLinear
    heads: Callable[[Tensor], PackedHeads] = PackedHeads
    experts: MakeExperts = PackedExperts
    mlp: Callable[[Ops, MlpWeights], Mlp] = Mlp
    attention: Callable[[Ops, AttentionWeights], Attention] = Attention
    sampling: SamplingOps = field(default_factory=SamplingOps)

    def linear_of(
        self, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> PackedLinear:
        """Lay out a whole weight, ``[N, K]``, with its bias, ``[N]``; see `PackedLinear`."""
        layer = self.linear(
            *weight.shape,
            dtype=weight.dtype,
            device=weight.device,
            has_bias=bias is not None,
            out_dtype=out_dtype,
        )
        layer.write(0, weight)
        if bias is not None:
            layer.write_bias(0, bias)
        return layer


REFERENCE = KernelBackend(
    name="reference", description="torch's own operations", compiler=f"torch {torch.__version__}"
)


def hash_of_sources(folder: Path) -> str:
    """Return one hash of a backend's kernels and their tables."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in {".py", ".h", ".cpp"}:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
