"""Several connectors as one: who loads what, what becomes of failures, and who hears what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config.connectors import BUILT_IN
from pdserve.connectors.base import (
    Capabilities,
    Hold,
    KVConnectorBase,
    KVConnectorScheduler,
    KVConnectorWorker,
    KVSource,
    Match,
)
from pdserve.connectors.conformance import ConnectorConformance, StoreConformance, prompt_of
from pdserve.connectors.conformance.engines import KitRequest
from pdserve.connectors.memory import MemoryConnector
from pdserve.connectors.memory.exchange import Exchange
from pdserve.connectors.multi import MultiConnector
from pdserve.connectors.multi.messages import MultiInstructions
from pdserve.connectors.multi.scheduler import MultiScheduler
from pdserve.connectors.multi.sources import Costs, choose
from pdserve.connectors.multi.worker import MultiWorker
from pdserve.connectors.nixl import NixlConnector, NixlSettings
from pdserve.connectors.registry import find
from pdserve.connectors.views import ScheduledRequest, StepView
from pdserve.errors import ConfigError, HandoffRefusedError
from pdserve.observe.clock import SystemClock
from pdserve.wire.ids import BlockId, RequestId
from pdserve.wire.request import FinishReason
from pdserve.wire.transfer import (
    ConnectorMetadata,
    ConnectorReport,
    Failed,
    LeaseEnd,
    LoadFailure,
    Received,
    Settled,
)
from tests.connectors.example_store import KEPT, StoreConnector, StoreScheduler
from tests.connectors.test_example_store import SlowConnector

if TYPE_CHECKING:
    from pdserve.connectors.base import ConnectorNews
    from pdserve.connectors.views import RequestView

SIZE = 16
PROMPT = prompt_of(4 * SIZE)


# ---- the conformance kit ---------------------------------------------------------------------


class _SavingScheduler(StoreScheduler):
    def _found(self, request: Any) -> list[Any]:
        return []  # the kit says whose KV a prompt has, and writes several


class SavingConnector(StoreConnector):
    """Saves what the kit computes, and has nothing to load."""

    def make_scheduler(self, context: Any, endpoints: Any) -> _SavingScheduler:
        return _SavingScheduler(context.shape)


@pytest.mark.slow
class TestMemoryAndAStore(ConnectorConformance):
    def make_connector(self) -> KVConnectorBase:
        KEPT.clear()
        return MultiConnector.of([MemoryConnector(exchange=Exchange()), SavingConnector()])


class TestTheStoreBesideMemory(StoreConformance):
    def make_connector(self) -> KVConnectorBase:
        KEPT.clear()
        return MultiConnector.of([MemoryConnector(exchange=Exchange()), SlowConnector()])


# ---- who loads -------------------------------------------------------------------------------


SOURCES = st.dictionaries(
    st.sampled_from("abcd"), st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=1
)


def costs_of(sources: dict[str, tuple[int, int]]) -> Costs:
    costs = Costs()
    for name, (_, seconds) in sources.items():
        costs.observe(name, 100, 100.0 * seconds)
    return costs


def quickest_s(sources: dict[str, tuple[int, int]]) -> int:
    """Seconds to load all that anybody has, token by token from the cheapest."""
    furthest = max(end for end, _ in sources.values())
    return sum(min(s for end, s in sources.values() if end > token) for token in range(furthest))


@given(SOURCES)
def test_parts_beside_the_steps_are_the_quickest_way_to_all_that_is_anywhere(
    sources: dict[str, tuple[int, int]],
) -> None:
    costs, here, took_s = costs_of(sources), 0, 0
    for _ in range(len(sources) + 1):
        matches = {
            name: Match(max(0, end - here), is_async=True) for name, (end, _) in sources.items()
        }
        plan = choose(matches, lambda _, __: 0, costs)
        if not plan.num_tokens:
            break
        ((name, num_tokens),) = plan.parts
        here, took_s = here + num_tokens, took_s + num_tokens * sources[name][1]
    assert here == max(end for end, _ in sources.values())
    assert took_s == quickest_s(sources)


@given(SOURCES)
def test_parts_inside_a_step_are_that_too_and_all_of_them_at_once(
    sources: dict[str, tuple[int, int]],
) -> None:
    matches = {name: Match(end, is_async=False) for name, (end, _) in sources.items()}
    plan = choose(matches, lambda name, here: sources[name][0] - here, costs_of(sources))
    assert not plan.is_async
    assert plan.num_tokens == max(end for end, _ in sources.values())
    assert sum(n * sources[name][1] for name, n in plan.parts) == quickest_s(sources)


@pytest.mark.parametrize(
    ("inside", "beside", "chosen"), [(16, 32, "beside"), (32, 32, "beside"), (48, 32, "inside")]
)
def test_a_load_inside_a_step_is_chosen_where_it_goes_further_than_those_beside_it(
    inside: int, beside: int, chosen: str
) -> None:
    matches = {"inside": Match(inside, is_async=False), "beside": Match(beside, is_async=True)}
    assert choose(matches, lambda _, __: 0, Costs()).parts == [(chosen, max(inside, beside))]


def test_a_peer_that_writes_brings_everything_whatever_a_store_would_cost() -> None:
    matches = {
        "store": Match(64, is_async=True),
        "peer": Match(60, is_async=True, is_pinned=True),
    }
    assert choose(matches, lambda _, __: 0, Costs()).parts == [("peer", 60)]


def test_a_source_that_was_slow_once_is_not_slow_for_ever() -> None:
    costs = Costs()
    costs.observe("a", 10, 100.0)
    costs.observe("b", 10, 50.0)
    assert costs.cheapest(["a", "b"]) == "b"
    for _ in range(5):
        costs.observe("a", 10, 1.0)
    assert costs.cheapest(["a", "b"]) == "a"


# ---- the scheduler half ------------------------------------------------------------------------


class Child(KVConnectorScheduler):
    """Does as its attributes say, and notes what it is told."""

    def __init__(self, match: Match | None = None, *, hands_over: bool = False) -> None:
        self.match = Match(0, is_async=False) if match is None else match
        self.is_unknown = False
        self.hands_over = hands_over
        self.hold: Hold | None = None
        self.raises = ""
        self.told: list[Any] = []
        self.reports: list[ConnectorReport] = []

    def _tell(self, call: str, *what: Any) -> None:
        if self.raises == call:
            raise ZeroDivisionError("nobody thought of this")
        self.told.append((call, *what))

    def request_arrived(self, request: RequestView) -> KVSource:
        self._tell("arrived")
        return KVSource.READY if request.handoff is not None else KVSource.LOCAL

    def get_num_new_matched_tokens(self, request: RequestView, num_computed: int) -> Match | None:
        num_tokens = max(0, self.match.num_tokens - num_computed)
        return (
            None if self.is_unknown else msgspec.structs.replace(self.match, num_tokens=num_tokens)
        )

    def update_state_after_alloc(
        self, request: RequestView, block_ids: Any, num_tokens: int, *, generations: Any = ()
    ) -> None:
        self._tell("starts" if generations else "loads", num_tokens)

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata | None:
        names = [step.get(each).view.request_id for each in step]
        if names:
            self._tell("step", *names)
        return ConnectorMetadata(b"step") if names else None

    def preempted(self, request: RequestView, *table: Any) -> Hold | None:
        self._tell("preempted")
        return self.hold

    def request_finished(self, request: RequestView, *table: Any) -> Hold | None:
        self._tell("finished", request.finish_reason)
        return self.hold

    def update_connector_output(self, report: ConnectorReport) -> ConnectorNews:
        self._tell("report")
        self.reports.append(report)
        return super().update_connector_output(report)


class Bench:
    """A multi connector's scheduler half over such children, and a request."""

    def __init__(self, **children: Child) -> None:
        self.children = children
        self.half = MultiScheduler(children, block_size=SIZE)
        self.request = KitRequest(RequestId("r"), PROMPT, finish_reason=FinishReason.LENGTH)
        self.blocks = [BlockId(each) for each in range(4)]

    def arrive(self) -> None:
        self.half.request_arrived(self.request)

    def match(self, num_computed: int = 0) -> Match | None:
        return self.half.get_num_new_matched_tokens(self.request, num_computed)

    def load(self, num_computed: int = 0) -> Match:
        """Match, and begin what was matched."""
        match = self.match(num_computed)
        assert match is not None
        generations = [] if match.is_async and match.num_tokens else [1] * 4
        self.half.update_state_after_alloc(
            self.request, self.blocks, match.num_tokens, generations=generations
        )
        return match

    def step(self, *names: str) -> MultiInstructions | None:
        requests = {RequestId(each): self.request for each in names or ("r",)}
        step = StepView(
            dict.fromkeys(requests, 1),
            lambda each: ScheduledRequest(requests[each], self.blocks, [1] * 4, 0, 16),
        )
        metadata = self.half.build_connector_meta(step)
        return None if metadata is None else MultiInstructions.from_metadata(metadata)

    def finish(self) -> Hold | None:
        return self.half.request_finished(self.request, self.blocks, [1] * 4)

    def report(self, **facts: Any) -> ConnectorNews:
        return self.half.update_connector_output(ConnectorReport(**facts))


