from __future__ import annotations

import msgspec
import pytest

from pdserve.dialects.paths import COUNT_TOKENS, MESSAGES, error_of, tokens_asked, tokens_counted
from pdserve.errors import BadRequestError
from pdserve.http.parsing import parse_body
from pdserve.http.protocol import ChatRequest, TokenizeRequest
from tests.dialects.chats import ALL, DONE, USAGE, WHOLE, call, chunk, sse, translated, translator

HI = [{"role": "user", "content": "hi"}]


def asked(**body):
    """The chat that a request becomes."""
    return translator(MESSAGES, {"messages": HI, "max_tokens": 9} | body).chat


def block(kind, **more):
    return {"type": kind, **more}


def text(words):
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


def test_the_system_is_the_first_message_without_what_differs_each_time():
    system = [text("x-anthropic-billing-header: cc_version=1; cch=77;"), text("Be"), text("brief.")]
    said = [*HI, {"role": "system", "content": "More."}]
    assert asked(system=system, messages=said)["messages"] == [
        {"role": "system", "content": "Be\n\nbrief."},
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "More."},
    ]
    assert asked(system="Be brief.")["messages"][0]["content"] == "Be brief."


def test_a_turn_of_the_assistant_is_one_message_and_results_of_tools_are_others():
    messages = [
        {"role": "user", "content": [text("a"), text("b")]},
        {
            "role": "assistant",
            "content": [
                block("thinking", thinking="I think.", signature=""),
                block("redacted_thinking", data="xx"),
                text("So: "),
                block("tool_use", id="t1", name="look", input={"x": 1}),
            ],
        },
        {
            "role": "user",
            "content": [
                block("tool_result", tool_use_id="t1", content=[text("1")]),
                block("tool_result", tool_use_id="t2", content="2", is_error=True),
                block("tool_result", tool_use_id="t3"),
            ],
        },
        {
            "role": "user",
            "content": [block("tool_result", tool_use_id="t4", content="4"), text("go on")],
        },
    ]
    call = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"x":1}'}}
    assert asked(messages=messages)["messages"] == [
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "So: ",
            "reasoning": "I think.",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "1"},
        {"role": "tool", "tool_call_id": "t2", "content": "2"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "tool", "tool_call_id": "t4", "content": "4"},
        {"role": "user", "content": "go on"},
    ]


def test_a_last_message_of_the_assistant_is_gone_on_with():
    chat = asked(messages=[*HI, {"role": "assistant", "content": "a la"}])
    assert chat["continue_final_message"] is True
    assert "continue_final_message" not in asked()


def test_fields_of_a_chat_have_their_names_there():
    tool = {"name": "look", "description": "d", "input_schema": {"type": "object"}}
    chat = asked(
        model="tiny",
        stop_sequences=["x"],
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        cache_salt="s",
        stream=True,
        thinking={"type": "adaptive"},
        metadata={"user_id": "me"},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"a": 1}}},
        tools=[tool],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        chat_template_kwargs={"extra": "!"},
    )
    function = {"name": "look", "description": "d", "parameters": {"type": "object"}}
    schema = {"name": "output", "schema": {"a": 1}, "strict": True}
    assert chat == {
        "messages": HI,
        "model": "tiny",
        "max_tokens": 9,
        "stop": ["x"],
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "cache_salt": "s",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "chat_template_kwargs": {"extra": "!", "enable_thinking": True},
        "user": "me",
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": schema},
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    named = asked(tools=[tool], tool_choice={"type": "tool", "name": "look"})
    assert named["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    off = asked(thinking={"type": "disabled"})
    assert off["chat_template_kwargs"] == {"enable_thinking": False}


def test_what_means_nothing_of_thoughts_and_results_is_said_to():
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    body = {"messages": HI, "max_tokens": 9, "thinking": thinking}
    assert translator(MESSAGES, body).ignored == ("thinking.budget_tokens", "thinking.display")
    for is_error, ignored in ((True, ("messages.content.is_error",)), (False, ()), (None, ())):
        result = block("tool_result", tool_use_id="t", content="no", is_error=is_error)
        body = {"messages": [{"role": "user", "content": [result]}], "max_tokens": 9}
        assert translator(MESSAGES, body).ignored == ignored


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("container", "c"),
        ("mcp_servers", [{}]),
        ("service_tier", "priority"),
        ("kv_transfer_params", {}),
        ("tools", [{"type": "web_search_20250305", "name": "web_search"}]),
        ("system", [{"type": "image"}]),
        ("max_tokens", "x"),
        ("messages", 3),
        ("messages", [{}]),
        ("messages", [{"role": "user", "content": 3}]),
        ("messages", [{"role": "user", "content": [3]}]),
        ("messages", [{"role": "user", "content": [block("image", source={})]}]),
        ("messages", [{"role": "user", "content": [block("text", text=3)]}]),
        ("messages", [{"role": "user", "content": [block("tool_use", id="x")]}]),
        ("messages", [{"role": "user", "content": [block("tool_result")]}]),
        ("messages", [{"role": "user", "content": [block(["x"])]}]),
    ],
)
def test_what_is_not_served_is_named(field, value):
    with pytest.raises(BadRequestError) as raised:
        asked(**{field: value})
    assert raised.value.param == field
    assert field in raised.value.message


