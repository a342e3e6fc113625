"""What one engine step costs beside the forward, and how close decoding is to the limit.

Prints one JSON object. Two questions, one run:

`overhead`: an engine core in its own process decodes a batch; the time between two
outputs at the client, detokenized, minus the model's forward, is what everything else
costs (plan, IPC, input preparation, sampling, output, detokenization).

`decode`: time per output token against one bare pass over all linear layers of the model
at the same number of rows, by the same kernels, in this process. torch's own linear is
timed beside it.

    python benchmarks/engine.py [--threads N] [--rounds N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.shapes import SMOLLM2_135M, write_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine.core_client import CoreClient
    from pdserve.text.load import Text

# "limits": the linear layers at 512 rows, and one reading of all weights, on that machine.
FIELD_NOTES = {
    "limits_ms": {"prefill 512": 115, "one decode step": 5.7},
    "source": "vLLM 0.32, bf16, the same shape, 2 cores, measured on another day",
    "tpot_ms_concurrency_1": {"2 cores": 13.7, "1 core": 15.9},
    "tok_per_s_32_in_256_out_16_at_a_time": {"2 cores": 637, "1 core": 473},
}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", default="inline", choices=["inline", "multiprocess"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory:
        model = write_model(Path(directory) / "m", SMOLLM2_135M)
        result = asyncio.run(_measure(model, args))
    print(json.dumps(result, indent=1))


async def _measure(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
    from pdserve.engine.core_client import launch_engine
    from pdserve.text.load import load_text

    config = EngineConfig(
        model=ModelConfig(model=str(model), load_format="dummy", max_model_len=2048),
        cache=CacheConfig(kv_cache_memory_bytes=1 << 30, enable_prefix_caching=False),
        parallel=ParallelConfig(
            num_threads=args.threads, distributed_executor_backend=args.backend
        ),
    )
    text = load_text(config.model)
    client = await launch_engine(config, progress=lambda text: None)
    limits = _Limits(args.threads)
    rows: dict[int, list[dict[str, float]]] = {1: [], 4: [], 16: [], 32: []}
    try:
        await client.wait_ready()
        await _decode(client, text, batch=2, num_tokens=8, round_id=0)
        # Each round measures the engine and the limit one after the other, so that both
        # see the machine in the same mood.
        for round_id in range(1, args.rounds + 1):
            for batch, found in rows.items():
                run = await _decode(client, text, batch=batch, num_tokens=96, round_id=round_id)
                run["bare_ms"] = limits.ours(batch)
                run["torch_ms"] = limits.torchs(batch)
                found.append(run)
    finally:
        await client.close(timeout_s=2.0)
    prefill = {"ours_ms": limits.ours(512), "torch_ms": limits.torchs(512)}
    table = {}
    for batch, found in rows.items():
        best = min(found, key=lambda run: run["tpot_ms"] / run["bare_ms"])
        table[str(batch)] = {
            "tpot_ms": round(best["tpot_ms"], 3),
            "forward_ms": round(best["forward_ms"], 3),
            "overhead_ms": round(statistics.median(r["overhead_ms"] for r in found), 3),
            "bare_linear_pass_ms": round(best["bare_ms"], 3),
            "torch_linear_pass_ms": round(best["torch_ms"], 3),
            "tpot_over_bare_pass": round(
                statistics.median(r["tpot_ms"] / r["bare_ms"] for r in found), 3
            ),
            "tok_per_s": round(batch / best["tpot_ms"] * 1e3, 1),
        }
    return {
        "benchmark": "engine",
        "shape": "SmolLM2-135M, random weights, bf16",
        "environment": environment(args.threads),
        "executor": args.backend,
        "goals": {
            "overhead_ms": {"1": 1.0, "32": 3.0},
            "tpot_over_bare_pass": {"1": 1.3, "16": 1.5},
        },
        "batch": table,
        "linear_layers_at_512_rows": {name: round(ms, 1) for name, ms in prefill.items()},
        "field_notes": FIELD_NOTES,
    }


def environment(num_threads: int) -> dict[str, Any]:
    """The machine and the versions a figure belongs to."""
    import torch

    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "threads": num_threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


async def _decode(
    client: CoreClient, text: Text, *, batch: int, num_tokens: int, round_id: int
) -> dict[str, float]:
    """Decode `batch` requests together; times of the steps in which all of them ran."""
    from pdserve.text.output import OutputProcessor
    from pdserve.wire.ids import RequestId
    from pdserve.wire.request import GenerateRequest
    from pdserve.wire.sampling import SamplingParams

    arrivals: list[float] = []
    marks: list[tuple[float, float, int]] = []
    started = 0

    async def one(index: int) -> None:
        nonlocal started
        request = GenerateRequest(
            request_id=RequestId(f"{round_id}-{batch}-{index}-{time.monotonic_ns()}"),
            prompt_token_ids=[300 + index + 37 * position for position in range(32)],
            sampling=SamplingParams(
                max_tokens=num_tokens, seed=index, temperature=0.0, ignore_eos=True
            ),
            arrival_s=time.time(),
        )
        processor = OutputProcessor(text.tokenizer)
        count = 0
        async for output in client.generate(request):
            processor.push(output.new_token_ids, output.finish_reason)
            if count == 0:
                started += 1
            count += 1
            if started == batch and count < num_tokens:
                arrivals.append(time.perf_counter())
            stats = client.stats
            if index == 0 and started == batch and stats is not None and count < num_tokens:
                marks.append((time.perf_counter(), stats.forward_s, stats.num_steps))

    await asyncio.gather(*(one(index) for index in range(batch)))
    (start, forward, steps), (end, forward_end, steps_end) = marks[2], marks[-1]
    num_steps = steps_end - steps
    tpot = (end - start) / num_steps
    forward_each = (forward_end - forward) / num_steps
    return {
        "tpot_ms": tpot * 1e3,
        "forward_ms": forward_each * 1e3,
        "overhead_ms": (tpot - forward_each) * 1e3,
    }


class _Limits:
    """One pass over all linear layers of the model, nothing else."""

    def __init__(self, num_threads: int) -> None:
        import torch

        from pdserve.kernels.registry import kernels_on

        torch.set_num_threads(num_threads)
        torch.set_grad_enabled(False)
        hidden, inter = 576, 1536
        shapes = [(960, hidden), (hidden, hidden), (2 * inter, hidden), (hidden, inter)] * 30
        shapes.append((49152, hidden))
        self._weights = [torch.randn(n, k).to(torch.bfloat16) for n, k in shapes]
        kernels = kernels_on(torch.device("cpu"))
        self._packed = [kernels.linear_of(weight) for weight in self._weights]

    def ours(self, rows: int) -> float:
        """Milliseconds of a pass by our kernels, the best of several."""
        return self._time(rows, lambda x, index: self._packed[index](x))

    def torchs(self, rows: int) -> float:
        """Milliseconds of a pass by torch's linear, the best of several."""
        import torch

        return self._time(
            rows, lambda x, index: torch.nn.functional.linear(x, self._weights[index])
        )

    def _time(self, rows: int, run: Callable[[Any, int], object]) -> float:
        import torch

        inputs = {
            k: torch.randn(rows, k).to(torch.bfloat16)
            for k in {weight.shape[1] for weight in self._weights}
        }
        best = float("inf")
        for _ in range(7):
            start = time.perf_counter()
            for index, weight in enumerate(self._weights):
                run(inputs[weight.shape[1]], index)
            best = min(best, time.perf_counter() - start)
        return best * 1e3


if __name__ == "__main__":
    main()
