"""The dashboard of a real deployment in a real browser: what it shows is what /metrics say."""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise

import httpx
import pytest

from pdserve.proxy.story import SECOND_TERMS, TTFT_TERMS
from tests.browser import needs_browser

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400), needs_browser]

ITL = "pdserve_inter_token_latency_seconds"
FIGURES = """[...document.querySelectorAll("[data-metric]")].map(
  (e) => [e.dataset.of, e.dataset.metric, Number(e.dataset.value), e.textContent])"""
VALUES = """Object.fromEntries([...document.querySelectorAll("%s b")].map(
  (b) => [b.parentElement.childNodes[%d].textContent, Number(b.dataset.value)]))"""
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


PROXY = "shown proxy"


@pytest.fixture
def engines(boxed):
    """P, and two D: other tests may have left some."""
    decodes = [
        name
        for name, process in boxed.processes.items()
        if process.arguments[0] == "decode" and process.popen.poll() is None
    ]
    if len(decodes) == 1:
        boxed.start("decode1", *boxed.processes["decode"].arguments)
        boxed.wait("decode1")
        decodes.append("decode1")
    return ["prefill", *decodes[:2]]


@pytest.fixture
def deployment(boxed, engines):
    """With a proxy of these engines alone that nobody has asked yet."""
    prefill, *decodes = map(boxed.url, engines)
    flags = ("--prefill", prefill, "--decode", *decodes)
    boxed.start(PROXY, "proxy", "--port", "0", *flags)
    boxed.wait(PROXY)
    boxed.wait_routable(1, 2, proxy=PROXY)
    return boxed


async def generate(url: str, number: int, tokens: int = 24) -> None:
    async with httpx.AsyncClient(timeout=60, verify=False) as client:

        async def one(index: int) -> None:
            body = {
                "prompt": f"{index} was a king " * 12,
                "max_tokens": tokens,
                "ignore_eos": True,
                "stream": True,
            }
            answer = await client.post(f"{url}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-300:]

        await asyncio.gather(*(one(index) for index in range(number)))


def total(series: dict[str, float], metric: str) -> float:
    """Sum of the series of a name that have the given labels."""
    name, _, labels = metric.partition("{")
    wanted = set(LABEL.findall(labels))
    found = [
        value
        for key, value in series.items()
        if key.partition("{")[0] == name and wanted <= set(LABEL.findall(key))
    ]
    assert found, f"nobody has {metric}"
    return sum(found)


def quantile(q: float, series: dict[str, float], name: str) -> float | None:
    """As Prometheus' histogram_quantile (linear inside a bucket, from 0); None of too few."""
    buckets: dict[float, float] = {}
    for key, value in series.items():
        if key.startswith(f"{name}_bucket"):
            le = float(dict(LABEL.findall(key))["le"])
            buckets[le] = buckets.get(le, 0) + value
    pairs = [(0.0, 0.0), *sorted(buckets.items())]
    rank = q * pairs[-1][1]
    if pairs[-1][1] - rank < 1.0:
        return None
    for (low, before), (high, count) in pairwise(pairs):
        if count >= rank:
            return (
                low
                if high == float("inf")
                else low + (high - low) * (rank - before) / (count - before)
            )
    raise AssertionError


async def test_every_figure_equals_metrics_and_what_was_killed_is_seen(
    deployment, engines, browser
):
    proxy = deployment.url(PROXY)
    page = await browser.open(f"{proxy}/dashboard")
    await page.wait_for("document.querySelectorAll('.engine[data-state=ready]').length == 3")
    # A p90 needs ten gaps between tokens, and what a proxy reads in one piece has none.
    num_asked = 0
    while not num_asked or total(deployment.metrics(PROXY), f"{ITL}_count") < 20:
        await generate(proxy, 24)
        num_asked += 24

    # Quiet now: the page catches up within a second or two.
    for _ in range(160):
        shown = await page.evaluate(FIGURES)
        told = {"proxy": deployment.metrics(PROXY)}
        for name in engines:
            told[deployment.url(name)] = deployment.metrics(name)
        told["engines"] = {
            f"{key}{'' if '{' in key else '{}'}@{name}": value
            for name in engines
            for key, value in told[deployment.url(name)].items()
        }
        wrong = [
            (of, metric, value, total(told[of], metric))
            for of, metric, value, _ in shown
            if value != total(told[of], metric)
        ]
        if not wrong and total(told["proxy"], 'pdserve_requests_total{outcome="ok"}') == num_asked:
            break
        await asyncio.sleep(0.25)
    assert not wrong
    assert len(shown) >= 45
    assert {of for of, *_ in shown} == set(told)
    text = {metric: shown_as for of, metric, _, shown_as in shown if of == "proxy"}
    assert text['pdserve_requests_total{outcome="ok"}'] == f"{num_asked} answered since start"

    for kind, name in (
        ("ttft", "pdserve_time_to_first_token_seconds"),
        ("itl", ITL),
    ):
        marks = await page.evaluate(VALUES % (f"#{kind}-quantiles", 0))
        expected = {f"p{q}": quantile(q / 100, told["proxy"], name) for q in (50, 90, 99)}
        assert marks == pytest.approx(expected)
        assert expected["p90"] is not None
    for kind, terms in (("ttft", TTFT_TERMS), ("second", SECOND_TERMS)):
        means = await page.evaluate(VALUES % (f"#stack-{kind} .key", 1))
        stage = 'pdserve_stage_duration_seconds_%s{stage="%s"}'
        assert means == {
            term.replace("_", " "): pytest.approx(
                total(told["proxy"], stage % ("sum", term))
                / total(told["proxy"], stage % ("count", term))
            )
            for term in terms
        }

    assert page.hosts() == {proxy.removeprefix("http://")}
    assert not page.errors

    deployment.processes[engines[-1]].kill()
    await page.wait_for(
        f"""document.querySelector('[data-url="{deployment.url(engines[-1])}"]')
            .dataset.state == 'dead'""",
    )
    await page.wait_for("document.getElementById('events').textContent.includes('died')")
    await generate(proxy, 4)
    has_all = f"document.getElementById('k-total').dataset.value == '{num_asked + 4}'"
    await page.wait_for(has_all)

    deployment.processes[PROXY].kill()
    await page.wait_for("document.body.classList.contains('stale')")
    alarm = await page.evaluate("document.getElementById('alarm').textContent")
    assert "does not answer" in alarm
    assert re.search(r"last seen at \d\d:\d\d:\d\d", alarm)
    assert await page.evaluate(has_all)
