"""Engines that draft, and engines that do not: the same answers, also where one takes over."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pdserve.config.boxed import boxed_model_dir
from tests.e2e.conftest import pd_deployment
from tests.e2e.test_equality import complete_all
from tests.e2e.test_kill import PROMPTS, kill_amid_requests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.deployment import Deployment

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.timeout(400)]

DRAFTING = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1}


def start_drafting(deployment: Deployment) -> None:
    """Start a decode engine beside the one that is there, like it but for its drafts."""
    deployment.start(
        "drafting",
        *deployment.processes["decode"].arguments,
        env={"PDSERVE_SPECULATIVE_CONFIG": json.dumps(DRAFTING)},
    )
    deployment.wait("drafting")
    deployment.wait_routable(1, 2)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("drafts")
    flags = ["--dtype", "float32", "--kv-transfer-config.lease-s", "6"]
    with pd_deployment(directory, boxed_model_dir(), *flags, with_serve=True) as deployment:
        start_drafting(deployment)
        yield deployment


def test_tokens_through_both_are_those_of_an_engine_that_drafts_nothing(
    deployment: Deployment,
) -> None:
    for fields in (
        {},
        {"temperature": 0.8, "seed": 5, "frequency_penalty": 0.4},
        {"temperature": 0.6, "seed": 6, "top_p": 0.9, "min_tokens": 5},
    ):
        expected = complete_all(deployment.url("serve"), PROMPTS, **fields)
        assert complete_all(deployment.url("proxy"), PROMPTS, **fields) == expected
    stats = deployment.info("drafting")["stats"]
    assert stats["num_draft_tokens"] >= sum(stats["accepted_by_position"]) > 0


def test_a_prediction_makes_an_answer_take_fewer_steps_and_changes_nothing(
    deployment: Deployment,
) -> None:
    plain, drafting = deployment.url("decode"), deployment.url("drafting")
    wanted = chat(plain)
    text = wanted["choices"][0]["message"]["content"]
    prediction = {"type": "content", "content": text}
    found = chat(drafting, prediction=prediction)
    assert found["choices"] == wanted["choices"]
    details = found["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > wanted["usage"]["completion_tokens"] / 2
    assert "completion_tokens_details" not in wanted["usage"]
    told = chat(plain, prediction=prediction)["usage"]["completion_tokens_details"]
    assert told == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert "/step" in deployment.processes["drafting"].log
    through = chat(deployment.url("proxy"), prediction=prediction)
    assert through["choices"] == wanted["choices"]


def test_streams_of_an_engine_that_drafts_go_on_where_nothing_is_drafted(
    deployment: Deployment,
) -> None:
    prompts = [[11, *prompt] for prompt in PROMPTS]
    ends = kill_amid_requests(deployment, "drafting", prompts)
    print(f"\nthe drafting D killed: {ends}")
    assert ends.get("finished", 0) > 0
    deployment.wait_nothing_held("prefill", "decode", timeout_s=30.0)


def chat(url: str, **fields: Any) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": "Tell me of a bird."}],
        "max_completion_tokens": 96,
        "temperature": 0.0,
        **fields,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, verify=False)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found
