"""The conformance kit, run on every connector and on shapes of P and D that differ."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pdserve.config.connectors import names
from pdserve.connectors.conformance import ConnectorConformance, Engine, make_shape, prompt_of
from pdserve.connectors.conformance.pull import PullConformance
from pdserve.connectors.memory import MemoryConnector
from pdserve.connectors.memory.exchange import Exchange
from pdserve.connectors.nixl import NixlConnector
from pdserve.connectors.registry import find
from pdserve.connectors.views import StepView
from pdserve.errors import ConfigError
from pdserve.wire.transfer import LoadFailure, PushTicket
from tests.faulty import FaultKind, FaultyConnector, Plan

if TYPE_CHECKING:
    from pdserve.connectors.base import KVConnectorBase

PROMPT = prompt_of(40)


class TestMemory(ConnectorConformance):
    def make_connector(self) -> KVConnectorBase:
        return MemoryConnector(exchange=Exchange())


@pytest.mark.matrix
class TestMemoryOfTwoRanks(TestMemory):
    prefill_shape = decode_shape = make_shape(tp=2)


@pytest.mark.slow
class TestMemoryFromTwoStagesToTwoRanksOfLargerBlocks(TestMemory):
    prefill_shape = make_shape(pp=2, block_size=16)
    decode_shape = make_shape(tp=2, block_size=64, num_blocks=8)


@pytest.mark.matrix
class TestMemoryFromFourRanksToOneOfSmallerBlocks(TestMemory):
    prefill_shape = make_shape(tp=4, num_kv_heads=2, block_size=64, num_blocks=8)
    decode_shape = make_shape(num_kv_heads=2, block_size=16)


@pytest.mark.slow
class TestMemoryOfLatents(TestMemory):
    """MLA: one latent, on every rank."""

    prefill_shape = make_shape(tp=2, num_kv_heads=1, num_planes=1)
    decode_shape = make_shape(pp=2, num_kv_heads=1, num_planes=1)


@pytest.mark.matrix
class TestFaultyWithoutFaults(TestMemory):
    def make_connector(self) -> KVConnectorBase:
        return FaultyConnector.around(super().make_connector(), Plan())


@pytest.mark.slow
class TestNixl(ConnectorConformance):
    def make_connector(self) -> KVConnectorBase:
        return NixlConnector()


@pytest.mark.matrix
class TestNixlOfTwoRanks(PullConformance):
    prefill_shape = decode_shape = make_shape(tp=2)

    def make_connector(self) -> KVConnectorBase:
        return NixlConnector()


@pytest.mark.parametrize("name", ["memory", "nixl"])
def test_closing_leaves_no_descriptor_and_no_shared_memory_open(name: str) -> None:
    connector = MemoryConnector(exchange=Exchange()) if name == "memory" else NixlConnector()
    Engine(connector, "warm").close()  # libraries keep a few of their own after their first use
    before = len(os.listdir("/proc/self/fd"))
    segments = _segments()
    p, d = Engine(connector, "P"), Engine(connector, "D")
    d.load(d.queue(PROMPT, p.prefill(PROMPT, [1, 2, 3])), [4, 5, 6])
    d.until(lambda: d.received, others=[p])
    theirs = _segments() - segments
    for engine in (d, p):
        engine.close()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert not _segments() - segments
    assert not [path for path in theirs if Path(path).exists()]


def _segments() -> set[str]:
    """The shared memory that this process has open; others beside it have their own."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = {line[line.index("/dev/shm/") :] for line in maps if "/dev/shm/" in line}
    return {path.removesuffix(" (deleted)") for path in paths}


def test_the_registry_knows_its_connectors_and_names_them_when_asked_for_another() -> None:
    assert {"null", "memory", "nixl"} <= set(names())
    with pytest.raises(ConfigError, match=r"kv-connector is 'nxil': use one of .*nixl, null"):
        find("nxil")


def test_the_null_connector_leases_nothing_and_takes_no_handoff() -> None:
    p = Engine(MemoryConnector(exchange=Exchange()), "P")
    connector = find("null")
    half = connector.make_scheduler(p.context, [])
    request = p.new_request(PROMPT, output_token_ids=[7], remote_decode=True)
    assert not half.hands_over
    assert half.preempted(request, [1, 2, 3], [1] * 3) is None
    assert half.request_finished(request, [1, 2, 3], [1] * 3) is None
    assert half.build_connector_meta(StepView({}, {}.__getitem__)) is None
    assert half.take_instructions() is None
    worker = connector.make_worker(p.context, lambda: None)
    assert worker.register_kv_caches(p.ranks[0].kv, p.context.layout) is None
    assert not worker.wait_for_save()
    assert not worker.get_finished()
    worker.close(1.0)
    p.close()


