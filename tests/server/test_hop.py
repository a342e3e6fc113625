"""The engine hop: what two engines and a proxy tell one another."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest

from pdserve.config.http import ServerConfig
from pdserve.config.schema import EngineConfig, ModelConfig
from pdserve.http.control import proof_headers
from pdserve.http.protocol import CompletionRequest
from pdserve.observe.clock import ManualClock
from pdserve.server.app import build_app
from pdserve.server.hop import PrefillHop
from pdserve.server.plan import choices_of
from pdserve.server.service import SERVICE
from pdserve.server.text_request import TextRequest
from pdserve.text.chat import ChatTemplate
from pdserve.text.output import OutputProcessor
from pdserve.wire.hop import FORMER_HEADER, PROOF_HEADER
from pdserve.wire.ids import RequestId
from pdserve.wire.request import FinishReason, GenerateRequest
from pdserve.wire.sampling import SamplingParams
from tests.server.conftest import Server, events, make_engine, scripted, serving, until
from tests.server.engine import MemoryNetwork

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


class Pair:
    """A prefill and a decode server whose engines read one another's KV."""

    def __init__(self, prefill: Server, decode: Server) -> None:
        self.prefill = prefill
        self.decode = decode

    def is_quiet(self) -> bool:
        """Nothing runs, and nothing is leased."""
        engines = self.prefill.engine, self.decode.engine
        return not any(engine.running or engine.leases for engine in engines)

    async def stream(self, path: str, body: dict[str, Any], **prefill: Any) -> list[Any]:
        """What our proxy does: both legs' streams, relayed as one; events for the client."""
        ours = {"final_length": True, "created": 1700000000, "seed": 77} | prefill
        leg = {"do_remote_decode": True, "pdserve": ours}
        first = events(
            await self.prefill.stream(path, body | {"kv_transfer_params": leg}, X_Request_Id="one")
        )
        if "pdserve_handoff" not in first[-1]:
            return first
        params = first.pop()["pdserve_handoff"]
        params["pdserve"]["first_delivered"] = True
        second = await self.decode.stream(
            path, body | {"kv_transfer_params": params}, X_Request_Id="one"
        )
        return first + events(second)


async def test_both_engines_render_the_time_at_which_the_first_one_was_asked(text):
    dated = replace(text, chat_template=ChatTemplate("{{ strftime_now('%d %H:%M:%S') }}", {}))
    network = MemoryNetwork()
    before, after = ManualClock(1700006399.0), ManualClock(1700006401.0)  # midnight lies between
    p = make_engine(dated, network=network, role="prefill", engine_id="p")
    d = make_engine(dated, network=network, role="decode", engine_id="d")
    async with serving(dated, p, clock=before) as prefill, serving(dated, d, clock=after) as decode:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12}
        asked = {"kv_transfer_params": {"do_remote_decode": True}}  # as a proxy for vLLM does
        params = (await prefill.ok(CHAT, body | asked))["kv_transfer_params"]
        await decode.ok(CHAT, body | {"kv_transfer_params": params})
    prompts = [engine.requests[0].prompt_token_ids for engine in (p, d)]
    assert text.tokenizer.decode(prompts[0]) == "14 23:59:59"
    assert prompts[0] == prompts[1]


@contextlib.asynccontextmanager
async def pair(text, **parameters: Any):
    network = MemoryNetwork()
    prefill = make_engine(text, network=network, role="prefill", engine_id="p", **parameters)
    decode = make_engine(text, network=network, role="decode", engine_id="d", **parameters)
    async with serving(text, prefill) as p, serving(text, decode) as d:
        both = Pair(p, d)
        yield both
        await until(both.is_quiet)


@pytest.mark.slow
async def test_choices_wait_for_their_siblings_for_longer_than_a_lease(text):
    """The first of them is done long before the answer with all handoffs leaves the engine."""
    body = {"prompt": "The quick", "max_tokens": 3, "n": 6, "seed": 5}
    async with pair(text, max_num_seqs=1, lease_s=1.0, prefill_s=0.35) as both:
        disaggregated = await both.stream(COMPLETIONS, body)
        alone = {"kv_transfer_params": {"pdserve": {"created": 1700000000}}}
        colocated = events(await both.decode.stream(COMPLETIONS, body | alone, X_Request_Id="one"))
        stats = both.decode.engine.stats
    for index in range(6):
        assert of_choice(disaggregated, index) == of_choice(colocated, index)
    assert stats.kv_loads["pull"] == 6
    assert not any(stats.kv_ladder.values())


