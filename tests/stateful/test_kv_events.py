"""KV events from the cache to a reader's index, over a wire that loses, doubles and reorders."""

from __future__ import annotations

import functools
import itertools
import random

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.kvcache.block_pool import OutOfBlocksError
from pdserve.kvcache.grains import GrainTracker
from pdserve.kvcache.manager import HashChain, KVCacheManager, PrefixHit
from pdserve.wire.event_reader import GONE_S, STALE_S, EventReader, GrainSet, ReaderState
from pdserve.wire.event_stream import GrainStream
from pdserve.wire.events import (
    Ask,
    Batch,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    GrainsRemoved,
    GrainsStored,
    MissingBatches,
    SnapshotPart,
    first_epoch,
)
from pdserve.wire.ids import GRAIN_TOKENS, Incarnation, block_hash, grain_hashes, root_hash
from tests.stateful.reaching import in_ci

BLOCK = 128
NUM_BLOCKS = 7
TOKENS = {letter: [ord(letter) + i for i in range(BLOCK)] for letter in "ab"}
PROMPTS = st.text("ab", min_size=1, max_size=4)
SALTS = st.sampled_from(["", "x"])


def tokens_of(letters: str) -> list[int]:
    return [token for letter in letters for token in TOKENS[letter]]


@functools.cache
def names_of(letters: str, salt: str) -> list[bytes]:
    names = [root_hash(salt)]
    for letter in letters:
        names.append(block_hash(names[-1], TOKENS[letter]))
    return names[1:]


ALL_PROMPTS = [f"{a}{b}{c}{d}" for a in "ab" for b in "ab" for c in "ab" for d in "ab"]
BLOCKS = {name for s in ("", "x") for p in ALL_PROMPTS for name in names_of(p, s)}
GRAINS = {
    grain: names[2 * i : 2 * i + 2]
    for salt in ("", "x")
    for prompt in ALL_PROMPTS
    for names in [names_of(prompt, salt)]
    for i, grain in enumerate(grain_hashes(tokens_of(prompt), salt))
}


