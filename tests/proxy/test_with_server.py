"""The proxy before the real API servers (over engines without a model): one contract, two sides."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
import pytest

from pdserve.config.http import ProxyConfig
from pdserve.config.schema import ModelConfig
from pdserve.observe.clock import Clock
from pdserve.proxy.app import Proxy
from pdserve.text.answer.parsers import TOOL_PARSERS
from pdserve.text.answer.style import AnswerStyle
from pdserve.text.load import load_text
from tests.proxy.scripted import events_of
from tests.server.conftest import Server, make_engine, script, serving, until
from tests.server.engine import MemoryNetwork
from tests.text.tiny import write_model_files

pytestmark = pytest.mark.slow

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = {
    COMPLETIONS: {"prompt": "The quick", "max_tokens": 12, "logprobs": 1, "seed": 5},
    CHAT: {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 12,
        "logprobs": True,
        "seed": 5,
    },
}
EXTRAS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"temperature": 0},
    {"return_token_ids": True},
    {"stop": ["a", "e"]},
    {"max_tokens": 1},
    {"n": 2, "max_tokens": 1},
]
COUNTED = {"include_usage": True, "continuous_usage_stats": True}


class Deployment:
    def __init__(self, url: str, proxy: Proxy, servers: list[Server]) -> None:
        self.url = url
        self.proxy = proxy
        self.servers = servers

    def is_quiet(self) -> bool:
        """Nothing runs, and nothing is leased but at engines that are dead."""
        alive = [s.engine for s in self.servers if s.engine.dead_reason is None]
        return not any(engine.running or engine.leases for engine in alive)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    model = write_model_files(tmp_path_factory.mktemp("model"))
    return load_text(ModelConfig(model=str(model)))


@contextlib.asynccontextmanager
async def deployed(
    text,
    *,
    prefill: list[dict],
    decode: list[dict],
    engine_secret: str = "",
    engine_clock: Clock | None = None,
    **settings: Any,
):
    """A proxy over servers over local engines; ends with nothing leased and nothing running."""
    network = MemoryNetwork()
    async with contextlib.AsyncExitStack() as stack:
        servers, urls = [], {"prefill": [], "decode": []}
        for role, group in (("prefill", prefill), ("decode", decode)):
            for i, parameters in enumerate(group):
                name = f"{role}{i}"
                engine = make_engine(text, network=network, role=role, engine_id=name, **parameters)
                server = await stack.enter_async_context(
                    serving(text, engine, secret=engine_secret, clock=engine_clock)
                )
                servers.append(server)
                urls[role].append(server.url)
        proxy = Proxy(
            ProxyConfig(
                port=0,
                prefill=tuple(urls["prefill"]),
                decode=tuple(urls["decode"]),
                prefill_policy="round_robin",
                decode_policy="round_robin",
                shutdown_timeout_s=1.0,
                **settings,
            ),
            rng=random.Random(1),
        )
        url = await proxy.start()
        stack.push_async_callback(proxy.stop)
        deployment = Deployment(url, proxy, servers)
        yield deployment
        await until(deployment.is_quiet)


async def ask(url: str, path: str, body: dict[str, Any]) -> bytes:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + path, json=body, headers={"X-Request-Id": "one"}) as response,
    ):
        answer = await response.read()
        assert response.status == 200, answer
        return answer


def by_choice(stream: bytes) -> dict[int, list[Any]]:
    """Each choice's chunks in order, without what depends on the moment."""
    lanes: dict[int, list[Any]] = {}
    for chunk in events_of(stream):
        chunk.pop("created")
        for choice in chunk.pop("choices") or [{"index": -1}]:
            lanes.setdefault(choice["index"], []).append((chunk, choice))
    return lanes


