"""Tables for people."""

from __future__ import annotations

from pdserve.observe.tables import aligned


def test_columns_are_as_wide_as_their_widest_cell_and_figures_stand_to_the_right() -> None:
    rows = [("", "a", "a long title"), ("words", "12345678.9", "1"), ("more words", "2", "")]
    assert aligned(rows) == [
        "                     a  a long title",
        "words       12345678.9             1",
        "more words           2",
    ]