def of_choice(chunks: list[Any], index: int) -> list[Any]:
    return [c for c in chunks if c["choices"] and c["choices"][0]["index"] == index]


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_the_address_is_the_first_ranks_and_tp_size_is_that_of_the_shape(text, num_ranks):
    body = {"prompt": "The", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    async with pair(text, num_ranks=num_ranks) as both:
        first = await both.prefill.ok(COMPLETIONS, body)
        params = first["kv_transfer_params"]
        await both.decode.ok(COMPLETIONS, body | {"max_tokens": 2, "kv_transfer_params": params})
        assert both.decode.engine.stats.external_kv_tokens > 0
        endpoints = both.prefill.engine.info.endpoints
    assert len(endpoints) == num_ranks
    first = endpoints[0]
    assert (params["remote_host"], params["remote_port"]) == (first.host, first.port)
    assert params["tp_size"] == both.prefill.engine.info.kv_shape.tp_size


async def test_a_seed_that_was_drawn_travels_with_the_handoff(text):
    body = {"prompt": "The", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    async with pair(text) as both:
        first = await both.prefill.ok(COMPLETIONS, body)
        body["kv_transfer_params"] = first["kv_transfer_params"]
        await both.decode.ok(COMPLETIONS, body | {"max_tokens": 5})
        [at_p], [at_d] = both.prefill.engine.requests, both.decode.engine.requests
    assert at_p.sampling.seed == at_d.sampling.seed


async def test_length_at_the_prefill_engine_is_final_only_for_our_proxy(text):
    body = {"prompt": "The", "max_tokens": 1}
    async with pair(text) as both:
        ours = {"do_remote_decode": True, "pdserve": {"final_length": True}}
        answer = await both.prefill.ok(COMPLETIONS, body | {"kv_transfer_params": ours})
    assert answer["choices"][0]["finish_reason"] == "length"
    assert "kv_transfer_params" not in answer


async def test_a_prompt_with_room_for_one_token_ends_at_the_prefill_engine(text):
    body = {"prompt": [60] * 31, "max_tokens": 1}
    async with pair(text, max_model_len=32) as both:
        leg = {"do_remote_decode": True}
        answer = await both.prefill.ok(COMPLETIONS, body | {"kv_transfer_params": leg})
    assert answer["choices"][0]["finish_reason"] == "length"
    assert "kv_transfer_params" not in answer


@pytest.mark.parametrize("answer", ["", "!"])
async def test_a_request_that_stops_at_the_prefill_engine_is_final(text, answer):
    engine = scripted(text, answer)
    leg = {"do_remote_decode": True}
    body = {"prompt": "x", "max_tokens": 1, "stop": "!", "kv_transfer_params": leg}
    async with serving(text, engine) as server:
        whole = await server.ok(COMPLETIONS, body)
        chunks = events(await server.stream(COMPLETIONS, body))
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert "kv_transfer_params" not in whole
    assert all("pdserve_handoff" not in chunk for chunk in chunks)
    assert not engine.leases


async def test_a_choice_that_ended_at_the_prefill_engine_is_left_alone(text):
    tokens = [text.tokenizer.encode(letter)[0] for letter in "ab!"]

    def next_token(request, output):
        return tokens[2] if request.sampling.seed == 5 else tokens[0]

    body = {
        "prompt": "x",
        "n": 2,
        "seed": 5,
        "stop": "!",
        "max_tokens": 4,
        "stream_options": {"include_usage": True},
    }
    async with pair(text, next_token=next_token) as both:
        chunks = await both.stream(COMPLETIONS, body)
        assert len(both.decode.engine.requests) == 1
    assert [piece["choices"][0]["finish_reason"] for piece in of_choice(chunks, 0)] == ["stop"]
    assert "".join(piece["choices"][0]["text"] for piece in of_choice(chunks, 1)) == "aaaa"
    assert chunks[-1]["usage"]["completion_tokens"] == 5


async def test_prompt_logprobs_travel_with_the_handoff(text):
    body = {"prompt": [60, 61, 62], "prompt_logprobs": 1, "max_tokens": 4, "temperature": 0}
    async with pair(text) as both:
        leg = body | {"kv_transfer_params": {"do_remote_decode": True}}
        first = await both.prefill.ok(COMPLETIONS, leg)
        params = first["kv_transfer_params"]
        whole = await both.decode.ok(COMPLETIONS, body | {"kv_transfer_params": params})
        expected = await both.prefill.ok(COMPLETIONS, body)
        assert both.decode.engine.requests[0].sampling.prompt_logprobs is None
    assert whole["choices"] == expected["choices"]


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True, "remote_engine_id": "vllm", "remote_block_ids": [1]},
        {"do_remote_prefill": True, "pdserve": {"handoffs": []}},
        {"do_remote_prefill": True, "pdserve": {"handoffs": [None]}},
        {"do_remote_prefill": True, "pdserve": {"handoffs": ["!"]}},
        {"do_remote_prefill": True, "pdserve": {"handoffs": ["AAAA"]}},
        {"do_remote_prefill": True, "pdserve": {"handoffs": ["AAAA", None]}},
        {"do_remote_prefill": True, "pdserve": {"handoffs": 3}},
        {"do_remote_prefill": True, "do_remote_decode": True},
        {"do_remote_prefill": "yes"},
    ],
)
async def test_malformed_transfer_parameters_are_named(server, params):
    body = {"prompt": "x", "kv_transfer_params": params}
    status, error = await server.refused(COMPLETIONS, body)
    assert (status, error["param"]) == (400, "kv_transfer_params")
    assert not server.engine.requests


