"""KV events over real sockets: to readers of pdserve's stream, and to those of vLLM's shape."""

from __future__ import annotations

import socket
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq

from pdserve.commands.kv_events import CoreEvents
from pdserve.config.kv_events import KVEventsConfig
from pdserve.config.schema import TransferConfig
from pdserve.engine.kv_events import KVEventPublisher
from pdserve.errors import ConfigError
from pdserve.kvcache.grains import GrainTracker
from pdserve.kvcache.manager import KVCacheManager, PrefixHit
from pdserve.wire.event_reader import ReaderState
from pdserve.wire.events import BlocksCleared, BlocksRemoved, BlocksStored, KVEvent
from pdserve.wire.ids import BlockHash, Incarnation, grain_hashes
from pdserve.wire.learned import FitSums, LearnedTimes
from tests.cli.process import free_neighbours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECRET = "a deployment's"
END = (-1).to_bytes(8, signed=True)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def publishing(*, rank: int = 0, life: int = 1, **keys) -> Iterator[KVEventPublisher]:
    config = KVEventsConfig(enable_kv_cache_events=True, **keys)
    publisher = KVEventPublisher(
        config, TransferConfig(secret=SECRET), incarnation=Incarnation(f"{life:016x}"), rank=rank
    )
    try:
        yield publisher
    finally:
        publisher.close(5.0)


@contextmanager
def reading(publisher: KVEventPublisher, secret: str = SECRET) -> Iterator[CoreEvents]:
    with zmq.Context() as context:
        core = CoreEvents(context, publisher.endpoint, secret, now_s=time.monotonic())
        try:
            yield core
        finally:
            core.close()


