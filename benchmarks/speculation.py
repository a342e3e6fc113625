"""What drafts bring, and what they cost those who have none.

Prints one JSON object. `alone`: the time per token of one request, without drafts and with those of
up to 3, 7 and 15 tokens, for a text that is an edit of the request's prediction (a change of some
tokens every sixty or so, as in files that are rewritten) and for one that nobody can guess; and as
`neighbours` the gaps of fifteen requests without a prediction beside one that has one. `boxed`: the
time per token of the boxed model with drafts by its own Medusa heads, greedy and at temperature 1,
and with drafts by heads that are always wrong. `by_model`: the same of a model of which only the
first layers do anything, with drafts by a smaller one that has just those, and by a model and a
head that are always wrong.

Whatever is drafted, the tokens must be those without: that is checked on the way.

    python -m benchmarks.speculation [alone] [boxed] [by_model] [--threads N] [--rounds N]
                                     [--tokens N] [--model DIR] [--drafted N,N,...]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks.engine import environment
from benchmarks.shapes import SMOLLM2_135M, write_model

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pdserve.config.schema import EngineConfig
    from pdserve.engine.core_client import CoreClient
    from pdserve.wire.request import GenerateRequest

_Way = TypeVar("_Way", int, str)

BATCH = 16
GAP = 60
"""Tokens from one change of a prediction to the next, on average."""
VARIED = 0.25
"""Standard deviation of weights with which the likeliest tokens are not always the same."""
PAIR_LAYERS = 3
"""Of thirty, in the model that is drafted for by a smaller one: with its output head, a third of
what is read for a token."""
BOXED_PROMPTS = (
    "Disaggregated serving means",
    "The prefill engine",
    "Once upon a time",
    "<|bos|><|user|>What is a KV cache?<|eos|><|assistant|>",
    "<|bos|><|user|>Tell me a short story.<|eos|><|assistant|>",
    "<|bos|><|user|>Who are you?<|eos|><|assistant|>",
)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--model", type=Path, help="a checkpoint for `alone`, in place of 135M")
    parser.add_argument("--drafted", default="0,3,7,15", help="lengths for `alone`, 0 among them")
    parser.add_argument("parts", nargs="*", help="of what is measured; all if none is named")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    result: dict[str, Any] = {
        "benchmark": "speculation",
        "environment": environment(args.threads),
        "tokens": args.tokens,
        "goals": {
            "alone.edits.7.speed_up": 3.5,
            "alone.unguessable.speed_up": 0.98,
            "neighbours.itl_p99_over_plain": 1.10,
            "boxed.greedy.speed_up": 1.8,
            "boxed.greedy.wrong.speed_up": 0.97,
            "by_model.greedy.wrong model.speed_up": 0.97,
            "by_model.greedy.wrong head.speed_up": 0.97,
        },
    }
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory:
        for part in args.parts or PARTS:
            print(f"{part} ...", file=sys.stderr, flush=True)
            configs, compare = PARTS[part]
            engines = configs(Path(directory), args)
            result |= asyncio.run(_measure(engines, compare, args))
    print(json.dumps(result, indent=1))


async def _measure(
    configs: dict[Any, EngineConfig],
    compare: Callable[[dict[Any, CoreClient], argparse.Namespace], Awaitable[dict[str, Any]]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Compare engines that all run at the same time."""
    from pdserve.engine.core_client import launch_engine

    clients = {
        way: await launch_engine(config, progress=lambda text: None)
        for way, config in configs.items()
    }
    try:
        for client in clients.values():
            await client.wait_ready()
        return await compare(clients, args)
    finally:
        for client in clients.values():
            await client.close(timeout_s=2.0)


def _lookup_configs(directory: Path, args: argparse.Namespace) -> dict[int, EngineConfig]:
    """By how many tokens a draft may have."""
    model, load_format = args.model, "auto"
    if model is None:
        shape = {**SMOLLM2_135M, "initializer_range": VARIED}
        model, load_format = write_model(directory / "m", shape), "dummy"
    lengths = sorted({int(length) for length in args.drafted.split(",")} | {0})
    return {length: _config(model, load_format, length, args.threads) for length in lengths}


