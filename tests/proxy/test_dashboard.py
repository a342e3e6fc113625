"""The dashboard's two paths: who may ask, what they say, and what is asked of engines meanwhile."""

from __future__ import annotations

import asyncio
import base64
import re
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.observe.clock import SystemClock
from pdserve.proxy.backend import Health
from pdserve.proxy.dashboard import watch
from pdserve.proxy.dashboard.handlers import PAGE, POLICY
from pdserve.proxy.dashboard.watch import SHOWN_OF_ENGINES, SHOWN_OF_PROXY, series_in
from tests.proxy.conftest import until
from tests.proxy.scripted import ScriptedEngine

ENGINE_PAGE = """# HELP vllm:num_requests_running Requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="a \\"b\\" }"} 2.0
pdserve_kv_blocks{state="held"} 3.0
vllm:prompt_tokens_total{model_name="m"} NaN
pdserve_other 1.0
"""


def basic(password: str, user: str = "me") -> dict[str, str]:
    token = base64.b64encode(f"{user}:{password}".encode()).decode()
    return {"Authorization": f"Basic {token}"}


async def data_of(stack, **kwargs):
    async with stack.client.get(f"{stack.url}/dashboard/data", **kwargs) as response:
        assert response.status == 200, await response.text()
        return await response.json()


@pytest.fixture
def engine():
    scripted = ScriptedEngine("decode")
    scripted.metrics_page = ENGINE_PAGE
    return scripted


def asked(engine: ScriptedEngine) -> int:
    return engine.requests["/metrics"]


# --- who may ask


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/data"])
async def test_without_a_configured_key_it_is_open(make_stack, path):
    stack = await make_stack([ScriptedEngine("prefill")], [ScriptedEngine("decode")])
    async with stack.client.get(f"{stack.url}{path}") as response:
        assert response.status == 200


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/data"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        basic("wrong"),
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic k1"},
        {"Authorization": "Basic !"},
        {"Authorization": "Basic " + base64.b64encode(b"k1").decode()},
        basic("", user="k1"),
    ],
)
async def test_a_browser_without_the_key_is_challenged(make_stack, path, headers):
    stack = await make_stack(decode=[ScriptedEngine("decode")], api_keys=("k1", "k2"))
    async with stack.client.get(f"{stack.url}{path}", headers=headers) as response:
        assert response.status == 401
        assert response.headers["WWW-Authenticate"].startswith("Basic ")
        assert "k1" not in await response.text()


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/data"])
@pytest.mark.parametrize(
    "headers", [basic("k1"), basic("k2", user=""), {"Authorization": "Bearer k2"}]
)
async def test_the_key_opens_it_as_password_and_as_bearer(make_stack, path, headers):
    stack = await make_stack(decode=[ScriptedEngine("decode")], api_keys=("k1", "k2"))
    async with stack.client.get(f"{stack.url}{path}", headers=headers) as response:
        assert response.status == 200


async def test_the_api_takes_no_password(make_stack):
    stack = await make_stack(decode=[ScriptedEngine("decode")], api_keys=("k1",))
    async with stack.client.get(f"{stack.url}/v1/models", headers=basic("k1")) as response:
        assert response.status == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"


# --- the page


def test_the_page_names_no_other_host_and_has_no_inline_handlers() -> None:
    text = PAGE.decode()
    urls = set(re.findall(r"https?://[\w.]+", text))
    assert urls <= {"http://www.w3.org"}, "names of SVG's vocabulary only"
    assert not re.search(r"\s(?:on\w+|style)=", text)
    assert "innerHTML" not in text
    assert "'unsafe-" not in POLICY
    assert POLICY.count("sha256-") == 2


# --- the data


async def test_it_says_what_the_proxys_metrics_say(make_stack):
    stack = await make_stack([ScriptedEngine("prefill")], [ScriptedEngine("decode")])
    await stack.stream()
    shown = (await data_of(stack))["proxy"]["series"]
    told = await stack.metrics()
    assert {k: v for k, v in shown.items() if "loop_lag" not in k} == {
        k: v for k, v in told.items() if SHOWN_OF_PROXY.match(k) and "loop_lag" not in k
    }


async def test_it_shows_where_every_request_is(make_stack):
    decode = ScriptedEngine("decode")
    decode.gate.clear()
    stack = await make_stack([ScriptedEngine("prefill")], [decode])
    running = asyncio.create_task(stack.stream())
    await until(lambda: len(decode.calls) == 1)

    async def by_stage():
        series = (await data_of(stack))["proxy"]["series"]
        return {
            stage: series[f'pdserve_requests_in_flight{{stage="{stage}"}}']
            for stage in ("queued", "prefill", "transfer", "decode", "local")
        }

    assert sum((await by_stage()).values()) == 1
    decode.gate.set()
    await running
    assert sum((await by_stage()).values()) == 0


async def test_it_says_of_engines_what_their_own_metrics_say(make_stack, engine):
    stack = await make_stack([ScriptedEngine("prefill")], [engine])
    shown = {entry["url"]: entry for entry in (await data_of(stack))["engines"]}
    assert shown[engine.url]["series"] == {
        'vllm:num_requests_running{model_name="a \\"b\\" }"}': 2.0,
        'pdserve_kv_blocks{state="held"}': 3.0,
    }
    assert shown[engine.url]["failure"] == ""
    other = shown[stack.engines[0].url]
    assert "404" in other["failure"]
    assert other["health"] == "ready"