async def test_requests_of_a_tenant_over_its_share_yield_at_both_engines(text):
    async with (
        deployed(text, prefill=[{}], decode=[{}], tenant_header="X-Tenant") as both,
        aiohttp.ClientSession() as session,
    ):
        for tenant, num in (("greedy", 400), ("modest", 1), ("greedy", 1)):
            body = {"prompt": "The quick " * num, "max_tokens": 4, "seed": 5}
            headers = {"X-Tenant": tenant}
            async with session.post(both.url + COMPLETIONS, json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
        for server in both.servers:
            assert [each.yields_s for each in server.engine.requests] == [0.0, 0.0, 1.0]


PULL_AND_PUSH = pytest.mark.parametrize("engine", [{}, {"can_push": True}], ids=["pull", "push"])


def assert_moved(both: Deployment, body: dict[str, Any], *, can_push: bool) -> None:
    """What can be pushed was, and nothing else: one choice of more than one token."""
    [first, *_] = both.servers[0].engine.requests
    is_pushed = can_push and body["max_tokens"] > 1 and "n" not in body
    assert (first.ticket is not None) is is_pushed
    assert both.servers[1].engine.stats.kv_loads["pull" if is_pushed else "push"] == 0


@pytest.mark.covering(2)
@PULL_AND_PUSH
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("extra", [*EXTRAS, {"stream_options": COUNTED}], ids=str)
async def test_a_stream_through_two_engines_is_the_stream_of_one(text, path, extra, engine):
    body = BODIES[path] | extra | {"stream": True}
    async with deployed(text, prefill=[engine], decode=[engine]) as both:
        disaggregated = await ask(both.url, path, body)
        assert_moved(both, body, can_push=bool(engine))
        alone = await ask(both.servers[1].url, path, body)
        assert len(both.servers[0].engine.requests) == body.get("n", 1)
    assert by_choice(disaggregated) == by_choice(alone)


@pytest.mark.covering(2)
@PULL_AND_PUSH
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("extra", [*EXTRAS, {"prompt_logprobs": 1}], ids=str)
async def test_an_answer_through_two_engines_is_the_answer_of_one(text, path, extra, engine):
    body = BODIES[path] | extra
    async with deployed(text, prefill=[engine], decode=[engine]) as both:
        disaggregated = msgspec.json.decode(await ask(both.url, path, body))
        alone = msgspec.json.decode(await ask(both.servers[1].url, path, body))
    assert disaggregated | {"created": 0} == alone | {"created": 0}


@pytest.mark.covering(1)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("after", range(0, 12, 3))
async def test_the_stream_is_the_same_when_its_decode_engine_dies(text, path, after):
    body = BODIES[path] | {"stream": True}
    async with deployed(text, prefill=[{}], decode=[{"die_after": after}, {}]) as both:
        broken = await ask(both.url, path, body)
        whole = await ask(both.servers[2].url, path, body)
    assert _said(broken) == _said(whole)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_answer_is_the_same_when_its_prefill_engine_dies(text, stream):
    body = BODIES[COMPLETIONS] | {"stream": stream}
    async with deployed(text, prefill=[{"die_after": 0}, {}], decode=[{}]) as both:
        answer = await ask(both.url, COMPLETIONS, body)
        whole = await ask(both.servers[2].url, COMPLETIONS, body)
    if stream:
        assert _said(answer) == _said(whole)
    else:
        texts = [msgspec.json.decode(body)["choices"][0]["text"] for body in (answer, whole)]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("engine", [{}, {"can_push": True}], ids=["pull", "push"])
@pytest.mark.parametrize("room", [1, 2, 9])
async def test_a_limit_above_what_the_context_has_room_for_gives_way_wherever_it_ends(
    text, room, engine
):
    small = engine | {"max_model_len": 128}
    dying = small | {"die_after": 4}
    async with deployed(text, prefill=[small], decode=[dying, small]) as both:
        prompt = [60] * (128 - room)
        body = {"prompt": prompt, "max_tokens": 32_000, "ignore_eos": True, "seed": 5}
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        broken = await ask(both.url, COMPLETIONS, streamed)
        whole = msgspec.json.decode(await ask(both.url, COMPLETIONS, body))
        alone = msgspec.json.decode(await ask(both.servers[2].url, COMPLETIONS, body))
    assert whole | {"created": 0} == alone | {"created": 0}
    [choice], usage = whole["choices"], whole["usage"]
    assert (choice["finish_reason"], usage["completion_tokens"]) == ("length", room)
    assert events_of(broken)[-1]["usage"] == usage
    assert _said(broken)[0] == choice["text"]


async def test_a_wrong_field_is_refused_in_the_engines_words(text):
    async with (
        deployed(text, prefill=[{}], decode=[{}]) as both,
        aiohttp.ClientSession() as session,
        session.post(both.url + COMPLETIONS, json={"prompt": "a", "max_tokens": -1}) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "max_tokens"


def _said(stream: bytes) -> tuple[str, list[Any]]:
    """All text of a stream of one choice, and its tokens' log-probabilities."""
    text, tokens = "", []
    for chunk in events_of(stream):
        for choice in chunk["choices"]:
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            logprobs = choice["logprobs"] or {}
            tokens += logprobs.get("tokens") or [e["token"] for e in logprobs.get("content", [])]
    return text, tokens


CALLS = (
    'a<tool_call>{"name": "see", "arguments": {"x": "the fox"}}</tool_call>'
    '<tool_call>{"name": "hear", "arguments": {"y": "the dog"}}</tool_call>'
)


@pytest.mark.covering(1)
@pytest.mark.parametrize("engine", [{}, {"can_push": True}], ids=["pull", "push"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.4, 0.6, 0.9])
async def test_a_call_is_the_same_when_its_decode_engine_dies_in_it(text, share, engine):
    calling = replace(text, answers=AnswerStyle(calls=TOOL_PARSERS["hermes"]))
    num_tokens = len(text.tokenizer.encode(CALLS, add_special_tokens=False))
    scripted = {"next_token": script(text, CALLS)} | engine
    dying = scripted | {"die_after": int(share * num_tokens)}
    tools = [{"type": "function", "function": {"name": name}} for name in ("see", "hear")]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "stream": True}
    async with deployed(calling, prefill=[scripted], decode=[dying, scripted]) as both:
        broken = await ask(both.url, CHAT, body)
        whole = await ask(both.servers[2].url, CHAT, body)
    calls = _calls(broken)
    assert calls == _calls(whole)
    assert [call[1:] for call in calls] == [
        ("see", '{"x": "the fox"}'),
        ("hear", '{"y": "the dog"}'),
    ]
    assert broken.count(b'"finish_reason":"tool_calls"') == 1


def _calls(stream: bytes) -> list[tuple[str, str, str]]:
    """Id, name and arguments of each call, as clients put them together."""
    calls: list[tuple[str, str, str]] = []
    for chunk in events_of(stream):
        for choice in chunk["choices"]:
            for call in choice["delta"].get("tool_calls", ()):
                function = call["function"]
                if "id" in call:
                    calls.append((call["id"], function["name"], ""))
                call_id, name, arguments = calls[call["index"]]
                calls[call["index"]] = call_id, name, arguments + function["arguments"]
    return calls
