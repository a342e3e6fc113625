"""What the device gives at best: memory, matrix products, and the time between small kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.gpu.timing import (
    DEVICE,
    IS_DRY,
    Experiments,
    sized,
    time_eager,
    time_in_graph,
)
from pdserve.kernels.cuda.norm import rms_norm

NUM_BYTES = sized(1 << 30, 1 << 16)
SIDE = sized(8192, 64)
NODES = sized(200, 2)


@triton.jit
def sum_stream(x, out, block: tl.constexpr, steps: tl.constexpr):  # noqa: ANN001, ANN201
    """Read so many words one after another, and keep their sum."""
    first = tl.program_id(0).to(tl.int64) * (block * steps)
    word = tl.arange(0, block)
    total = tl.zeros([block], tl.int32)
    for step in range(steps):
        total += tl.load(x + first + step * block + word)
    tl.store(out + tl.program_id(0), tl.sum(total.to(tl.int64), 0))


@triton.jit
def count_up(x, overlaps: tl.constexpr, works: tl.constexpr):  # noqa: ANN001, ANN201
    """Add one to a cell of this program, after the kernel before has written it; or nothing."""
    if overlaps:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if works:
        at = x + tl.program_id(0)
        tl.store(at, tl.load(at) + 1)


def random_words(num_bytes: int) -> Tensor:
    """Return random int32: zeros would need less power."""
    return torch.randint(-(1 << 31), 1 << 31, (num_bytes // 4,), dtype=torch.int32, device=DEVICE)


def copied() -> dict[str, Any]:
    """Rate at which torch copies on the device, read and written bytes together."""
    source, target = random_words(NUM_BYTES), random_words(NUM_BYTES)
    timing = time_eager(lambda _: target.copy_(source))
    assert torch.equal(source, target)
    return timing.row(gb_per_s=timing.gb_per_s(2 * NUM_BYTES))


def written() -> dict[str, Any]:
    """Rate of filling memory."""
    target = random_words(NUM_BYTES)
    timing = time_eager(lambda _: target.fill_(0x5A5A1234))
    return timing.row(gb_per_s=timing.gb_per_s(NUM_BYTES))


def read(block: int, steps: int, warps: int) -> dict[str, Any]:
    """Rate of reading memory, for one way to cut it up."""
    x = random_words(NUM_BYTES)
    programs = x.numel() // (block * steps)
    out = torch.zeros(programs, dtype=torch.int64, device=DEVICE)

    def call(_: int) -> None:
        sum_stream[(programs,)](x, out, block=block, steps=steps, num_warps=warps)

    timing = time_eager(call, budget_s=0.15)
    wanted, found = (int(t.sum(dtype=torch.int64)) & 0xFFFFFFFF for t in (x, out))
    assert found == wanted, "the sum of what was read is wrong"
    return timing.row(gb_per_s=timing.gb_per_s(NUM_BYTES))


def multiplied(dtype: torch.dtype) -> dict[str, Any]:
    """Rate of torch's product of two large matrices, on random data."""
    a, b = torch.randn(2, SIDE, SIDE, device=DEVICE).to(dtype)
    out = torch.empty_like(a)
    timing = time_eager(lambda _: torch.matmul(a, b, out=out), calls=4, budget_s=1.0)
    return timing.row(tflop_per_s=timing.tflop_per_s(2 * SIDE**3))


def node(programs: int, *, overlaps: bool, works: bool) -> dict[str, Any]:
    """Time of a kernel among others like it in a graph, each of which depends on the last."""
    cells = torch.zeros(programs, dtype=torch.int32, device=DEVICE)
    options = {"launch_pdl": True} if overlaps and not IS_DRY else {}

    def call(_: int) -> None:
        count_up[(programs,)](
            cells, overlaps=overlaps and not IS_DRY, works=works, num_warps=4, **options
        )

    timing = time_in_graph(call, calls=NODES)
    row = timing.row()
    if works and not IS_DRY:
        wanted = min(NODES, 3) + NODES * (1 + 2 * timing.repetitions)
        row["each_waited"] = bool((cells == wanted).all())
    return row


def launched() -> dict[str, Any]:
    """Host time of a launch, of a wrapped kernel, of a torch operation and of a graph's replay."""
    cells = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    x, weight = torch.randn(1, 4096, device=DEVICE), torch.randn(4096, device=DEVICE)

    def triton_kernel() -> None:
        count_up[(1,)](cells, overlaps=False, works=True, num_warps=4)

    found = {
        "triton_us": _host_us(triton_kernel),
        "rms_norm_us": _host_us(lambda: rms_norm(x, weight, 1e-5)),
        "torch_add_us": _host_us(lambda: cells.add_(1)),
    }
    if not IS_DRY:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(NODES):
                triton_kernel()
        found[f"replay_of_{NODES}_nodes_us"] = _host_us(graph.replay, calls=20)
    return found


def _host_us(call: Callable[[], object], calls: int = 300) -> float:
    """Best of five times that the host needs to queue a call."""
    calls = sized(calls, 2)
    best = float("inf")
    for _ in range(5):
        _synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    _synchronize()
    return round(best * 1e6, 2)


def _synchronize() -> None:
    if not IS_DRY:
        torch.cuda.synchronize()


def run(limit_s: float) -> dict[str, Any]:
    """Run the part."""
    experiments = Experiments("peaks", limit_s)
    experiments.run("copy", copied)
    experiments.run("write", written)
    blocks = sized((1024, 2048, 4096), (256,))
    for block, steps, warps in ((b, s, w) for b in blocks for s, w in ((4, 4), (8, 4), (8, 8))):
        experiments.run(
            f"read block {block} x {steps}, {warps} warps",
            lambda: read(block, steps, warps),  # noqa: B023
        )
    experiments.run("matmul bf16", lambda: multiplied(torch.bfloat16))
    experiments.run("matmul fp16", lambda: multiplied(torch.float16))
    for programs in (1, sized(132, 2)):
        for works in (False, True):
            for overlaps in (False, True):
                name = f"node of {programs}, {'add' if works else 'empty'}"
                experiments.run(
                    name + (", overlapping" if overlaps else ""),
                    lambda: node(programs, overlaps=overlaps, works=works),  # noqa: B023
                )
    experiments.run("host", launched)
    return experiments.results
