"""What chat templates find when they are rendered."""

from __future__ import annotations

import pytest

from pdserve.errors import BadRequestError
from pdserve.text.chat import ChatTemplate


def test_documents_are_none_as_in_transformers() -> None:
    template = ChatTemplate("{{ documents is none }}{{ messages[0].content }}", {})
    assert template.render([{"role": "user", "content": "!"}], now_s=0.0) == "True!"


def test_a_field_of_a_message_that_is_null_is_not_there() -> None:
    template = ChatTemplate("{{ 'tool_calls' in messages[0] }}{{ messages[0].content }}", {})
    message = {"role": "assistant", "content": None, "tool_calls": None, "refusal": None}
    assert template.render([message], now_s=0.0) == "False"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"x": 1}', "{'x': 1}"),
        ({"x": 1}, "{'x': 1}"),
        *((each, "{}") for each in ('{"x": ', "[1]", "null", "1e", "", " ", None, 3, "[" * 9999)),
    ],
)
def test_arguments_that_are_no_object_do_not_end_a_conversation(arguments, shown) -> None:
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments }}", {})
    call = {"type": "function", "function": {"name": "see", "arguments": arguments}}
    assert template.render([{"role": "assistant", "tool_calls": [call]}], now_s=0.0) == shown


NINE = """
{%- for m in messages %}
    {%- for call in m.tool_calls or [] %}
        {%- if call.id|length != 9 %}{{ raise_exception("9!") }}{% endif %}
        {{- call.id }}={% endfor %}
    {%- if m.role == "tool" %}{{ m.tool_call_id }};{% endif %}
{%- endfor %}"""


@pytest.mark.parametrize(
    ("call_id", "shown"),
    [("call_MFZWIZTBONSGMYLTMRTGC43E", "MRTGC43E"), ("toolu_123456789", "23456789"), ("c1", "c1")],
)
def test_ids_of_calls_have_the_length_that_mistrals_templates_ask_for(call_id, shown) -> None:
    call = {"id": call_id, "function": {"name": "see", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "1"},
    ]
    text = ChatTemplate(NINE, {}).render(messages, now_s=0.0)
    asked, _, answered = text.removesuffix(";").partition("=")
    assert (asked, len(asked)) == (answered, 9)
    assert asked.endswith(shown)
    anything = ChatTemplate(NINE.replace("!= 9", "< 1"), {}).render(messages, now_s=0.0)
    assert anything == f"{call_id}={call_id};"


ROLES = "{% for m in messages %}{% if m.role in ('system', 'user') %}{{ m.role }}: {{ m.content }};"
SAID = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "hi"},
    {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
]


def test_what_a_developer_says_is_the_systems_where_a_template_knows_no_developer() -> None:
    template = ChatTemplate(ROLES + "{% endif %}{% endfor %}", {})
    assert template.render(SAID, now_s=0.0) == "system: Be brief.\n\nBe kind.;user: hi;"
    known = ChatTemplate(ROLES + "{% elif m.role == 'developer' %}!{% endif %}{% endfor %}", {})
    assert known.render(SAID, now_s=0.0) == "!user: hi;!"
    plain = [{"role": "system", "content": "a"}, *SAID[1:2], {"role": "system", "content": "b"}]
    assert template.render(plain, now_s=0.0) == "system: a;user: hi;system: b;"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [('{"x":  1.50}', '{"x":  1.50}'), ({"x": "é"}, '{"x": "é"}'), ("{", "{}"), ("[1]", "{}")],
)
def test_arguments_may_be_added_to_a_text_and_are_what_the_model_has_written(
    arguments, shown
) -> None:
    template = ChatTemplate("{{ '<' + messages[0].tool_calls[0].function.arguments + '>' }}", {})
    call = {"function": {"name": "see", "arguments": arguments}}
    assert template.render([{"role": "assistant", "tool_calls": [call]}], now_s=0.0) == f"<{shown}>"


