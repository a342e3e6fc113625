"""Whole deployments whose engines share one CUDA device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.config.boxed import boxed_model_dir
from tests.e2e.conftest import pd_deployment
from tests.e2e.deployment import Deployment
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


def test_p_and_d_on_cuda_have_their_shares_of_its_memory_and_replay_graphs(
    cuda: torch.device, tmp_path: Path
) -> None:
    deployment = Deployment(tmp_path)
    common = [str(boxed_model_dir()), "--port", "0", "--device", "cuda"]
    try:
        deployment.start("proxy", "proxy", "--port", "0")
        deployment.wait("proxy")
        for name in ("prefill", "decode"):  # what others have is measured at the start
            share = ["--gpu-memory-utilization", "0.1", "--proxy", deployment.url("proxy")]
            deployment.start(name, name, *common, *share)
            deployment.wait(name)
        deployment.wait_routable(1, 1)
        answers = complete_all(deployment.url("proxy"), PROMPTS)
        assert_kv_moved(deployment, sum(map(len, PROMPTS)))
        assert complete_alone(deployment, PROMPTS) == answers
        logs = [deployment.processes[name].log for name in ("prefill", "decode")]
        assert all("GPU memory: " in log for log in logs)
        assert not any("without graphs" in log for log in logs)
        deployment.wait_nothing_held("prefill", "decode", timeout_s=20.0)
    finally:
        deployment.end()