def received(connector: str) -> Received:
    return Received(
        request_id=RequestId("r"),
        num_bytes=1,
        num_descriptors=1,
        wait_s=0.0,
        transfer_s=0.1,
        connector=connector,
    )


def failed(connector: str, num_valid_tokens: int = 0) -> Failed:
    return Failed(
        request_id=RequestId("r"),
        reason=LoadFailure.TIMEOUT,
        connector=connector,
        num_valid_tokens=num_valid_tokens,
    )


def beside(num_tokens: int) -> Match:
    return Match(num_tokens, is_async=True)


def inside(num_tokens: int) -> Match:
    return Match(num_tokens, is_async=False)


def test_a_prompt_comes_in_parts_and_each_child_loads_its_own() -> None:
    bench = Bench(store=Child(beside(32)), peer=Child(beside(64), hands_over=True))
    bench.arrive()
    assert bench.load() == Match(32, is_async=True)
    assert bench.report(received=[received("store")]).loaded
    assert bench.load(32) == Match(32, is_async=True)
    assert bench.report(received=[received("peer")]).loaded
    assert bench.load(64).num_tokens == 0
    assert bench.children["store"].told[1:] == [("loads", 32), ("report",), ("starts", 0)]
    assert bench.children["peer"].told[1:] == [("loads", 32), ("report",), ("starts", 0)]
    assert bench.half.num_loaded == {"store": 32, "peer": 32}
    bench.finish()
    assert not bench.half.num_open


