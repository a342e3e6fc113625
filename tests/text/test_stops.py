from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.text.stops import StopMatcher

LETTERS = st.text(alphabet="ab", max_size=12)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)


def run(stops: list[str], cuts: list[str], *, include: bool = False) -> tuple[str, str | None]:
    """Feed the pieces; return the text that was shown and the stop string that ended it."""
    matcher = StopMatcher(stops, include_stop=include)
    shown = ""
    for piece in cuts:
        released = matcher.push(piece)
        shown += released.text
        if released.stop is not None:
            return shown, released.stop
    return shown + matcher.flush(), None


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """The definition: the match that ends first, and among those the longest."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(stops=STOPS, cuts=st.lists(LETTERS, max_size=6))
def test_the_result_does_not_depend_on_how_the_text_is_cut(stops: list[str], cuts: list[str]):
    assert run(stops, cuts) == expected(stops, "".join(cuts))


@given(stops=STOPS, text=LETTERS)
def test_included_stops_are_the_only_difference(stops: list[str], text: str):
    shown, stop = run(stops, list(text))
    assert run(stops, list(text), include=True) == (shown + (stop or ""), stop)


def test_text_that_may_become_a_stop_is_held_back():
    matcher = StopMatcher(["END"], include_stop=False)
    assert matcher.push("the E").text == "the "
    assert matcher.push("N").text == ""
    assert matcher.push("O").text == "ENO"


def test_a_stop_that_ends_too_early_is_text():
    matcher = StopMatcher(["ab"], include_stop=False)
    assert matcher.push("xab", may_stop=False).stop is None
    released = matcher.push("yab")
    assert released.stop == "ab"
    assert released.text == "y"
