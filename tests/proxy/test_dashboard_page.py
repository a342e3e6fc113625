"""The dashboard in a real browser, before scripted engines: what people see, and what they do."""

from __future__ import annotations

import aiohttp
import pytest

from pdserve.proxy.dashboard import watch
from tests.browser import needs_browser
from tests.proxy.conftest import until
from tests.proxy.scripted import ScriptedEngine
from tests.proxy.test_pairing import learned

pytestmark = [pytest.mark.slow, needs_browser]

STATE = """document.querySelector('.engine[data-url="%s"]')?.dataset.state"""
VISIBLE = "document.getElementById('%s').getClientRects().length > 0"
STORE_PAGE = """vllm:external_prefix_cache_queries_total{model_name="m"} 4096.0
vllm:external_prefix_cache_hits_total{model_name="m"} 3072.0
pdserve_kv_tier_loaded_bytes_total 6e+09
pdserve_kv_tier_load_seconds_total 2.0
pdserve_kv_tier_saved_bytes_total 8e+09
pdserve_kv_tier_dropped_saves_total 3.0
"""


@pytest.fixture
def engines():
    return [ScriptedEngine("prefill")], [ScriptedEngine("decode")]


async def test_without_engines_it_says_how_to_start_them(make_stack, browser):
    stack = await make_stack()
    page = await browser.open(f"{stack.url}/dashboard")
    await page.wait_for(VISIBLE % "no-engines")
    commands = await page.evaluate("document.getElementById('no-engines-commands').textContent")
    assert f"pdserve prefill MODEL --proxy {stack.url}" in commands
    assert f"pdserve decode MODEL --proxy {stack.url}" in commands


async def test_without_requests_it_says_how_to_send_one(make_stack, browser, engines):
    stack = await make_stack(*engines)
    page = await browser.open(f"{stack.url}/dashboard")
    await page.wait_for(VISIBLE % "curl")
    command = await page.evaluate("document.getElementById('curl').textContent")
    assert command.startswith(f"curl {stack.url}/v1/completions")
    await stack.stream()
    await page.wait_for("document.querySelectorAll('#slow > li').length == 1")
    assert not await page.evaluate(VISIBLE % "curl")


async def test_a_browser_gives_the_key_as_its_password(make_stack, browser, engines):
    stack = await make_stack(*engines, api_keys=("open sesame",))
    page = await browser.open()
    await page.authenticate("anybody", "open sesame")
    await page.goto(f"{stack.url}/dashboard")
    await page.wait_for("document.getElementById('live-text').textContent == 'live'")
    assert await page.evaluate("document.getElementById('curl').textContent.includes('Bearer')")
    assert page.hosts() == {stack.url.removeprefix("http://")}


async def test_what_clients_and_engines_say_stays_text(make_stack, browser, engines):
    stack = await make_stack(*engines)
    evil = "<img/src=x/onerror=window.hacked=1>"
    async with stack.post(headers={"X-Request-Id": evil}) as response:
        assert response.status == 200
    page = await browser.open(f"{stack.url}/dashboard")
    await page.wait_for("document.querySelectorAll('#slow > li').length == 1")
    assert evil in await page.evaluate("document.getElementById('slow').textContent")
    assert await page.evaluate("document.querySelectorAll('img').length") == 0
    assert not page.errors


async def test_the_policy_stops_scripts_that_are_not_its_own(make_stack, browser):
    stack = await make_stack()
    page = await browser.open(f"{stack.url}/dashboard")
    await page.evaluate(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1';"
        " document.body.append(s); })()"
    )
    assert await page.evaluate("typeof window.ran") == "undefined"
    with pytest.raises(AssertionError, match=r"Failed to fetch|violates"):
        await page.evaluate("fetch('http://127.0.0.1:9/x')")


