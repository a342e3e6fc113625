"""The proxy's own endpoints, its keys, its errors, its beginning and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import nullcontext

import aiohttp
import pytest
from aiohttp import web

import pdserve
from pdserve.config.http import ProxyConfig
from pdserve.errors import ConfigError
from pdserve.proxy.app import Proxy, run_proxy
from pdserve.proxy.story import SECOND_TERMS, TTFT_TERMS, Mode, Stage
from tests.proxy.conftest import until
from tests.proxy.scripted import ScriptedEngine, text_in, text_of


@pytest.fixture
async def stack(make_stack):
    return await make_stack([ScriptedEngine("prefill")], [ScriptedEngine("decode")])


async def get(stack, path: str, **kwargs):
    async with stack.client.get(f"{stack.url}{path}", **kwargs) as response:
        return response.status, await response.read()


async def error_of(response) -> dict:
    assert response.content_type == "application/json"
    assert "X-Request-Id" in response.headers
    error = (await response.json())["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


async def test_health_is_an_empty_200_and_version_is_ours(stack):
    assert await get(stack, "/health") == (200, b"")
    assert (await get(stack, "/livez"))[0] == 200
    assert (await get(stack, "/version"))[1] == b'{"version":"%s"}' % pdserve.__version__.encode()


async def test_models_of_all_engines_are_listed_once(stack):
    status, body = await get(stack, "/v1/models")
    assert status == 200
    assert body.count(b'"id":"tiny"') == 1
    assert b'"root":"/m/tiny"' in body
    assert b'"max_model_len":2048' in body


async def test_load_is_the_number_of_requests_that_run_in_vllms_shape(make_stack):
    engine = ScriptedEngine("decode")
    stack = await make_stack([], [engine])
    assert await stack.get("/load") == {"server_load": 0}
    engine.gate.clear()
    request = asyncio.create_task(stack.stream())
    await until(lambda: len(engine.calls) == 1)
    assert await stack.get("/load") == {"server_load": 1}
    engine.gate.set()
    await request
    await until(lambda: stack.proxy.live.is_idle.is_set())
    assert await stack.get("/load") == {"server_load": 0}


async def test_one_model_can_be_asked_for(stack):
    assert (await get(stack, "/v1/models/tiny"))[0] == 200
    async with stack.client.get(f"{stack.url}/v1/models/no/such") as response:
        assert response.status == 404
        assert (await error_of(response))["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("POST", "/chat/completions", 404, "the OpenAI API is under /v1"),
        ("POST", "/v1/audio/speech", 404, "/v1/audio/speech is not served here"),
        ("GET", "/v1/completions", 405, "use POST"),
    ],
)
async def test_other_paths_and_methods_are_refused_in_openais_shape(
    stack, method, path, status, words
):
    async with stack.client.request(method, stack.url + path) as response:
        assert response.status == status
        assert response.headers.get("Allow") == ("POST" if status == 405 else None)
        assert words in (await error_of(response))["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[1]",
        b'"text"',
        b"",
        b"\xff",
        b'{"stream": "\xff"}',
        b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"seed": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    ],
    ids=range(8),
)
async def test_a_body_that_is_no_json_object_is_a_400(stack, body):
    async with stack.client.post(f"{stack.url}/v1/completions", data=body) as response:
        assert response.status == 400
        assert (await error_of(response))["code"] == "invalid_json"


async def test_a_body_that_is_not_in_its_encoding_is_the_clients_fault(stack):
    async with stack.client.post(
        f"{stack.url}/v1/completions", data=b"no gzip", headers={"Content-Encoding": "gzip"}
    ) as response:
        assert response.status == 400
        assert (await error_of(response))["type"] == "invalid_request_error"
    assert (await stack.metrics())['pdserve_requests_total{outcome="client_error"}'] == 1


@pytest.mark.parametrize("keys", [(), ("key",)])
async def test_a_key_that_is_not_utf8_is_no_key(make_stack, keys):
    """It opens nothing here, and is not sent on."""
    engine = ScriptedEngine("decode")
    stack = await make_stack([], [engine], api_keys=keys)
    host, port = stack.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"prompt": "hi"}'
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Authorization: Bearer \xff\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    status = (await reader.read()).splitlines()[0]
    writer.close()
    assert (b" 401 " if keys else b" 200 ") in status
    assert all("Authorization" not in call.headers for call in engine.calls)


async def test_tokenize_is_answered_by_any_engine_that_works(make_stack):
    gone, good = ScriptedEngine("decode"), ScriptedEngine("decode")
    stack = await make_stack([], [gone, good], health_check_interval_s=60.0)
    await gone.stop()
    for _ in range(3):
        async with stack.post({"prompt": "hi"}, path="/tokenize") as response:
            assert (await response.json())["by"] == good.engine_id


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 4}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 4, "stream": True}),
        ("/v1/chat/completions", {"messages": [], "max_tokens": 4, "stream": True}),
        ("/tokenize", {"prompt": "hi"}),
    ],
)
async def test_fields_that_mean_nothing_are_named_in_a_header(stack, path, body):
    async with stack.post(body | {"stpo": "x"}, path) as response:
        assert response.status == 200
        assert response.headers["X-Pdserve-Ignored-Fields"] == "stpo"
    async with stack.post(body, path) as response:
        assert "X-Pdserve-Ignored-Fields" not in response.headers


async def test_a_request_id_that_could_break_a_log_is_replaced(stack):
    async with stack.post(headers={"X-Request-Id": "a b\tc"}) as response:
        assert response.headers["X-Request-Id"] != "a b\tc"
        assert len(response.headers["X-Request-Id"]) == 32


async def test_requests_in_flight_are_shown_with_their_story(make_stack):
    prefill = ScriptedEngine("prefill")
    prefill.gate.clear()
    stack = await make_stack([prefill], [ScriptedEngine("decode")])
    request = asyncio.create_task(stack.stream())
    await until(lambda: len(prefill.calls) == 1)
    (shown,) = (await stack.get("/debug/requests"))["running"]
    assert shown["stage"] == "prefill"
    assert prefill.url in shown["story"][-1]["event"]
    prefill.gate.set()
    await request


async def test_every_series_exists_from_the_start_at_zero(make_stack):
    stack = await make_stack([], [])
    metrics = await stack.metrics()
    for series in (
        *(f'pdserve_time_to_first_token_seconds_count{{mode="{mode.value}"}}' for mode in Mode),
        *(
            f'pdserve_stage_duration_seconds_count{{stage="{stage}"}}'
            for stage in (*TTFT_TERMS, *SECOND_TERMS)
        ),
        *(f'pdserve_client_disconnects_total{{stage="{stage.value}"}}' for stage in Stage),
        'pdserve_disagg_decisions_total{decision="disaggregated",reason="default"}',
        'pdserve_disagg_decisions_total{decision="local",reason="no_prefill"}',
        'pdserve_retries_total{leg="decode"}',
        'pdserve_kv_ladder_total{reason="dropped",rung="other_decode"}',
        'pdserve_kv_ladder_total{reason="no_prefill",rung="local"}',
        *(f'pdserve_kv_mode_total{{mode="{mode}"}}' for mode in ("push", "pull")),
        'pdserve_requests_total{outcome="ok"}',
        'pdserve_backends{role="prefill",state="ready"}',
    ):
        assert metrics[series] == 0
    assert "pdserve_event_loop_lag_seconds_count" in metrics


async def test_traffic_adds_no_series(make_stack, started):
    """So their number does not grow with what clients send, and no dashboard has gaps."""
    dead = await started("prefill")
    stack = await make_stack([dead, ScriptedEngine("prefill")], [ScriptedEngine("decode")])
    before = (await stack.metrics()).keys()
    await dead.stop()
    for path in ("/v1/completions", "/v1/chat/completions"):
        for stream in (True, False):
            async with stack.post({"prompt": "x", "stream": stream}, path) as response:
                await response.read()
    async with stack.post({"prompt": "x", "stream": True}) as response:
        pass
    async with stack.client.post(f"{stack.url}/tokenize/{'x' * 50}", data=b"{") as response:
        assert response.status == 404
    assert (await stack.metrics()).keys() == before


async def test_the_terms_of_the_second_token_are_measured_once_per_request(make_stack):
    decode = ScriptedEngine("decode")
    decode.stages = {"queue_s": 1e-5, "kv_transfer_s": 2e-5, "first_step_s": 3e-5}
    stack = await make_stack([ScriptedEngine("prefill")], [decode])
    for _ in range(3):
        await stack.stream()
    metrics = await stack.metrics()
    for stage in SECOND_TERMS:
        assert metrics[f'pdserve_stage_duration_seconds_count{{stage="{stage}"}}'] == 3
    for stage, seconds in (("decode_queue", 1e-5), ("kv", 2e-5), ("first_step", 3e-5)):
        total = metrics[f'pdserve_stage_duration_seconds_sum{{stage="{stage}"}}']
        assert total == pytest.approx(3 * seconds)
    assert metrics['pdserve_stage_duration_seconds_sum{stage="recompute"}'] == 0


async def test_the_stages_add_up_to_the_time_to_first_token(stack, caplog):
    with caplog.at_level("INFO"):
        for _ in range(5):
            await stack.stream()
    metrics = await stack.metrics()
    ttft = metrics['pdserve_time_to_first_token_seconds_sum{mode="disaggregated"}']
    stages = {n: metrics[f'pdserve_stage_duration_seconds_sum{{stage="{n}"}}'] for n in TTFT_TERMS}
    assert ttft > 0
    assert sum(stages.values()) == pytest.approx(ttft, rel=1e-9)
    # What an engine claims is cut where its answer took less.
    assert 2 * 0.0002 < stages["prefill"] <= 5 * 0.0002 + 1e-9
    lines = [record.getMessage() for record in caplog.records if " ttft=" in record.getMessage()]
    assert len(lines) == 5
    assert " in=7 cached=0 out=4 " in lines[0]


async def test_a_usage_chunk_gives_the_counts_of_the_log_line(stack, caplog):
    with caplog.at_level("INFO"):
        await stack.stream({"max_tokens": 6, "stream_options": {"include_usage": True}})
    assert " in=7 cached=0 out=6 " in caplog.text


# --- keys


KEYS = ("first-key", "second-key")


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic first-key", "Bearer "])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/debug/requests", "/tokenize"])
async def test_without_a_good_key_nothing_is_answered(make_stack, header, path):
    stack = await make_stack([], [ScriptedEngine("decode")], api_keys=KEYS)
    headers = {"Authorization": header} if header else {}
    method = "GET" if path in {"/v1/models", "/debug/requests"} else "POST"
    async with stack.client.request(method, f"{stack.url}{path}", headers=headers) as response:
        assert response.status == 401
        assert (await error_of(response))["code"] == "invalid_api_key"
    assert stack.engines[0].calls == []


async def test_every_good_key_opens_and_the_engines_get_the_deployments_key(make_stack):
    stack = await make_stack([], [ScriptedEngine("decode")], api_keys=KEYS)
    for key in KEYS:
        async with stack.post(headers={"Authorization": f"Bearer {key}"}) as response:
            assert response.status == 200
    seen = {call.headers["Authorization"] for call in stack.engines[0].calls}
    assert seen == {"Bearer first-key"}


async def test_a_proxy_without_keys_passes_the_clients_on(stack):
    async with stack.post(headers={"Authorization": "Bearer theirs"}) as response:
        assert response.status == 200
    for engine in stack.engines:
        assert engine.calls[0].headers["Authorization"] == "Bearer theirs"


# --- openai's own client


async def test_the_openai_client_streams_and_raises_its_own_errors(make_stack, openai):
    prefill, decode = ScriptedEngine("prefill"), ScriptedEngine("decode")
    stack = await make_stack([prefill], [decode], api_keys=("k",), queue_timeout_s=0.1)
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="k", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=[], seed=3, max_tokens=4, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == text_of(3, 4)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="bad").models.retrieve("tiny")
        await prefill.stop()
        await decode.stop()
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(model="tiny", prompt="hi")


@pytest.mark.slow
@pytest.mark.parametrize("status", [429, 503])
async def test_the_openai_client_tries_again_when_told_to(make_stack, status, openai):
    decode = ScriptedEngine("decode")
    asked_s = []

    async def busy_at_first(call, request):
        asked_s.append(asyncio.get_running_loop().time())
        if len(asked_s) > 1:
            return None
        return web.json_response(
            {"error": {"message": "busy", "type": "x", "param": None, "code": "x"}},
            status=status,
            headers={"Retry-After": "1"},
        )

    decode.hook = busy_at_first
    stack = await make_stack([], [decode], retry_max_retries=0)
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="k", max_retries=1) as client:
        answer = await client.completions.create(model="tiny", prompt="hi", seed=3, max_tokens=4)
    assert answer.choices[0].text == text_of(3, 4)
    assert asked_s[1] - asked_s[0] >= 1.0


# --- readiness, beginning, end


async def test_ready_means_that_requests_can_be_served(make_stack):
    prefill, decode = ScriptedEngine("prefill"), ScriptedEngine("decode")
    stack = await make_stack([prefill], [decode])
    assert (await get(stack, "/readyz"))[0] == 200
    prefill.ready = False
    await until(lambda: not stack.proxy.backends.get(prefill.url).available)
    assert (await get(stack, "/readyz"))[0] == 200  # degraded: decode does everything
    decode.ready = False
    await until(lambda: not stack.proxy.backends.get(decode.url).available)
    status, body = await get(stack, "/readyz")
    assert status == 503
    assert b"no prefill engine is ready (1 known)" in body
    prefill.ready = decode.ready = True
    await until(lambda: stack.proxy.backends.get(decode.url).available)
    assert (await get(stack, "/readyz"))[0] == 200


async def test_the_engines_may_come_later(make_stack):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    stack = await make_stack()
    proxy = Proxy(
        ProxyConfig(port=0, decode=(f"http://127.0.0.1:{port}",), health_check_interval_s=0.02)
    )
    url = await proxy.start()
    engine = ScriptedEngine("decode")
    try:
        async with stack.client.get(f"{url}/readyz") as response:
            assert response.status == 503
        await engine.start(port)
        await until(lambda: all(backend.available for backend in proxy.backends))
        async with stack.client.get(f"{url}/readyz") as response:
            assert response.status == 200
    finally:
        await proxy.stop()
        await engine.stop()


async def test_a_policy_that_does_not_exist_is_named_before_anything_starts():
    with pytest.raises(ConfigError, match="decode-policy"):
        Proxy(ProxyConfig(port=0, decode_policy="best"))


@pytest.mark.parametrize(
    ("url", "host", "is_refused"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", True),
        ("http://localhost:8000/", "127.0.0.1", True),
        ("http://127.0.0.1:8000", "0.0.0.0", True),
        ("http://127.0.0.2:8000", "127.0.0.1", False),
        ("http://10.0.0.2:8000", "0.0.0.0", False),
        ("http://127.0.0.1:8001", "127.0.0.1", False),
    ],
)
def test_a_proxy_is_no_engine_of_its_own(url, host, is_refused):
    """A request went round and round, until it held every place there is."""
    with pytest.raises(ConfigError, match="the proxy itself") if is_refused else nullcontext():
        ProxyConfig(host=host, port=8000, decode=(url,))


async def test_a_port_in_use_is_named_with_its_flag():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port is {port}, which is in use"):
            await run_proxy(ProxyConfig(port=port), on_ready=lambda url: None)


async def statuses(client: aiohttp.ClientSession, url: str) -> tuple[int, int]:
    """What a request for one token gets, and what is said of readiness."""
    body = {"prompt": "hi", "max_tokens": 1}
    async with client.post(f"{url}/v1/completions", json=body) as response:
        assert response.headers["Connection"] == "close"
    async with client.get(f"{url}/readyz") as ready:
        assert ready.headers["Connection"] == "close"
    return response.status, ready.status


async def until_nobody_listens(client: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(20.0):
        while True:
            try:
                async with client.get(f"{url}/livez"):
                    await asyncio.sleep(0.005)
            except aiohttp.ClientError:
                return


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_what_runs_finish_and_sigterm_takes_more_for_a_while(number, started):
    engine = await started("decode")
    engine.gate.clear()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config = ProxyConfig(port=0, decode=(engine.url,), shutdown_timeout_s=5.0, drain_delay_s=1.0)
    running = asyncio.create_task(run_proxy(config, on_ready=ready.set_result))
    url = await ready
    body = {"prompt": "hi", "seed": 3, "max_tokens": 4, "stream": True}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{url}/v1/completions", json=body) as response,
    ):
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.02)
        if number is signal.SIGTERM:
            assert await statuses(client, url) == (200, 503)
        await until_nobody_listens(client, url)
        assert not running.done()
        engine.gate.set()
        assert text_in(await response.read()) == text_of(3, 4)
    assert await asyncio.wait_for(running, 20) is number


async def test_what_comes_over_an_open_connection_is_served_as_its_last(started):
    engine = await started("decode")
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config = ProxyConfig(port=0, decode=(engine.url,), shutdown_timeout_s=20.0)
    running = asyncio.create_task(run_proxy(config, on_ready=ready.set_result))
    url = await ready
    engine.gate.clear()
    async with aiohttp.ClientSession() as client, aiohttp.ClientSession() as other:
        async with client.get(f"{url}/livez"):
            pass
        body = {"prompt": "hi", "seed": 3, "max_tokens": 4, "stream": True}
        async with other.post(f"{url}/v1/completions", json=body) as response:
            os.kill(os.getpid(), signal.SIGINT)
            await until_nobody_listens(other, url)
            async with client.get(f"{url}/readyz") as late:
                assert (late.status, late.headers["Connection"]) == (503, "close")
            engine.gate.set()
            assert text_in(await response.read()) == text_of(3, 4)
    await asyncio.wait_for(running, 20)


def told_to_leave(stream: bytes) -> bool:
    return b'"code":"shutting_down"' in stream and stream.endswith(b"data: [DONE]\n\n")


async def test_a_second_signal_cuts_off_what_runs(started):
    engine = await started("decode")
    engine.gate.clear()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config = ProxyConfig(port=0, decode=(engine.url,), shutdown_timeout_s=30.0)
    running = asyncio.create_task(run_proxy(config, on_ready=ready.set_result))
    url = await ready
    body = {"prompt": "hi", "stream": True}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{url}/v1/completions", json=body) as response,
    ):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.02)
        assert told_to_leave(await response.read())
    assert await asyncio.wait_for(running, 20) is signal.SIGINT


async def test_a_request_that_does_not_end_is_cut_when_the_time_is_up(make_stack):
    engine = ScriptedEngine("decode")
    engine.gate.clear()
    stack = await make_stack([], [engine], shutdown_timeout_s=0.05)
    async with stack.post({"prompt": "hi", "stream": True}) as response:
        await asyncio.wait_for(stack.proxy.stop(), 20)
        assert told_to_leave(await response.read())
    await until(lambda: engine.ended["cancelled"] == 1)
    [ended] = stack.proxy.live.recent.since(0.0)
    assert (ended.outcome, ended.reason) == ("error", "shutting_down")


async def test_a_body_that_is_on_its_way_when_the_time_is_up_is_answered_too(make_stack):
    stack = await make_stack([], [ScriptedEngine("decode")], shutdown_timeout_s=0.05)
    host, port = stack.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    await stack.until_stages("queued")
    await asyncio.wait_for(stack.proxy.stop(), 20)
    assert b'"code":"shutting_down"' in await reader.read()
    writer.close()
    [ended] = stack.proxy.live.recent.since(0.0)
    assert (ended.status, ended.reason) == (503, "shutting_down")


async def test_a_question_that_is_passed_on_is_waited_for_and_cut_like_a_request(make_stack):
    stack = await make_stack([], [ScriptedEngine("decode")], shutdown_timeout_s=0.05)
    asked = asyncio.create_task(stack.refused({"tokens": [1]}, path="/detokenize"))
    await stack.until_stages("local")
    await asyncio.wait_for(stack.proxy.stop(), 20)
    assert await asked == (503, "shutting_down")


async def test_finished_requests_are_shown_newest_first_on_demand(make_stack):
    stack = await make_stack([ScriptedEngine("prefill")], [ScriptedEngine("decode")])
    for _ in range(3):
        await stack.stream()

    async def shown(query):
        async with stack.client.get(f"{stack.url}/debug/requests{query}") as response:
            return response.status, await response.json()

    assert await shown("") == (200, {"running": [], "finished": []})
    status, found = await shown("?finished=2")
    assert [entry["seq"] for entry in found["finished"]] == [3, 2]
    newest = found["finished"][0]
    assert newest["outcome"] == "ok"
    assert newest["prefill"] == stack.engines[0].url
    assert newest["decode"] == stack.engines[1].url
    assert sum(newest["ttft_terms"].values()) == pytest.approx(newest["ttft_ms"], abs=0.01)
    status, found = await shown("?finished=9&after=2")
    assert [entry["seq"] for entry in found["finished"]] == [3]
    for wrong in ("?finished=-1", "?finished=x", "?finished=1&after=", "?finished=1e3"):
        status, found = await shown(wrong)
        assert status == 400
        assert found["error"]["param"] in {"finished", "after"}
