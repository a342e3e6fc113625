"""A decode engine that has prompts prefilled elsewhere itself, as a gateway orders."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.http.ignored import IGNORED_HEADER
from pdserve.server import prefill_leg
from pdserve.wire.hop import PREFILL_HEADER, PREFILL_ORDERS, PrefillOrder
from tests.server.conftest import events, make_engine, serving, until
from tests.server.engine import MemoryNetwork

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.text.load import Text
    from tests.server.conftest import Server

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
SAID = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "The quick", "max_tokens": 6, "logprobs": 1, "seed": 5},
    CHAT: {"messages": SAID, "max_tokens": 6, "seed": 5},
    MESSAGES: {"messages": SAID, "max_tokens": 6, "model": "tiny", "temperature": 0},
}
SECRET = "of this deployment"


class Pair:
    """Two servers whose engines read one another's KV."""

    def __init__(self, prefill: Server, decode: Server) -> None:
        self.prefill = prefill
        self.decode = decode

    def order(self, *, url: str = "", secret: str = SECRET) -> str:
        return PREFILL_ORDERS.seal(PrefillOrder(url or self.prefill.url), secret)

    async def ask(self, path: str, body: dict[str, Any], **order: str) -> Any:
        """Ask as a gateway does, with one call of one id."""
        header = {"X_Pdserve_Prefill": self.order(**order), "X_Request_Id": "one"}
        return await self.decode.ok(path, body, **header)

    async def legs(self) -> dict[str, int]:
        """How the prefill legs have ended that the decode server sent."""
        lines = (await self.decode.get("/metrics"))[1].splitlines()
        found = [x.split('"') for x in lines if x.startswith("pdserve_prefill_legs_total{")]
        return {parts[1]: n for parts in found if (n := int(float(parts[2].split()[-1])))}


@contextlib.asynccontextmanager
async def pair(
    text: Text, *, p: dict[str, Any] | None = None, d: dict[str, Any] | None = None
) -> AsyncIterator[Pair]:
    """A pair that ends with nothing running and nothing leased."""
    network = MemoryNetwork()
    prefill = make_engine(text, network=network, role="prefill", engine_id="p", **(p or {}))
    decode = make_engine(text, network=network, role="decode", engine_id="d", **(d or {}))
    async with (
        serving(text, prefill, secret=SECRET) as first,
        serving(text, decode, secret=SECRET) as second,
    ):
        yield Pair(first, second)
        alive = [each for each in (prefill, decode) if each.dead_reason is None]
        await until(lambda: not any(each.running or each.leases for each in alive))


@pytest.mark.parametrize("path", BODIES)
async def test_an_ordered_answer_is_the_answer_of_one_engine(text, path):
    async with pair(text) as both:
        split = await both.ask(path, BODIES[path])
        [given] = both.decode.engine.requests
        alone = await both.decode.ok(path, BODIES[path], X_Request_Id="one")
        assert await both.legs() == {"handed_over": 1}
    assert given.handoff is not None
    assert len(both.prefill.engine.requests) == 1
    assert "kv_transfer_params" not in split
    assert split | {"created": 0} == alone | {"created": 0}


