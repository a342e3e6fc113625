"""A real browser for tests: Debian's chromium without a window, driven over its DevTools protocol.

    async def test_it(browser):
        page = await browser.open("http://127.0.0.1:8000/dashboard", width=1440, height=900)
        assert await page.evaluate("document.title") == "pdserve"
        assert not page.errors
        assert page.hosts() == {"127.0.0.1:8000"}

All tests of a process share one chromium, whose start takes a second of a core; each has a context
of its own there: cookies, passwords, cache, tabs. It ends by pid. It resolves no names, so that
nothing it loads can come from outside; what it asked for is in `Page.requests`. Use `needs_browser`
on tests: where chromium is missing they are skipped, and fail in CI.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from pdserve.lifeline import end_with_parent

START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 40.0
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
IS_CI = os.environ.get("CI", "").lower() in {"1", "true"}

needs_browser = pytest.mark.skipif(
    CHROMIUM is None and not IS_CI, reason="chromium is not installed (apt-get install chromium)"
)

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--mute-audio",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-extensions",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-domain-reliability",
    "--disable-features=Translate,OptimizationHints,MediaRouter,AutofillServerCommunication",
    "--metrics-recording-only",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)


class BrowserError(AssertionError):
    """The browser, or a script in the page, failed."""


class Page:
    """One tab.

    Attributes:
        requests: URLs it asked for, in order, those of frames and workers too.
        responses: Status by URL, as of the last answer.
        failed: (URL, reason) of requests that got no answer.
        errors: Exceptions of its scripts, `console.error`, and what the browser complains of
            (refusals by the content security policy among them), as text.
    """

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser = browser
        self._target = target
        self._session = session
        self._loaded = asyncio.Event()
        self._urls: dict[str, str] = {}
        self.credentials: tuple[str, str] | None = None
        self.requests: list[str] = []
        self.responses: dict[str, int] = {}
        self.failed: list[tuple[str, str]] = []
        self.errors: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol in this tab."""
        return await self._browser.call(method, params, session=self._session)

    def hosts(self) -> set[str]:
        """host:port of everything it asked for; data: and blob: are no requests."""
        parts = [urlsplit(url) for url in self.requests]
        return {part.netloc for part in parts if part.scheme not in {"data", "blob", "about"}}

    async def goto(self, url: str, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Load `url`; return once its load event has fired.

        Raises:
            BrowserError: It cannot be loaded.
        """
        self._loaded.clear()
        answer = await self.call("Page.navigate", url=url)
        if answer.get("errorText"):
            raise BrowserError(f"{url}: {answer['errorText']}")
        async with asyncio.timeout(timeout_s):
            await self._loaded.wait()

    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, a promise's once it is fulfilled.

        Raises:
            BrowserError: It threw.
        """
        answer = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(_describe(answer["exceptionDetails"]))
        return answer["result"].get("value")

    async def wait_for(self, expression: str, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Evaluate until the value is truthy; return it (an element is no value: write `!!`).

        Raises:
            BrowserError: It never was; the message has the last value and the page's errors.
        """
        last: Any = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (last := await self.evaluate(expression)):
                    await asyncio.sleep(0.05)
                return last
        raise BrowserError(
            f"not within {timeout_s} s: {expression} is {last!r}; errors: {self.errors}"
        )

    async def resize(
        self, width: int, height: int, *, scale: float = 1.0, mobile: bool = False
    ) -> None:
        """Set the viewport, in CSS pixels."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=mobile,
        )

    async def emulate(self, **features: str) -> None:
        """Set media features: `emulate(prefers_color_scheme="dark")`."""
        pairs = [{"name": n.replace("_", "-"), "value": v} for n, v in features.items()]
        await self.call("Emulation.setEmulatedMedia", features=pairs)

    async def set_headers(self, headers: Mapping[str, str]) -> None:
        """Send these with every request of this tab."""
        await self.call("Network.setExtraHTTPHeaders", headers=dict(headers))

    async def authenticate(self, username: str, password: str) -> None:
        """Answer a server's Basic challenge with these, as a person at the dialog would."""
        self.credentials = (username, password)
        await self.call("Fetch.enable", handleAuthRequests=True)

    async def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key: Tab, Enter, Escape, a letter."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "ArrowDown": 40, "ArrowUp": 38}
        text = {"Enter": "\r", " ": " "}.get(key, key if len(key) == 1 else "")
        common = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": codes.get(key, 0),
            "modifiers": 8 if shift else 0,
        }
        down = {"text": text} if text else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **common, **down)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def screenshot(self, path: Path, *, full: bool = False) -> None:
        """Write a PNG of the viewport, or of the whole page."""
        clip: dict[str, Any] = {}
        if full:
            metrics = await self.call("Page.getLayoutMetrics")
            size = metrics["cssContentSize"]
            clip = {
                "captureBeyondViewport": True,
                "clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"]}
                | {"scale": 1},
            }
        answer = await self.call("Page.captureScreenshot", format="png", **clip)
        path.write_bytes(base64.b64decode(answer["data"]))

    async def close(self) -> None:
        """Close the tab."""
        await self._browser.call("Target.closeTarget", {"targetId": self._target})

    async def prepare(self) -> None:
        """Begin to listen to it."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")

    def on_event(self, method: str, params: dict[str, Any]) -> None:
        """Take note of what the browser says about this tab."""
        match method:
            case "Page.loadEventFired":
                self._loaded.set()
            case "Network.requestWillBeSent":
                url = params["request"]["url"]
                self._urls[params["requestId"]] = url
                self.requests.append(url)
            case "Network.responseReceived":
                response = params["response"]
                self.responses[response["url"]] = response["status"]
            case "Network.webSocketCreated":
                self.requests.append(params["url"])
            case "Network.loadingFailed":
                url = self._urls.get(params["requestId"], "?")
                self.failed.append((url, params["errorText"]))
            case "Runtime.exceptionThrown":
                self.errors.append(_describe(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in {"error", "assert"}:
                values = [str(a.get("value", a.get("description"))) for a in params["args"]]
                self.errors.append(" ".join(values))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                entry = params["entry"]
                self.errors.append(f"{entry['text']} {entry.get('url', '')}".strip())
            case "Fetch.authRequired":
                assert self.credentials is not None
                username, password = self.credentials
                self._reply(
                    "Fetch.continueWithAuth",
                    requestId=params["requestId"],
                    authChallengeResponse={
                        "response": "ProvideCredentials",
                        "username": username,
                        "password": password,
                    },
                )
            case "Fetch.requestPaused":
                self._reply("Fetch.continueRequest", requestId=params["requestId"])

    def _reply(self, method: str, **params: Any) -> None:
        self._browser.start(self.call(method, **params))


class Browser:
    """A context of a chromium, with as many tabs as are opened."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._context = ""
        self._next_id = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reader = asyncio.create_task(self._read())

    async def open(
        self,
        url: str = "about:blank",
        *,
        width: int = 1440,
        height: int = 900,
        scale: float = 1.0,
        scheme: str = "light",
    ) -> Page:
        """Open a tab on `url`; `scheme` is the preferred colour scheme."""
        if not self._context:
            context = await self.call("Target.createBrowserContext", {"disposeOnDetach": True})
            self._context = context["browserContextId"]
        where = {"url": "about:blank", "browserContextId": self._context}
        target = (await self.call("Target.createTarget", where))["targetId"]
        attached = await self.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        page = Page(self, target, attached["sessionId"])
        self._pages[attached["sessionId"]] = page
        await page.prepare()
        await page.resize(width, height, scale=scale, mobile=width < 600)
        await page.emulate(prefers_color_scheme=scheme)
        if url != "about:blank":
            await page.goto(url)
        return page

    async def call(
        self, method: str, params: Mapping[str, Any] | None = None, *, session: str = ""
    ) -> dict[str, Any]:
        """Call a method of the DevTools protocol.

        Raises:
            BrowserError: The browser refuses, or does not answer.
        """
        self._next_id += 1
        number = self._next_id
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": dict(params or {})}
        await self._socket.send_json(message | ({"sessionId": session} if session else {}))
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise BrowserError(f"{method}: no answer within {CALL_TIMEOUT_S} s") from None
        finally:
            del self._answers[number]

    def start(self, work: Any) -> None:
        """Run something beside what the test does."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End the connection, with which its context and its tabs end."""
        for task in (self._reader, *self._tasks):
            task.cancel()
        await asyncio.gather(self._reader, *self._tasks, return_exceptions=True)
        await self._socket.close()

    async def _read(self) -> None:
        async for message in self._socket:
            said = message.json()
            if "id" in said:
                answer = self._answers.get(said["id"])
                if answer is None or answer.done():
                    continue
                if "error" in said:
                    answer.set_exception(BrowserError(str(said["error"])))
                else:
                    answer.set_result(said["result"])
            elif (page := self._pages.get(said.get("sessionId", ""))) is not None:
                page.on_event(said["method"], said["params"])


