"""Prompts go to the engine that has their prefix, by its own word or by what was sent there."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager, contextmanager

import msgspec
import pytest

from pdserve.config.kv_events import KVEventsConfig
from pdserve.config.schema import Role, TransferConfig
from pdserve.engine import kv_events
from pdserve.engine.kv_events import KVEventPublisher
from pdserve.kvcache.manager import KVCacheManager, PrefixHit
from pdserve.observe.clock import ManualClock, SystemClock
from pdserve.proxy.backend import Backend, Breaker
from pdserve.proxy.brain import feed
from pdserve.proxy.brain.feed import EventFeed
from pdserve.proxy.brain.index import PrefixIndex
from pdserve.proxy.brain.prompt import RoutePrompt
from pdserve.wire.event_reader import GONE_S, ReaderState
from pdserve.wire.events import (
    Batch,
    BlocksCleared,
    EventEndpoint,
    GrainsStored,
    RoutingLoad,
)
from pdserve.wire.ids import Incarnation, grain_hashes
from pdserve.wire.learned import FitSums, LearnedTimes
from pdserve.wire.request import EngineInfo
from tests.proxy.conftest import until
from tests.proxy.hooks import answers
from tests.proxy.scripted import ScriptedEngine

SECRET = "a deployment's"
LIFE = "00000000000000a1"
BEAT_S = 0.02
STICKY = {"prefill_policy": "prefix_sticky", "decode_policy": "prefix_sticky"}


def prompt(number: int, num_tokens: int = 600) -> list[int]:
    return [number * 1000 + i for i in range(num_tokens)]


def ask(number: int, num_tokens: int = 600) -> dict:
    return {"prompt": prompt(number, num_tokens), "max_tokens": 4, "seed": 3}


def computed(tokens: list[int]) -> list:
    """What a cache says when it gets a prompt."""
    kv = KVCacheManager(num_blocks=99, block_size=128, enable_prefix_caching=True, log_events=True)
    holding = kv.open(PrefixHit((), 0, 0), len(tokens))
    kv.publish(holding, kv.chain(tokens, ""), num_computed_tokens=len(tokens))
    return kv.events.drain()


@contextmanager
def telling(engine: ScriptedEngine, life: str = LIFE):
    """Have an engine publish real events: `publish(events)`."""
    config = KVEventsConfig(enable_kv_cache_events=True)
    publisher = KVEventPublisher(
        config, TransferConfig(secret=SECRET), incarnation=Incarnation(life), rank=0
    )
    engine.incarnation, engine.kv_events = life, [publisher.endpoint]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HEARTBEAT_S", "LEARNED_S"):
            patch.setattr(kv_events, name, BEAT_S)
        try:
            yield publisher
        finally:
            publisher.close(5.0)


def engine_at(url: str, *endpoints: EventEndpoint) -> Backend:
    """One whose cores tell their events there."""
    backend = Backend(url, Role.DECODE, is_static=True, breaker=Breaker(ManualClock(), 3, 5.0))
    info = {**ScriptedEngine("decode").info(), "incarnation": LIFE, "kv_events": endpoints}
    backend.info = msgspec.convert(msgspec.to_builtins(info), EngineInfo)
    return backend


@asynccontextmanager
async def reading(*backends: Backend, index=None, clock=None, **more):
    """A feed that reads what these engines tell."""
    index = PrefixIndex() if index is None else index
    feed = EventFeed(index, backends, clock or ManualClock(), secret=SECRET, **more)
    feed.start()
    try:
        yield feed
    finally:
        await feed.stop()


@pytest.fixture
def hits(caplog):
    """What the lines of the requests so far say of prefixes."""
    caplog.set_level(logging.INFO, "pdserve.requests")

    def told() -> list[str]:
        lines = [each.getMessage() for each in caplog.records if each.name == "pdserve.requests"]
        parts = [part for line in lines for part in line.split(" | ")]
        return [part.removeprefix("hit ") for part in parts if part.startswith("hit ")]

    return told


def exact(stack, engine: ScriptedEngine) -> int:
    """Whether the proxy believes what an engine tells: how many of its cores."""
    return len(stack.proxy._prefixes._feed.exact(engine.url))


def known(stack, number: int, engine: ScriptedEngine, num_tokens: int = 600) -> int:
    grains = tuple(grain_hashes(prompt(number, num_tokens), ""))
    asked = RoutePrompt(0, num_tokens, grains)
    return stack.proxy._prefixes.known(asked).get(engine.url, 0)


@pytest.mark.slow
async def test_a_prompt_goes_to_the_engine_whose_events_say_it_has_it(make_stack, hits):
    prefill, decode = [ScriptedEngine("prefill") for _ in range(3)], ScriptedEngine("decode")
    with telling(prefill[0], "a0"), telling(prefill[1]) as publisher, telling(prefill[2], "a2"):
        stack = await make_stack(prefill, [decode], secret=SECRET, **STICKY)
        publisher.publish(computed(prompt(1)))
        await until(lambda: all(exact(stack, each) for each in prefill))
        await until(lambda: known(stack, 1, prefill[1]) == 512)
        for _ in range(4):
            assert await stack.stream(ask(1))
        assert [len(each.calls) for each in prefill] == [0, 4, 0]
        assert hits()[0] == "prefill 512 decode ~0 of 600"
        assert hits()[1] == "prefill 512 decode ~512 of 600"
        publisher.publish([BlocksCleared()])
        await until(lambda: known(stack, 1, prefill[1]) == 0)
        publisher.publish(computed(prompt(2)))
        await until(lambda: known(stack, 2, prefill[1]) == 512)
        metrics = await stack.metrics()
    assert metrics['pdserve_route_prompts_total{named_by="tokens"}'] == 4
    assert metrics['pdserve_index_cores{state="live"}'] == 3
    assert metrics["pdserve_index_entries"] > 0
    assert metrics["pdserve_index_resyncs"] == 3


async def test_an_engine_that_does_not_tell_is_known_by_what_was_sent_there(make_stack, hits):
    engines = [ScriptedEngine("decode") for _ in range(3)]
    stack = await make_stack([], engines, decode_policy="cache_aware")
    for _ in range(3):
        for number in range(3):
            assert await stack.stream(ask(number))
    assert sorted(len(engine.calls) for engine in engines) == [3, 3, 3]
    for engine in engines:
        assert len({call.body["prompt"][0] for call in engine.calls}) == 1
    assert hits()[0] == "local ~0 of 600"
    assert hits()[-1] == "local ~512 of 600"


@pytest.mark.slow
async def test_a_burst_of_one_cold_prompt_goes_to_one_engine_before_any_event_says_so(make_stack):
    engines = [ScriptedEngine("decode") for _ in range(3)]
    with telling(engines[0], "a0"), telling(engines[1], "a1"), telling(engines[2], "a2"):
        stack = await make_stack([], engines, secret=SECRET, decode_policy="prefix_sticky")
        await until(lambda: all(exact(stack, each) for each in engines))
        for engine in engines:
            engine.gate.clear()
        burst = [asyncio.create_task(stack.stream(ask(7))) for _ in range(6)]
        await until(lambda: sum(len(engine.calls) for engine in engines) == 6)
        assert sorted(len(engine.calls) for engine in engines) == [0, 0, 6]
        for engine in engines:
            engine.gate.set()
        await asyncio.gather(*burst)


@pytest.mark.slow
async def test_a_restarted_engine_has_nothing_of_what_its_former_life_had(make_stack):
    engine, other = ScriptedEngine("decode"), ScriptedEngine("decode")
    stack = await make_stack([], [engine, other], secret=SECRET, decode_policy="prefix_sticky")
    with telling(engine) as publisher:
        publisher.publish(computed(prompt(1)))
        await until(lambda: known(stack, 1, engine) == 512)
    with telling(engine, "00000000000000b2") as publisher:
        await until(lambda: known(stack, 1, engine) == 0)
        publisher.publish(computed(prompt(2)))
        await until(lambda: known(stack, 2, engine) == 512)
    engine.incarnation, engine.kv_events = "another", []
    await until(lambda: known(stack, 2, engine) == 0)
    assert await stack.stream(ask(2))


async def test_an_engine_that_names_prefixes_otherwise_is_not_read_and_said_so(make_stack, logged):
    engine = ScriptedEngine("decode")
    with telling(engine) as publisher:
        strange = msgspec.structs.replace(publisher.endpoint, hash_version=99)
        engine.kv_events = [strange]
        stack = await make_stack([], [engine], secret=SECRET, decode_policy="prefix_sticky")
        await until(lambda: any("names prefixes otherwise" in line for line in logged))
        assert await stack.stream(ask(1))
        assert not exact(stack, engine)


async def test_an_engine_of_another_secret_is_known_by_what_was_sent_there(make_stack, hits):
    engines = [ScriptedEngine("decode") for _ in range(2)]
    with telling(engines[0], "a0") as publisher, telling(engines[1], "a1"):
        publisher.publish(computed(prompt(1)))
        stack = await make_stack([], engines, secret="another's", decode_policy="prefix_sticky")
        await until(lambda: len(stack.proxy._prefixes._feed.states()) == 2)
        for _ in range(3):
            assert await stack.stream(ask(1))
        assert sorted(len(engine.calls) for engine in engines) == [0, 3]
        assert hits() == ["local ~0 of 600", "local ~512 of 600", "local ~512 of 600"]
        assert (await stack.metrics())['pdserve_index_cores{state="resync"}'] == 2


@pytest.mark.slow
async def test_an_engine_that_falls_silent_is_not_believed_until_it_is_heard_again():
    with telling(ScriptedEngine("decode")) as publisher:
        clock, index = ManualClock(), PrefixIndex()
        engine = engine_at("http://e", publisher.endpoint)
        async with reading(engine, index=index, clock=clock) as feed:
            await until(lambda: feed.exact("http://e"))
            publisher.publish(computed(prompt(1)))
            grains = tuple(grain_hashes(prompt(1), ""))
            await until(lambda: index.depths(grains, 0.0) == {feed.exact("http://e")[0]: 2})
            publisher.close(5.0)
            await asyncio.sleep(0.25)  # its last words are heard
            clock.advance(GONE_S - 0.1)
            await asyncio.sleep(0.25)
            assert feed.exact("http://e")
            clock.advance(0.2)
            await until(lambda: not feed.exact("http://e"))
            assert index.depths(grains, 0.0) == {}


@pytest.mark.slow
async def test_an_engine_that_is_said_to_be_live_is_believed():
    for _ in range(5):
        with telling(ScriptedEngine("decode")) as publisher:
            async with reading(engine_at("http://e", publisher.endpoint)) as feed:
                await until(lambda feed=feed: feed.states() == [ReaderState.LIVE])
                assert feed.exact("http://e")


async def test_with_its_events_an_engine_says_how_much_all_its_cores_have_to_do(monkeypatch):
    monkeypatch.setattr(feed, "_LOAD_S", BEAT_S)
    engine = ScriptedEngine("decode")
    told: list[RoutingLoad] = []
    with telling(engine) as one, telling(engine) as other:
        backend = engine_at("http://e", one.endpoint, other.endpoint)
        async with reading(
            backend, clock=SystemClock(), on_load=lambda engine, load: told.append(load)
        ):
            one.load, other.load = RoutingLoad(4, 1, 30, 100), RoutingLoad(2, 2, 10, 100)
            await until(lambda: told and told[-1] == RoutingLoad(6, 3, 40, 200))
            num_told = len(told)
            await until(lambda: len(told) > num_told + 1)  # it is as busy still
            one.load = other.load = RoutingLoad(num_blocks=100)
            await until(lambda: told[-1] == RoutingLoad(num_blocks=200))
            num_told = len(told)
            await asyncio.sleep(5 * BEAT_S)
            assert len(told) == num_told


async def test_the_load_of_an_engine_that_left_and_came_back_is_told_of_the_present_one():
    with telling(ScriptedEngine("decode")) as publisher:
        former, present = (engine_at("http://e", publisher.endpoint) for _ in range(2))
        engines, told = [former], []
        feed = EventFeed(
            PrefixIndex(),
            engines,
            SystemClock(),
            secret=SECRET,
            on_load=lambda engine, load: told.append(engine),
        )
        feed.start()
        try:
            publisher.load = RoutingLoad(4, 1, 30, 100)
            await until(lambda: former in told)
            engines[:] = [present]
            await until(lambda: present in told)
        finally:
            await feed.stop()


def test_releases_without_loads_and_lessons_read_batches_with_them_and_the_other_way_round():
    class Former(msgspec.Struct, array_like=True):
        epoch: int
        seq: int
        events: list[GrainsStored] = []

    learned = LearnedTimes(FitSums(20.0, 0.1, (1.0,) * 3, (2.0,) * 6))
    batch = Batch(7, 3, [GrainsStored([1, 2])], RoutingLoad(4, 1, 30, 100), learned)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=Batch) == batch
    former = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=Former)
    assert former == Former(7, 3, [GrainsStored([1, 2])])
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(former), type=Batch)
    assert (read.load, read.learned) == (None, None)


async def test_the_events_of_more_engines_are_heard_than_zmq_has_sockets_for_by_itself():
    place = EventEndpoint(host="127.0.0.1", port=1, snapshot_port=1)
    backends = [engine_at(f"http://{number}", place) for number in range(520)]
    async with reading(*backends) as feed:
        await until(lambda: len(feed.states()) == len(backends))


@pytest.mark.slow
async def test_an_engine_that_names_no_place_for_its_events_keeps_nobody_from_reading_others(
    logged,
):
    nowhere = EventEndpoint(host="not a host", port=99999, snapshot_port=0)
    with telling(ScriptedEngine("decode")) as publisher:
        engines = engine_at("http://nowhere", nowhere), engine_at("http://e", publisher.endpoint)
        async with reading(*engines) as feed:
            await until(lambda: feed.exact("http://e"))
            await asyncio.sleep(0.25)
            assert not feed.exact("http://nowhere")
            engines[0].info = None  # it is gone, and its next life has another name
            await until(lambda: not feed._refused)
    assert sum("its KV events are not read" in line for line in logged) == 1


async def test_who_tokenizes_otherwise_than_the_engine_says_so_once(make_stack, logged):
    engine = ScriptedEngine("decode")
    engine.stages = {"prompt_tokens": 601, "cached_tokens": 0}
    stack = await make_stack([], [engine], decode_policy="prefix_sticky")
    for _ in range(3):
        await stack.stream(ask(1))
    assert sum("tokenized here otherwise" in line for line in logged) == 1
    assert (await stack.metrics())["pdserve_route_prompts_misread_total"] == 3


async def test_what_an_engine_had_is_compared_with_what_it_was_taken_to_have(make_stack):
    engine = ScriptedEngine("decode")
    engine.stages = {"prompt_tokens": 600, "cached_tokens": 0}
    stack = await make_stack([], [engine], decode_policy="prefix_sticky")
    for _ in range(2):
        await stack.stream(ask(1))
    metrics = await stack.metrics()
    assert metrics['pdserve_index_hit_error_tokens_sum{known_by="routed"}'] == 512
    assert metrics['pdserve_index_hit_error_tokens_count{known_by="routed"}'] == 2


async def test_a_policy_that_does_not_look_has_no_prompt_read_and_nobody_listened_to(
    make_stack, logged
):
    prefill, decode = [ScriptedEngine("prefill")], [ScriptedEngine("decode")]
    with telling(prefill[0]):
        stack = await make_stack(prefill, decode, secret=SECRET)
        assert await stack.stream(ask(1))
    assert stack.proxy._prefixes is None
    assert not any("hit " in line for line in logged)
    metrics = await stack.metrics()
    assert sum(n for name, n in metrics.items() if name.startswith("pdserve_route_prompts")) == 0


@pytest.mark.parametrize("status", [200, 400, 429, 500])
async def test_pending_tokens_are_none_again_however_requests_end(make_stack, status):
    prefill, decode = [ScriptedEngine("prefill")], [ScriptedEngine("decode") for _ in range(2)]
    stack = await make_stack(prefill, decode, retry_max_retries=1, **STICKY)
    if status != 200:
        prefill[0].hook = decode[0].hook = answers(status, b'{"error": {"message": "no"}}')
    for engine in decode:
        engine.gate.clear()

    async def asked(number: int) -> None:
        async with stack.post({**ask(number), "stream": True}) as response:
            await response.read()

    requests = [asyncio.create_task(asked(number)) for number in range(4)]
    if status == 200:
        await until(lambda: sum(each.pending_tokens for each in stack.proxy.backends) == 4 * 600)
    else:
        await until(lambda: prefill[0].calls)
    requests[0].cancel()
    for engine in decode:
        engine.gate.set()
    await asyncio.gather(*requests, return_exceptions=True)
    await until(lambda: all(each.in_flight == 0 for each in stack.proxy.backends))
    assert [each.pending_tokens for each in stack.proxy.backends] == [0, 0, 0]