def test_a_choice_of_a_tool_where_there_is_none_is_left_to_the_chat_to_refuse():
    assert asked(tool_choice={"type": "any"})["tool_choice"] == "required"


def test_a_choice_of_another_kind_is_named():
    with pytest.raises(BadRequestError, match="tool_choice"):
        asked(tools=[{"name": "x"}], tool_choice={"type": "some"})


def test_a_stream_has_anthropics_events_in_their_order():
    body = {"messages": HI, "max_tokens": 9, "stream": True}
    events = translated(translator(MESSAGES, body), ALL)
    start, delta, stop = (f"content_block_{name}" for name in ("start", "delta", "stop"))
    assert [name for name, _ in events] == [
        "message_start",
        *(start, delta, delta, delta, stop),
        *(start, delta, delta, stop),
        *(start, delta, delta, stop),
        *(start, delta, stop),
        "message_delta",
        "message_stop",
    ]
    blocks = [data["content_block"] for name, data in events if name == start]
    assert blocks == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_a", "name": "look", "input": {}},
        {"type": "tool_use", "id": "call_b", "name": "see", "input": {}},
    ]
    deltas = [data["delta"] for name, data in events if name == delta]
    assert [each["type"] for each in deltas] == [
        *("thinking_delta", "thinking_delta", "signature_delta", "text_delta", "text_delta"),
        *("input_json_delta", "input_json_delta", "input_json_delta"),
    ]
    assert deltas[2]["signature"] == "msg_r_0"
    first = events[0][1]["message"]
    assert (first["id"], first["role"], first["content"]) == ("msg_r", "assistant", [])
    assert (first["stop_reason"], first["stop_sequence"]) == (None, None)
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_a_call_that_ends_in_one_event_with_text_and_the_next_call_ends_first():
    calls = [*call(0, "}")["tool_calls"], *call(1, "{}", name="see", id="b")["tool_calls"]]
    both = chunk({"content": "then", "tool_calls": calls})
    chunks = [chunk(call(0, '{"x": 1', name="look", id="a")), both, chunk({}, "tool_calls"), DONE]
    body = {"messages": HI, "max_tokens": 9, "stream": True}
    events = translated(translator(MESSAGES, body), chunks)
    blocks = [data["content_block"]["type"] for _, data in events if "content_block" in data]
    assert blocks == ["tool_use", "text", "tool_use"]
    deltas = [(data["index"], data["delta"]) for name, data in events if "_block_delta" in name]
    told = [(index, each.get("partial_json") or each.get("text")) for index, each in deltas]
    assert told == [(0, '{"x": 1'), (0, "}"), (1, "then"), (2, "{}")]


