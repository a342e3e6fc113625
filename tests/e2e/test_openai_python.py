"""openai-python against the proxy: P and D together answer as one engine does."""

from __future__ import annotations

import asyncio
import json
import math
import string
from typing import TYPE_CHECKING, Annotated, Any

import httpx
import openai
import pydantic
import pytest
from tokenizers import pre_tokenizers

from tests.e2e.conftest import OPENAI_KEY, OPENAI_MODEL
from tests.tiny_models import EOS_TOKEN_ID

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.e2e.deployment import Deployment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

MODEL, KEY = OPENAI_MODEL, OPENAI_KEY
PROMPT = "What is one part, and what are two?"
MESSAGES = [
    {"role": "system", "content": "You are tiny."},
    {"role": "user", "content": [{"type": "text", "text": PROMPT}]},
]
MAX_MODEL_LEN = 1024
# The tokenizer's vocabulary has the printable characters in order, "!" is token 3.
LETTER_IDS = [3 + ord(letter) - ord("!") for letter in string.ascii_lowercase]
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
WHITESPACE_IDS = [3 + _BYTES.index(shown) for shown in "\u0120\u010a\u0109\u010d"]
"""Of a blank, a line feed, a tab and a carriage return: answers need not be long."""


@pytest.fixture(scope="module")
def deployment(asked_by_openai: Deployment) -> Deployment:
    for name in ("proxy", "serve"):  # an engine has no numbers before its first step
        with client_of(asked_by_openai.url(name)) as client:
            ask(client, "completions")
    return asked_by_openai


@pytest.fixture(scope="module")
def proxy(deployment: Deployment) -> Iterator[openai.OpenAI]:
    with client_of(deployment.url("proxy")) as client:
        yield client


@pytest.fixture(scope="module")
def serve(deployment: Deployment) -> Iterator[openai.OpenAI]:
    with client_of(deployment.url("serve")) as client:
        yield client


def client_of(url: str, **settings: Any) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{url}/v1", **{"api_key": KEY, "max_retries": 0, "timeout": 60.0} | settings
    )


def ask(client: openai.OpenAI, endpoint: str, **fields: Any) -> Any:
    """An answer, or a stream, of 24 tokens and one seed unless `fields` say otherwise."""
    fields = {"model": MODEL, "max_tokens": 24, "seed": 42} | fields
    if endpoint == "chat":
        return client.chat.completions.create(**{"messages": MESSAGES} | fields)
    return client.completions.create(**{"prompt": PROMPT} | fields)


def facts(answer: Any) -> dict[str, Any]:
    """What an answer says: per choice, beside the choices, and its usage."""
    choices = []
    for choice in answer.choices:
        fields = choice.model_dump()
        message = fields.pop("message", None)
        if message is not None:
            assert message["role"] == "assistant"
            fields["text"] = message["content"]
        choices.append(fields)
    return {
        "choices": choices,
        "beside": answer.model_extra,
        "usage": usage_of(answer),
        "model": answer.model,
    }


def usage_of(answer: Any) -> dict[str, Any]:
    """Its usage; how much of the prompt was cached depends on what its engine was asked before."""
    usage = answer.usage.model_dump()
    cached = usage["prompt_tokens_details"].pop("cached_tokens")
    assert 0 <= cached < usage["prompt_tokens"]
    return usage


