from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.config.schema import SchedulingPolicy
from pdserve.server.form import TokenNames, echoed_logprobs
from pdserve.wire.sampling import SamplingParams
from tests.server.conftest import EOS, events, make_engine, scripted, serving
from tests.text.tiny import make_tokenizer

PATH = "/v1/completions"


async def test_an_answer_has_text_usage_and_the_requests_id(server):
    body = {"prompt": "The quick", "max_tokens": 5, "model": "tiny"}
    answer = await server.ok(PATH, body, X_Request_Id="abc")
    [choice] = answer["choices"]
    assert answer["id"] == "cmpl-abc"
    assert answer["object"] == "text_completion"
    assert choice["finish_reason"] == "length"
    assert choice["text"]
    num_prompt = answer["usage"]["prompt_tokens"]
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 5,
        "total_tokens": num_prompt + 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_stream_says_what_the_whole_answer_says(server):
    body = {"prompt": "The quick", "max_tokens": 40, "seed": 3, "n": 2, "logprobs": 2}
    whole = await server.ok(PATH, body)
    chunks = events(await server.stream(PATH, body))
    for index, choice in enumerate(whole["choices"]):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        assert [piece["finish_reason"] for piece in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == choice["finish_reason"] == "length"
        for column, values in choice["logprobs"].items():
            assert [v for piece in mine for v in piece["logprobs"][column]] == values


@pytest.mark.parametrize("prompt", [["one", "two", "three"], [[60, 61], [62], [63]]])
async def test_a_list_of_prompts_gives_their_choices_in_order(server, prompt):
    answer = await server.ok(PATH, {"prompt": prompt, "n": 2, "max_tokens": 3, "temperature": 0})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    texts = [choice["text"] for choice in answer["choices"]]
    single = await server.ok(PATH, {"prompt": prompt[1], "max_tokens": 3, "temperature": 0})
    assert texts[2] == texts[3] == single["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] == 18


async def test_choices_of_a_seed_differ_and_come_again(server):
    body = {"prompt": "The", "n": 3, "seed": 7, "max_tokens": 8}
    first, second = [await server.ok(PATH, body) for _ in range(2)]
    texts = [choice["text"] for choice in first["choices"]]
    assert len(set(texts)) == 3
    assert texts == [choice["text"] for choice in second["choices"]]
    alone = await server.ok(PATH, body | {"n": 1})
    assert alone["choices"][0]["text"] == texts[0]


async def test_without_a_seed_equal_prompts_differ(server):
    answer = await server.ok(PATH, {"prompt": ["The", "The"], "max_tokens": 8})
    assert answer["choices"][0]["text"] != answer["choices"][1]["text"]


async def test_a_word_after_the_prompt_keeps_its_leading_space(text):
    tokenizer = make_tokenizer("byte_fallback")  # its decoder drops the space of a first word
    own = replace(text, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)
    async with serving(own, scripted(own, "dog sleeps")) as server:
        answer = await server.ok(PATH, {"prompt": "The lazy", "echo": True, "temperature": 0})
    assert answer["choices"][0]["text"] == "The lazy dog sleeps"


async def test_the_end_of_sequence_ends_the_text_and_counts_as_a_token(text):
    async with serving(text, scripted(text, "a dog")) as server:
        answer = await server.ok(PATH, {"prompt": "The", "return_token_ids": True})
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("a dog", "stop")
    assert choice["token_ids"][-1] == EOS
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert choice["prompt_token_ids"] == text.tokenizer.encode("The")


async def test_a_stop_string_across_tokens_ends_the_text_and_the_engines_request(text):
    engine = scripted(text, "the lazy dog sleeps on")
    async with serving(text, engine) as server:
        body = {"prompt": "x", "stop": ["zy d", "never"]}
        [choice] = (await server.ok(PATH, body))["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("the la", "stop")
        assert choice["stop_reason"] == "zy d"
        assert len(engine.aborted) == 1
        [choice] = (await server.ok(PATH, body | {"include_stop_str_in_output": True}))["choices"]
        assert choice["text"] == "the lazy d"


async def test_no_part_of_a_stop_string_is_streamed(text):
    async with serving(text, scripted(text, "the lazy dog sleeps on")) as server:
        stream = await server.stream(PATH, {"prompt": "x", "stop": "zy dog sleeps off"})
        shown = ""
        for event in events(stream):
            shown += event["choices"][0]["text"]
            assert "the lazy dog sleeps on".startswith(shown)
        assert shown == "the lazy dog sleeps on"
        stream = await server.stream(PATH, {"prompt": "x", "stop": "zy dog sl"})
        pieces = [event["choices"][0] for event in events(stream)]
    assert "".join(piece["text"] for piece in pieces) == "the la"
    assert pieces[-1]["finish_reason"] == "stop"


async def test_of_several_choices_one_may_stop_and_the_others_go_on(text):
    tokens = [text.tokenizer.encode(letter)[0] for letter in "ab!"]

    def next_token(request, output):
        return tokens[2] if request.sampling.seed == 5 and len(output) == 2 else tokens[0]

    engine = make_engine(text, next_token=next_token)
    async with serving(text, engine) as server:
        body = {"prompt": "x", "n": 2, "seed": 5, "stop": "!", "max_tokens": 6}
        answer = await server.ok(PATH, body)
    assert [choice["text"] for choice in answer["choices"]] == ["aa", "aaaaaa"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length"]
    assert len(engine.aborted) == 1
    assert not engine.running


async def test_a_stop_token_ends_the_text_and_is_named(text):
    engine = scripted(text, "a!b")
    stop_id = text.tokenizer.encode("!")[0]
    async with serving(text, engine) as server:
        [choice] = (await server.ok(PATH, {"prompt": "x", "stop_token_ids": [stop_id]}))["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("a", stop_id)


async def test_incomplete_characters_are_held_back(text):
    answer = "你🙂é!"
    async with serving(text, scripted(text, answer)) as server:
        pieces = events(await server.stream(PATH, {"prompt": "x", "max_tokens": 50}))
    texts = [piece["choices"][0]["text"] for piece in pieces]
    assert "".join(texts) == answer
    assert "" in texts
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in texts)


async def test_logprobs_have_a_column_per_fact(server):
    body = {"prompt": "The", "logprobs": 2, "max_tokens": 3, "seed": 1}
    [choice] = (await server.ok(PATH, body))["choices"]
    logprobs = choice["logprobs"]
    assert set(logprobs) == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
    assert all(len(column) == 3 for column in logprobs.values())
    assert logprobs["text_offset"][0] == 0
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == logprob


async def test_echo_puts_the_prompt_first_in_text_and_logprobs(text):
    async with serving(text, scripted(text, " dog")) as server:
        body = {"prompt": "The lazy", "echo": True, "logprobs": 1}
        whole = await server.ok(PATH, body)
        stream = events(await server.stream(PATH, body))
    [choice] = whole["choices"]
    num_prompt = whole["usage"]["prompt_tokens"]
    assert choice["text"] == "The lazy dog"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"][num_prompt] == len("The lazy")
    assert "".join(choice["logprobs"]["tokens"][:num_prompt]) == "The lazy"
    assert "".join(chunk["choices"][0]["text"] for chunk in stream) == "The lazy dog"
    assert stream[0]["choices"][0]["logprobs"]["token_logprobs"][0] is None


async def test_an_echo_is_the_text_that_was_sent_or_what_is_left_of_it(text):
    tokenizer = make_tokenizer("byte_fallback")  # adds <s>, as Llama's does
    vocab_size = tokenizer.vocab_size
    own = replace(text, tokenizer=tokenizer, vocab_size=vocab_size)
    body = {"prompt": "The lazy dog", "echo": True, "max_tokens": 0}
    limited = {"truncate_prompt_tokens": 3}
    async with serving(own, make_engine(text, vocab_size=vocab_size)) as server:
        echoed = [
            (await server.ok(PATH, body | fields))["choices"][0]["text"]
            for fields in (
                {"truncate_prompt_tokens": 50},
                limited,
                limited | {"truncation_side": "right"},
            )
        ]
    assert len(tokenizer.encode("The lazy dog")) == 5
    assert echoed == ["The lazy dog", "lazy dog", "The laz"]


@pytest.mark.parametrize(("of_echo", "of_prompt"), [(0, 3), (3, 1)])
async def test_an_echo_and_prompt_logprobs_have_as_many_alternatives_as_each_asks_for(
    server, of_echo, of_prompt
):
    body = {"prompt": [90, 61, 70], "max_tokens": 1, "echo": True, "logprobs": of_echo}
    alone = (await server.ok(PATH, body))["choices"][0]
    both = (await server.ok(PATH, body | {"prompt_logprobs": of_prompt}))["choices"][0]
    assert both["logprobs"]["top_logprobs"][:3] == alone["logprobs"]["top_logprobs"][:3]
    _, *scored = both["prompt_logprobs"]
    for entry in scored:
        ranks = sorted(each["rank"] for each in entry.values())
        assert ranks[:of_prompt] == list(range(1, of_prompt + 1))
        assert len(ranks) <= of_prompt + 1


@pytest.mark.parametrize(
    ("kind", "offsets"),
    [
        ("byte_level", [0, 3, 4, 5, 5, 5, 5]),  # The, space, four bytes of one character, dog
        ("byte_fallback", [0, 0, 4, 5, 5, 5, 5, 6]),  # the same behind <s>
    ],
)
def test_offsets_of_an_echo_are_where_its_tokens_stand(kind, offsets):
    tokenizer = make_tokenizer(kind)
    prompt = "The 🙂 dog"
    token_ids = tokenizer.encode(prompt)
    names = TokenNames(tokenizer, as_ids=False)
    columns = echoed_logprobs(names, token_ids, [None] * len(token_ids), prompt)
    assert columns["text_offset"] == offsets


async def test_echo_alone_scores_the_prompt_and_generates_nothing(server):
    body = {"prompt": "The lazy", "echo": True, "logprobs": 0, "max_tokens": 0}
    answer = await server.ok(PATH, body)
    [choice] = answer["choices"]
    assert choice["text"] == "The lazy"
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("as_ids", [False, True])
async def test_prompt_logprobs_are_given_by_token_id_and_say_the_text(server, text, as_ids):
    body = {"prompt": [60, 61, 62], "prompt_logprobs": 1, "return_tokens_as_token_ids": as_ids}
    answer = await server.ok(PATH, body)
    first, second, third = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second["61"]["rank"] == 1
    assert set(third["62"]) == {"logprob", "rank", "decoded_token"}
    assert third["62"]["decoded_token"] == text.tokenizer.token_text(62)


async def test_usage_comes_in_a_stream_only_when_asked_for(server):
    body = {"prompt": "The", "max_tokens": 3}
    assert all("usage" not in chunk for chunk in events(await server.stream(PATH, body)))
    asked = body | {"stream_options": {"include_usage": True}}
    *chunks, last = events(await server.stream(PATH, asked))
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert all("usage" not in chunk for chunk in chunks)
    alone = body | {"stream_options": {"continuous_usage_stats": True}}  # vLLM: no effect
    assert all("usage" not in chunk for chunk in events(await server.stream(PATH, alone)))
    both = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(await server.stream(PATH, body | {"stream_options": both}))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
async def test_cached_tokens_are_told_of_each_prompt_once(text, path):
    engine = make_engine(text, num_cached_tokens=2)
    body = {"n": 3, "max_tokens": 3}
    if path == PATH:
        body |= {"prompt": [[9, 10, 11], [12, 13, 14, 15]]}
    else:
        body |= {"messages": [{"role": "user", "content": "hi"}]}
    num_cached = 2 * len(body.get("prompt", "x"))
    async with serving(text, engine) as server:
        usage = (await server.ok(path, body))["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": num_cached}
        options = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, last = events(await server.stream(path, body | {"stream_options": options}))
    assert last["usage"] == usage
    for chunk in chunks:
        assert chunk["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_every_sampling_field_reaches_the_engine(text):
    body = {
        "prompt": "The",
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 11,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "seed": 42,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "logit_bias": {"50": 200, "51": -1.5},
        "allowed_token_ids": [60, 61],
        "bad_words": ["dog"],
        "logprobs": 2,
        "prompt_logprobs": 3,
        "priority": -1,
        "cache_salt": "mine",
    }
    engine = make_engine(text)
    async with serving(text, engine, policy=SchedulingPolicy.PRIORITY) as server:
        await server.ok(PATH, body)
    [request] = engine.requests
    sampling, untouched = request.sampling, SamplingParams(max_tokens=0, seed=0)
    of_others = {"grammar", "logprob_token_ids", "pooling"}
    for name in set(SamplingParams.__struct_fields__) - of_others:
        assert getattr(sampling, name) != getattr(untouched, name), f"{name} does not arrive"
    assert (request.priority, request.cache_salt) == (-1, "mine")
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (9, 2, 42)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 11)
    assert (sampling.min_p, sampling.presence_penalty) == (0.1, 0.2)
    assert (sampling.frequency_penalty, sampling.repetition_penalty) == (0.3, 1.2)
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ((9,), True)
    assert sampling.eos_token_ids == (EOS,)
    assert sampling.logit_bias == {50: 100.0, 51: -1.5}
    assert sampling.allowed_token_ids == (60, 61)
    assert (sampling.logprobs, sampling.prompt_logprobs) == (2, 3)
    tokenizer = make_tokenizer()
    assert tuple(tokenizer.encode("dog")) in sampling.bad_words
    assert tuple(tokenizer.encode(" dog")) in sampling.bad_words


async def test_null_means_not_given(server):
    body = {"prompt": "The", "max_tokens": None, "temperature": None, "stop": None, "n": None}
    await server.ok(PATH, body)
    [request] = server.engine.requests
    assert (request.sampling.max_tokens, request.sampling.temperature) == (16, 1.0)


async def test_the_default_output_is_cut_to_the_context(text):
    engine = make_engine(text, max_model_len=10)
    async with serving(text, engine) as server:
        answer = await server.ok(PATH, {"prompt": [60] * 7})
    assert answer["usage"]["completion_tokens"] == 3
