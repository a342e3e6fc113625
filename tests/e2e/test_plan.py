"""A plan from what a running deployment has learned, checked by playing some of it there."""

from __future__ import annotations

import json

import pytest

from pdserve.config.boxed import boxed_model_dir
from tests.cli.process import pdserve
from tests.e2e.conftest import pd_deployment

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(400)]

POLICY = (
    "--policy", "prefix_sticky", "--split-policy", "predicted",
    "--tokenizer", str(boxed_model_dir()),
)  # fmt: skip
EVENTS = ("--kv-events-config.enable-kv-cache-events",)
LOAD = (
    "--dataset-name", "random", "--random-input-len", "300", "--random-output-len", "24",
    "--random-range-ratio", "0.5", "--request-rate", "6",
)  # fmt: skip


def test_a_deployment_says_what_it_takes_and_how_far_off_its_simulation_is(tmp_path):
    with pd_deployment(tmp_path, "boxed", *EVENTS, proxy_flags=POLICY) as deployment:
        url = deployment.url("proxy")
        taught = pdserve(
            *("bench", "serve", "--base-url", url, *LOAD, "--num-prompts", "60", "--allow-invalid")
        )
        assert taught.returncode == 0, taught.stderr
        found = pdserve(
            *("plan", "--url", url, "--num-engines", "3", "--slo", "ttft:2000", "tpot:200", "p80"),
            *(*LOAD, "--num-prompts", "60", "--seed", "7", "--check", "40", "--json"),
        )
    told = json.loads(found.stdout)
    assert {row["layout"] for row in told["plan"]["rows"]} == {"1P2D", "2P1D", "3B"}
    costs = told["costs"]
    assert costs["prefill"] + 300 * costs["prefill_token"] + 45_000 * costs["prefill_pair"] > 0
    assert told["start"].startswith("pdserve up ")
    check = told["check"]
    assert check["layout"] == "1P1D"
    assert check["measured"]["num_requests"] == 40
    assert check["measured"]["num_failed"] == 0
    # The machine may be busy with other tests: what is asked here is the order of magnitude.
    assert -0.8 < check["off"]["ttft_p50_ms"] < 4
    assert -0.8 < check["off"]["tpot_p50_ms"] < 4
