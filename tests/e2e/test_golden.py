"""The bytes a client gets, per endpoint, as they were recorded.

A change of these bytes is a change of what users see. To record them again, on purpose:

    PDSERVE_RECORD_GOLDEN=1 python -m pytest tests/e2e/test_golden.py

and read the difference before it is committed. They do not depend on the machine: float32,
greedy, weights from a generator whose stream NumPy has frozen, and between the two likeliest
tokens always more than rounding can turn (`test_no_recorded_token_was_a_close_call`).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from tests.e2e.deployment import Deployment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

GOLDEN = Path(__file__).parent / "golden"
RECORD = os.environ.get("PDSERVE_RECORD_GOLDEN") == "1"
REQUEST_ID = "golden-0001"
COMMON: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0, "seed": 1}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "All that is gold"}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Who are you?"}]}),
}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def url(sharp: tuple[Path, Deployment]) -> str:
    """A proxy with one P and one D."""
    return sharp[1].url("proxy")


def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    answer = httpx.post(
        f"{url}{path}",
        json=body,
        headers={"X-Request-Id": REQUEST_ID},
        timeout=60,
        verify=False,
    )
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", REQUESTS)
def test_the_bytes_are_those_recorded(name: str, stream: bool, url: str) -> None:
    path, fields = REQUESTS[name]
    # In a cache of its own: what was asked before is not to be seen in the usage.
    fields = fields | {"cache_salt": f"{name} {stream}"}
    answer = post(url, path, COMMON | fields | (STREAM if stream else {}))
    kind = "text/event-stream; charset=utf-8" if stream else "application/json"
    assert answer.headers["Content-Type"] == kind
    assert answer.headers["X-Request-Id"] == REQUEST_ID
    assert len(set(re.findall(rb'"created":(\d+)', answer.content))) == 1
    found = re.sub(rb'"created":\d+', b'"created":0', answer.content)
    file = GOLDEN / f"{name}_{'stream' if stream else 'whole'}.txt"
    if RECORD:
        file.write_bytes(found)
    assert found == file.read_bytes()


@pytest.mark.parametrize("name", REQUESTS)
def test_no_recorded_token_was_a_close_call(name: str, url: str) -> None:
    path, fields = REQUESTS[name]
    logprobs = {"logprobs": True, "top_logprobs": 2} if name == "chat" else {"logprobs": 2}
    choice = post(url, path, COMMON | fields | logprobs).json()["choices"][0]
    if name == "chat":
        tops = [
            [top["logprob"] for top in row["top_logprobs"]] for row in choice["logprobs"]["content"]
        ]
    else:
        tops = [sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"]]
    margins = [top[0] - top[1] for top in tops if len(top) > 1]
    assert min(margins) > 0.01
    assert len(margins) == COMMON["max_tokens"]