@pytest.mark.parametrize("width", [320, 390, pytest.param(768, marks=pytest.mark.matrix), 1440])
async def test_nothing_is_wider_than_the_window(make_stack, browser, engines, width):
    stack = await make_stack(*engines)
    async with stack.post(headers={"X-Request-Id": "r" * 128}) as response:
        assert response.status == 200
    page = await browser.open(f"{stack.url}/dashboard", width=width)
    await page.wait_for("document.querySelectorAll('#slow > li').length == 1")
    await page.evaluate("document.querySelector('#slow details').open = true")
    await page.evaluate(
        "document.querySelectorAll('.quantiles b').forEach((b) => { b.textContent = '1,234 ms'; })"
    )
    assert await page.evaluate("document.documentElement.scrollWidth") == width
    smallest = await page.evaluate(
        "Math.min(...[...document.querySelectorAll('p, dt, dd, span, h2, h3, button, pre')]"
        ".map((e) => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert smallest >= 11


async def test_open_breakers_of_pairs_are_no_wider_than_the_window(make_stack, browser, engines):
    stack = await make_stack(*engines)
    page = await browser.open(f"{stack.url}/dashboard", width=390)
    await page.wait_for("document.querySelectorAll('.engine').length == 2")
    shown = """(async () => {
      const data = await (await fetch("/dashboard/data")).json(), [{url}] = data.engines;
      const edge = (i) => ({prefill: url, decode: `http://d-${i}.decode.engines.svc.cluster.local`,
                            mode: "push", state: "open"});
      data.edges = Array.from({length: %d}, (_, i) => edge(i));
      take(data); draw();
      const pill = document.querySelector(`.engine[data-url="${url}"] .pill:last-child`);
      return [pill.textContent, document.documentElement.scrollWidth];
    })()"""
    text, width = await page.evaluate(shown % 2)
    assert text.startswith("push to d-0.decode.engines.svc.cluster.local open, push to d-1.")
    assert width == 390
    assert await page.evaluate(shown % 3) == ["breakers of 3 pairs", 390]


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.matrix)])
async def test_text_can_be_read_against_what_is_behind_it(make_stack, browser, engines, scheme):
    """Contrast of at least 4.5:1 (WCAG 2.2, 1.4.3) on everything that has text of its own."""
    stack = await make_stack(*engines)
    await stack.stream()
    page = await browser.open(f"{stack.url}/dashboard", scheme=scheme)
    await page.wait_for("document.querySelectorAll('#slow > li').length == 1")
    poor = await page.evaluate("""(() => {
      const rgb = (text) => (text.match(/[\\d.]+/g) ?? [0, 0, 0, 0]).map(Number)
        .map((v, i) => text.startsWith("color(srgb") && i < 3 ? v * 255 : v);
      const light = (c) => { const [r, g, b] = c.slice(0, 3).map((v) => { v /= 255;
        return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
      const behind = (e) => { for (; e; e = e.parentElement) {
        const c = rgb(getComputedStyle(e).backgroundColor); if ((c[3] ?? 1) > 0.9) return c; }
        return [255, 255, 255]; };
      return [...document.querySelectorAll("body *")].filter((e) => e.getClientRects().length &&
        !(e instanceof SVGElement) && [...e.childNodes].some(
          (n) => n.nodeType === 3 && n.data.trim())
      ).map((e) => { const a = light(rgb(getComputedStyle(e).color)), b = light(behind(e));
        return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.outerHTML.slice(0, 200)]; }
      ).filter(([ratio]) => ratio < 4.5);
    })()""")
    assert poor == []


async def test_all_controls_are_reached_and_used_by_keyboard(make_stack, browser, engines):
    stack = await make_stack(*engines)
    await stack.stream()
    page = await browser.open(f"{stack.url}/dashboard")
    await page.wait_for("document.querySelectorAll('#slow > li').length == 1")
    reached = []
    for _ in range(8):
        await page.press("Tab")
        reached.append(
            await page.evaluate("document.activeElement.id || document.activeElement.tagName")
        )
        if reached[-1] == "span-minute":
            await page.press("Enter")
            assert (
                await page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
            )
            assert (
                await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                == "solid"
            )
        if reached[-1] == "SUMMARY":
            await page.press("Enter")
            await page.wait_for("document.querySelector('#slow details').open")
    assert {"span-all", "span-minute", "SUMMARY"} <= set(reached)


async def test_an_open_request_stays_open_while_figures_change(make_stack, browser, engines):
    stack = await make_stack(*engines)
    await stack.stream()
    page = await browser.open(f"{stack.url}/dashboard")
    await page.wait_for("document.querySelectorAll('#slow > li').length == 1")
    await page.evaluate("document.querySelector('#slow summary').click()")
    await stack.stream()
    await page.wait_for("document.querySelectorAll('#slow > li').length == 2")
    assert await page.evaluate("document.querySelectorAll('#slow details[open]').length") == 1
    assert "req " in await page.evaluate(
        "document.querySelector('#slow details[open] pre').textContent"
    )


