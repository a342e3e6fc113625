from __future__ import annotations

import pytest

from pdserve.config.schema import SchedulerConfig
from pdserve.engine.open_requests import OpenRequests
from pdserve.errors import EngineDeadError, InternalError, OverloadedError
from pdserve.wire.ids import RequestId
from pdserve.wire.request import EngineOutput, FinishReason, RequestStages
from pdserve.wire.sampling import TokenLogprobs

A, B, C = (RequestId(name) for name in "abc")


def output(request_id: RequestId, *, finish: FinishReason | None = None) -> EngineOutput:
    """One more token."""
    return EngineOutput(request_id=request_id, new_token_ids=[1], finish_reason=finish)


def open_requests(**limits: int) -> OpenRequests:
    """Of a core with these limits."""
    return OpenRequests(SchedulerConfig(**limits))


def test_what_the_core_does_not_run_yet_counts_as_waiting_before_its_first_word() -> None:
    requests = open_requests(max_waiting=1)
    for request_id in (A, B):
        requests.refuse_if_full(5, max_running=2, num_waiting=0)
        requests.add([request_id], 5)
    requests.refuse_if_full(5, max_running=2, num_waiting=0)
    requests.add([C], 5)
    with pytest.raises(OverloadedError, match=r"requests are waiting \(1, at most 1\)"):
        requests.refuse_if_full(5, max_running=2, num_waiting=0)


def test_what_the_core_says_is_waiting_counts_too() -> None:
    with pytest.raises(OverloadedError, match=r"requests are waiting \(7,"):
        open_requests(max_waiting=7).refuse_if_full(1, max_running=2, num_waiting=7)


def test_too_many_prompt_tokens_wait_until_their_first_token_is_out() -> None:
    requests = open_requests(max_waiting_tokens=10)
    requests.refuse_if_full(99, max_running=2, num_waiting=0)  # an empty queue takes any
    requests.add([A, B], 4)
    requests.refuse_if_full(2, max_running=2, num_waiting=0)
    with pytest.raises(OverloadedError, match=r"prompt tokens are waiting \(8, .* adds 3 "):
        requests.refuse_if_full(3, max_running=2, num_waiting=0)
    requests.deliver(output(A))
    requests.refuse_if_full(3, max_running=2, num_waiting=0)


async def test_a_second_use_of_an_open_id_leaves_the_first_alone() -> None:
    requests = open_requests()
    first = requests.add([A], 4)
    with pytest.raises(InternalError, match="request a is running already"):
        requests.add([B, A], 4)
    assert B not in requests
    requests.deliver(output(A))
    assert await first.next() == output(A)


async def test_outputs_end_with_the_last_of_the_requests_aborted_ones_included() -> None:
    requests = open_requests()
    answers = requests.add([A, B], 4)
    assert requests.abort([A, C]) == [A]
    assert not requests.deliver(output(A))
    last = output(B, finish=FinishReason.LENGTH)
    assert requests.deliver(last)
    assert await answers.next() == last
    requests.end(B)
    assert await answers.next() is None
    assert len(requests) == 0


async def test_a_reader_that_is_far_behind_gets_what_waits_together() -> None:
    requests = open_requests()
    answers = requests.add([A], 4)
    come = [
        EngineOutput(
            request_id=A,
            new_token_ids=[number],
            logprobs=[TokenLogprobs(number, -number, 1, [])],
            stages=RequestStages() if number in (0, 99) else None,
            finish_reason=FinishReason.LENGTH if number == 99 else None,
        )
        for number in range(100)
    ]
    for each in come:
        requests.deliver(each)
    got: list[EngineOutput] = []
    while not got or got[-1].finish_reason is None:
        got.append(await answers.next() or come[0])
    assert len(got) < 12
    assert (got[0], got[-1]) == (come[0], come[-1])
    assert [token for each in got for token in each.new_token_ids] == list(range(100))
    assert [one for each in got for one in each.logprobs or []] == [
        TokenLogprobs(number, -number, 1, []) for number in range(100)
    ]


async def test_outputs_of_siblings_that_wait_stay_apart_and_in_order() -> None:
    requests = open_requests()
    answers = requests.add([A, B], 4)
    come = [output(each) for each in [A, B] * 20]
    for each in come:
        requests.deliver(each)
    assert [await answers.next() for _ in come] == come


async def test_the_end_of_the_engine_reaches_every_reader() -> None:
    requests = open_requests()
    readers = [requests.add([A, B], 4), requests.add([C], 4)]
    requests.fail("it was killed")
    for answers in readers:
        with pytest.raises(EngineDeadError, match="it was killed"):
            await answers.next()
        assert not answers.num_open
