from __future__ import annotations

import msgspec
import pytest

from pdserve.dialects.paths import RESPONSES, error_of
from pdserve.errors import BadRequestError, UpstreamError
from tests.dialects.chats import (
    ALL,
    DONE,
    USAGE,
    WHOLE,
    call,
    chunk,
    events_in,
    sse,
    translated,
    translator,
)

SAME_IN_CHATS = {
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "stop_token_ids": [3],
    "session_id": "s",
    "include_reasoning": False,
    "chat_template_kwargs": {"a": 1},
}


def asked(**body):
    """The chat that a request becomes."""
    return translator(RESPONSES, body).chat


def messages(items, **body):
    return asked(input=items, **body)["messages"]


def says(role, text, **more):
    return {"type": "message", "role": role, "content": text, **more}


def test_a_text_is_what_the_user_says_and_instructions_are_the_systems():
    assert messages("hi") == [{"role": "user", "content": "hi"}]
    assert messages("hi", instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


def test_what_asks_for_nothing_is_not_in_the_chat():
    body = {"text": {"format": {"type": "text"}}, "tools": [], "tool_choice": "auto", "top_p": None}
    assert asked(input="hi", **body).keys() == {"messages"}


@pytest.mark.parametrize("kind", ["web_search", "web_search_preview"])
def test_a_web_search_that_may_be_made_is_not_and_is_said_to(kind):
    search = {"type": kind, "external_web_access": False}
    tools = [search, {"type": "function", "name": "look", "parameters": {}}]
    dialect = translator(RESPONSES, {"input": "hi", "tools": tools, "tool_choice": "auto"})
    assert [tool["function"]["name"] for tool in dialect.chat["tools"]] == ["look"]
    assert dialect.ignored == ("tools.web_search",)
    with pytest.raises(BadRequestError, match="tool_choice"):
        asked(input="hi", tools=tools, tool_choice={"type": kind})


STATUS = {"type": "function", "name": "status", "parameters": {"type": "object"}}
SERVER = {"type": "namespace", "name": "mcp__lab", "description": "d", "tools": [STATUS]}


def test_a_function_in_a_namespace_is_called_and_sent_back_with_it():
    items = [
        says("user", "hi"),
        {"type": "function_call", "call_id": "a", "namespace": "mcp__lab", "name": "status",
         "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
    ]  # fmt: skip
    body = {"input": items, "tools": [SERVER, STATUS], "stream": True}
    dialect = translator(RESPONSES, body)
    names = [tool["function"]["name"] for tool in dialect.chat["tools"]]
    assert names == ["mcp__lab__status", "status"]
    [sent] = dialect.chat["messages"][1]["tool_calls"]
    assert sent["function"]["name"] == "mcp__lab__status"
    calls = [
        chunk(call(0, "{}", name="mcp__lab__status", id="b")),
        chunk(call(1, "{}", name="status", id="c")),
    ]
    events = translated(dialect, [*calls, chunk({}, "tool_calls"), DONE])
    items = [data["item"] for _, data in events if "item" in data]
    named = [(item.get("namespace"), item["name"]) for item in items]
    assert named == [("mcp__lab", "status")] * 2 + [(None, "status")] * 2
    assert [data["name"] for name, data in events if name.endswith("arguments.done")] == [
        "status",
        "status",
    ]


@pytest.mark.parametrize(
    ("tools", "chosen"),
    [
        ([SERVER], "mcp__lab__status"),
        ([SERVER, STATUS], "status"),
        ([SERVER, SERVER | {"name": "other"}], "status"),
    ],
)
def test_a_function_may_be_chosen_without_its_namespace_if_no_other_is_meant(tools, chosen):
    chat = asked(input="hi", tools=tools, tool_choice={"type": "function", "name": "status"})
    assert chat["tool_choice"]["function"]["name"] == chosen


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "namespace", "tools": []},
        {"type": "namespace", "name": "n"},
        {"type": "namespace", "name": "n", "tools": [3]},
        {"type": "namespace", "name": "n", "tools": [SERVER]},
        {"type": "namespace", "name": "n", "tools": [{"type": "mcp", "name": "c"}]},
        {"type": "function"},
    ],
)
def test_a_tool_that_is_none_is_named(tool):
    with pytest.raises(BadRequestError, match=r"tools\[0\]") as raised:
        asked(input="hi", tools=[tool])
    assert raised.value.param == "tools"


def test_a_choice_of_a_tool_where_there_is_none_is_left_to_the_chat_to_refuse():
    assert asked(input="hi", tool_choice="required")["tool_choice"] == "required"


