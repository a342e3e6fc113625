"""Long texts: bounded, in threads of their own, and refused when too many wait."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from pdserve.server.service import TextWork
from tests.server.conftest import make_engine, scripted, serving, until

LONG = "the quick brown fox " * 1000
NUM_TOOL_JOBS = 8


class Gate:
    """A tokenizer that takes as long as the test wants with a long text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_entered = 0
        self.open = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) >= len(LONG):
            self.num_entered += 1
            assert self.open.wait(20)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids


async def test_tokenizing_for_others_is_refused_when_too_much_of_it_waits(text):
    gate = Gate(text.tokenizer)
    async with serving(replace(text, tokenizer=gate), make_engine(text)) as server:
        waiting = [
            asyncio.create_task(server.post("/tokenize", {"prompt": LONG}))
            for _ in range(NUM_TOOL_JOBS + 2)
        ]
        try:
            async with asyncio.timeout(10):
                refused, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gate.open.set()
        assert {task.result()[0] for task in refused} == {429}
        answers = await asyncio.gather(*waiting)
        assert sorted(status for status, _ in answers) == [200] * NUM_TOOL_JOBS + [429] * 2
        error = next(answer["error"] for status, answer in answers if status == 429)
        assert "long texts" in error["message"]
        await server.ok("/tokenize", {"prompt": LONG})  # there is room again


async def test_neither_prompts_nor_streams_wait_behind_it(text):
    gate = Gate(text.tokenizer)
    engine = scripted(text, "the lazy dog")
    async with serving(replace(text, tokenizer=gate), engine) as server:
        tools = [
            asyncio.create_task(server.post("/tokenize", {"prompt": LONG}))
            for _ in range(NUM_TOOL_JOBS)
        ]
        try:
            await until(lambda: gate.num_entered > 0)
            assert b"lazy" in await server.stream("/v1/completions", {"prompt": "short"})
            bad_words = [f"word{i}" for i in range(200)]
            body = {"prompt": "x", "bad_words": bad_words}  # enough for a thread
            async with asyncio.timeout(10):
                await server.ok("/v1/completions", body | {"max_tokens": 2, "stream": False})
            assert gate.num_entered == 1, "one thread is enough for tools"
        finally:
            gate.open.set()
        assert [status for status, _ in await asyncio.gather(*tools)] == [200] * NUM_TOOL_JOBS


async def test_work_whose_client_has_left_counts_until_it_ends():
    work = TextWork("text", num_threads=1, max_calls=2)
    entered, may_end = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        assert may_end.wait(20)

    running = asyncio.create_task(work.run(block, 1 << 20))
    queued = asyncio.create_task(work.run(block, 1 << 20))
    await until(entered.is_set)
    for task in (running, queued):
        task.cancel()
    await asyncio.gather(running, queued, return_exceptions=True)
    await until(lambda: work.num_calls == 1)  # what had not begun never does
    may_end.set()
    await until(lambda: work.num_calls == 0)
    work.close()


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {"prompt": "x" * (4 << 20) + "x"}, "prompt"),
        ("/detokenize", {"tokens": [3] * ((1 << 20) + 1)}, "tokens"),
        ("/v1/completions", {"prompt": "x", "stop": ["y" * 5000]}, "stop"),
        ("/v1/completions", {"prompt": "x", "bad_words": ["y" * 20000]}, "bad_words"),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [3] * 129}, "stop_token_ids"),
        (
            "/v1/completions",
            {"prompt": "x", "logit_bias": {str(i): 1 for i in range(1025)}},
            "logit_bias",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "allowed_token_ids": [3] * 10_000},
            "allowed_token_ids",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": ""}] * 3000},
            "messages",
        ),
        ("/tokenize", {"messages": [{"role": "user", "content": ""}] * 3000}, "messages"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "", "more": "x" * 500_000}]},
            "messages",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
async def test_what_is_longer_than_it_may_be_is_refused_by_its_name(server, path, body, field):
    status, error = await server.refused(path, body)
    assert (status, error["param"]) == (400, field)
    assert "at most" in error["message"] or "has only" in error["message"]
    assert any(character.isdigit() for character in error["message"])
    assert not server.engine.requests


async def test_a_text_too_long_for_the_context_is_not_tokenized_by_any_tokenizer(text):
    class OfUnknownWidth(Gate):
        max_chars_per_token = None

    gate = OfUnknownWidth(text.tokenizer)
    async with serving(replace(text, tokenizer=gate), make_engine(text)) as server:
        body = {"prompt": "x" * 70_000}
        status, error = await server.refused("/v1/completions", body)
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert "65536" in error["message"]
    assert gate.num_entered == 0