def _config(model: Path, load_format: str, drafted: int, num_threads: int) -> EngineConfig:
    from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
    from pdserve.config.speculative import SpeculativeConfig

    return EngineConfig(
        model=ModelConfig(model=str(model), load_format=load_format, max_model_len=2048),
        cache=CacheConfig(kv_cache_memory_bytes=1 << 30, enable_prefix_caching=False),
        parallel=ParallelConfig(num_threads=num_threads),
        speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=drafted)
        if drafted
        else SpeculativeConfig(),
    )


def _boxed_configs(directory: Path, args: argparse.Namespace) -> dict[str, EngineConfig]:
    """The boxed model without drafts, with those of its heads, and with wrong ones."""
    import torch
    from safetensors.torch import save_file

    from pdserve.config.boxed import boxed_heads_dir, boxed_model_dir
    from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
    from pdserve.config.speculative import SpeculativeConfig

    shape = json.loads((boxed_heads_dir() / "config.json").read_text())
    size, num_heads = shape["hidden_size"], shape["num_heads"]
    wrong = directory / "heads"  # that guess a token that stands at no place of an answer
    wrong.mkdir()
    (wrong / "config.json").write_text(json.dumps({**shape, "num_hidden_layers": 1}))
    tensors = {"lm_heads.0.weight": torch.zeros(shape["vocab_size"], size)}
    for head in range(num_heads):
        tensors[f"blocks.{head}.layers.0.weight"] = torch.zeros(size, size)
    save_file(tensors, wrong / "model.safetensors")
    heads = {
        f"heads {drafted}": (boxed_heads_dir(), drafted) for drafted in range(2, num_heads + 1)
    }
    ways = {"off": SpeculativeConfig()} | {
        way: SpeculativeConfig(method="medusa", model=str(model), num_speculative_tokens=drafted)
        for way, (model, drafted) in {**heads, "wrong": (wrong, num_heads)}.items()
    }
    return {
        way: EngineConfig(
            model=ModelConfig(model=str(boxed_model_dir()), max_model_len=1024),
            cache=CacheConfig(kv_cache_memory_bytes=1 << 26, enable_prefix_caching=False),
            parallel=ParallelConfig(num_threads=args.threads),
            speculative=speculative,
        )
        for way, speculative in ways.items()
    }


def _pair_configs(directory: Path, args: argparse.Namespace) -> dict[str, EngineConfig]:
    """A model drafted for by its own first layers, by those of another one, and by a random head.

    Args:
        directory: Where they are written.
    """
    from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
    from pdserve.config.speculative import SpeculativeConfig

    shape = {**SMOLLM2_135M, "initializer_range": VARIED}
    small = {**shape, "num_hidden_layers": PAIR_LAYERS}
    model = _write_weights(write_model(directory / "large", shape), seed=0)
    right = _write_weights(write_model(directory / "small", small), seed=0)
    wrong = _write_weights(write_model(directory / "other", small), seed=1)
    head = _write_head(write_model(directory / "head", {**shape, "num_hidden_layers": 1}))
    ways = {"off": SpeculativeConfig()} | {
        name: SpeculativeConfig(method=method, model=str(path), num_speculative_tokens=drafted)
        for name, method, path, drafted in (
            ("model 3", "draft_model", right, 3),
            ("model 7", "draft_model", right, 7),
            ("wrong model", "draft_model", wrong, 7),
            ("wrong head", "eagle", head, 7),
        )
    }
    return {
        way: EngineConfig(
            model=ModelConfig(model=str(model), max_model_len=2048),
            cache=CacheConfig(kv_cache_memory_bytes=1 << 28, enable_prefix_caching=False),
            parallel=ParallelConfig(num_threads=args.threads),
            speculative=speculative,
        )
        for way, speculative in ways.items()
    }