def facts_of_stream(chunks: Iterable[Any]) -> dict[str, Any]:
    """The same from a stream, which must have asked for its usage."""
    choices: dict[int, dict[str, Any]] = {}
    beside: dict[str, Any] = {}
    names, usage = set(), None
    for chunk in chunks:
        assert usage is None, "the usage ends a stream"
        names.add((chunk.id, chunk.created, chunk.model))
        beside |= chunk.model_extra
        if not chunk.choices:
            usage = usage_of(chunk)
        for choice in chunk.choices:
            fields = choice.model_dump()
            known = choices.get(choice.index)
            delta = fields.pop("delta", None)
            if delta is not None:
                assert delta["role"] == ("assistant" if known is None else None)
                fields["text"] = delta["content"]
            assert known is None or known["finish_reason"] is None, "a choice goes on after its end"
            choices[choice.index] = fields if known is None else joined(known, fields)
    ((_, _, model),) = names
    in_order = [choices[index] for index in sorted(choices)]
    return {"choices": in_order, "beside": beside, "usage": usage, "model": model}


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two parts of a choice, or of its log-probabilities, as one."""
    whole = first | second
    for name in first.keys() & second.keys():
        match first[name], second[name]:
            case dict(), dict():
                whole[name] = joined(first[name], second[name])
            case list(), list():
                whole[name] = first[name] + second[name]
            case str(), str() if name == "text":
                whole[name] = first[name] + second[name]
    return whole


def assert_same(found: Any, expected: Any, where: str = "answer") -> None:
    """Equality, but for the last digits of log-probabilities."""
    if isinstance(expected, float):
        assert math.isclose(found, expected, abs_tol=1e-4), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name in expected:
            assert_same(found[name], expected[name], f"{where}.{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for index, pair in enumerate(zip(found, expected, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    else:
        assert found == expected, where


EITHER: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 7},
    "three choices": {"n": 3, "seed": 7},
    "penalties and biases": {
        "seed": 8,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.5,
        "logit_bias": {"70": 4.0, "71": -100.0},
    },
    "as our extensions": {
        "seed": 9,
        "extra_body": {
            "top_k": 5,
            "min_p": 0.05,
            "repetition_penalty": 1.2,
            "min_tokens": 4,
            "cache_salt": "mine",
            "skip_special_tokens": False,
            "return_token_ids": True,
        },
    },
    "one token": {"seed": 1, "max_tokens": 1},
    "two tokens": {"seed": 1, "max_tokens": 2},
    "the end as the first token": {"logit_bias": {str(EOS_TOKEN_ID): 100.0}},
    "some choices end at P": {
        "n": 8,
        "seed": 3,
        "extra_body": {"stop_token_ids": list(range(3, 131))},
    },
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "logprobs": {"seed": 7, "logprobs": 3},
    "echo": {"seed": 7, "echo": True},
    "echo with logprobs": {"seed": 7, "echo": True, "logprobs": 2, "n": 2},
    "nothing but the echo": {"max_tokens": 0, "echo": True, "logprobs": 1},
    "three prompts": {"seed": 7, "prompt": ["a", "bc", PROMPT], "n": 2, "temperature": 0.8},
    "token ids": {"seed": 7, "prompt": [[1, 70, 71], [72, 300]]},
}
CHAT: dict[str, dict[str, Any]] = {
    "logprobs": {"seed": 7, "logprobs": True, "top_logprobs": 3},
    "logprobs of the token alone": {"seed": 7, "logprobs": True, "n": 2},
    "max_completion_tokens": {"seed": 7, "max_completion_tokens": 5},
}
UNSTREAMED: dict[str, dict[str, Any]] = {
    "logprobs of the prompt": {"seed": 7, "extra_body": {"prompt_logprobs": 2}},
}
OWN = {"completions": COMPLETIONS, "chat": CHAT}


def cases(**more: dict[str, Any]) -> list[Any]:
    """Every case of both endpoints."""
    return [
        pytest.param(endpoint, fields, id=f"{endpoint}, {name}")
        for endpoint, own in OWN.items()
        for name, fields in (EITHER | own | more).items()
    ]


@pytest.mark.parametrize(("endpoint", "fields"), cases(**UNSTREAMED))
def test_an_answer_is_that_of_one_engine(
    endpoint: str, fields: dict[str, Any], proxy: openai.OpenAI, serve: openai.OpenAI
) -> None:
    assert_same(facts(ask(proxy, endpoint, **fields)), facts(ask(serve, endpoint, **fields)))


@pytest.mark.parametrize(("endpoint", "fields"), cases())
def test_a_stream_adds_up_to_the_answer(
    endpoint: str, fields: dict[str, Any], proxy: openai.OpenAI
) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with ask(proxy, endpoint, **fields, **options) as stream:
        found = facts_of_stream(stream)
    assert_same(found, facts(ask(proxy, endpoint, **fields)))


def test_choices_end_at_either_engine_in_one_answer(proxy: openai.OpenAI) -> None:
    """Or the case above would not join two engines' answers."""
    fields = EITHER["some choices end at P"]
    extra = fields["extra_body"] | {"return_token_ids": True}
    answer = ask(proxy, "completions", **fields | {"extra_body": extra})
    lengths = {min(2, len(choice.token_ids)) for choice in answer.choices}
    assert lengths == {1, 2}


