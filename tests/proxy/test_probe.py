"""canitoolcall's probe of live endpoints against P and D: all of its scenarios, whole and streamed.

What a model says is given, in Hermes' format; all that is between it and the client is real.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from canitoolcall.probe import BUILTIN_SCENARIOS, probe

from pdserve.config.schema import ModelConfig
from pdserve.text.answer.parsers import REASONING_PARSERS, TOOL_PARSERS
from pdserve.text.answer.style import AnswerStyle
from pdserve.text.chat import ChatTemplate
from pdserve.text.load import load_text
from tests.proxy.test_with_server import deployed
from tests.server.conftest import EOS
from tests.text.tiny import write_model_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.text.load import Text
    from pdserve.wire.request import GenerateRequest

pytestmark = pytest.mark.slow


def called(name: str, **arguments: Any) -> str:
    told = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {told}}}\n</tool_call>'


SAID = {
    "single-call": called("get_weather", city="Paris"),
    "parallel-calls": "\n".join(called("get_weather", city=city) for city in ("Paris", "Tokyo")),
    "no-call": "42",
    "nested-args": called(
        "create_event",
        title="Design review",
        start="2026-10-01T15:00:00Z",
        attendees=[
            {"name": "Ana", "email": "ana@example.com"},
            {"name": "Bo", "email": "bo@example.com"},
        ],
        location={"city": "Berlin", "room": "4.12"},
    ),
    "unicode-args": called(
        "save_note", title="Grüße aus Zürich", body="Café ☕ in 東京 — naïve résumé 🚀"
    ),
    "empty-args": called("get_server_time"),
    "forced-tool-choice": called("get_weather", city="Lisbon", unit="c"),
    "tool-result-followup": "It is 18 degrees and clear.",
    "reasoning-then-call": "<think>0.9 is 0.90.</think>\n" + called("record_answer", answer="9.9"),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    loaded = load_text(ModelConfig(model=str(write_model_files(tmp_path_factory.mktemp("model")))))
    style = AnswerStyle(calls=TOOL_PARSERS["hermes"], reasoning=REASONING_PARSERS["qwen3"])
    template = ChatTemplate("{{ messages[-1].content }}", {})
    return replace(loaded, answers=style, chat_template=template)


@pytest.mark.parametrize(
    "mode",
    [pytest.param({}, marks=pytest.mark.matrix), {"can_push": True}],
    ids=["pull", "push"],
)
async def test_every_scenario_of_the_probe_passes_through_p_and_d(
    text: Text, mode: dict[str, Any]
) -> None:
    answers = {
        str(scenario.messages[-1]["content"]): text.tokenizer.encode(
            SAID[scenario.id], add_special_tokens=False
        )
        for scenario in BUILTIN_SCENARIOS
    }

    def next_token(request: GenerateRequest, output: Sequence[int]) -> int:
        token_ids = answers[text.tokenizer.decode(request.prompt_token_ids)]
        return token_ids[len(output)] if len(output) < len(token_ids) else EOS

    engine = {"next_token": next_token, **mode}
    async with deployed(text, prefill=[engine], decode=[engine]) as running:
        report = await asyncio.to_thread(probe, f"{running.url}/v1", "tiny")
    assert report.summary() == {"pass": 27, "fail": 0, "error": 0, "skip": 0}, report.render_text()
    assert not any(outcome.warnings for outcome in report.outcomes), report.render_text()
