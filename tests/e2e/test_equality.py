"""The same tokens from transformers, from one engine, and through P and D."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pdserve.config.boxed import boxed_model_dir
from tests.e2e.conftest import pd_deployment
from tests.tiny_models import greedy_by_transformers, margins_by_transformers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.deployment import Deployment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

PROMPTS = [
    [3 + (17 * i + 5 * n) % 311 for i in range(n)] for n in (1, 2, 15, 16, 100, 257, 512, 700)
]
NUM_TOKENS = 64
# The logits' standard deviation is 2.0 for the random model and 2.7 for the boxed one. The
# largest lead that bf16 rounding was seen to turn over is 0.23 (10 of 256 positions of the
# random model; none of the boxed one, whose median lead is 9).
BF16_EPSILON = 0.35


def complete(url: str, prompt: list[int], **fields: Any) -> list[int]:
    """Token ids of one completion."""
    body = {
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120, verify=False)
    assert answer.status_code == 200, answer.text
    token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return token_ids


def complete_all(url: str, prompts: list[list[int]], **fields: Any) -> list[list[int]]:
    """All prompts at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: complete(url, prompt, **fields), prompts))


def assert_kv_moved(deployment: Deployment, num_prompt_tokens: int) -> None:
    """D received KV over the wire and computed no prompt token itself."""
    received = deployment.metric("decode", "pdserve_kv_transfer_bytes_total")
    assert received > 0
    source = "vllm:prompt_tokens_by_source_total"
    found = deployment.metrics("decode")
    computed = [v for k, v in found.items() if k.startswith(source) and "local_compute" in k]
    assert computed == [0.0]
    external = [v for k, v in found.items() if k.startswith(source) and "external_kv" in k]
    assert sum(external) > 0
    assert sum(v for k, v in found.items() if k.startswith(source)) == num_prompt_tokens


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "boxed"])
def test_transformers_serve_and_pd_agree_on_greedy_tokens(
    family: str, model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    model = boxed_model_dir() if family == "boxed" else model_of(family)
    expected = greedy_by_transformers(model, PROMPTS, NUM_TOKENS)
    with pd_deployment(tmp_path, model, "--dtype", "float32", with_serve=True) as deployment:
        assert complete_all(deployment.url("serve"), PROMPTS) == expected
        assert complete_all(deployment.url("proxy"), PROMPTS) == expected
        assert_kv_moved(deployment, sum(map(len, PROMPTS)))
        # Again, now that the prefix caches of all three are warm, one at a time.
        assert [complete(deployment.url("serve"), p) for p in PROMPTS] == expected
        assert [complete(deployment.url("proxy"), p) for p in PROMPTS] == expected
        deployment.wait_nothing_held("serve", "prefill", "decode", timeout_s=20.0)


@pytest.mark.parametrize(
    "flags",
    [
        ["--max-num-batched-tokens", "16"],
        ["--max-num-batched-tokens", "512", "--distributed-executor-backend", "multiprocess"],
    ],
    ids=["chunks of 16", "chunks of 512, rank in its own process"],
)
def test_chunking_changes_no_token(
    flags: list[str], model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    model = model_of("llama")
    expected = greedy_by_transformers(model, PROMPTS, NUM_TOKENS)
    with pd_deployment(
        tmp_path, model, "--dtype", "float32", *flags, with_serve=True
    ) as deployment:
        assert complete_all(deployment.url("serve"), PROMPTS) == expected
        assert complete_all(deployment.url("proxy"), PROMPTS) == expected
        deployment.wait_nothing_held("serve", "prefill", "decode", timeout_s=20.0)


def test_preemption_by_a_small_pool_changes_no_token(
    model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    model = model_of("llama")
    # Each fits with its prompt, no two fit with their whole outputs: 50 blocks of 16.
    prompts = [[3 + (13 * i + 31 * n) % 311 for i in range(97)] for n in range(4)]
    expected = greedy_by_transformers(model, prompts, 400)
    flags = ["--dtype", "float32", "--num-gpu-blocks-override", "50", "--max-model-len", "800"]
    with pd_deployment(tmp_path, model, *flags, with_serve=True) as deployment:
        for name, preempts in (("serve", "serve"), ("proxy", "decode")):
            got = complete_all(deployment.url(name), prompts, max_tokens=400)
            assert got == expected
            assert deployment.info(preempts)["stats"]["num_preemptions"] > 0
        deployment.wait_nothing_held("serve", "prefill", "decode", timeout_s=20.0)


@pytest.mark.parametrize("family", ["llama", "boxed"])
def test_in_bf16_no_token_is_chosen_that_lags_by_more_than_epsilon(
    family: str, model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    model = boxed_model_dir() if family == "boxed" else model_of(family)
    with pd_deployment(tmp_path, model, "--dtype", "bfloat16", with_serve=True) as deployment:
        outputs = complete_all(deployment.url("proxy"), PROMPTS)
        assert complete_all(deployment.url("serve"), PROMPTS) == outputs
    clear = 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        for token_id, (best, lead) in zip(
            output, margins_by_transformers(model, prompt, output), strict=True
        ):
            if lead > BF16_EPSILON:
                assert token_id == best, f"chose {token_id}; {best} leads by {lead:.2f}"
                clear += 1
    assert clear > NUM_TOKENS * len(PROMPTS) // 4, "too few positions were clear to judge"


def test_sampled_tokens_depend_on_the_seed_alone(
    model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """`serve` == P/D in bf16, alone or in a batch: every row is computed independently."""
    sampled: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 1234}
    with pd_deployment(
        tmp_path, model_of("llama"), "--dtype", "bfloat16", with_serve=True
    ) as deployment:
        serve, proxy = deployment.url("serve"), deployment.url("proxy")
        alone = [complete(serve, prompt, **sampled) for prompt in PROMPTS]
        assert complete_all(serve, PROMPTS, **sampled) == alone
        assert complete_all(proxy, PROMPTS, **sampled) == alone
        assert [complete(proxy, prompt, **sampled) for prompt in PROMPTS] == alone
        assert complete(proxy, PROMPTS[3], **{**sampled, "seed": 77}) != alone[3]