async def test_transfer_parameters_that_an_order_replaces_are_named(text):
    body = BODIES[COMPLETIONS] | {"kv_transfer_params": {"do_remote_decode": True}}
    async with pair(text) as both:
        url, headers = both.decode.url + COMPLETIONS, {"X-Pdserve-Prefill": both.order()}
        async with both.decode.session.post(url, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            assert response.headers[IGNORED_HEADER] == "kv_transfer_params"
        assert await both.legs() == {"handed_over": 1}


@pytest.mark.parametrize("extra", [{}, {"n": 2}, {"stream_options": {"include_usage": True}}])
async def test_an_ordered_stream_is_the_stream_of_one_engine(text, extra):
    body = BODIES[COMPLETIONS] | extra
    async with pair(text) as both:
        header = {"X_Pdserve_Prefill": both.order(), "X_Request_Id": "one"}
        split = events(await both.decode.stream(COMPLETIONS, body, **header))
        assert all(each.handoff is not None for each in both.decode.engine.requests)
        alone = events(await both.decode.stream(COMPLETIONS, body, X_Request_Id="one"))

    def by_choice(chunks: list[Any]) -> dict[int, list[Any]]:
        lanes: dict[int, list[Any]] = {}
        for chunk in chunks:
            for choice in chunk["choices"] or [{"index": -1, "usage": chunk["usage"]}]:
                lanes.setdefault(choice["index"], []).append(choice)
        return lanes

    assert by_choice(split) == by_choice(alone)


async def test_a_prompt_yields_at_the_prefill_engine_as_at_the_one_that_got_the_order(text):
    async with pair(text) as both:
        order = {"X_Pdserve_Prefill": both.order(), "X_Pdserve_Yields": "1"}
        await both.decode.ok(COMPLETIONS, BODIES[COMPLETIONS], **order)
        for server in (both.prefill, both.decode):
            assert [each.yields_s for each in server.engine.requests] == [1.0]


async def test_a_choice_that_ends_with_its_first_token_is_computed_here_and_nothing_is_leased(text):
    async with pair(text, p={"eos_after": 0}) as both:
        answer = await both.ask(COMPLETIONS, BODIES[COMPLETIONS])
        assert answer["choices"][0]["finish_reason"] == "length"  # as the engine here says
        assert await both.legs() == {"ended": 1}


@pytest.mark.parametrize("trouble", [{"die_after": 0}, {"max_waiting": 0}])
async def test_what_cannot_be_prefilled_there_is_computed_here_within_the_budget(text, trouble):
    async with pair(text, p=trouble) as both:
        await both.ask(COMPLETIONS, BODIES[COMPLETIONS])
        [given] = both.decode.engine.requests
        assert given.is_fallback
        assert await both.legs() == {"failed": 1}


async def test_a_prefill_engine_that_is_gone_is_not_waited_for(text):
    async with pair(text) as both:
        await both.ask(COMPLETIONS, BODIES[COMPLETIONS], url="http://127.0.0.1:1")
        assert await both.legs() == {"failed": 1}


async def test_a_prefill_engine_that_hangs_is_given_up(text, monkeypatch):
    monkeypatch.setattr(prefill_leg, "_LOOK_S", 0.02)

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # to the end, without a word
        writer.close()

    hanging = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = hanging.sockets[0].getsockname()[1]
    async with pair(text) as both, hanging:
        await both.ask(COMPLETIONS, BODIES[COMPLETIONS], url=f"http://127.0.0.1:{port}")
        assert await both.legs() == {"failed": 1}


async def test_a_wrong_request_is_refused_in_the_words_of_the_engine_that_was_asked(text):
    async with pair(text) as both:
        status, error = await both.decode.refused(
            COMPLETIONS, {"prompt": ""}, X_Pdserve_Prefill=both.order()
        )
    assert (status, error["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("header", "status"), [("nonsense", 400), ("AA==", 400), (None, 409)], ids=str
)
async def test_an_order_that_is_not_this_deployments_is_refused(text, header, status):
    async with pair(text) as both:
        order = header or both.order(secret="of another")
        refused = await both.decode.refused(
            COMPLETIONS, BODIES[COMPLETIONS], **{PREFILL_HEADER.replace("-", "_"): order}
        )
        assert refused[0] == status
        assert not both.prefill.engine.requests


async def test_the_lease_of_a_request_that_fails_here_is_given_back(text):
    async with pair(text, d={"max_waiting": 0}) as both:
        status, _ = await both.decode.refused(
            COMPLETIONS, BODIES[COMPLETIONS], X_Pdserve_Prefill=both.order()
        )
        assert status == 429
        await until(lambda: len(both.prefill.engine.released) == 1)
