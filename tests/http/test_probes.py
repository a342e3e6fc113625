"""`/ping`, and paths behind a reverse proxy, at a proxy and at an engine's server alike."""

from __future__ import annotations

import aiohttp
import pytest


async def test_ping_is_asked_by_either_method_and_answers_as_health_does(serve):
    url = await serve()
    async with aiohttp.ClientSession() as client:
        for method in ("GET", "POST"):
            async with client.request(method, f"{url}/ping") as response:
                assert (response.status, await response.read()) == (200, b"")


@pytest.mark.parametrize("root", ["/llm", "/models/tiny"])
async def test_paths_are_served_with_what_stands_before_them_and_without(serve, root):
    url = await serve({"root_path": root})
    async with aiohttp.ClientSession() as client:

        async def status(path: str) -> int:
            async with client.get(url + path) as response:
                return response.status

        for path in ("/v1/models", "/v1/models/tiny", "/debug/requests?finished=1", "/readyz"):
            assert [await status(path), await status(root + path)] == [200, 200]
        for path in (f"{root}x/v1/models", f"{root}{root}/v1/models", root):
            assert await status(path) == 404
        async with client.post(f"{url}{root}/v1/completions", json={"prompt": "The"}) as response:
            assert response.status == 200
        async with client.get(f"{url}{root}/openapi.json") as response:
            assert (await response.json())["servers"] == [{"url": root}]


async def test_what_needs_a_key_needs_it_behind_a_root_path_too(serve):
    url = await serve({"root_path": "/llm", "api_keys": ("key",), "operator_keys": ("more",)})
    async with aiohttp.ClientSession() as client:
        for path in ("/v1/models", "/debug/requests"):
            async with client.get(f"{url}/llm{path}") as response:
                assert response.status == 401