async def test_parameters_that_ask_for_nothing_are_no_hop(server):
    params = {"do_remote_decode": False, "do_remote_prefill": False}
    answer = await server.ok(COMPLETIONS, {"prompt": "x", "kv_transfer_params": params})
    assert answer["usage"]["completion_tokens"] == 16


def text_request_at_prefill(text, engine, n: int):
    """A text request whose caller is about to leave."""
    app = build_app(
        engine,
        text,
        engine_config=EngineConfig(model=ModelConfig(model="tiny")),
        server_config=ServerConfig(),
    )
    service = app[SERVICE]
    params = SamplingParams(max_tokens=8, seed=1)
    common = GenerateRequest(
        request_id=RequestId("one"),
        prompt_token_ids=[],
        sampling=params,
        arrival_s=0.0,
        remote_decode=True,
    )
    choices = choices_of(
        lambda params, _: OutputProcessor(text.tokenizer, min_tokens=params.min_tokens),
        CompletionRequest(prompt="x", n=n),
        common,
        prompts=[[60, 61]],
        sampling=[params],
        seed=1,
        hop=PrefillHop(final_length=True),
    )
    return TextRequest(
        client=service.client,
        clock=service.clock,
        metrics=service.metrics,
        request_id="one",
        model="tiny",
        created=0,
        seed=1,
        prompts=[[60, 61]],
        choices=choices,
        start_s=0.0,
    )


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("num_read", [0, 1])
async def test_a_lease_nobody_was_told_of_is_given_back(text, n, num_read):
    engine = make_engine(text)
    async with text_request_at_prefill(text, engine, n) as text_request:
        await text_request.start()
        for _ in range(num_read):
            await anext(text_request.deltas())
        await until(lambda: len(engine.leases) == n)
    await until(lambda: not engine.leases)
    assert engine.stats.lease_ends["released"] == n


async def test_leases_are_given_back_though_the_connection_is_lost_meanwhile(text):
    engine = make_engine(text)

    async def answer():
        async with text_request_at_prefill(text, engine, 3) as text_request:
            assert len([delta async for delta in text_request.deltas()]) == 3
            # First a write fails, and an iteration of the loop later the handler is cancelled.
            asyncio.get_running_loop().call_soon(task.cancel)
            raise ConnectionResetError

    task = asyncio.create_task(answer())
    await asyncio.wait({task})
    assert task.cancelled()
    await until(lambda: not engine.leases)
    assert engine.stats.lease_ends["released"] == 3


