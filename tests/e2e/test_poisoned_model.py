"""A model of which one token is NaN, with heads that the native kernels do not take, by P and D."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.e2e.conftest import pd_deployment
from tests.e2e.test_equality import complete
from tests.tiny_models import VOCAB_SIZE, greedy_by_transformers, write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

PROMPTS = [[3 + (17 * i + 5 * n) % 290 for i in range(n)] for n in (3, 40, 200, 700)]
NUM_TOKENS = 24


def test_requests_that_become_nan_fail_alone_on_p_and_on_d(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = write_tiny_model(tmp_path / "model", "llama", head_dim=24)
    expected = greedy_by_transformers(model, PROMPTS, NUM_TOKENS)
    sound = {token for tokens in (*PROMPTS, *expected) for token in tokens}
    poisonous = next(token for token in range(3, VOCAB_SIZE) if token not in sound)
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][poisonous] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})

    with pd_deployment(tmp_path, model, "--max-num-batched-tokens", "128") as deployment:
        url = deployment.url("proxy")

        def fail(body: dict[str, object]) -> httpx.Response:
            return httpx.post(f"{url}/v1/completions", json=body, timeout=120)

        at_p = {"prompt": [*PROMPTS[3][:300], poisonous, *PROMPTS[3][:200]], "max_tokens": 8}
        # The first token is P's; as the second, D computes what the bias has chosen.
        at_d = {"prompt": PROMPTS[1], "max_tokens": 8, "logit_bias": {str(poisonous): 100.0}}
        with ThreadPoolExecutor(16) as pool:
            bad = [pool.submit(fail, body) for _ in range(4) for body in (at_p, at_d)]
            good = [pool.submit(complete, url, p, max_tokens=NUM_TOKENS) for p in PROMPTS]
            assert [each.result() for each in good] == expected
            for answer in bad:
                assert answer.result().status_code == 500, answer.result().text
                assert answer.result().json()["error"]["code"] == "non_finite_logits"
        # Nobody reads a block of theirs, and both engines still serve.
        assert [complete(url, p, max_tokens=NUM_TOKENS) for p in PROMPTS] == expected
        assert deployment.metric("decode", "pdserve_kv_transfer_bytes_total") > 0
        failures = deployment.metrics("proxy")
        for leg in ("prefill", "decode"):
            name = f'pdserve_leg_failures_total{{leg="{leg}",reason="non_finite"}}'
            assert failures[name] == 4
