"""The scheduler half alone: what it believes, what it stages, what it forgets."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import msgspec
import pytest

from pdserve.config.schema import EngineConfig, ModelConfig, TransferConfig
from pdserve.connectors.base import ConnectorContext, KVLayout, Match
from pdserve.connectors.conformance.engines import prompt_of
from pdserve.connectors.handover.instructions import (
    Chunk,
    Instructions,
    Load,
    Reserve,
    StepInstructions,
)
from pdserve.connectors.handover.scheduler import HandoverScheduler
from pdserve.errors import ConfigError, InternalError
from pdserve.observe.clock import ManualClock
from pdserve.wire.ids import BlockId, EngineId, Incarnation, RequestId
from pdserve.wire.outputs import TokenLogprobs
from pdserve.wire.request import OnLoadFailure
from pdserve.wire.sampling import SamplingParams
from pdserve.wire.step import KnownRequests, NewRequest, SchedulerOutput
from pdserve.wire.transfer import (
    ConnectorReport,
    Endpoint,
    EngineRef,
    Failed,
    KVHandoff,
    LeaseEnd,
    LoadFailure,
    PushTicket,
    Received,
    Registered,
    Settled,
    Withdrawn,
)
from tests.connectors.engines import FakeRequest, layout, signed_with

PROMPT = prompt_of(40)
NOTHING = Match(0, is_async=False)
ENDPOINTS = [Endpoint(host="127.0.0.1", port=port) for port in (1, 2, 3)]


def scheduler(
    engine_id: str = "P",
    shape: KVLayout | None = None,
    digest: str = "d",
    num_ranks: int = 1,
    kv_shape: dict[str, Any] | None = None,
    clock: ManualClock | None = None,
    **transfer: Any,
) -> HandoverScheduler:
    context = ConnectorContext(
        config=EngineConfig(model=ModelConfig(model="m"), transfer=TransferConfig(**transfer)),
        engine_id=engine_id,
        incarnation=Incarnation(f"life of {engine_id}"),
        layout=shape or layout(),
        layout_digest=digest,
        layout_fields={},
        shape=msgspec.structs.replace(
            (shape or layout()).shape_of_one_rank(),
            **{"tp_size": num_ranks, "num_kv_heads": 2 * num_ranks, **(kv_shape or {})},
        ),
        num_ranks=num_ranks,
    )
    count = itertools.count()
    return HandoverScheduler(
        context,
        ENDPOINTS[:num_ranks],
        new_nonce=lambda: f"nonce-{next(count)}",
        clock=clock or ManualClock(),
    )


def blocks(*ids: int) -> list[BlockId]:
    return [BlockId(i) for i in ids]


def handed_off(p: HandoverScheduler | None = None, prompt: list[int] = PROMPT) -> KVHandoff:
    request = FakeRequest(RequestId("p"), prompt, output_token_ids=[7], remote_decode=True)
    handoff = (p or scheduler()).request_finished(request, blocks(3, 4, 5, 6), [1] * 4)
    assert handoff is not None
    return handoff


def staged(half: HandoverScheduler) -> Instructions:
    metadata = half.take_instructions()
    assert half.take_instructions() is None
    return Instructions() if metadata is None else Instructions.from_metadata(metadata)


def queued(d: HandoverScheduler, **changes: Any) -> FakeRequest:
    request = FakeRequest(RequestId("d"), PROMPT, handoff=handed_off(), **changes)
    d.request_queued(request)
    return request


def test_a_handoff_names_the_prompts_blocks_and_carries_the_first_token() -> None:
    p = scheduler()
    logprobs = [TokenLogprobs(7, -0.5, 1, [(7, -0.5)])]
    request = FakeRequest(
        RequestId("p"), PROMPT, output_token_ids=[7], first_logprobs=logprobs, remote_decode=True
    )
    handoff = p.request_finished(request, blocks(3, 4, 5, 6), [1] * 4)
    assert handoff is not None
    assert handoff.block_ids == [3, 4, 5]  # 40 tokens fill 2.5 blocks of 16
    assert (handoff.num_tokens, handoff.first_token_ids) == (40, [7])
    assert handoff.first_logprobs == logprobs
    assert handoff.is_authentic(b"")
    grants = staged(p).grants
    assert [(g.nonce, g.request_id, g.block_ids) for g in grants] == [
        (handoff.nonce, "p", [3, 4, 5])
    ]


@pytest.mark.parametrize("block_id", [-1, 1 << 40])
def test_a_signed_handoff_of_impossible_blocks_is_refused(block_id: int) -> None:
    handoff = signed_with(handed_off(), block_ids=blocks(3, block_id, 5))
    refusal = scheduler("D").check_handoff(FakeRequest(RequestId("d"), PROMPT, handoff=handoff))
    assert refusal is not None
    assert "blocks" in refusal


@pytest.mark.parametrize("lease_s", [0.0, -1.0, float("nan")])
def test_a_signed_handoff_whose_lease_is_over_before_it_begins_is_refused(lease_s: float) -> None:
    handoff = signed_with(handed_off(), lease_s=lease_s)
    refusal = scheduler("D").check_handoff(FakeRequest(RequestId("d"), PROMPT, handoff=handoff))
    assert refusal is not None
    assert "its lease at P lasts" in refusal


def test_a_request_that_is_not_for_another_engine_is_not_leased() -> None:
    p = scheduler()
    request = FakeRequest(RequestId("p"), PROMPT, output_token_ids=[7])
    assert p.request_finished(request, blocks(3, 4, 5), [1] * 3) is None
    assert p.take_instructions() is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"signature": "0" * 64}, "signature"),
        ({"num_tokens": 41}, "signature"),
        ({"block_ids": blocks(9, 9, 9)}, "signature"),
        ({"endpoints": [Endpoint(host="10.0.0.1", port=1)]}, "signature"),
    ],
)
def test_an_edited_handoff_is_refused(change: dict[str, Any], message: str) -> None:
    handoff = msgspec.structs.replace(handed_off(), **change)
    refusal = scheduler("D").check_handoff(FakeRequest(RequestId("d"), PROMPT, handoff=handoff))
    assert refusal is not None
    assert message in refusal


@pytest.mark.parametrize(
    ("change", "both_values"),
    [
        ({"layout_digest": "e"}, ("e at P", "d at D")),
        ({"endpoints": ENDPOINTS[:2]}, ("number of ranks is 1 at P", "2 endpoints")),
        ({"num_tokens": 39}, ("39 at P", "40 at D")),
        ({"block_ids": blocks(3)}, ("number of blocks is 1 at P", "are 3")),
        ({"generations": [1, 1]}, ("number of generations is 2 at P", "are 3")),
        ({"prompt_digest": "f00"}, ("f00 at P", "at D")),
    ],
)
def test_a_handoff_that_does_not_fit_is_refused_with_both_values(
    change: dict[str, Any], both_values: tuple[str, str]
) -> None:
    handoff = signed_with(handed_off(), **change)
    refusal = scheduler("D").check_handoff(FakeRequest(RequestId("d"), PROMPT, handoff=handoff))
    assert refusal is not None
    for value in both_values:
        assert value in refusal


@pytest.mark.parametrize(
    "field", ["num_layers", "num_planes", "num_kv_heads", "head_dim", "dtype_bytes"]
)
def test_kv_of_another_kind_is_refused_with_both_values(field: str) -> None:
    mine = getattr(layout().shape_of_one_rank(), field)
    shape = msgspec.structs.replace(layout().shape_of_one_rank(), **{field: mine + 1})
    handoff = signed_with(handed_off(), shape=shape)
    refusal = scheduler("D").check_handoff(FakeRequest(RequestId("d"), PROMPT, handoff=handoff))
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
def test_a_signed_handoff_of_an_impossible_shape_is_refused(shape: dict[str, Any]) -> None:
    good = handed_off()
    handoff = signed_with(good, shape=msgspec.structs.replace(good.shape, **shape))
    refusal = scheduler("D").check_handoff(FakeRequest(RequestId("d"), PROMPT, handoff=handoff))
    assert refusal is not None
    assert "P cannot have its shape" in refusal


def test_engines_of_different_ranks_and_block_sizes_understand_each_other() -> None:
    p = scheduler(num_ranks=2, kv_shape={"num_kv_heads": 2}, shape=layout(block_size=8))
    request = FakeRequest(RequestId("p"), PROMPT, output_token_ids=[7], remote_decode=True)
    handoff = p.request_finished(request, blocks(3, 4, 5, 6, 7), [1] * 5)
    assert handoff is not None
    assert len(handoff.block_ids) == 5
    d = scheduler("D")
    request = FakeRequest(RequestId("d"), PROMPT, handoff=handoff)
    assert d.check_handoff(request) is None
    d.request_queued(request)
    d.update_state_after_alloc(request, blocks(10, 11, 12), 24)
    (load,) = staged(d).loads
    assert (load.remote_block_ids, load.local_block_ids) == ([3, 4, 5, 6, 7], [10, 11, 12])
    assert (load.first_token, load.num_tokens) == (16, 40)


def test_a_scheduler_half_has_one_side_channel_per_rank() -> None:
    context = scheduler(num_ranks=3)._context
    with pytest.raises(InternalError, match="2 side channels for 3 ranks"):
        HandoverScheduler(context, ENDPOINTS[:2], new_nonce=lambda: "n", clock=ManualClock())


def test_every_rank_is_told_where_all_ranks_of_the_owner_listen() -> None:
    handoff = handed_off(scheduler(num_ranks=3))
    assert handoff.endpoints == ENDPOINTS
    d = scheduler("D", num_ranks=3)
    request = FakeRequest(RequestId("d"), PROMPT, handoff=handoff)
    assert d.check_handoff(request) is None
    d.request_queued(request)
    d.update_state_after_alloc(request, blocks(10, 11, 12), 40)
    todo = staged(d)
    assert [w.owner.endpoints for w in todo.watches] == [tuple(ENDPOINTS)]
    assert [load.owner.endpoints for load in todo.loads] == [tuple(ENDPOINTS)]


def test_no_two_loads_have_the_same_id() -> None:
    d = scheduler("D")
    ids = []
    for _ in range(3):
        d.update_state_after_alloc(queued(d), blocks(10, 11, 12), 40)
        (load,) = staged(d).loads
        ids.append(load.load_id)
        failed = Failed(request_id=load.request_id, reason=LoadFailure.TIMEOUT)
        d.update_connector_output(ConnectorReport(failed=[failed]))
    assert len(set(ids)) == 3
    assert min(ids) > 0


def test_a_handoff_of_another_deployment_is_refused() -> None:
    handoff = handed_off(scheduler(secret="theirs"))
    d = scheduler("D", secret="ours")
    assert d.check_handoff(FakeRequest(RequestId("d"), PROMPT, handoff=handoff)) is not None


def test_a_handoff_never_goes_with_another_prompt_or_salt() -> None:
    d, handoff = scheduler("D"), handed_off()
    other = [*PROMPT[:-1], 5]
    assert d.check_handoff(FakeRequest(RequestId("d"), other, handoff=handoff)) is not None
    salted = FakeRequest(RequestId("d"), PROMPT, cache_salt="tenant", handoff=handoff)
    assert d.check_handoff(salted) is not None


def test_a_good_handoff_is_watched_from_the_queue_on() -> None:
    d = scheduler("D")
    request = FakeRequest(RequestId("d"), PROMPT, handoff=handed_off())
    assert d.check_handoff(request) is None
    d.request_queued(request)
    assert [w.nonce for w in staged(d).watches] == ["nonce-0"]


@pytest.mark.parametrize(
    ("num_computed", "match"),
    [
        (0, Match(40, is_async=True)),
        (16, Match(24, is_async=True)),
        (32, Match(8, is_async=True)),
    ],
)
def test_only_the_suffix_is_loaded(num_computed: int, match: Match) -> None:
    d = scheduler("D")
    request = queued(d)
    assert d.get_num_new_matched_tokens(request, num_computed) == match
    d.update_state_after_alloc(request, blocks(10, 11, 12, 13), match.num_tokens)
    (load,) = staged(d).loads
    assert (load.first_token, load.num_tokens) == (num_computed, 40)
    assert (load.remote_block_ids, load.local_block_ids) == ([3, 4, 5], [10, 11, 12])
    assert load.generations == [1, 1, 1]


def test_a_prefix_hit_that_covers_the_prompt_loads_nothing_and_releases_the_lease() -> None:
    d = scheduler("D")
    request = queued(d)
    staged(d)
    assert d.get_num_new_matched_tokens(request, 40) == NOTHING
    d.update_state_after_alloc(request, blocks(10, 11, 12), 0)
    assert [r.nonce for r in staged(d).releases] == ["nonce-0"]


def test_a_load_is_offered_once_whatever_came_of_it() -> None:
    d = scheduler("D")
    request = queued(d)
    d.update_state_after_alloc(request, blocks(10, 11, 12), 40)
    assert d.get_num_new_matched_tokens(request, 0) == NOTHING
    failed = Failed(request_id=request.request_id, reason=LoadFailure.TIMEOUT)
    d.update_connector_output(ConnectorReport(failed=[failed]))
    assert d.get_num_new_matched_tokens(request, 0) == NOTHING
    staged(d)
    d.update_state_after_alloc(request, blocks(10, 11, 12), 0)
    assert d.take_instructions() is None


@pytest.mark.parametrize(
    ("num_external", "num_blocks"), [(25, 3), (41, 3), (40, 2)], ids=["mid-block", "more", "short"]
)
def test_an_impossible_load_ends_the_engine_instead_of_writing_elsewhere(
    num_external: int, num_blocks: int
) -> None:
    d = scheduler("D")
    request = queued(d)
    with pytest.raises(InternalError, match="cannot load"):
        d.update_state_after_alloc(request, blocks(*range(num_blocks)), num_external)


def test_an_abort_before_the_load_releases_and_one_during_it_asks_to_stop() -> None:
    d = scheduler("D")
    request = queued(d)
    staged(d)
    d.request_aborted(request)
    assert [r.nonce for r in staged(d).releases] == ["nonce-0"]

    request = queued(d)
    d.update_state_after_alloc(request, blocks(10, 11, 12), 40)
    staged(d)
    d.request_aborted(request)
    todo = staged(d)
    assert (todo.aborts, todo.releases) == ([request.request_id], [])


def test_a_lease_is_released_by_its_nonce_until_it_has_settled() -> None:
    p = scheduler()
    handoff = handed_off(p)
    staged(p)
    p.release_lease("no such nonce")
    assert p.take_instructions() is None
    p.release_lease(handoff.nonce)
    assert [(e.nonce, e.end) for e in staged(p).ends] == [(handoff.nonce, LeaseEnd.RELEASED)]
    settled = Settled(request_id=RequestId("p"), end=LeaseEnd.RELEASED)
    p.update_connector_output(ConnectorReport(settled=[settled]))
    p.release_lease(handoff.nonce)
    assert p.take_instructions() is None


def test_an_abort_of_a_leased_request_ends_its_lease() -> None:
    p = scheduler()
    handed_off(p)
    staged(p)
    p.request_aborted(FakeRequest(RequestId("p"), PROMPT, remote_decode=True))
    assert [e.end for e in staged(p).ends] == [LeaseEnd.ABORTED]


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


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_an_empty_secret_is_legal_on_loopback(host: str) -> None:
    scheduler(host=host)


def test_an_empty_secret_elsewhere_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="secret is empty"):
        scheduler(host="10.0.0.1")
    scheduler(host="10.0.0.1", secret="s")


def test_the_owner_of_a_load_is_the_life_that_made_the_handoff() -> None:
    d = scheduler("D")
    request = queued(d)
    d.update_state_after_alloc(request, blocks(10, 11, 12), 40)
    (load,) = staged(d).loads
    assert load.owner.engine_id == EngineId("P")
    assert load.owner.incarnation == Incarnation("life of P")


# ---- a load that is tried again -----------------------------------------------------------------


def loading(d: HandoverScheduler, num_external: int = 40, **changes: Any) -> Load:
    d.update_state_after_alloc(queued(d, **changes), blocks(10, 11, 12), num_external)
    (load,) = staged(d).loads
    return load


def failure(
    load: Load | Reserve, reason: LoadFailure = LoadFailure.DIGEST, num_valid_tokens: int = 0
) -> Failed:
    return Failed(
        request_id=load.request_id,
        reason=reason,
        load_id=load.load_id,
        num_valid_tokens=num_valid_tokens,
    )


@pytest.mark.parametrize("reason", [LoadFailure.DIGEST, LoadFailure.TIMEOUT, LoadFailure.PEER_LOST])
def test_a_load_is_tried_once_more_under_its_lease(reason: LoadFailure) -> None:
    d = scheduler("D")
    first = loading(d)
    assert d.retry_load(failure(first, reason))
    d.update_connector_output(ConnectorReport(failed=[failure(first, reason)]))
    todo = staged(d)
    (second,) = todo.loads
    assert msgspec.structs.replace(second, load_id=first.load_id) == first
    assert second.load_id not in (0, first.load_id)
    assert (todo.releases, todo.unwatches) == ([], [])
    assert not d.retry_load(failure(second, reason))
    d.update_connector_output(ConnectorReport(failed=[failure(second, reason)]))
    assert [(r.nonce, r.end) for r in staged(d).releases] == [("nonce-0", LeaseEnd.RELEASED)]
    assert d.faults["report_unknown"] == 0


@pytest.mark.parametrize(
    ("num_external", "num_valid", "first_token"),
    [(40, 0, 0), (40, 31, 16), (40, 32, 32), (40, 40, 32), (24, 0, 16), (24, 47, 32)],
)
def test_what_was_valid_of_a_load_is_not_read_again(
    num_external: int, num_valid: int, first_token: int
) -> None:
    d = scheduler("D")
    assert d.retry_load(failure(loading(d, num_external), num_valid_tokens=num_valid))
    (second,) = staged(d).loads
    assert second.first_token == first_token


@pytest.mark.parametrize(
    "reason", [LoadFailure.LEASE_LOST, LoadFailure.INCOMPATIBLE, LoadFailure.HANDSHAKE]
)
def test_a_load_that_would_fail_again_is_not_tried_again(reason: LoadFailure) -> None:
    d = scheduler("D")
    assert not d.retry_load(failure(loading(d), reason))
    assert d.take_instructions() is None


def test_a_load_that_was_aborted_or_is_unknown_is_not_tried_again() -> None:
    d = scheduler("D")
    request = queued(d)
    d.update_state_after_alloc(request, blocks(10, 11, 12), 40)
    (load,) = staged(d).loads
    stale = msgspec.structs.replace(failure(load), load_id=load.load_id + 1)
    assert not d.retry_load(stale)
    d.request_aborted(request)
    staged(d)
    assert not d.retry_load(failure(load))
    assert d.take_instructions() is None


def test_what_one_rank_has_given_up_the_others_stop_and_one_try_more_is_not_stopped() -> None:
    d = scheduler("D")
    load = loading(d)
    stale = msgspec.structs.replace(failure(load), load_id=load.load_id + 1)
    d.update_connector_output(ConnectorReport(failing=[stale]))
    assert d.take_instructions() is None
    d.update_connector_output(ConnectorReport(failing=[failure(load)]))
    assert staged(d).aborts == [load.request_id]
    d.update_connector_output(ConnectorReport(failing=[failure(load)]))
    assert d.retry_load(failure(load))
    todo = staged(d)
    assert (todo.aborts, len(todo.loads)) == ([], 1)


def test_reports_of_another_load_of_the_request_change_nothing() -> None:
    d = scheduler("D")
    load = loading(d)
    stale = msgspec.structs.replace(failure(load), load_id=load.load_id + 7)
    d.update_connector_output(ConnectorReport(failed=[stale]))
    assert d.faults["report_unknown"] == 1
    assert d.take_instructions() is None
    assert d.retry_load(failure(load))


def test_a_lease_is_released_as_read_once_the_load_is_complete() -> None:
    d = scheduler("D")
    load = loading(d)
    d.update_connector_output(ConnectorReport(received=[arrival(load)]))
    assert [(r.nonce, r.end) for r in staged(d).releases] == [("nonce-0", LeaseEnd.READ)]


def test_a_lease_is_left_to_whoever_the_failure_is_reported_to() -> None:
    d = scheduler("D")
    load = loading(d, on_load_failure=OnLoadFailure.REPORT)
    d.update_connector_output(ConnectorReport(failed=[failure(load, LoadFailure.LEASE_LOST)]))
    todo = staged(d)
    assert (todo.releases, todo.unwatches) == ([], ["nonce-0"])


# ---- pushes -------------------------------------------------------------------------------------


def arrival(load: Load | Reserve, handoff: KVHandoff | None = None) -> Received:
    return Received(
        request_id=load.request_id,
        num_bytes=1,
        num_descriptors=1,
        wait_s=0,
        transfer_s=0,
        load_id=load.load_id,
        handoff=handoff,
    )


def end_of(engine_id: str) -> EngineRef:
    return EngineRef(
        engine_id=EngineId(engine_id),
        incarnation=Incarnation(f"life of {engine_id}"),
        endpoints=tuple(ENDPOINTS[:1]),
        shape=layout().shape_of_one_rank(),
    )


def ticket(nonce: str = "push", secret: str = "", **changes: Any) -> PushTicket:
    fields = {"prefill": end_of("P"), "decode": end_of("D"), **changes}
    return PushTicket(nonce=nonce, **fields).signed(secret.encode())


def prefill_of(planned: PushTicket, request_id: str = "p") -> FakeRequest:
    return FakeRequest(RequestId(request_id), PROMPT, remote_decode=True, ticket=planned)


def decode_of(planned: PushTicket) -> FakeRequest:
    return FakeRequest(RequestId("d"), PROMPT, ticket=planned)


def step(*tokens: tuple[str, int, int], is_new: bool = False) -> SchedulerOutput:
    """A step of requests with (id, computed tokens, tokens to compute)."""
    return SchedulerOutput(
        step_id=0,
        new_requests=[
            NewRequest(
                request_id=RequestId(request_id),
                prompt_token_ids=PROMPT,
                output_token_ids=[],
                sampling=SamplingParams(max_tokens=4, seed=0),
                block_ids=[],
                num_computed_tokens=computed,
            )
            for request_id, computed, _ in tokens
            if is_new
        ],
        known_requests=KnownRequests(
            request_ids=[RequestId(each[0]) for each in tokens if not is_new],
            new_block_ids=[[] for _ in tokens if not is_new],
            num_computed_tokens=[each[1] for each in tokens if not is_new],
        ),
        num_scheduled_tokens={RequestId(each[0]): each[2] for each in tokens},
        gone_request_ids=[],
    )


def chunks(half: HandoverScheduler, output: SchedulerOutput) -> list[Chunk]:
    metadata = half.build_connector_meta(output)
    return [] if metadata is None else StepInstructions.from_metadata(metadata).chunks


def registered(p: HandoverScheduler, nonce: str = "push") -> FakeRequest:
    """A request at P whose D has registered and whose blocks are taken."""
    request = prefill_of(ticket(nonce))
    p.request_queued(request)
    p.update_connector_output(ConnectorReport(registered=[Registered(nonce=nonce)]))
    p.update_state_after_alloc(request, blocks(3, 4, 5), 0, generations=[7, 8, 9])
    staged(p)
    return request


def test_chunks_of_a_prompt_that_will_be_pulled_go_with_their_step_and_no_other() -> None:
    p = scheduler("P")
    request = FakeRequest(RequestId("p"), PROMPT, remote_decode=True)
    p.request_queued(request)
    p.chunk_planned(request, blocks(3, 4), 0, 20, generations=[7, 8])
    (chunk,) = chunks(p, step(("p", 0, 20)))
    assert (chunk.nonce, chunk.request_id) == ("", request.request_id)
    assert (chunk.block_ids, chunk.generations) == (blocks(3, 4), [7, 8])
    assert (chunk.start_token, chunk.end_token, chunk.num_tokens) == (0, 20, 40)
    assert chunks(p, step(("p", 20, 20))) == []


def test_a_live_push_has_each_chunk_once_and_one_that_was_withdrawn_is_as_if_pulled() -> None:
    p = scheduler("P")
    request = registered(p)
    p.chunk_planned(request, blocks(3, 4, 5), 0, 20, generations=[7, 8, 9])
    (chunk,) = chunks(p, step((request.request_id, 0, 20)))
    assert chunk.nonce == "push"
    withdraw(p)
    p.chunk_planned(request, blocks(3, 4, 5), 20, 30, generations=[7, 8, 9])
    (chunk,) = chunks(p, step((request.request_id, 20, 10)))
    assert (chunk.nonce, chunk.end_token) == ("", 30)


def withdraw(p: HandoverScheduler, nonce: str = "push") -> None:
    p.update_connector_output(ConnectorReport(withdrawn=[Withdrawn(nonce=nonce)]))


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
    refusal = scheduler(name).check_handoff(request)
    assert refusal is not None
    assert all(word in refusal for word in words), refusal


def test_a_forged_ticket_is_refused_and_a_good_one_is_not() -> None:
    for half, request in (
        (scheduler("P"), prefill_of(ticket())),
        (scheduler("D"), decode_of(ticket())),
    ):
        assert half.check_handoff(request) is None
        assert request.ticket is not None
        request.ticket = msgspec.structs.replace(request.ticket, nonce="another")
        refusal = half.check_handoff(request)
        assert refusal is not None
        assert "signature" in refusal


def test_what_a_push_brings_must_belong_to_its_ticket() -> None:
    d, p = scheduler("D"), scheduler()
    request = registered(p)
    request.output_token_ids = [7]
    handoff = p.request_finished(request, blocks(3, 4, 5), [7, 8, 9])
    at_d = decode_of(ticket())
    at_d.handoff = handoff
    assert d.check_handoff(at_d) is None
    at_d.handoff = handed_off()
    refusal = d.check_handoff(at_d)
    assert refusal is not None
    assert "'nonce-0'" in refusal
    assert "'push'" in refusal


def test_a_pushed_request_waits_at_p_until_d_has_registered() -> None:
    p = scheduler()
    request = prefill_of(ticket())
    p.request_queued(request)
    assert [(e.nonce, e.request_id, e.decode) for e in staged(p).expects] == [
        ("push", "p", end_of("D"))
    ]
    assert p.get_num_new_matched_tokens(request, 0) is None
    assert not p.holds_blocks(request)
    p.update_connector_output(ConnectorReport(registered=[Registered(nonce="push")]))
    assert p.get_num_new_matched_tokens(request, 0) == NOTHING
    assert p.holds_blocks(request)


def test_a_pushed_request_that_d_gave_up_is_prefilled_and_leased_under_another_nonce() -> None:
    p = scheduler()
    request = prefill_of(ticket())
    p.request_queued(request)
    withdraw(p)
    p.update_connector_output(ConnectorReport(registered=[Registered(nonce="push")]))
    assert p.get_num_new_matched_tokens(request, 0) == NOTHING
    p.update_state_after_alloc(request, blocks(3, 4, 5), 0)
    assert chunks(p, step(("p", 0, 40), is_new=True)) == []
    request.output_token_ids = [7]
    handoff = p.request_finished(request, blocks(3, 4, 5), [7, 8, 9])
    assert handoff is not None
    assert handoff.nonce == "nonce-0"
    assert [grant.handoff for grant in staged(p).grants] == [None]


def test_the_chunks_of_a_push_begin_with_token_0_and_end_with_the_prompt() -> None:
    p = scheduler()
    registered(p)
    # 16 tokens were cached; two other requests run beside it.
    first = chunks(p, step(("p", 16, 10), ("x", 0, 3), is_new=True))
    assert first == [Chunk("push", RequestId("p"), blocks(3, 4, 5), [7, 8, 9], 0, 26, 40, 13)]
    second = chunks(p, step(("p", 26, 14), ("x", 3, 1)))
    assert [(c.start_token, c.end_token, c.num_step_tokens) for c in second] == [(26, 40, 15)]
    assert chunks(p, step(("x", 4, 1))) == []
    assert chunks(p, step(("p", 40, 1))) == []


def test_a_withdrawn_push_has_no_further_chunks_and_keeps_its_blocks() -> None:
    p = scheduler()
    request = registered(p)
    assert len(chunks(p, step(("p", 0, 16), is_new=True))) == 1
    withdraw(p)
    assert chunks(p, step(("p", 16, 24))) == []
    assert p.holds_blocks(request)
    assert p.request_aborted(request)


@pytest.mark.parametrize(
    ("table", "generations"), [((3, 4), [1, 1]), ((3, 4, 5), [1, 1]), ((3, 4, 5), [])]
)
def test_a_pushed_request_without_its_whole_table_ends_the_engine(
    table: tuple[int, ...], generations: list[int]
) -> None:
    p = scheduler()
    request = prefill_of(ticket())
    p.request_queued(request)
    p.update_connector_output(ConnectorReport(registered=[Registered(nonce="push")]))
    with pytest.raises(InternalError, match="blocks with their generations at once"):
        p.update_state_after_alloc(request, blocks(*table), 0, generations=generations)


def test_a_live_push_is_leased_under_its_nonce_and_d_gets_the_handoff() -> None:
    p = scheduler()
    request = registered(p)
    request.output_token_ids = [7]
    handoff = p.request_finished(request, blocks(3, 4, 5), [7, 8, 9])
    assert handoff is not None
    assert (handoff.nonce, handoff.generations) == ("push", [7, 8, 9])
    (grant,) = staged(p).grants
    assert (grant.nonce, grant.handoff) == ("push", handoff)
    withdraw(p)  # by a D that died behind it: the lease is for another
    p.release_lease("push")
    assert [end.nonce for end in staged(p).ends] == ["push"]
    settled = Settled(request_id=RequestId("p"), end=LeaseEnd.READ, nonce="push")
    p.update_connector_output(ConnectorReport(settled=[settled]))
    p.release_lease("push")
    assert p.take_instructions() is None
    assert p.faults["report_unknown"] == 0


def test_an_abort_during_a_push_holds_the_blocks_until_it_has_settled() -> None:
    p = scheduler()
    request = registered(p)
    assert p.request_aborted(request)
    assert [(s.nonce, s.request_id) for s in staged(p).stops] == [("push", "p")]
    assert chunks(p, step(("p", 0, 16), is_new=True)) == []
    settled = Settled(request_id=RequestId("p"), end=LeaseEnd.ABORTED, nonce="push")
    p.update_connector_output(ConnectorReport(settled=[settled]))
    assert p.faults["report_unknown"] == 0
    p.update_connector_output(ConnectorReport(settled=[settled]))
    assert p.faults["report_unknown"] == 1


def test_an_abort_before_d_has_registered_holds_nothing_and_stops_the_push() -> None:
    p = scheduler()
    request = prefill_of(ticket())
    p.request_queued(request)
    staged(p)
    assert not p.request_aborted(request)
    assert [s.nonce for s in staged(p).stops] == ["push"]
    p.update_connector_output(ConnectorReport(registered=[Registered(nonce="push")]))
    withdraw(p)
    settled = Settled(request_id=RequestId("p"), end=LeaseEnd.ABORTED, nonce="push")
    p.update_connector_output(ConnectorReport(settled=[settled]))
    assert p.faults["report_unknown"] == 0


def test_an_abort_of_a_push_that_never_was_has_nothing_to_settle() -> None:
    p = scheduler()
    request = prefill_of(ticket())
    p.request_queued(request)
    withdraw(p)
    staged(p)
    assert not p.request_aborted(request)
    assert p.take_instructions() is None


def test_a_settled_push_of_an_earlier_request_of_the_same_id_ends_no_lease() -> None:
    p = scheduler()
    first = prefill_of(ticket())
    p.request_queued(first)
    assert not p.request_aborted(first)
    handoff = handed_off(p)  # the same request id
    staged(p)
    settled = Settled(request_id=RequestId("p"), end=LeaseEnd.ABORTED, nonce="push")
    p.update_connector_output(ConnectorReport(settled=[settled]))
    p.release_lease(handoff.nonce)
    assert [end.nonce for end in staged(p).ends] == [handoff.nonce]


def test_a_replayed_ticket_is_pulled_under_a_nonce_of_its_own() -> None:
    p = scheduler()
    registered(p)
    again = prefill_of(ticket(), "again")
    p.request_queued(again)
    assert p.take_instructions() is None
    assert p.faults == Counter(ticket_replayed=1)
    assert p.get_num_new_matched_tokens(again, 0) == NOTHING
    again.output_token_ids = [7]
    handoff = p.request_finished(again, blocks(6, 7, 8), [1] * 3)
    assert handoff is not None
    assert handoff.nonce == "nonce-0"
    assert chunks(p, step(("again", 0, 40), is_new=True)) == []


def test_an_expired_ticket_is_pulled_and_a_replay_before_that_is_known() -> None:
    clock = ManualClock(1000.0)
    p = scheduler(clock=clock)
    planned = ticket(expires_s=1100.0)
    p.request_queued(prefill_of(planned))
    staged(p)
    clock.advance(99.9)
    p.request_queued(prefill_of(planned, "replayed in time"))
    assert p.faults == Counter(ticket_replayed=1)
    clock.advance(0.1)
    # It is forgotten with this one, and expired.
    p.request_queued(prefill_of(ticket("another", expires_s=1200.0), "another"))
    assert [expect.nonce for expect in staged(p).expects] == ["another"]
    late = prefill_of(planned, "late")
    p.request_queued(late)
    assert p.faults == Counter(ticket_replayed=1, ticket_expired=1)
    assert p.take_instructions() is None
    assert p.get_num_new_matched_tokens(late, 0) == NOTHING


def test_the_expiry_of_a_ticket_is_signed() -> None:
    p = scheduler("P", secret="ours")
    planned = ticket(secret="ours", expires_s=1100.0)
    assert p.check_handoff(prefill_of(planned)) is None
    longer = msgspec.structs.replace(planned, expires_s=9999.0)
    assert "signature" in (p.check_handoff(prefill_of(longer)) or "")


def test_d_reserves_for_a_push_before_p_has_begun() -> None:
    d = scheduler("D", lease_s=12.0)
    request = decode_of(ticket())
    d.request_queued(request)
    assert [(w.nonce, w.owner, w.lease_s) for w in staged(d).watches] == [
        ("push", end_of("P"), 12.0)
    ]
    assert d.get_num_new_matched_tokens(request, 16) == Match(24, is_async=True)
    d.update_state_after_alloc(request, blocks(10, 11, 12, 13), 24)
    todo = staged(d)
    (reserve,) = todo.reserves
    assert todo.loads == []
    assert (reserve.nonce, reserve.owner, reserve.local_block_ids) == (
        "push",
        end_of("P"),
        [10, 11, 12],
    )
    assert (reserve.first_token, reserve.num_tokens) == (16, 40)
    assert d.get_num_new_matched_tokens(request, 16) == NOTHING
    d.update_connector_output(ConnectorReport(received=[arrival(reserve, handed_off())]))
    assert [(r.nonce, r.end) for r in staged(d).releases] == [("push", LeaseEnd.READ)]


@pytest.mark.parametrize("reason", [LoadFailure.WITHDRAWN, LoadFailure.DIGEST, LoadFailure.TIMEOUT])
def test_a_failed_push_is_not_tried_again_and_leaves_its_lease_to_a_pull(
    reason: LoadFailure,
) -> None:
    d = scheduler("D")
    request = decode_of(ticket())
    d.request_queued(request)
    d.update_state_after_alloc(request, blocks(10, 11, 12), 40)
    (reserve,) = staged(d).reserves
    assert not d.retry_load(failure(reserve, reason))
    d.update_connector_output(ConnectorReport(failed=[failure(reserve, reason)]))
    todo = staged(d)
    assert (todo.releases, todo.unwatches) == ([], ["push"])


def test_an_aborted_reservation_is_released_once_it_has_settled() -> None:
    d = scheduler("D")
    request = decode_of(ticket())
    d.request_queued(request)
    d.update_state_after_alloc(request, blocks(10, 11, 12), 40)
    (reserve,) = staged(d).reserves
    assert not d.request_aborted(request)
    d.request_aborted(request)
    todo = staged(d)
    assert (todo.aborts, todo.releases) == (["d"], [])
    d.update_connector_output(ConnectorReport(failed=[failure(reserve, LoadFailure.ABORTED)]))
    assert [(r.nonce, r.end) for r in staged(d).releases] == [("push", LeaseEnd.RELEASED)]
