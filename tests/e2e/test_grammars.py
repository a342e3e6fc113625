"""Outputs that must be something, of a model that knows nothing: whole, and the same everywhere.

The weights are random and the temperature is 1, so whatever a mask lets through comes.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import pytest

from pdserve.config.schema import ModelConfig
from pdserve.text.grammar import GrammarCompiler
from pdserve.text.load import load_text
from tests.e2e.conftest import OPENAI_KEY
from tests.schemas.drawn import draw_schemas, why_wrong

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.deployment import Deployment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

NAME = {"type": "string", "pattern": "^[a-z]{1,8}$"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": NAME,
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TIGHT = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
ASKED: dict[str, dict[str, Any]] = {
    "schema": TIGHT,
    "several": {**TIGHT, "n": 3},
    "choice": {"guided_choice": ["yes", "no", "maybe"]},
    "regex": {"guided_regex": "[a-f]{3}-[0-9]{2,4}"},
    "grammar": {"guided_grammar": 'root ::= "<" [a-c]+ ">"', "logprobs": 2},
}


def ask(deployment: Deployment, name: str, seed: int, **fields: Any) -> list[tuple[list[int], str]]:
    """Token ids and text of each choice; all of them must have come to their ends."""
    body = {
        "prompt": list(range(3, 40 + seed)),
        "max_tokens": 200,
        "temperature": 1.0,
        "seed": seed,
        "return_token_ids": True,
        **fields,
    }
    headers = {"Authorization": f"Bearer {OPENAI_KEY}"}
    url = deployment.url(name)
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    return [(choice["token_ids"], choice["text"]) for choice in choices]


@pytest.mark.parametrize("fields", ASKED.values(), ids=ASKED)
def test_one_engine_and_pd_give_the_same_whole_outputs(
    asked_by_openai: Deployment, fields: dict[str, Any]
) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = {
            name: list(
                pool.map(lambda seed, n=name: ask(asked_by_openai, n, seed, **fields), range(4))
            )
            for name in ("proxy", "serve")
        }
    assert found["proxy"] == found["serve"]
    for choices in found["proxy"]:
        for _, text in choices:
            if "structured_outputs" in fields:
                jsonschema.validate(json.loads(text), SCHEMA)
            else:
                assert text in fields.get("guided_choice", [text])
    # Requests for one prompt with other seeds are not all alike: nothing forces a whole output.
    assert len({text for choices in found["proxy"] for _, text in choices}) > 1


def test_a_dead_end_is_an_error_of_the_request_through_pd_too(asked_by_openai: Deployment) -> None:
    headers = {"Authorization": f"Bearer {OPENAI_KEY}"}
    for name in ("proxy", "serve"):
        answer = httpx.post(
            f"{asked_by_openai.url(name)}/v1/completions",
            json={
                "prompt": [5, 6, 7],
                "guided_choice": ["yes"],
                "allowed_token_ids": [5],
                "max_tokens": 8,
            },
            headers=headers,
            timeout=60,
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "grammar_dead_end")


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("see", "go")
]


@pytest.mark.parametrize("is_parallel", [True, False])
def test_one_engine_and_pd_call_the_same_tools_where_they_have_to(
    asked_by_openai: Deployment, is_parallel: bool
) -> None:
    def call(name: str, seed: int) -> list[tuple[str, Any]]:
        body = {
            "messages": [{"role": "user", "content": f"{seed}"}],
            "tools": TOOLS,
            "tool_choice": "required",
            "parallel_tool_calls": is_parallel,
            "temperature": 1.0,
            "seed": seed,
        }
        headers = {"Authorization": f"Bearer {OPENAI_KEY}"}
        url = f"{asked_by_openai.url(name)}/v1/chat/completions"
        answer = httpx.post(url, json=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        calls = [each["function"] for each in choice["message"].get("tool_calls", ())]
        assert choice["finish_reason"] == "length" or calls
        return [(each["name"], json.loads(each["arguments"])) for each in calls]

    with ThreadPoolExecutor(4) as pool:
        found = {
            name: list(pool.map(lambda seed, n=name: call(n, seed), range(4)))
            for name in ("proxy", "serve")
        }
    assert found["proxy"] == found["serve"]
    calls = [each for calls in found["proxy"] for each in calls]
    assert calls
    for name, arguments in calls:
        assert name in ("see", "go")
        jsonschema.validate(arguments, SCHEMA)
    assert is_parallel or all(len(each) <= 1 for each in found["proxy"])


PATCH = 'start: BEGIN line~3..5 END\nline: "+" /[a-z"\\\\]{1,6}/ LF\nBEGIN: "<p>" LF\nEND: "</p>"\n'
LARK = f"{PATCH}%import common.LF\n"
CUSTOM = {
    "name": "patch",
    "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": LARK}},
}


def test_one_engine_and_pd_call_a_custom_tool_with_the_same_text_of_its_grammar(
    asked_by_openai: Deployment,
) -> None:
    def call(name: str, seed: int) -> dict[str, Any]:
        body = {
            "messages": [{"role": "user", "content": f"{seed}"}],
            "tools": [{"type": "custom", "custom": CUSTOM}, *TOOLS],
            "tool_choice": {"type": "custom", "custom": {"name": "patch"}},
            "temperature": 1.0,
            "seed": seed,
        }
        headers = {"Authorization": f"Bearer {OPENAI_KEY}"}
        url = f"{asked_by_openai.url(name)}/v1/chat/completions"
        answer = httpx.post(url, json=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        [called] = answer.json()["choices"][0]["message"]["tool_calls"]
        return {"type": called["type"], **called["custom"]}

    with ThreadPoolExecutor(4) as pool:
        found = {
            name: list(pool.map(lambda seed, n=name: call(n, seed), range(4)))
            for name in ("proxy", "serve")
        }
    assert found["proxy"] == found["serve"]
    for each in found["proxy"]:
        assert (each["type"], each["name"]) == ("custom", "patch")
        assert re.fullmatch(r'<p>\n(\+[a-z"\\]{1,6}\n){3,5}</p>', each["input"])


def test_outputs_of_drawn_schemas_follow_them(
    asked_by_openai: Deployment, model_of: Callable[[str], Path]
) -> None:
    """A short form of `python -m tests.schemas`."""
    compiler = GrammarCompiler(load_text(ModelConfig(model=str(model_of("llama")))))
    schemas = draw_schemas(12, first_seed=77)

    def choice(number: int) -> dict[str, Any]:
        answer = httpx.post(
            f"{asked_by_openai.url('proxy')}/v1/completions",
            json={
                "prompt": [7, 8, 9 + number],
                "guided_json": schemas[number],
                "max_tokens": 80,
                "seed": number,
                "return_token_ids": True,
            },
            headers={"Authorization": f"Bearer {OPENAI_KEY}"},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()["choices"][0]
        return found

    with ThreadPoolExecutor(8) as pool:
        choices = list(pool.map(choice, range(len(schemas))))
    wrong = [why_wrong(*each, compiler) for each in zip(schemas, choices, strict=True)]
    assert [why for why in wrong if why is not None] == []
    assert {each["finish_reason"] for each in choices} == {"stop", "length"}
