"""`python -m tests.worker.same_drafts --requests 10000`: do drafts change a token, or a bit of one?

Random requests, of every sampling parameter, are served by an engine that drafts nothing, and by
engines that draft, each in its own way; what they put out must be the same, log-probabilities
to the bit. Prompts repeat themselves, predictions are right for a while, or never. The model is
tiny and random, and the boxed one where its heads draft.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.config.boxed import boxed_heads_dir, boxed_model_dir
from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pdserve.config.speculative import SpeculativeConfig
from pdserve.parallel.group import World
from pdserve.parallel.mesh import MeshShape
from pdserve.wire.sampling import SamplingParams
from tests.worker.draft_models import write_eagle, write_pair
from tests.worker.driver import TINY
from tests.worker.spread import FREE_ROWS, Outcome, Requests, config_of, serve

if TYPE_CHECKING:
    from collections.abc import Mapping

VOCAB = TINY["vocab_size"]
AT_ONCE = 100
EOS = 7
DRAFTERS = {
    "ngram 1": SpeculativeConfig(
        method="ngram", num_speculative_tokens=1, prompt_lookup_min=1, prompt_lookup_max=5
    ),
    "ngram 7": SpeculativeConfig(method="ngram", prompt_lookup_min=1, prompt_lookup_max=5),
    "ngram 15": SpeculativeConfig(method="ngram", num_speculative_tokens=15),
    "suffix": SpeculativeConfig(method="suffix", suffix_decoding_max_spec_factor=3.0),
}
BY_HEADS = {
    f"medusa {num}": SpeculativeConfig(
        method="medusa", model=str(boxed_heads_dir()), num_speculative_tokens=num
    )
    for num in (1, 4)
}
"""Of the boxed model: heads of a model that knows nothing would never be right."""


def draw(rng: random.Random) -> tuple[list[int], SamplingParams]:
    """A prompt, and what to sample behind it."""
    part = rng.choices(range(8, VOCAB), k=rng.randint(1, 12))
    prompt = (part * rng.randint(1, 6))[: rng.randint(1, 60)]
    fields: dict[str, Any] = {
        "temperature": rng.choice((0.0, 0.0, 0.3, 0.8, 1.0, 1.7)),
        "ignore_eos": rng.random() < 0.5,
    }
    optional = {
        "top_k": rng.randint(1, 60),
        "top_p": rng.uniform(0.1, 1.0),
        "min_p": rng.uniform(0.0, 0.3),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.uniform(0.7, 1.5),
        "logit_bias": {rng.randrange(VOCAB): rng.uniform(-9, 9) for _ in range(3)},
        "allowed_token_ids": tuple(rng.sample(range(VOCAB), 40)),
        "bad_words": ((rng.randrange(VOCAB),), (rng.randrange(VOCAB), rng.randrange(VOCAB))),
        "stop_token_ids": (rng.randrange(VOCAB),),
        "min_tokens": rng.randint(0, 9),
        "logprobs": rng.randint(0, 5),
    }
    fields |= {name: value for name, value in optional.items() if rng.random() < 0.2}
    fields["max_tokens"] = rng.randint(max(1, fields.get("min_tokens", 0)), 40)
    return prompt, SamplingParams(
        seed=rng.randrange(-(2**40), 2**40), eos_token_ids=(EOS,), **fields
    )


def predicted(rng: random.Random, tokens: list[int]) -> list[int]:
    """A prediction of `tokens`: none, all of them, some, or others."""
    share = rng.choice((0.0, 0.7, 0.95, 1.0))
    if rng.random() < 0.2:
        return []
    return [token if rng.random() < share else rng.randrange(VOCAB) for token in tokens]


def compare(
    directory: Path, drafters: Mapping[str, SpeculativeConfig], num_requests: int, seed: int
) -> dict[str, dict[str, int]]:
    """Serve so many requests in each way; return how many differ, and how drafts did."""
    found = {
        name: {"differing": 0, "drafted": 0, "accepted": 0, "preemptions": 0} for name in drafters
    }
    for first in range(0, num_requests, AT_ONCE):
        rng = random.Random(f"{seed} {first}")
        requests: Requests = {
            f"r{index}": draw(rng) for index in range(first, min(first + AT_ONCE, num_requests))
        }
        wanted = serve(World.alone(), _config(directory, SpeculativeConfig()), requests)
        for name, speculative in drafters.items():
            predictions = {each: predicted(rng, wanted.tokens[each]) for each in requests}
            told = serve(
                World.alone(),
                _config(directory, speculative),
                requests,
                predictions,
                row_costs=FREE_ROWS,
            )
            counts = found[name]
            counts["differing"] += sum(_differs(each, told, wanted) for each in requests)
            counts["drafted"] += told.num_drafted
            counts["accepted"] += told.num_accepted
            counts["preemptions"] += told.num_preemptions
    return found


def _differs(name: str, one: Outcome, other: Outcome) -> bool:
    return one.tokens[name] != other.tokens[name] or one.logprobs[name] != other.logprobs[name]


def _config(directory: Path, speculative: SpeculativeConfig) -> EngineConfig:
    config = config_of(
        directory,
        MeshShape(),
        cache=CacheConfig(num_gpu_blocks_override=24, block_size=8),
        scheduler=SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=96),
        speculative=speculative,
    )
    if not (directory / "model.safetensors").exists():
        return config
    model = ModelConfig(model=str(directory), max_model_len=128)
    return msgspec.structs.replace(config, model=model)


def write_model(directory: Path) -> None:
    """A tiny model whose requests fit into few blocks."""
    config = {**TINY, "max_position_embeddings": 128}
    (directory / "config.json").write_text(json.dumps(config))


def write_with_drafters(directory: Path) -> tuple[Path, dict[str, SpeculativeConfig]]:
    """Such a model, and what has KV of its own and drafts for it: one that is right, and heads."""
    target, draft = write_pair(directory, num_layers=8, max_position_embeddings=128)
    paths = {"draft_model": draft}
    for method in ("eagle", "eagle3"):
        paths[method] = directory / method
        write_eagle(paths[method], method)
    return target, {
        method: SpeculativeConfig(method=method, model=str(path), num_speculative_tokens=5)
        for method, path in paths.items()
    }


def main() -> int:
    """Print what came of it; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="pdserve-drafts-") as directory:
        write_model(Path(directory))
        found = compare(Path(directory), DRAFTERS, args.requests, args.seed)
        found |= compare(*write_with_drafters(Path(directory)), args.requests, args.seed)
    found |= compare(boxed_model_dir(), BY_HEADS, args.requests, args.seed)
    wall_s = round(time.perf_counter() - start_s, 1)
    print(json.dumps({"requests": args.requests, "wall_s": wall_s, "drafters": found}, indent=1))
    return 1 if any(counts["differing"] for counts in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
