"""`--numerics fast` on a device: what cuBLAS and FlashAttention 3 compute, engines with them."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pdserve.commands.doctor import fast_numerics
from pdserve.config.boxed import boxed_model_dir
from pdserve.config.numerics import NumericsMode
from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pdserve.kernels.cases.attention import attention_inputs, with_nan_in_unused_slots
from pdserve.kernels.cases.table import OPERATIONS
from pdserve.kernels.fast.attention import Flash, find_flash, with_flash
from pdserve.kernels.registry import kernels_on
from tests.e2e.conftest import pd_deployment
from tests.e2e.test_equality import NUM_TOKENS, PROMPTS, assert_kv_moved, complete_all
from tests.worker.driver import workers

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.kernels.backend import KernelBackend

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture
def fast(cuda: torch.device) -> KernelBackend:
    """The backend of fast numerics."""
    return kernels_on(cuda, numerics=NumericsMode.FAST)


@pytest.fixture
def flash(cuda: torch.device) -> Flash:
    """FlashAttention 3."""
    found = find_flash(cuda)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def random(device: torch.device, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Any:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return (torch.randn(shape, device=device, generator=generator) * scale).to(dtype)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("shape", [(4096, 4096), (1000, 1536)], ids=str)
@pytest.mark.parametrize("num_rows", [65, 128, 500, 1024])
def test_products_by_cublas_are_those_of_the_reference(
    fast: KernelBackend,
    cuda: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int],
    num_rows: int,
) -> None:
    n, k = shape
    weight, bias = random(cuda, dtype, n, k, scale=k**-0.5), random(cuda, dtype, n)
    x = random(cuda, dtype, num_rows, k)
    for given in (None, bias):
        wanted = x.double() @ weight.double().T + (0 if given is None else given.double())
        out = torch.full((num_rows, n), torch.nan, dtype=dtype, device=cuda)
        layer = fast.linear_of(weight, given)
        assert layer(x, out) is out
        torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=3e-2)


@pytest.mark.parametrize("num_rows", [1, 64, 1025])
def test_other_products_have_the_bits_of_exact_numerics(
    fast: KernelBackend, cuda: torch.device, num_rows: int
) -> None:
    weight, x = random(cuda, BF16, 4096, 1024, scale=0.03), random(cuda, BF16, num_rows, 1024)
    assert torch.equal(fast.linear_of(weight)(x), kernels_on(cuda).linear_of(weight)(x))


def test_products_by_cublas_are_captured(fast: KernelBackend, cuda: torch.device) -> None:
    layer, x = fast.linear_of(random(cuda, BF16, 512, 512)), random(cuda, BF16, 96, 512)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        found = layer(x)
    x.mul_(2)
    graph.replay()
    torch.testing.assert_close(found, layer(x), rtol=2e-2, atol=0.5)


def refused(*_: Any) -> Any:
    raise AssertionError("this step is for FlashAttention 3")


MIXED = [1, 150, 1, 64, 2], [700, 150, 33, 500, 66]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    ("queries", "contexts", "heads", "head_dim", "block_size", "window"),
    [
        ([300], [300], (8, 2), 128, 64, None),
        ([300], [300], (8, 2), 128, 16, None),
        ([2100], [2100], (8, 2), 128, 64, None),
        ([200], [1000], (8, 2), 64, 64, None),
        ([33], [5000], (9, 3), 128, 64, None),
        ([40], [41], (4, 4), 64, 8, None),
        (*MIXED, (8, 2), 128, 64, None),
        (*MIXED, (8, 1), 64, 16, None),
        (*MIXED, (8, 2), 128, 64, 100),
        (*MIXED, (6, 2), 64, 16, 1),
        ([200], [900], (6, 2), 128, 32, 250),
    ],
)
def test_attention_by_flash_is_that_of_the_reference(
    flash: Flash,
    cuda: torch.device,
    queries: list[int],
    contexts: list[int],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    args = with_nan_in_unused_slots(
        attention_inputs(
            queries,
            contexts,
            heads,
            head_dim,
            dtype=dtype,
            device=cuda,
            block_size=block_size,
            window=window,
        )
    )
    operation = OPERATIONS["paged_attention"]
    tolerance = operation.tolerance[dtype]
    found = with_flash(flash.attend, refused)(*args)
    torch.testing.assert_close(found, operation.reference(*args), rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # that it is a prototype
def test_attention_by_flash_waits_for_nothing(
    fast: KernelBackend, flash: Flash, cuda: torch.device
) -> None:
    args = attention_inputs(*MIXED, (8, 2), 128, dtype=BF16, device=cuda, block_size=64)
    fast.paged_attention(*args)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fast.paged_attention(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_single_tokens_have_the_bits_of_exact_numerics(
    fast: KernelBackend, cuda: torch.device
) -> None:
    args = attention_inputs([1] * 40, [700] * 40, (8, 2), 128, dtype=BF16, device=cuda)
    assert torch.equal(fast.paged_attention(*args), kernels_on(cuda).paged_attention(*args))


def tokens(numerics: NumericsMode) -> tuple[list[list[int]], str]:
    """Greedy tokens of the boxed model, whose lead over the next token is large; its numerics."""
    config = EngineConfig(
        model=ModelConfig(model=str(boxed_model_dir())),
        device="cuda",
        numerics=numerics,
        cache=CacheConfig(num_gpu_blocks_override=128),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=2048),
    )
    prompts = {str(number): prompt for number, prompt in enumerate(PROMPTS)}
    with workers() as begin:
        driver = begin(config)
        for name, prompt in prompts.items():
            driver.add(name, prompt)
        driver.step({name: len(prompt) for name, prompt in prompts.items()})
        for _ in range(7):
            driver.step(dict.fromkeys(prompts, 1))
        return [driver.outputs[name] for name in prompts], str(driver.info.numerics)


def test_an_engine_in_fast_numerics_writes_nearly_what_exact_writes(cuda: torch.device) -> None:
    (exact, exactly), (found, fast) = tokens(NumericsMode.EXACT), tokens(NumericsMode.FAST)
    pairs = zip(chain(*exact), chain(*found), strict=True)
    same = [one == other for one, other in pairs]
    assert sum(same) >= 0.75 * len(same), (exact, found)
    assert exactly != fast


def test_p_and_d_in_fast_numerics_complete_requests(cuda: torch.device, tmp_path: Path) -> None:
    flags = ["--device", "cuda", "--numerics", "fast", "--num-gpu-blocks-override", "512"]
    with pd_deployment(tmp_path, boxed_model_dir(), *flags) as deployment:
        answers = complete_all(deployment.url("proxy"), PROMPTS)
        assert {len(answer) for answer in answers} == {NUM_TOKENS}
        assert_kv_moved(deployment, sum(map(len, PROMPTS)))
        assert "numerics fast: " in deployment.processes["prefill"].log
        assert "rounds differently" not in deployment.processes["prefill"].log
        deployment.wait_nothing_held("prefill", "decode", timeout_s=20.0)


def test_doctor_says_what_fast_numerics_compute_with(cuda: torch.device) -> None:
    (finding,) = fast_numerics()
    assert "by cuBLAS" in finding.text
    assert "FA3" in finding.text