def test_two_stores_load_inside_one_step_one_behind_the_other() -> None:
    bench = Bench(near=Child(inside(32)), far=Child(inside(48)))
    bench.arrive()
    assert bench.load() == Match(48, is_async=False)
    assert bench.children["near"].told[-1] == ("starts", 32)
    assert bench.children["far"].told[-1] == ("starts", 16)
    step = bench.step()
    assert step is not None
    assert step.num_loading == {"near": 32, "far": 16}


def test_the_source_that_is_cheaper_by_what_loads_took_is_asked_first() -> None:
    bench = Bench(slow=Child(beside(32)), quick=Child(beside(32)))
    for first, took_s in (("slow", 5.0), ("quick", 1.0), ("quick", 1.0)):
        bench.arrive()
        bench.load()
        assert bench.children[first].told[-1] == ("loads", 32)
        bench.report(received=[msgspec.structs.replace(received(first), elapsed_s=took_s)])
        bench.finish()


def test_what_one_child_reports_is_never_taken_for_anothers() -> None:
    bench = Bench(a=Child(beside(64)), b=Child(beside(32)))
    bench.arrive()
    bench.load()
    late = bench.report(received=[received("b")], failed=[failed("b")])
    assert not late.loaded
    assert not late.failed
    assert bench.half.faults["report_unknown"] == 2
    assert not bench.children["a"].reports
    assert bench.report(received=[received("a")]).loaded


def test_what_a_store_fails_to_bring_is_asked_of_the_next_and_not_of_it_again() -> None:
    bench = Bench(store=Child(beside(64)), other=Child(beside(64)))
    bench.arrive()
    bench.load()
    news = bench.report(failed=[failed("store", 20)])
    assert news.elsewhere
    assert not news.failed
    bench.load(16)
    assert bench.children["other"].told[-1] == ("loads", 48)
    news = bench.report(failed=[failed("other", 16)])
    assert news.failed
    assert not news.elsewhere
    assert bench.match() == Match(0, is_async=False)


