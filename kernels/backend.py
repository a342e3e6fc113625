"""A kernel backend: the implementation of all operations on one kind of device.

A backend is a value, a table of functions and classes. Missing entries are the reference's, in
plain torch; an entry that cannot run a call raises `NotTakenError`, and the reference runs it
(`registry`). To add one, write a module with ``load(device, progress) -> KernelBackend``, and add
its line to `registry.BACKENDS`.

A backend for serving is *batch invariant*, bit for bit, like that of the CPU: a row of any result
depends only on that row's own inputs, not on the other rows, their number, the number of threads,
the chunks a prompt was cut in, or the ids of the blocks. Each element has one accumulation order,
fixed by K or by the positions of the context. This makes the tokens of disaggregated and colocated
serving equal. The reference and the backends of fast numerics do not guarantee it.
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
from pdserve.kernels.reference.moe import PLAIN, ExpertForm, PackedExperts


class NotTakenError(Exception):
    """A backend does not support these shapes or dtypes; the message says which it supports.

    Raised before anything is written. The message contains only values fixed by model and
    configuration, none that varies from step to step, because each message is logged once.
    """


class KernelsUnavailableError(Exception):
    """A backend cannot be used on this machine; the message says why."""


class MakeLinear(Protocol):
    """Makes a `PackedLinear` from the same arguments."""

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
    """Makes `PackedExperts` from the same arguments."""

    def __call__(
        self,
        num_experts: int,
        width: int,
        inner: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        form: ExpertForm = PLAIN,
    ) -> PackedExperts:
        """Allocate them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBackend(Ops):
    """The operations, and the classes whose objects are made once and called often.

    A half layer is made from the backend itself, so that it can run the backend's own operations in
    turn if it has no combined call: ``kernels.mlp(kernels, weights)``.

    Attributes:
        name: Its name in logs.
        description: For `pdserve doctor`: the kind of backend, and its location.
        arch, sources, compiler: What the bits of results depend on besides the arguments: the
            device's instructions, a hash of the kernels (`hash_of_sources`), their compiler, and
            the libraries that they call.
        keeps_fp8: Whether ``linear`` and ``experts`` keep an `Fp8Weight` in FP8, or else widen it.
        linear: A weight in a prepared layout.
        heads: The same for one weight per attention head; its argument is ``[H, N, K]``.
        experts: The same for a layer's experts.
        mlp: The feed-forward half of a layer.
        attention: The attention half of a layer.
        sampling: How tokens are chosen.
    """

    name: str
    description: str
    arch: str = ""
    sources: str = ""
    compiler: str = ""
    keeps_fp8: bool = False
    linear: MakeLinear = PackedLinear
    heads: Callable[[Tensor], PackedHeads] = PackedHeads
    experts: MakeExperts = PackedExperts
    mlp: Callable[[Ops, MlpWeights], Mlp] = Mlp
    attention: Callable[[Ops, AttentionWeights], Attention] = Attention
    sampling: SamplingOps = field(default_factory=SamplingOps)

    def linear_of(
        self, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> PackedLinear:
        """Prepare a whole weight, ``[N, K]``, with its bias, ``[N]``; see `PackedLinear`."""
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
