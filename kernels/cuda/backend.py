"""The backend of CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from pdserve.kernels.backend import KernelBackend, KernelsUnavailableError, hash_of_sources
from pdserve.kernels.gates import Activation
from pdserve.kernels.ops import Ops, SamplingOps
from pdserve.kernels.reference.halves import Mlp, MlpWeights


def load(device: torch.device, progress: Callable[[str], None]) -> KernelBackend:
    """Import Triton and the kernels; each is compiled when it is first launched.

    Raises:
        KernelsUnavailableError: Triton is not installed.
    """
    try:
        import triton
    except ImportError as error:
        raise KernelsUnavailableError(f"{error}: install triton") from error
    from pdserve.kernels.cuda import (
        activation,
        attention,
        chunks,
        digest,
        experts,
        gelu,
        halves,
        heads,
        latent,
        linear,
        masks,
        norm,
        ranks,
        rope,
        router,
        rules,
        sampling,
    )

    def make_mlp(ops: Ops, weights: MlpWeights) -> Mlp:
        """Only SiLU is gated inside of a product."""
        is_silu = weights.gate is Activation.SILU
        return halves.make_mlp(ops, weights) if is_silu else Mlp(ops, weights)

    compiler = f"Triton {triton.__version__}"
    return KernelBackend(
        name="cuda",
        description=f"{compiler} kernels",
        arch=_arch(device),
        sources=hash_of_sources(Path(__file__).resolve().parent),
        compiler=compiler,
        rms_norm=norm.rms_norm,
        add_rms_norm=norm.add_rms_norm,
        silu_and_mul=activation.silu_and_mul,
        gelu_and_mul=gelu.gelu_and_mul,
        rope_and_cache=rope.rope_and_cache,
        route=router.route,
        rope_and_latent=rope.rope_and_latent,
        paged_attention=attention.paged_attention,
        latent_attention=latent.latent_attention,
        kv_digests=digest.kv_digests,
        gather_chunks=chunks.gather_chunks,
        scatter_chunks=chunks.scatter_chunks,
        sum_ranks=ranks.sum_ranks,
        keeps_fp8=True,
        linear=linear.CudaLinear,
        heads=heads.CudaHeads,
        sampling=SamplingOps(
            largest=sampling.largest,
            draw=sampling.draw,
            rule=rules.rule,
            note=rules.note,
            mask=masks.mask,
        ),
        experts=experts.CudaExperts,
        mlp=make_mlp,
    )


def _arch(device: torch.device) -> str:
    if device.type != "cuda":
        return "interpreted"
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))
