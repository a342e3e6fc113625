"""Engine cores behind one server, through P and D: who serves, who dies, what is left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

from pdserve.commands.exit_codes import EXIT_FAILED
from tests.cli.process import pdserve
from tests.e2e.conftest import pd_deployment
from tests.e2e.test_equality import assert_kv_moved, complete, complete_all, complete_alone
from tests.tiny_models import greedy_by_transformers, write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.deployment import Deployment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

PROMPTS = [[3 + (17 * i + 5 * n) % 311 for i in range(n)] for n in (1, 17, 64, 150, 300, 40)]
NUM_TOKENS = 24


@pytest.mark.parametrize(
    ("family", "more"),
    [
        pytest.param("llama", [], marks=pytest.mark.matrix),
        ("qwen3_moe", ["--enable-expert-parallel", "--all2all-backend", "all_to_all"]),
    ],
    ids=["by themselves", "experts over them"],
)
def test_cores_of_p_hand_over_to_cores_of_d_until_one_is_killed(
    family: str, more: list[str], tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "model", family)
    expected = greedy_by_transformers(model, PROMPTS, NUM_TOKENS)
    flags = ["--dtype", "float32", "--kv-cache-memory-bytes", "32MiB", "-dp", "2", *more]
    flags.append("--kv-events-config.enable-kv-cache-events")
    with pd_deployment(tmp_path, model, *flags) as deployment:
        got = complete_all(deployment.url("proxy"), PROMPTS, max_tokens=NUM_TOKENS)
        assert got == expected
        assert_kv_moved(deployment, sum(map(len, PROMPTS)))
        assert complete_alone(deployment, PROMPTS, max_tokens=NUM_TOKENS) == expected
        for name in ("prefill", "decode"):
            engine = deployment.info(name)["engine"]
            assert len(engine["endpoints"]) == 2, "every core has a side channel of its own"
        told = pdserve(
            *("kv-events", "--url", deployment.url("prefill"), "--seconds", "3"),
            variables={"PDSERVE_SECRET": deployment.secret},
        )
        held = re.findall(r"core (\d): live .* prefixes of 256 tokens: (.*)", told.stdout)
        assert sorted(dict(held).values()) == ["GPU 1", "none"], told
        deployment.wait_nothing_held("prefill", "decode", timeout_s=20.0)

        with ThreadPoolExecutor(8) as pool:
            streams = [
                pool.submit(_complete_until_refused, deployment.url("decode"), prompt)
                for prompt in (PROMPTS * 2)[:8]
            ]
            _wait_until_both_run(deployment)
            decode = psutil.Process(deployment.processes["decode"].popen.pid)
            cores = [p for p in decode.children() if "pdserve.engine.process" in p.cmdline()]
            family = decode.children(recursive=True)
            os.kill(cores[1].pid, signal.SIGKILL)
            began_s = time.monotonic()
            for stream in streams:
                stream.result(timeout=60)
            assert time.monotonic() - began_s < 30
        assert deployment.processes["decode"].popen.wait(30) == EXIT_FAILED
        [error] = re.findall("ERROR pdserve.start .*", deployment.processes["decode"].log)
        assert "engine core 1" in error
        _, alive = psutil.wait_procs(family, 30)
        assert not alive


def _complete_until_refused(url: str, prompt: list[int]) -> None:
    """Ask again and again, until a request ends with an error."""
    with contextlib.suppress(AssertionError, httpx.HTTPError):
        while True:
            complete(url, prompt, max_tokens=700)


def _wait_until_both_run(deployment: Deployment) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        found = deployment.metrics("decode")
        running = {
            name: value
            for name, value in found.items()
            if name.startswith("vllm:num_requests_running{")
        }
        if len(running) == 2 and min(running.values()) >= 2:
            return
        time.sleep(0.02)
    raise AssertionError(f"requests do not spread: {found}")
