"""A worker's life: start, steps with and without tokens, close; and its connector's part in it."""

from __future__ import annotations

import mmap
import shutil
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.commands import doctor
from pdserve.config.numerics import NumericsMode
from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pdserve.connectors import registry
from pdserve.connectors.base import Capabilities, KVConnectorWorker
from pdserve.errors import ConfigError, InternalError
from pdserve.kernels.registry import kernels_on
from pdserve.wire.ids import RequestId
from pdserve.wire.step import SchedulerOutput
from pdserve.wire.transfer import (
    ConnectorMetadata,
    ConnectorReport,
    Endpoint,
    Failed,
    LeaseEnd,
    Settled,
)
from pdserve.worker.device import device_of
from pdserve.worker.kv_memory import Offer, layout_of_block, require_one_request, supply
from tests.tiny_models import write_tiny_model
from tests.worker.driver import workers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pdserve.connectors.base import ConnectorContext, KVLayout
    from pdserve.models.decoder import LayerHooks
    from pdserve.worker.step import LaunchedStep
    from tests.worker.driver import Driver

MIB = 1 << 20


class RecordingConnector(KVConnectorWorker):
    """Writes down how it is called; its next report is `report`."""

    def __init__(self, *, is_layerwise: bool = False) -> None:
        self.capabilities = Capabilities()
        self.is_layerwise = is_layerwise
        self.calls: list[str] = []
        self.report = ConnectorReport()
        self.failed: Sequence[Failed] = ()
        self.kv: torch.Tensor | None = None
        self.context: ConnectorContext | None = None

    def make_worker(
        self, context: ConnectorContext, wake: Callable[[], None]
    ) -> RecordingConnector:
        self.context = context
        return self

    def register_kv_caches(self, kv: torch.Tensor, layout: KVLayout) -> Endpoint:
        self.kv = kv
        self.calls.append("register")
        return Endpoint(host="127.0.0.1", port=4321)

    def post(self, metadata: ConnectorMetadata) -> None:
        self.calls.append(f"post {metadata.payload.decode()}")

    def start_load_kv(self, metadata: ConnectorMetadata) -> bool:
        self.calls.append(f"load {metadata.payload.decode()}")
        return self.is_layerwise

    def wait_for_layer_load(self, layer: int) -> None:
        self.calls.append(f"wait {layer}")

    def save_kv_layer(self, layer: int) -> None:
        self.calls.append(f"save {layer}")

    def wait_for_save(self) -> Sequence[Failed]:
        self.calls.append("saved")
        return self.failed

    def get_finished(self) -> ConnectorReport:
        self.calls.append("finished")
        report, self.report = self.report, ConnectorReport()
        return report

    def close(self, timeout_s: float) -> None:
        self.calls.append(f"close {timeout_s}")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RecordingConnector]:
    """Make the worker find a recording connector."""

    def make(**fields: Any) -> RecordingConnector:
        connector = RecordingConnector(**fields)
        monkeypatch.setattr(registry, "find", lambda *_: connector)
        return connector

    return make


def empty_step(payload: bytes | None = None) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=7,
        num_scheduled_tokens={},
        gone_request_ids=[RequestId("never seen")],
        connector_metadata=None if payload is None else ConnectorMetadata(payload),
    )


SETTLED = ConnectorReport(settled=[Settled(request_id=RequestId("x"), end=LeaseEnd.READ)])


def test_of_a_step_without_instructions_a_connector_hears_behind_the_forward_alone(
    make_driver: Callable[..., Driver], install: Callable[..., RecordingConnector]
) -> None:
    connector = install(is_layerwise=True)
    driver = make_driver()
    assert driver.info.endpoint == Endpoint(host="127.0.0.1", port=4321)
    driver.add("r", [1, 2, 3])
    driver.step({"r": 3})
    driver.step({"r": 1})
    assert connector.calls == ["register", "saved", "saved"]


