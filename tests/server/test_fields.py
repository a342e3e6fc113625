"""Fields of vLLM's server beside sampling: what each does, and what is said of others."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from pdserve.http.dialect_bodies import MessagesRequest, ResponsesRequest
from pdserve.http.ignored import IGNORED_HEADER
from pdserve.http.pooling_bodies import EmbeddingRequest, RerankRequest, ScoreRequest
from pdserve.http.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from pdserve.text.chat import ChatTemplate
from tests.server.conftest import events, make_engine, scripted, serving

SHARED = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed
    stop stream stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty
    watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
    skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
    prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo add_special_tokens
    structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
    routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params
    ec_transfer_params vllm_xargs repetition_detection thinking_token_budget stream_interval
    mm_payload
"""
VLLM: dict[type[msgspec.Struct], str] = {
    CompletionRequest: f"{SHARED} prompt suffix prompt_embeds",
    ChatRequest: f"""{SHARED} messages top_logprobs max_completion_tokens tools tool_choice
        reasoning_effort include_reasoning parallel_tool_calls add_generation_prompt
        continue_final_message documents chat_template chat_template_kwargs media_io_kwargs
        mm_processor_kwargs return_prompt_text""",
    TokenizeRequest: """model prompt messages add_special_tokens add_generation_prompt tools
        continue_final_message chat_template chat_template_kwargs media_io_kwargs
        mm_processor_kwargs return_token_strs""",
    DetokenizeRequest: "model tokens",
    EmbeddingRequest: """model user input messages encoding_format dimensions embed_dtype endianness
        use_activation add_special_tokens truncate_prompt_tokens truncation_side padding request_id
        priority mm_processor_kwargs cache_salt""",
    ScoreRequest: "model user truncate_prompt_tokens truncation_side instruction "
    "chat_template_kwargs max_tokens_per_doc max_tokens_per_query",
    RerankRequest: "model query documents top_n truncate_prompt_tokens instruction "
    "chat_template_kwargs max_tokens_per_doc max_tokens_per_query",
    ResponsesRequest: """model input instructions max_output_tokens temperature top_p top_k min_p
        frequency_penalty presence_penalty repetition_penalty stop stop_token_ids session_id
        include_reasoning chat_template_kwargs ec_transfer_params media_io_kwargs mm_payload
        return_mm_kwargs watermarking vllm_xargs""",
    MessagesRequest: """model messages max_tokens cache_salt ec_transfer_params mm_payload
        return_mm_kwargs vllm_xargs watermarking""",
}
"""Fields of the bodies of vLLM 0.32's server, as its protocols have them."""

PATHS = {
    "/v1/completions": (CompletionRequest, {"prompt": "The"}),
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "hi"}]}),
    "/v1/responses": (ResponsesRequest, {"input": "hi"}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "hi"}),
    "/v1/score": (ScoreRequest, {"text_1": "a", "text_2": "b"}),
    "/v1/rerank": (RerankRequest, {"query": "a", "documents": ["b"]}),
    "/tokenize": (TokenizeRequest, {"prompt": "The"}),
}
COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
MESSAGES = [{"role": "user", "content": "hi"}]
OPEN = [*MESSAGES, {"role": "assistant", "content": "a lazy"}]


@pytest.mark.parametrize("kind", VLLM)
def test_no_field_that_vllms_server_knows_is_ignored(kind):
    assert set(VLLM[kind].split()) - set(kind.__struct_encode_fields__) == set()


@pytest.mark.parametrize("path", PATHS)
async def test_what_is_refused_is_so_with_a_remedy(server, path):
    kind, body = PATHS[path]
    for field in kind.unsupported:
        status, error = await server.refused(path, body | {field: ["something"]})
        assert (status, error["param"]) == (400, field)
        assert len(error["message"]) > len(f"{field} is not supported by this server; ")


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, [62, 63, 64]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, [62, 63, 64]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [60, 61, 62]),
        ({"truncate_prompt_tokens": 9}, [60, 61, 62, 63, 64]),
        ({"truncate_prompt_tokens": -1}, [60, 61, 62, 63, 64]),
    ],
)
async def test_a_prompt_is_cut_at_the_side_that_is_asked_for(server, fields, kept):
    body = {"prompt": [60, 61, 62, 63, 64], "max_tokens": 2, "echo": True, **fields}
    answer = await server.ok(COMPLETIONS, body | {"return_token_ids": True})
    assert server.engine.requests[-1].prompt_token_ids == kept
    assert answer["choices"][0]["prompt_token_ids"] == kept
    assert answer["usage"]["prompt_tokens"] == len(kept)


