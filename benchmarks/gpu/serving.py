"""A checkpoint of Llama-3.1-8B's shape, served on one device: by one engine, and by P and D.

The weights are random and lie in the host's memory, as files. `pdserve bench serve` asks for
prompts of random tokens, few at a time and many. P and D share the device, each has half of its
memory, and they compete for its time: what shows is what a hand-over costs, not what it gains.
With ``--vllm PROGRAM`` vLLM serves the same checkpoint, with its own defaults but for the longest
request and the number of requests at a time.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from benchmarks.deployments import Processes, processes, until_ready
from benchmarks.gpu import llama
from benchmarks.gpu.llama import DTYPE, STD
from benchmarks.gpu.timing import DEVICE, IS_DRY, Experiments, sized
from pdserve.models.arch import ModelArch

# A tokenizer has more words than there are in a dry run's shape.
ARCH = sized(llama.ARCH, dry=msgspec.structs.replace(llama.ARCH, vocab_size=320))
CONCURRENCIES = sized({1024: (1, 8, 64), 128: (1, 8)}, dry={40: (1, 2)})
"""Tokens of a prompt -> requests at a time."""
NUM_PROMPTS = {1: sized(8, dry=3), 2: 4, 8: 32, 64: 128}
OUTPUT = sized(128, dry=8)
MAX_MODEL_LEN = sized(4096, dry=512)
MAX_NUM_SEQS = 128
_SHARED_MEMORY = Path("/dev/shm")
_FILE_BYTES = 2 << 30
_START_S = 180.0
_KEPT = re.compile(r"completed|failed|duration|output_throughput|(mean|median|p99)_(ttft|itl)_ms")
_TOLD = re.compile(r"\breq \S+ .*status=.*")
_NOTED = re.compile(r".*(GiB|WARNING|ERROR).*")


def weights_of(arch: ModelArch) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes that a Llama's checkpoint has."""
    hidden, inner = arch.hidden_size, arch.intermediate_size
    queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (arch.vocab_size, hidden),
        "lm_head.weight": (arch.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for number in range(arch.num_layers):
        layer = f"model.layers.{number}"
        found |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (queries, hidden),
            f"{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"{layer}.self_attn.v_proj.weight": (keys, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    return found


def write_checkpoint(folder: Path) -> dict[str, Any]:
    """Write random weights, made on the device, a configuration and a tokenizer."""
    from tests.tiny_models import write_tokenizer

    began = time.perf_counter()
    torch.manual_seed(1)
    files: dict[str, str] = {}
    part: dict[str, torch.Tensor] = {}
    shapes = weights_of(ARCH)
    for name, shape in shapes.items():
        tensor = torch.empty(shape, dtype=DTYPE, device=DEVICE)
        part[name] = (tensor.fill_(1.0) if len(shape) == 1 else tensor.normal_(std=STD)).cpu()
        if sum(each.nbytes for each in part.values()) > _FILE_BYTES or name == list(shapes)[-1]:
            file = f"model-{len(list(folder.glob('*.safetensors'))):05}.safetensors"
            save_file(part, folder / file)
            files |= dict.fromkeys(part, file)
            part = {}
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": [ARCH.architecture],
        "model_type": "llama",
        "hidden_size": ARCH.hidden_size,
        "intermediate_size": ARCH.intermediate_size,
        "num_hidden_layers": ARCH.num_layers,
        "num_attention_heads": ARCH.num_heads,
        "num_key_value_heads": ARCH.num_kv_heads,
        "head_dim": ARCH.head_dim,
        "vocab_size": ARCH.vocab_size,
        "max_position_embeddings": ARCH.max_position_embeddings,
        "rms_norm_eps": ARCH.rms_norm_eps,
        "rope_theta": ARCH.rope.theta,
        "tie_word_embeddings": ARCH.tie_embeddings,
        "torch_dtype": str(DTYPE).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, ARCH.vocab_size)
    if not IS_DRY:
        torch.cuda.empty_cache()
    size = sum(each.stat().st_size for each in folder.glob("*.safetensors"))
    return {"gib": round(size / (1 << 30), 2), "seconds": round(time.perf_counter() - began, 1)}


