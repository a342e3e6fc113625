from __future__ import annotations

import json
import logging
import time

import pytest

from pdserve.text.tokenizer import Tokenizer
from pdserve.wire.request import EngineOutput, FinishReason
from tests.server.conftest import events, make_engine, serving

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = {"prompt": "The"}
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 5000),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "many"),
        ("max_tokens", 2.5),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("seed", 2**63),
        ("seed", "x"),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", 3),
        ("stop", [str(number) for number in range(65)]),
        ("stop_token_ids", [100000]),
        ("logit_bias", {"100000": 1}),
        ("logit_bias", {"dog": 1}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("bad_words", [" "]),
        ("bad_words", ["a"] * 1025),
        ("priority", 1),
        ("cache_salt", ""),
        ("stream_options", {"include_usage": True}),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", ""),
        ("prompt", ["a", 1]),
        ("prompt", [100000]),
        ("prompt", {"text": "a"}),
        ("prompt", [1, [2]]),
        ("suffix", "x"),
        ("best_of", 2),
        ("prompt_embeds", "x"),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncation_side", "middle"),
        ("stream_interval", 0),
        ("request_id", "x"),
        ("ec_transfer_params", {}),
        ("routed_experts_prompt_start", 3),
        ("return_token_offsets", True),
        ("return_token_offsets", 0),
        ("use_beam_search", True),
        ("return_tokens_as_token_ids", "all"),
        ("logprob_token_ids", [60]),
        ("logprob_token_ids", [100000]),
        ("logprob_token_ids", []),
        ("logprob_token_ids", [60] * 129),
        ("thinking_token_budget", 8),
        ("kv_transfer_params", 3),
    ],
)
async def test_a_wrong_completion_field_is_named(server, field, value):
    status, error = await server.refused(COMPLETIONS, PROMPT | {field: value})
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", field)
    assert field in error["message"]
    assert not server.engine.requests


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []),
        ("messages", "hi"),
        ("messages", [{"role": "robot", "content": "x"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        ("max_tokens", 0),
        ("max_completion_tokens", 0),
        ("logprobs", 3),
        ("top_logprobs", 2),
        ("tools", [{"type": "function"}]),
        ("tools", [{"type": "retrieval"}]),
        ("tools", [{"function": {"name": ""}}]),
        ("tools", [{"function": {"name": "f", "parameters": []}}]),
        ("tools", [{"function": {"name": "f"}}, {"function": {"name": "f"}}]),
        ("tools", [{"function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("tool_choice", "any"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("tool_choice", 1),
        ("parallel_tool_calls", 1),
        ("functions", [{}]),
        ("modalities", ["audio"]),
        ("audio", {"voice": "x"}),
        ("response_format", {"type": "json_schema"}),
        ("reasoning_effort", "very"),
        ("chat_template", "{{ 1 }}"),
        ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}),
        ("chat_template_kwargs", {"add_generation_prompt": False}),
        ("continue_final_message", "yes"),
        ("documents", "x"),
        ("mm_processor_kwargs", {"a": 1}),
        ("media_io_kwargs", {"video": {}}),
        ("include_reasoning", "no"),
        ("verbosity", "low"),
    ],
)
async def test_a_wrong_chat_field_is_named(server, field, value):
    status, error = await server.refused(CHAT, MESSAGES | {field: value})
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", field)
    assert not server.engine.requests


async def test_a_wrong_choice_is_told_the_right_ones(server):
    _, error = await server.refused(COMPLETIONS, PROMPT | {"truncation_side": "middle"})
    assert error["message"].endswith("use one of left, right")


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
async def test_the_least_number_of_tokens_is_that_of_the_endpoint(server, path, body):
    _, error = await server.refused(path, body | {"max_tokens": -1})
    least = await server.refused(path, body | {"max_tokens": 0})
    assert error["message"].endswith(f"at least {0 if path == COMPLETIONS else 1}")
    assert "at least 1" in least[1]["message"]


async def test_values_that_ask_for_nothing_are_no_errors(server):
    nothing = {
        "suffix": None,
        "best_of": 1,
        "response_format": {"type": "text"},
        "use_beam_search": False,
    }
    await server.ok(COMPLETIONS, PROMPT | nothing)
    nothing = {"tools": [], "tool_choice": "none", "modalities": ["text"], "max_tokens": 2}
    await server.ok(CHAT, MESSAGES | nothing)


async def test_tools_that_are_not_to_be_called_are_left_out(server):
    tools = [{"type": "function", "function": {"name": "f"}}]
    await server.ok(CHAT, MESSAGES | {"tools": tools, "tool_choice": "none", "max_tokens": 2})
    functions = {"functions": [{"name": "f"}], "function_call": "none", "max_tokens": 2}
    await server.ok(CHAT, MESSAGES | functions)
    plain, *others = [list(r.prompt_token_ids) for r in server.engine.requests]
    assert others == [plain] * len(others)
    for choice in ({}, {"tool_choice": "auto"}):
        status, error = await server.refused(CHAT, MESSAGES | {"tools": tools} | choice)
        assert (status, error["param"]) == (400, "tools")
        assert "--tool-call-parser" in error["message"]


async def test_a_field_that_nobody_knows_is_ignored_and_logged_once(server, caplog):
    caplog.set_level(logging.INFO, "pdserve.server")
    for name in ("temprature", "temprature", "a\nb"):
        await server.ok(COMPLETIONS, PROMPT | {name: 0.5})
    await server.ok(CHAT, MESSAGES | {"temprature": 0.5, "max_tokens": 2})
    said = [each.getMessage() for each in caplog.records if "field ignored" in each.getMessage()]
    assert len(said) == 2
    assert "temprature" in said[0]
    assert "\n" not in said[1]


async def test_a_name_that_is_no_text_is_no_json(server):
    body = b'{"prompt": "a", "max_tokens": 1, "\xff": 1}'
    async with server.session.post(server.url + COMPLETIONS, data=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["code"] == "invalid_json"


async def test_fields_that_nobody_knows_fill_no_memory_and_no_log(server, caplog):
    caplog.set_level(logging.INFO, "pdserve.server")
    await server.ok(COMPLETIONS, PROMPT | {f"x{i}": 0 for i in range(200)})
    assert sum("field ignored" in each.getMessage() for each in caplog.records) == 64


async def test_prompt_logprobs_and_streaming_exclude_each_other(server):
    body = PROMPT | {"prompt_logprobs": 1, "stream": True}
    status, error = await server.refused(COMPLETIONS, body)
    assert (status, error["param"]) == (400, "prompt_logprobs")


@pytest.mark.parametrize(("path", "field"), [(COMPLETIONS, "prompt"), (CHAT, "messages")])
async def test_a_missing_field_is_named(server, path, field):
    status, error = await server.refused(path, {})
    assert (status, error["param"]) == (400, field)
    assert error["code"] == "missing_required_parameter"


@pytest.mark.slow
@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'"x"', b"\xff"])
async def test_a_body_that_is_no_json_object_is_a_400(server, data):
    async with server.session.post(server.url + COMPLETIONS, data=data) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_a_lone_surrogate_is_a_400(server):
    data = json.dumps({"prompt": "x"}).replace("x", "\\ud800").encode()
    async with server.session.post(server.url + COMPLETIONS, data=data) as response:
        assert response.status == 400, await response.text()


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (COMPLETIONS, {"prompt": "a" * 10_000}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 10_000}]}, "messages"),
    ],
)
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    text, monkeypatch, path, body, field
):
    monkeypatch.setattr(Tokenizer, "encode", None)
    async with serving(text, make_engine(text, max_model_len=64)) as server:
        status, error = await server.refused(path, body)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == field