async def test_a_prompt_without_room_is_cut_to_what_has_room(text):
    async with serving(text, make_engine(text, max_model_len=64)) as server:
        body = {"prompt": "The dog. " * 200, "max_tokens": 14}
        status, _ = await server.refused(COMPLETIONS, body)
        answer = await server.ok(COMPLETIONS, body | {"truncate_prompt_tokens": -1})
        many = [{"role": "user", "content": "dog " * 200}]
        chat = await server.ok(
            CHAT, {"messages": many, "max_tokens": 4, "truncate_prompt_tokens": -1}
        )
    assert status == 400
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (50, 14)
    assert (chat["usage"]["prompt_tokens"], chat["usage"]["completion_tokens"]) == (60, 4)


async def test_an_answer_goes_on_with_the_last_message(text):
    engine = scripted(text, " dog")
    async with serving(text, engine) as server:
        body = {"messages": OPEN, "continue_final_message": True}
        plain = await server.ok(CHAT, body | {"add_generation_prompt": False})
        echoed = await server.ok(CHAT, body | {"echo": True})
        chunks = events(await server.stream(CHAT, body | {"echo": True}))
    prompt = text.tokenizer.decode(engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\na lazy"
    assert plain["choices"][0]["message"]["content"] == " dog"
    assert echoed["choices"][0]["message"]["content"] == "a lazy dog"
    deltas = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    assert "".join(deltas) == "a lazy dog"
    assert deltas[0].startswith("a lazy")


async def test_only_the_assistants_own_words_are_echoed(text):
    async with serving(text, scripted(text, "dog")) as server:
        answer = await server.ok(CHAT, {"messages": MESSAGES, "echo": True})
    assert answer["choices"][0]["message"]["content"] == "dog"


async def test_an_answer_cannot_go_on_with_a_message_and_follow_it(server):
    for path in (CHAT, TOKENIZE):
        status, error = await server.refused(
            path,
            {"messages": OPEN, "continue_final_message": True, "add_generation_prompt": True},
        )
        assert (status, error["param"]) == (400, "continue_final_message")


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        ("{{ messages[-1].content }}<end>", "a  "),
        ("{{ messages[-1].content | trim }}<end>", "a"),
        ("{{ messages[-1].content[:2] }}<end>", None),
    ],
)
async def test_a_template_may_cut_spaces_off_but_not_the_message(text, source, prompt):
    engine = scripted(text, "dog")
    async with serving(replace(text, chat_template=ChatTemplate(source, {})), engine) as server:
        body = {"messages": [{"role": "user", "content": "a  "}], "continue_final_message": True}
        status, answer = await server.post(CHAT, body)
    if prompt is None:
        assert (status, answer["error"]["param"]) == (400, "continue_final_message")
    else:
        assert text.tokenizer.decode(engine.requests[0].prompt_token_ids) == prompt


async def test_documents_and_the_prompts_text_are_the_templates(text):
    template = ChatTemplate("{{ documents[0].text }}! {{ messages[0].content }}", {})
    async with serving(replace(text, chat_template=template), scripted(text, "a dog")) as server:
        body = {
            "messages": MESSAGES,
            "documents": [{"title": "x", "text": "fox"}],
            "return_prompt_text": True,
        }
        answer = await server.ok(CHAT, body)
        first, *others = events(await server.stream(CHAT, body))
    assert answer["prompt_text"] == first["prompt_text"] == "fox! hi"
    assert not any("prompt_text" in chunk for chunk in others)


async def test_tokens_are_named_by_their_ids_on_demand(text):
    async with serving(text, scripted(text, "dog")) as server:
        by_id = {"return_tokens_as_token_ids": True, "return_token_ids": True}
        body = {"prompt": "The", "logprobs": 1, "echo": True, "max_tokens": 1, **by_id}
        choice = (await server.ok(COMPLETIONS, body))["choices"][0]
        chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1, "max_tokens": 1}
        row = (await server.ok(CHAT, chat | by_id))["choices"][0]
    token_ids = choice["prompt_token_ids"] + choice["token_ids"]
    named = [f"token_id:{token_id}" for token_id in token_ids]
    assert choice["logprobs"]["tokens"] == named
    assert named[-1] in choice["logprobs"]["top_logprobs"][-1]
    [entry] = row["logprobs"]["content"]
    assert entry["token"] == f"token_id:{row['token_ids'][0]}"
    assert bytes(entry["bytes"]) == text.tokenizer.token_bytes(row["token_ids"][0])


