"""Outputs of drawn schemas from random weights at temperature 1, through P and D and through one.

What a mask lets through comes; so every output must be what its schema says, or, where the limit
cut it off, the beginning of such a one. Both ways must give the same tokens.

    python -m tests.schemas [--number N] [--seed N] [--drafts]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from pdserve.config.schema import ModelConfig
from pdserve.text.grammar import GrammarCompiler
from pdserve.text.load import load_text
from tests.e2e.conftest import pd_deployment
from tests.schemas.drawn import draw_schemas, why_wrong
from tests.tiny_models import write_tiny_model

MAX_TOKENS = 160
AT_ONCE = 12
DRAFTING = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 5,
}


def main() -> int:
    """Print what came of it; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drafts", action="store_true", help="have P and D draft, not the one")
    args = parser.parse_args()
    env = {"PDSERVE_SPECULATIVE_CONFIG": json.dumps(DRAFTING)} if args.drafts else {}
    schemas = draw_schemas(args.number, first_seed=args.seed)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        model = write_tiny_model(Path(directory) / "model", "llama", tie_word_embeddings=True)
        compiler = GrammarCompiler(load_text(ModelConfig(model=str(model))))
        with (
            pd_deployment(Path(directory), model, with_serve=True, pair_env=env) as running,
            httpx.Client(timeout=120.0) as client,
            ThreadPoolExecutor(AT_ONCE) as pool,
        ):
            urls = [running.url("proxy"), running.url("serve")]

            def check(number: int) -> tuple[str | None, str]:
                found = [ask(client, url, schemas[number], number) for url in urls]
                if isinstance(found[0], str):
                    return f"it was refused: {found[0]}", "refused"
                if found[0] != found[1]:
                    return f"P and D: {found[0]}, one engine: {found[1]}", "differs"
                return why_wrong(schemas[number], found[0], compiler), found[0]["finish_reason"]

            results = list(pool.map(check, range(args.number)))
    wrong = [(schemas[n], why) for n, (why, _) in enumerate(results) if why is not None]
    for schema, why in wrong[:10]:
        print(f"{why}\n  of {schema}", file=sys.stderr)
    ends = [end for _, end in results]
    print(
        f"{args.number - len(wrong)} of {args.number} outputs follow their schemas, through P and "
        f"D as through one engine ({ends.count('stop')} whole, {ends.count('length')} cut off), in "
        f"{time.monotonic() - start_s:.0f} s"
    )
    return 1 if wrong else 0


def ask(client: httpx.Client, url: str, schema: dict[str, Any], seed: int) -> dict[str, Any] | str:
    """One output; or why there is none."""
    body = {
        "prompt": [3 + (seed * 7 + position) % 200 for position in range(4 + seed % 40)],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        "max_tokens": MAX_TOKENS,
        "temperature": 1.0,
        "seed": seed,
        "return_token_ids": True,
    }
    answer = client.post(f"{url}/v1/completions", json=body)
    if answer.status_code != 200:
        return answer.text
    [choice] = answer.json()["choices"]
    return {name: choice[name] for name in ("text", "token_ids", "finish_reason")}


if __name__ == "__main__":
    sys.exit(main())