@dataclass(frozen=True)
class Chromium:
    """A process, and where it takes connections."""

    pid: int
    url: str

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[Browser]:
        """A context of its own, until the block ends."""
        async with aiohttp.ClientSession() as client:
            browser = Browser(await client.ws_connect(self.url, max_msg_size=0))
            try:
                yield browser
            finally:
                await browser.close()


@contextlib.contextmanager
def start_chromium(directory: Path) -> Iterator[Chromium]:
    """Start chromium with a profile in `directory`; end it and all its processes afterwards."""
    assert CHROMIUM is not None, "chromium is not installed: apt-get install chromium"
    profile, log_path = directory / "chromium", directory / "chromium.log"
    profile.mkdir(parents=True)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "HOME": str(directory), "DBUS_SESSION_BUS_ADDRESS": "disabled:"},
            start_new_session=True,
            # Where the tests themselves are killed, nobody is left to end it.
            preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
        )
    try:
        yield Chromium(process.pid, _debugger_url(process, profile, log_path))
    finally:
        # Its own session: no other process is in the group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(profile, ignore_errors=True)


def _debugger_url(process: subprocess.Popen[bytes], profile: Path, log: Path) -> str:
    """Wait until the browser has written where it listens."""
    found = profile / "DevToolsActivePort"
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        lines = found.read_text().splitlines() if found.exists() else []
        if len(lines) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(0.02)
    raise BrowserError(f"chromium did not start:\n{log.read_text(errors='replace')}")


def _describe(details: dict[str, Any]) -> str:
    thrown = details.get("exception", {})
    return str(thrown.get("description") or thrown.get("value") or details["text"])


async def _main(url: str, path: str, width: int, scheme: str) -> None:
    """`python -m tests.browser URL FILE.png [WIDTH] [light|dark]`: a picture of a page."""
    with tempfile.TemporaryDirectory() as directory, start_chromium(Path(directory)) as chromium:
        async with chromium.connect() as browser:
            page = await browser.open(url, width=width, height=900, scheme=scheme)
            await asyncio.sleep(2)
            await page.screenshot(Path(path), full=True)
            print({"errors": page.errors, "hosts": sorted(page.hosts())})


if __name__ == "__main__":
    asyncio.run(
        _main(
            sys.argv[1],
            sys.argv[2],
            int(sys.argv[3]) if len(sys.argv) > 3 else 1440,
            sys.argv[4] if len(sys.argv) > 4 else "light",
        )
    )
