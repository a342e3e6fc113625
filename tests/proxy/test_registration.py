"""Engines come, renew, restart, leave and vanish."""

from __future__ import annotations

import asyncio
import errno
import itertools

import aiohttp
import aiohttp.web
import msgspec
import pytest

from pdserve.http.control import Stamps, proof_headers
from pdserve.observe.clock import SystemClock
from pdserve.proxy.backend import Health
from pdserve.proxy.connections import EngineConnector
from pdserve.proxy.story import Story
from pdserve.wire.hop import FORMER_HEADER, NONCE_HEADER, PROOF_HEADER
from pdserve.wire.transfer import KVMode
from tests.proxy.conftest import until
from tests.proxy.scripted import ScriptedEngine, text_in, text_of

SENDERS = itertools.count()


async def send(stack, method: str, body: dict, secret: str = ""):
    """Say what an engine says, the way it does; a proxy that is new to it is asked twice."""
    data = msgspec.json.encode(body)
    stamps = Stamps(f"sender-{next(SENDERS)}")
    for _ in range(2):
        proof = proof_headers(
            secret, method, "/pdserve/register", data, stamp=stamps.for_(stack.url)
        )
        status, answer, headers = await deliver(stack, method, data, proof)
        if NONCE_HEADER not in headers:
            break
        stamps.learn(stack.url, headers[NONCE_HEADER])
    return status, answer


async def deliver(stack, method: str, data: bytes, headers: dict[str, str]):
    """Send a message as it is; return status, answer and headers."""
    headers = {"Content-Type": "application/json", **headers}
    url = f"{stack.url}/pdserve/register"
    async with stack.client.request(method, url, data=data, headers=headers) as response:
        return response.status, await response.json(), response.headers


async def register(stack, engine: ScriptedEngine, lease_s: float = 30.0, secret: str = ""):
    body = {"url": engine.url, "role": engine.role, "engine": engine.info(), "lease_s": lease_s}
    return await send(stack, "POST", body, secret)


