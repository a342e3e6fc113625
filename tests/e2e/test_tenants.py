"""Two tenants before real processes: prompts of the one over its share let the other's pass."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.e2e.conftest import pd_deployment
from tests.tiny_models import write_tiny_model
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.deployment import Deployment

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

_TENANT = "X-Tenant"
_LONG = 12_000


@contextmanager
def shared(directory: Path, *proxy_flags: str) -> Iterator[Deployment]:
    """A pair of engines that take many steps for a long prompt, before tenants that are named."""
    model = write_tiny_model(directory / "model", max_position_embeddings=2 * _LONG)
    steps = ("--max-num-batched-tokens", "32", "--max-num-seqs", "8", "--no-enable-prefix-caching")
    flags = ("--tenant-header", _TENANT, *proxy_flags)
    with pd_deployment(directory, model, *steps, proxy_flags=flags) as running:
        yield running


def served_first(running: Deployment, url: str) -> list[str]:
    """Send a long prompt of a tenant over its share, then another's short one, while it computes.

    Returns:
        The tenants, in the order of their first tokens.
    """
    order: list[str] = []

    def ask(tenant: str, num_tokens: int) -> None:
        body = {"prompt": "a" * num_tokens, "max_tokens": 4, "ignore_eos": True, "stream": True}
        with httpx.stream(
            "POST",
            f"{url}/v1/completions",
            json=body,
            headers={_TENANT: tenant},
            timeout=60,
            verify=False,
        ) as answer:
            assert answer.status_code == 200
            for number, _ in enumerate(answer.iter_bytes()):
                if not number:
                    order.append(tenant)

    ask("greedy", _LONG)
    ask("modest", 8)
    order.clear()
    with ThreadPoolExecutor(1) as beside:
        long = beside.submit(ask, "greedy", _LONG)
        wait_until(lambda: running.info("prefill")["stats"]["num_running"])
        ask("modest", 8)
        long.result()
    return order


def test_a_prompt_passes_that_of_a_tenant_over_its_share_at_a_real_engine(tmp_path):
    with shared(tmp_path) as running:
        assert served_first(running, running.url("proxy")) == ["modest", "greedy"]
