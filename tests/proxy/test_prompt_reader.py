"""Prompts are named in the proxy as engines name them, or by their bytes, and it is said why."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config.http import ProxyConfig
from pdserve.config.schema import ModelConfig
from pdserve.errors import ConfigError
from pdserve.proxy.bodies import ClientBody
from pdserve.proxy.brain.prompt import UNREAD
from pdserve.proxy.brain.prompt_reader import PromptReader
from pdserve.text.load import load_text
from pdserve.text.tokenizer import Tokenizer
from pdserve.wire.ids import GRAIN_TOKENS, grain_hashes
from tests.text.tiny import write_model_files

LONG = "the quick brown fox jumps over the lazy dog, and then some more of it happens. " * 40
NOW_S = 1_700_000_000


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model_files(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_reader(model):
    readers = []

    async def make(*, max_model_len: int = 100_000, **settings) -> PromptReader:
        config = ProxyConfig(**({"tokenizer": str(model)} | settings))
        reader = PromptReader(config, lambda: max_model_len)
        await asyncio.to_thread(reader.load)
        readers.append(reader)
        return reader

    yield make
    for reader in readers:
        reader.close()


def body(**fields) -> ClientBody:
    return ClientBody(json.dumps(fields).encode(), created=NOW_S, fallback_seed=1)


def messages(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


async def test_a_chat_is_named_as_the_engine_names_what_it_renders(make_reader, model):
    text = await asyncio.to_thread(load_text, ModelConfig(model=str(model)))
    asked = messages(LONG, "fine", LONG + "?")
    rendered = text.chat_template.render(asked, now_s=NOW_S)
    ids = text.tokenizer.encode(rendered, add_special_tokens=False)
    prompt = await (await make_reader()).read(body(messages=asked, cache_salt="tenant"))
    assert prompt.num_tokens == len(ids)
    assert prompt.grains == tuple(grain_hashes(ids, "tenant"))
    assert prompt.grains
    assert prompt.unread == ""


@pytest.mark.parametrize("prompt", ["", "a", [5]])
async def test_no_prompt_is_so_short_that_no_engines_would_be_predicted_for_it(make_reader, prompt):
    assert (await (await make_reader()).read(body(prompt=prompt))).num_tokens == 1


async def test_tools_and_what_else_a_template_is_told_are_in_the_names(
    make_reader, model, tmp_path
):
    template = tmp_path / "template"
    template.write_text("{{ tools | tojson }}{{ reasoning_effort }}{{ messages[0].content }}")
    reader = await make_reader(chat_template=str(template))
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = {"messages": messages(LONG), "tools": tools, "reasoning_effort": "low"}
    text = json.dumps(tools) + "low" + LONG
    tokenizer = await asyncio.to_thread(Tokenizer.from_directory, model)
    ids = tokenizer.encode(text, add_special_tokens=False)
    prompt = await reader.read(body(**asked))
    assert (prompt.unread, prompt.grains) == ("", tuple(grain_hashes(ids, "")))


@pytest.mark.parametrize("adds", [None, True, False])
async def test_a_text_is_named_with_the_special_tokens_that_the_engine_adds(
    make_reader, model, adds
):
    tokenizer = await asyncio.to_thread(Tokenizer.from_directory, model)
    ids = tokenizer.encode(LONG, add_special_tokens=adds is not False)
    prompt = await (await make_reader()).read(body(prompt=LONG, add_special_tokens=adds))
    assert (prompt.num_tokens, prompt.grains) == (len(ids), tuple(grain_hashes(ids, "")))


async def test_token_ids_need_no_tokenizer(make_reader):
    ids = list(range(600))
    prompt = await (await make_reader(tokenizer="")).read(body(prompt=ids))
    assert (prompt.num_tokens, prompt.grains) == (600, tuple(grain_hashes(ids, "")))


async def test_the_next_turn_begins_with_the_names_of_the_last(make_reader):
    reader = await make_reader()
    first = await reader.read(body(messages=messages(LONG)))
    second = await reader.read(body(messages=messages(LONG, "so it is", LONG)))
    assert len(second.grains) > len(first.grains) > 2
    assert second.grains[: len(first.grains) - 1] == first.grains[:-1]


@pytest.mark.parametrize(
    ("fields", "settings", "why"),
    [
        ({"messages": messages(LONG)}, {"tokenizer": ""}, "no tokenizer"),
        ({"messages": messages(LONG), "chat_template": "x"}, {}, "fields"),
        ({"messages": messages(LONG), "tools": 7}, {}, "fields"),
        ({"prompt": [LONG, LONG]}, {}, "fields"),
        ({"prompt": [[1] * 300, [2] * 300]}, {}, "fields"),
        ({"prompt": [-1] * 300}, {}, "refused"),
        ({"messages": messages(LONG), "prompt": LONG}, {}, "fields"),
        ({"messages": [{"role": "ghost", "content": LONG}]}, {}, "refused"),
        ({"prompt": LONG}, {"max_model_len": 16}, "long"),
    ],
    ids=str,
)
async def test_what_cannot_be_tokenized_is_named_by_its_bytes_and_it_is_said_why(
    make_reader, fields, settings, why
):
    reader = await make_reader(**settings)
    prompt = await reader.read(body(**fields))
    assert prompt.unread == why
    assert why in UNREAD
    again = await reader.read(body(**fields))
    other = await reader.read(body(**fields, cache_salt="another's"))
    assert prompt.grains == again.grains
    assert set(prompt.grains).isdisjoint(other.grains)


async def test_bytes_of_a_longer_conversation_begin_with_those_of_a_shorter_one(make_reader):
    reader = await make_reader(tokenizer="")
    first = await reader.read(body(messages=messages(LONG)))
    second = await reader.read(body(messages=messages(LONG, "so it is", LONG)))
    assert second.grains[: len(first.grains)] == first.grains
    assert len(first.grains) > 1


async def test_a_short_prompt_has_no_names_and_is_not_tokenized(make_reader):
    prompt = await (await make_reader()).read(body(prompt="hi"))
    assert (prompt.grains, prompt.unread) == ((), "")


async def test_who_tokenizes_for_too_long_is_not_waited_for(make_reader, monkeypatch):
    reader = await make_reader()
    go_on = threading.Event()
    monkeypatch.setattr(reader, "_tokenize", lambda *_: go_on.wait(30) and [])
    try:
        prompt = await reader.read(body(prompt=LONG * 2))
        assert prompt.unread == "slow"
        assert prompt.grains
    finally:
        go_on.set()


async def test_a_template_or_tokenizer_that_is_not_there_is_refused(make_reader, tmp_path):
    with pytest.raises(ConfigError, match=r"the chat template .*none cannot be read: No such file"):
        await make_reader(chat_template=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        await make_reader(tokenizer=str(tmp_path))


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)
)
JSON = st.recursive(
    st.one_of(SCALARS, st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=8,
)
FIELD = st.one_of(JSON, st.just(LONG), st.just([1] * 300), st.just(messages(LONG)))
NAMES = [
    *("messages", "prompt", "tools", "tool_choice", "documents", "cache_salt", "functions"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
]


@pytest.fixture(scope="module")
def loaded(model):
    reader = PromptReader(ProxyConfig(tokenizer=str(model)), lambda: 1000)
    reader.load()
    yield reader
    reader.close()


@given(fields=st.dictionaries(st.sampled_from(NAMES), FIELD))
def test_whatever_a_body_holds_it_has_a_prompt_to_route(loaded, fields):
    prompt = asyncio.run(loaded.read(body(**fields)))
    assert len(prompt.grains) * GRAIN_TOKENS <= prompt.num_tokens
    assert prompt.unread in ("", *UNREAD)
