"""Linear layers and heads in the interpreter: parity, and what a row's bits may not depend on.

NumPy multiplies the tiles, or `mma_model` where the order in which a tensor core sums matters.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pdserve.kernels.backend import REFERENCE, KernelBackend, NotTakenError
from pdserve.kernels.cases.case import Case
from pdserve.kernels.cases.table import OPERATIONS, OperationSpec
from pdserve.kernels.cuda import activation, tiles
from pdserve.kernels.cuda.descriptors import Descriptors, can_describe
from pdserve.kernels.cuda.halves import CudaMlp, make_mlp
from pdserve.kernels.cuda.heads import CudaHeads
from pdserve.kernels.cuda.launch import Tuning
from pdserve.kernels.cuda.linear import CudaLinear, multiply, multiply_gated
from pdserve.kernels.cuda.tiles import ProductTile, experts_tiles, heads_tile, linear_tile
from pdserve.kernels.reference.activation import silu_and_mul
from pdserve.kernels.reference.halves import Mlp, MlpWeights
from pdserve.kernels.reference.linear import linear as reference_linear

CPU = torch.device("cpu")
KERNELS = KernelBackend(
    name="cuda",
    description="",
    silu_and_mul=activation.silu_and_mul,
    linear=CudaLinear,
    heads=CudaHeads,
    mlp=make_mlp,
)
LARGE = {
    ("131x576x4100_bias", torch.float16),
    ("1x16x512x128_strided", torch.float32),
    ("1x16x512x128_strided", torch.float16),
    ("33x4x128x512", torch.float32),
    ("64x320x1536", torch.float32),
    ("1x576x576", torch.float32),
    ("600x2x32x24_strided", torch.float32),
}
"""What takes more than a second, and in another dtype or shape less."""

ROWS = [
    pytest.param(
        OPERATIONS[name],
        case,
        dtype,
        id=f"{name}-{case.name}-{dtype}",
        marks=[pytest.mark.matrix] if (case.name, dtype) in LARGE else [],
    )
    for name in ("linear", "head_linear")
    for case in OPERATIONS[name].cases()
    for dtype in (torch.float32, torch.float16)
    # Half a minute, with the small tiles of fp32.
    if (case.name, dtype) != ("131x576x4100_bias", torch.float32)
]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def beside_nan(num_rows: int, *shape: int) -> torch.Tensor:
    """Return random rows, behind which as many as fill any tile are NaN."""
    both = torch.full((num_rows + 64, *shape), float("nan"))
    both[:num_rows] = random(num_rows, *shape)
    return both[:num_rows]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "case", "dtype"), ROWS)
def test_products_are_those_of_the_reference(
    op: OperationSpec, case: Case, dtype: torch.dtype
) -> None:
    args = case.make(dtype, CPU)
    expected, found = op.reference(*args), op.of(KERNELS)(*args)
    tolerance = op.tolerance[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


OVERLAPPING = Tuning(4, overlaps=True)
TILES = {
    "plain": ProductTile(rows=16, cols=32, depth=64, tuning=OVERLAPPING),
    "swapped": ProductTile(rows=16, cols=64, depth=32, tuning=OVERLAPPING, swapped=True),
    "grouped": ProductTile(rows=32, cols=16, depth=16, tuning=OVERLAPPING, group=2),
    "described": ProductTile(rows=16, cols=32, depth=64, tuning=OVERLAPPING, described=True),
    "described swapped": ProductTile(
        rows=32, cols=64, depth=32, tuning=OVERLAPPING, described=True, swapped=True
    ),
}


WIDE = ProductTile(rows=16, cols=32, depth=32, tuning=OVERLAPPING, described=True, extra_cols=16)
WIDE_TILES = {"wide": WIDE, "wide swapped": replace(WIDE, cols=64, extra_cols=32, swapped=True)}


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("tile", (TILES | WIDE_TILES).values(), ids=TILES | WIDE_TILES)
@pytest.mark.parametrize("shape", [(50, 96, 128), (20, 80, 64), (33, 70, 72), (5, 40, 33)], ids=str)
def test_every_tile_gives_the_product(tile: ProductTile, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    x, weight, bias = beside_nan(m, 1, k), random(1, n, k, seed=2), random(n, seed=3)
    out = torch.full((m, 1, n), float("nan"))
    multiply(x, weight, bias, out, tile)
    torch.testing.assert_close(out[:, 0], x[:, 0] @ weight[0].T + bias, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("shape", [(20, 32, 64), (33, 70, 72)], ids=str)
def test_every_tile_gives_the_product_and_its_activation(
    tile: ProductTile, shape: tuple[int, int, int]
) -> None:
    m, inner, k = shape
    x, weight, bias = beside_nan(m, k), random(2 * inner, k, seed=2), random(2 * inner, seed=3)
    out = torch.full((m, inner), float("nan"))
    multiply_gated(x, weight, bias, out, tile)
    expected = silu_and_mul(x @ weight.T + bias)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_what_is_not_aligned_is_loaded_without_descriptors() -> None:
    x, weight = random(5 * 64 + 1)[1:].view(5, 64), random(48, 64, seed=2)
    assert can_describe(weight)
    assert not can_describe(x)
    assert not can_describe(random(48, 66))
    assert not can_describe(weight[:0])
    out = torch.empty(5, 1, 48)
    multiply(x[:, None], weight[None], None, out, TILES["described"])
    torch.testing.assert_close(out[:, 0], x @ weight.T, rtol=1e-4, atol=1e-4)


def test_a_weight_keeps_its_descriptors() -> None:
    weight = random(48, 64)
    kept = Descriptors(weight)
    assert kept.of_tiles(16, 32) is kept.of_tiles(16, 32)
    assert kept.of_tiles(16, 32) is not kept.of_tiles(16, 64)


@pytest.mark.parametrize("num_rows", [65, 96, 128, 200, 256, 300, 512, 2048, 8192])
@pytest.mark.parametrize("num_cols", [1024, 4096, 6144, 28672])
def test_many_rows_take_the_tile_whose_waves_are_shortest(num_rows: int, num_cols: int) -> None:
    tile = linear_tile(num_rows, num_cols, torch.bfloat16)
    assert tile.described
    if num_rows >= 2048 and num_cols >= 4096:
        assert (tile.rows, tile.cols) == (256, 128)
    if num_rows <= 128 and num_cols <= 4096:
        assert tile.num_programs(num_rows, num_cols) <= 132


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_has_the_same_bits_whatever_is_beside_it(dtype: torch.dtype) -> None:
    # At the same place of a tile, which NumPy's product depends on.
    layer = KERNELS.linear_of(random(80, 200, dtype=dtype), random(80, dtype=dtype, seed=4))
    x = random(16, 200, dtype=dtype, seed=2)
    alone = layer(x[:1])
    x[1:] = float("nan")
    for num_rows in (2, 7, 16):
        assert torch.equal(layer(x[:num_rows])[:1], alone)


FEW_AND_MANY = (1, 16, 17, *range(64, 1024, 32), 4000)
SHIPPED = dict.fromkeys(
    [linear_tile(m, n, torch.float16) for m in FEW_AND_MANY for n in (64, 4096, 6144, 28672)]
    + [heads_tile(m, torch.float16) for m in FEW_AND_MANY]
    + [tile for m in FEW_AND_MANY for tile in experts_tiles(m, 1, torch.float16)]
)
"""Every tile of the tables."""


@pytest.mark.slow
@pytest.mark.usefixtures("hopper_products")
def test_every_tile_of_the_tables_gives_equal_bits() -> None:
    x, weight = random(3, 1, 400, dtype=torch.float16), random(1, 72, 400, dtype=torch.float16)
    out = {tile: torch.empty(3, 1, 72) for tile in SHIPPED}
    for tile, into in out.items():
        multiply(x, weight, None, into, tile)
    wanted = out[linear_tile(1, 72, torch.float16)]
    assert [tile for tile, found in out.items() if not torch.equal(found, wanted)] == []
    assert len(out) > 10


@pytest.mark.slow
@pytest.mark.usefixtures("hopper_products")
def test_a_row_of_few_or_of_many_has_equal_bits() -> None:
    layer = KERNELS.linear_of(random(72, 208, dtype=torch.float16))
    x = random(150, 208, dtype=torch.float16, seed=2)
    whole = layer(x)
    for first, last in [(0, 1), (40, 56), (7, 71), (50, 150)]:
        assert torch.equal(layer(x[first:last]), whole[first:last])


@pytest.mark.usefixtures("hopper_products")
def test_a_split_of_k_would_give_other_bits() -> None:
    x, weight = random(3, 1, 256, dtype=torch.float16), random(1, 72, 256, dtype=torch.float16)
    whole, first, rest = torch.empty(3, 3, 1, 72)
    tile = linear_tile(1, 72, torch.float16)
    multiply(x, weight, None, whole, tile)
    multiply(x[..., :128], weight[..., :128].contiguous(), None, first, tile)
    multiply(x[..., 128:], weight[..., 128:].contiguous(), None, rest, tile)
    torch.testing.assert_close(first + rest, whole)
    assert not torch.equal(first + rest, whole)


def test_a_result_of_another_dtype_is_rounded_once() -> None:
    x, weight = random(3, 64, dtype=torch.float16), random(40, 64, dtype=torch.float16, seed=2)
    found = KERNELS.linear_of(weight, out_dtype=torch.float32)(x)
    assert found.dtype == torch.float32
    exact = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


def test_a_product_is_written_where_the_caller_says() -> None:
    layer, x = KERNELS.linear_of(random(24, 32)), random(5, 32, seed=2)
    out = torch.empty(5, 24)
    assert layer(x, out) is out
    assert torch.equal(out, layer(x))


def test_heads_write_between_what_lies_there() -> None:
    x, weight = random(5, 3, 20)[..., :16], random(3, 24, 16, seed=2)
    out = torch.full((5, 3, 40), 7.0)
    KERNELS.heads(weight)(x, out[..., :24])
    expected = torch.einsum("thk,hnk->thn", x, weight)
    torch.testing.assert_close(out[..., :24], expected, rtol=1e-4, atol=1e-4)
    assert (out[..., 24:] == 7).all()


def test_nan_in_a_row_stays_in_it() -> None:
    x = random(4, 40)
    x[1] = float("nan")
    found = KERNELS.linear_of(random(33, 40, seed=2))(x)
    assert found[1].isnan().all()
    assert found[[0, 2, 3]].isfinite().all()


def test_other_dtypes_are_not_taken() -> None:
    weight = torch.ones(2, 4, 4, dtype=torch.float64)
    with pytest.raises(NotTakenError, match="float64"):
        KERNELS.linear_of(weight[0])
    with pytest.raises(NotTakenError, match="float64"):
        KERNELS.heads(weight)


@pytest.mark.parametrize(
    ("x", "out"),
    [
        (torch.ones(2, 5), None),
        (torch.ones(2, 4).half(), None),
        (torch.ones(4, 2).T, None),
        (torch.ones(2, 4), torch.ones(2, 5)),
    ],
    ids=["depth", "dtype", "strided", "out"],
)
def test_rows_of_another_shape_are_refused(x: torch.Tensor, out: torch.Tensor | None) -> None:
    with pytest.raises(TypeError):
        KERNELS.linear_of(torch.ones(6, 4))(x, out)


def test_fp32_has_one_tile_for_every_number_of_rows() -> None:
    found = {linear_tile(m, n, torch.float32) for m in (1, 17, 9000) for n in (8, 128256)}
    assert found == {tiles.FP32}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "bias"),
    [
        *((0, True), (1, False), (65, True)),
        *(
            pytest.param(*each, marks=pytest.mark.matrix)
            for each in ((0, False), (1, True), (40, True), (40, False), (65, False))
        ),
    ],
)
def test_an_mlp_has_the_bits_of_its_operations(num_rows: int, bias: bool) -> None:
    # Columns keep their places in tiles of 64, which NumPy's product depends on.
    width, inner = 48, 64
    gate_up = KERNELS.linear_of(random(2 * inner, width), random(2 * inner) if bias else None)
    down = KERNELS.linear_of(random(width, inner, seed=3))
    weights = MlpWeights(random(width, seed=4), 1e-5, gate_up, down)
    x, residual = random(num_rows, width, seed=5), random(num_rows, width, seed=6)
    expected_residual = residual.clone()
    expected = Mlp(KERNELS, weights)(x, expected_residual)
    mlp = KERNELS.mlp(KERNELS, weights)
    assert isinstance(mlp, CudaMlp)
    assert torch.equal(mlp(x, residual), expected)
    assert torch.equal(residual, expected_residual)


def test_an_mlp_in_half_precision_is_that_of_the_reference() -> None:
    width, inner = 64, 72
    weight = random(2 * inner, width, dtype=torch.float16) / width**0.5
    x = random(19, width, dtype=torch.float16, seed=2)
    layer = KERNELS.linear_of(weight)
    assert isinstance(layer, CudaLinear)
    torch.testing.assert_close(
        layer.call_gated(x), silu_and_mul(reference_linear(x, weight)), rtol=4e-3, atol=4e-3
    )


def test_another_linear_layer_is_left_to_the_reference() -> None:
    gate_up, down = REFERENCE.linear_of(random(8, 4)), REFERENCE.linear_of(random(4, 4))
    assert type(KERNELS.mlp(KERNELS, MlpWeights(random(4), 1e-5, gate_up, down))) is Mlp