def test_choices_of_a_seed_differ_and_repeat(proxy: openai.OpenAI) -> None:
    texts = [
        [choice.text for choice in ask(proxy, "completions", n=3, seed=seed).choices]
        for seed in (11, 11, 12)
    ]
    assert len(set(texts[0])) == 3
    assert texts[1] == texts[0]
    assert not set(texts[2]) & set(texts[0])


# --- usage


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_usage_counts_each_prompt_once_and_every_token(endpoint: str, proxy: openai.OpenAI) -> None:
    one = ask(proxy, endpoint, max_tokens=5, extra_body={"ignore_eos": True})
    three = ask(proxy, endpoint, max_tokens=5, n=3, extra_body={"ignore_eos": True})
    assert three.usage.prompt_tokens == one.usage.prompt_tokens >= len(PROMPT)
    assert (one.usage.completion_tokens, three.usage.completion_tokens) == (5, 15)
    assert three.usage.total_tokens == three.usage.prompt_tokens + 15


@pytest.mark.parametrize("max_tokens", [1, 8])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_stream_tells_its_usage_only_if_asked(
    endpoint: str, max_tokens: int, proxy: openai.OpenAI
) -> None:
    fields = {"stream": True, "max_tokens": max_tokens}
    with ask(proxy, endpoint, **fields) as stream:
        chunks = list(stream)
    assert all(chunk.choices for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks)
    with ask(proxy, endpoint, **fields, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert [bool(chunk.choices) for chunk in chunks[-2:]] == [True, False]
    assert chunks[-1].usage.completion_tokens == max_tokens


def test_a_stream_counts_as_it_goes_across_both_engines(proxy: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    with ask(proxy, "chat", seed=2, stream=True, stream_options=options) as stream:
        counts = [chunk.usage.completion_tokens for chunk in stream]
    assert counts[:-1] == list(range(1, len(counts)))
    assert counts[-1] == counts[-2]


# --- stop


def in_letters(client: openai.OpenAI, **fields: Any) -> Any:
    """A completion whose text is one letter a token."""
    extra = {"allowed_token_ids": LETTER_IDS}
    return ask(client, "completions", seed=21, max_tokens=40, extra_body=extra, **fields).choices[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("start", [0, 1, 17])
def test_a_stop_string_cuts_the_text_where_it_begins(
    start: int, stream: bool, deployment: Deployment, proxy: openai.OpenAI, serve: openai.OpenAI
) -> None:
    """From 0 on it is begun by P's token and ended by D's."""
    text = in_letters(serve).text
    stop = text[start : start + 3]
    assert len(text) == 40
    assert text.find(stop) == start
    options: dict[str, Any] = {"stop": ["never", stop]}
    if not stream:
        choice = in_letters(proxy, **options)
        assert (choice.text, choice.finish_reason) == (text[:start], "stop")
        return
    extra = {"allowed_token_ids": LETTER_IDS}
    fields = {"seed": 21, "max_tokens": 40, "extra_body": extra, "stream": True} | options
    with ask(proxy, "completions", **fields) as chunks:
        choices = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.text for choice in choices) == text[:start]
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]


def test_a_stop_string_in_the_first_token_ends_the_request_at_p(
    deployment: Deployment, proxy: openai.OpenAI, serve: openai.OpenAI
) -> None:
    first = in_letters(serve).text[0]
    # P's server finds the string when its engine has handed over already: a decode engine that
    # was pushed to may have begun, and is cut off.
    with nothing_decoded(deployment, but_for=39):
        choice = in_letters(proxy, stop=first)
    assert (choice.text, choice.finish_reason) == ("", "stop")


# --- logprobs


def test_logprobs_of_completions_come_in_columns(proxy: openai.OpenAI) -> None:
    choice = ask(proxy, "completions", logprobs=3, temperature=0.0).choices[0]
    found = choice.logprobs
    assert {len(column) for column in (found.token_logprobs, found.tokens, found.text_offset)} == {
        len(found.top_logprobs)
    }
    assert found.text_offset == sorted(found.text_offset)
    for token, logprob, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert logprob <= 0.0
        assert 1 <= len(top) <= 4
        assert top[token] == max(top.values()) == logprob  # greedy: the likeliest one


def test_logprobs_of_chat_come_in_rows(proxy: openai.OpenAI) -> None:
    fields = {"logprobs": True, "top_logprobs": 3, "temperature": 0.0}
    # Rows spell special tokens, too.
    whole = {"skip_special_tokens": False}
    choice = ask(proxy, "chat", extra_body=whole, **fields).choices[0]
    assert choice.logprobs.content
    spelled = b"".join(bytes(row.bytes) for row in choice.logprobs.content)
    if choice.finish_reason == "length":
        assert spelled.decode(errors="replace") == choice.message.content
    for row in choice.logprobs.content:
        assert len(row.top_logprobs) == 3
        values = [top.logprob for top in row.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert (row.token, row.logprob) == (row.top_logprobs[0].token, values[0])


def test_an_echo_has_the_prompts_logprobs_too(proxy: openai.OpenAI) -> None:
    choice = ask(proxy, "completions", echo=True, logprobs=1, max_tokens=3).choices[0]
    assert choice.text.startswith(PROMPT)
    assert choice.logprobs.token_logprobs[0] is None  # nothing comes before it
    assert None not in choice.logprobs.token_logprobs[1:]
    assert "".join(choice.logprobs.tokens[:-3]) == PROMPT
    assert choice.logprobs.text_offset[-3] == len(PROMPT)


# --- what ends at P


class nothing_decoded:  # noqa: N801 - reads as a statement
    """The decode engine samples no token while the block runs, though it may have made room.

    Args:
        but_for: So many that it may have begun with before it was told to stop.
    """

    def __init__(self, deployment: Deployment, *, but_for: int = 0) -> None:
        self._deployment = deployment
        self._but_for = but_for

    def __enter__(self) -> None:
        self._before = self._count()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            assert self._count() - self._before <= self._but_for

    def _count(self) -> int:
        tokens: int = self._deployment.info("decode")["stats"]["generation_tokens"]
        return tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_tokens": 1}, "length"),
        ({"logit_bias": {str(EOS_TOKEN_ID): 100.0}}, "stop"),
    ],
    ids=["max_tokens is 1", "the first token is the end"],
)
def test_a_request_of_one_token_is_served_by_p_alone(
    fields: dict[str, Any],
    reason: str,
    stream: bool,
    deployment: Deployment,
    proxy: openai.OpenAI,
) -> None:
    with nothing_decoded(deployment):
        answer = ask(proxy, "chat", stream=stream, **fields)
        last = list(answer)[-1] if stream else answer
    assert last.choices[0].finish_reason == reason
    with pytest.raises(AssertionError), nothing_decoded(deployment):  # or it would prove nothing
        ask(proxy, "chat", max_tokens=2, extra_body={"ignore_eos": True})


