"""What several ranks say while they start, as few lines."""

from __future__ import annotations

from pdserve.executor.ranked import StartProgress
from pdserve.observe.clock import ManualClock


def test_what_all_ranks_say_is_told_once() -> None:
    lines: list[str] = []
    progress = StartProgress(2, clock=ManualClock(), tell=lines.append)
    for text in ("weights 50 %", "weights 100 %"):
        progress.note(0, text)
        progress.note(1, text)
    assert lines == ["all 2 ranks: weights 50 %", "all 2 ranks: weights 100 %"]


def test_a_rank_that_goes_ahead_or_lags_behind_is_told_of_after_a_while() -> None:
    lines: list[str] = []
    clock = ManualClock()
    progress = StartProgress(2, clock=clock, tell=lines.append)
    progress.note(0, "weights 50 %")
    progress.tick()
    assert lines == []
    clock.advance(5.0)
    progress.tick()
    progress.note(1, "weights 50 %")
    assert lines == ["rank 0: weights 50 %", "all 2 ranks: weights 50 %"]


def test_one_rank_alone_is_told_as_it_speaks() -> None:
    lines: list[str] = []
    progress = StartProgress(1, clock=ManualClock(), tell=lines.append)
    progress.note(0, "weights 50 %")
    assert lines == ["weights 50 %"]


def test_the_last_words_of_each_rank_are_known() -> None:
    progress = StartProgress(2, clock=ManualClock(), tell=lambda line: None)
    progress.note(1, "weights 50 %")
    progress.note(1, "weights 60 %")
    assert (progress.last(0), progress.last(1)) == (None, "weights 60 %")