@pytest.mark.parametrize(("num_stored", "is_elsewhere"), [(48, False), (64, True)])
def test_instead_of_an_engine_another_source_must_have_all(
    num_stored: int, is_elsewhere: bool
) -> None:
    bench = Bench(peer=Child(beside(64), hands_over=True), store=Child(inside(num_stored)))
    bench.arrive()
    bench.load()
    assert bool(bench.report(failed=[failed("peer")]).elsewhere) is is_elsewhere


def test_a_load_that_has_failed_inside_a_step_is_not_begun_again() -> None:
    bench = Bench(store=Child(inside(32)), other=Child(inside(16)))
    bench.arrive()
    bench.load()
    bench.step()
    bench.report(failed=[failed("store")])
    assert bench.match() == Match(16, is_async=False)
    bench.report(failed=[failed("")])  # on another rank: nobody knows whose it was
    assert [len(each.reports) for each in bench.children.values()] == [2, 0]


def test_a_push_waits_for_its_registration_and_nobody_waits_for_a_store_that_is_not_needed() -> (
    None
):
    store, peer = Child(), Child(hands_over=True)
    bench = Bench(store=store, peer=peer)
    bench.arrive()
    peer.is_unknown = True
    assert bench.match() is None
    peer.is_unknown, store.is_unknown = False, True
    assert bench.match() is None
    peer.match = beside(64)
    assert bench.match() == beside(64)


def test_a_prefill_that_is_pushed_is_pinned_and_loads_from_the_store() -> None:
    peer = Child(Match(0, is_async=False, is_pinned=True), hands_over=True)
    bench = Bench(peer=peer, store=Child(inside(32)))
    bench.arrive()
    assert bench.load() == Match(32, is_async=False, is_pinned=True)
    assert peer.told[-1] == ("starts", 0)


def test_the_tiers_of_all_children_say_what_they_have() -> None:
    bench = Bench(a=Child(), b=Child(), c=Child())
    for name, child in bench.children.items():
        child.take_events = lambda name=name: [name]  # type: ignore[method-assign]
    assert bench.half.take_events() == ["a", "b", "c"]


# ---- endings -----------------------------------------------------------------------------------


def test_an_ending_is_held_until_every_child_has_let_go() -> None:
    a, b, c = Child(), Child(), Child()
    bench = Bench(a=a, b=b, c=c)
    bench.arrive()
    a.hold, c.hold = Hold("hold 0"), Hold("hold 0")
    hold = bench.finish()
    assert hold is not None
    assert hold.keys == {("a", "hold 0"), ("c", "hold 0")}
    fact = Settled(request_id=RequestId("r"), end=LeaseEnd.RELEASED, nonce="hold 0", connector="a")
    assert bench.report(settled=[fact]).released == [fact]
    assert not b.reports


def test_a_request_that_ends_while_it_is_loaded_is_known_until_the_load_has_ended() -> None:
    bench = Bench(a=Child(beside(64)))
    bench.arrive()
    bench.load()
    bench.finish()
    assert bench.half.num_open
    assert bench.report(failed=[failed("a")]).failed
    assert not bench.half.num_open


def test_a_refusal_by_one_child_is_the_end_for_those_that_had_taken_it() -> None:
    taken, refusing = Child(), Child()

    def refuse(request: RequestView) -> KVSource:
        raise HandoffRefusedError("not from here")

    refusing.request_arrived = refuse  # type: ignore[method-assign]
    bench = Bench(taken=taken, refusing=refusing)
    bench.request.finish_reason = None
    with pytest.raises(HandoffRefusedError):
        bench.arrive()
    assert taken.told == [("arrived",), ("finished", None)]
    assert not bench.half.num_open


def test_what_others_hold_of_a_preemption_that_a_child_fails_over_is_held_at_the_end() -> None:
    good, bad = Child(), Child()
    bench = Bench(good=good, bad=bad)
    bench.arrive()
    good.hold, bad.raises = Hold("hold 0"), "preempted"
    with pytest.raises(ZeroDivisionError):
        bench.half.preempted(bench.request, bench.blocks, [1] * 4)
    good.hold = None
    hold = bench.finish()
    assert hold is not None
    assert hold.keys == {("good", "hold 0")}


