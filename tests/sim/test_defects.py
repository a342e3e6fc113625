"""A defect that is put in on purpose is noticed: by the simulation, or by the conformance kit."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from pdserve.connectors.conformance import ConnectorConformance
from pdserve.connectors.memory import MemoryConnector
from pdserve.connectors.memory.exchange import Exchange
from tests.connectors import test_lease, test_quorum
from tests.sim import defects
from tests.sim.__main__ import simulate
from tests.sim.scenario import impatient, with_store
from tests.sim.world import Broken

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from pdserve.connectors.base import KVConnectorBase
    from tests.sim.scenario import Scenario

MAX_LIVES = 1000


class Kit(ConnectorConformance):
    """On the memory connector; not collected by itself."""

    def make_connector(self) -> KVConnectorBase:
        return MemoryConnector(exchange=Exchange())

    def run(self, name: str) -> None:
        """Run one of its tests."""
        self.setup_method()
        try:
            getattr(self, name)()
        finally:
            self.teardown_method()


@pytest.mark.parametrize(
    ("defect", "change", "first_seed", "kinds"),
    [
        pytest.param(
            *(defects.digest_check_off, impatient, 0, {Broken.WRONG_TOKEN}), marks=pytest.mark.slow
        ),
        pytest.param(
            *(defects.free_on_abort_while_written, impatient, 35),
            {Broken.WRONG_TOKEN, Broken.REUSED},
            marks=pytest.mark.slow,
        ),
        (defects.lost_chunks_believed, with_store, 15, {Broken.WRONG_TOKEN}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_simulation_catches(
    defect: Callable[[], AbstractContextManager[None]],
    change: Callable[[Scenario], Scenario],
    first_seed: int,
    kinds: set[Broken],
) -> None:
    with defect():
        summary = simulate(
            itertools.count(first_seed), max_lives=MAX_LIVES, max_failing=1, change=change
        )
    assert summary.failing, "nothing was noticed"
    (violations,) = summary.failing.values()
    assert {kind for kind, _ in violations} & kinds, violations


@pytest.mark.parametrize(
    ("defect", "test"),
    [
        (defects.epoch_ignored, "test_a_handoff_of_an_earlier_life_is_never_loaded"),
        (
            defects.digest_check_off,
            "test_a_block_that_is_not_what_its_digest_was_taken_of_is_never_received",
        ),
        (defects.free_on_abort_during_a_write, "test_an_abort_at_p_is_settled_and_d_is_told"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_conformance_kit_catches(
    defect: Callable[[], AbstractContextManager[None]], test: str
) -> None:
    Kit().run(test)
    with defect(), pytest.raises(AssertionError):
        Kit().run(test)


@pytest.mark.parametrize(
    ("defect", "test"),
    [
        (defects.reuse_at_lease_expiry, test_lease.test_a_release_waits_for_the_reader),
        (
            defects.reuse_at_lease_expiry,
            test_lease.test_a_writer_holds_off_the_settling_however_long_it_takes,
        ),
        (
            defects.vote_counted_twice,
            test_quorum.test_a_repeated_report_is_a_fault_and_no_vote,
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_tests_of_the_part_catch(
    defect: Callable[[], AbstractContextManager[None]], test: Callable[[], None]
) -> None:
    test()
    with defect(), pytest.raises(AssertionError):
        test()
