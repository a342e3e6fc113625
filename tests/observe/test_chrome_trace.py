"""The Trace Event Format: valid whatever happened, aligned, and with its arrows."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.observe.chrome_trace import ChromeTrace
from pdserve.wire.trace import (
    Alignment,
    Collected,
    Collection,
    CountersEvent,
    EngineRequest,
    FrontRequest,
    Missing,
    Part,
    ProcessTrace,
    SliceEvent,
    StageSpan,
    StepEvent,
    Term,
    TracedProcess,
    Window,
)
from tests.observe.trace_checks import Checked, check

UNTIL_S = 1000.0


def process(part: Part, role: str, events: list, *, offset_s: float = 0.0, **fields) -> Collected:
    about = {
        "part": part,
        "role": role,
        "engine_id": f"{role}-1" if role else "",
        "host": "h",
        "pid": 7,
        "clock_id": "c",
        "monotonic_s": UNTIL_S - offset_s,
        "wall_s": 5000.0,
        "since_s": UNTIL_S - offset_s - 10.0,
        "num_dropped": 0,
    }
    return Collected(
        trace=ProcessTrace(
            process=TracedProcess(**(about | fields)),
            events=msgspec.Raw(msgspec.json.encode(events)),
        ),
        alignment=Alignment(offset_s=offset_s, uncertainty_s=0.001 if offset_s else 0.0),
    )


def step(step_id: int, start_s: float, at_s: float, *, prefill: int = 0) -> StepEvent:
    return StepEvent(at_s, start_s, start_s, step_id, 1, prefill, 0 if prefill else 1, 0.001)


def chrome(*processes: Collected, missing: tuple[Missing, ...] = ()) -> tuple[ChromeTrace, Checked]:
    collection = Collection(
        seconds=10.0,
        until_s=UNTIL_S,
        wall_s=5000.0,
        processes=list(processes),
        missing=list(missing),
    )
    trace = ChromeTrace(collection)
    return trace, check(json.loads(b"".join(trace.pieces())))


def front(start_s: float = 990.0, *, outcome: str = "ok") -> FrontRequest:
    first = Window(
        "relay",
        start_s + 0.1,
        start_s + 1.0,
        [Term("queue", 0.1, ["queue"]), Term("prefill", 0.5, ["prefill"])],
        "prefill",
    )
    second = Window(
        "handover",
        start_s + 1.0,
        start_s + 2.0,
        [Term("kv", 0.3, ["kv_wait", "kv_transfer"]), Term("first step", 0.1, ["first_step"])],
        "decode",
    )
    windows = [Window("proxy", start_s, start_s + 0.1, [], ""), first, second]
    windows.append(Window("decode", start_s + 2.0, start_s + 4.0, [], ""))
    return FrontRequest(start_s + 4.0, "r", outcome, 1.0, windows, [(start_s + 0.2, "sent")], {})


def prefilled(t: float = 990.0) -> list:
    spans = [
        StageSpan("queue", t + 0.2, t + 0.3),
        StageSpan("prefill", t + 0.3, t + 0.8),
        StageSpan("leased", t + 0.8, t + 1.5),
    ]
    return [
        step(1, t + 0.3, t + 0.8, prefill=64),
        EngineRequest(t + 1.5, "r-0-aaaa", "", "done", spans, [(t + 0.2, "queued")], {}),
    ]


def decoded(t: float = 990.0) -> list:
    spans = [
        StageSpan("queue", t + 1.1, t + 1.2),
        StageSpan("kv_wait", t + 1.2, t + 1.3),
        StageSpan("kv_transfer", t + 1.3, t + 1.5),
        StageSpan("handover", t + 1.5, t + 1.6),
        StageSpan("first_step", t + 1.6, t + 1.7),
        StageSpan("decode", t + 1.7, t + 3.5),
    ]
    facts = {"kv_mode": "pull", "kv_bytes": 4096}
    return [
        step(1, t + 1.6, t + 1.7),
        step(2, t + 1.7, t + 1.8),
        EngineRequest(t + 3.5, "r-0-bbbb", "r-0-aaaa", "done", spans, [], facts),
    ]


def whole_deployment(offset_s: float = 0.0) -> tuple[ChromeTrace, Checked]:
    return chrome(
        process(Part.CORE, "decode", decoded(990.0 - offset_s), offset_s=offset_s),
        process(Part.PROXY, "", [front()]),
        process(Part.CORE, "prefill", prefilled()),
    )


def test_processes_are_named_and_in_the_order_of_a_requests_way():
    _, checked = whole_deployment()
    assert checked.processes == {1: "proxy", 2: "prefill-1 engine", 3: "decode-1 engine"}


def test_an_arrow_leads_from_the_prefill_step_over_the_transfer_to_the_first_step():
    trace, checked = whole_deployment()
    (arrow,) = checked.arrows
    names = [(checked.processes[each["pid"]], each["name"]) for each in arrow.slices]
    assert names == [
        ("prefill-1 engine", "prefill"),
        ("decode-1 engine", "KV pull"),
        ("decode-1 engine", "decode"),
    ]
    assert arrow.slices[-1]["args"]["step"] == 1
    assert trace.summary.num_arrows == 1


def test_the_stages_of_a_request_sum_to_its_ttft_and_lie_where_the_engines_say():
    _, checked = whole_deployment()
    (row,) = checked.rows_of("proxy")
    assert row.until_us(row.start_us + 1e6) == pytest.approx(1e6, abs=0.01)
    begins = {name: round((begin - row.start_us) / 1e6, 6) for name, begin, _ in row.slices[:-1]}
    assert begins["queue"] == 0.2
    assert begins["prefill"] == 0.3
    assert begins["kv"] == 1.2
    assert begins["first step"] == 1.6


def test_another_machines_clock_is_aligned():
    """D's monotonic clock is 500 s ahead: in the trace it is as if it were not."""
    _, plain = whole_deployment()
    trace, aligned = whole_deployment(offset_s=-500.0)
    (ours,), (theirs,) = (each.rows_of("decode-1 engine") for each in (plain, aligned))
    assert ours.start_us == pytest.approx(theirs.start_us, abs=0.01)
    assert len(aligned.arrows) == 1
    assert trace.summary.uncertainty_s == 0.001


