"""Digests that D takes piece by piece are those of the whole, however it comes."""

from __future__ import annotations

import msgspec
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.connectors.conformance.values import make_shape
from pdserve.connectors.digests import BlockDigests
from pdserve.connectors.pieces import pieces
from pdserve.connectors.slicing import routes
from pdserve.connectors.transfer.reservations import Check
from pdserve.wire.ids import BlockId

N = 45
P_TABLE = [BlockId(block) for block in (7, 2, 3, 9, 1, 4, 10, 11, 12, 15, 14, 13)]
D_TABLE = [BlockId(block) for block in (5, 6, 0, 8, 10, 11, 1, 2, 3, 4, 14, 13)]


def shape(block_size: int, tp: int, pp: int):
    made = make_shape(tp=tp, pp=pp, block_size=block_size, num_blocks=16)
    return msgspec.structs.replace(made, head_dim=2)


SHAPES = st.builds(
    shape, st.sampled_from([4, 8, 16]), st.sampled_from([1, 2]), st.sampled_from([1, 2])
)


@given(p=SHAPES, d=SHAPES, data=st.data())
def test_pieces_add_up_to_the_digests_of_p(p, d, data) -> None:
    first = data.draw(st.integers(0, N // max(d.block_size, 4))) * d.block_size
    first = min(first, N - N % d.block_size)
    generator = torch.Generator().manual_seed(1)
    for route in routes(p, d):
        sizes = [
            (s.num_layers // len(s.stages), s.num_planes, s.num_kv_heads // s.tp_size)
            for s in (p, d)
        ]
        ours, theirs = (
            torch.randn((16, *size, s.block_size, 2), generator=generator)
            for size, s in zip(sizes, (p, d), strict=True)
        )
        plan = pieces(p, d, route, P_TABLE, D_TABLE, first_token=first, num_tokens=N)
        units = plan.unit_bytes // 4
        theirs.view(-1, units)[plan.dest_units] = ours.view(-1, units)[plan.source_units]
        wanted = BlockDigests(ours, p, route.source_rank).of(
            P_TABLE, [1] * len(P_TABLE), N, route, first_token=first
        )
        of_d = BlockDigests(theirs, d, route.dest_rank)
        check = Check(of_d, p, route, D_TABLE, first_token=first, num_tokens=N)
        for _ in range(data.draw(st.integers(0, 4))):
            check.settle(data.draw(st.integers(0, N + 3)), data.draw(st.integers(0, 5)))
            piece = check.next_piece()
            if piece is not None:
                check.add(piece, check.take(piece))
        check.settle_all()
        while (piece := check.next_piece()) is not None:
            check.add(piece, check.take(piece))
        assert check.found == wanted
        assert wanted == of_d.found(p, route, D_TABLE, first_token=first, num_tokens=N)


def new_check(*, first_token: int = 0) -> Check:
    source, dest = make_shape(block_size=16), make_shape(block_size=8)
    (route,) = routes(source, dest)
    kv = torch.ones(32, 4, 2, 4, 8, 8)
    digests = BlockDigests(kv, dest, 0)
    return Check(digests, source, route, D_TABLE, first_token=first_token, num_tokens=N)


def spans(check: Check) -> list[tuple[int, int, int, int]]:
    """Take everything that can be taken; say of which tokens and layers it was."""
    found = []
    while (piece := check.next_piece()) is not None:
        check.add(piece, check.take(piece))
        found.append((piece.first_token, piece.end_token, piece.layers.start, piece.layers.stop))
    return found


def test_nothing_is_taken_that_p_has_not_said_to_be_written() -> None:
    check = new_check(first_token=8)
    assert spans(check) == []
    check.settle(8)
    assert spans(check) == []
    check.settle(31)  # no edge of P's blocks
    assert spans(check) == [(8, 16, 0, 4)]
    check.settle(16)
    assert spans(check) == []
    check.settle_all()
    assert spans(check) == [(16, N, 0, 4)]


def test_layers_of_the_last_tokens_are_taken_as_they_come_and_none_twice() -> None:
    check = new_check()
    check.settle(16, 1)
    assert spans(check) == [(0, 16, 0, 4), (16, N, 0, 1)]
    check.settle(16, 3)
    assert spans(check) == [(16, N, 1, 3)]
    check.settle(32, 3)  # more tokens are whole: the layers behind them are taken already
    assert spans(check) == []
    check.settle(N)
    assert spans(check) == [(16, N, 3, 4)]
    check.settle_all()
    assert spans(check) == []
