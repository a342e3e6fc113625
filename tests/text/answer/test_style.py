from __future__ import annotations

import pytest
import tokenizers

from pdserve.config.schema import ModelConfig
from pdserve.errors import ConfigError
from pdserve.text.answer.harmony import HarmonyMachine
from pdserve.text.answer.json_calls import MISTRAL, MISTRAL_V3
from pdserve.text.answer.parsers import REASONING_PARSERS, TOOL_PARSERS
from pdserve.text.answer.pieces import ToolUse
from pdserve.text.answer.style import AnswerStyle, style_of
from pdserve.text.tokenizer import Tokenizer
from tests.text.tiny import byte_level_json

QWEN = '{{ \'<think>\\n\\n</think>\' }} <tool_call> {"name", "arguments"}'


def style(template: str = "", *added: str, **settings: str) -> AnswerStyle:
    backend = tokenizers.Tokenizer.from_str(byte_level_json())
    backend.add_tokens(list(added))
    return style_of(ModelConfig(model="m", **settings), Tokenizer(backend, {}), template)


def test_a_template_that_is_sure_decides_and_a_setting_decides_before_it():
    found = style(QWEN, "<tool_call>")
    assert found.calls is TOOL_PARSERS["hermes"]
    assert found.reasoning is REASONING_PARSERS["deepseek_r1"]
    assert set(found.vocabulary.values()) == {"<think>", "<tool_call>"}
    set_ = style(QWEN, tool_call_parser="llama3_json", reasoning_parser="none")
    assert (set_.calls, set_.reasoning) == (TOOL_PARSERS["llama3_json"], None)


def test_where_nothing_is_sure_all_is_content():
    found = style("{{ messages }}")
    assert not found.reads_calls
    assert found.machine("", ToolUse({"f": {}})) is None


@pytest.mark.parametrize("flag", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_named_with_those_there_are(flag):
    with pytest.raises(ConfigError, match=r"'nope'.*mistral"):
        style(**{flag: "nope"})


def test_formats_of_tokens_need_their_tokens():
    template = "<|channel|><|message|>"
    assert style(template).token_machine is None
    assert style(template, *HarmonyMachine.markers).token_machine is HarmonyMachine
    with pytest.raises(ConfigError, match=r"<\|constrain\|>"):
        style(tool_call_parser="openai")


def test_mistrals_older_models_have_no_token_before_arguments():
    assert style(tool_call_parser="mistral").calls is MISTRAL_V3
    assert style("", "[ARGS]", tool_call_parser="mistral").calls is MISTRAL
