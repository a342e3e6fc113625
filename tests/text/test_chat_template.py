"""What chat templates find when they are rendered."""

from __future__ import annotations

from pdserve.text.chat import ChatTemplate


def test_documents_are_none_as_in_transformers() -> None:
    template = ChatTemplate("{{ documents is none }}{{ messages[0].content }}", {})
    assert template.render([{"role": "user", "content": "!"}], now_s=0.0) == "True!"
