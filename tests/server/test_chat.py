from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from pdserve.text.chat import ChatTemplate
from tests.server.conftest import events, make_engine, scripted, serving

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


async def test_an_answer_is_an_assistants_message(text):
    async with serving(text, scripted(text, "a dog")) as server:
        answer = await server.ok(PATH, {"messages": MESSAGES}, X_Request_Id="abc")
    [choice] = answer["choices"]
    assert answer["id"] == "chatcmpl-abc"
    assert answer["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": "a dog"}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)


async def test_the_prompt_is_the_templates(text):
    engine = scripted(text, "a dog")
    async with serving(text, engine) as server:
        await server.ok(PATH, {"messages": MESSAGES})
        await server.ok(PATH, {"messages": MESSAGES, "add_generation_prompt": False})
    shown = [
        text.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        for request in engine.requests
    ]
    assert shown[0] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert shown[1] == "<|im_start|>user\nhi<|im_end|>\n"


async def test_the_role_comes_with_the_first_token_and_only_then(text):
    async with serving(text, scripted(text, "a lazy dog")) as server:
        chunks = events(await server.stream(PATH, {"messages": MESSAGES}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "a"}
    assert all(set(delta) == {"content"} for delta in deltas[1:])
    assert "".join(delta["content"] for delta in deltas) == "a lazy dog"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"


async def test_text_parts_are_content(text):
    parts = [{"type": "text", "text": "hi"}]
    engine = scripted(text, "a dog")
    async with serving(text, engine) as server:
        await server.ok(PATH, {"messages": [{"role": "user", "content": parts}]})
        await server.ok(PATH, {"messages": MESSAGES})
    assert engine.requests[0].prompt_token_ids == engine.requests[1].prompt_token_ids


async def test_without_a_limit_the_answer_may_fill_the_context(text):
    engine = make_engine(text, max_model_len=64)
    async with serving(text, engine) as server:
        answer = await server.ok(PATH, {"messages": MESSAGES})
    assert answer["usage"]["total_tokens"] == 64
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_either_name_limits_the_answer(server, name):
    answer = await server.ok(PATH, {"messages": MESSAGES, name: 4})
    assert answer["usage"]["completion_tokens"] == 4


async def test_logprobs_have_a_row_per_token_with_its_bytes(text):
    async with serving(text, scripted(text, "é!")) as server:
        body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
        whole = await server.ok(PATH, body)
        chunks = events(await server.stream(PATH, body))
    rows = whole["choices"][0]["logprobs"]["content"]
    assert bytes(byte for row in rows[:-1] for byte in row["bytes"]).decode() == "é!"
    assert all(set(row) == {"token", "logprob", "bytes", "top_logprobs"} for row in rows)
    assert all(len(row["top_logprobs"]) == 2 for row in rows)
    assert [row for c in chunks for row in c["choices"][0]["logprobs"]["content"]] == rows


async def test_logprobs_without_alternatives_have_none(text):
    async with serving(text, scripted(text, "dog")) as server:
        answer = await server.ok(PATH, {"messages": MESSAGES, "logprobs": True})
    assert all(not row["top_logprobs"] for row in answer["choices"][0]["logprobs"]["content"])


async def test_prompt_logprobs_and_token_ids_stand_at_the_top(text):
    async with serving(text, scripted(text, "dog")) as server:
        body = {"messages": MESSAGES, "prompt_logprobs": 0, "return_token_ids": True}
        answer = await server.ok(PATH, body)
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
    assert answer["prompt_logprobs"][0] is None
    assert text.tokenizer.decode(answer["choices"][0]["token_ids"]) == "dog"


async def test_the_models_limit_of_output_tokens_holds_where_a_chat_sets_none(text):
    limited = replace(text, defaults=msgspec.structs.replace(text.defaults, max_new_tokens=3))
    chat = {"messages": MESSAGES, "ignore_eos": True}
    async with serving(limited, make_engine(limited)) as server:
        chats = [await server.ok(PATH, chat | said) for said in ({}, {"max_tokens": 5})]
        completion = await server.ok("/v1/completions", {"prompt": "a", "ignore_eos": True})
    assert [each["usage"]["completion_tokens"] for each in (*chats, completion)] == [3, 5, 16]


async def test_several_choices_stream_side_by_side(server):
    body = {"messages": MESSAGES, "n": 3, "seed": 2, "max_tokens": 6}
    whole = await server.ok(PATH, body)
    chunks = events(await server.stream(PATH, body))
    for choice in whole["choices"]:
        mine = [
            chunk["choices"][0]["delta"]
            for chunk in chunks
            if chunk["choices"][0]["index"] == choice["index"]
        ]
        assert [delta.get("role") for delta in mine] == ["assistant"] + [None] * 5
        assert "".join(delta["content"] for delta in mine) == choice["message"]["content"]


async def test_a_model_without_a_template_names_the_remedy(text):
    plain = replace(text, chat_template=None)
    async with serving(plain, make_engine(text)) as server:
        status, error = await server.refused(PATH, {"messages": MESSAGES})
    assert status == 400
    assert "--chat-template" in error["message"]


async def test_template_variables_reach_the_template(text):
    template = ChatTemplate("{{ messages[0].content }}{{ extra }}", {})
    engine = scripted(text, "dog")
    async with serving(replace(text, chat_template=template), engine) as server:
        await server.ok(PATH, {"messages": MESSAGES, "chat_template_kwargs": {"extra": "!"}})
    assert text.tokenizer.decode(engine.requests[0].prompt_token_ids) == "hi!"


async def test_a_prediction_changes_no_answer_and_usage_says_how_its_drafts_did(text):
    parts = [{"type": "text", "text": "a dog"}]
    async with serving(text, scripted(text, "a dog")) as server:
        plain = await server.ok(PATH, {"messages": MESSAGES})
        for content in ("a dog", parts):
            prediction = {"type": "content", "content": content}
            answer = await server.ok(PATH, {"messages": MESSAGES, "prediction": prediction})
            assert answer["choices"] == plain["choices"]
            # This engine drafts nothing.
            assert answer["usage"]["completion_tokens_details"] == {
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            }
    assert "completion_tokens_details" not in plain["usage"]


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ({"type": "text", "content": "a"}, "it must be 'content'"),
        ({"type": "content", "content": [{"type": "image", "text": ""}]}, "of type 'image'"),
        ({"type": "content"}, "missing required field `content`"),
        ("a dog", "prediction"),
    ],
)
async def test_a_prediction_that_is_no_text_is_refused(server, prediction, message):
    body = {"messages": MESSAGES, "prediction": prediction}
    status, error = await server.refused(PATH, body)
    assert (status, error["param"]) == (400, "prediction")
    assert message in error["message"]
