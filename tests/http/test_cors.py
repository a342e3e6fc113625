"""Pages of other origins, at a proxy and at an engine's server alike."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from pdserve.config.http import CorsConfig
from pdserve.errors import ConfigError
from tests.http.conftest import connected

PAGE = "https://chat.example.com"
PATH = "/v1/completions"


async def ask(
    url: str, path: str = PATH, *, method: str = "POST", **headers: str
) -> tuple[int, dict[str, str]]:
    """Ask as a page's browser; return the status, and what concerns pages."""
    named = {"Origin": PAGE} | {name.replace("_", "-"): v for name, v in headers.items()}
    body = {"prompt": "The", "max_tokens": 1, "stream": True} if method == "POST" else None
    async with (
        aiohttp.ClientSession() as client,
        client.request(method, url + path, json=body, headers=named) as response,
    ):
        await response.read()
        told = {name.removeprefix("Access-Control-"): v for name, v in response.headers.items()}
        return response.status, {n: told[n] for n in told if n.startswith(("Allow-", "Vary"))}


async def may_ask(url: str, method: str = "POST", headers: str = "", **more: Any) -> Any:
    """What a browser asks first."""
    named = {"Access_Control_Request_Method": method, "Access_Control_Request_Headers": headers}
    return await ask(url, method="OPTIONS", **{n: v for n, v in named.items() if v}, **more)


async def test_any_page_may_ask_what_is_a_clients_as_with_vllm(serve):
    url = await serve({"api_keys": ("key",)})
    status, told = await may_ask(url, "POST", "authorization, content-type")
    assert (status, told["Allow-Origin"], told["Allow-Methods"]) == (200, "*", "POST")
    assert told["Allow-Headers"] == "authorization, content-type"
    assert await ask(url, Authorization="Bearer key") == (200, {"Allow-Origin": "*"})
    assert await ask(url) == (401, {"Allow-Origin": "*"}), "or the page could not read why"


async def test_only_pages_of_the_named_origins_may_ask(serve):
    url = await serve({"cors": CorsConfig(allowed_origins=(PAGE, "http://localhost:3000"))})
    assert (await may_ask(url))[1]["Allow-Origin"] == PAGE
    assert await ask(url) == (200, {"Allow-Origin": PAGE, "Vary": "Origin"})
    assert await ask(url, Origin="https://evil.example.com") == (200, {"Vary": "Origin"})
    status, told = await may_ask(url, Origin="https://evil.example.com")
    assert status == 400
    assert "Allow-Origin" not in told


async def test_methods_and_headers_may_be_named_too(serve):
    cors = CorsConfig(allowed_methods=("GET",), allowed_headers=("X-Request-Id",))
    url = await serve({"cors": cors})
    assert (await may_ask(url, "POST"))[0] == 400
    assert (await may_ask(url, "GET", "x-request-id, content-type"))[0] == 200
    assert (await may_ask(url, "GET", "authorization"))[0] == 400


@pytest.mark.parametrize(
    "header",
    [
        b"Origin: \xff",
        b"Access-Control-Request-Method: \xff",
        b"Access-Control-Request-Headers: \xff",
    ],
)
async def test_a_preflight_that_is_not_utf_8_is_refused(serve, header, caplog):
    cors = CorsConfig(allowed_origins=(PAGE,), allowed_methods=("GET",), allowed_headers=("X-A",))
    asked = {b"Host": b"x", b"Origin": PAGE.encode(), b"Access-Control-Request-Method": b"GET"}
    name, _, value = header.partition(b": ")
    lines = [b"%b: %b" % each for each in (asked | {name: value}).items()]
    async with connected(await serve({"cors": cors})) as wire:
        wire.send(b"\r\n".join([b"OPTIONS /v1/completions HTTP/1.1", *lines, b"", b""]))
        status, error = await wire.refusal()
    assert (status, error["code"]) == (400, "cors_refused")
    assert "Traceback" not in caplog.text


async def test_credentials_are_for_origins_by_their_name(serve):
    url = await serve({"cors": CorsConfig(allow_credentials=True)})
    expected = {"Allow-Origin": PAGE, "Allow-Credentials": "true", "Vary": "Origin"}
    assert await ask(url) == (200, expected)


@pytest.mark.parametrize(
    "path", ["/debug/requests", "/drain", "/reset_prefix_cache", "/pdserve/release"]
)
async def test_what_is_no_clients_is_given_to_no_page(serve, path):
    url = await serve()
    assert (await ask(url, path, method="GET"))[1] == {}
    assert (await may_ask(url, "GET", path=path))[0] != 200


async def test_who_is_no_page_gets_nothing_more(serve):
    async with (
        aiohttp.ClientSession() as client,
        client.get(await serve() + "/v1/models") as response,
    ):
        assert not [name for name in response.headers if name.startswith("Access-Control")]


def test_an_origin_with_a_path_would_fit_no_page():
    with pytest.raises(ConfigError, match="--allowed-origins is 'https://x/chat': write origins"):
        CorsConfig(allowed_origins=("https://x/chat",))