async def test_an_engine_that_leaves_stays_in_sight_as_gone(make_stack, browser, engines):
    prefill, decode = engines
    stack = await make_stack(prefill, decode)
    page = await browser.open(f"{stack.url}/dashboard")
    url = decode[0].url
    await page.wait_for(f"{STATE % url} == 'ready'")
    backend = stack.proxy.backends.get(url)
    stack.proxy.backends._forget(backend, "in this test")
    await page.wait_for(f"{STATE % url} == 'gone'")
    await page.wait_for("document.getElementById('events').textContent.includes('is gone')")


async def test_what_users_feel_stands_above_all(make_stack, browser, engines):
    (prefill,), (decode,) = engines
    stack = await make_stack([prefill], [decode])
    page = await browser.open(f"{stack.url}/dashboard")
    headline = "document.getElementById('banner-headline').textContent"
    await page.wait_for(f"{headline} == 'Ready; nobody has asked for a minute'")
    await stack.stream()
    await page.wait_for(f"{headline} == 'Requests are served'")
    decode.ready = False
    await page.wait_for(f"{headline}.startsWith('Prefill engines do everything')")
    prefill.ready = False
    await page.wait_for(f"{headline} == 'Nobody is served'")
    assert await page.evaluate("document.getElementById('banner').className") == "banner bad"
    assert await page.evaluate("document.getElementById('live-text').textContent") == "live"


async def test_what_happened_before_the_page_was_opened_is_told(make_stack, browser, engines):
    stack = await make_stack(*engines)
    stack.proxy.metrics.ladder.labels("local", "no_pair").inc()
    stack.proxy.dashboard.lookout.see()
    page = await browser.open(f"{stack.url}/dashboard")
    await page.wait_for("document.getElementById('events').children.length == 1")
    told = await page.evaluate("document.getElementById('events').textContent")
    assert "ladder: one engine did everything (no pair)" in told


async def test_no_percentile_is_told_of_too_few_requests(make_stack, browser, engines):
    stack = await make_stack(*engines)
    for _ in range(2):
        await stack.stream()
    page = await browser.open(f"{stack.url}/dashboard")
    shown = "[...document.querySelectorAll('#ttft-quantiles b')].map((e) => e.textContent)"
    await page.wait_for(f"{shown}.length == 3")
    median, *others = await page.evaluate(shown)
    assert median.endswith("ms")
    assert others == ["–", "–"]


async def test_the_slowest_are_drawn_by_what_they_are_sorted_by(make_stack, browser, engines):
    stack = await make_stack(*engines)
    for _ in range(4):
        await stack.stream()
    page = await browser.open(f"{stack.url}/dashboard")
    await page.wait_for("document.querySelectorAll('#slow > li').length == 4")
    widths = await page.evaluate("""[...document.querySelectorAll('#slow .bar')].map((bar) =>
      [...bar.children].reduce((sum, part) => sum + parseFloat(part.style.width), 0))""")
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == pytest.approx(100.0, abs=0.5)


async def test_a_line_of_the_last_minute_is_as_wide_as_its_tile(make_stack, browser, engines):
    stack = await make_stack(*engines)
    page = await browser.open(f"{stack.url}/dashboard")
    await page.wait_for("document.querySelectorAll('.engine').length == 2")
    shares = await page.evaluate("""[...document.querySelectorAll('.spark')].map((spark) =>
      spark.getBoundingClientRect().width / spark.parentElement.clientWidth)""")
    assert len(shares) == 3
    assert min(shares) > 0.95


async def test_breakers_and_the_ladder_are_told_as_events(make_stack, browser, engines):
    stack = await make_stack(*engines, cb_timeout_s=60.0)
    page = await browser.open(f"{stack.url}/dashboard")
    await page.wait_for("document.querySelectorAll('.engine').length == 2")
    backend = stack.proxy.backends.get(stack.engines[1].url)
    for _ in range(3):
        backend.breaker.fail()
        stack.proxy.metrics.ladder.labels("other_decode", "dropped").inc()
    await page.wait_for("document.getElementById('events').children.length >= 2")
    told = await page.evaluate("document.getElementById('events').textContent")
    assert f"breaker of decode engine {backend.url.removeprefix('http://')}: open" in told
    assert "ladder: took another decode engine (dropped), 3 requests" in told


