"""Our routers against those of transformers, and what they promise beyond them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from pdserve.kernels.registry import kernels_on
from pdserve.models.arch import MoeArch, Scoring
from pdserve.models.layers.moe import ExpertRouter
from pdserve.models.layers.parameter import Placement
from pdserve.models.reading import parse_arch

CPU = torch.device("cpu")
BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
DEEPSEEK: dict[str, Any] = {
    **BASE,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 0,
    "n_routed_experts": 32,
    "num_experts_per_tok": 5,
}


@dataclass(frozen=True)
class Case:
    """A family, its router in transformers, and what the configuration says."""

    family: str
    router: str
    fields: dict[str, Any]


CASES = {
    "mixtral": Case("Mixtral", "MixtralTopKRouter", {**BASE, "num_local_experts": 8}),
    "qwen3_moe": Case("Qwen3Moe", "Qwen3MoeTopKRouter", {**BASE, "num_experts": 60}),
    "qwen3_moe, normalized": Case(
        "Qwen3Moe", "Qwen3MoeTopKRouter", {**BASE, "num_experts": 60, "norm_topk_prob": True}
    ),
    "deepseek_v2, greedy": Case(
        "DeepseekV2", "DeepseekV2TopkRouter", {**DEEPSEEK, "routed_scaling_factor": 16.0}
    ),
    "deepseek_v2, groups": Case(
        "DeepseekV2",
        "DeepseekV2TopkRouter",
        {**DEEPSEEK, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3},
    ),
    "deepseek_v3": Case(
        "DeepseekV3", "DeepseekV3TopkRouter", {**DEEPSEEK, "n_group": 8, "topk_group": 4}
    ),
    "deepseek_v3, plain scores": Case(
        "DeepseekV3",
        "DeepseekV3TopkRouter",
        {**DEEPSEEK, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "glm4_moe": Case("Glm4Moe", "Glm4MoeTopkRouter", {**DEEPSEEK, "n_group": 4, "topk_group": 2}),
    "glm4_moe_lite": Case(
        "Glm4MoeLite",
        "Glm4MoeLiteTopkRouter",
        {**DEEPSEEK, "first_k_dense_replace": 1, "routed_scaling_factor": 3.0},
    ),
    "gpt_oss": Case("GptOss", "GptOssTopKRouter", {**BASE, "num_local_experts": 32}),
}


def make(case: Case) -> tuple[Any, ExpertRouter]:
    """The same router twice: of transformers, and ours; their biases are random."""
    import transformers

    torch.manual_seed(7)
    config = getattr(transformers, f"{case.family}Config")(**case.fields)
    name = {
        "Qwen3Moe": "qwen3_moe",
        "DeepseekV2": "deepseek_v2",
        "DeepseekV3": "deepseek_v3",
        "Glm4Moe": "glm4_moe",
        "Glm4MoeLite": "glm4_moe_lite",
        "GptOss": "gpt_oss",
    }.get(case.family, case.family.lower())
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    theirs = getattr(module, case.router)(config)
    torch.nn.init.normal_(theirs.weight, std=0.3)
    stored = {"gate.weight": theirs.weight.data}
    bias = getattr(theirs, "e_score_correction_bias", None)
    if bias is not None:
        stored["gate.e_score_correction_bias"] = bias.normal_(std=0.3)
    if hasattr(theirs, "bias"):
        stored["gate.bias"] = torch.nn.init.normal_(theirs.bias).data
    described = {**config.to_dict(), "architectures": [f"{case.family}ForCausalLM"]}
    moe = parse_arch(described).moe
    assert moe is not None
    ours = ExpertRouter(moe, config.hidden_size, Placement(CPU, torch.float32, kernels_on(CPU)))
    load(ours, stored)
    return theirs, ours


def load(router: ExpertRouter, stored: dict[str, Tensor]) -> None:
    slots = dict(router.slots(""))
    assert slots.keys() == stored.keys()
    for name, slot in slots.items():
        assert slot.load is not None
        slot.load(stored[name])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_experts_and_weights_are_those_of_transformers(case: Case) -> None:
    theirs, ours = make(case)
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        _, weights, ids = theirs(x)
    routing = ours(x)
    order, expected = routing.expert_ids.sort(-1), ids.sort(-1)
    assert torch.equal(order.values, expected.values)
    torch.testing.assert_close(
        routing.weights.gather(1, order.indices), weights.gather(1, expected.indices)
    )


MOE = MoeArch(layers=(True,), num_experts=6, top_k=3, intermediate_size=1)


def router_of(moe: MoeArch, weight: Tensor, bias: Tensor | None = None) -> ExpertRouter:
    placement = Placement(CPU, torch.float32, kernels_on(CPU))
    router = ExpertRouter(moe, weight.shape[1], placement)
    stored = {"gate.weight": weight}
    if bias is not None:
        stored["gate.e_score_correction_bias"] = bias
    load(router, stored)
    return router


def test_the_best_expert_comes_first_and_ties_go_to_the_lower_index() -> None:
    router = router_of(MOE, torch.tensor([1.0, 2, 0, 2, 1, 2])[:, None])
    assert router(torch.ones(2, 1)).expert_ids.tolist() == [[1, 3, 5]] * 2


def test_a_bias_decides_the_choice_and_not_the_weights() -> None:
    moe = msgspec.structs.replace(
        MOE, scoring=Scoring.SIGMOID, has_correction_bias=True, normalize_weights=False
    )
    bias = torch.tensor([0.0, 0, 0, 9, 0, 0])
    routing = router_of(moe, torch.zeros(6, 1), bias)(torch.ones(1, 1))
    assert routing.expert_ids.tolist() == [[3, 0, 1]]
    torch.testing.assert_close(routing.weights, torch.full((1, 3), 0.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_are_fp32_whatever_the_models_dtype(dtype: torch.dtype) -> None:
    weight = torch.ones(2, 64)
    weight[1, 0] -= 2.0**-8
    moe = MoeArch(
        layers=(True,), num_experts=2, top_k=2, intermediate_size=1, normalize_weights=False
    )
    router = ExpertRouter(moe, 64, Placement(CPU, dtype, kernels_on(CPU)))
    load(router, {"gate.weight": weight})
    # 64 against 64 - 1/256, which have the same 11 leading bits.
    first, second = router(torch.ones(1, 64, dtype=dtype)).weights[0].tolist()
    assert first > second


def test_a_row_of_nan_gets_experts_of_its_own_all_the_same() -> None:
    router = router_of(MOE, torch.randn(6, 2))
    ids = router(torch.full((1, 2), float("nan"))).expert_ids[0].tolist()
    assert len(set(ids)) == 3
    assert set(ids) <= set(range(6))
