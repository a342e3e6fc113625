"""Sweeps of real servers: the highest load is found, and no run knows the prompts of another."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Self

import pytest
from aiohttp import web

from pdserve.bench.endpoint import reset_prefix_caches
from pdserve.bench.sweep import load
from pdserve.bench.target import Target


class QueueingServer:
    """Computes one prompt at a time, `prefill_s` each: it can take 1 / `prefill_s` requests/s."""

    def __init__(self, prefill_s: float, *, reset_status: int = 200) -> None:
        self._prefill_s = prefill_s
        self._reset_status = reset_status
        self._free_s = 0.0
        self.num_resets = 0
        self.prompts: list[list[tuple[int, ...]]] = [[]]
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._complete),
                web.post("/reset_prefix_cache", self._reset),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "queue", "root": "boxed"}]})

    async def _reset(self, request: web.Request) -> web.Response:
        self.num_resets += 1
        self.prompts.append([])
        return web.Response(status=self._reset_status)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.prompts[-1].append(tuple(body["prompt"]))
        loop = asyncio.get_running_loop()
        self._free_s = max(self._free_s, loop.time()) + self._prefill_s
        await asyncio.sleep(self._free_s - loop.time())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chunk = {"choices": [{"text": "x", "finish_reason": "length"}]}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1}
        for event in (chunk, {"choices": [], "usage": usage}):
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


async def run_cli(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pdserve",
        "bench",
        "sweep",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output.decode()


@pytest.mark.e2e
@pytest.mark.alone
@pytest.mark.matrix
@pytest.mark.timeout(240)
async def test_the_capacity_of_a_queue_is_found(tmp_path):
    async with QueueingServer(0.025) as server:
        code, output = await run_cli(
            *("--base-url", server.url, "--slo", "ttft:300", "--request-rates", "20,80"),
            *("--burstiness", "inf", "--tolerance", "0.5", "--num-prompts", "60"),
            *("--random-input-len", "8", "--random-output-len", "1", "--allow-invalid"),
            *("--result-dir", str(tmp_path), "--result-filename", "sweep.json"),
        )
    assert code == 0, output
    sweep = load(tmp_path / "sweep.json")
    # 40 requests/s; 50 are borne for as long as 90 % of 60 requests last. At 80, half are late.
    assert sweep.is_bracketed, output
    assert 20 <= sweep.best_rate <= 51, output
    assert server.num_resets == sum(len(point.runs) for point in sweep.points)
    assert "holds" in output
    assert "fails" in output


@pytest.mark.e2e
@pytest.mark.timeout(240)
@pytest.mark.parametrize("can_reset", [pytest.param(True, marks=pytest.mark.matrix), False])
async def test_no_prompt_of_a_run_is_known_from_the_run_before(tmp_path, can_reset):
    """Either caches are reset, or every run asks other prompts and says so."""
    async with QueueingServer(0.001, reset_status=200 if can_reset else 404) as server:
        code, output = await run_cli(
            *("--base-url", server.url, "--max-concurrencies", "1,2", "--num-prompts", "6"),
            *("--random-input-len", "8", "--random-output-len", "1", "--allow-invalid"),
            *("--result-dir", str(tmp_path), "--result-filename", "sweep.json"),
        )
    assert code == 0, output
    if can_reset:
        first, second = (prompts for prompts in server.prompts if prompts)
        assert set(first) & set(second) >= set(first[-6:])
        assert "did not reset" not in output
    else:
        [*_, both] = server.prompts
        asked = [prompt for prompt in both if len(prompt) == 8]
        assert len(set(asked)) == 12
        assert "did not reset its prefix cache" in output
        assert "/reset_prefix_cache does not exist: 404" in output


async def test_an_endpoint_that_is_gone_says_why_it_forgot_nothing():
    async with QueueingServer(0.001) as server:
        target = Target(base_url=server.url + "/")
        assert await reset_prefix_caches(target) is None
    why_not = await reset_prefix_caches(target)
    assert why_not is not None
    assert "did not answer" in why_not