def test_what_belongs_to_a_step_is_told_before_the_forward(
    make_driver: Callable[..., Driver],
    install: Callable[..., RecordingConnector],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connector = install()
    driver = make_driver()
    runner = driver.worker._runner
    assert runner is not None
    launch = runner.launch

    def spy(step: SchedulerOutput, hooks: LayerHooks | None) -> LaunchedStep:
        connector.calls.append("forward")
        return launch(step, hooks)

    monkeypatch.setattr(runner, "launch", spy)
    driver.worker.execute(empty_step(b"abc"))
    assert connector.calls == ["register", "load abc", "forward"]


@pytest.mark.parametrize("is_layerwise", [True, False])
def test_a_connector_is_called_around_each_layer_of_the_steps_that_it_asks_for(
    make_driver: Callable[..., Driver],
    install: Callable[..., RecordingConnector],
    *,
    is_layerwise: bool,
) -> None:
    connector = install(is_layerwise=is_layerwise)
    driver = make_driver()
    driver.add("r", [1, 2, 3])
    told = ConnectorMetadata(b"abc")
    driver.worker.execute(msgspec.structs.replace(driver.plan({"r": 3}), connector_metadata=told))
    layers = ["wait 0", "save 0", "wait 1", "save 1"] if is_layerwise else []
    assert connector.calls == ["register", "load abc", *layers, "saved"]


def test_posts_and_reports_pass_by_the_steps(
    make_driver: Callable[..., Driver], install: Callable[..., RecordingConnector]
) -> None:
    connector = install()
    driver = make_driver()
    connector.report = SETTLED
    driver.worker.post(ConnectorMetadata(b"abc"))
    driver.worker.execute(empty_step())
    assert driver.worker.poll() == SETTLED
    assert not driver.worker.poll()
    assert connector.calls == ["register", "post abc", "finished", "finished"]


def test_closing_twice_closes_the_connector_once_and_ends_the_worker(
    make_driver: Callable[..., Driver], install: Callable[..., RecordingConnector]
) -> None:
    connector = install()
    driver = make_driver()
    driver.worker.close(2.5)
    driver.worker.close(2.5)
    assert connector.calls == ["register", "close 2.5"]
    with pytest.raises(InternalError, match="not started, or closed"):
        driver.worker.poll()


def test_kv_memory_is_one_page_aligned_tensor_that_others_may_write(
    make_driver: Callable[..., Driver], install: Callable[..., RecordingConnector]
) -> None:
    connector = install()
    layout = make_driver(cache=CacheConfig(num_gpu_blocks_override=33)).info.layout
    kv = connector.kv
    assert kv is not None
    assert kv.shape == (33, 2, 2, 2, 16, 16)
    assert kv.is_contiguous()
    assert kv.nbytes == 33 * layout.block_bytes
    assert kv.data_ptr() % mmap.PAGESIZE == 0
    assert not kv.is_inference()


def test_the_context_carries_the_digest_of_what_peers_must_share(
    make_driver: Callable[..., Driver], install: Callable[..., RecordingConnector]
) -> None:
    connector = install()
    same, again = make_driver().info, make_driver().info
    assert connector.context is not None
    assert connector.context.layout_digest == again.layout_digest == same.layout_digest
    digests = {
        same.layout_digest,
        make_driver(seed=1).info.layout_digest,
        make_driver(dtype="bfloat16").info.layout_digest,
        make_driver(arch={"rope_theta": 5e5}).info.layout_digest,
    }
    assert len(digests) == 4
    other_sizes = make_driver(cache=CacheConfig(num_gpu_blocks_override=64, block_size=32)).info
    assert other_sizes.layout_digest == same.layout_digest


def test_a_worker_says_how_it_rounds_beside_what_its_kv_means(
    make_driver: Callable[..., Driver], install: Callable[..., RecordingConnector]
) -> None:
    connector, info, kernels = install(), make_driver().info, kernels_on(torch.device("cpu"))
    assert connector.context is not None
    assert connector.context.numerics == info.numerics
    assert info.numerics is not None
    assert info.numerics.device == f"cpu {kernels.arch}".strip()
    assert info.numerics.kernels.startswith(kernels.name)
    assert info.numerics.compiler == kernels.compiler
    assert info.numerics.tp_size == 1
    assert "numerics" not in info.layout_fields


@pytest.mark.slow
def test_doctor_tells_checkpoints_apart_that_differ_in_a_middle_tensor(tmp_path: Path) -> None:
    def peer(directory: Path) -> doctor.RunningEngine:
        config = EngineConfig(
            model=ModelConfig(model=str(directory)),
            device="cpu",
            cache=CacheConfig(num_gpu_blocks_override=128),
        )
        with workers() as begin:
            info = begin(config).info
        return doctor.RunningEngine(directory.name, "both", info.layout_digest, info.layout_fields)

    p = write_tiny_model(tmp_path / "p")
    d = shutil.copytree(p, tmp_path / "d")
    assert doctor.compatible(peer(p), peer(d)).verdict is doctor.Grade.OK
    tensors = load_file(d / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] *= 2
    save_file(tensors, d / "model.safetensors", metadata={"format": "pt"})
    finding = doctor.compatible(peer(p), peer(d))
    assert finding.verdict is doctor.Grade.FAIL
    assert finding.text.startswith("p and d differ: weights ")


def test_cuda_that_is_not_there_is_a_configuration_error(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    config = EngineConfig(model=ModelConfig(model=str(tmp_path)), device="cuda")
    with workers() as begin, pytest.raises(ConfigError, match="finds no CUDA device"):
        begin(config)


def test_fast_numerics_without_cuda_are_a_configuration_error(tmp_path: Path) -> None:
    config = EngineConfig(
        model=ModelConfig(model=str(tmp_path)), device="cpu", numerics=NumericsMode.FAST
    )
    refusal = "--numerics is 'fast', .* 'cpu': use --numerics exact"
    with workers() as begin, pytest.raises(ConfigError, match=refusal) as refused:
        begin(config)
    assert refused.value.param == "numerics"


@pytest.mark.parametrize("capability", [(7, 5), (7, 0), (6, 1)])
def test_a_device_older_than_what_kernels_are_made_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    with pytest.raises(ConfigError, match=r"cuda:0 is a Tesla T4 .* need 8.0.* --device cpu"):
        device_of(torch.device("cuda", 0))


def test_the_pool_takes_an_exact_number_before_a_size_before_a_share(
    make_driver: Callable[..., Driver],
) -> None:
    def num_blocks(**fields: Any) -> int:
        return make_driver(cache=CacheConfig(**fields)).info.layout.num_blocks

    block_bytes = make_driver().info.layout.block_bytes
    assert num_blocks(num_gpu_blocks_override=17, kv_cache_memory_bytes=1) == 17
    assert num_blocks(kv_cache_memory_bytes=20 * block_bytes + 5) == 20
    # The default is cut to what 8 requests of 256 tokens can use.
    assert num_blocks() == 8 * 16


@pytest.mark.parametrize(
    ("cache", "giver"),
    [
        (CacheConfig(num_gpu_blocks_override=15), "--num-gpu-blocks-override gives 15"),
        (CacheConfig(kv_cache_memory_bytes=MIB // 16), "--kv-cache-memory-bytes gives 8"),
    ],
)
def test_a_pool_too_small_for_one_request_says_what_to_change(
    make_driver: Callable[..., Driver], cache: CacheConfig, giver: str
) -> None:
    with pytest.raises(ConfigError, match=rf"256 tokens needs 16 KV blocks.*{giver}") as told:
        make_driver(cache=cache)
    setting, _, num_blocks = giver.partition(" gives ")
    fitting = 16 * int(num_blocks)
    assert str(told.value).endswith(
        f": set --max-model-len to at most {fitting}, or raise {setting}"
    )


def test_a_pool_without_a_block_asks_for_more_memory_and_not_for_no_tokens(
    make_driver: Callable[..., Driver],
) -> None:
    with pytest.raises(ConfigError, match="gives 0: raise --kv-cache-memory-bytes"):
        make_driver(cache=CacheConfig(kv_cache_memory_bytes=1))


@pytest.mark.parametrize(
    ("offer", "num_blocks"),
    [
        (Offer(default_bytes=80 * 8192, limit_bytes=200 * 8192), 80),
        (Offer(default_bytes=3 * 8192, limit_bytes=200 * 8192), 16),
        (Offer(default_bytes=900 * 8192, limit_bytes=900 * 8192), 8 * 16),
        (Offer(default_bytes=3 * 8192, limit_bytes=15 * 8192), None),
    ],
    ids=["the default", "one request if that is more", "no more than useful", "not enough"],
)
def test_a_devices_offer_is_taken_within_its_limit(
    make_driver: Callable[..., Driver], offer: Offer, num_blocks: int | None
) -> None:
    from pdserve.models.reading import parse_arch
    from tests.worker.driver import TINY

    def plan() -> int:
        cache, arch = CacheConfig(), parse_arch(TINY)
        layout = layout_of_block(
            arch, torch.float32, 16, num_layers=arch.num_layers, num_kv_heads=arch.num_kv_heads
        )
        found = supply(layout.block_bytes, cache, per_request=16, max_num_seqs=8, offer=offer)
        require_one_request(found, cache, max_model_len=256, block_size=16)
        return found.num_blocks

    if num_blocks is None:
        with pytest.raises(ConfigError, match="the free memory gives 15"):
            plan()
    else:
        assert plan() == num_blocks


def test_a_step_may_be_as_long_as_a_request_where_prompts_are_not_cut(
    make_driver: Callable[..., Driver],
) -> None:
    scheduler = SchedulerConfig(
        max_num_seqs=2, max_num_batched_tokens=16, enable_chunked_prefill=False
    )
    driver = make_driver(scheduler=scheduler)
    driver.add("r", [1] * 250)
    assert len(driver.run("r", 2)) == 2