@pytest.mark.slow
async def test_engines_are_asked_only_while_somebody_looks(make_stack, engine, monkeypatch):
    monkeypatch.setattr(watch, "INTERVAL_S", 0.02)
    monkeypatch.setattr(watch, "WATCHED_S", 0.3)
    stack = await make_stack(decode=[engine])
    await asyncio.sleep(0.1)
    assert asked(engine) == 0
    await data_of(stack)
    await until(lambda: not stack.proxy.dashboard.watch.is_on)
    before = asked(engine)
    assert before
    await asyncio.sleep(0.1)
    assert asked(engine) == before
    await data_of(stack)
    assert asked(engine) > before


async def test_several_dashboards_ask_engines_no_more_than_one_does(
    make_stack, engine, monkeypatch
):
    monkeypatch.setattr(watch, "INTERVAL_S", 60.0)
    stack = await make_stack(decode=[engine])
    await asyncio.gather(*(data_of(stack) for _ in range(20)))
    assert asked(engine) == 1


async def test_a_hanging_engine_delays_the_page_by_a_second_at_most(
    make_stack, engine, monkeypatch
):
    monkeypatch.setattr(watch, "READ_TIMEOUT_S", 0.1)
    engine.hang_metrics = asyncio.Event()
    stack = await make_stack(decode=[engine])
    async with asyncio.timeout(10):
        (entry,) = (await data_of(stack))["engines"]
    engine.hang_metrics.set()
    assert "no answer within" in entry["failure"]
    assert entry["age_s"] is None
    assert not entry["is_unreachable"]


@pytest.mark.slow
async def test_hundreds_of_engines_are_not_read_at_once():
    begun_s: list[float] = []

    class Client:
        async def get_json(self, *_: object) -> tuple[int, bytes]:
            begun_s.append(asyncio.get_running_loop().time())
            return 200, b""

    engines = [SimpleNamespace(url=f"http://engine-{i}") for i in range(200)]
    services: Any = SimpleNamespace(backends=engines, http=Client(), clock=SystemClock())
    watching = watch.EngineWatch(services, {})
    await watching.look()
    await watching.stop()
    assert len(begun_s) == 200
    assert 0.5 < begun_s[-1] - begun_s[0] < 1.0


@pytest.mark.slow
async def test_an_engine_that_died_is_unreachable_before_the_next_health_check(make_stack, engine):
    stack = await make_stack(decode=[engine], health_check_interval_s=60.0)
    await data_of(stack)
    await engine.stop()

    async with asyncio.timeout(30):
        while not (entry := (await data_of(stack))["engines"][0])["is_unreachable"]:
            await asyncio.sleep(0.05)
    assert entry["health"] == "ready"
    assert entry["series"]['pdserve_kv_blocks{state="held"}'] == 3.0
    assert entry["age_s"] > 0


async def test_the_slowest_requests_come_with_their_line(make_stack):
    stack = await make_stack([ScriptedEngine("prefill")], [ScriptedEngine("decode")])
    for _ in range(10):
        await stack.stream()
    slowest = (await data_of(stack))["slowest"]
    assert len(slowest) == 8
    assert [s["ttft_ms"] for s in slowest] == sorted((s["ttft_ms"] for s in slowest), reverse=True)
    assert slowest[0]["line"].startswith(f"req {slowest[0]['request_id']} ok ")


async def test_what_happened_and_what_users_feel_are_known_without_anybody_looking(make_stack):
    prefill, decode = ScriptedEngine("prefill"), ScriptedEngine("decode")
    stack = await make_stack([prefill], [decode], health_check_interval_s=0.05)
    await decode.stop()
    dashboard = stack.proxy.dashboard
    await until(lambda: stack.proxy.backends.get(decode.url).health is Health.UNREACHABLE)
    dashboard.lookout.see()
    data = await data_of(stack)
    assert data["banner"]["headline"].startswith("Prefill engines do everything")
    assert any("is unreachable: cannot connect" in each for each in data["banner"]["details"])
    (event,) = data["events"]
    assert event["tone"] == "bad"
    assert event["text"].startswith(f"decode engine {decode.url.removeprefix('http://')} died")
    assert data["events_since_s"] <= event["wall_s"]


async def test_what_engines_count_is_an_event_without_anybody_looking(make_stack):
    prefill = ScriptedEngine("prefill")
    stack = await make_stack([prefill], [ScriptedEngine("decode")])
    backend, lookout = stack.proxy.backends.get(prefill.url), stack.proxy.dashboard.lookout
    prefill.load["lease_ends"] = {"expired": 2}
    await until(lambda: backend.snapshot[1].lease_ends)
    lookout.see()
    texts = [event.text for event in lookout.journal.events]
    assert texts == [f"leases that nobody read in time at prefill engine {prefill.url[7:]}: 2"]


def test_only_finite_values_are_read_and_only_the_names_that_are_wanted() -> None:
    every = re.compile("")
    assert series_in("a 1\nb NaN\nc +Inf\nd x\n\n# e 1\n", every) == {"a": 1.0}
    assert set(series_in(ENGINE_PAGE, SHOWN_OF_ENGINES)) == {
        'vllm:num_requests_running{model_name="a \\"b\\" }"}',
        'pdserve_kv_blocks{state="held"}',
    }
