"""What the processes before engine cores use of a core for each token: API servers and the proxy.

The model has one small layer, so that its steps are short, and all streams get a token in each:
what a large model's engine does to its servers with as many requests. Each deployment is asked
twice, and the second time counts. Prints one JSON object; `cpu_us_per_token` is user and system
time over all output tokens of a run, a request's own costs included.

    python -m benchmarks.front [--streams 64] [--tokens 400] [--vllm /path/to/venv/bin/vllm]

With `--vllm` its API server is measured with the same model and requests (see
`benchmarks.serving`), and `over_vllm` is its time over ours: more than 1 is better for us.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.deployments import Asker, processes, until_ready
from benchmarks.engine import environment
from benchmarks.shapes import write_model
from pdserve.bench.records import Planned

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_SHAPE: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
_NUM_IN = 32


@contextlib.asynccontextmanager
async def _deployed(
    name: str, model: Path, directory: Path, args: argparse.Namespace
) -> AsyncIterator[tuple[str, dict[str, psutil.Process]]]:
    """Start a deployment; yields its URL and the processes to measure, by name."""
    seats = ["--max-num-seqs", str(args.streams), "--max-model-len", "4096"]
    flags = [*seats, "--load-format", "dummy", "--port", "0"]
    flags += ["--kv-cache-memory-bytes", "256MiB", "--num-threads", "1"]
    async with processes(directory) as started:
        if name == "serve":
            url, _ = await started.start(name, "serve", str(model), *flags)
            roles = ["API server"]
        elif name == "vllm":
            arguments = [str(model), "--load-format", "dummy", "--dtype", "float32", *seats]
            url, _ = await started.start_vllm(name, args.vllm, *arguments)
            roles = ["API server"]
        else:
            url, _ = await started.start("proxy", "proxy", "--port", "0")
            for role in ("prefill", "decode"):
                await started.start(role, role, str(model), *flags, "--proxy", url)
            await until_ready([url])
            roles = ["proxy", "P's API server", "D's API server"]
        yield url, dict(zip(roles, map(psutil.Process, started.pids), strict=True))


async def _play(url: str, args: argparse.Namespace) -> None:
    plan = [
        Planned(
            index=index,
            prompt=[300 + 7 * index + place for place in range(_NUM_IN)],
            max_tokens=args.tokens,
            at_s=0.0,
        )
        for index in range(args.streams)
    ]
    asker = Asker(url, "front-", may_merge=True)
    try:
        await asker.ask(plan)
    finally:
        asker.close()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _measured(
    name: str, model: Path, directory: Path, args: argparse.Namespace
) -> dict[str, Any]:
    num_tokens = args.streams * args.tokens
    async with _deployed(name, model, directory, args) as (url, roles):
        await _play(url, args)
        before_s = {role: _cpu_s(process) for role, process in roles.items()}
        begun_s = time.monotonic()
        await _play(url, args)
        took_s = time.monotonic() - begun_s
        used = {role: _cpu_s(process) - before_s[role] for role, process in roles.items()}
    return {
        "tok_per_s": round(num_tokens / took_s),
        "cpu_us_per_token": {role: round(1e6 * s / num_tokens, 1) for role, s in used.items()},
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--vllm", help="the `vllm` command to compare with")
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "front", "streams": args.streams, "tokens": args.tokens}
    result["environment"] = environment(1)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory:
        model = write_model(Path(directory) / "m", _SHAPE)
        for name in ("serve", "pd", *(["vllm"] if args.vllm else [])):
            print(name, file=sys.stderr)
            found[name] = asyncio.run(_measured(name, model, Path(directory), args))
    result["deployments"] = found
    if args.vllm:
        theirs, ours = (found[name]["cpu_us_per_token"]["API server"] for name in ("vllm", "serve"))
        result["over_vllm"] = round(theirs / ours, 2)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