def test_an_empty_list_of_calls_is_not_there() -> None:
    template = ChatTemplate("{{ 'tool_calls' in messages[0] }}", {})
    message = {"role": "assistant", "content": "hi", "tool_calls": []}
    assert template.render([message], now_s=0.0) == "False"


@pytest.mark.parametrize(
    "content",
    [
        "x-anthropic-billing-header: cch=77;\nBe brief.",
        [{"type": "text", "text": "x-anthropic-billing-header: cch=77;"},
         {"type": "text", "text": "Be brief."}],
    ],
)  # fmt: skip
def test_what_claude_code_changes_each_time_is_in_no_prompt_of_a_gateways_chat(content) -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render([{"role": "system", "content": content}], now_s=0.0) == "Be brief."


SEEN = ChatTemplate("{{ messages[0].content }}|{{ messages[0].reasoning_content }}", {})


@pytest.mark.parametrize(
    ("part", "shown"),
    [
        ({"type": "text", "text": "b"}, "a\nb|"),
        ({"type": "text", "text": ""}, "a|"),
        ({"type": "text", "text": None}, "a|"),
        ({"type": "input_text", "text": "b"}, "a\nb|"),
        ({"type": "output_text", "text": "b", "annotations": [{}], "logprobs": []}, "a\nb|"),
        ({"type": "refusal", "refusal": "no"}, "a\nno|"),
        ({"type": "thinking", "thinking": "hm", "signature": "EqQB"}, "a|hm"),
        ({"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, "a|hm"),
        ({"type": "redacted_thinking", "data": "EqQB"}, "a|"),
    ],
)
def test_parts_of_what_the_assistant_said_may_be_sent_back(part, shown) -> None:
    message = {"role": "assistant", "content": [{"type": "text", "text": "a"}, part]}
    assert SEEN.render([message], now_s=0.0) == shown


def test_reasoning_that_has_a_field_of_its_own_is_that_of_the_field() -> None:
    content = [{"type": "thinking", "thinking": "hm"}]
    message = {"role": "assistant", "content": content, "reasoning": "well"}
    assert SEEN.render([message], now_s=0.0) == "|well"


def test_several_calls_of_a_message_are_several_messages_where_a_template_reads_one() -> None:
    source = (
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}"
        "{% if 'tool_calls' in m %}({{ m.tool_calls[0].id }}/{{ m.tool_calls|length }})"
        "{% endif %};{% endfor %}"
    )
    calls = [{"id": each, "function": {"name": "see", "arguments": "{}"}} for each in "abc"]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "So", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": each, "content": each} for each in "xca"),
        {"role": "user", "content": "go on"},
    ]
    shown = ChatTemplate(source, {}).render(messages, now_s=0.0)
    assert shown == "uhi;aSo(a/1);ta;a(b/1);a(c/1);tc;tx;ugo on;"
    every = ChatTemplate(source.replace("[0].id", "|length"), {}).render(messages, now_s=0.0)
    assert every == "uhi;aSo(3/3);tx;tc;ta;ugo on;"


def test_gpt_oss_is_told_what_it_thought_before_a_call() -> None:
    template = ChatTemplate(
        "{% if messages[0].content and messages[0].thinking %}{{ raise_exception('both') }}"
        "{% endif %}{{ messages[0].content or messages[0].thinking }}",
        {},
    )
    call = {"function": {"name": "see", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]}
    assert template.render([message], now_s=0.0) == "hm"
    assert template.render([message | {"content": "I look."}], now_s=0.0) == "I look."


@pytest.mark.parametrize("kind", ["image_url", "thinking", ["text"], None])
def test_a_part_that_is_no_text_is_named(kind) -> None:
    message = {"role": "user", "content": [{"type": kind, "thinking": "hm"}]}
    with pytest.raises(BadRequestError, match=r"messages\[0\]\.content\[0\] has type"):
        SEEN.render([message], now_s=0.0)
