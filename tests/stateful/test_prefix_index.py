"""What the proxy knows of several engines' KV, held against sets, over a wire that loses things."""

from __future__ import annotations

import time

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.proxy.brain.index import Holder, PrefixIndex
from pdserve.proxy.brain.prefixes import RoutedPrefixes
from pdserve.wire.event_reader import EventReader
from pdserve.wire.event_stream import GrainStream
from pdserve.wire.events import Batch, GrainsCleared, GrainsRemoved, GrainsStored
from tests.stateful.reaching import in_ci

ENGINES = 3
GRAINS = range(6)
CHAINS = [(0,), (0, 1, 2), (0, 1, 3), (4, 5), (5, 2, 0)]
some_grains = st.lists(st.sampled_from(GRAINS), max_size=4)


class Engine:
    """An engine that tells, and the proxy's reader of it."""

    def __init__(self, index: PrefixIndex, life: int) -> None:
        self.life = life
        self.begin_life()
        self.holder = Holder(index)
        self.reader = EventReader(self.holder, now_s=0.0)
        self.on_the_way: list = []

    def begin_life(self) -> None:
        self.has: set[int] = set()
        self.stream = GrainStream(self.life << 16)

    def change(self, event) -> None:
        match event:
            case GrainsStored(grains, "GPU"):
                self.has |= set(grains)
            case GrainsRemoved(grains, "GPU"):
                self.has -= set(grains)
            case GrainsCleared():
                self.has = set()
        self.stream.add([event])


