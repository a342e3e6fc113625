"""Engines that draft, and engines that do not: the same answers, also where one takes over."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import pytest

from tests.e2e.streams import PROMPTS, kill_amid_requests, lines_of
from tests.e2e.test_equality import complete_all

if TYPE_CHECKING:
    from tests.e2e.deployment import Deployment

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.timeout(400)]

BY_HEADS = {"method": "medusa", "model": "boxed", "num_speculative_tokens": 4}
DRAFTING = {
    "method": "ngram",
    "num_speculative_tokens": 6,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 5,
}


def start_drafting(
    deployment: Deployment, name: str = "drafting", drafting: dict[str, Any] = DRAFTING
) -> None:
    """Start a decode engine beside those that are there, like them but for its drafts."""
    deployment.start(
        name,
        *deployment.processes["decode"].arguments,
        env={"PDSERVE_SPECULATIVE_CONFIG": json.dumps(drafting)},
    )
    deployment.wait(name)
    deployment.wait_routable(1, 2 + (name != "drafting"))


@pytest.fixture(scope="module")
def deployment(boxed: Deployment) -> Deployment:
    start_drafting(boxed)
    return boxed


def test_tokens_through_both_are_those_of_an_engine_that_drafts_nothing(
    deployment: Deployment,
) -> None:
    for fields in (
        {},
        {"temperature": 0.8, "seed": 5, "frequency_penalty": 0.4},
        {"temperature": 0.6, "seed": 6, "top_p": 0.9, "min_tokens": 5},
    ):
        expected = complete_all(deployment.url("serve"), PROMPTS[::3], **fields)
        assert complete_all(deployment.url("proxy"), PROMPTS[::3], **fields) == expected
    # Whether drafts pay, and hence how many there are, is measured; the next test has right ones.
    stats = deployment.info("drafting")["stats"]
    assert stats["num_draft_tokens"] > 0


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


NUMBERS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 100, "maximum": 999},
    "minItems": 40,
    "maxItems": 40,
}
TOOL = {
    "type": "object",
    "properties": {"n": NUMBERS},
    "required": ["n"],
    "additionalProperties": False,
}
TIGHT = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBERS}}
TOOLS = [{"type": "function", "function": {"name": "see", "parameters": TOOL}}]
LARK = {"syntax": "lark", "definition": 'start: ("<" /[0-9]{3}/ ">" "\\n")~40'}
CUSTOM = {"name": "see", "format": {"type": "grammar", "grammar": LARK}}
BOUND: dict[str, dict[str, Any]] = {
    "text": {"tools": [{"type": "custom", "custom": CUSTOM}], "tool_choice": "required"}
    | {"parallel_tool_calls": False},
    "grammar": {"response_format": TIGHT},
    "call": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
}
"""What an answer of some 200 tokens has to be."""


@pytest.mark.matrix
def test_what_an_answer_has_to_be_it_is_although_its_decode_engine_dies_in_it(
    deployment: Deployment,
) -> None:
    def stream(url: str, number: int, kind: str) -> dict[str, Any]:
        body = {
            "messages": [{"role": "user", "content": f"Tell me {number} numbers."}],
            "temperature": 1.0,
            "seed": number,
            "max_completion_tokens": 400,
            "stream": True,
            **BOUND[kind],
        }
        return joined(url, body, f"{kind}-{number}", begun)

    begun: list[str] = []
    asked = [(number, kind) for number in range(3) for kind in BOUND]
    wanted = [stream(deployment.url("serve"), *each) for each in asked]
    url, has_died = deployment.url("proxy"), False
    with ThreadPoolExecutor(len(asked)) as pool:
        for _ in range(5):  # until some of them are there
            begun.clear()
            answers = [pool.submit(stream, url, *each) for each in asked]
            deadline = time.monotonic() + 30.0
            while len(begun) < len(asked) and time.monotonic() < deadline:
                time.sleep(0.005)
            has_died = deployment.info("drafting")["stats"]["num_running"] > 0
            if has_died:
                deployment.processes["drafting"].kill()
            found = [answer.result(timeout=60) for answer in answers]
            assert found == wanted
            if has_died:
                break
    assert has_died
    assert deployment.metric("proxy", 'pdserve_replays_total{result="resumed"}') > 0
    for answer, (_, kind) in zip(found, asked, strict=True):
        assert answer["finish"] == ("stop" if kind == "grammar" else "tool_calls")
        if kind == "text":
            assert re.fullmatch(r"(<[0-9]{3}>\n){40}", answer["arguments"])
            continue
        value = json.loads(answer["content"] or answer["arguments"])
        jsonschema.validate(value, NUMBERS if kind == "grammar" else TOOL)
    start_drafting(deployment)


def joined(url: str, body: dict[str, Any], request_id: str, begun: list[str]) -> dict[str, Any]:
    """What a client makes of a stream; that it has begun is said at its twentieth event."""
    found = {"content": "", "arguments": "", "id": "", "name": "", "finish": ""}
    headers = {"X-Request-Id": request_id}
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60, verify=False
    ) as answer:
        assert answer.status_code == 200, answer.read()
        data = (line for line in lines_of(answer.iter_bytes()) if line.startswith("data: {"))
        for number, line in enumerate(data):
            if number == 20:
                begun.append(request_id)
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            [choice] = event["choices"]
            delta = choice["delta"]
            found["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                assert call["index"] == 0
                found["id"] += call.get("id", "")
                said = call.get("function") or call["custom"]
                found["name"] += said.get("name", "")
                found["arguments"] += said.get("arguments", "") + said.get("input", "")
            found["finish"] = choice["finish_reason"] or found["finish"]
    return found


def test_streams_of_an_engine_that_drafts_go_on_where_others_or_none_are_made(
    deployment: Deployment,
) -> None:
    start_drafting(deployment, "heads", BY_HEADS)
    prompts = [[11, *prompt] for prompt in PROMPTS[:9]]
    ends = kill_amid_requests(deployment, "drafting", prompts)
    print(f"\nthe drafting D killed: {ends}")
    assert ends.get("finished", 0) > 0
    stats = deployment.info("heads")["stats"]
    assert stats["num_draft_tokens"] >= sum(stats["accepted_by_position"]) > 0
    deployment.wait_nothing_held("prefill", "decode", "heads", timeout_s=30.0)


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
