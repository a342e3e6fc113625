"""What an engine's server says of its requests, its trace and its clock."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from pdserve.wire.finished import Finished
from pdserve.wire.trace import ClockReading, Collection, FrontRequest, Part, SliceEvent
from tests.server.conftest import make_engine, serving

ASKED = {"prompt": "hello", "max_tokens": 4}


async def test_finished_requests_are_told_newest_first_and_their_terms_sum_to_ttft(text):
    async with serving(text, make_engine(text, prefill_s=0.01)) as server:
        for name in ("first", "second"):
            await server.ok("/v1/completions", ASKED, X_Request_Id=name)
        status, told = await server.get("/debug/requests?finished=10")
        assert status == 200
        told = msgspec.json.decode(told)
        assert told["running"] == []
        assert [each["request_id"] for each in told["finished"]] == ["second", "first"]
        newest = told["finished"][0]
        assert tuple(newest) == Finished.__struct_fields__  # a proxy's, too
        assert newest["outcome"] == "ok"
        assert newest["output_tokens"] == 4
        assert sum(newest["ttft_terms"].values()) == pytest.approx(newest["ttft_ms"], abs=0.01)
        _, later = await server.get(f"/debug/requests?finished=10&after={newest['seq'] - 1}")
        assert len(msgspec.json.decode(later)["finished"]) == 1


async def test_the_trace_has_requests_and_their_tokenization(text):
    async with serving(text, make_engine(text)) as server:
        await server.ok("/v1/completions", ASKED, X_Request_Id="mine")
        status, body = await server.get("/debug/trace?seconds=5")
        assert status == 200
        (process,) = msgspec.json.decode(body, type=Collection).processes
        assert process.trace.process.part is Part.SERVER
        events = process.trace.decoded()
        (request,) = [event for event in events if isinstance(event, FrontRequest)]
        assert (request.request_id, request.outcome) == ("mine", "ok")
        for before, after in itertools.pairwise(request.windows):
            assert before.end_s == after.start_s
        (tokenized,) = [event for event in events if isinstance(event, SliceEvent)]
        assert tokenized.facts["request"] == "mine"


async def test_the_clock_is_read_and_named(text):
    async with serving(text, make_engine(text)) as server:
        _, first = await server.get("/debug/clock")
        _, second = await server.get("/debug/clock")
        readings = [msgspec.json.decode(each, type=ClockReading) for each in (first, second)]
        assert readings[0].clock_id == readings[1].clock_id
        assert readings[0].monotonic_s <= readings[1].monotonic_s


@pytest.mark.parametrize("path", ["/debug/requests", "/debug/trace", "/debug/clock"])
async def test_all_of_it_is_under_the_api_key(text, path):
    async with serving(text, make_engine(text), api_keys=("k",)) as server:
        status, _ = await server.get(path)
        assert status == 401


async def test_bad_numbers_are_refused_by_name(text):
    async with serving(text, make_engine(text)) as server:
        for path, param in (
            ("/debug/trace?seconds=-1", "seconds"),
            ("/debug/requests?finished=x", "finished"),
        ):
            status, body = await server.get(path)
            assert status == 400
            assert msgspec.json.decode(body)["error"]["param"] == param


async def test_the_trace_of_a_dead_engine_has_the_server_and_says_what_is_missing(text):
    engine = make_engine(text)
    async with serving(text, engine) as server:
        await server.ok("/v1/completions", ASKED)
        engine.die("it was killed")
        status, body = await server.get("/debug/trace")
        assert status == 200
        found = msgspec.json.decode(body, type=Collection)
        assert [each.trace.process.part for each in found.processes] == [Part.SERVER]
        assert "it was killed" in found.missing[0].reason