class IndexMachine(RuleBasedStateMachine):
    """Engines tell, are restarted and replaced; batches are lost, doubled and late."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.now_s = 0.0
        self.num_lives = 0
        self.engines = [self.engine() for _ in range(ENGINES)]

    def engine(self) -> Engine:
        self.num_lives += 1
        return Engine(self.index, self.num_lives)

    which = st.integers(0, ENGINES - 1)
    medium = st.sampled_from(["GPU", "GPU", "GPU", "CPU"])

    @rule(which=which, grains=some_grains, medium=medium)
    def store(self, which: int, grains: list[int], medium: str) -> None:
        self.engines[which].change(GrainsStored(grains, medium))

    @rule(which=which, grains=some_grains, medium=medium)
    def remove(self, which: int, grains: list[int], medium: str) -> None:
        self.engines[which].change(GrainsRemoved(grains, medium))

    @rule(which=which)
    def clear(self, which: int) -> None:
        self.engines[which].change(GrainsCleared())

    @rule(which=which)
    def restart(self, which: int) -> None:
        self.num_lives += 1
        self.engines[which].life = self.num_lives
        self.engines[which].begin_life()

    @rule(which=which)
    def replace(self, which: int) -> None:
        self.engines[which].holder.close()
        self.engines[which] = self.engine()

    @rule(which=which)
    def publish(self, which: int) -> None:
        self.engines[which].on_the_way.append(self.engines[which].stream.batch())

    @rule(which=which, position=st.integers(0, 9), is_doubled=st.booleans())
    def deliver(self, which: int, position: int, is_doubled: bool) -> None:
        engine = self.engines[which]
        if engine.on_the_way:
            position %= len(engine.on_the_way)
            message = engine.on_the_way[position]
            if not is_doubled:
                del engine.on_the_way[position]
            if isinstance(message, Batch):
                engine.reader.heard(message, self.now_s)
            else:
                engine.reader.answered(message, self.now_s)

    @rule(which=which)
    def lose(self, which: int) -> None:
        self.engines[which].on_the_way[:1] = []

    @rule(which=which, wait_s=st.sampled_from([0.0, 2.0]))
    def ask(self, which: int, wait_s: float) -> None:
        self.now_s += wait_s
        engine = self.engines[which]
        if (ask := engine.reader.due(self.now_s)) is not None:
            engine.on_the_way.append(engine.stream.batch())
            engine.on_the_way += engine.stream.answer(ask)

    @rule(which=which, chain=st.sampled_from(CHAINS))
    def expect(self, which: int, chain: tuple[int, ...]) -> None:
        self.index.expect(self.engines[which].holder.bit, chain, self.now_s + 1.0)

    @rule(num_entries=st.integers(1, 3))
    def sweep(self, num_entries: int) -> None:
        self.index.sweep(num_entries, self.now_s)

    @rule()
    def fall_quiet(self) -> None:
        """Then every engine has what the index says it has, and nobody else has anything."""
        for engine in self.engines:
            while engine.on_the_way:
                self.deliver(self.engines.index(engine), 0, False)
            for _ in range(2):
                self.now_s += 10.0
                engine.reader.heard(engine.stream.batch(), self.now_s)
                if (ask := engine.reader.due(self.now_s)) is not None:
                    for answer in engine.stream.answer(ask):
                        engine.reader.answered(answer, self.now_s)
        for chain in CHAINS:
            expected = {}
            for engine in self.engines:
                depth = next(
                    (i for i, grain in enumerate(chain) if grain not in engine.has), len(chain)
                )
                if depth:
                    expected[engine.holder.bit] = depth
            assert self.index.depths(chain, self.now_s) == expected

    @precondition(lambda self: self.num_lives > ENGINES)
    @rule()
    def sweep_all(self) -> None:
        """What nobody has takes no room, and numbers are used again."""
        self.fall_quiet()
        for _ in range(4):
            self.index.sweep(1000, self.now_s)
        held = set().union(*(engine.has for engine in self.engines))
        assert set(self.index._entries) == held
        assert self.index._expected == {}
        assert len(self.index._free) == self.index._num_bits - ENGINES

    @invariant()
    def holders_have_numbers_of_their_own(self) -> None:
        bits = [engine.holder.bit for engine in self.engines]
        assert len(set(bits)) == ENGINES
        assert not set(bits) & set(self.index._free)

    def teardown(self) -> None:
        self.sweep_all()


TestIndex = IndexMachine.TestCase
TestIndex.settings = in_ci(50)


def test_a_retired_holder_is_out_of_every_answer_at_once():
    index = PrefixIndex()
    one, other = index.open("one"), index.open("other")
    index.add(one, range(1000))
    index.add(other, range(10))
    index.retire(one)
    assert index.depths(range(1000), 0.0) == {other: 10}


def test_who_is_not_believed_has_nothing_until_believed_again():
    index = PrefixIndex()
    holder = Holder(index)
    holder.apply(GrainsStored([1, 2]))
    holder.believe(is_believed=False)
    assert index.depths((1, 2), 0.0) == {}
    holder.apply(GrainsCleared())
    holder.apply(GrainsStored([1]))
    assert index.depths((1, 2), 0.0) == {}
    holder.believe(is_believed=True)
    assert index.depths((1, 2), 0.0) == {holder.bit: 1}


def test_what_is_expected_counts_until_its_time_is_over_and_not_at_another_engine():
    index = PrefixIndex()
    one, other = index.open("one"), index.open("other")
    index.add(one, [1])
    index.expect(one, (1, 2, 3), until_s=5.0)
    assert index.depths((1, 2, 3), 4.9) == {one: 3}
    index.add(one, [2])
    index.remove(one, [2])
    assert index.depths((1, 2, 3), 4.9) == {one: 1}, "what came was forgotten again"
    assert index.depths((1, 2, 3), 5.0) == {one: 1}
    index.sweep(10, 5.0)
    assert index._expected == {}
    assert other not in index.depths((1,), 0.0)


def test_a_sweep_looks_at_nothing_that_is_still_expected():
    index, took_s = PrefixIndex(), []
    for bit in [index.open("cores of one engine") for _ in range(8)]:
        index.expect(bit, range(50_000), until_s=9.0)
    for _ in range(3):
        begun_s = time.perf_counter()
        index.sweep(10, 8.9)
        took_s.append(time.perf_counter() - begun_s)
    assert min(took_s) < 0.005, "ten times a second"


def test_what_is_expected_again_expires_later_and_nothing_is_of_a_number_that_is_used_again():
    index = PrefixIndex()
    one = index.open("one")
    index.expect(one, (1, 2), until_s=5.0)
    index.expect(one, (1,), until_s=6.0)
    index.sweep(10, 5.0)
    assert index.depths((1, 2), 5.0) == {one: 1}
    index.retire(one)
    index.sweep(10, 5.0)
    assert index.open("other") == one
    assert index.depths((1, 2), 5.0) == {}


def test_of_what_was_sent_the_least_recent_prefix_is_forgotten_from_its_end():
    index = PrefixIndex()
    routed = RoutedPrefixes(index, "url", 16)
    routed.sent(range(10))
    routed.sent(range(100, 110))
    assert index.depths(tuple(range(10)), 0.0) == {routed.bit: 6}
    assert index.depths(tuple(range(100, 110)), 0.0) == {routed.bit: 10}
    routed.sent(range(6))
    routed.sent(range(200, 210))
    assert index.depths(tuple(range(6)), 0.0) == {routed.bit: 6}
    assert index.depths(tuple(range(100, 110)), 0.0) == {}


def test_an_engine_that_had_less_than_was_thought_is_taken_to_have_less_room():
    index = PrefixIndex()
    routed = RoutedPrefixes(index, "url", 100)
    for start in range(0, 1000, 10):
        routed.sent(range(start, start + 10))
    routed.answered(range(990, 1000), num_expected=10, num_found=10)
    assert routed.num_grains == 100
    for _ in range(10):
        routed.answered(range(900, 910), num_expected=10, num_found=0)
    assert 16 < routed.num_grains < 40
    assert len(routed._recent) <= routed.num_grains
    for _ in range(100):
        routed.answered(range(900, 910), num_expected=10, num_found=10)
    assert routed.num_grains == 100