def test_a_whole_answer_has_its_blocks_and_what_no_cache_had_as_input():
    whole = msgspec.json.decode(
        translator(MESSAGES, {"messages": HI, "max_tokens": 9}).whole(WHOLE)
    )
    assert whole == {
        "id": "msg_r",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [
            {"type": "thinking", "thinking": "I think.", "signature": "msg_r_0"},
            {"type": "text", "text": "So: "},
            {"type": "tool_use", "id": "call_a", "name": "look", "input": {"x": 1}},
            {"type": "tool_use", "id": "call_b", "name": "see", "input": {"y": 2}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 5,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 5,
        },
    }


@pytest.mark.parametrize(
    ("finish", "stop", "told"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", 7, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("tool_calls", "END", ("tool_use", "END")),
        ("length", None, ("max_tokens", None)),
    ],
)
def test_why_an_answer_ends(finish, stop, told):
    chunks = [chunk({"content": "a"}), chunk({"content": ""}, finish, stop_reason=stop), DONE]
    body = {"messages": HI, "max_tokens": 9, "stream": True}
    last = dict(translated(translator(MESSAGES, body), chunks))["message_delta"]["delta"]
    assert (last["stop_reason"], last["stop_sequence"]) == told


def test_the_first_event_has_the_tokens_of_the_prompt():
    first = msgspec.json.decode(chunk({"content": "a"})[len("data: ") :]) | {"usage": USAGE}
    body = {"messages": HI, "max_tokens": 9, "stream": True}
    [(_, start), *_] = translated(translator(MESSAGES, body), [sse(first)])
    assert start["message"]["usage"]["input_tokens"] == 5


def test_arguments_keep_the_models_own_spelling():
    arguments = '{"x": 1.50, "y": -9e999}'
    message = {"tool_calls": [{"id": "a", "function": {"name": "f", "arguments": arguments}}]}
    answer = {"choices": [{"message": message, "finish_reason": "tool_calls"}]}
    whole = translator(MESSAGES, {"messages": HI, "max_tokens": 9}).whole(sse(answer)[6:])
    assert f'"input":{arguments}'.encode() in whole


def test_a_stream_that_fails_ends_with_what_went_wrong():
    error = {"message": "gone", "type": "server_error", "param": None, "code": "engine_lost"}
    body = {"messages": HI, "max_tokens": 9, "stream": True}
    events = translated(
        translator(MESSAGES, body), [chunk({"content": "a"}), sse({"error": error})]
    )
    assert events[-1] == ("error", {"error": {"type": "api_error", "message": "gone"}})


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (499, "invalid_request_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors_have_anthropics_shape(status, kind):
    error = {"message": "no", "type": "x", "param": None, "code": "y"}
    body = msgspec.json.encode({"error": error})
    for path in (MESSAGES, COUNT_TOKENS):
        told = msgspec.json.decode(error_of(path, status, body))
        assert told == {"type": "error", "error": {"type": kind, "message": "no"}}


def test_a_prompt_beyond_the_context_is_told_as_claude_code_knows_it():
    error = {"message": "The context is 9 tokens.", "code": "context_length_exceeded"}
    told = msgspec.json.decode(error_of(MESSAGES, 400, msgspec.json.encode({"error": error})))
    assert told["error"]["message"] == "prompt is too long: The context is 9 tokens."


def test_tokens_are_counted_of_what_stands_in_the_prompt():
    body = {"messages": HI, "system": "Be brief.", "model": "tiny", "tools": [{"name": "look"}]}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    told = parse_body(tokens_asked(msgspec.json.encode(body)), TokenizeRequest)
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    assert (told.model, told.messages, told.tools) == ("tiny", messages, [tool])
    counted = tokens_counted(b'{"count": 7, "tokens": [1]}')
    assert msgspec.json.decode(counted) == {"input_tokens": 7}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"name": "look"}]},
        {"tools": [{"name": "look"}], "tool_choice": {"type": "none"}},
        {"output_config": {"effort": "low"}},
        {"output_config": {"effort": "none"}},
        {"output_config": {"effort": "none"}, "thinking": {"type": "enabled"}},
    ],
)
def test_a_count_is_of_what_a_template_is_told_for_the_message(fields):
    chat = parse_body(msgspec.json.encode(asked(**fields)), ChatRequest)
    data = msgspec.json.encode({"messages": HI, **fields})
    counted = parse_body(tokens_asked(data), TokenizeRequest)
    assert (counted.tools or []) == chat.offered_tools
    assert counted.template_variables == chat.template_variables