def test_the_latest_of_several_attempts_under_one_id_is_shown():
    """The request's first attempt, on the same engine, is not the one that gave its token."""
    lost = EngineRequest(
        990.15, "r-0-0000", "", "aborted", [StageSpan("queue", 990.11, 990.15)], [], {}
    )
    _, checked = chrome(
        process(Part.PROXY, "", [front()]), process(Part.CORE, "prefill", [lost, *prefilled()])
    )
    (row,) = checked.rows_of("proxy")
    assert row.stages_us["queue"] == pytest.approx(1e5, abs=0.01)


def test_equal_ids_at_different_times_are_different_requests():
    _, checked = chrome(
        process(Part.PROXY, "", [front(980.0), front(990.0)]),
        process(Part.CORE, "prefill", [*prefilled(980.0), *prefilled(990.0)[1:]]),
    )
    for row in checked.rows_of("proxy"):
        assert row.stages_us["queue"] == pytest.approx(1e5, abs=0.01)


def test_transfers_that_overlap_are_on_threads_of_their_own():
    requests = [
        EngineRequest(
            999.0, f"{n}-0-x", "", "", [StageSpan("kv_transfer", 990.0 + n, 993.0)], [], {}
        )
        for n in range(3)
    ]
    _, checked = chrome(process(Part.CORE, "decode", requests))
    assert len({each["tid"] for each in checked.slices}) == 3


def test_what_still_runs_has_an_end_and_says_so():
    running = EngineRequest(UNTIL_S, "r-0-a", "", "", [StageSpan("queue", 999.0, UNTIL_S)], [], {})
    trace, checked = chrome(
        process(Part.PROXY, "", [front(outcome="")]), process(Part.CORE, "prefill", [running])
    )
    assert {row.args["outcome"] for row in checked.rows} == {"running"}
    assert trace.summary.num_unfinished == 1


def test_counters_and_slices_of_a_server_are_there():
    counters = [CountersEvent(990.0 + n, {"KV blocks": {"free": n, "held": 9 - n}}) for n in (1, 2)]
    slices = [SliceEvent(991.0, 990.5, "tokenizer", "tokenize", {"tokens": 3})]
    _, checked = chrome(process(Part.SERVER, "both", slices), process(Part.CORE, "both", counters))
    assert [event["args"]["free"] for event in checked.counters[2, "KV blocks"]] == [1, 2]
    assert checked.threads[1, 201] == "tokenizer"