async def test_a_store_of_kv_is_shown_where_an_engine_has_one(make_stack, browser, engines):
    engines[0][0].load["kv_store"] = {"is_up": True}
    stack = await make_stack(*engines)
    page = await browser.open(f"{stack.url}/dashboard")
    await page.wait_for("document.querySelectorAll('.engine').length == 2")
    assert not await page.evaluate(VISIBLE % "store")
    engines[0][0].metrics_page = STORE_PAGE + "pdserve_kv_tier_server_up 1.0\n"
    await page.wait_for(VISIBLE % "store")
    shown = await page.evaluate("document.getElementById('store').innerText")
    assert "3,072 of 4,096, 75 %" in shown
    assert "3.0 GB/s" in shown
    warned = await page.evaluate(
        "[...document.querySelectorAll('#store .warn')].map((e) => e.id).join()"
    )
    assert warned == "store-dropped"
    engines[0][0].load["kv_store"] = {"is_up": False}
    await page.wait_for(
        "document.getElementById('events').textContent.includes('has lost its store of KV')"
    )
    assert not page.errors


async def test_a_proxy_that_ends_is_said_so_and_one_that_comes_back_is_shown(
    make_stack, browser, engines
):
    stack = await make_stack(*engines)
    page = await browser.open(f"{stack.url}/dashboard")
    await page.wait_for("document.querySelectorAll('.engine').length == 2")
    port = int(stack.url.rpartition(":")[2])
    await stack.proxy.stop()
    await page.wait_for(VISIBLE % "alarm")
    assert "last seen" in await page.evaluate("document.getElementById('live-text').textContent")
    await make_stack(*engines, port=port)
    await page.wait_for("document.getElementById('live-text').textContent == 'live'")
    assert not await page.evaluate(VISIBLE % "alarm")


async def test_another_life_of_the_proxy_is_shown_without_what_the_one_before_it_counted(
    make_stack, browser, engines
):
    stack = await make_stack(*engines, split_policy="predicted")
    stack.proxy.pairing.model = learned()
    async with stack.post(headers={"X-Request-Id": "of-the-first-life"}) as response:
        assert response.status == 200
    stack.proxy.metrics.ladder.labels("local", "no_pair").inc()
    page = await browser.open(f"{stack.url}/dashboard")
    text = "document.getElementById('%s').textContent"
    for shown in ("slow", "routes-last"):
        await page.wait_for(f"{text % shown}.includes('of-the-first-life')")
    await page.wait_for(f"{text % 'events'}.includes('one engine did everything')")
    told = await page.evaluate("""(async () => {
      const data = await (await fetch("/dashboard/data")).json();
      data.began_s += 1;
      data.slowest[0].request_id = data.routes.decisions[0].request_id = "of-the-second-life";
      data.events = [1, 2].map((seq) => ({seq, wall_s: 0, tone: "", text: `later ${seq}`}));
      take(data);
      draw();
      return ["slow", "routes-last", "events"].map((id) => document.getElementById(id).textContent);
    })()""")
    assert "of-the-second-life" in told[0]
    assert "of-the-second-life" in told[1]
    assert told[2].count("later") == 2
    assert "one engine did everything" not in told[2]


@pytest.mark.parametrize("body", ["<html>log in</html>", '{"at_s": 1e9}'], ids=["HTML", "other"])
async def test_figures_that_cannot_be_read_are_not_called_live(make_stack, browser, engines, body):
    stack = await make_stack(*engines)
    page = await browser.open(f"{stack.url}/dashboard")
    live = "document.getElementById('live').className == 'live on'"
    await page.wait_for(live)
    await page.evaluate(f"window.fetch = async () => new Response({body!r})")
    await page.wait_for(f"!({live})")
    alarm = await page.evaluate("document.getElementById('alarm').textContent")
    assert "cannot read what the proxy says: reload it" in alarm