def run(limit_s: float, vllm: str | None = None) -> dict[str, Any]:
    """Run the part.

    Args:
        vllm: vLLM's command, to be measured as well.
    """
    experiments = Experiments("serving", limit_s)
    with tempfile.TemporaryDirectory(dir=_SHARED_MEMORY) as folder:
        model = Path(folder) / "model"
        model.mkdir()
        if experiments.run("checkpoint", lambda: write_checkpoint(model)) is None:
            return experiments.results
        deployments = {"one engine": _one, "P and D": _pair}
        if vllm is not None:
            deployments["vLLM"] = functools.partial(_vllm, vllm)
        for name, start in deployments.items():
            if experiments.left_s <= 0:
                break
            logs = Path(folder) / name.replace(" ", "-")
            logs.mkdir()
            asyncio.run(_serve(experiments, name, start, model, logs))
    return experiments.results


async def _one(started: Processes, model: Path) -> str:
    url, _ = await started.start("serve", "serve", *_flags(model, 0.9))
    return url


async def _pair(started: Processes, model: Path) -> str:
    url, _ = await started.start("proxy", "proxy", "--port", "0")
    # One after the other: each takes its share of what it finds.
    for role in ("prefill", "decode"):
        await started.start(role, role, *_flags(model, 0.45), "--proxy", url)
    await until_ready([url])
    return url


async def _vllm(program: str, started: Processes, model: Path) -> str:
    flags = ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)]
    flags += ["--gpu-memory-utilization", "0.9", "--generation-config", "vllm"]
    url, _ = await started.start_vllm("vllm", program, str(model), *flags)
    return url


def _flags(model: Path, share: float) -> list[str]:
    """What every engine is told."""
    device = sized("cuda", dry="cpu")
    flags = [str(model), "--port", "0", "--device", device, "--max-num-seqs", str(MAX_NUM_SEQS)]
    flags += ["--max-model-len", str(MAX_MODEL_LEN)]
    memory = ["--kv-cache-memory-bytes", "64MiB", "--num-threads", "1"]
    return flags + sized(["--gpu-memory-utilization", str(share)], dry=memory)


async def _serve(experiments: Experiments, name: str, start: Any, model: Path, logs: Path) -> None:
    """Start a deployment, and ask it with each number of requests in flight."""
    try:
        async with processes(logs) as started:
            began = time.monotonic()
            async with asyncio.timeout(_START_S):
                url = await start(started, model)
            seconds = round(time.monotonic() - began, 1)
            told = [
                line.strip()
                for log in sorted(logs.glob("*.log"))
                for line in log.read_text().splitlines()
                if _NOTED.fullmatch(line)
            ]
            experiments.run(f"{name}: start", lambda: {"seconds": seconds, "told": told})
            for num_in, concurrencies in CONCURRENCIES.items():
                for concurrency in concurrencies:
                    bench = functools.partial(_bench, url, model, num_in, concurrency, logs)
                    experiments.run(f"{name}: {num_in} in, {concurrency} at a time", bench)
    except (SystemExit, TimeoutError) as ended:
        why = repr(ended)[:3000]
        tails = {log.stem: log.read_text()[-3000:] for log in logs.glob("*.log")}
        experiments.run(name, lambda: {"error": why, "logs": tails})


def _bench(url: str, model: Path, num_in: int, concurrency: int, folder: Path) -> dict[str, Any]:
    """Return figures of one `pdserve bench serve`, and the last request's line of each process."""
    file = f"{concurrency}.json"
    command = [sys.executable, "-m", "pdserve", "bench", "serve", "--base-url", url]
    command += ["--tokenizer", str(model), "--dataset-name", "random", "--no-progress"]
    command += ["--random-input-len", str(num_in), "--random-output-len", str(OUTPUT)]
    command += ["--num-prompts", str(NUM_PROMPTS[concurrency])]
    command += ["--max-concurrency", str(concurrency), "--num-warmups", str(concurrency)]
    command += ["--seed", str(concurrency), "--temperature", "0", "--allow-invalid"]
    command += ["--save-result", "--result-dir", str(folder), "--result-filename", file]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(ended.stderr[-500:])
    result = json.loads((folder / file).read_text())
    lines = {log.stem: _TOLD.findall(log.read_text())[-1:] for log in folder.glob("*.log")}
    return {key: value for key, value in result.items() if _KEPT.fullmatch(key)} | {"lines": lines}
