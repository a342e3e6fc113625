"""openai-node against the proxy: P and D together answer as one engine does.

`node/ask.mjs` asks; the answers are judged here. Needs node (18 or later) and npm, which
installs the pinned client once, beside the script. Skipped without them, but not in CI.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.conftest import OPENAI_KEY, OPENAI_MODEL

if TYPE_CHECKING:
    from tests.e2e.deployment import Deployment

    Answers = dict[str, Any]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

NODE = Path(__file__).parent / "node"
COMPARED = [
    "completions, sampled",
    "completions, choices",
    "completions, logprobs",
    "completions, echo",
    "completions, one token",
    "completions, end at once",
    "completions, stop",
    "chat, sampled",
    "chat, choices",
    "chat, logprobs",
]


def run(*command: str, timeout_s: float, **env: str) -> str:
    """Run in the script's directory; return what was printed."""
    done = subprocess.run(
        command,
        cwd=NODE,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{command}:\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def openai_node() -> None:
    """The client, installed as the lock file says unless that has been done before."""
    if "CI" not in os.environ and not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("there is no node here, or no npm")
    wanted = json.loads((NODE / "package.json").read_text())["dependencies"]["openai"]
    installed = NODE / "node_modules" / "openai" / "package.json"
    with (NODE / "package-lock.json").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test workers share the directory
        if not installed.exists() or json.loads(installed.read_text())["version"] != wanted:
            run("npm", "ci", "--no-audit", "--no-fund", timeout_s=180)


@pytest.fixture(scope="module")
def deployment(openai_node: None, asked_by_openai: Deployment) -> Deployment:
    return asked_by_openai


@pytest.fixture(scope="module")
def num_left_before(deployment: Deployment) -> float:
    return num_left(deployment)


def num_left(deployment: Deployment) -> float:
    """How many clients have left their streams."""
    found = deployment.metrics("proxy")
    return sum(v for k, v in found.items() if k.startswith("pdserve_client_disconnects_total"))


@pytest.fixture(scope="module")
def proxy(deployment: Deployment, num_left_before: float) -> Answers:
    """What the proxy answers. All that was asked is over a second later."""
    answers = ask_all(deployment.url("proxy"))
    deployment.wait_nothing_held("prefill", "decode", timeout_s=20.0)
    return answers


@pytest.fixture(scope="module")
def serve(deployment: Deployment) -> Answers:
    """What one engine answers to the same."""
    return ask_all(deployment.url("serve"))


def ask_all(url: str) -> Answers:
    printed = run(
        "node",
        "ask.mjs",
        timeout_s=120,
        BASE_URL=f"{url}/v1",
        API_KEY=OPENAI_KEY,
        MODEL=OPENAI_MODEL,
    )
    answers: Answers = json.loads(printed)
    return answers


@pytest.mark.parametrize("name", COMPARED)
def test_an_answer_is_that_of_one_engine(name: str, proxy: Answers, serve: Answers) -> None:
    assert without_logprobs(proxy[name]["whole"]) == without_logprobs(serve[name]["whole"])
    found, expected = map(logprobs_in, (proxy[name]["whole"], serve[name]["whole"]))
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", COMPARED)
def test_a_stream_adds_up_to_the_answer(name: str, proxy: Answers) -> None:
    whole, stream = proxy[name]["whole"], proxy[name]["stream"]
    for answer in (stream, whole):  # the one that was asked for later finds more in the cache
        assert answer["usage"].pop("prompt_tokens_details")["cached_tokens"] >= 0
    assert without_logprobs(stream) == without_logprobs(whole)
    assert logprobs_in(stream) == pytest.approx(logprobs_in(whole), abs=1e-4)


def without_logprobs(value: Any) -> Any:
    """The same with every number that is not whole left out."""
    if isinstance(value, dict):
        return {name: without_logprobs(part) for name, part in value.items()}
    if isinstance(value, list):
        return [without_logprobs(part) for part in value]
    return "float" if isinstance(value, float) else value


def logprobs_in(value: Any) -> list[float]:
    """Those numbers, in order of appearance."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for part in value for number in logprobs_in(part)]
    return [value] if isinstance(value, float) else []


def test_logprobs_are_there(proxy: Answers) -> None:
    for name in ("completions, logprobs", "chat, logprobs"):
        stream = proxy[name]["stream"]
        assert len(logprobs_in(stream)) >= 2 * stream["usage"]["completion_tokens"] > 0


def test_three_choices_differ(proxy: Answers) -> None:
    for name in ("completions, choices", "chat, choices"):
        choices = proxy[name]["whole"]["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        assert len({choice["text"] for choice in choices}) == 3


def test_a_stop_string_cuts_the_text_where_it_begins(proxy: Answers) -> None:
    answer = proxy["completions, stop"]
    (choice,) = answer["whole"]["choices"]
    assert 0 <= answer["at"] < len(answer["text"])
    assert choice["text"] == answer["text"][: answer["at"]]
    assert choice["finish_reason"] == "stop"


def test_a_request_may_end_with_its_first_token(proxy: Answers) -> None:
    one = proxy["completions, one token"]["stream"]
    assert one["choices"][0]["finish_reason"] == "length"
    end = proxy["completions, end at once"]["stream"]
    assert (end["choices"][0]["text"], end["choices"][0]["finish_reason"]) == ("", "stop")
    assert one["usage"]["completion_tokens"] == end["usage"]["completion_tokens"] == 1


def test_the_clients_own_accumulator_takes_the_stream(proxy: Answers) -> None:
    answer = proxy["chat, helper"]
    assert answer["content"] == answer["deltas"] == answer["whole"]["choices"][0]["text"]


def test_an_answer_is_parsed_as_its_schema_says(proxy: Answers, serve: Answers) -> None:
    assert proxy["chat, parsed"]["kind"] in {"small", "large"}
    assert proxy["chat, parsed"] == serve["chat, parsed"]


def test_a_call_that_is_forced_is_run_by_the_clients_own_runner(
    proxy: Answers, serve: Answers
) -> None:
    called = proxy["chat, called"]
    assert called["call"]["name"] == "choose"
    assert called["given"] == [json.loads(called["call"]["arguments"])]
    assert called == serve["chat, called"]


def test_a_response_says_what_the_chat_says(proxy: Answers) -> None:
    response = proxy["response"]
    assert response["chatted"]
    assert {*response.values()} == {response["chatted"]}


def test_the_models_are_listed(proxy: Answers) -> None:
    assert proxy["models"] == [OPENAI_MODEL]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bad temperature", {"class": "BadRequestError", "status": 400, "param": "temperature"}),
        ("bad prompt", {"class": "BadRequestError", "code": "context_length_exceeded"}),
        ("unknown model", {"class": "NotFoundError", "status": 404, "code": "model_not_found"}),
        ("wrong key", {"class": "AuthenticationError", "status": 401, "code": "invalid_api_key"}),
        ("impatience", {"class": "APIConnectionTimeoutError"}),
    ],
)
def test_errors_are_the_clients_own_classes(
    name: str, expected: dict[str, Any], proxy: Answers
) -> None:
    found = {field: proxy[name].get(field) for field in expected}
    assert found == expected


def test_leaving_a_stream_is_noticed(
    proxy: Answers, deployment: Deployment, num_left_before: float
) -> None:
    """The fixture has waited until nothing was held; here, that they did leave in mid stream."""
    assert proxy["completions, left by break"] == {"num_chunks": 5}
    assert 5 <= proxy["chat, left by abort"]["num_chunks"] < 900
    assert num_left(deployment) == num_left_before + 3