async def test_commands_name_the_prefix_of_a_reverse_proxy(make_stack, browser):
    stack = await make_stack(root_path="/llm")
    page = await browser.open(f"{stack.url}/llm/dashboard")
    await page.wait_for(VISIBLE % "no-engines")
    said = "['curl', 'no-engines-commands'].map((id) => document.getElementById(id).textContent)"
    command, start = await page.evaluate(said)
    assert command.startswith(f"curl {stack.url}/llm/v1/completions")
    assert f"pdserve prefill MODEL --proxy {stack.url}/llm\n" in start


async def test_figures_of_the_last_minute_are_not_called_those_since_the_start(
    make_stack, browser, engines
):
    stack = await make_stack(*engines)
    page = await browser.open(f"{stack.url}/dashboard")
    title = "document.querySelector('#way-push dd').title"
    await page.wait_for(f"{title}.includes('pdserve_kv_mode_total')")
    await page.evaluate("document.getElementById('span-minute').click()")
    assert await page.evaluate(title) == ""


async def test_a_long_look_takes_no_more_memory_than_a_short_one(make_stack, browser, engines):
    stack = await make_stack(*engines)
    page = await browser.open(f"{stack.url}/dashboard")
    await page.wait_for("document.querySelectorAll('.engine').length == 2")
    async with aiohttp.ClientSession() as client:
        async with client.get(f"{stack.url}/dashboard/data") as response:
            assert response.status == 200
    kept = await page.evaluate("""(async () => {
      const data = await (await fetch("/dashboard/data")).json();
      for (let second = 1; second <= 400; second++) {
        data.at_s += 1; data.wall_s += 1;
        const event = {seq: second, wall_s: data.wall_s, tone: "warn", text: `event ${second}`};
        data.events = [event, ...data.events].slice(0, 100);
        data.engines[0].url = `http://engine-${second % 50}`;
        take(structuredClone(data));
        if (second % 40 === 0) draw();
      }
      return [moments.length, document.getElementById("events").children.length, ghosts.size,
              cards.size, document.querySelectorAll("*").length];
    })()""")
    assert kept[0] <= 63
    assert kept[1] == 100
    assert kept[2] <= 51
    assert kept[3] <= 53
    assert kept[4] < 6000


async def test_a_hidden_page_asks_for_nothing(make_stack, browser, engines, monkeypatch):
    monkeypatch.setattr(watch, "WATCHED_S", 1.0)
    stack = await make_stack(*engines)
    page = await browser.open(f"{stack.url}/dashboard")
    await page.wait_for("document.querySelectorAll('.engine').length == 2")
    await page.evaluate(
        "Object.defineProperty(document, 'hidden', {get: () => window.isAway ?? true})"
    )
    asked = len(page.requests)
    await page.wait_for("new Promise((done) => setTimeout(() => done(true), 3000))")
    assert len(page.requests) <= asked + 1
    await until(lambda: not stack.proxy.dashboard.watch.is_on)
    await page.evaluate("window.isAway = false")
    await page.wait_for("document.getElementById('live-text').textContent == 'live'")
    assert not page.errors


async def test_it_says_why_requests_went_where_they_did(make_stack, browser, engines):
    stack = await make_stack(*engines, split_policy="predicted")
    stack.proxy.pairing.model = learned()
    page = await browser.open(f"{stack.url}/dashboard")
    for number in range(4):
        await stack.stream({"prompt": list(range(number, number + 600))})
    await page.wait_for("document.querySelectorAll('#routes-scatter circle').length == 4")
    assert await page.evaluate("document.querySelectorAll('#routes-last > li').length") == 4
    assert await page.evaluate("document.querySelectorAll('#routes-work > li').length") == 2
    told = await page.evaluate("document.querySelector('#routes-last pre').textContent")
    assert told.startswith("route ")
    assert "because" in told
    reasons = "document.getElementById('routes-reasons').textContent"
    await page.wait_for(f"{reasons}.includes(':')")
    assert not page.errors


async def test_a_proxy_that_chooses_no_pairs_shows_none(make_stack, browser, engines):
    stack = await make_stack(*engines)
    page = await browser.open(f"{stack.url}/dashboard")
    await page.wait_for("document.getElementById('live-text').textContent == 'live'")
    assert not await page.evaluate(VISIBLE % "routes")