def read_until(core: CoreEvents, holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end_s, core.index.grains
        core.read(20)


def computed(tokens: list[int], *, salt: str = "") -> list[KVEvent]:
    """What a cache says when it gets a prompt."""
    kv = KVCacheManager(num_blocks=99, block_size=128, enable_prefix_caching=True, log_events=True)
    holding = kv.open(PrefixHit((), 0, 0), len(tokens))
    kv.publish(holding, kv.chain(tokens, salt), num_computed_tokens=len(tokens))
    return kv.events.drain()


def prompt(number: int, num_tokens: int = 512) -> list[int]:
    return [number * 1000 + i for i in range(num_tokens)]


def test_a_reader_that_comes_late_has_what_came_before_and_after():
    with publishing() as publisher:
        publisher.publish(computed(prompt(1)))
        with reading(publisher) as core:
            expected = set(grain_hashes(prompt(1), ""))
            read_until(core, lambda: core.index.grains == {"GPU": expected})
            publisher.publish(computed(prompt(2), salt="x"))
            expected |= set(grain_hashes(prompt(2), "x"))
            read_until(core, lambda: core.index.grains == {"GPU": expected})
            publisher.publish([BlocksCleared()])
            read_until(core, lambda: core.num_grains == 0)
            assert core.reader.num_resyncs == 1
            assert publisher.counts() == {"published": 3, "dropped": 0, "queued": 0}


def test_who_comes_late_hears_what_an_engine_has_learned_of_its_steps():
    learned = LearnedTimes(FitSums(20.0, 0.1, (1.0,) * 3, (2.0,) * 6), FitSums())
    with publishing() as publisher:
        publisher.learned = learned
        for _ in range(2):
            with reading(publisher) as core:
                read_until(core, lambda core=core: core.reader.learned is not None)
                assert core.reader.learned == learned


@pytest.mark.slow
def test_an_idle_engine_is_heard_of_all_the_same():
    with publishing() as publisher, reading(publisher) as core:
        read_until(core, lambda: core.reader.state(time.monotonic()) is ReaderState.LIVE)
        end_s = time.monotonic() + 1.2
        while time.monotonic() < end_s:
            core.read(20)
            assert core.reader.state(time.monotonic()) is ReaderState.LIVE


@pytest.mark.slow
def test_who_does_not_know_the_secret_hears_nothing_and_is_not_answered():
    with publishing() as publisher, reading(publisher, "another's") as core:
        publisher.publish(computed(prompt(1)))
        end_s = time.monotonic() + 0.7
        while time.monotonic() < end_s:
            core.read(20)
        assert core.reader.state(time.monotonic()) is ReaderState.RESYNC
        assert core.index.grains == {}


@pytest.mark.slow
def test_after_a_restart_at_the_same_place_a_reader_has_what_the_next_life_has():
    port = free_neighbours(2)
    with publishing(port=port) as publisher, reading(publisher) as core:
        publisher.publish(computed(prompt(1)))
        read_until(core, lambda: core.num_grains == 2)
        publisher.close(5.0)
        with publishing(port=port, life=2) as restarted:
            restarted.publish(computed(prompt(3, 256)))
            expected = {"GPU": set(grain_hashes(prompt(3, 256), ""))}
            read_until(core, lambda: core.index.grains == expected)


def test_what_is_lost_before_it_is_published_is_counted_and_made_up_for():
    truth = GrainTracker()
    with publishing(max_queue_size=1) as publisher, reading(publisher) as core:
        read_until(core, lambda: core.reader.state(time.monotonic()) is ReaderState.LIVE)
        number = 0
        while publisher.counts()["dropped"] < 50:
            number += 1
            assert number < 20_000, "the thread was never late"
            events = computed(prompt(number, 256)) if number % 3 else [BlocksCleared()]
            truth.apply(events)
            publisher.publish(events)
        read_until(
            core, lambda: core.index.grains.get("GPU", set()) == truth.grains().get("GPU", set())
        )


@pytest.mark.parametrize("has_topic", [True, False])
def test_readers_of_vllms_shape_get_maps_in_an_array_and_what_they_missed(has_topic):
    ports = free_port(), free_port()
    keys = {
        "endpoint": f"tcp://127.0.0.1:{ports[0]}",
        "replay_endpoint": f"tcp://127.0.0.1:{ports[1]}",
        "topic": "kv@engine@model",
        "replay_topic": has_topic,
    }
    with publishing(**keys) as publisher, zmq.Context() as context:
        sub, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        for each in (sub, dealer):
            each.linger = 0
            each.rcvtimeo = 5000
        sub.subscribe("kv@")
        sub.connect(keys["endpoint"])
        dealer.connect(keys["replay_endpoint"])
        steps = [
            computed(prompt(1, 256), salt="tenant"),
            computed(prompt(2, 128)),
            [BlocksRemoved([BlockHash(b"\xff" * 32)]), BlocksCleared()],
        ]
        for events in steps:
            publisher.publish(events)
        dealer.send_multipart([b"", (1).to_bytes(8)])
        replayed = []
        while not replayed or replayed[-1][-2] != END:
            replayed.append(dealer.recv_multipart())
        front = [b"", b"kv@engine@model"] if has_topic else [b""]
        assert [frames[:-1] for frames in replayed[:-1]] == [
            [*front, (1).to_bytes(8)],
            [*front, (2).to_bytes(8)],
        ]
        assert replayed[-1] == [*(b"" for _ in front), END, b""]
        # The three batches may have gone out before the subscription was there.
        live = []
        while len(live) < 4:
            publisher.publish(steps[0])
            if sub.poll(50):
                live.append(sub.recv_multipart())
        assert [topic for topic, _, _ in live] == [b"kv@engine@model"] * 4
        numbers = [int.from_bytes(seq) for _, seq, _ in live]
        assert numbers == list(range(numbers[0], numbers[0] + 4))
        ts, events, rank = msgspec.msgpack.decode(live[3][2])
        assert abs(ts - time.time()) < 60
        assert rank == 0
        (stored,) = steps[0]
        assert events == [
            {
                "type": "BlockStored",
                "block_hashes": [int.from_bytes(name[-8:]) for name in stored.blocks],
                "parent_block_hash": None,
                "token_ids": prompt(1, 256),
                "block_size": 128,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [["tenant"], None],
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        ]
        _, removed, _ = msgspec.msgpack.decode(replayed[1][-1])
        assert removed == [
            {"type": "BlockRemoved", "block_hashes": [2**64 - 1], "medium": "GPU", "group_idx": 0},
            {"type": "AllBlocksCleared"},
        ]
        dealer.close()
        sub.close()


def test_each_core_of_an_engine_has_a_port_of_its_own():
    base = free_neighbours(2)
    keys = {"endpoint": f"tcp://127.0.0.1:{base}", "port": 0}
    with publishing(**keys, rank=0), publishing(**keys, rank=1) as second, zmq.Context() as context:
        sub = context.socket(zmq.SUB)
        sub.linger = 0
        sub.subscribe(b"")
        sub.connect(f"tcp://127.0.0.1:{base + 1}")
        frames = None
        for _ in range(200):
            second.publish(computed(prompt(1, 128)))
            if sub.poll(50):
                frames = sub.recv_multipart()
                break
        assert msgspec.msgpack.decode(frames[2])[2] == 1
        sub.close()


def test_an_address_that_is_taken_is_named_with_what_to_do():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"endpoint is 'tcp://127.0.0.1:{port}'.*another"):
            with publishing(endpoint=f"tcp://127.0.0.1:{port}"):
                pass
        with pytest.raises(ConfigError, match=rf"kv-events-config.port is {port}.*another"):
            with publishing(port=port):
                pass


def test_a_stored_block_names_its_parent_wherever_the_run_begins():
    kv = KVCacheManager(num_blocks=9, block_size=128, enable_prefix_caching=True, log_events=True)
    tokens = prompt(1)
    chain = kv.chain(tokens, "s")
    holding = kv.open(PrefixHit((), 0, 0), len(tokens))
    for num_tokens in (128, 512):
        kv.publish(holding, chain, num_computed_tokens=num_tokens)
    first, rest = kv.events.drain()
    assert isinstance(rest, BlocksStored)
    assert first.parent is None
    assert rest.parent == first.blocks[-1]
    assert [grain.grain_hash for grain in rest.grains] == grain_hashes(tokens, "s")