def test_what_the_system_says_first_is_one_message():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    items = [says("developer", parts), {"role": "user", "content": "hi"}, says("developer", "c")]
    assert messages(items, instructions="Be brief.") == [
        {"role": "system", "content": "Be brief.\n\na\nb"},
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "c"},
    ]


def test_a_turn_of_the_assistant_is_one_message_and_outputs_of_calls_are_others():
    output = [{"type": "output_text", "text": "So: ", "annotations": []}]
    items = [
        says("user", "hi"),
        {"type": "reasoning", "id": "rs", "summary": [], "content": [
            {"type": "reasoning_text", "text": "I think."}]},
        says("assistant", output, id="msg", status="completed"),
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "see", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "function_call_output", "call_id": "b", "output": [
            {"type": "input_text", "text": "2"}]},
    ]  # fmt: skip
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for call_id, name in (("a", "look"), ("b", "see"))
    ]
    thought = {"reasoning": "I think.", "tool_calls": calls}
    assert messages(items) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "So: ", **thought},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
    ]


def test_what_other_servers_said_may_be_sent_back():
    encrypted = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "gAAAA"}
    said = says("assistant", [{"type": "refusal", "refusal": "I cannot."}], id="m")
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    items = [says("user", "hi"), encrypted, said, says("user", "why?"), encrypted, call]
    assert [(each["role"], each["content"]) for each in messages(items)] == [
        ("user", "hi"),
        ("assistant", "I cannot."),
        ("user", "why?"),
        ("assistant", ""),
    ]


def test_a_message_that_was_cut_off_is_gone_on_with():
    items = [says("user", "hi"), says("assistant", "a la", status="incomplete")]
    assert asked(input=items)["continue_final_message"] is True
    items[-1]["status"] = "completed"
    assert "continue_final_message" not in asked(input=items)


def test_fields_of_a_chat_have_their_names_there():
    tool = {"type": "function", "name": "look", "parameters": {}, "strict": True}
    schema = {"name": "s", "schema": {"type": "object"}, "strict": True}
    chat = asked(
        input="hi",
        max_output_tokens=7,
        temperature=0,
        seed=3,
        stream=True,
        truncation="auto",
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", **schema}, "verbosity": "low"},
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=2,
        tools=[tool],
        tool_choice={"type": "function", "name": "look"},
        parallel_tool_calls=False,
        store=False,
        metadata={"a": "b"},
        **SAME_IN_CHATS,
    )
    del chat["messages"]
    assert chat == {
        **SAME_IN_CHATS,
        "max_completion_tokens": 7,
        "temperature": 0,
        "seed": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "truncate_prompt_tokens": -1,
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": schema},
        "verbosity": "low",
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [
            {"type": "function", "function": {"name": "look", "parameters": {}, "strict": True}}
        ],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "parallel_tool_calls": False,
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store", True),
        ("background", True),
        ("previous_response_id", "resp_1"),
        ("conversation", "c"),
        ("prompt", {"id": "p"}),
        ("service_tier", "flex"),
        ("tools", [{"type": "file_search"}]),
        ("include", ["web_search_call.results"]),
        ("kv_transfer_params", {}),
        ("text", {"format": "json"}),
        ("input", 3),
        ("input", []),
        ("input", [3]),
        ("input", [{}]),
        ("input", [{"role": "user", "content": 3}]),
        ("input", [{"role": "user", "content": [3]}]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        ("input", [{"type": "item_reference", "id": "x"}]),
        ("input", [{"type": "computer_call"}]),
        ("input", [{"type": ["a"]}]),
        ("input", [{"type": "function_call", "call_id": "a"}]),
        ("input", [{"type": "function_call_output", "output": "a"}]),
    ],
)
def test_what_is_not_served_is_named(field, value):
    with pytest.raises(BadRequestError) as raised:
        asked(**{"input": "hi", field: value})
    assert raised.value.param == field
    assert field in raised.value.message


def test_a_tool_that_is_not_there_cannot_be_chosen():
    tool = {"type": "function", "name": "look"}
    with pytest.raises(BadRequestError, match="tool_choice"):
        asked(input="hi", tools=[tool], tool_choice={"type": "web_search"})


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
CUSTOM = {"type": "custom", "name": "run", "description": "d", "format": GRAMMAR}
OF_CHAT = {
    "type": "custom",
    "custom": {
        "name": "run",
        "description": "d",
        "format": {
            "type": "grammar",
            "grammar": {"syntax": "lark", "definition": 'start: "a"'},
        },
    },
    "called_as": "function",
}


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "custom", "name": "run"}, {"type": "custom", "custom": {"name": "run"}}),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "look"}, {"type": "custom", "name": "run"}],
            },
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [
                        {"type": "function", "function": {"name": "n__look"}},
                        {"type": "custom", "custom": {"name": "run"}},
                    ],
                },
            },
        ),
    ],
)
def test_custom_tools_and_choices_have_the_form_of_a_chats(choice, wanted):
    look = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "look"}]}
    chat = asked(input="hi", tools=[CUSTOM, look], tool_choice=choice)
    assert chat["tools"][0] == OF_CHAT
    assert chat["tool_choice"] == wanted


