"""A deployment is rolled, to other weights and from the release to this version: nobody notices."""

from __future__ import annotations

import itertools
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file, save_file

from tests.chaos.rolling import (
    NUM_PROMPTS,
    Balancer,
    Load,
    SteadyLoad,
    complete,
    release_tree,
)
from tests.cli.process import free_ports
from tests.e2e.deployment import Deployment
from tests.tiny_models import write_tiny_model
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(500)]

VERSIONS = ("old", "new")
ENGINE = ("--port", "0", "--num-threads", "1", "--dtype", "float32", "--max-num-seqs", "32")
SMALL = ("--kv-cache-memory-bytes", "64MiB", "--served-model-name", "tiny")
NOTICED = ("--drain-delay", "2")
"""How long a load balancer that looks every 0.2 s may take, and more."""
OFTEN = ("--port", "0", "--health-check-interval-secs", "0.3")


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = release_tree(tmp_path_factory.mktemp("release"))
    if tree is None:
        pytest.skip("the release is not in this checkout's history")
    return tree


@contextmanager
def deployment(directory: Path) -> Iterator[Deployment]:
    directory.mkdir()
    started = Deployment(directory)
    try:
        yield started
    finally:
        started.end()


def leave(started: Deployment, *names: str) -> None:
    """SIGTERM, and the end of each."""
    for name in names:
        started.processes[name].popen.send_signal(signal.SIGTERM)
    for name in names:
        started.processes.pop(name).popen.wait(60)


