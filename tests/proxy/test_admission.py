from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import OverloadedError
from pdserve.proxy.admission import AdmissionQueue, Claim


async def hold(
    admission: AdmissionQueue, release: asyncio.Event, order: list[int], name: int
) -> None:
    async with admission.place(Claim()):
        order.append(name)
        await release.wait()


async def test_places_go_to_those_who_wait_in_their_order():
    admission = AdmissionQueue(1, 10, 5.0)
    release, order = asyncio.Event(), []
    tasks = [asyncio.create_task(hold(admission, release, order, i)) for i in range(4)]
    await asyncio.sleep(0)
    assert (admission.num_running, admission.num_waiting) == (1, 3)
    release.set()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3]
    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def test_a_place_given_to_one_who_leaves_in_that_moment_goes_to_the_next():
    admission = AdmissionQueue(1, 10, 5.0)
    release, order = asyncio.Event(), []
    tasks = [asyncio.create_task(hold(admission, release, order, i)) for i in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)  # its place is handed to the second, who has not run yet
    tasks[1].cancel()
    release.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [0, 2]
    assert (admission.num_running, admission.num_waiting) == (0, 0)


@pytest.mark.parametrize("why", ["leaves", "has waited too long"])
async def test_who_gets_a_place_and_does_not_take_it_gives_it_back_and_is_charged_nothing(why):
    admission = AdmissionQueue(1, 10, 5.0 if why == "leaves" else 0.0)
    order = []
    claim = Claim("absent", cost=100.0, grant=lambda: order.append("granted"))
    async with admission.place(Claim("other")):
        waiting = asyncio.create_task(admission.place(claim).__aenter__())
        await asyncio.sleep(0)
    # Granted, and it has not run since: its time is up as well, if it may not wait at all.
    assert (order, claim.is_running, waiting.done()) == (["granted"], True, False)
    if why == "leaves":
        waiting.cancel()
    with pytest.raises((asyncio.CancelledError, OverloadedError)):
        await waiting
    assert (admission.num_running, admission.num_waiting) == (0, 0)
    assert not admission.places.is_over_share("absent")


async def test_a_claim_that_cannot_begin_fails_neither_who_freed_its_place_nor_the_next():
    admission = AdmissionQueue(1, 10, 5.0)
    release, order = asyncio.Event(), []

    def broken() -> None:
        raise ValueError("no choice")

    first = asyncio.create_task(hold(admission, release, order, 0))
    await asyncio.sleep(0)
    failing = asyncio.create_task(admission.place(Claim(grant=broken)).__aenter__())
    await asyncio.sleep(0)
    last = asyncio.create_task(hold(admission, release, order, 2))
    await asyncio.sleep(0)
    release.set()
    await first
    with pytest.raises(ValueError, match="no choice"):
        await failing
    await last
    with pytest.raises(ValueError, match="no choice"):
        await admission.place(Claim(grant=broken)).__aenter__()
    assert order == [0, 2]
    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def test_a_full_queue_refuses_at_once_and_a_long_wait_later():
    admission = AdmissionQueue(1, 1, 0.02)
    async with admission.place(Claim()):
        waiting = asyncio.create_task(admission.place(Claim()).__aenter__())
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            async with admission.place(Claim()):
                pass
        with pytest.raises(OverloadedError, match=r"0\.02 s"):
            await waiting
    assert (admission.num_running, admission.num_waiting) == (0, 0)


@settings(max_examples=30)
@given(
    limit=st.integers(1, 3),
    moves=st.lists(st.tuples(st.sampled_from(["add", "end", "cut"]), st.integers(0, 9))),
)
def test_no_sequence_of_arrivals_ends_and_cancellations_loses_a_place(limit, moves):
    async def scenario() -> None:
        admission = AdmissionQueue(limit, 3, 5.0)
        tasks: list[tuple[asyncio.Task[None], asyncio.Event]] = []
        for move, which in moves:
            if move == "add":
                release = asyncio.Event()
                tasks.append((asyncio.create_task(hold(admission, release, [], 0)), release))
            elif tasks:
                task, release = tasks[which % len(tasks)]
                task.cancel() if move == "cut" else release.set()
            if which % 2:
                await asyncio.sleep(0)
            assert 0 <= admission.num_running <= limit
            assert admission.num_waiting <= 3
        for _, release in tasks:
            release.set()
        await asyncio.gather(*(task for task, _ in tasks), return_exceptions=True)
        assert (admission.num_running, admission.num_waiting) == (0, 0)

    asyncio.run(scenario())
