"""The endpoint picker, asked as gateways ask it: over gRPC, before scripted and real engines."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.config.http import EppConfig, ProxyConfig
from pdserve.config.schema import ModelConfig
from pdserve.errors import ConfigError
from pdserve.proxy.app import Proxy
from pdserve.proxy.epp.messages import MAX_CHUNK_BYTES, BodyMode, MessagePart
from pdserve.proxy.epp.picking import endpoint_of
from pdserve.text.load import load_text
from pdserve.wire.hop import PREFILL_ORDERS
from tests.http.certificates import Authority
from tests.proxy.conftest import Stack, until
from tests.proxy.gateway import (
    IMMEDIATE,
    Answer,
    Gateway,
    body_event,
    headers_event,
    trailers_event,
)
from tests.proxy.scripted import ScriptedEngine
from tests.proxy.test_pairing import learned
from tests.server.conftest import make_engine, serving
from tests.server.engine import MemoryNetwork
from tests.text.tiny import write_model_files

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PATH = "/v1/completions"
HEADERS = {":method": "POST", ":path": PATH, "x-request-id": "one"}
BODY = msgspec.json.encode({"prompt": "hi", "max_tokens": 4})
DESTINATION, ORDER = "x-gateway-destination-endpoint", "x-pdserve-prefill"
YIELDS = "x-pdserve-yields"


@contextlib.asynccontextmanager
async def asked(stack: Stack) -> AsyncIterator[Gateway]:
    """A gateway that asks a proxy; nothing counts as running afterwards."""
    assert stack.proxy.epp_address is not None
    gateway = Gateway(stack.proxy.epp_address)
    yield gateway
    await gateway.close()
    await until(lambda: not any(each.in_flight for each in stack.proxy.backends))


async def stack_of(make_stack: Any, num_prefill: int, num_decode: int, **settings: Any) -> Stack:
    return await make_stack(
        prefill=[ScriptedEngine("prefill") for _ in range(num_prefill)],
        decode=[ScriptedEngine("decode") for _ in range(num_decode)],
        epp=EppConfig(port=0),
        **settings,
    )


def endpoints(answer: Answer) -> list[str]:
    """Where a request is to go, by header and metadata alike."""
    named = answer.headers[DESTINATION]
    assert named.encode() in answer.metadata
    assert b"envoy.lb" in answer.metadata
    return named.split(",")


async def test_a_request_goes_to_a_decode_engine_with_an_order_for_its_prefill(make_stack):
    stack = await stack_of(make_stack, 1, 2, secret="s")
    p, *decodes = stack.engines
    async with asked(stack) as gateway:
        headers, body = await gateway.ask(headers_event(HEADERS), body_event(BODY), num_answers=2)
    assert set(endpoints(headers)) == {endpoint_of(each.url) for each in decodes}
    assert PREFILL_ORDERS.open(headers.headers[ORDER], "s").url == p.url
    assert float(headers.headers["x-pdserve-time-left"]) > 0
    assert (body.number, body.body, body.is_end) == (MessagePart.REQUEST_BODY.reply, BODY, True)
    assert not any(each.calls for each in stack.engines)  # the gateway sends it, nobody else


async def test_without_a_prefill_engine_an_order_of_the_clients_own_is_taken_away(make_stack):
    stack = await stack_of(make_stack, 0, 1)
    async with asked(stack) as gateway:
        [headers, _] = await gateway.ask(
            headers_event(HEADERS | {ORDER: "forged"}), body_event(BODY), num_answers=2
        )
    assert ORDER not in headers.headers
    assert ORDER in headers.removed


async def test_engines_hear_which_requests_are_of_a_tenant_over_its_share(make_stack):
    stack = await stack_of(make_stack, 1, 1, tenant_header="X-Tenant")
    async with asked(stack) as gateway:
        for tenant, num_bytes, told in (
            ("greedy", 9000, None),
            ("modest", 4, None),
            ("greedy", 4, "1"),
        ):
            body = msgspec.json.encode({"prompt": "x" * num_bytes, "max_tokens": 4})
            given = HEADERS | {"x-tenant": tenant, YIELDS: "1e9"}
            [headers, _] = await gateway.ask(headers_event(given), body_event(body), num_answers=2)
            assert headers.headers.get(YIELDS) == told
            assert (YIELDS in headers.removed) == (told is None), "what the client says is nothing"


async def test_a_long_body_comes_back_whole_in_chunks_that_gateways_take(make_stack):
    stack = await stack_of(make_stack, 1, 1)
    body = msgspec.json.encode({"prompt": "x" * 150_000, "max_tokens": 4})
    pieces = [body[at : at + 60_000] for at in range(0, len(body), 60_000)]
    events = [body_event(each, is_end=each is pieces[-1]) for each in pieces]
    async with asked(stack) as gateway:
        _, *chunks = await gateway.ask(headers_event(HEADERS), *events, num_answers=4)
    assert b"".join(each.body for each in chunks) == body
    assert max(len(each.body) for each in chunks) <= MAX_CHUNK_BYTES
    assert [each.is_end for each in chunks] == [False, False, True]


async def test_where_trailers_follow_the_body_does_not_end(make_stack):
    stack = await stack_of(make_stack, 1, 1)
    async with asked(stack) as gateway:
        headers, body, trailers = await gateway.ask(
            headers_event(HEADERS),
            body_event(BODY, is_end=False),
            trailers_event(),
            num_answers=3,
        )
    assert endpoints(headers)
    assert (body.body, body.is_end) == (BODY, False)
    assert trailers.number == MessagePart.REQUEST_TRAILERS.reply


async def test_what_is_not_computed_goes_to_any_engine_that_decodes(make_stack):
    stack = await stack_of(make_stack, 1, 1)
    async with asked(stack) as gateway:
        [answer] = await gateway.ask(
            headers_event({":method": "GET", ":path": "/v1/models"}, is_end=True)
        )
    assert endpoints(answer) == [endpoint_of(stack.engines[1].url)]


async def test_a_request_for_one_token_is_not_split(make_stack):
    stack = await stack_of(make_stack, 1, 1)
    body = msgspec.json.encode({"prompt": "hi", "max_tokens": 1})
    async with asked(stack) as gateway:
        [answer, _] = await gateway.ask(headers_event(HEADERS), body_event(body), num_answers=2)
    assert ORDER not in answer.headers


async def test_only_endpoints_of_the_subset_are_picked(make_stack):
    stack = await stack_of(make_stack, 1, 3)
    wanted = endpoint_of(stack.engines[2].url)
    async with asked(stack) as gateway:
        for _ in range(4):
            [answer, _] = await gateway.ask(
                headers_event(HEADERS, subset=[wanted, "10.9.8.7:1"]),
                body_event(BODY),
                num_answers=2,
            )
            assert endpoints(answer) == [wanted]


@pytest.mark.parametrize("subset", [[], ["10.9.8.7:1"]])
async def test_a_subset_without_an_engine_is_503(make_stack, subset):
    stack = await stack_of(make_stack, 1, 1)
    async with asked(stack) as gateway:
        [answer] = await gateway.ask(headers_event(HEADERS, subset=subset), body_event(BODY))
    assert (answer.number, answer.status) == (IMMEDIATE, 503)
    assert msgspec.json.decode(answer.body)["error"]["code"] == "no_engine_in_subset"
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["x-request-id"] == HEADERS["x-request-id"]


async def test_without_a_ready_engine_the_answer_is_503_and_picks_are_counted(make_stack):
    stack = await stack_of(make_stack, 1, 1)
    await stack.engines[1].stop()
    async with asked(stack) as gateway:
        await until(lambda: not any(b.available for b in stack.proxy.backends if b.decodes()))
        [answer] = await gateway.ask(headers_event(HEADERS), body_event(BODY))
    assert (answer.number, answer.status) == (IMMEDIATE, 503)
    counted = await stack.metrics()
    assert counted['pdserve_epp_picks_total{outcome="unavailable"}'] == 1


async def test_beyond_what_may_run_and_wait_the_answer_is_429(make_stack):
    stack = await stack_of(make_stack, 1, 1, max_concurrent_requests=1, queue_size=0)
    async with asked(stack) as gateway:
        running = gateway.stream()
        await running.write(headers_event(HEADERS))
        await running.write(body_event(BODY))
        await running.read()
        [refused] = await gateway.ask(headers_event(HEADERS), body_event(BODY))
        running.cancel()
        assert (refused.number, refused.status) == (IMMEDIATE, 429)
        assert refused.headers["content-type"] == "application/json"
        await until(lambda: not any(each.in_flight for each in stack.proxy.backends))
        [answer, _] = await gateway.ask(headers_event(HEADERS), body_event(BODY), num_answers=2)
        assert endpoints(answer)


@pytest.mark.parametrize("body", [b"nonsense", b"", b"[]", b'{"prompt": "a"}' * 10_000])
async def test_a_body_that_cannot_be_read_is_the_clients_fault(make_stack, body):
    stack = await stack_of(make_stack, 1, 1)
    stack.proxy.bodies._limits = msgspec.structs.replace(
        stack.proxy.bodies._limits, max_body_bytes=100_000
    )
    async with asked(stack) as gateway:
        [answer] = await gateway.ask(headers_event(HEADERS), body_event(body))
    assert (answer.number, answer.status) == (IMMEDIATE, 413 if len(body) > 100_000 else 400)
    assert stack.proxy.bodies.num_held_bytes == 0


async def test_the_prefill_engines_work_is_over_when_the_answer_begins(make_stack):
    stack = await stack_of(make_stack, 1, 1)
    prefill, decode = (stack.proxy.backends.get(each.url) for each in stack.engines)
    async with asked(stack) as gateway:
        stream = gateway.stream()
        await stream.write(headers_event(HEADERS))
        await stream.write(body_event(BODY))
        await stream.read()
        await stream.read()
        assert (prefill.in_flight, decode.in_flight) == (1, 1)
        await stream.write(headers_event({":status": "200"}, part=MessagePart.RESPONSE_HEADERS))
        await stream.read()
        assert (prefill.in_flight, decode.in_flight) == (0, 1)
        await stream.write(body_event(b"data", part=MessagePart.RESPONSE_BODY))
        await stream.read()
        await stream.done_writing()


async def test_a_gateway_that_buffers_bodies_is_told_what_to_set(make_stack):
    stack = await stack_of(make_stack, 1, 1)
    async with asked(stack) as gateway:
        [answer] = await gateway.ask(headers_event(HEADERS, mode=BodyMode.BUFFERED))
    assert answer.status == 500
    assert b"FULL_DUPLEX_STREAMED" in answer.body


async def test_a_gateway_that_shows_no_bodies_is_answered_by_headers_alone(make_stack):
    stack = await stack_of(make_stack, 1, 1)
    async with asked(stack) as gateway:
        [answer] = await gateway.ask(
            headers_event({":method": "GET", ":path": "/v1/models"}, mode=BodyMode.NONE)
        )
    assert endpoints(answer)


async def test_health_says_that_nothing_more_is_wanted_while_the_proxy_leaves(make_stack):
    stack = await stack_of(make_stack, 1, 1)
    async with asked(stack) as gateway:
        services = ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
        assert [await gateway.health(each) for each in services] == [1, 1, 1, 1]
        stack.proxy.live.is_leaving = True
        assert [await gateway.health(each) for each in services] == [1, 1, 2, 2]


async def test_a_port_that_is_taken_is_a_wrong_setting(make_stack):
    stack = await stack_of(make_stack, 1, 1)
    port = int(stack.proxy.epp_address.rpartition(":")[2])
    with pytest.raises(ConfigError, match="cannot listen on"):
        await Proxy(ProxyConfig(port=0, epp=EppConfig(port=port))).start()


async def test_the_proxys_own_port_is_none_for_gateways():
    with pytest.raises(ConfigError, match="--epp-port is 7: it is the proxy's own --port"):
        ProxyConfig(port=7, epp=EppConfig(port=7))
    ProxyConfig(port=0, epp=EppConfig(port=0))


async def test_a_certificate_that_cannot_be_used_is_named_and_not_the_port(tmp_path):
    authority = Authority(tmp_path)
    one, other = authority.issue("one"), authority.issue("other")
    for epp, words in (
        (EppConfig(port=0, certfile=one["certfile"], keyfile=other["keyfile"]), "does not match"),
        (EppConfig(port=0, certfile=__file__, keyfile=other["keyfile"]), "no certificate in PEM"),
        (EppConfig(port=0, certfile="/none", keyfile=other["keyfile"]), "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=rf"--epp-ssl-(cert|key)file .* {words}"):
            await Proxy(ProxyConfig(port=0, epp=epp)).start()


async def test_what_is_picked_answers_as_one_engine_does(tmp_path):
    text = load_text(ModelConfig(model=str(write_model_files(tmp_path / "model"))))
    network = MemoryNetwork()
    p = make_engine(text, network=network, role="prefill", engine_id="p")
    d = make_engine(text, network=network, role="decode", engine_id="d")
    async with serving(text, p, secret="s") as first, serving(text, d, secret="s") as second:
        urls = {"prefill": (first.url,), "decode": (second.url,)}
        proxy = Proxy(ProxyConfig(port=0, epp=EppConfig(port=0), secret="s", **urls))
        await proxy.start()
        gateway = Gateway(proxy.epp_address)
        [answer, sent] = await gateway.ask(headers_event(HEADERS), body_event(BODY), num_answers=2)
        await gateway.close()
        await proxy.stop()
        assert endpoints(answer) == [endpoint_of(second.url)]
        async with second.session.post(
            second.url + PATH, data=sent.body, headers=answer.headers
        ) as response:
            split = await response.json()
    [given] = d.requests
    assert given.handoff is not None
    assert split["usage"]["completion_tokens"] == 4


async def test_picks_that_waited_for_a_busy_engine_count_there_from_the_moment_they_are_made(
    make_stack,
):
    stack = await stack_of(make_stack, 0, 1, split_policy="predicted", early_rejection=False)
    pairing, admission = stack.proxy.pairing, stack.proxy.admission
    pairing.model = learned()
    (url,) = (each.url for each in stack.engines)

    async def ask(number: int) -> Answer:
        body = {"prompt": [number] * 4000, "max_tokens": 4, "slo": {"ttft_ms": 600}}
        events = headers_event(HEADERS), body_event(msgspec.json.encode(body))
        return (await gateway.ask(*events, num_answers=2))[0]

    async with asked(stack) as gateway:
        with pairing.ledger.hold(url, "local", 10_000, 0):
            asking = [asyncio.create_task(ask(number)) for number in range(6)]
            await until(lambda: admission.num_waiting == 6)
        assert admission.num_waiting == 4
        assert pairing.ledger.at(url).num_prompts == 2
        await asyncio.gather(*asking)
    assert pairing.ledger.at(url).num_requests == 0


async def test_a_prompt_that_a_prefill_engine_should_take_whole_goes_to_a_decode_engine(make_stack):
    stack = await stack_of(make_stack, 1, 1, split_policy="predicted", early_rejection=False)
    pairing, (_, decode) = stack.proxy.pairing, stack.engines
    pairing.model = learned()
    body = msgspec.json.encode({"prompt": [1] * 4000, "max_tokens": 4})
    with pairing.ledger.hold(decode.url, "local", 200_000, 0):
        async with asked(stack) as gateway:
            answer, _ = await gateway.ask(headers_event(HEADERS), body_event(body), num_answers=2)
    assert endpoints(answer) == [endpoint_of(decode.url)]


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_a_prompt_counts_as_one_until_the_answer_begins_and_then_as_a_stream(
    make_stack, num_prefill
):
    stack = await stack_of(make_stack, num_prefill, 1, split_policy="predicted")
    ledger = stack.proxy.pairing.ledger
    body = msgspec.json.encode({"prompt": [1] * 400, "max_tokens": 4})
    async with asked(stack) as gateway:
        stream = gateway.stream()
        await stream.write(headers_event(HEADERS))
        await stream.write(body_event(body))
        await stream.read()
        await stream.read()
        work = [ledger.of(each.url) for each in stack.engines]
        assert (work[0].num_prompts, work[-1].num_coming) == (1, num_prefill)
        assert work[-1].num_streams == 0
        await stream.write(headers_event({":status": "200"}, part=MessagePart.RESPONSE_HEADERS))
        await stream.read()
        assert sum(each.num_requests for each in work) == work[-1].num_streams == 1
        await stream.done_writing()
    assert work[-1].num_requests == 0
