"""Clients and operators, at a proxy and at an engine's server alike."""

from __future__ import annotations

import socket

import aiohttp
import aiohttp.web
import pytest

from pdserve.http import openapi
from pdserve.http.replies import ErrorAnswer

API, OPERATOR = "a client's key", "the operator's key"
GENERATION = ("POST", "/v1/completions")
OPERATIONS = [
    ("GET", "/debug/requests"),
    ("GET", "/debug/trace?seconds=1"),
    ("POST", "/reset_prefix_cache"),
]
ELSEWHERE = "192.0.2.7"


async def ask(url: str, door: tuple[str, str], key: str = "", **headers: str) -> tuple[int, str]:
    """Ask with a key; return the status and the error's code."""
    if key:
        headers["Authorization"] = f"Bearer {key}"
    method, path = door
    body = {"prompt": "The", "max_tokens": 1} if door is GENERATION else None
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url + path, json=body, headers=headers) as response,
    ):
        if response.status == 200:
            return 200, ""
        error = (await response.json())["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return response.status, error["code"]


def from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiohttp.web.BaseRequest, "remote", ELSEWHERE)


@pytest.mark.parametrize("door", OPERATIONS)
async def test_where_there_is_an_operator_key_no_clients_key_opens_what_is_an_operators(
    serve, door, monkeypatch
):
    url = await serve({"api_keys": (API,), "operator_keys": (OPERATOR,)})
    assert await ask(url, door, API) == (401, "invalid_api_key")
    assert await ask(url, door) == (401, "invalid_api_key")
    from_elsewhere(monkeypatch)
    assert (await ask(url, door, OPERATOR))[0] == 200


async def test_an_operator_may_do_what_a_client_may(serve):
    url = await serve({"api_keys": (API,), "operator_keys": (OPERATOR,)})
    for key, status in ((API, 200), (OPERATOR, 200), ("", 401), ("other", 401)):
        assert (await ask(url, GENERATION, key))[0] == status


async def test_whatever_clients_send_work_to_needs_their_key(serve):
    url = await serve({"api_keys": (API,)})
    for each in openapi.COMMON:
        if each.body is not None and each.error is ErrorAnswer:
            assert await ask(url, ("POST", each.path)) == (401, "invalid_api_key"), each.path


async def test_a_key_is_taken_in_each_header_that_the_document_names_and_in_no_other(serve):
    url = await serve({"api_keys": (API,)})
    schemes = openapi.document("both", openapi.COMMON)["components"]["securitySchemes"]
    named = {each.get("name", "Authorization") for each in schemes.values()}
    ways = {"Authorization": f"Bearer {API}", "X-Api-Key": API, "Api-Key": API}
    taken = {
        name for name, key in ways.items() if await ask(url, GENERATION, **{name: key}) == (200, "")
    }
    assert named == taken


async def test_an_operator_key_alone_asks_clients_for_none(serve):
    url = await serve({"operator_keys": (OPERATOR,)})
    assert (await ask(url, GENERATION))[0] == 200
    assert (await ask(url, OPERATIONS[0]))[0] == 401


@pytest.mark.parametrize("door", OPERATIONS)
@pytest.mark.parametrize("keys", [(), (API,)])
async def test_without_an_operator_key_only_this_host_may_do_what_is_an_operators(
    serve, door, keys, monkeypatch
):
    url = await serve({"api_keys": keys})
    assert (await ask(url, door, API))[0] == 200
    if keys:
        assert (await ask(url, door))[0] == 401
    for passed_on in ("X-Forwarded-For", "X-Forwarded-Proto", "X-Real-IP", "Via", "Forwarded"):
        given = await ask(url, door, API, **{passed_on: ELSEWHERE})
        assert given == (403, "operator_key_required")
    from_elsewhere(monkeypatch)
    assert await ask(url, door, API) == (403, "operator_key_required")


async def test_a_web_page_resets_nothing(serve):
    url = await serve()
    door = ("POST", "/reset_prefix_cache")
    assert (await ask(url, door, Origin="http://evil.example"))[0] == 403


@pytest.mark.parametrize("door", OPERATIONS)
async def test_a_page_whose_sites_name_was_led_to_this_host_is_none_of_its_programs(serve, door):
    url = await serve()
    for host in ("evil.example:8000", "evil.example", "[::1", "127.0.0.1.evil.example"):
        assert await ask(url, door, Host=host) == (403, "operator_key_required")
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", f"{socket.gethostname()}:8000"):
        assert (await ask(url, door, Host=host))[0] == 200


@pytest.mark.parametrize("path", ["/livez", "/metrics", "/version"])
async def test_probes_need_no_key(serve, path, monkeypatch):
    url = await serve({"api_keys": (API,), "operator_keys": (OPERATOR,)})
    from_elsewhere(monkeypatch)
    async with aiohttp.ClientSession() as session, session.get(url + path) as response:
        assert response.status == 200
