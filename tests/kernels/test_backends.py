"""How a backend is chosen, and who runs what it does not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from pdserve.kernels.backend import REFERENCE
from pdserve.kernels.cases.attention import attention_inputs
from pdserve.kernels.registry import BACKENDS, choose, kernels_on
from tests.kernels import tiny_backend
from tests.kernels.builds import CPU, KERNELS, needs_native
from tests.models.decoding import greedy, load
from tests.tiny_models import write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.kernels.backend import KernelBackend

TINY = {"cpu": "tests.kernels.tiny_backend"}
PROMPTS = [[3 + (17 * i + 5 * n) % 290 for i in range(n)] for n in (3, 40, 70)]
NUM_STEPS = 4


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "reference" in record.getMessage()]


def tokens(directory: Path, kernels: KernelBackend) -> list[list[int]]:
    return greedy(load(directory, kernels=kernels), PROMPTS, NUM_STEPS)[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.matrix), "mixtral"])
def test_a_backend_of_one_operation_drives_a_whole_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str
) -> None:
    directory = write_tiny_model(tmp_path, family)
    tiny_backend.num_rows.clear()
    found = tokens(directory, choose(CPU, TINY))

    assert found == tokens(directory, REFERENCE) == tokens(directory, KERNELS)
    assert tiny_backend.num_rows == [113] * 3 + [3] * 3 * (NUM_STEPS - 1)
    (line,) = said(caplog)
    assert line.startswith("TINY kernels have no rms_norm, ")
    assert "paged_attention" not in line
    # Halves are made of what it has.
    assert " mlp" not in line
    assert " attention" not in line


@pytest.mark.slow
def test_calls_that_a_twin_does_not_take_are_the_references_and_one_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_tiny_model(tmp_path, "llama")
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    config["sliding_window"] = 19
    (directory / "config.json").write_text(json.dumps(config))
    kernels = choose(CPU, TINY)
    caplog.clear()
    tiny_backend.num_rows.clear()

    assert tokens(directory, kernels) == tokens(directory, REFERENCE)
    assert not tiny_backend.num_rows
    assert said(caplog) == [
        "paged_attention runs as the slower torch reference: the tiny kernels take no windows"
    ]


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_head_and_block_size_is_native_up_to_heads_of_1024(
    caplog: pytest.LogCaptureFixture, dtype: torch.dtype
) -> None:
    kernels = choose(CPU, BACKENDS)
    for head_dim, block_size in ((24, 16), (29, 8), (100, 16), (64, 128), (6, 128), (1040, 16)):
        inputs = attention_inputs(
            [1, 9], [70, 90], (4, 2), head_dim, dtype=dtype, device=CPU, block_size=block_size
        )
        expected = REFERENCE.paged_attention(*inputs)
        for _ in range(2):
            found = kernels.paged_attention(*inputs)
            torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)
    lines = said(caplog)
    assert len(lines) == 1
    assert "heads of up to 1024" in lines[0]


@needs_native
def test_a_dtype_that_is_not_native_is_the_references() -> None:
    kernels = choose(CPU, BACKENDS)
    x, weight = torch.randn(3, 8).double(), torch.randn(5, 8).double()

    assert torch.equal(kernels.silu_and_mul(x), REFERENCE.silu_and_mul(x))
    assert torch.equal(kernels.linear_of(weight)(x), REFERENCE.linear_of(weight)(x))


def test_a_device_type_without_a_backend_has_the_reference() -> None:
    assert kernels_on(torch.device("meta")) is REFERENCE
