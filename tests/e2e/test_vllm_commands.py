"""The commands of vLLM's page on its NixlConnector, with `pdserve` in place of `vllm`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.cli.process import free_ports
from tests.e2e.deployment import Deployment
from tests.e2e.test_equality import assert_kv_moved, complete

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

TRANSFER = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "fail",
}


@pytest.mark.matrix
def test_two_engines_of_serve_are_prefill_and_decode_behind_a_proxy(
    model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    running = Deployment(tmp_path)
    ports = dict(zip(("prefill", "decode"), free_ports(2), strict=True))
    try:
        for name, port in ports.items():
            running.start(
                name,
                "serve",
                str(model_of("llama")),
                *("--port", str(port), "--enforce-eager", "--async-scheduling", "--dtype", "float"),
                *("--kv-transfer-config", json.dumps(TRANSFER)),
                env={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports(1)[0])},
            )
        urls = [word for name, port in ports.items() for word in (f"--{name}", _url(port))]
        running.start("proxy", "proxy", "--port", "0", *urls)
        running.wait()
        running.wait_routable()
        prompt = list(range(3, 100))
        tokens = complete(running.url("proxy"), prompt)
        assert_kv_moved(running, len(prompt))
        assert complete(running.url("decode"), prompt, cache_salt="alone") == tokens
        assert "--async-scheduling changes nothing" in running.processes["decode"].log
    finally:
        running.end()


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"
