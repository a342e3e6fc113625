"""The scheduler half alone: the handoffs it makes, the handoffs and tickets it refuses."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdserve.connectors.handover.scheduler import HandoverScheduler
from pdserve.errors import InternalError
from pdserve.observe.clock import ManualClock
from pdserve.wire.ids import Incarnation, RequestId
from pdserve.wire.sampling import TokenLogprobs
from pdserve.wire.transfer import (
    ConnectorReport,
    Endpoint,
    Failed,
    LeaseEnd,
    LoadFailure,
    Received,
    Settled,
)
from tests.connectors.engines import FakeRequest, layout
from tests.connectors.halves import (
    ENDPOINTS,
    PROMPT,
    arrival,
    blocks,
    decode_of,
    end_of,
    handed_off,
    handed_over,
    prefill_of,
    refusal_of,
    registered,
    scheduler,
    staged,
    ticket,
)


def test_a_handoff_names_the_prompts_blocks_and_carries_the_first_token() -> None:
    p = scheduler()
    logprobs = [TokenLogprobs(7, -0.5, 1, [(7, -0.5)])]
    request = FakeRequest(
        RequestId("p"), PROMPT, output_token_ids=[7], first_logprobs=logprobs, remote_decode=True
    )
    handoff = handed_over(p, request, blocks(3, 4, 5, 6), [1] * 4)
    assert handoff.block_ids == [3, 4, 5]  # 40 tokens fill 2.5 blocks of 16
    assert (handoff.num_tokens, handoff.first_token_ids) == (40, [7])
    assert handoff.first_logprobs == logprobs
    grants = staged(p).grants
    assert [(g.nonce, g.request_id, g.block_ids) for g in grants] == [
        (handoff.nonce, "p", [3, 4, 5])
    ]


@pytest.mark.parametrize("block_id", [-1, 1 << 40])
def test_a_handoff_of_impossible_blocks_is_refused(block_id: int) -> None:
    handoff = msgspec.structs.replace(handed_off(), block_ids=blocks(3, block_id, 5))
    refusal = refusal_of(scheduler("D"), FakeRequest(RequestId("d"), PROMPT, handoff=handoff))
    assert refusal is not None
    assert "blocks" in refusal


@pytest.mark.parametrize("lease_s", [0.0, -1.0, 1e-9, 1e9, float("inf"), float("nan")])
def test_a_handoff_whose_lease_nobody_could_keep_alive_is_refused(lease_s: float) -> None:
    handoff = msgspec.structs.replace(handed_off(), lease_s=lease_s)
    refusal = refusal_of(scheduler("D"), FakeRequest(RequestId("d"), PROMPT, handoff=handoff))
    assert refusal is not None
    assert "its lease at P lasts" in refusal


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        (Endpoint(host="127.0.0.1", port=0), "no such port"),
        (Endpoint(host="127.0.0.1", port=1 << 16), "no such port"),
        (Endpoint(host="127.0.0.1", port=-1), "no such port"),
        (Endpoint(host="0.0.0.0", port=1), "not the address of a host"),
        (Endpoint(host="224.0.0.1", port=1), "not the address of a host"),
        (Endpoint(host="169.254.169.254", port=80), "PDSERVE_SECRET"),
        (Endpoint(host="10.0.0.1", port=80), "PDSERVE_SECRET"),
        (Endpoint(host="x" * 600, port=80), "600 characters"),
    ],
    ids=str,
)
def test_nobody_is_made_to_connect_to_where_no_engine_can_be(endpoint: Endpoint, why: str) -> None:
    d, p = scheduler("D"), scheduler("P")
    elsewhere = msgspec.structs.replace(handed_off(), endpoints=[endpoint])
    at_d = refusal_of(d, FakeRequest(RequestId("d"), PROMPT, handoff=elsewhere))
    planned = ticket(decode=msgspec.structs.replace(end_of("D"), endpoints=(endpoint,)))
    for refusal in (at_d, refusal_of(p, prefill_of(planned))):
        assert refusal is not None
        assert why in refusal


def test_with_a_secret_engines_of_other_hosts_are_met() -> None:
    d = scheduler("D", secret="s3cret")
    handoff = msgspec.structs.replace(handed_off(), endpoints=[Endpoint(host="10.0.0.1", port=9)])
    assert refusal_of(d, FakeRequest(RequestId("d"), PROMPT, handoff=handoff)) is None


@pytest.mark.parametrize("valid_s", [0.0, -1.0, 1e9, float("inf"), float("nan")])
def test_a_ticket_is_valid_for_some_time_and_not_for_ever(valid_s: float) -> None:
    for half, request in (
        (scheduler("P"), prefill_of(ticket(valid_s=valid_s))),
        (scheduler("D"), decode_of(ticket(valid_s=valid_s))),
    ):
        refusal = refusal_of(half, request)
        assert refusal is not None
        assert "it is valid for" in refusal


@pytest.mark.parametrize(
    ("change", "both_values"),
    [
        ({"layout_digest": "e"}, ("e at P", "d at D")),
        ({"endpoints": ENDPOINTS[:2]}, ("number of ranks is 1 at P", "2 endpoints")),
        ({"num_tokens": 39}, ("39 at P", "40 at D")),
        ({"block_ids": blocks(3)}, ("number of blocks is 1 at P", "need 3")),
        ({"generations": [1, 1]}, ("number of generations is 2 at P", "need 3")),
        ({"prompt_digest": "f00"}, ("f00 at P", "at D")),
    ],
)
def test_a_handoff_that_does_not_fit_is_refused_with_both_values(
    change: dict[str, Any], both_values: tuple[str, str]
) -> None:
    handoff = msgspec.structs.replace(handed_off(), **change)
    refusal = refusal_of(scheduler("D"), FakeRequest(RequestId("d"), PROMPT, handoff=handoff))
    assert refusal is not None
    for value in both_values:
        assert value in refusal


@pytest.mark.parametrize(
    "field", ["num_layers", "num_planes", "num_kv_heads", "head_dim", "dtype_bytes"]
)
def test_kv_of_another_kind_is_refused_with_both_values(field: str) -> None:
    mine = getattr(layout().shape_of_one_rank(), field)
    shape = msgspec.structs.replace(layout().shape_of_one_rank(), **{field: mine + 1})
    handoff = msgspec.structs.replace(handed_off(), shape=shape)
    refusal = refusal_of(scheduler("D"), FakeRequest(RequestId("d"), PROMPT, handoff=handoff))
    assert refusal == f"{field.replace('_', ' ')} is {mine + 1} at P and {mine} at D"


@pytest.mark.parametrize(
    "shape",
    [
        {"block_size": 0},
        {"tp_size": 3},
        {"num_blocks": 0},
        {"stages": ((0, 1),)},
        {"stages": ((0, 1), (2, 2))},
    ],
)
def test_a_handoff_of_an_impossible_shape_is_refused(shape: dict[str, Any]) -> None:
    good = handed_off()
    handoff = msgspec.structs.replace(good, shape=msgspec.structs.replace(good.shape, **shape))
    refusal = refusal_of(scheduler("D"), FakeRequest(RequestId("d"), PROMPT, handoff=handoff))
    assert refusal is not None
    assert "P cannot have its shape" in refusal


def test_engines_of_different_ranks_and_block_sizes_understand_each_other() -> None:
    p = scheduler(num_ranks=2, kv_shape={"num_kv_heads": 2}, shape=layout(block_size=8))
    request = FakeRequest(RequestId("p"), PROMPT, output_token_ids=[7], remote_decode=True)
    handoff = handed_over(p, request, blocks(3, 4, 5, 6, 7), [1] * 5)
    assert len(handoff.block_ids) == 5
    d = scheduler("D")
    request = FakeRequest(RequestId("d"), PROMPT, handoff=handoff)
    d.request_arrived(request)
    d.update_state_after_alloc(request, blocks(10, 11, 12), 24)
    (load,) = staged(d).loads
    assert (load.remote_block_ids, load.local_block_ids) == ([3, 4, 5, 6, 7], [10, 11, 12])
    assert (load.first_token, load.num_tokens) == (16, 40)


def test_two_requests_never_wait_for_one_push() -> None:
    d = scheduler("D")
    d.request_arrived(decode_of(ticket()))
    assert refusal_of(d, decode_of(ticket())) == "another request has its nonce"


def test_a_scheduler_half_has_one_side_channel_per_rank() -> None:
    context = scheduler(num_ranks=3)._context
    with pytest.raises(InternalError, match="2 side channels for 3 ranks"):
        HandoverScheduler(context, ENDPOINTS[:2], new_nonce=lambda: "n", clock=ManualClock())


def test_every_rank_is_told_where_all_ranks_of_the_owner_listen() -> None:
    handoff = handed_off(scheduler(num_ranks=3))
    assert handoff.endpoints == ENDPOINTS
    d = scheduler("D", num_ranks=3)
    request = FakeRequest(RequestId("d"), PROMPT, handoff=handoff)
    d.request_arrived(request)
    d.update_state_after_alloc(request, blocks(10, 11, 12), 40)
    todo = staged(d)
    assert [w.owner.endpoints for w in todo.watches] == [tuple(ENDPOINTS)]
    assert [load.owner.endpoints for load in todo.loads] == [tuple(ENDPOINTS)]


def test_a_handoff_never_goes_with_another_prompt_or_salt() -> None:
    d, handoff = scheduler("D"), handed_off()
    other = [*PROMPT[:-1], 5]
    assert refusal_of(d, FakeRequest(RequestId("d"), other, handoff=handoff)) is not None
    salted = FakeRequest(RequestId("d"), PROMPT, cache_salt="tenant", handoff=handoff)
    assert refusal_of(d, salted) is not None


def test_unknown_reports_are_counted_and_ignored() -> None:
    d = scheduler("D")
    stranger = RequestId("stranger")
    report = ConnectorReport(
        settled=[Settled(request_id=stranger, end=LeaseEnd.READ)],
        received=[
            Received(request_id=stranger, num_bytes=0, num_descriptors=0, wait_s=0, transfer_s=0)
        ],
        failed=[Failed(request_id=stranger, reason=LoadFailure.TIMEOUT)],
    )
    d.update_connector_output(report)
    assert d.faults["report_unknown"] == 3


# ---- tickets of pushes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("P", {"prefill": end_of("Q")}, ("Q incarnation life of Q", "P incarnation life of P")),
        ("D", {"decode": end_of("E")}, ("E incarnation life of E", "D incarnation life of D")),
        (
            "P",
            {"prefill": msgspec.structs.replace(end_of("P"), incarnation=Incarnation("earlier"))},
            ("P incarnation earlier", "P incarnation life of P"),
        ),
        (
            "P",
            {"decode": msgspec.structs.replace(end_of("D"), endpoints=())},
            ("number of ranks is 1 at D", "0 endpoints"),
        ),
        (
            "D",
            {
                "prefill": msgspec.structs.replace(
                    end_of("P"), shape=layout(dtype="bfloat16").shape_of_one_rank()
                )
            },
            ("dtype bytes is 2 at P", "4 at D"),
        ),
    ],
)
def test_a_ticket_that_is_not_for_this_engine_is_refused_with_both_values(
    name: str, wrong: dict[str, Any], words: tuple[str, str]
) -> None:
    request = (prefill_of if name == "P" else decode_of)(ticket(**wrong))
    refusal = refusal_of(scheduler(name), request)
    assert refusal is not None
    assert all(word in refusal for word in words), refusal


def test_what_a_push_brings_must_belong_to_its_ticket() -> None:
    d, p = scheduler("D"), scheduler()
    request = registered(p)
    request.output_token_ids = [7]
    good = handed_over(p, request, blocks(3, 4, 5), [7, 8, 9])
    d.request_arrived(decode_of(ticket()))
    for handoff, words in ((None, "without a handoff"), (handed_off(), "'nonce-0'"), (good, "")):
        d.update_state_after_alloc(decode_of(ticket()), blocks(10, 11, 12), 40)
        (reserve,) = staged(d).reserves
        news = d.update_connector_output(ConnectorReport(received=[arrival(reserve, handoff)]))
        assert bool(news.loaded) is (handoff is good)
        assert [each.reason for each in news.failed] == [LoadFailure.INCOMPATIBLE] * bool(words)
        assert all(words in each.detail for each in news.failed)
        todo = staged(d)
        # What was not read is left to others.
        assert (todo.unwatches, len(todo.releases)) == (["push"] * bool(words), not words)
        d.request_arrived(decode_of(ticket()))