async def test_a_lease_that_was_handed_over_is_kept(text):
    engine = make_engine(text)
    async with text_request_at_prefill(text, engine, 1) as text_request:
        assert [delta.finish_reason async for delta in text_request.deltas()] == [
            FinishReason.HANDOFF
        ]
        text_request.delivered = True
    assert len(engine.leases) == 1


async def test_stages_come_only_when_asked_for_and_sum_to_the_time(text):
    async with serving(text, make_engine(text, prefill_s=0.03, step_s=0.001)) as server:
        body = {"prompt": "x", "max_tokens": 3}
        assert "pdserve_stages" not in await server.ok(COMPLETIONS, body)
        whole = (await server.ok(COMPLETIONS, body, X_Pdserve_Stages="1"))["pdserve_stages"]
        *chunks, last = events(await server.stream(COMPLETIONS, body, X_Pdserve_Stages="1"))
        assert all("pdserve_stages" not in chunk for chunk in chunks)
    for stages in (whole, last["pdserve_stages"]):
        assert 0.03 <= stages["prefill_s"] < stages["ttft_s"]
        parts = sum(v for k, v in stages.items() if k.endswith("_s") and k != "ttft_s")
        assert parts == pytest.approx(stages["ttft_s"])
        assert stages["load_failures"] == []
        assert stages["output_tokens"] == 3


async def test_stages_of_a_decode_engine_tell_what_was_moved(text):
    async with pair(text) as both:
        leg = {"do_remote_decode": True}
        body = {"prompt": [60] * 20, "max_tokens": 4}
        first = await both.prefill.ok(COMPLETIONS, body | {"kv_transfer_params": leg})
        body["kv_transfer_params"] = first["kv_transfer_params"]
        answer = await both.decode.ok(COMPLETIONS, body, X_Pdserve_Stages="1")
    shape = both.decode.engine.info.kv_shape
    token_bytes = shape.num_layers * shape.num_planes * shape.num_kv_heads * shape.dtype_bytes
    assert answer["pdserve_stages"]["kv_bytes"] == 2 * shape.block_size * token_bytes
    assert answer["pdserve_stages"]["kv_transfer_s"] > 0.0
    assert answer["pdserve_stages"]["output_tokens"] == answer["usage"]["completion_tokens"] == 4


async def test_a_released_lease_is_gone(server):
    leg = {"do_remote_decode": True}
    await server.ok(COMPLETIONS, {"prompt": "x", "kv_transfer_params": leg})
    [nonce] = server.engine.leases
    for _ in range(2):
        url = server.url + "/pdserve/release"
        async with server.session.post(url, json={"nonce": nonce}) as response:
            assert response.status == 200
    await until(lambda: not server.engine.leases)


async def test_with_a_secret_the_hop_wants_a_signature(text):
    data = b'{"nonce":"x"}'
    path = "/pdserve/release"
    right, wrong = (proof_headers(secret, "POST", path, data) for secret in ("s3cret", "other"))
    elsewhere = proof_headers("s3cret", "POST", "/pdserve/register", data)
    former = {FORMER_HEADER: right[FORMER_HEADER]}
    async with serving(text, make_engine(text), secret="s3cret") as server:
        for given, status in (
            ({}, 401),
            (wrong, 401),
            (elsewhere, 401),
            (former, 401),
            ({PROOF_HEADER: "é"}, 401),
            (right, 200),
        ):
            headers = {"Content-Type": "application/json", **given}
            async with server.session.post(
                server.url + "/pdserve/release", data=data, headers=headers
            ) as response:
                assert response.status == status
        assert server.engine.released == ["x"]


async def test_info_is_the_engines_description_and_load(server):
    async with server.session.get(server.url + "/pdserve/info") as response:
        info = await response.json()
    assert info["ready"] is True
    assert info["engine"]["engine_id"] == "toy"
    assert info["stats"]["num_running"] == 0
    assert info["models"] == ["tiny"]