def cut_off(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can connect to it any more; what is connected hears nothing of that."""
    connect = EngineConnector.connect

    async def connect_to_others(self, req, traces, timeout):
        if str(req.url).startswith(engine.url):
            gone = OSError(errno.EHOSTUNREACH, "No route to host")
            raise aiohttp.ClientConnectorError(req.connection_key, gone)
        return await connect(self, req, traces, timeout)

    monkeypatch.setattr(EngineConnector, "connect", connect_to_others)


def is_ready(stack, engine: ScriptedEngine) -> bool:
    backend = stack.proxy.backends.get(engine.url)
    return backend is not None and backend.available


async def test_engines_that_register_serve_requests(make_stack, started):
    stack = await make_stack()
    engines = [await started(role) for role in ("prefill", "decode")]
    for engine in engines:
        assert await register(stack, engine) == (200, {"lease_s": 30.0})
    await until(lambda: all(is_ready(stack, engine) for engine in engines))
    assert text_in(await stack.stream()) == text_of(3, 4)
    assert [engine.calls[0].leg for engine in engines] == ["prefill", "decode"]
    for engine in engines:
        await engine.stop()


@pytest.mark.parametrize("ahead_s", [-300.0, 300.0])
async def test_a_host_whose_clock_differs_is_warned_of_once_and_serves(make_stack, logged, ahead_s):
    engine = ScriptedEngine()
    engine.ahead_s = ahead_s
    stack = await make_stack([engine], [engine], health_check_interval_s=0.02)
    await until(lambda: engine.requests["info"] >= 3)
    async with stack.post({"prompt": "hi", "max_tokens": 4}) as response:
        assert response.status == 200
    engine.ahead_s = 0.0
    backend = stack.proxy.backends.get(engine.url)
    await until(lambda: abs(backend.ahead_s) < 1.0)
    (line,) = [line for line in logged if "wall clock differs" in line]
    told = float(line.split("ahead_s=")[1])
    assert abs(told - ahead_s) < 1.5
    assert f"engine={engine.url}" in line


async def test_an_engine_that_does_not_renew_is_forgotten(make_stack, started):
    stack = await make_stack()
    engine = await started("decode")
    await register(stack, engine)
    await until(lambda: is_ready(stack, engine))
    await register(stack, engine, lease_s=0.15)
    await until(lambda: stack.proxy.backends.get(engine.url) is None)


@pytest.mark.parametrize("takes_leave", [True, False])
async def test_prefill_engines_that_vanish_are_an_outage_and_those_that_leave_are_none(
    make_stack, takes_leave, started
):
    """In an outage decode engines compute prompts in their place, within a budget."""
    decode = ScriptedEngine("decode")
    stack = await make_stack([], [decode])
    prefill = await started("prefill")
    await register(stack, prefill)
    await until(lambda: is_ready(stack, prefill))
    if takes_leave:
        await send(stack, "DELETE", {"url": prefill.url})
    else:
        await register(stack, prefill, lease_s=0.15)
    await until(lambda: stack.proxy.backends.get(prefill.url) is None)
    assert text_in(await stack.stream()) == text_of(3, 4)
    assert ("is_fallback" in decode.calls[0].params["pdserve"]) is not takes_leave


async def test_an_engine_that_leaves_gets_nothing_more(make_stack, started):
    stack = await make_stack(queue_timeout_s=0.1)
    engine = await started("decode")
    await register(stack, engine)
    assert (await send(stack, "DELETE", {"url": engine.url}))[0] == 200
    assert stack.proxy.backends.get(engine.url) is None
    assert (await stack.refused())[0] == 503


async def test_the_leave_of_a_former_life_that_comes_late_is_not_the_present_ones(
    make_stack, started
):
    stack = await make_stack()
    engine = await started("decode")
    leave = {"url": engine.url, "engine": engine.info()}
    engine.incarnation = "life-2"
    await register(stack, engine)
    assert (await send(stack, "DELETE", leave))[0] == 200
    assert stack.proxy.backends.get(engine.url) is not None
    await send(stack, "DELETE", leave | {"engine": engine.info()})
    assert stack.proxy.backends.get(engine.url) is None


async def test_an_engine_that_leaves_in_mid_stream_leaves_no_pair_behind(make_stack, started):
    stack = await make_stack(cb_failure_threshold=1)
    prefill, decode = [await started(role) for role in ("prefill", "decode")]
    decode.stages = {"load_failures": ["unreachable"]}
    decode.gate.clear()
    for engine in (prefill, decode):
        await register(stack, engine)
    await until(lambda: is_ready(stack, prefill) and is_ready(stack, decode))
    gone = stack.proxy.backends.get(decode.url)
    request = asyncio.create_task(stack.stream())
    await until(lambda: len(decode.calls) == 1)
    assert (await send(stack, "DELETE", {"url": decode.url}))[0] == 200
    decode.gate.set()
    assert text_in(await request) == text_of(3, 4)
    metrics = await stack.metrics()
    assert metrics["pdserve_kv_load_failures_reported_total"] == 1
    assert metrics["pdserve_open_edges"] == 0
    # A leg that was still to be sent when its engine left is judged by nobody.
    known = stack.proxy.backends.get(prefill.url)
    story = Story("late", "/", SystemClock())
    with stack.proxy.breakers.transfer(known, gone, KVMode.PULL, story) as late:
        late.lost(("unreachable",))
    assert stack.proxy.breakers.num_open_pairs == 0


async def test_a_layout_that_does_not_fit_is_refused_with_both_values(make_stack, started):
    stack = await make_stack([ScriptedEngine("prefill", digest="float32")])
    engine = await started("decode", digest="bfloat16")
    status, body = await register(stack, engine)
    assert status == 409
    assert body["error"]["message"].endswith("dtype is bfloat16 here and float32 there")
    assert stack.proxy.backends.get(engine.url) is None


async def test_an_engine_that_is_refused_again_and_again_is_one_line_in_the_log(
    make_stack, logged, started
):
    stack = await make_stack([ScriptedEngine("prefill", digest="float32")])
    engine = await started("decode", digest="bfloat16")
    for _ in range(3):
        assert (await register(stack, engine))[0] == 409
    assert sum("registration refused" in line for line in logged) == 1
    engine.digest = "float32"
    assert (await register(stack, engine))[0] == 200
    engine.digest = "bfloat16"
    assert (await register(stack, engine))[0] == 409
    assert sum("registration refused" in line for line in logged) == 2


async def test_engines_of_the_command_line_that_do_not_fit_are_logged_with_both_values(
    make_stack, logged
):
    stack = await make_stack(
        [ScriptedEngine("prefill", digest="float32")],
        [decode := ScriptedEngine("decode", digest="bfloat16")],
    )
    assert not is_ready(stack, decode)
    (line,) = (line for line in logged if "cannot exchange KV" in line)
    assert "float32" in line
    assert "bfloat16" in line


async def test_an_engine_that_is_not_ready_is_looked_at_again_soon(make_stack):
    engine = ScriptedEngine("decode")
    engine.ready = False
    stack = await make_stack([], [engine], health_check_interval_s=60)
    assert not is_ready(stack, engine)
    engine.ready = True
    await until(lambda: is_ready(stack, engine))


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_engines_of_one_role_serve_one_model(make_stack, logged, started, role):
    """Either may serve a request alone, and requests need not name a model."""
    known, engine = ScriptedEngine(role, digest="float32"), await started(role, digest="bfloat16")
    stack = await make_stack(**{role: [known]})
    status, body = await register(stack, engine)
    assert status == 409
    assert "dtype is bfloat16 here and float32 there" in body["error"]["message"]
    stack = await make_stack(**{role: [known, engine]})
    assert [is_ready(stack, each) for each in (known, engine)] == [True, False]
    assert sum("engine not ready" in line and "bfloat16" in line for line in logged) == 1
    known.ready = False
    await until(lambda: is_ready(stack, engine))
    assert not is_ready(stack, known)


@pytest.mark.parametrize("remote", ["192.0.2.7", "fe80::1%eth0", "2001:db8::1"])
async def test_without_a_secret_no_engine_of_another_host_may_register(
    make_stack, monkeypatch, remote, started
):
    stack = await make_stack()
    engine = await started("decode")
    monkeypatch.setattr(aiohttp.web.BaseRequest, "remote", remote)
    status, body = await register(stack, engine)
    assert (status, body["error"]["code"]) == (401, "secret_required")
    assert stack.proxy.backends.get(engine.url) is None
    monkeypatch.setattr(aiohttp.web.BaseRequest, "remote", "::1")
    assert (await register(stack, engine))[0] == 200


async def test_a_registration_must_be_signed_with_the_deployments_secret(make_stack, started):
    stack = await make_stack(secret="right")
    engine = await started("decode")
    for secret in ("", "wrong"):
        status, body = await register(stack, engine, secret=secret)
        assert status == 401
        assert body["error"]["code"] == "invalid_signature"
        assert (await send(stack, "DELETE", {"url": engine.url}, secret))[0] == 401
    assert (await register(stack, engine, secret="right"))[0] == 200


class Wiretap:
    """An engine whose words to a proxy were recorded."""

    def __init__(self, stack, engine: ScriptedEngine) -> None:
        self.stack = stack
        self.stamps = Stamps("engine")
        self.body = {
            "url": engine.url,
            "role": engine.role,
            "engine": engine.info(),
            "lease_s": 30.0,
        }

    async def say(self, method: str) -> tuple[int, bytes, dict[str, str]]:
        """Send a message; return the status, and what was on the wire."""
        data = msgspec.json.encode(self.body)
        stamp = self.stamps.for_("proxy")
        proof = proof_headers("s3cret", method, "/pdserve/register", data, stamp=stamp)
        status, _, headers = await deliver(self.stack, method, data, proof)
        if NONCE_HEADER in headers:
            self.stamps.learn("proxy", headers[NONCE_HEADER])
            return await self.say(method)
        return status, data, proof


@pytest.fixture
async def wiretap(make_stack):
    engine = await ScriptedEngine("decode").start()
    yield Wiretap(await make_stack(secret="s3cret"), engine)
    await engine.stop()


@pytest.mark.slow
async def test_a_recorded_registration_cannot_be_sent_again(wiretap):
    status, data, proof = await wiretap.say("POST")
    assert status == 200
    assert (await wiretap.say("DELETE"))[0] == 200
    status, answer, _ = await deliver(wiretap.stack, "POST", data, proof)
    assert (status, answer["error"]["code"]) == (401, "stale_signature")
    assert not list(wiretap.stack.proxy.backends)


async def test_a_recorded_registration_cannot_be_sent_as_a_leave(wiretap):
    _, data, proof = await wiretap.say("POST")
    status, answer, _ = await deliver(wiretap.stack, "DELETE", data, proof)
    assert (status, answer["error"]["code"]) == (401, "invalid_signature")
    assert len(list(wiretap.stack.proxy.backends)) == 1


async def test_a_recorded_registration_is_nothing_to_another_proxy(wiretap, make_stack):
    _, data, proof = await wiretap.say("POST")
    restarted = await make_stack(secret="s3cret")
    status, answer, _ = await deliver(restarted, "POST", data, proof)
    assert (status, answer["error"]["code"]) == (401, "stale_signature")
    assert not list(restarted.proxy.backends)


async def test_a_message_that_was_overtaken_comes_too_late(wiretap):
    """An engine that leaves is not brought back by a renewal that was still on its way."""
    await wiretap.say("POST")
    data = msgspec.json.encode(wiretap.body)
    stamp = wiretap.stamps.for_("proxy")
    renewal = proof_headers("s3cret", "POST", "/pdserve/register", data, stamp=stamp)
    assert (await wiretap.say("DELETE"))[0] == 200
    assert (await deliver(wiretap.stack, "POST", data, renewal))[0] == 401
    assert not list(wiretap.stack.proxy.backends)


async def test_a_nonce_is_told_to_nobody_without_the_secret(wiretap):
    data = msgspec.json.encode(wiretap.body)
    proof = proof_headers("wrong", "POST", "/pdserve/register", data, stamp="/me/1")
    status, answer, headers = await deliver(wiretap.stack, "POST", data, proof)
    assert (status, answer["error"]["code"]) == (401, "invalid_signature")
    assert NONCE_HEADER not in headers


@pytest.mark.parametrize(("accepts", "status"), [(False, 401), (True, 200)])
async def test_engines_of_the_former_release_register_only_where_that_is_allowed(
    make_stack, accepts, status
):
    stack = await make_stack(secret="s3cret", accept_former_signatures=accepts)
    info = ScriptedEngine("decode").info()
    data = msgspec.json.encode(
        {"url": "http://127.0.0.1:9", "role": "decode", "engine": info, "lease_s": 9.0}
    )
    both = proof_headers("s3cret", "POST", "/pdserve/register", data)
    former = {FORMER_HEADER: both[FORMER_HEADER]}
    assert (await deliver(stack, "POST", data, former))[0] == status
    wrong = {FORMER_HEADER: proof_headers("x", "POST", "/", data)[FORMER_HEADER]}
    assert (await deliver(stack, "POST", data, wrong))[0] == 401
    # Whoever can do better is held to it.
    assert (await deliver(stack, "POST", data, {**former, PROOF_HEADER: ":x"}))[0] == 401


@pytest.mark.parametrize("method", ["POST", "DELETE"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json", "Origin": "http://127.0.0.1:8000"},
    ],
)
async def test_a_web_page_can_register_nobody(make_stack, method, headers):
    """What a page may send unasked (Fetch, section 4.10), and what it may to a rebound name."""
    stack = await make_stack()
    body = {"url": "http://evil:1", "role": "decode", "engine": {}, "lease_s": 9.0}
    body["engine"] = ScriptedEngine("decode").info()
    status, answer, _ = await deliver(stack, method, msgspec.json.encode(body), headers)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert not list(stack.proxy.backends)


async def test_a_registration_that_makes_no_sense_is_a_400(make_stack):
    stack = await make_stack()
    engine = ScriptedEngine("decode")
    good = {"url": "http://x:1", "role": "decode", "engine": engine.info(), "lease_s": 5.0}
    for wrong in (
        {**good, "url": "file:///etc"},
        {**good, "role": "boss"},
        {**good, "lease_s": -1.0},
        {**good, "lease_s": 1e9},
        {**good, "engine": {}},
        {},
    ):
        status, _ = await send(stack, "POST", wrong)
        assert status == 400, wrong


async def test_a_restarted_engine_is_used_again_at_once(make_stack, started):
    stack = await make_stack(cb_failure_threshold=1, cb_timeout_s=600)
    engine = await started("decode", engine_id="d")
    await register(stack, engine)
    await until(lambda: is_ready(stack, engine))
    backend = stack.proxy.backends.get(engine.url)
    backend.breaker.fail()
    assert not is_ready(stack, engine)
    engine.incarnation = "life-2"
    await register(stack, engine)
    assert is_ready(stack, engine)


async def test_a_restart_at_another_port_replaces_the_former_self(make_stack, started):
    stack = await make_stack()
    former = await started("decode", engine_id="d")
    await register(stack, former)
    latter = await started("decode", engine_id="d")
    latter.incarnation = "life-2"
    await register(stack, latter)
    assert stack.proxy.backends.get(former.url) is None
    await until(lambda: is_ready(stack, latter))


async def test_a_static_engine_that_restarts_gets_a_clean_sheet_by_its_health_check(make_stack):
    engine = ScriptedEngine("decode")
    stack = await make_stack([], [engine], cb_failure_threshold=1, cb_timeout_s=600)
    stack.proxy.backends.get(engine.url).breaker.fail()
    assert not is_ready(stack, engine)
    engine.incarnation = "life-2"
    await until(lambda: is_ready(stack, engine))


async def test_a_static_engine_outlives_its_lease(make_stack):
    engine = ScriptedEngine("decode")
    stack = await make_stack([], [engine])
    await register(stack, engine, lease_s=0.05)
    checks = engine.requests["info"]
    await until(lambda: engine.requests["info"] > checks + 3)
    assert is_ready(stack, engine)


async def test_load_from_others_is_told_apart_from_ours(make_stack):
    engine = ScriptedEngine("decode")
    engine.load["num_running"] = 5
    stack = await make_stack([], [engine])
    backend = stack.proxy.backends.get(engine.url)
    assert stack.proxy.backends.view(backend).num_foreign == 5
    assert stack.proxy.backends.view(backend).kv_usage == 0.1
    engine.gate.clear()
    async with stack.post({"prompt": "hi", "stream": True}) as response:
        await until(lambda: backend.num_foreign == 4)
        assert backend.in_flight == 1
        engine.gate.set()
        await response.read()


@pytest.mark.parametrize("takes_leave", [True, False])
async def test_a_stream_at_an_engine_that_is_gone_and_hangs_goes_on_elsewhere(
    make_stack, takes_leave, monkeypatch, started
):
    """What runs at an engine that left may end there, but only as long as it answers at all."""
    stack = await make_stack(cb_failure_threshold=2)
    stuck = await started("decode")
    await register(stack, stuck)
    await until(lambda: is_ready(stack, stuck))
    stuck.gate.clear()
    request = asyncio.create_task(stack.stream())
    await until(lambda: len(stuck.calls) == 1)
    good = await started("decode")
    await register(stack, good)
    await until(lambda: is_ready(stack, good))
    if takes_leave:
        await send(stack, "DELETE", {"url": stuck.url})
    else:
        await register(stack, stuck, lease_s=0.05)
    await until(lambda: stack.proxy.backends.get(stuck.url) is None)
    assert not request.done()
    cut_off(stuck, monkeypatch)
    assert text_in(await asyncio.wait_for(request, 30)) == text_of(3, 4)
    assert len(good.calls) == 1


async def test_a_stream_at_a_host_that_cannot_be_reached_any_more_goes_on_elsewhere(
    make_stack, monkeypatch
):
    """A connection that is open says nothing then, for as long as nobody asks."""
    stuck, good = ScriptedEngine("decode"), ScriptedEngine("decode")
    stuck.gate.clear()
    stack = await make_stack([], [stuck, good], decode_policy="round_robin", cb_failure_threshold=2)
    request = asyncio.create_task(stack.stream())
    await until(lambda: len(stuck.calls) == 1)
    cut_off(stuck, monkeypatch)
    assert text_in(await asyncio.wait_for(request, 30)) == text_of(3, 4)
    assert len(good.calls) == 1


async def test_an_engine_whose_name_can_be_no_hosts_is_unreachable(make_stack):
    stack = await make_stack([], decodes := [ScriptedEngine("decode")])
    info = decodes[0].info()
    body = {"url": "http://a..b:1", "role": "decode", "engine": info, "lease_s": 30.0}
    assert (await send(stack, "POST", body))[0] == 200
    odd = stack.proxy.backends.get("http://a..b:1")
    await until(lambda: odd.health is Health.UNREACHABLE)
    assert text_in(await stack.stream()) == text_of(3, 4)


async def test_an_engine_may_stay_when_another_one_comes_that_does_not_fit(make_stack, started):
    """Such as one of the command line that was started again with another model."""
    fits, other = ScriptedEngine("decode"), ScriptedEngine("decode")
    stack = await make_stack([], [fits, other])
    prefill = await started("prefill")
    assert (await register(stack, prefill))[0] == 200
    other.digest, other.incarnation = "d2", "life-2"
    known = stack.proxy.backends.get(other.url)
    await until(lambda: known.info.incarnation == "life-2")
    assert (await register(stack, prefill))[0] == 200
    # It is not asked itself, as a health check would: who is known already may stay.
    again = {**prefill.info(), "incarnation": "life-2"}
    body = {"url": prefill.url, "role": prefill.role, "engine": again, "lease_s": 30.0}
    assert (await send(stack, "POST", body, ""))[0] == 409