def test_calls_of_custom_tools_are_sent_back_as_they_came():
    said = {"type": "custom_tool_call", "call_id": "a", "name": "run", "input": "x"}
    output = {"type": "custom_tool_call_output", "call_id": "a", "output": "done"}
    called = {"id": "a", "type": "custom", "custom": {"name": "run", "input": "x"}}
    assert messages([said, output]) == [
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "a", "content": "done"},
    ]


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_custom_tools_call_is_streamed_as_its_text(is_whole: bool):
    body = {"input": "hi", "tools": [CUSTOM], "stream": True}
    pieces = ['{"inp', 'ut": "a\\', "n", 'b"' + "}" * is_whole]
    chunks = [
        chunk(call(0, pieces[0], name="run", id="call_a")),
        *(chunk(call(0, piece)) for piece in pieces[1:]),
        chunk({}, "tool_calls" if is_whole else "length"),
        DONE,
    ]
    events = translated(translator(RESPONSES, body), chunks)
    deltas = [data["delta"] for name, data in events if name.endswith("input.delta")]
    assert deltas == ["a", "\n", "b"]
    [(done, last)] = [event for event in events if "call_input.done" in event[0]]
    assert (done, last["input"]) == ("response.custom_tool_call_input.done", "a\nb")
    [item] = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert item == {
        "id": "ctc_r_0",
        "type": "custom_tool_call",
        "status": "completed" if is_whole else "incomplete",
        "call_id": "call_a",
        "name": "run",
        "input": "a\nb",
    }
    assert events[-1][1]["response"]["output"] == ([item] if is_whole else [])


def test_a_stream_has_openais_events_in_their_order():
    events = translated(translator(RESPONSES, {"input": "hi", "stream": True}), ALL)
    added, done = "response.output_item.added", "response.output_item.done"
    part_added, part_done = "response.content_part.added", "response.content_part.done"
    arguments = "response.function_call_arguments"
    assert [name for name, _ in events] == [
        "response.created",
        "response.in_progress",
        *(added, part_added, *["response.reasoning_text.delta"] * 2),
        *("response.reasoning_text.done", part_done, done),
        *(added, part_added, *["response.output_text.delta"] * 2),
        *("response.output_text.done", part_done, done),
        *(added, *[f"{arguments}.delta"] * 2, f"{arguments}.done", done),
        *(added, f"{arguments}.delta", f"{arguments}.done", done),
        "response.completed",
    ]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    positions = [data["output_index"] for name, data in events if name == added]
    assert positions == [0, 1, 2, 3]
    items = [data["item"] for name, data in events if name == done]
    assert events[-1][1]["response"]["output"] == items
    assert len({item["id"] for item in items}) == 4


def test_a_whole_answer_is_the_last_event_of_the_stream():
    body = {"input": "hi", "instructions": "Be brief.", "metadata": {"a": "b"}}
    whole = msgspec.json.decode(translator(RESPONSES, body).whole(WHOLE))
    (_, last) = translated(translator(RESPONSES, body | {"stream": True}), ALL)[-1]
    assert last["response"] == whole
    assert (whole["id"], whole["object"], whole["status"]) == ("resp_r", "response", "completed")
    assert (whole["model"], whole["created_at"], whole["store"]) == ("tiny", 17, False)
    assert (whole["instructions"], whole["metadata"]) == ("Be brief.", {"a": "b"})
    reasoning, message, *calls = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "I think."}]
    assert message["content"][0]["text"] == "So: "
    assert [(call["call_id"], call["name"], call["arguments"]) for call in calls] == [
        ("call_a", "look", '{"x": 1}'),
        ("call_b", "see", '{"y": 2}'),
    ]
    assert whole["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 14,
    }


def test_how_a_stream_is_cut_does_not_matter():
    def text(chunks):
        events = translated(translator(RESPONSES, {"input": "hi", "stream": True}), chunks)
        return events[-1][1]["response"]

    assert text([b"".join(ALL)]) == text(ALL)
    assert text([each.replace(b"\n", b"\r\n") for each in ALL]) == text(ALL)


