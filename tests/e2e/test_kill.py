"""`kill -9` of an engine while requests are in every stage."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.conftest import pd_deployment
from tests.e2e.test_equality import complete, complete_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from tests.e2e.deployment import Deployment

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.matrix, pytest.mark.timeout(400)]

PROMPTS = [[3 + (29 * i + 7 * n) % 311 for i in range(20 + 17 * n)] for n in range(20)]
NUM_TOKENS = 200
LEASE_S = 6.0


def stream_tokens(
    url: str,
    prompt: list[int],
    start_after_s: float,
    num_tokens: int = NUM_TOKENS,
    begun: threading.Event | None = None,
) -> tuple[list[int], str]:
    """Token ids of a stream, and how it ended: finished, or an error's code.

    Args:
        begun: Set when the first event has come.
    """
    time.sleep(start_after_s)
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    tokens: list[int] = []
    end = "cut off without [DONE]"
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, timeout=60, verify=False
    ) as answer:
        if answer.status_code != 200:
            error = json.loads(answer.read())["error"]
            assert error["message"]
            return tokens, str(error["code"])
        # Not iter_lines: it also splits at characters such as U+0085, which JSON may hold.
        for line in lines_of(answer.iter_bytes()):
            if line == "data: [DONE]":
                return tokens, end
            if not line.startswith("data: "):
                continue
            event = json.loads(line.removeprefix("data: "))
            if begun is not None:
                begun.set()
            if "error" in event:
                end = str(event["error"]["code"])
                continue
            for choice in event["choices"]:
                tokens += choice["token_ids"] or []
                if choice["finish_reason"] is not None:
                    end = "finished"
    return tokens, end


def lines_of(chunks: Iterable[bytes]) -> Iterator[str]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.decode() for line in lines)


def begin_streams(
    pool: ThreadPoolExecutor, url: str, prompts: list[list[int]], num_tokens: int = NUM_TOKENS
) -> list[Future[tuple[list[int], str]]]:
    """Streams that begin one after the other; returns when the middle one has."""
    begun = [threading.Event() for _ in prompts]
    streams = [
        pool.submit(stream_tokens, url, prompt, 0.03 * index, num_tokens, begun[index])
        for index, prompt in enumerate(prompts)
    ]
    assert begun[len(prompts) // 2].wait(60)
    return streams


def kill_amid_requests(
    deployment: Deployment, victim: str, prompts: list[list[int]]
) -> dict[str, int]:
    """Kill `victim` while 20 requests run; no wrong token may come out. Returns the ends."""
    # The kernels' answers do not depend on the batch, so this is what P/D must say too.
    expected = complete_all(deployment.url("serve"), prompts, max_tokens=NUM_TOKENS)
    url = deployment.url("proxy")
    with ThreadPoolExecutor(len(prompts)) as pool:
        futures = begin_streams(pool, url, prompts)
        deployment.processes[victim].kill()
        results = [future.result(timeout=90) for future in futures]
    ends: dict[str, int] = {}
    for (tokens, end), right in zip(results, expected, strict=True):
        ends[end] = ends.get(end, 0) + 1
        assert tokens == right[: len(tokens)], "a wrong token behind a 200"
        assert end != "finished" or tokens == right
        assert not end.startswith("cut off")
    return ends


def is_used_again(deployment: Deployment, name: str, prompt: list[int]) -> None:
    """Start an engine at the address it had: KV moves, and nothing is left of it."""
    port = deployment.url(name).rsplit(":", 1)[1]
    flags = deployment.processes[name].arguments
    arguments = [port if flags[i - 1] == "--port" else flag for i, flag in enumerate(flags)]
    deployment.start(name, *arguments)
    deployment.wait(name)
    deployment.wait_routable()
    before = deployment.metric("decode", "pdserve_kv_transfer_bytes_total")
    again = complete(deployment.url("proxy"), prompt, max_tokens=20)
    assert again == complete(deployment.url("serve"), prompt, max_tokens=20)
    assert deployment.metric("decode", "pdserve_kv_transfer_bytes_total") > before
    deployment.wait_nothing_held("prefill", "decode", timeout_s=20.0)


@pytest.fixture(scope="module")
def deployment(
    model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    flags = ["--dtype", "float32", "--kv-transfer-config.lease-s", str(LEASE_S)]
    directory = tmp_path_factory.mktemp("kill")
    with pd_deployment(directory, model_of("llama"), *flags, with_serve=True) as deployment:
        yield deployment


def test_killing_the_prefill_engine_loses_no_stream_and_it_is_used_again(
    deployment: Deployment,
) -> None:
    ends = kill_amid_requests(deployment, "prefill", PROMPTS)
    print(f"\nP killed: {ends}")
    assert ends.get("finished", 0) > 0
    # D goes on serving, alone.
    alone = complete(deployment.url("proxy"), PROMPTS[5], max_tokens=20)
    assert alone == complete(deployment.url("serve"), PROMPTS[5], max_tokens=20)
    deployment.wait_nothing_held("decode", timeout_s=20.0)
    is_used_again(deployment, "prefill", [7, *PROMPTS[9]])


def test_killing_the_decode_engine_leaves_no_lease_and_it_is_used_again(
    deployment: Deployment,
) -> None:
    # Prompts that no engine has in its cache.
    ends = kill_amid_requests(deployment, "decode", [[5, *prompt] for prompt in PROMPTS])
    print(f"\nD killed: {ends}")
    # What the dead engine had not read is given back, at the latest when its lease ends.
    deployment.wait_nothing_held("prefill", timeout_s=LEASE_S + 20.0)
    is_used_again(deployment, "decode", [9, *PROMPTS[9]])
