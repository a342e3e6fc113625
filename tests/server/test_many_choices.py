"""A request with many choices, many prompts or many tokens: what it costs, and what is refused."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.server.choice import Choice
from pdserve.wire.core_messages import Add
from pdserve.wire.request import FinishReason
from tests.server.conftest import events, make_engine, serving
from tests.server.engine import ServedEngine

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from pdserve.wire.request import EngineOutput, GenerateRequest, Sibling
    from tests.toy_request import ToyRequest

PATH = "/v1/completions"
PROMPT = [7] * 1500


class CountingEngine(ServedEngine):
    """An engine that knows how many bytes its requests would be on the way to an engine core."""

    num_bytes = 0

    def generate(
        self, request: GenerateRequest, *siblings: Sequence[Sibling]
    ) -> AsyncGenerator[EngineOutput, None]:
        self.num_bytes += len(msgspec.msgpack.encode(Add(request, *map(list, siblings))))
        return super().generate(request, *siblings)


async def test_a_prompt_travels_once_however_many_choices_it_has(text):
    sizes = {}
    for n in (1, 128):
        engine = CountingEngine(vocab_size=text.tokenizer.vocab_size, first_token_id=8)
        async with serving(text, engine) as server:
            body = {"prompt": PROMPT, "n": n, "max_tokens": 2, "logit_bias": {"5": 1.0}}
            answer = await server.ok(PATH, body)
        assert len(answer["choices"]) == n
        sizes[n] = engine.num_bytes
    assert sizes[128] - sizes[1] < 127 * 100, "each choice brings the prompt along again"


@pytest.mark.parametrize("stream", [True, False])
async def test_each_of_several_prompts_has_its_own_choices(text, stream):
    engine = make_engine(text)
    body = {"prompt": [[9, 10], [11, 12]], "n": 3, "max_tokens": 4, "seed": 3, "temperature": 1}
    async with serving(text, engine) as server:
        if stream:
            texts = [""] * 6
            for event in events(await server.stream(PATH, body)):
                [choice] = event["choices"]
                texts[choice["index"]] += choice["text"]
        else:
            texts = [choice["text"] for choice in (await server.ok(PATH, body))["choices"]]
        alone = []
        for prompt in body["prompt"]:
            answer = await server.ok(PATH, body | {"prompt": prompt})
            alone += [choice["text"] for choice in answer["choices"]]
    assert texts == alone
    assert len(set(texts)) == 6


class FailingLate(ServedEngine):
    """An engine in which a choice fails just after its first token, unless it ended with that."""

    async def generate(
        self, request: GenerateRequest, *siblings: Sequence[Sibling]
    ) -> AsyncGenerator[EngineOutput, None]:
        async for output in super().generate(request, *siblings):
            yield output
            if output.request_id == request.request_id and output.finish_reason is None:
                yield msgspec.structs.replace(
                    output, new_token_ids=[], finish_reason=FinishReason.ERROR, error="broken"
                )


async def test_a_choice_that_a_stop_string_ended_cannot_fail_the_others(text):
    token = [text.tokenizer.encode(letter)[-1] for letter in "ab"]
    ids: list[str] = []

    def next_token(request: ToyRequest, output: Sequence[int]) -> int:
        if request.request_id not in ids:
            ids.append(request.request_id)
        return token[ids.index(request.request_id) % 2]

    engine = FailingLate(
        vocab_size=text.tokenizer.vocab_size,
        next_token=next_token,
    )
    async with serving(text, engine) as server:
        body = {"prompt": "x", "n": 2, "max_tokens": 4}
        answer = await server.ok(PATH, body | {"stop": "a"})
        assert [each["finish_reason"] for each in answer["choices"]] == ["stop", "length"]
        assert answer["choices"][1]["text"] == "bbbb"
        assert (await server.post(PATH, body))[0] == 500


async def test_more_tokens_than_one_request_may_ask_for_are_refused(server):
    body = {"prompt": PROMPT, "n": 1024, "max_tokens": 100}
    status, error = await server.refused(PATH, body)
    assert (status, error["param"]) == (400, "n")
    assert "1638400 tokens" in error["message"]  # 1024 x (1500 + 100)
    assert "at most 1048576" in error["message"]
    assert not server.engine.requests


async def test_many_prompts_for_more_tokens_than_one_request_may_have_are_refused(server):
    body = {"prompt": [[7]] * 1000, "max_tokens": 2000}
    status, error = await server.refused(PATH, body)
    assert (status, error["param"]) == (400, "prompt")


async def test_as_many_choices_as_may_run_at_once_may_have_a_whole_context_each(server):
    info = server.engine.info
    body = {"prompt": [7], "n": info.max_num_seqs, "max_tokens": 2000, "stop": "a"}
    async with server.session.post(server.url + PATH, json=body | {"stream": True}) as response:
        assert response.status == 200
        response.close()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["answered", "refused", "left"])
async def test_choices_that_are_over_wait_for_no_collector(text, end):
    engine = make_engine(text, recompute_tokens_per_s=1, max_model_len=16, step_s=0.01)
    body: dict[str, Any] = {"prompt": [60] * 10, "n": 4, "max_tokens": 3}
    if end == "refused":
        body["kv_transfer_params"] = {"pdserve": {"is_fallback": True}}
    async with serving(text, engine) as server:
        await server.post(PATH, body)
        gc.collect()
        gc.disable()
        try:
            if end == "left":
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await server.post(PATH, body)
            else:
                status, _ = await server.post(PATH, body)
                assert (status == 200) == (end == "answered")
            await asyncio.sleep(0.1)
            left = [each for each in gc.get_objects() if isinstance(each, Choice)]
        finally:
            gc.enable()
    assert not left
