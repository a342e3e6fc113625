from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.bench.sse import EventParser

STREAM = 'data: {"a": "é€😀"}\n\n: a comment\n\ndata:no space\ndata: and a second line\n\nid: 7\n\n'
EVENTS = ['{"a": "é€😀"}'.encode(), b"no space\nand a second line"]


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@given(cuts=st.lists(st.integers(0, 200)))
def test_events_are_the_same_wherever_reads_end(line_end: str, cuts: list[int]) -> None:
    content = STREAM.replace("\n", line_end).encode()
    parser = EventParser()
    found: list[bytes] = []
    begin = 0
    for end in [*sorted(cut for cut in cuts if cut < len(content)), len(content)]:
        found += parser.feed(content[begin:end])
        begin = end
    # A CR at the very end may be the first half of a line end.
    found += parser.feed(b"\n" if line_end == "\r" else b"")
    assert found == EVENTS


def test_an_event_is_given_with_the_read_that_completes_it() -> None:
    parser = EventParser()
    assert parser.feed(b"data: 1\r\n\r") == []
    assert parser.feed(b"\n") == [b"1"]
    assert parser.feed(b"data: 2\n\ndata: 3\n") == [b"2"]
    assert parser.feed(b"\n") == [b"3"]


def test_a_byte_order_mark_is_no_part_of_the_first_event() -> None:
    parser = EventParser()
    assert parser.feed(b"\xef\xbb") == []
    assert parser.feed(b"\xbfdata: 1\n\n") == [b"1"]


def test_empty_data_is_an_event() -> None:
    assert EventParser().feed(b"data:\n\nevent: x\n\n") == [b""]