# --- errors


BAD: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "temperature": ("completions", {"temperature": -1.0}, "temperature"),
    "top_logprobs": ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "a type": ("chat", {"n": "three"}, "n"),
    "tools": ("chat", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    "suffix": ("completions", {"suffix": "end"}, "suffix"),
    "an empty prompt": ("completions", {"prompt": []}, "prompt"),
    "the context": ("completions", {"prompt": "x" * (MAX_MODEL_LEN + 1)}, "prompt"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("endpoint", "fields", "param"), BAD.values(), ids=BAD)
def test_what_one_engine_refuses_the_proxy_refuses_in_the_same_words(
    endpoint: str,
    fields: dict[str, Any],
    param: str,
    stream: bool,
    proxy: openai.OpenAI,
    serve: openai.OpenAI,
) -> None:
    bodies = []
    for client in (serve, proxy):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, endpoint, stream=stream, **fields)
        assert caught.value.param == param
        bodies.append(caught.value.body)
    assert bodies[0] == bodies[1]


def test_a_prompt_beyond_the_context_is_told_as_openai_tells_it(proxy: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024") as caught:
        ask(proxy, "completions", prompt="x" * 2000)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.type == "invalid_request_error"


def test_an_unknown_model_is_not_found(proxy: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-6") as caught:
        ask(proxy, "chat", model="gpt-6")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_an_endpoint_we_lack_is_not_found(proxy: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="/v1/images/generations"):
        proxy.images.generate(model=MODEL, prompt="x")


# --- other endpoints


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_says_what_the_chat_says(stream: bool, proxy: openai.OpenAI) -> None:
    chat = proxy.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": PROMPT}], max_tokens=24, temperature=0
    )
    asked: dict[str, Any] = {"input": PROMPT, "max_output_tokens": 24, "temperature": 0}
    if stream:
        with proxy.responses.stream(model=MODEL, **asked) as events:
            last = [event for event in events if event.type.startswith("response.")][-1]
        response = last.response
    else:
        response = proxy.responses.create(model=MODEL, **asked)
    assert response.output_text == chat.choices[0].message.content
    assert chat.usage is not None
    assert response.usage.total_tokens == chat.usage.total_tokens


def test_a_vector_is_the_prefill_engines_and_that_of_one_engine(
    deployment: Deployment, proxy: openai.OpenAI, serve: openai.OpenAI
) -> None:
    with nothing_decoded(deployment):
        through = proxy.embeddings.create(model=MODEL, input=[PROMPT, "x"])
    alone = serve.embeddings.create(model=MODEL, input=[PROMPT, "x"])
    assert [each.embedding for each in through.data] == [each.embedding for each in alone.data]
    assert through.usage.prompt_tokens == alone.usage.prompt_tokens


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_wrong_key_is_refused(endpoint: str, proxy: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        ask(proxy.with_options(api_key="sk-of-another"), endpoint)
    assert caught.value.code == "invalid_api_key"


# --- a client that leaves


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("num_chunks", [1, 2, 9])
def test_closing_a_stream_frees_everything(
    num_chunks: int, endpoint: str, deployment: Deployment, proxy: openai.OpenAI
) -> None:
    fields = {"stream": True, "max_tokens": 900, "n": 2, "extra_body": {"ignore_eos": True}}
    with ask(proxy, endpoint, **fields) as stream:
        for _ in range(num_chunks):
            next(stream)
    deployment.wait_nothing_held("prefill", "decode", timeout_s=20.0)


def test_a_client_that_runs_out_of_patience_frees_everything(
    deployment: Deployment, proxy: openai.OpenAI
) -> None:
    with pytest.raises(openai.APITimeoutError):
        ask(
            proxy.with_options(timeout=0.1),
            "completions",
            max_tokens=980,
            n=8,
            extra_body={"ignore_eos": True},
        )
    deployment.wait_nothing_held("prefill", "decode", timeout_s=20.0)


# --- the rest of the client's surface


def test_the_models_are_listed_and_found(proxy: openai.OpenAI, serve: openai.OpenAI) -> None:
    for client in (proxy, serve):
        assert [model.id for model in client.models.list()] == [MODEL]
        model = client.models.retrieve(MODEL)
        assert (model.object, model.max_model_len) == ("model", MAX_MODEL_LEN)
        with pytest.raises(openai.NotFoundError, match="gpt-6"):
            client.models.retrieve("gpt-6")


def test_the_request_id_is_the_clients(proxy: openai.OpenAI) -> None:
    answer = ask(proxy, "chat", extra_headers={"X-Request-Id": "req-of-mine"})
    assert answer._request_id == "req-of-mine"
    assert answer.id == "chatcmpl-req-of-mine"


def test_the_clients_own_accumulator_takes_the_stream(proxy: openai.OpenAI) -> None:
    # Ended by a stop token: the accumulator raises where the length is the reason. Without
    # logprobs: of a second choice it counts the first chunk's twice.
    extra = {"stop_token_ids": LETTER_IDS}
    fields: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "seed": 5, "extra_body": extra}
    with proxy.chat.completions.stream(**fields, n=2) as stream:
        final = stream.get_final_completion()
    answer = proxy.chat.completions.create(**fields, n=2)
    for found, expected in zip(final.choices, answer.choices, strict=True):
        assert expected.message.content
        assert found.message.content == expected.message.content
        assert found.finish_reason == expected.finish_reason == "stop"


async def test_streams_side_by_side_say_what_one_engine_says_one_by_one(
    deployment: Deployment, serve: openai.OpenAI
) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24}

    async def stream(client: openai.AsyncOpenAI, seed: int) -> str:
        chunks = await client.completions.create(**fields, seed=seed, stream=True)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    seeds = range(100, 116)
    url = f"{deployment.url('proxy')}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        found = await asyncio.gather(*(stream(client, seed) for seed in seeds))
    assert found == [ask(serve, "completions", seed=seed).choices[0].text for seed in seeds]


