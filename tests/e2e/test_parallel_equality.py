"""One engine of many ranks writes the tokens of one rank and of transformers.

The whole matrix of families and shapes, all of it `make matrix`. Of `make test`, tensors over ranks
and three stages hand over in `test_unequal_shapes.py`, experts over cores in
`test_data_parallel.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import pd_deployment
from tests.e2e.deployment import Deployment
from tests.e2e.test_equality import assert_kv_moved, complete_all, complete_alone
from tests.ray_cluster import ray_cluster
from tests.tiny_models import greedy_by_transformers, write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

PROMPTS = [[3 + (17 * i + 5 * n) % 311 for i in range(n)] for n in (1, 2, 17, 64, 150, 300)]
NUM_TOKENS = 40
# Five layers split unevenly over two and over three stages.
NUM_LAYERS = 5

DENSE = ("llama", "qwen3")
MOE = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")

FURTHER_DENSE = (
    "gemma3_text", "gemma3", "mistral3", "smollm3", "granite", "ernie4_5", "olmo2", "olmo3",
    "exaone4", "glm", "glm4", "ministral3", "hunyuan_v1_dense",
)  # fmt: skip
FURTHER_MOE = ("minimax_m2", "dots1", "ernie4_5_moe", "hunyuan_v1_moe", "qwen2_moe")

SHAPES = {
    "tp2": ("-tp", "2"),
    "tp4": ("-tp", "4"),
    "pp2": ("-pp", "2"),
    "pp3": ("-pp", "3"),
    "pp2 by hand": ("-pp", "2", "--pipeline-layers", "1,4"),
    "tp2 pp2": ("-tp", "2", "-pp", "2"),
    "sp": ("-tp", "2", "--enable-sequence-parallel"),
}
EXPERT_SHAPES = {
    "ep2": ("-tp", "2", "--enable-expert-parallel"),
    "ep4": ("-tp", "4", "--enable-expert-parallel"),
    "ep4 all_to_all": ("-tp", "4", "--enable-expert-parallel", "--all2all-backend", "all_to_all"),
    "ep2 round robin": (
        "-tp", "2", "--enable-expert-parallel", "--expert-placement-strategy", "round_robin",
    ),
    "dp2 ep2": ("-dp", "2", "--enable-expert-parallel"),
    "dp2 ep2 all_to_all": (
        "-dp", "2", "--enable-expert-parallel", "--all2all-backend", "all_to_all",
    ),
    "ep2 sp": ("-tp", "2", "--enable-expert-parallel", "--enable-sequence-parallel"),
}  # fmt: skip

MATRIX = [
    *((family, shape) for family in (*DENSE, *MOE) for shape in SHAPES),
    *((family, shape) for family in MOE for shape in EXPERT_SHAPES),
    *((family, "tp2 pp2") for family in (*FURTHER_DENSE, *FURTHER_MOE)),
    *((family, "ep2 sp") for family in FURTHER_MOE),
]


@pytest.fixture(scope="session")
def parallel_model_of(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Path, list[list[int]]]]:
    """A tiny model of a family, and what transformers writes after the prompts; made once."""
    made: dict[str, tuple[Path, list[list[int]]]] = {}

    def make(family: str) -> tuple[Path, list[list[int]]]:
        if family not in made:
            model = write_tiny_model(
                tmp_path_factory.mktemp("parallel") / family, family, num_hidden_layers=NUM_LAYERS
            )
            made[family] = model, greedy_by_transformers(model, PROMPTS, NUM_TOKENS)
        return made[family]

    return make


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "shape"), MATRIX)
def test_many_ranks_write_the_tokens_of_one(
    family: str,
    shape: str,
    parallel_model_of: Callable[[str], tuple[Path, list[list[int]]]],
    tmp_path: Path,
) -> None:
    model, expected = parallel_model_of(family)
    flags = ["--dtype", "float32", "--kv-cache-memory-bytes", "32MiB"]
    flags += {**SHAPES, **EXPERT_SHAPES}[shape]
    with pd_deployment(tmp_path, model, *flags) as deployment:
        assert complete_all(deployment.url("proxy"), PROMPTS, max_tokens=NUM_TOKENS) == expected
        assert_kv_moved(deployment, sum(map(len, PROMPTS)))
        assert complete_alone(deployment, PROMPTS, max_tokens=NUM_TOKENS) == expected
        # Again, with warm prefix caches.
        assert complete_all(deployment.url("proxy"), PROMPTS, max_tokens=NUM_TOKENS) == expected
        deployment.wait_nothing_held("prefill", "decode", timeout_s=20.0)


@pytest.fixture(scope="module")
def nodes() -> Iterator[None]:
    """Four nodes with one CPU each, so that the ranks of each engine lie on two of them."""
    with ray_cluster(num_nodes=4, cpus_per_node=1):
        yield


@pytest.mark.matrix
@pytest.mark.parametrize("family", [*DENSE, *MOE])
def test_ranks_of_ray_on_two_nodes_write_the_tokens_of_one(
    family: str,
    nodes: None,
    parallel_model_of: Callable[[str], tuple[Path, list[list[int]]]],
    tmp_path: Path,
) -> None:
    model, expected = parallel_model_of(family)
    flags = ["--dtype", "float32", "--kv-cache-memory-bytes", "32MiB", "--device", "cpu"]
    flags += ["-tp", "2", "--distributed-executor-backend", "ray"]
    serve = Deployment(tmp_path)
    try:
        serve.start("serve", "serve", str(model), "--port", "0", "--num-threads", "1", *flags)
        serve.wait()
        assert complete_all(serve.url("serve"), PROMPTS, max_tokens=NUM_TOKENS) == expected
    finally:
        serve.end()
    with pd_deployment(tmp_path, model, *flags) as deployment:
        got = complete_all(deployment.url("proxy"), PROMPTS, max_tokens=NUM_TOKENS)
        assert got == expected
        assert_kv_moved(deployment, sum(map(len, PROMPTS)))
        assert "on 2 nodes" in deployment.processes["prefill"].log
        assert "on 2 nodes" in deployment.processes["decode"].log
        deployment.wait_nothing_held("prefill", "decode", timeout_s=20.0)