def test_a_child_that_fails_over_an_end_loses_no_others_hold() -> None:
    good, bad = Child(), Child()
    bench = Bench(bad=bad, good=good)
    bench.arrive()
    good.hold, bad.raises = Hold("hold 0"), "finished"
    hold = bench.finish()
    assert hold is not None
    assert hold.keys == {("good", "hold 0")}
    assert not bench.half.num_open


def test_a_handover_that_fails_has_been_told_to_nobody_else() -> None:
    store, peer = Child(), Child(hands_over=True)
    bench = Bench(store=store, peer=peer)
    bench.arrive()
    bench.request.finish_reason = FinishReason.HANDOFF
    peer.raises = "finished"
    with pytest.raises(ZeroDivisionError):
        bench.finish()
    assert store.told == [("arrived",)]


def test_who_fails_over_a_step_costs_its_own_part_of_it_and_ends_that_request_before_the_next() -> (
    None
):
    good, bad = Child(inside(32)), Child(inside(48))
    bench = Bench(good=good, bad=bad)
    bench.arrive()
    bench.load()
    bad.raises = "step"
    step = bench.step()
    assert step is not None
    assert step.payloads == {"good": b"step"}
    assert step.lost == ["r"], "what it was to load has not come"
    bad.raises = ""
    with pytest.raises(ZeroDivisionError):
        bench.step()
    assert good.told[-1] == ("step", "r")
    assert len([each for each in good.told if each[0] == "step"]) == 1
    bench.finish()


def test_nothing_is_told_of_a_start_over_which_the_one_that_does_not_load_fails() -> None:
    bad = Child()
    bench = Bench(good=Child(inside(32)), bad=bad)
    bench.arrive()
    bad.raises = "starts"
    with pytest.raises(ZeroDivisionError):
        bench.load()
    assert bench.children["good"].told == [("arrived",)]


class _LayersWorker(KVConnectorWorker):
    """Asks for the layers of steps whose instructions are `layers`."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    def start_load_kv(self, metadata: ConnectorMetadata) -> bool:
        return metadata.payload == b"layers"

    def save_kv_layer(self, layer: int) -> None:
        self.saved.append(layer)


def test_around_layers_only_those_are_called_that_have_asked_for_this_step() -> None:
    halves = {name: _LayersWorker() for name in ("asks", "asks not", "hears nothing")}
    worker = MultiWorker(halves, clock=SystemClock())
    told = {"asks": ConnectorMetadata(b"layers"), "asks not": ConnectorMetadata(b"none")}
    metadata = MultiInstructions.of(told).to_metadata()
    assert metadata is not None
    assert worker.start_load_kv(metadata)
    worker.save_kv_layer(3)
    assert [half.saved for half in halves.values()] == [[3], [], []]


# ---- configuration -----------------------------------------------------------------------------


class UrlSettings(msgspec.Struct, frozen=True):
    url: str = ""


class UrlStore(StoreConnector):
    """A store that has to be told where it is."""

    name: str = "elsewhere"
    settings: UrlSettings = UrlSettings()


def test_connectors_are_named_with_commas_and_a_store_that_has_a_url_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(BUILT_IN, "elsewhere", f"{__name__}:UrlStore")  # type: ignore[misc]
    told = {"elsewhere.url": "tcp://127.0.0.1:1", "nixl.lanes": 2}
    for name, settings in (("nixl,elsewhere", told), ("nixl", told), ("null, nixl", told)):
        multi = find(name, settings)
        assert isinstance(multi, MultiConnector)
        assert multi.connectors == (
            NixlConnector(settings=NixlSettings(lanes=2)),
            UrlStore(settings=UrlSettings(url="tcp://127.0.0.1:1")),
        )
        assert multi.capabilities == Capabilities(push=True)
    assert find("null", {"elsewhere.url": "x"}).name == "elsewhere"
    assert find("nixl", {"elsewhere.url": ""}).name == "nixl"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("nixl,nixl", "is 'nixl,nixl': name each connector once"),
        ("nixl,memory", "of nixl and memory choose one"),
        ("nixl,nowhere", "is 'nowhere': use one of"),
    ],
)
def test_connectors_that_cannot_be_combined_are_refused(names: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find(names)