def test_an_answer_that_is_as_long_as_it_may_be_is_incomplete():
    chunks = [chunk({"content": "a la"}), chunk({"content": "zy"}, "length"), DONE]
    events = translated(translator(RESPONSES, {"input": "hi", "stream": True}), chunks)
    name, last = events[-1]
    assert name == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_call_that_proves_to_be_none_is_incomplete_and_not_in_the_response(finish):
    behind = [chunk({"content": "b"})] if finish == "stop" else []
    begun = chunk(call(0, '{"x": 1', name="look", id="call_a"))
    chunks = [chunk({"content": "a"}), begun, *behind, chunk({}, finish), DONE]
    events = translated(translator(RESPONSES, {"input": "hi", "stream": True}), chunks)
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert [item["status"] for item in done[:2]] == ["completed", "incomplete"]
    output = events[-1][1]["response"]["output"]
    assert {item["type"] for item in output} == {"message"}
    assert output[-1]["status"] == ("completed" if finish == "stop" else "incomplete")


def test_a_whole_call_is_complete_whatever_ends_the_answer():
    chunks = [chunk(call(0, '{"x": 1}', name="look", id="call_a")), chunk({}, "length"), DONE]
    events = translated(translator(RESPONSES, {"input": "hi", "stream": True}), chunks)
    assert events[-1][1]["response"]["output"][0]["status"] == "completed"


def test_log_probabilities_come_with_the_text():
    row = {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}
    top = {**row, "top_logprobs": [{"token": "b", "logprob": -2.0, "bytes": [98]}]}
    chunks = [
        chunk({"content": "a"}, logprobs={"content": [top]}),
        chunk({"content": ""}, "stop", logprobs={"content": [row]}),
        DONE,
    ]
    events = dict(translated(translator(RESPONSES, {"input": "hi", "stream": True}), chunks))
    short = {"token": "a", "logprob": -1.0, "top_logprobs": [{"token": "b", "logprob": -2.0}]}
    assert events["response.output_text.delta"]["logprobs"] == [short]
    [item] = events["response.completed"]["response"]["output"]
    assert item["content"][0]["logprobs"] == [top, row]


def test_log_probabilities_are_those_of_the_text():
    rows = [{"token": token, "logprob": -1.0, "top_logprobs": []} for token in "abcde"]
    begun = call(0, '{"x": 1}', name="look", id="call_a")
    chunks = [
        chunk({"reasoning": "a"}, logprobs={"content": rows[:1]}),
        chunk({"content": "b"}, logprobs={"content": rows[1:2]}),
        chunk(begun, "tool_calls", logprobs={"content": rows[2:]}),
        DONE,
    ]
    events = translated(translator(RESPONSES, {"input": "hi", "stream": True}), chunks)
    assert events[-1][1]["response"]["output"][1]["content"][0]["logprobs"] == rows[1:2]
    early = [
        chunk({"content": ""}, logprobs={"content": rows[:1]}),
        chunk({"content": "ab"}, "stop", logprobs={"content": rows[1:2]}),
        DONE,
    ]
    events = translated(translator(RESPONSES, {"input": "hi", "stream": True}), early)
    assert events[-1][1]["response"]["output"][0]["content"][0]["logprobs"] == rows[:2]


def test_a_stream_that_fails_ends_with_what_went_wrong_and_nothing_follows():
    error = {"message": "gone", "type": "server_error", "param": None, "code": "engine_lost"}
    chunks = [chunk({"content": "a"}), sse({"error": error}), DONE, chunk({"content": "b"})]
    events = translated(translator(RESPONSES, {"input": "hi", "stream": True}), chunks)
    name, last = events[-1]
    assert (name, last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "gone"}
    assert last["response"]["usage"] is None
    assert last["response"]["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("data", [b"data: {", b"data: []", b'data: {"choices": [{"delta": 3}]}'])
def test_what_is_no_chat_is_an_engines_fault(data):
    with pytest.raises(UpstreamError):
        translator(RESPONSES, {"input": "hi", "stream": True}).events(data + b"\n\n")


def test_events_that_say_nothing_are_no_events():
    dialect = translator(RESPONSES, {"input": "hi", "stream": True})
    assert dialect.events(sse({"choices": [], "usage": USAGE}) + b": a comment\n\n") == b""
    assert events_in(dialect.events(chunk({"content": ""})))[0][0] == "response.created"
    assert dialect.events(chunk({"content": ""})) == b""


def test_an_error_names_the_field_as_its_client_knows_it():
    error = {"message": "no", "type": "invalid_request_error", "param": "messages", "code": "x"}
    body = msgspec.json.encode({"error": error})
    told = msgspec.json.decode(error_of(RESPONSES, 400, body))["error"]
    assert told == error | {"param": "input"}
    assert error_of("/v1/chat/completions", 400, body) == body