@pytest.mark.parametrize(
    ("body", "remedy"),
    [
        ({"prompt": [60] * 64}, "shorten the prompt to at most 63"),
        ({"prompt": [60] * 64, "max_tokens": 0, "echo": True}, "shorten the prompt to at most 63"),
        ({"prompt": [60] * 9, "max_tokens": 64, "truncate_prompt_tokens": -1}, "ask for fewer"),
    ],
)
async def test_too_long_a_request_names_the_models_context(text, body, remedy):
    async with serving(text, make_engine(text, max_model_len=64)) as server:
        status, error = await server.refused(COMPLETIONS, body)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 64 tokens" in error["message"]
    assert remedy in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, PROMPT), (CHAT, MESSAGES), ("/tokenize", PROMPT)],
)
async def test_an_unknown_model_is_a_404_that_names_the_known(server, path, body):
    status, error = await server.refused(path, body | {"model": "gpt-9"})
    assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert "tiny" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "allowed"),
    [
        ("GET", "/", 404, "not_found", None),
        ("POST", "/chat/completions", 404, "not_found", None),
        ("GET", "/v1/completions", 405, "method_not_allowed", "POST"),
        ("POST", "/v1/models", 405, "method_not_allowed", "GET, HEAD"),
    ],
)
async def test_other_paths_and_methods_are_openai_shaped(
    server, method, path, status, code, allowed
):
    async with server.session.request(method, server.url + path) as response:
        assert response.status == status
        assert response.headers.get("Allow") == allowed
        assert (await response.json())["error"]["code"] == code
        assert response.headers["X-Request-Id"]


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Basic right", 401),
        ("right", 401),
        ("Bearer rïght", 401),
        ("Bearer right", 200),
        ("bearer also", 200),
    ],
)
async def test_an_api_key_is_asked_for(text, header, status):
    headers = {} if header is None else {"Authorization": header}
    async with serving(text, make_engine(text), api_keys=("right", "also")) as server:
        got, answer = await server.post(COMPLETIONS, PROMPT, **headers)
        assert got == status, answer
        if status == 401:
            assert answer["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_full_engine_is_a_429_with_retry_after(text, stream):
    engine = make_engine(text, max_waiting=0)
    async with serving(text, engine) as server:
        body = PROMPT | {"stream": stream}
        async with server.session.post(server.url + COMPLETIONS, json=body) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["code"] == "overloaded"


async def test_an_engine_that_starts_is_a_503_with_retry_after(text):
    async with (
        serving(text, make_engine(text, ready=False)) as server,
        server.session.post(server.url + COMPLETIONS, json=PROMPT) as response,
    ):
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
        told = (await response.json())["error"]
    assert (told["type"], told["code"]) == ("service_unavailable_error", "engine_starting")


async def test_an_engine_that_stands_still_says_so(text):
    engine = make_engine(text)
    engine.stall_reason = "the engine core has not answered for 3 s"
    async with serving(text, engine) as server:
        status, error = await server.refused(COMPLETIONS, PROMPT)
    assert (status, error["code"]) == (503, "engine_stalled")
    assert "for 3 s" in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_dies_before_the_first_token_is_a_503(text, path, stream):
    engine = make_engine(text, die_after=0)
    async with serving(text, engine) as server:
        status, error = await server.refused(path, PROMPT | MESSAGES | {"stream": stream})
    assert (status, error["code"]) == (503, "engine_dead")


@pytest.mark.parametrize("n", [1, 2])
async def test_an_engine_that_dies_in_mid_stream_ends_it_with_an_error_event(text, n):
    engine = make_engine(text, die_after=4)
    async with serving(text, engine) as server:
        *chunks, last = events(await server.stream(COMPLETIONS, PROMPT | {"n": n}))
    assert len(chunks) == 4
    assert last["error"]["code"] == "engine_dead"
    assert all("error" not in chunk for chunk in chunks)


async def test_a_bug_in_the_server_is_a_500_without_details(text, caplog):
    async def broken(request, siblings):
        raise ZeroDivisionError("a secret detail")
        yield

    engine = make_engine(text)
    engine.generate = broken
    async with serving(text, engine) as server:
        status, error = await server.refused(COMPLETIONS, PROMPT)
    assert (status, error["code"]) == (500, "internal_error")
    assert "secret" not in error["message"]
    assert "a secret detail" in caplog.text


async def test_a_bug_in_mid_stream_ends_it_with_an_error_event(text, caplog):
    async def broken(request, siblings):
        for _ in range(2):
            yield EngineOutput(request_id=request.request_id, new_token_ids=[60])
        raise ZeroDivisionError

    engine = make_engine(text)
    engine.generate = broken
    async with serving(text, engine) as server:
        *chunks, last = events(await server.stream(COMPLETIONS, PROMPT))
        _, metrics = await server.get("/metrics")
    assert len(chunks) == 2
    assert last["error"]["code"] == "internal_error"
    assert "ZeroDivisionError" in caplog.text
    assert (
        'request_success_total{engine="0",finished_reason="error",model_name="tiny"} 1.0' in metrics
    )
    assert 'client_disconnects_total{stage="decode"} 0.0' in metrics


@pytest.mark.parametrize("left", ["soon", "nan"])
@pytest.mark.parametrize("header", ["X-Pdserve-Time-Left", "X-Pdserve-Yields"])
async def test_a_header_of_seconds_that_is_no_number_is_a_400(server, header, left):
    status, error = await server.refused(COMPLETIONS, PROMPT, **{header: left})
    assert status == 400
    assert header in error["message"]


async def test_no_header_lets_a_request_pass_others(server):
    await server.ok(COMPLETIONS, PROMPT, **{"X-Pdserve-Yields": "-5"})
    assert server.engine.requests[-1].yields_s == 0.0


async def test_the_time_left_travels_to_the_engine_by_this_hosts_own_clock(server):
    before_s = time.monotonic()
    await server.ok(COMPLETIONS, PROMPT, X_Pdserve_Time_Left="1900.5")
    [request] = server.engine.requests
    assert request.deadline_s == request.arrival_s + 1900.5
    assert before_s <= request.arrival_s <= time.monotonic()


async def test_two_requests_of_one_id_are_two_for_the_engine(server):
    for _ in range(2):
        await server.ok(COMPLETIONS, PROMPT | {"n": 2}, X_Request_Id="same")
    assert len({request.request_id for request in server.engine.requests}) == 4


@pytest.mark.parametrize("given", ["x" * 129, "é"])
async def test_an_unusable_request_id_is_replaced(server, given):
    async with server.session.post(
        server.url + COMPLETIONS, json=PROMPT, headers={"X-Request-Id": given}
    ) as response:
        assert response.headers["X-Request-Id"] not in ("", given)


@pytest.mark.parametrize(
    ("reason", "deadline", "status", "code"),
    [
        (FinishReason.ERROR, None, 500, "internal_error"),
        (FinishReason.ABORT, None, 503, "shutting_down"),
        (FinishReason.ABORT, "-1.0", 504, "deadline_exceeded"),
        (FinishReason.ABORT, "0", 504, "deadline_exceeded"),
    ],
)
async def test_what_the_engine_gives_up_is_an_error(text, reason, deadline, status, code):
    engine = make_engine(text)

    async def generate(request, siblings):
        yield EngineOutput(request_id=request.request_id, finish_reason=reason, error="it said why")

    engine.generate = generate
    headers = {} if deadline is None else {"X-Pdserve-Time-Left": deadline}
    async with serving(text, engine) as server:
        got, error = await server.refused(COMPLETIONS, PROMPT, **headers)
    assert (got, error["code"]) == (status, code)
    assert deadline is not None or error["message"] == "it said why"


async def test_a_body_with_a_byte_order_mark_is_refused_with_the_remedy(server):
    body = '{"prompt": "a", "max_tokens": 1}'.encode("utf-8-sig")
    async with server.session.post(server.url + COMPLETIONS, data=body) as response:
        assert response.status == 400
        said = (await response.json())["error"]["message"]
        assert said.endswith("send it in UTF-8, without a byte order mark")