class KVEventsMachine(RuleBasedStateMachine):
    """Requests come, compute and go; the engine restarts; the wire does its worst."""

    def __init__(self) -> None:
        super().__init__()
        self.num_lives = 0
        self.now_s = 0.0
        self.index = GrainSet()
        self.reader = EventReader(self.index, now_s=0.0)
        self.on_the_way: list[Batch | MissingBatches | SnapshotPart] = []
        self.asks: list[Ask] = []

    @initialize()
    def restart(self) -> None:
        self.num_lives += 1
        self.kv = KVCacheManager(
            num_blocks=NUM_BLOCKS, block_size=BLOCK, enable_prefix_caching=True, log_events=True
        )
        self.tracker = GrainTracker()
        self.stream = GrainStream(first_epoch(Incarnation(f"{self.num_lives:016x}")))
        self.running: list[tuple] = []
        self.was_bad = False
        self.findable: set[bytes] = set()
        self.asks.clear()

    # ---- the engine ----------------------------------------------------------------

    @rule(prompt=PROMPTS, salt=SALTS)
    def begin(self, prompt: str, salt: str) -> None:
        chain = self.chain(prompt, salt)
        self.open(prompt, chain, self.kv.match(chain, max_tokens=len(prompt) * BLOCK - 1))

    @rule(prompt=PROMPTS, salt=SALTS)
    def begin_without_the_cache(self, prompt: str, salt: str) -> None:
        """As with prompt logprobs: its blocks are further copies."""
        self.open(prompt, self.chain(prompt, salt), PrefixHit((), 0, 0))

    def chain(self, prompt: str, salt: str) -> HashChain:
        """The last block is filled by output tokens."""
        tokens = tokens_of(prompt)
        chain = self.kv.chain(tokens[:-BLOCK], salt)
        chain.output += tokens[-BLOCK:]
        return chain

    def open(self, prompt: str, chain: HashChain, hit: PrefixHit) -> None:
        try:
            holding = self.kv.open(hit, len(prompt) * BLOCK)
        except OutOfBlocksError:
            return
        finally:
            self.drain()
        self.running.append((holding, chain, len(prompt)))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9), num_blocks=st.integers(1, 4))
    def compute(self, which: int, num_blocks: int) -> None:
        holding, chain, num_most = self.running[which % len(self.running)]
        num_tokens = min(num_blocks, num_most) * BLOCK
        self.kv.publish(holding, chain, num_computed_tokens=num_tokens)
        self.drain()

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9), is_bad=st.sampled_from([False] * 9 + [True]))
    def end(self, which: int, is_bad: bool) -> None:
        holding, *_ = self.running.pop(which % len(self.running))
        if is_bad:
            self.was_bad = True
            self.kv.pool.forget(holding.blocks)
        holding.end()
        self.drain()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.kv.pool.forget_all()
        self.drain()

    def drain(self) -> None:
        events = self.kv.events.drain()
        for event in events:
            self.take(event)
        self.stream.add(self.tracker.apply(events))

    def take(self, event: object) -> None:
        match event:
            case BlocksStored():
                assert self.findable.isdisjoint(event.blocks), "stored twice"
                parent = root_hash(event.salt) if event.parent is None else event.parent
                for i, name in enumerate(event.blocks):
                    tokens = event.token_ids[i * BLOCK : (i + 1) * BLOCK]
                    assert block_hash(parent, tokens) == name
                    parent = name
                assert len(event.token_ids) == len(event.blocks) * event.block_size
                self.findable.update(event.blocks)
            case BlocksRemoved(blocks):
                assert self.findable.issuperset(blocks), "removed what is not there"
                self.findable.difference_update(blocks)
            case BlocksCleared():
                self.findable.clear()

    # ---- the wire ------------------------------------------------------------------

    @rule()
    def publish(self) -> None:
        self.on_the_way.append(self.stream.batch())

    @rule()
    def lose_events_before_they_are_published(self) -> None:
        self.stream.restart(self.tracker.grains())

    @precondition(lambda self: self.on_the_way)
    @rule(which=st.integers(0, 9), is_doubled=st.booleans())
    def deliver(self, which: int, is_doubled: bool) -> None:
        which = min(which, len(self.on_the_way) - 1)
        message = self.on_the_way[which] if is_doubled else self.on_the_way.pop(which)
        if isinstance(message, Batch):
            self.reader.heard(message, self.now_s)
        else:
            self.reader.answered(message, self.now_s)

    @precondition(lambda self: self.on_the_way)
    @rule(which=st.integers(0, 9))
    def lose(self, which: int) -> None:
        self.on_the_way.pop(which % len(self.on_the_way))

    @rule(wait_s=st.sampled_from([0.0, 0.3, 2.0]))
    def ask(self, wait_s: float) -> None:
        self.now_s += wait_s
        ask = self.reader.due(self.now_s)
        if ask is not None:
            self.asks.append(ask)

    @precondition(lambda self: self.asks)
    @rule(which=st.integers(0, 9))
    def answer(self, which: int) -> None:
        ask = self.asks.pop(which % len(self.asks))
        self.on_the_way.append(self.stream.batch())
        self.on_the_way += self.stream.answer(ask)

    # ---- what holds ----------------------------------------------------------------

    @invariant()
    def events_say_what_can_be_found(self) -> None:
        if self.num_lives:
            assert self.findable == {name for name in BLOCKS if self.kv.pool.find([name])}

    @invariant()
    def what_can_be_found_has_its_beginning(self) -> None:
        """But where contents that may be wrong were forgotten."""
        if self.num_lives and not self.was_bad:
            for salt, prompt in itertools.product(("", "x"), ALL_PROMPTS):
                found = [name in self.findable for name in names_of(prompt, salt)]
                assert found == sorted(found, reverse=True)

    @invariant()
    def a_grain_is_there_while_all_of_its_blocks_are(self) -> None:
        if self.num_lives:
            assert self.tracker.grains().get("GPU", set()) == self.grains()

    def grains(self) -> set[int]:
        return {grain for grain, blocks in GRAINS.items() if self.findable.issuperset(blocks)}

    @rule()
    def fall_quiet(self) -> None:
        """Two heartbeats and answers after all is quiet, the index is the engine's."""
        while self.on_the_way:
            self.deliver(0, False)
        for _ in range(2):
            self.now_s += 10.0
            self.reader.heard(self.stream.batch(), self.now_s)
            ask = self.reader.due(self.now_s)
            if ask is not None:
                for each in self.stream.answer(ask):
                    self.reader.answered(each, self.now_s)
        assert self.reader.state(self.now_s) is ReaderState.LIVE
        assert self.index.grains.get("GPU", set()) == self.grains()

    def teardown(self) -> None:
        if self.num_lives:
            self.fall_quiet()


