"""The planner of groups, by properties: nothing here starts a process."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import InternalError
from pdserve.parallel.mesh import Axis, Mesh, MeshShape, split_layers

_GRID_AXES = (Axis.EXTERNAL_DP, Axis.DP, Axis.PP, Axis.PCP, Axis.TP)
_sizes = st.integers(1, 3)
_shapes = st.builds(
    MeshShape, external_dp=st.integers(1, 2), dp=_sizes, pp=_sizes, pcp=st.integers(1, 2), tp=_sizes
)
_axes = st.sampled_from(Axis)


def _size(shape: MeshShape, axis: Axis) -> int:
    match axis:
        case Axis.EP:
            return shape.dp * shape.pcp * shape.tp
        case Axis.WORLD:
            return shape.external_dp * shape.dp * shape.pp * shape.pcp * shape.tp
        case _:
            return getattr(shape, axis.value)


@given(_shapes, _axes)
def test_every_rank_is_in_exactly_one_group_of_each_axis(shape: MeshShape, axis: Axis) -> None:
    members = itertools.chain.from_iterable(shape.groups(axis))
    assert sorted(members) == list(range(shape.world_size))


@given(_shapes, _axes)
def test_every_group_of_an_axis_has_the_size_of_the_axis(shape: MeshShape, axis: Axis) -> None:
    assert {len(ranks) for ranks in shape.groups(axis)} == {_size(shape, axis)}


@given(_shapes, _axes)
def test_all_members_of_a_group_see_the_same_group(shape: MeshShape, axis: Axis) -> None:
    for ranks in shape.groups(axis):
        assert {Mesh(shape, rank).group(axis) for rank in ranks} == {ranks}


@given(_shapes, _axes)
def test_a_ranks_index_is_its_place_in_the_rising_group(shape: MeshShape, axis: Axis) -> None:
    for rank in range(shape.world_size):
        mesh = Mesh(shape, rank)
        assert mesh.group(axis)[mesh.index(axis)] == rank
        assert list(mesh.group(axis)) == sorted(mesh.group(axis))


@given(_shapes)
def test_coordinates_number_the_grid_without_gaps_or_repeats(shape: MeshShape) -> None:
    found = [
        tuple(shape.coordinates(rank)[axis] for axis in _GRID_AXES)
        for rank in range(shape.world_size)
    ]
    assert found == list(itertools.product(*(range(_size(shape, axis)) for axis in _GRID_AXES)))


@given(_shapes, st.sampled_from(_GRID_AXES))
def test_ranks_of_a_group_differ_in_its_axis_alone(shape: MeshShape, axis: Axis) -> None:
    for ranks in shape.groups(axis):
        for other in set(_GRID_AXES) - {axis}:
            assert len({shape.coordinates(rank)[other] for rank in ranks}) == 1


@given(_shapes)
def test_experts_are_shared_within_one_stage_of_one_external_replica(shape: MeshShape) -> None:
    for ranks in shape.groups(Axis.EP):
        at = [shape.coordinates(rank) for rank in ranks]
        assert len({(here[Axis.EXTERNAL_DP], here[Axis.PP]) for here in at}) == 1


@given(_shapes, st.sampled_from([-1, 0]))
def test_a_rank_outside_the_mesh_has_no_coordinates(shape: MeshShape, before: int) -> None:
    with pytest.raises(InternalError, match="not in a mesh"):
        shape.coordinates(before if before < 0 else shape.world_size)


@pytest.mark.parametrize("axis", _GRID_AXES)
@pytest.mark.parametrize("size", [0, -1])
def test_an_axis_without_ranks_is_refused(axis: Axis, size: int) -> None:
    with pytest.raises(InternalError, match="empty"):
        MeshShape(**{axis.value: size})


_layers_and_stages = st.integers(1, 12).flatmap(
    lambda stages: st.tuples(st.integers(stages, 70), st.just(stages))
)


@given(_layers_and_stages)
def test_a_split_covers_every_layer_once_in_order(sizes: tuple[int, int]) -> None:
    num_layers, num_stages = sizes
    split = split_layers(num_layers, num_stages)
    assert list(itertools.chain.from_iterable(split)) == list(range(num_layers))
    assert len(split) == num_stages


@given(_layers_and_stages)
def test_stages_differ_by_at_most_one_layer(sizes: tuple[int, int]) -> None:
    counts = [len(stage) for stage in split_layers(*sizes)]
    assert max(counts) - min(counts) <= 1


@given(_layers_and_stages)
def test_the_first_stage_never_has_more_layers_than_another(sizes: tuple[int, int]) -> None:
    counts = [len(stage) for stage in split_layers(*sizes)]
    assert counts[0] == min(counts)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_explicit_counts_win(counts: list[int]) -> None:
    split = split_layers(sum(counts), len(counts), tuple(counts))
    assert [len(stage) for stage in split] == counts
    assert list(itertools.chain.from_iterable(split)) == list(range(sum(counts)))


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "explicit"),
    [
        (2, 3, ()),  # a stage without layers
        (5, 2, (2, 2)),  # a layer without a stage
        (5, 2, (2, 2, 1)),  # too many stages
        (5, 2, (5, 0)),
        (5, 2, (6, -1)),
    ],
)
def test_a_split_that_leaves_something_out_is_refused(
    num_layers: int, num_stages: int, explicit: tuple[int, ...]
) -> None:
    with pytest.raises(InternalError, match="do not split"):
        split_layers(num_layers, num_stages, explicit)
