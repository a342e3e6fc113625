"""What the dashboard remembers of what happened, sentence by sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.proxy.dashboard.journal import (
    FAILED,
    MAX_EVENTS,
    RUNGS,
    STORE_UP,
    EngineSight,
    Journal,
    Sight,
    changes,
)
from pdserve.proxy.metrics import OUTCOMES
from pdserve.proxy.story import LadderRung

P, D = "http://p:1", "http://d:2"
WELL = Sight(
    engines={
        P: EngineSight("prefill", "ready", incarnation="a"),
        D: EngineSight("decode", "ready", incarnation="b", figures={STORE_UP: 1.0}),
    },
    pairs={(P, D, "push"): "closed"},
    rungs={("other_decode", "dropped"): 2},
    outcomes={"ok": 10, "error": 1, "shed": 0},
)


def with_engine(url: str, **changed: object) -> Sight:
    return replace(WELL, engines={**WELL.engines, url: replace(WELL.engines[url], **changed)})


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (WELL, []),
        (
            replace(WELL, engines={**WELL.engines, "http://x:3": EngineSight("decode", "unknown")}),
            [("good", "decode engine x:3 joined: unknown")],
        ),
        (
            replace(WELL, engines={P: WELL.engines[P]}),
            [("bad", "decode engine d:2 is gone: it left, or its lease ran out")],
        ),
        (
            with_engine(D, health="unreachable", reason="cannot connect"),
            [("bad", "decode engine d:2 died: cannot connect")],
        ),
        (
            with_engine(D, health="not_ready", reason="it drains"),
            [("warn", "decode engine d:2 is not ready: it drains")],
        ),
        (with_engine(D, incarnation="c"), [("warn", "decode engine d:2 was started again")]),
        (with_engine(P, breaker="open"), [("bad", "breaker of prefill engine p:1: open")]),
        (
            with_engine(D, figures={STORE_UP: 0.0}),
            [("bad", "decode engine d:2 has lost its store of KV")],
        ),
        (
            with_engine(D, figures={STORE_UP: 1.0, "pdserve_kv_lease_expired_total": 3.0}),
            [("warn", "leases that nobody read in time at decode engine d:2: 3")],
        ),
        (
            replace(WELL, pairs={(P, D, "push"): "half_open"}),
            [("warn", "push from p:1 to d:2: breaker half open")],
        ),
        (
            replace(WELL, rungs={("other_decode", "dropped"): 5, ("shed", "budget"): 1}),
            [
                ("warn", "ladder: took another decode engine (dropped), 3 requests"),
                ("bad", "ladder: sent the client away (budget)"),
            ],
        ),
        (
            replace(WELL, outcomes={"ok": 90, "error": 3, "shed": 1}),
            [("bad", "2 requests failed"), ("bad", "1 request sent away (429 or 503)")],
        ),
    ],
)
def test_each_change_is_one_sentence(now: Sight, said: list[tuple[str, str]]) -> None:
    assert list(changes(WELL, now)) == said


def test_counters_of_another_life_are_no_change() -> None:
    before = with_engine(D, figures={"pdserve_kv_lease_expired_total": 0.0})
    now = with_engine(D, incarnation="c", figures={"pdserve_kv_lease_expired_total": 9.0})
    assert list(changes(before, now)) == [("warn", "decode engine d:2 was started again")]


def test_the_first_sight_is_no_event_and_the_newest_events_are_kept() -> None:
    journal = Journal()
    journal.see(WELL, 50.0)
    assert (journal.events, journal.since_s) == ([], 50.0)
    for second in range(MAX_EVENTS + 5):
        journal.see(replace(WELL, outcomes={"error": 2 + second}), 51.0 + second)
    newest, *_, oldest = journal.events
    assert (newest.seq, newest.wall_s, newest.text) == (105, 155.0, "1 request failed")
    assert (oldest.seq, len(journal.events)) == (6, MAX_EVENTS)
    assert journal.since_s == 50.0


def test_there_is_a_sentence_for_every_rung_and_for_every_way_to_fail() -> None:
    assert RUNGS.keys() == {rung.value for rung in LadderRung}
    assert FAILED.keys() <= set(OUTCOMES)