def test_what_the_engines_tell_each_other_is_no_concern_of_a_client(
    proxy: openai.OpenAI, serve: openai.OpenAI
) -> None:
    params = {"do_remote_decode": True, "pdserve": {"final_length": False, "seed": 99}}
    for endpoint in OWN:
        extra = {"kv_transfer_params": params}
        found = facts(ask(proxy, endpoint, seed=4, extra_body=extra))
        assert_same(found, facts(ask(serve, endpoint, seed=4)))
        assert found["beside"] == {}


# --- another proxy


class SequentialProxy(httpx.BaseTransport):
    """What vLLM's example proxy does: one token at P, then the answer's parameters to D."""

    def __init__(self, deployment: Deployment) -> None:
        self._prefill, self._decode = map(httpx.URL, map(deployment.url, ("prefill", "decode")))
        self._transport = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        body = json.loads(request.content)
        remote = dict.fromkeys(
            ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
        )
        params = {"do_remote_decode": True, "do_remote_prefill": False, **remote}
        first = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": params}
        first.pop("stream_options", None)
        prefilled = self._send(request, self._prefill, first)
        prefilled.read()
        prefilled.raise_for_status()
        params = prefilled.json()["kv_transfer_params"]
        return self._send(request, self._decode, body | {"kv_transfer_params": params})

    def _send(
        self, request: httpx.Request, engine: httpx.URL, body: dict[str, Any]
    ) -> httpx.Response:
        url = engine.copy_with(path=request.url.path)
        headers = {"Authorization": request.headers["Authorization"]}
        leg = httpx.Request("POST", url, headers=headers, json=body)
        leg.extensions = request.extensions
        response = self._transport.handle_request(leg)
        response.request = leg
        return response

    def close(self) -> None:
        self._transport.close()


