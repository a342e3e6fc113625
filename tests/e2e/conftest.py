"""Models and deployments for end-to-end tests."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.e2e.deployment import Deployment
from tests.tiny_models import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path


OPENAI_MODEL = "tiny"
OPENAI_KEY = "sk-of-this-deployment"
SHARP_BLOCKS = 300


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Make (once) and return the tiny model of a family."""
    shapes = {
        "llama": {"tie_word_embeddings": True},
        "qwen2": {"num_key_value_heads": 1, "num_hidden_layers": 2},
        "qwen3": {"head_dim": 32, "num_hidden_layers": 2},
    }
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            directory = tmp_path_factory.mktemp("models") / family
            made[family] = write_tiny_model(directory, family, **shapes[family])
        return made[family]

    return make


@pytest.fixture(scope="session")
def asked_by_openai(
    model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """P, D and proxy, and one engine to compare with, for OpenAI's clients; all ask for the key.

    They compute in bfloat16, whose rounding shows in tokens. After all tests every block is free,
    and none became so by running out of its lease.
    """
    flags = ["--served-model-name", OPENAI_MODEL, "--dtype", "bfloat16"]
    directory = tmp_path_factory.mktemp("openai")
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # for these processes, and no others
            patch.setenv("PDSERVE_API_KEY", OPENAI_KEY)
            running = stack.enter_context(
                pd_deployment(directory, model_of("llama"), *flags, with_serve=True)
            )
        yield running
        running.wait_nothing_held("serve", "prefill", "decode", timeout_s=20.0)
        assert running.metric("prefill", "pdserve_kv_lease_expired_total") == 0


@pytest.fixture(scope="session")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Deployment]]:
    """A tiny model, its proxy, P and D in float32, with room for few requests.

    The weights are of a generator whose stream NumPy has frozen, and so large that the likeliest
    token leads clearly.
    """
    directory = tmp_path_factory.mktemp("sharp")
    model = write_tiny_model(directory / "model")
    path = model / "model.safetensors"
    rng = np.random.RandomState(11)
    weights = {
        name: rng.normal(1.0 if "norm" in name else 0.0, 0.25, weight.shape).astype(np.float32)
        for name, weight in sorted(load_file(path).items())
    }
    save_file(weights, path, metadata={"format": "pt"})
    flags = ["--served-model-name", "tiny", "--dtype", "float32"]
    flags += ["--num-gpu-blocks-override", str(SHARP_BLOCKS)]
    with pd_deployment(directory, model, *flags) as deployment:
        yield model, deployment


@pytest.fixture(scope="session")
def of_two_ranks(
    model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """P and D in float32, of two ranks each; P pushes."""
    flags = ["--dtype", "float32", "--tensor-parallel-size", "2"]
    directory = tmp_path_factory.mktemp("two-ranks")
    push = ("--kv-mode", "push")
    with pd_deployment(directory, model_of("llama"), *flags, proxy_flags=push) as deployment:
        yield deployment


@dataclass(frozen=True)
class Boxed:
    """P, D, proxy and one engine to compare with, all of the boxed model in float32.

    Attributes:
        told_at_start: The /metrics of proxy, P and D before the first request.
    """

    deployment: Deployment
    told_at_start: dict[str, str]

    def revive(self) -> None:
        """Start what has been killed of them."""
        for name in ("serve", "prefill", "decode"):
            process = self.deployment.processes[name]
            if process.popen.poll() is not None:
                self.deployment.start(name, *process.arguments)
        self.deployment.wait("serve", "prefill", "decode")
        self.deployment.wait_routable()


@pytest.fixture(scope="session")
def boxed_from_start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Boxed]:
    """For all tests that want the boxed model."""
    flags = ["--dtype", "float32", "--kv-transfer-config.lease-s", "6"]
    directory = tmp_path_factory.mktemp("boxed")
    with pd_deployment(directory, "boxed", *flags, with_serve=True) as deployment:
        told = {
            name: httpx.get(f"{deployment.url(name)}/metrics", verify=False).text
            for name in ("proxy", "prefill", "decode")
        }
        yield Boxed(deployment, told)


@pytest.fixture(scope="module")
def boxed(boxed_from_start: Boxed) -> Deployment:
    """The same, whole, whomever tests before have killed."""
    boxed_from_start.revive()
    return boxed_from_start.deployment


@contextmanager
def pd_deployment(
    directory: Path,
    model: Path | str,
    *flags: str,
    with_serve: bool = False,
    prefills: int = 1,
    decodes: int = 1,
    proxy_flags: Sequence[str] = (),
    pair_env: Mapping[str, str] | None = None,
) -> Iterator[Deployment]:
    """A proxy, prefill and decode engines that register with it, and maybe a colocated one.

    Args:
        pair_env: What prefill and decode engines have in their environment.
    """
    deployment = Deployment(directory)
    # Each page of the default, a gigabyte, would be touched at every start.
    small = ["--kv-cache-memory-bytes", "256MiB"]
    # A dozen ranks beside other work take seconds to wire up; D would give up and compute itself.
    patient = ["--kv-transfer-config.handshake-timeout-s", "30"]
    common = [str(model), "--port", "0", "--num-threads", "1", *small, *patient, *flags]
    try:
        if with_serve:
            deployment.start("serve", "serve", *common)
        deployment.start("proxy", "proxy", "--port", "0", *proxy_flags)
        deployment.wait("proxy")
        for kind, num in (("prefill", prefills), ("decode", decodes)):
            for index in range(num):
                name = kind if index == 0 else f"{kind}{index}"
                flags_of = [*common, "--proxy", deployment.url("proxy")]
                deployment.start(name, kind, *flags_of, env=dict(pair_env or {}))
        deployment.wait()
        deployment.wait_routable(prefills, decodes)
        yield deployment
    finally:
        deployment.end()