TestKVEvents = KVEventsMachine.TestCase
TestKVEvents.settings = in_ci(75, num_steps=50)


def test_behind_a_reset_no_block_hangs_on_another_requests_copy_of_what_it_began_with():
    """An index that is a tree (Dynamo's) takes no block without its parent, and is not told again
    of one that it could not take."""
    machine = KVEventsMachine()
    machine.restart()
    machine.begin("ab", "")
    machine.compute(0, 1)
    machine.reset_prefix_cache()
    machine.begin("ab", "")
    machine.compute(1, 1)
    machine.compute(0, 2)
    machine.end(1, False)
    machine.begin("bbbb", "")
    machine.begin("b", "")
    assert machine.findable == set()
    machine.what_can_be_found_has_its_beginning()


def synced(stream: GrainStream, *, now_s: float = 0.0) -> tuple[EventReader, GrainSet]:
    index = GrainSet()
    reader = EventReader(index, now_s=now_s)
    for answer in stream.answer(reader.due(now_s)):
        reader.answered(answer, now_s)
    assert reader.state(now_s) is ReaderState.LIVE
    return reader, index


def test_a_snapshot_of_many_grains_comes_in_parts_in_any_order():
    stream = GrainStream(1 << 16)
    stream.add([GrainsStored(list(range(200_000))), GrainsStored([7], "CPU")])
    stream.batch()
    index = GrainSet()
    reader = EventReader(index, now_s=0.0)
    parts = list(stream.answer(reader.due(0.0)))
    assert len(parts) == 5
    random.Random(0).shuffle(parts)
    for part in parts[:-1]:
        reader.answered(part, 0.0)
        assert index.grains == {}, "half a snapshot is none"
    reader.answered(parts[-1], 0.0)
    assert index.grains == {"GPU": set(range(200_000)), "CPU": {7}}


def test_who_lacks_a_few_batches_gets_those_and_who_lacks_many_a_snapshot():
    stream = GrainStream(1 << 16)
    reader, index = synced(stream)
    stream.add([GrainsStored([1])])
    stream.batch()
    stream.add([GrainsStored([2]), GrainsRemoved([1])])
    reader.heard(stream.batch(), 1.0)
    assert reader.state(1.0) is ReaderState.RESYNC
    assert not reader.is_exact(1.0)
    (answer,) = stream.answer(reader.due(1.0))
    assert isinstance(answer, MissingBatches)
    assert len(answer.batches) == 2
    reader.answered(answer, 1.0)
    assert index.grains == {"GPU": {2}}
    for _ in range(2000):
        batch = stream.batch()
    reader.heard(batch, 2.0)
    (answer,) = stream.answer(reader.due(2.0))
    assert isinstance(answer, SnapshotPart)
    reader.answered(answer, 2.0)
    assert reader.state(2.0) is ReaderState.LIVE
    assert index.grains == {"GPU": {2}}


def test_a_late_answer_does_not_bring_back_what_was_removed_since():
    stream = GrainStream(1 << 16)
    stream.add([GrainsStored([1])])
    stream.batch()
    index = GrainSet()
    reader = EventReader(index, now_s=0.0)
    late = list(stream.answer(reader.due(0.0)))
    stream.add([GrainsRemoved([1])])
    batch = stream.batch()
    for answer in stream.answer(reader.due(60.0)):
        reader.answered(answer, 60.0)
    reader.heard(batch, 60.0)
    for answer in late:
        reader.answered(answer, 60.0)
    assert index.grains.get("GPU", set()) == set()


