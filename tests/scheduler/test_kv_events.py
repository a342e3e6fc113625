"""What a scheduler says of its caches, from requests that come, are preempted and go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.config.kv_events import KVEventsConfig
from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, TransferConfig
from pdserve.connectors.base import KVConnectorScheduler
from pdserve.errors import ConfigError
from pdserve.wire.events import BlocksCleared, BlocksRemoved, BlocksStored, KVEvent
from pdserve.wire.ids import BlockHash
from tests.scheduler.scripted import make_request
from tests.toy import HeldEngine, toy_config
from tests.toy_executor import toy_shape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Tier(KVConnectorScheduler):
    """Has events of its own."""

    def __init__(self) -> None:
        self.events: list[KVEvent] = []

    def take_events(self) -> Sequence[KVEvent]:
        events, self.events = self.events, []
        return events


def engine(tier: Tier, **fields: bool) -> HeldEngine:
    return HeldEngine(toy_config(**fields), toy_shape(12, 8), half=tier)


def after(events: Iterable[KVEvent], found: set[BlockHash]) -> set[BlockHash]:
    """What can be found in the engine's blocks once `events` have been told, each for the first
    copy and the last one alone."""
    for event in events:
        match event:
            case BlocksStored():
                assert found.isdisjoint(event.blocks)
                found = found | set(event.blocks)
            case BlocksRemoved(blocks):
                assert found >= set(blocks)
                found = found - set(blocks)
            case BlocksCleared():
                found = set()
    return found


def test_events_say_what_the_cache_has_however_requests_share_and_evict():
    it = engine(Tier(), tells=True)
    found: set[BlockHash] = set()
    seen: set[BlockHash] = set()
    kinds = set()
    for number in range(30):
        for copy in "ab":
            prompt = [(number // 3 + i) % 7 for i in range(8 * (1 + number % 4) + 3)]
            it.scheduler.add(make_request(f"r{number}{copy}", prompt))
        if number == 20:
            it.scheduler.kv.pool.forget_all()
        it.run()
        events = it.scheduler.take_events()
        kinds |= {type(event) for event in events}
        found = after(events, found)
        seen |= found
        pool = it.scheduler.kv.pool
        assert found == {name for name in seen if pool.find([name])}
    assert kinds == {BlocksStored, BlocksRemoved, BlocksCleared}


def test_what_a_tier_says_comes_behind_what_the_engines_own_cache_says():
    tier = Tier()
    it = engine(tier, tells=True)
    it.scheduler.add(make_request("r", [1] * 9))
    it.run()
    removed = BlocksRemoved([BlockHash(b"x")], "CPU")
    tier.events = [removed]
    *own, last = it.scheduler.take_events()
    assert own
    assert last is removed
    assert it.scheduler.take_events() == []


def test_where_nobody_listens_nothing_is_noted_and_no_connector_is_asked():
    tier = Tier()
    it = engine(tier)
    it.scheduler.add(make_request("r", [1] * 9))
    it.run()
    tier.events = [BlocksRemoved([BlockHash(b"x")], "CPU")]
    assert it.scheduler.take_events() == []
    assert tier.events
    assert it.scheduler.kv.events is None


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"publisher": "kafka"}, "publisher is 'kafka': use zmq, or null"),
        ({"publisher": "zmq"}, "endpoint is None: give an address"),
        ({"replay_endpoint": "tcp://*:5558"}, "endpoint is None: give an address"),
        ({"endpoint": "127.0.0.1:5557"}, "endpoint is '127.0.0.1:5557': write it as tcp://"),
        ({"endpoint": "tcp://*:0"}, "endpoint is 'tcp://.:0': write it as tcp://"),
        ({"max_queue_size": 0}, "max-queue-size is 0: use 1 to 1000000000"),
        ({"port": 70_000}, "port is 70000: use 1 to 65535"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_a_remedy(keys, why):
    with pytest.raises(ConfigError, match=why):
        KVEventsConfig(enable_kv_cache_events=True, **keys)


def test_events_need_a_prefix_cache_and_a_secret_or_a_loopback_address():
    events = KVEventsConfig(enable_kv_cache_events=True)
    with pytest.raises(ConfigError, match="leave --enable-prefix-caching on"):
        CacheConfig(enable_prefix_caching=False, events=events)
    model, cache = ModelConfig(model="m"), CacheConfig(events=events)
    with pytest.raises(ConfigError, match="it serves KV events, and there is no secret"):
        EngineConfig(model=model, cache=cache, transfer=TransferConfig(host="10.0.0.2"))
    EngineConfig(model=model, cache=cache, transfer=TransferConfig(host="10.0.0.2", secret="s"))