class TestFaults:
    """What each fault does, and that it ends."""

    def engines(self, kind: FaultKind, *, at_d: bool) -> tuple[Engine, Engine]:
        exchange = Exchange()
        self.plan = Plan(script={kind: range(10_000)})
        faulty = FaultyConnector.around(MemoryConnector(exchange=exchange), self.plan)
        quiet = FaultyConnector.around(MemoryConnector(exchange=exchange), Plan())
        # These two are waited for until their leases end; no other fault may outlast one.
        waits = kind is FaultKind.DROP or (kind is FaultKind.DELAY and not at_d)
        lease_s = 1.5 if waits else 6.0
        p = Engine(quiet if at_d else faulty, "P", lease_s=lease_s)
        d = Engine(faulty if at_d else quiet, "D", lease_s=lease_s)
        return p, d

    @pytest.mark.parametrize("kind", [FaultKind.CORRUPT, FaultKind.TRUNCATE])
    def test_changed_bytes_are_never_received(self, kind: FaultKind) -> None:
        p, d = self.engines(kind, at_d=True)
        source = [1, 2, 3]
        d.load(d.queue(PROMPT, p.prefill(PROMPT, source)), [4, 5, 6])
        d.until(lambda: d.failed or d.received, others=[p])
        assert [each.reason for each in d.retried] == [LoadFailure.DIGEST]
        assert [each.reason for each in d.failed] == [LoadFailure.DIGEST]
        assert p.holds(source, 1, 0, 40)  # P's own are as they were
        assert self.plan.num_struck[kind] >= 2

    @pytest.mark.parametrize("kind", [FaultKind.CORRUPT, FaultKind.TRUNCATE])
    def test_bytes_that_are_changed_while_they_are_pushed_are_never_received(
        self, kind: FaultKind
    ) -> None:
        p, d = self.engines(kind, at_d=True)
        source = [1, 2, 3]
        ticket = PushTicket(nonce="push", prefill=p.ref, decode=d.ref)
        ours = p.take(p.new_request(PROMPT, remote_decode=True, ticket=ticket))
        d.load(d.take(d.new_request(PROMPT, ticket=ticket)), [4, 5, 6])
        p.until(lambda: not p.is_asked_to_wait(ours), others=[d])
        p.start(ours, source)
        p.compute(ours, source, 0, 40)
        p.finish(ours, source)
        d.until(lambda: d.failed or d.received, others=[p])
        assert [each.reason for each in d.failed] == [LoadFailure.DIGEST]
        assert p.holds(source, 1, 0, 40)  # P's own are as they were
        assert self.plan.num_struck[kind] >= 2

    @pytest.mark.slow
    def test_a_load_that_is_dropped_has_failed_after_some_polls(self) -> None:
        p, d = self.engines(FaultKind.DROP, at_d=True)
        d.load(d.queue(PROMPT, p.prefill(PROMPT, [1, 2, 3])), [4, 5, 6])
        d.until(lambda: d.failed, others=[p])
        assert [each.reason for each in d.failed] == [LoadFailure.TIMEOUT]
        p.until(lambda: p.settled)

    @pytest.mark.parametrize(
        "kind",
        [
            FaultKind.DELAY,
            FaultKind.DUPLICATE,
            FaultKind.REORDER,
            FaultKind.REPLAY,
            FaultKind.LATE_REPORT,
            FaultKind.REPEAT_REPORT,
            FaultKind.REPLAY_REPORT,
            FaultKind.LATE_FRAME,
            FaultKind.LATE_COPY,
        ],
    )
    @pytest.mark.parametrize("at_d", [True, False], ids=["at D", "at P"])
    def test_what_is_late_twice_or_in_another_order_changes_nothing(
        self, kind: FaultKind, at_d: bool
    ) -> None:
        p, d = self.engines(kind, at_d=at_d)
        requests = []
        for turn in range(6):
            source = [turn * 3 + i for i in range(3)]
            handoff = p.prefill(PROMPT, source, seed=turn, step=turn > 2)
            requests.append(d.queue(PROMPT, handoff, step=turn > 2))
        for turn, request in enumerate(requests):
            d.stage_load(request, [turn * 3 + i for i in range(3)])
        d.until(lambda: len(d.received) + len(d.failed) == 6, others=[p])
        there = {each.request_id for each in d.received}
        for turn, request in enumerate(requests):
            blocks = [turn * 3 + i for i in range(3)]
            assert request.request_id not in there or d.holds(blocks, turn, 0, 40)
        p.until(lambda: len(p.settled) == 6, others=[d])
        for _ in range(20):
            p.step()
            d.step()
        assert len(d.received) + len(d.failed) == len(p.settled) == 6
        # A read that comes before its grant is waited with for a while, and then refused.
        may_fail = {LoadFailure.LEASE_LOST} if kind is FaultKind.DELAY and not at_d else set()
        assert {each.reason for each in d.failed} <= may_fail


def test_the_example_of_the_documentation_runs(tmp_path: Path) -> None:
    """docs/extending.md, "Adding a connector"."""
    text = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    section = text.split("## Adding a connector")[1].split("\n## ")[0]
    *_, example = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(example, "extending.md", "exec"), names)
    kit = names["TestMine"]
    assert isinstance(kit, type)
    assert issubclass(kit, ConnectorConformance)
    test = kit()
    test.setup_method()
    test.test_the_tokens_arrive_and_the_lease_settles_as_read()
    test.teardown_method()