SEQUENTIAL: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("completions", {"seed": 31}),
    "completions, choices": ("completions", {"seed": 31, "n": 3, "logprobs": 2}),
    "chat": ("chat", {"seed": 32, "temperature": 0.8}),
    "chat, logprobs": ("chat", {"seed": 33, "logprobs": True, "top_logprobs": 2}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("endpoint", "fields"), SEQUENTIAL.values(), ids=SEQUENTIAL)
def test_a_proxy_written_for_vllm_drives_our_engines(
    endpoint: str,
    fields: dict[str, Any],
    stream: bool,
    deployment: Deployment,
    serve: openai.OpenAI,
) -> None:
    def prompt_tokens() -> tuple[float, float]:
        """What D has computed itself, and what it has received or had in its cache."""
        found = deployment.metrics("decode")
        labels = f'engine="0",model_name="{MODEL}",source='
        name = f"vllm:prompt_tokens_by_source_total{{{labels}"
        sources = {key.removeprefix(name): value for key, value in found.items()}
        return sources['"local_compute"}'], sum(
            sources[source] for source in ('"external_kv_transfer"}', '"local_cache_hit"}')
        )

    before = prompt_tokens()
    http = httpx.Client(transport=SequentialProxy(deployment))
    with client_of("http://sequential", http_client=http) as client:
        if stream:
            options = {"stream": True, "stream_options": {"include_usage": True}}
            found = facts_of_stream(ask(client, endpoint, **fields, **options))
        else:
            found = facts(ask(client, endpoint, **fields))
    assert_same(found, facts(ask(serve, endpoint, **fields)))
    computed, received = prompt_tokens()
    assert computed == before[0]
    assert received == before[1] + found["usage"]["prompt_tokens"] * fields.get("n", 1)


class Person(pydantic.BaseModel):
    """What an answer is parsed into."""

    name: Annotated[str, pydantic.Field(pattern="^[a-z]{1,6}$")]
    age: Annotated[int, pydantic.Field(ge=0, le=99)]


@pytest.mark.parametrize("seed", [1, 2])
def test_an_answer_is_parsed_into_the_clients_own_class(
    proxy: openai.OpenAI, serve: openai.OpenAI, seed: int
) -> None:
    found = [
        client.chat.completions.parse(
            model=MODEL,
            messages=MESSAGES,
            response_format=Person,
            temperature=1.0,
            seed=seed,
            max_tokens=400,
            extra_body={"logit_bias": {str(space): -100 for space in WHITESPACE_IDS}},
        )
        .choices[0]
        .message.parsed
        for client in (proxy, serve)
    ]
    assert isinstance(found[0], Person)
    assert found[0] == found[1]
