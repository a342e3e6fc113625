"""What the dashboard remembers of what happened, sentence by sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.proxy.dashboard.journal import (
    FAILED,
    MAX_EVENTS,
    RUNGS,
    EngineSight,
    Journal,
    Sight,
    changes,
)
from pdserve.proxy.metrics import OUTCOMES
from pdserve.proxy.story import LadderRung
from pdserve.wire.request import EngineStats, KVStoreStats

P, D = "http://p:1", "http://d:2"


def stats(*, is_up: bool = True, **counted: object) -> EngineStats:
    load = {"num_running": 0, "num_waiting": 0, "num_receiving": 0, "blocks": {}, "num_blocks": 8}
    return EngineStats(**load, kv_store=KVStoreStats(is_up=is_up), **counted)


WELL = Sight(
    engines={
        P: EngineSight("prefill", "ready", incarnation="a"),
        D: EngineSight("decode", "ready", incarnation="b", stats=stats()),
    },
    pairs={(P, D, "pull"): "open"},
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
            with_engine(D, stats=stats(is_up=False)),
            [("bad", "decode engine d:2 has lost its store of KV")],
        ),
        (
            with_engine(D, stats=stats(lease_ends={"expired": 3})),
            [("warn", "leases that nobody read in time at decode engine d:2: 3")],
        ),
        (
            replace(WELL, pairs={**WELL.pairs, (P, D, "push"): "half_open"}),
            [("warn", "push from p:1 to d:2: breaker half open")],
        ),
        (replace(WELL, pairs={}), [("good", "pull from p:1 to d:2: breaker closed")]),
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
    now = with_engine(D, incarnation="c", stats=stats(lease_ends={"expired": 9}))
    assert list(changes(WELL, now)) == [("warn", "decode engine d:2 was started again")]


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
