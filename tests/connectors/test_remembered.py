"""What is over is remembered for its time, and the book does not grow with what came before."""

from __future__ import annotations

from pdserve.connectors.remembered import Remembered


def test_a_key_is_known_with_its_value_until_its_time_is_over() -> None:
    over: Remembered[str] = Remembered()
    over.add("n", "D has it", now_s=0.0, until_s=10.0)
    over.add("m", "D left", now_s=9.9, until_s=19.9)
    assert over.get("n") == "D has it"
    over.add("k", "", now_s=10.0, until_s=20.0)
    assert "n" not in over
    assert over.get("n") is None
    assert over.get("m") == "D left"


def test_the_number_of_keys_is_that_of_one_period_however_many_came() -> None:
    over: Remembered[None] = Remembered()
    for index in range(1000):
        over.add(index, None, now_s=float(index), until_s=index + 10.0)
        assert len(over) <= 10
    assert 999 in over


def test_many_at_once_are_capped_and_the_oldest_goes_first() -> None:
    over: Remembered[None] = Remembered(max_remembered=3)
    for index in range(5):
        over.add(index, None, now_s=0.0, until_s=10.0)
    assert [index for index in range(5) if index in over] == [2, 3, 4]


def test_a_key_that_comes_again_is_remembered_anew() -> None:
    over: Remembered[str] = Remembered()
    over.add("n", "first", now_s=0.0, until_s=10.0)
    over.add("m", "", now_s=0.0, until_s=10.0)
    over.add("n", "second", now_s=5.0, until_s=15.0)
    over.add("k", "", now_s=10.0, until_s=20.0)
    assert "m" not in over
    assert over.get("n") == "second"


def test_no_key_is_forgotten_before_its_time_whatever_the_order_of_times() -> None:
    over: Remembered[None] = Remembered()
    over.add("long", None, now_s=0.0, until_s=100.0)
    over.add("short", None, now_s=0.0, until_s=1.0)
    over.add("k", None, now_s=50.0, until_s=60.0)
    assert "long" in over
    over.add("k", None, now_s=100.0, until_s=110.0)
    assert "long" not in over
    assert "short" not in over


def test_a_key_that_is_taken_back_is_unknown() -> None:
    over: Remembered[str] = Remembered()
    over.add("n", "read", now_s=0.0, until_s=10.0)
    assert over.pop("n") == "read"
    assert over.pop("n") is None
    assert len(over) == 0
