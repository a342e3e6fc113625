"""Engines on a CUDA device and a store in the host's memory: the tokens of one without a store."""

from __future__ import annotations

import mmap
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from pdserve.config.boxed import boxed_model_dir
from pdserve.connectors.digests import beside_steps
from pdserve.connectors.lmcache.slots import reach_from
from pdserve.kernels.digest import place_keys, word_constants
from pdserve.kernels.registry import kernels_on
from tests.e2e.deployment import Deployment
from tests.e2e.test_equality import complete_all
from tests.gpu.test_serving import FLAGS, SAMPLED
from tests.lmcache_server import LMCacheServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

PROMPTS = [[3 + (17 * i + 5 * n) % 311 for i in range(n)] for n in (100, 333, 700)]
CHUNK = 64


@contextmanager
def engine(folder: Path, *flags: str) -> Iterator[Deployment]:
    """One on the device, that serves alone."""
    folder.mkdir()
    deployment = Deployment(folder)
    try:
        model = str(boxed_model_dir())
        deployment.start("serve", "serve", model, "--port", "0", "--num-threads", "1", *flags)
        deployment.wait()
        yield deployment
    finally:
        deployment.end()


def counted(deployment: Deployment, series: str) -> float:
    found = deployment.metrics("serve")
    return sum(value for name, value in found.items() if name.partition("{")[0] == series)


def tokens(deployment: Deployment) -> list[list[int]]:
    url = deployment.url("serve")
    return complete_all(url, PROMPTS) + complete_all(url, PROMPTS, **SAMPLED)


@pytest.mark.parametrize(("writer", "reader"), [(16, 64), (64, 16)])
def test_what_an_engine_has_saved_another_loads_and_both_give_the_tokens_of_one_without_a_store(
    cuda: torch.device, tmp_path: Path, writer: int, reader: int
) -> None:
    with engine(tmp_path / "alone", *FLAGS) as alone:
        wanted = tokens(alone)
    with LMCacheServer(tmp_path / "store.log", chunk_tokens=CHUNK) as server:
        store = ["--kv-transfer-config.kv-connector", "lmcache"]
        store += ["--kv-transfer-config.lmcache.url", server.url]
        for name, block_size in (("writer", writer), ("reader", reader)):
            flags = [*FLAGS, *store, "--block-size", str(block_size)]
            with engine(tmp_path / name, *flags) as deployment:
                assert tokens(deployment) == wanted
                deployment.wait_nothing_held("serve", timeout_s=20.0)
                # The last token of a prompt is always computed.
                num_whole = sum((len(prompt) - 1) // CHUNK * CHUNK for prompt in PROMPTS)
                hits = counted(deployment, "vllm:external_prefix_cache_hits_total")
                assert hits == (num_whole if name == "reader" else 0)
                assert counted(deployment, "pdserve_kv_tier_digest_mismatches_total") == 0


def test_a_mapping_is_written_and_read_by_the_device_beside_its_steps(cuda: torch.device) -> None:
    shape, num_places, planes, heads = (9, 3, 2, 4, 16, 128), 64, 2, 4
    kv = torch.randn(shape, dtype=torch.bfloat16, device=cuda)
    other = torch.zeros_like(kv)
    pool = np.frombuffer(mmap.mmap(-1, 1 << 24), np.uint8)
    wanted_pool = torch.zeros(1 << 24, dtype=torch.uint8)
    reach_from(cuda, pool)
    size = kv[0, :, :, 0].nbytes * 4
    blocks, starts = torch.tensor([[7, 1, 4, 8]]), 4096 + size * torch.arange(heads)[None]
    others = torch.tensor([[0, 3, 2, -1]])
    rest = starts, word_constants(num_places, 64), place_keys(range(3), planes, range(heads))
    here, there = kernels_on(cuda), kernels_on(torch.device("cpu"))
    wanted = there.gather_chunks(kv.cpu(), blocks, wanted_pool, *rest)
    # The first time they are compiled, and memory is allocated, for which the device is waited.
    with beside_steps(kv):
        here.gather_chunks(kv, blocks, torch.from_numpy(pool), *rest)
        here.scatter_chunks(torch.zeros_like(kv), others, torch.from_numpy(pool), *rest)
    pool[:] = 0
    torch.cuda.synchronize()

    torch.cuda._sleep(1 << 30)  # half a second of a step
    step = torch.cuda.Event()
    step.record()
    with beside_steps(kv):
        saved = here.gather_chunks(kv, blocks, torch.from_numpy(pool), *rest)
        loaded = here.scatter_chunks(other, others, torch.from_numpy(pool), *rest)
    assert not step.query()

    assert torch.equal(torch.from_numpy(pool), wanted_pool)
    assert torch.equal(saved, wanted)
    assert torch.equal(loaded, wanted)
    assert torch.equal(other[others[0, :3]], kv[blocks[0, :3]])
    assert not other[4:].any()