def _write_weights(directory: Path, *, seed: int) -> Path:
    """Write random weights of which layers from `PAIR_LAYERS` on add nothing."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    shape = json.loads((directory / "config.json").read_text())
    size, inner, head_dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q, kv = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
    matrices = {
        "self_attn.q_proj": (q, size),
        "self_attn.k_proj": (kv, size),
        "self_attn.v_proj": (kv, size),
        "self_attn.o_proj": (size, q),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    tensors = {"model.norm.weight": torch.ones(size)}
    embedding = torch.randn(shape["vocab_size"], size, generator=torch.Generator().manual_seed(9))
    tensors["model.embed_tokens.weight"] = embedding * VARIED
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, sizes in matrices.items():
            is_silent = layer >= PAIR_LAYERS and name.endswith(("o_proj", "down_proj"))
            drawn = torch.randn(*sizes, generator=generator) * (0.0 if is_silent else VARIED)
            tensors[f"{prefix}{name}.weight"] = drawn
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(size)
    stored = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(stored, directory / "model.safetensors")
    return directory


def _write_head(directory: Path) -> Path:
    """Write a random EAGLE head."""
    import torch
    from safetensors.torch import load_file, save_file

    path = _write_weights(directory, seed=2) / "model.safetensors"
    size = SMOLLM2_135M["hidden_size"]
    assert isinstance(size, int)
    head = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(path).items()
        if "model.layers.0." in name and "input_layernorm" not in name
    }
    head["fc.weight"] = torch.randn(size, 2 * size).bfloat16()
    save_file(head, path)
    return directory


async def _compare_pairs(
    clients: dict[str, CoreClient], args: argparse.Namespace
) -> dict[str, Any]:
    found = await _compare_ways(clients, [_prompt(index) for index in range(3)], args)
    return {"by_model": found}


async def _compare_boxed(
    clients: dict[str, CoreClient], args: argparse.Namespace
) -> dict[str, Any]:
    from tokenizers import Tokenizer

    from pdserve.config.boxed import boxed_model_dir

    tokenizer = Tokenizer.from_file(str(boxed_model_dir() / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in BOXED_PROMPTS]
    return {"boxed": await _compare_ways(clients, prompts, args)}


async def _compare_ways(
    clients: dict[str, CoreClient], prompts: list[list[int]], args: argparse.Namespace
) -> dict[str, Any]:
    """Answer prompts in each way, greedily and not; the first way drafts nothing."""
    found: dict[str, dict[str, list[_Run]]] = {"greedy": {}, "temperature 1": {}}
    # The first round warms up.
    for round_id in range(args.rounds + 1):
        for index, prompt in enumerate(prompts):
            for kind, runs in found.items():
                temperature = float(kind != "greedy")
                for way, client in clients.items():
                    request = _request(prompt, index, args.tokens, temperature=temperature)
                    run = await _decode(client, request)
                    if round_id:
                        runs.setdefault(way, []).append(run)
                        assert run.tokens == runs["off"][-1].tokens
    return {kind: _alone(runs) for kind, runs in found.items()}


async def _compare(clients: dict[int, CoreClient], args: argparse.Namespace) -> dict[str, Any]:
    plain = clients[0]
    wanted = [
        (await _decode(plain, _request(_prompt(index), index, args.tokens))).tokens
        for index in range(BATCH)
    ]
    edited = [_edited(tokens, seed) for seed, tokens in enumerate(wanted)]
    found: dict[str, dict[int, list[_Run]]] = {"edits": {}, "unguessable": {}}
    gaps: dict[int, list[float]] = {drafted: [] for drafted in clients}
    # Engines take turns, so that all see the machine in the same mood.
    for round_id in range(args.rounds):
        index = round_id % BATCH
        for drafted, client in clients.items():
            for kind, prediction in (("edits", edited[index]), ("unguessable", [])):
                request = _request(
                    _prompt(index),
                    index,
                    args.tokens,
                    prediction,
                    temperature=float(not prediction),
                )
                run = await _decode(client, request)
                found[kind].setdefault(drafted, []).append(run)
                assert run.tokens == found[kind][0][-1].tokens
            runs = await asyncio.gather(
                *(
                    _decode(
                        client,
                        _request(
                            _prompt(each),
                            each,
                            args.tokens,
                            [] if each else edited[0],
                            temperature=float(each > 0),
                        ),
                    )
                    for each in range(BATCH)
                )
            )
            assert runs[0].tokens == wanted[0]
            gaps[drafted] += [gap for run in runs[1:] for gap in run.gaps_ms]
    return {
        "shape": str(args.model or "SmolLM2-135M, random weights, bf16"),
        "alone": {kind: _alone(runs) for kind, runs in found.items()},
        "neighbours": {
            str(drafted): {
                "itl_p50_ms": round(statistics.median(each), 3),
                "itl_p99_ms": round(_p99(each), 3),
                "itl_p50_over_plain": round(
                    statistics.median(each) / statistics.median(gaps[0]), 3
                ),
                "itl_p99_over_plain": round(_p99(each) / _p99(gaps[0]), 3),
            }
            for drafted, each in gaps.items()
        },
    }


def _alone(runs: dict[_Way, list[_Run]]) -> dict[str, dict[str, float]]:
    """Times per token; how much shorter than in the first way, run by run."""
    plain_runs = next(iter(runs.values()))
    tpot = {drafted: min(run.tpot_ms for run in each) for drafted, each in runs.items()}
    return {
        str(drafted): {
            "tpot_ms": round(tpot[drafted], 3),
            "tokens_per_step": round(statistics.mean(run.tokens_per_step for run in each), 2),
            "speed_up": round(
                statistics.median(
                    plain.tpot_ms / run.tpot_ms for plain, run in zip(plain_runs, each, strict=True)
                ),
                3,
            ),
        }
        for drafted, each in runs.items()
    }


class _Run:
    """One answer: its tokens, and when they came."""

    def __init__(self, tokens: list[int], arrivals_s: list[float]) -> None:
        self.tokens = tokens
        self.gaps_ms = [(after - before) * 1e3 for before, after in itertools.pairwise(arrivals_s)]
        self.tpot_ms = (arrivals_s[-1] - arrivals_s[0]) * 1e3 / (len(tokens) - 1)
        self.tokens_per_step = (len(tokens) - 1) / (len(arrivals_s) - 1)


def _prompt(index: int) -> list[int]:
    return [300 + index + 37 * position for position in range(64)]


def _request(
    prompt: list[int],
    seed: int,
    num_tokens: int,
    prediction: list[int] | None = None,
    *,
    temperature: float = 0.0,
) -> GenerateRequest:
    from pdserve.wire.ids import RequestId
    from pdserve.wire.request import GenerateRequest
    from pdserve.wire.sampling import SamplingParams

    return GenerateRequest(
        request_id=RequestId(f"{seed}-{time.monotonic_ns()}"),
        prompt_token_ids=prompt,
        sampling=SamplingParams(
            max_tokens=num_tokens, seed=seed, temperature=temperature, ignore_eos=True
        ),
        arrival_s=time.monotonic(),
        prediction_token_ids=prediction or [],
    )


async def _decode(client: CoreClient, request: GenerateRequest) -> _Run:
    tokens: list[int] = []
    arrivals_s: list[float] = []
    async for output in client.generate(request):
        if output.error:
            raise RuntimeError(output.error)
        if output.new_token_ids:
            tokens += output.new_token_ids
            arrivals_s.append(time.perf_counter())
    return _Run(tokens, arrivals_s)


def _edited(tokens: list[int], seed: int) -> list[int]:
    """What a text was before it was edited: some tokens are others, lacking, or too many."""
    rng = random.Random(seed)
    before: list[int] = []
    at = 0
    while at < len(tokens):
        end = at + rng.randint(GAP // 2, GAP * 3 // 2)
        before += tokens[at:end]
        before += [rng.randrange(1000, 40_000) for _ in range(rng.randint(0, 6))]
        at = end + rng.randint(0, 6)
    return before


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


PARTS = {
    "alone": (_lookup_configs, _compare),
    "boxed": (_boxed_configs, _compare_boxed),
    "by_model": (_pair_configs, _compare_pairs),
}

if __name__ == "__main__":
    main()