def test_every_mixture_of_the_release_and_this_version_serves_every_request(
    release: Path, model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Engines are named on the proxies' command lines. What is mixed is served by one engine."""
    trees = {"old": release, "new": None}
    with deployment(tmp_path / "logs") as started:
        for version, kind in itertools.product(VERSIONS, ("prefill", "decode")):
            flags = (kind, str(model_of("llama")), *ENGINE, *SMALL)
            started.start(f"{kind}-{version}", *flags, tree=trees[version])
        started.wait()
        mixtures = list(itertools.product(VERSIONS, repeat=3))
        for proxy, prefill, decode in mixtures:
            engines = ("--prefill", started.url(f"prefill-{prefill}"))
            engines += ("--decode", started.url(f"decode-{decode}"))
            name = f"proxy-{proxy}-{prefill}-{decode}"
            started.start(name, "proxy", *OFTEN, *engines, tree=trees[proxy])
        started.wait()
        asked = [(index, stream) for index in range(NUM_PROMPTS) for stream in (True, False)]
        expected = [complete(started.url("decode-new"), index, stream=False) for index, _ in asked]
        for mixture in mixtures:
            name = "-".join(("proxy", *mixture))
            url = started.url(name)
            with ThreadPoolExecutor(4) as pool:
                futures = [pool.submit(complete, url, i, stream=stream) for i, stream in asked]
            found = [future.result() for future in futures]
            assert found == expected, mixture
            proxy, prefill, decode = mixture
            if proxy == "new":
                is_mixed = prefill != decode
                process = started.processes[name]
                wait_until(lambda of=process: of.log.count(" req ") >= len(asked), 10.0)
                assert ("ladder local(no_" in process.log) is is_mixed
                assert ("path=pu" in process.log) is not is_mixed


def test_a_deployment_is_rolled_from_the_release_to_this_version_under_load(
    release: Path, model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """The proxy first, as the README says; its engines register."""
    with deployment(tmp_path / "logs") as started:
        started.start("proxy", "proxy", *OFTEN, "--accept-former-signatures")
        started.wait()
        proxy = ("--proxy", started.url("proxy"))
        for kind in ("prefill", "decode"):
            flags = (kind, str(model_of("llama")), *ENGINE, *SMALL, *proxy)
            started.start(f"{kind}-old", *flags, tree=release)
        started.wait()
        started.wait_routable(1, 1)
        load = Load(started.url("proxy"), num_clients=4, num_tokens=64)
        load.wait_for(20)
        for kind in ("prefill", "decode"):
            started.start(kind, kind, str(model_of("llama")), *ENGINE, *SMALL, *proxy)
        started.wait()
        started.wait_routable(2, 2)
        load.wait_for(20)
        leave(started, "prefill-old")
        load.wait_for(10)
        leave(started, "decode-old")
        load.wait_for(20)
        load.end()
        expected = [
            complete(started.url("decode"), index, stream=False, num_tokens=64)
            for index in range(NUM_PROMPTS)
        ]
    wrong = [(index, found) for index, found in load.answers if found != expected[index]]
    assert not wrong, f"{len(wrong)} of {len(load.answers)}: {wrong[:3]}"


def test_weights_are_rolled_behind_one_proxy_under_load(tmp_path: Path) -> None:
    """Every answer is of the one weights or of the others, as a whole."""
    models = {name: write_tiny_model(tmp_path / name) for name in ("v1", "v2")}
    tensors = load_file(models["v2"] / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1.5
    save_file(tensors, models["v2"] / "model.safetensors", metadata={"format": "pt"})
    expected: dict[str, list[list[int] | str]] = {}
    with deployment(tmp_path / "logs") as started:
        started.start("proxy", "proxy", *OFTEN)
        started.wait()
        proxy = ("--proxy", started.url("proxy"))

        def start(version: str) -> None:
            for kind in ("prefill", "decode"):
                name = f"{kind}-{version}"
                started.start(name, kind, str(models[version]), *ENGINE, *SMALL, *proxy)
            started.wait()
            expected[version] = [
                complete(started.url(f"decode-{version}"), index, stream=False, num_tokens=64)
                for index in range(NUM_PROMPTS)
            ]

        start("v1")
        started.wait_routable(1, 1)
        load = Load(started.url("proxy"), num_clients=4, num_tokens=64)
        load.wait_for(20)
        start("v2")
        started.wait_routable(2, 2)
        load.wait_for(40)
        leave(started, "decode-v1", "prefill-v1")
        load.wait_for(20)
        load.end()
        pushed = started.metrics("decode-v2")["pdserve_kv_transfer_bytes_total"]
        log = started.processes["proxy"].log
    assert expected["v1"] != expected["v2"]
    kinds = [
        next((v for v in expected if found == expected[v][index]), f"wrong: {found}")
        for index, found in load.answers
    ]
    assert set(kinds) == {"v1", "v2"}
    assert kinds[-4:] == ["v2"] * 4
    assert pushed > 0
    assert "handoff_refused" not in log


def test_every_process_is_restarted_in_turn_at_20_requests_a_second_and_none_fails(
    model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Two of each role; a load balancer stands before the proxies, and engines know both."""
    ports = dict(zip(("proxy-0", "proxy-1"), free_ports(2), strict=True))
    urls = [f"http://127.0.0.1:{port}" for port in ports.values()]
    names = [*(f"{kind}-{n}" for kind in ("prefill", "decode") for n in range(2)), *ports]
    with deployment(tmp_path / "logs") as started:

        def start(name: str) -> None:
            if name in ports:
                started.start(name, "proxy", *OFTEN[2:], "--port", str(ports[name]), *NOTICED)
            else:
                kind = name.partition("-")[0]
                words = (*ENGINE, *SMALL, "--proxy", *urls)
                started.start(name, kind, str(model_of("llama")), *words)
            started.wait(name)

        def until_all_are_known() -> None:
            for name in ports:
                started.wait_routable(2, 2, proxy=name)

        for name in reversed(names):
            start(name)
        until_all_are_known()
        balancer = Balancer(urls)
        load = SteadyLoad(balancer, rate=20.0, num_tokens=16)
        for name in names:
            process = started.processes[name].popen
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, started.processes[name].log
            start(name)
            until_all_are_known()
        load.end()
        balancer.end()
        expected = [
            complete(urls[0], index, stream=False, num_tokens=16) for index in range(NUM_PROMPTS)
        ]
    failed = [(index, found) for index, found in load.answers if found != expected[index]]
    print(f"{len(load.answers)} requests, {len(failed)} failed; restarted: {', '.join(names)}")
    assert len(load.answers) > 200
    assert not failed, f"{len(failed)} of {len(load.answers)}: {failed[:5]}"
