"""The router and the experts in the interpreter: parity, ties, and what moves a token's bits."""

from __future__ import annotations

import pytest
import torch

from pdserve.kernels.backend import KernelBackend
from pdserve.kernels.cases.case import Case
from pdserve.kernels.cases.table import OPERATIONS
from pdserve.kernels.cuda.experts import CudaExperts
from pdserve.kernels.cuda.router import route
from pdserve.kernels.reference.moe import PackedExperts, RoutingRule
from pdserve.kernels.reference.moe import route as reference_route

# What saturates, and the lanes beside a row.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")

CPU = torch.device("cpu")
KERNELS = KernelBackend(name="cuda", description="", route=route, experts=CudaExperts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        # Of many rows; others have the same rules.
        pytest.param(
            case,
            id=case.name,
            marks=[pytest.mark.matrix]
            * (case.name in {"mixtral", "groups_by_best", "groups_with_ties"}),
        )
        for case in OPERATIONS["route"].cases()
    ],
)
def test_chosen_experts_are_those_of_the_reference(case: Case) -> None:
    args = case.make(torch.float32, CPU)
    (expected_ids, expected), (ids, weights) = reference_route(*args), route(*args)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


def test_experts_of_closed_groups_come_last_and_by_index() -> None:
    rule = RoutingRule(4, num_groups=4, top_k_groups=1)
    logits = torch.tensor([[0.0, 1, 2, 3, 9, 8, 7, 6]])
    assert route(logits, None, rule)[0].tolist() == reference_route(logits, None, rule)[0].tolist()


def test_a_row_of_nan_chooses_experts_that_exist_with_weights_of_nan() -> None:
    logits = torch.randn(3, 6)
    logits[1] = float("nan")
    ids, weights = route(logits, None, RoutingRule(2, normalize=True))
    assert ids[1].tolist() == [0, 1]
    assert weights[1].isnan().all()
    assert weights[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    ("logits", "groups"),
    [(torch.ones(2, 8).half(), 1), (torch.ones(8, 2).T, 1), (torch.ones(2, 9), 2)],
    ids=["dtype", "strided", "groups"],
)
def test_logits_of_another_kind_are_refused(logits: torch.Tensor, groups: int) -> None:
    with pytest.raises(TypeError):
        route(logits, None, RoutingRule(1, num_groups=groups, top_k_groups=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(
            case,
            dtype,
            id=f"{case.name}-{dtype}",
            # The small tiles of fp32 are slow.
            marks=[pytest.mark.matrix]
            * (dtype is torch.float32 and case.name not in {"empty", "one_token", "odd_sizes"}),
        )
        for case in OPERATIONS["experts"].cases()
        for dtype in (torch.float32, torch.float16)
    ],
)
def test_experts_give_what_the_reference_does(case: Case, dtype: torch.dtype) -> None:
    op = OPERATIONS["experts"]
    args = case.make(dtype, CPU)
    tolerance = op.tolerance[dtype]
    torch.testing.assert_close(
        op.of(KERNELS)(*args), op.reference(*args), rtol=tolerance, atol=tolerance
    )


def packed(num_experts: int, width: int, inner: int, dtype: torch.dtype) -> PackedExperts:
    layer = KERNELS.experts(num_experts, width, inner, dtype=dtype, device=CPU)
    for expert in range(num_experts):
        layer.write_gate(expert, torch.randn(inner, width))
        layer.write_up(expert, torch.randn(inner, width))
        layer.write_down(expert, torch.randn(width, inner))
    return layer


def test_a_token_has_the_same_bits_whatever_is_beside_it() -> None:
    # At the same place of a tile, which NumPy's product depends on: no other row chose its experts.
    layer = packed(4, 48, 32, torch.float32)
    x, ids = torch.randn(9, 48), torch.randint(2, 4, (9, 2))
    ids[5] = torch.tensor([1, 0])
    factors = torch.rand(9, 2)
    alone = layer(x[5:6], ids[5:6], factors[5:6])
    x[:5] = float("nan")
    found = layer(x, ids, factors)
    assert torch.equal(found[5:6], alone)
    assert found[:5].isnan().all()
    assert found[6:].isfinite().all()


def test_ids_of_other_experts_add_nothing() -> None:
    layer = packed(3, 16, 16, torch.float32)
    x, factors = torch.randn(3, 16), torch.rand(3, 2)
    found = layer(x, torch.tensor([[-1, 3], [0, -5], [7, 0]]), factors)
    assert (found[0] == 0).all()
    expected = layer(x[1:2], torch.tensor([[0]]), factors[1:2, :1].contiguous())
    torch.testing.assert_close(found[1:2], expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64], ids=["ids", "weights"])
def test_choices_of_another_kind_are_refused(dtype: torch.dtype) -> None:
    ids, factors = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    with pytest.raises(TypeError):
        packed(1, 16, 16, torch.float32)(
            torch.ones(1, 16),
            ids.to(dtype) if dtype == torch.int32 else ids,
            factors.to(dtype) if dtype == torch.float64 else factors,
        )
