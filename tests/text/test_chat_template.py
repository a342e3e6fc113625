"""What chat templates find when they are rendered."""

from __future__ import annotations

from pdserve.text.chat import ChatTemplate


def test_documents_are_none_as_in_transformers() -> None:
    template = ChatTemplate("{{ documents is none }}{{ messages[0].content }}", {})
    assert template.render([{"role": "user", "content": "!"}], now_s=0.0) == "True!"


def test_a_field_of_a_message_that_is_null_is_not_there() -> None:
    template = ChatTemplate("{{ 'tool_calls' in messages[0] }}{{ messages[0].content }}", {})
    message = {"role": "assistant", "content": None, "tool_calls": None, "refusal": None}
    assert template.render([message], now_s=0.0) == "False"
