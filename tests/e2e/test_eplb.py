"""Experts move between ranks under load, and no token notices."""

from __future__ import annotations

import functools
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

import httpx
import pytest

from tests.e2e.conftest import pd_deployment
from tests.e2e.deployment import Deployment
from tests.e2e.test_equality import assert_kv_moved
from tests.tiny_models import VOCAB_SIZE, one_thread, write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

NUM_STREAMS = 8
NUM_TOKENS = 12
INTERVAL = 20
# Every stream begins a prompt in every window, so that a window has some 2000 tokens: the
# ratio of few is noise.
PROMPTS = [
    [3 + (17 * i + 29 * n + i * i * (n + 3)) % (VOCAB_SIZE - 3) for i in range(250 + n)]
    for n in range(64)
]
# All on the first of two ranks, and none of those that have the redundant copies at the start.
HOT_EXPERTS = [4, 5, 6, 7]
HOT_SCALE = 4.0
FLAGS = [
    "--dtype", "float32", "--kv-cache-memory-bytes", "32MiB", "--enable-expert-parallel",
    "--enable-eplb", "--eplb-config",
    f'{{"num_redundant_experts": 4, "window_size": {INTERVAL}, "step_interval": {INTERVAL}}}',
]  # fmt: skip


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral of 16 experts whose routers like four of them best."""
    from safetensors.torch import load_file, save_file

    directory = tmp_path_factory.mktemp("skewed")
    write_tiny_model(directory, "mixtral", num_local_experts=16)
    weights = load_file(directory / "model.safetensors")
    routers = [name for name in weights if name.endswith("block_sparse_moe.gate.weight")]
    assert len(routers) == 3
    for name in routers:
        weights[name][HOT_EXPERTS] *= HOT_SCALE
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("size", [pytest.param("-tp", marks=pytest.mark.matrix), "-dp"])
def test_a_skewed_load_is_balanced_while_it_is_served_and_every_token_is_right(
    size: str, skewed: Path, tmp_path: Path
) -> None:
    deployment = Deployment(tmp_path)
    try:
        deployment.start(
            "serve", "serve", str(skewed), "--port", "0", "--num-threads", "1", size, "2", *FLAGS
        )
        deployment.wait()
        assert math.isnan(deployment.metric("serve", "pdserve_expert_balance_ratio"))
        with Load(deployment.url("serve")) as load:
            # One prompt after the other, 24 steps: one window is over, its experts have moved.
            for _ in range(2):
                load.serve(1)
            found = deployment.metrics("serve")
            windows = {found["pdserve_expert_rebalancings_total"]: _ratio(found)}
            assert list(windows) == [1]
            for _ in load.serving():
                found = deployment.metrics("serve")
                windows[found["pdserve_expert_rebalancings_total"]] = _ratio(found)
        longest_s = deployment.info("serve")["stats"]["experts"]["longest_s"]
        deployment.wait_nothing_held("serve", timeout_s=20.0)
    finally:
        deployment.end()
    load.check(skewed)
    print(
        f"\n{size} 2: busiest rank to mean, window by window as seen: "
        f"{' '.join(f'{int(num)}: {windows[num]:.3f}' for num in sorted(windows))}; "
        f"{found['pdserve_expert_moves_total']:.0f} experts "
        f"({found['pdserve_expert_moved_bytes_total'] / 1e6:.1f} MB) moved in "
        f"{found['pdserve_expert_rebalancing_seconds_total'] * 1e3:.1f} ms, after one step in "
        f"{longest_s * 1e3:.1f} ms at most"
    )
    assert windows[1] > 1.3, "the load is not skewed"
    assert max(windows) > 4
    assert windows[max(windows)] <= 1.1


@pytest.mark.matrix
def test_so_is_every_token_where_both_engines_of_a_pair_balance(
    skewed: Path, tmp_path: Path
) -> None:
    with pd_deployment(tmp_path, skewed, "-tp", "2", *FLAGS) as deployment:
        with Load(deployment.url("proxy")) as load:
            for _ in load.serving():
                pass
        assert_kv_moved(deployment, sum(map(len, PROMPTS)))
        for name in ("prefill", "decode"):
            found = deployment.metrics(name)
            assert found["pdserve_expert_rebalancings_total"] > 0
            assert found["pdserve_expert_moves_total"] > 0
        deployment.wait_nothing_held("prefill", "decode", timeout_s=20.0)
    load.check(skewed)


def _ratio(metrics: dict[str, float]) -> float:
    return metrics["pdserve_expert_balance_ratio"]


class Load:
    """Prompts, each completed once, over connections that stay."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=60)
        self._outputs: list[list[int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def serve(self, num_prompts: int) -> None:
        """Complete the next ones, one after the other."""
        first = len(self._outputs)
        self._outputs += map(self._complete, PROMPTS[first : first + num_prompts])

    def serving(self) -> Iterator[None]:
        """Complete all that are left, `NUM_STREAMS` at a time; yields until they are done."""
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            left = [pool.submit(self._complete, p) for p in PROMPTS[len(self._outputs) :]]
            while not all(request.done() for request in left):
                yield
                time.sleep(0.02)
            self._outputs += [request.result() for request in left]
        yield

    def check(self, model: Path) -> None:
        """Every output is the greedy one of transformers."""
        outputs = tuple(map(tuple, self._outputs))
        assert [len(output) for output in outputs] == [NUM_TOKENS] * len(PROMPTS)
        assert outputs == _likeliest(model, outputs)

    def _complete(self, prompt: list[int]) -> list[int]:
        body = {
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = self._client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return token_ids


@functools.cache
@one_thread()
def _likeliest(model: Path, outputs: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """The likeliest token at each place, all before it given: greedy outputs are these."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = []
    with torch.no_grad():
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            logits = reference(torch.tensor([[*prompt, *output]])).logits[0]
            found.append(tuple(logits[len(prompt) - 1 : -1].argmax(-1).tolist()))
    return tuple(found)