def test_what_is_missing_is_said():
    lossy = process(Part.CORE, "prefill", prefilled(), since_s=UNTIL_S - 4.0, num_dropped=17)
    trace, _ = chrome(lossy, missing=(Missing(who="http://d", reason="hung up"),))
    metadata = trace.metadata()
    assert metadata["complete_s"] == 4.0
    assert metadata["dropped_events"] == 17
    assert metadata["missing"] == ["http://d: hung up"]


def test_an_empty_collection_is_an_empty_trace():
    _, checked = chrome()
    assert not checked.rows


@given(st.data())
def test_any_spans_make_a_valid_trace(data):
    """Whatever times engines and proxies claim, all that begins ends and nothing overlaps."""

    def spans(names: list[str]) -> list[StageSpan]:
        times = sorted(data.draw(st.lists(st.floats(980, 1000), min_size=len(names) + 1)))
        return [
            StageSpan(name, begin, end)
            for name, begin, end in zip(names, times, times[1:], strict=False)
            if end > begin
        ]

    p_spans = spans(["queue", "kv_wait", "queue", "prefill", "leased"])
    d_spans = spans(["queue", "kv_wait", "kv_transfer", "handover", "first_step", "decode"])
    p_end = next((span.end_s for span in p_spans if span.name == "prefill"), 999.0)
    d_at = next((span.start_s for span in d_spans if span.name == "first_step"), 999.0)
    prefill = [
        step(1, p_end - 0.1, p_end, prefill=1),
        EngineRequest(1000.0, "r-0-a", "", "done", p_spans, [(990.0, "note")], {}),
    ]
    decode = [
        step(1, d_at, d_at + 0.1),
        EngineRequest(1000.0, "r-0-b", "r-0-a", "", d_spans, [], {}),
    ]
    chrome(
        process(Part.PROXY, "", [front()]),
        process(Part.CORE, "prefill", prefill),
        process(Part.CORE, "decode", decode),
    )


def test_a_slice_that_is_told_of_later_ends_where_it_ended():
    told = SliceEvent(993.0, 990.0, "KV lanes", "read", {}, 990.5)
    _, checked = chrome(process(Part.CORE, "decode", [told]))
    (drawn,) = checked.slices
    assert drawn["dur"] == pytest.approx(0.5e6)


def test_tracks_of_ranks_are_in_the_order_of_their_numbers():
    tracks = ["rank 10", "rank 2 KV lanes", "KV lanes", "rank 2"]
    told = [SliceEvent(991.0, 990.0, track, "forward", {}) for track in tracks]
    _, checked = chrome(process(Part.CORE, "decode", told))
    names = [name for _, name in sorted(checked.threads.items())]
    assert names == ["KV lanes", "rank 2", "rank 2 KV lanes", "rank 10"]


def test_processes_are_sorted_proxy_first_then_prefill_then_decode_each_with_its_server():
    trace, _ = chrome(
        process(Part.CORE, "decode", []),
        process(Part.SERVER, "decode", []),
        process(Part.CORE, "prefill", []),
        process(Part.SERVER, "prefill", []),
        process(Part.PROXY, "", []),
    )
    names = {e["pid"]: e["args"]["name"] for e in trace.events if e["name"] == "process_name"}
    order = sorted(
        (e["args"]["sort_index"], names[e["pid"]])
        for e in trace.events
        if e["name"] == "process_sort_index"
    )
    assert [name for _, name in order] == [
        "proxy",
        "prefill-1 server",
        "prefill-1 engine",
        "decode-1 server",
        "decode-1 engine",
    ]


def test_the_proxy_counts_its_requests_before_and_after_their_first_token():
    requests = [front(990.0), front(990.5), front(992.0, outcome="")]  # the last one still runs
    _, checked = chrome(process(Part.PROXY, "", requests))
    counted = [(e["ts"], *e["args"].values()) for e in checked.counters[1, "requests"]]
    seconds = [(round(ts / 1e6, 3), waiting, after) for ts, waiting, after in counted]
    assert seconds == [
        (0.0, 1, 0),
        (0.5, 2, 0),
        (1.0, 1, 1),
        (1.5, 0, 2),
        (2.0, 1, 2),
        (3.0, 0, 3),
        (4.0, 0, 2),
        (4.5, 0, 1),
    ]
