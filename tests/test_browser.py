"""The browser that tests drive tells the truth: about errors, requests and refusals."""

from __future__ import annotations

import asyncio

import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.browser import BrowserError, needs_browser, start_chromium

pytestmark = [needs_browser, pytest.mark.slow]


async def test_a_page_is_driven_and_what_it_does_is_known(browser, tmp_path):
    async def page_of(request):
        if request.headers.get("Authorization") != "Basic dTpw":
            return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="x"'})
        return web.Response(
            content_type="text/html",
            text="<meta name=viewport content='width=device-width'><title>t</title>"
            "<button onclick='n=1'>b</button><script>"
            "n=0; console.error('odd', 3); fetch('http://192.0.2.1/x').catch(() => 0);"
            "setTimeout(() => { throw new Error('thrown') })</script>",
        )

    app = web.Application()
    app.add_routes([web.get("/", page_of)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        page = await browser.open(width=390)
        await page.authenticate("u", "p")
        await page.goto(f"http://127.0.0.1:{port}/")
        assert await page.evaluate("document.title") == "t"
        assert await page.evaluate("innerWidth") == 390
        assert await page.evaluate("Promise.resolve(7)") == 7
        await page.press("Tab")
        await page.press("Enter")
        await page.wait_for("n == 1")
        with pytest.raises(BrowserError, match="nope"):
            await page.evaluate("nope()")
        with pytest.raises(BrowserError, match="not within"):
            await page.wait_for("false", timeout_s=0.2)
        assert page.hosts() == {f"127.0.0.1:{port}", "192.0.2.1"}
        async with asyncio.timeout(20):
            while len(page.errors) < 2:
                await asyncio.sleep(0.02)
        assert "odd 3" in page.errors
        assert any("thrown" in error for error in page.errors)
        await page.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    finally:
        await runner.cleanup()


async def test_what_one_test_leaves_in_the_browser_another_does_not_find(browser, chromium):
    async def page_of(request):
        return web.Response(content_type="text/html", text="<p>")

    app = web.Application()
    app.add_routes([web.get("/", page_of)])
    async with TestServer(app) as server, chromium.connect() as another:
        pages = [await each.open(str(server.make_url("/"))) for each in (browser, another)]
        await pages[0].evaluate("document.cookie = 'a=b'; localStorage.setItem('c', 'd')")
        found = [
            await page.evaluate("[document.cookie, localStorage.getItem('c')]") for page in pages
        ]
    assert found == [["a=b", "d"], ["", None]]


def test_nothing_of_a_browser_is_left_when_it_has_ended(tmp_path):
    with start_chromium(tmp_path) as chromium:
        family = psutil.Process(chromium.pid).children(recursive=True)
        assert family
    assert not psutil.wait_procs(family, timeout=10)[1]
    assert not psutil.pid_exists(chromium.pid)