async def test_a_stream_has_as_many_tokens_to_an_event_as_are_asked_for(server):
    body = {"prompt": "The", "max_tokens": 12, "seed": 4, "logprobs": 1, "return_token_ids": True}
    whole = (await server.ok(COMPLETIONS, body))["choices"][0]
    chunks = events(await server.stream(COMPLETIONS, body | {"stream_interval": 4}))
    choices = [chunk["choices"][0] for chunk in chunks]
    sizes = [len(choice["token_ids"]) for choice in choices]
    assert sizes == [1, 4, 4, 3]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert [t for c in choices for t in c["token_ids"]] == whole["token_ids"]
    offsets = [offset for c in choices for offset in c["logprobs"]["text_offset"]]
    assert offsets == whole["logprobs"]["text_offset"]


async def test_each_choice_of_a_stream_fills_its_own_events(server):
    body = {"messages": MESSAGES, "max_tokens": 6, "seed": 4, "n": 2, "stream_interval": 3}
    whole = await server.ok(CHAT, body)
    chunks = events(await server.stream(CHAT, body))
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert len(mine) == 3
        assert "".join(c["delta"]["content"] for c in mine) == choice["message"]["content"]


async def ignored(server, path, body) -> str | None:
    async with server.session.post(server.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        return response.headers.get(IGNORED_HEADER)


@pytest.mark.parametrize("stream", [False, True])
async def test_fields_that_mean_nothing_are_named_in_a_header(server, stream):
    body = {"prompt": "The", "max_tokens": 2, "stream": stream, "temprature": 1, "a\nb, ü": 2}
    assert await ignored(server, COMPLETIONS, body) == "temprature, a%0Ab%2C%20%C3%BC"


async def test_what_means_something_is_not_named(server):
    labels = {"user": "me", "session_id": "mine", "store": None}
    chat = {"messages": MESSAGES, "max_tokens": 2, "stream": True, **labels}
    options = {"stream_options": {"include_usage": True, "include_obfuscation": False}}
    named = await ignored(server, CHAT, chat | options)
    assert named == "store, stream_options.include_obfuscation"
    assert await ignored(server, TOKENIZE, {"prompt": "The"}) is None
    assert await ignored(server, TOKENIZE, {"prompt": "The", "truncate": 3}) == "truncate"


async def test_what_means_nothing_in_a_nested_field_is_named_too(server):
    body = {
        "messages": MESSAGES,
        "max_tokens": 2,
        "prediction": {"type": "content", "content": "The", "weight": 2},
        "response_format": {"type": "text", "schema": {}},
    }
    assert await ignored(server, CHAT, body) == "prediction.weight, response_format.schema"


async def test_many_names_are_cut_short(server):
    body = {"prompt": "The", "max_tokens": 2} | {f"{'x' * 100}{i}": 0 for i in range(40)}
    named = (await ignored(server, COMPLETIONS, body)).split(", ")
    assert named == ["x" * 64] * 16 + ["..."]


async def test_named_tokens_are_told_in_place_of_the_likeliest(server):
    named = {"logprob_token_ids": [90, 61], "return_tokens_as_token_ids": True, "max_tokens": 3}
    body = {"prompt": "The", "logprobs": 0, "seed": 1, "return_token_ids": True, **named}
    choice = (await server.ok(COMPLETIONS, body))["choices"][0]
    told = choice["logprobs"]["top_logprobs"]
    for token_id, alternatives in zip(choice["token_ids"], told, strict=True):
        assert set(alternatives) == {"token_id:90", "token_id:61", f"token_id:{token_id}"}
    chat = {"messages": MESSAGES, "logprobs": True, **named}
    rows = (await server.ok(CHAT, chat))["choices"][0]["logprobs"]["content"]
    for row in rows:
        assert [each["token"] for each in row["top_logprobs"]] == ["token_id:90", "token_id:61"]
        assert all(each["logprob"] <= row["logprob"] for each in row["top_logprobs"])
