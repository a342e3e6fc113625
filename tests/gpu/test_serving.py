"""Whole deployments whose engines share one CUDA device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.config.boxed import boxed_model_dir
from tests.e2e.conftest import pd_deployment
from tests.e2e.test_equality import PROMPTS, assert_kv_moved, complete_all, complete_alone

if TYPE_CHECKING:
    from pathlib import Path

    import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

FLAGS = ["--device", "cuda", "--dtype", "bfloat16", "--num-gpu-blocks-override", "512"]
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "seed": 11}


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_pd_on_cuda_gives_the_tokens_of_one_engine(
    cuda: torch.device, tmp_path: Path, mode: str
) -> None:
    proxy_flags = ["--kv-mode", mode]
    with pd_deployment(tmp_path, boxed_model_dir(), *FLAGS, proxy_flags=proxy_flags) as deployment:
        greedy = complete_all(deployment.url("proxy"), PROMPTS)
        assert_kv_moved(deployment, sum(map(len, PROMPTS)))
        assert complete_alone(deployment, PROMPTS) == greedy
        sampled = complete_all(deployment.url("proxy"), PROMPTS, **SAMPLED)
        assert sampled != greedy
        assert complete_alone(deployment, PROMPTS, **SAMPLED) == sampled
        deployment.wait_nothing_held("prefill", "decode", timeout_s=20.0)
