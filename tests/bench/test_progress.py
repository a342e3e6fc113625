from __future__ import annotations

import io

import pytest

from pdserve.bench.histogram import Histogram
from pdserve.bench.progress import ProgressLine, shown
from pdserve.bench.runner import RunProgress


def progress(elapsed_s: float, done: int, **fields: object) -> RunProgress:
    return RunProgress(
        **{  # type: ignore[arg-type]
            "elapsed_s": elapsed_s,
            "total": 100,
            "done": done,
            "in_flight": 3,
            "failed": 0,
            "num_output_tokens": done * 10,
            "last_due_s": 50.0,
            "ttft_p50_s": 0.05,
            "itl_p99_s": 0.012,
            **fields,
        }
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_it_says_how_far_how_fast_and_how_long_still() -> None:
    assert shown(progress(10.0, 20, failed=2)) == (
        "20/100 done | 3 in flight | 2 failed | 2.0 req/s | 20 tok/s | TTFT p50 50.0 ms | "
        "ITL p99 12.0 ms | 0:40 left"
    )


def test_what_is_left_follows_the_schedule_or_the_pace_whichever_is_longer() -> None:
    assert "1:40 left" in shown(progress(100.0, 50))
    assert "0:49 left" in shown(progress(1.0, 90))
    assert "left" not in shown(progress(100.0, 100))


def test_a_terminal_sees_one_line_that_is_rewritten_and_taken_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    out = Terminal()
    line = ProgressLine(out)
    line(progress(1.0, 1))
    line(progress(1.2, 2))
    line.close()
    assert "\n" not in out.getvalue()
    first, second, last = out.getvalue().split("\r\x1b[2K")[1:]
    assert (first[:5], second[:5], last) == ("1/100", "2/100", "")
    assert len(second) < 30


def test_a_file_gets_a_line_every_few_seconds() -> None:
    out = io.StringIO()
    line = ProgressLine(out)
    for tenth in range(120):
        line(progress(tenth / 10, tenth))
    line.close()
    assert len(out.getvalue().splitlines()) == 3


@pytest.mark.parametrize("percent", [1, 50, 99, 100])
def test_percentiles_of_a_histogram_are_close(percent: float) -> None:
    histogram = Histogram()
    for ms in range(1, 1001):
        histogram.add(ms / 1e3)
    assert histogram.percentile(percent) == pytest.approx(percent / 100, rel=0.02)


def test_an_empty_histogram_has_no_percentile() -> None:
    assert Histogram().percentile(50) is None