def test_a_question_without_an_answer_is_asked_again_ever_more_rarely():
    reader = EventReader(GrainSet(), now_s=0.0)
    asked_s, now_s = [], 0.0
    while now_s < 60:
        if reader.due(now_s) is not None:
            asked_s.append(now_s)
        now_s += 0.1
    gaps = [b - a for a, b in itertools.pairwise(asked_s)]
    assert gaps[0] == pytest.approx(1.2, abs=0.2)
    assert gaps[-1] == pytest.approx(6.0, abs=0.2)
    assert max(gaps) < 6.2


def test_silence_makes_an_index_stale_then_not_to_be_believed_and_a_heartbeat_mends_it():
    stream = GrainStream(1 << 16)
    stream.add([GrainsStored([1])])
    stream.batch()
    reader, index = synced(stream)
    assert reader.state(STALE_S) is ReaderState.STALE
    assert reader.is_exact(STALE_S)
    assert not reader.is_exact(GONE_S)
    reader.heard(stream.batch(), 9.0)
    assert reader.state(9.0) is ReaderState.LIVE
    assert reader.is_exact(9.0)
    assert index.grains == {"GPU": {1}}
    assert reader.num_resyncs == 1


def test_a_reader_that_hears_more_than_it_can_keep_asks_anew():
    stream = GrainStream(1 << 16)
    index = GrainSet()
    reader = EventReader(index, now_s=0.0)
    first = reader.due(0.0)
    for number in range(3000):
        stream.add([GrainsStored([number])])
        reader.heard(stream.batch(), 0.1)
    for answer in stream.answer(first):
        reader.answered(answer, 0.2)
    ask = reader.due(0.2)
    if ask is not None:
        for answer in stream.answer(ask):
            reader.answered(answer, 0.2)
    assert reader.state(0.2) is ReaderState.LIVE
    assert index.grains == {"GPU": set(range(3000))}


def test_names_of_grains_do_not_depend_on_the_size_of_blocks_but_on_the_salt():
    tokens = list(range(3 * GRAIN_TOKENS + 5))
    found = {}
    for size in (8, 64, 128):
        kv = KVCacheManager(
            num_blocks=200, block_size=size, enable_prefix_caching=True, log_events=True
        )
        chain = kv.chain(tokens, "tenant")
        holding = kv.open(PrefixHit((), 0, 0), len(tokens))
        for num_tokens in (300, 500, len(tokens)):
            kv.publish(holding, chain, num_computed_tokens=num_tokens)
        tracker = GrainTracker()
        tracker.apply(kv.events.drain())
        found[size] = tracker.grains()["GPU"]
    assert found[8] == found[64] == found[128] == set(grain_hashes(tokens, "tenant"))
    assert len(found[8]) == 3
    assert found[8].isdisjoint(grain_hashes(tokens, "another"))


def test_a_tiers_grains_are_its_own_and_outlive_a_reset_of_the_engines_cache():
    kv = KVCacheManager(num_blocks=9, block_size=BLOCK, enable_prefix_caching=True, log_events=True)
    holding = kv.open(PrefixHit((), 0, 0), 2 * BLOCK)
    kv.publish(holding, kv.chain(tokens_of("ab"), ""), num_computed_tokens=2 * BLOCK)
    (stored,) = kv.events.drain()
    tracker, index = GrainTracker(), GrainSet()
    for event in (
        *tracker.apply([stored, msgspec.structs.replace(stored, medium="CPU")]),
        *tracker.apply([BlocksCleared()]),
    ):
        index.apply(event)
    grains = set(grain_hashes(tokens_of("ab"), ""))
    assert index.grains == {"CPU": grains}
    for event in tracker.apply([BlocksRemoved([stored.blocks[0]], "CPU")]):
        index.apply(event)
    assert index.grains == {"CPU": set()}
