"""The scheduler half alone: what it believes, what it stages, what it forgets."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from pdserve.config.schema import EngineConfig, ModelConfig, TransferConfig
from pdserve.connectors.base import ConnectorContext, KVLayout, Match
from pdserve.connectors.pull.instructions import PullInstructions
from pdserve.connectors.pull.scheduler import PullScheduler
from pdserve.errors import ConfigError, InternalError
from pdserve.wire.ids import BlockId, EngineId, Incarnation, RequestId
from pdserve.wire.outputs import TokenLogprobs
from pdserve.wire.transfer import (
    ConnectorReport,
    Endpoint,
    Failed,
    KVHandoff,
    LeaseEnd,
    LoadFailure,
    Received,
    Settled,
)
from tests.connectors.engines import EMPTY_STEP, FakeRequest, layout, prompt_of, signed_with

PROMPT = prompt_of(40)
NOTHING = Match(0, is_async=False)
ENDPOINTS = [Endpoint(host="127.0.0.1", port=port) for port in (1, 2, 3)]


def scheduler(
    engine_id: str = "P",
    shape: KVLayout | None = None,
    digest: str = "d",
    num_ranks: int = 1,
    **transfer: Any,
) -> PullScheduler:
    context = ConnectorContext(
        config=EngineConfig(model=ModelConfig(model="m"), transfer=TransferConfig(**transfer)),
        engine_id=engine_id,
        incarnation=Incarnation(f"life of {engine_id}"),
        layout=shape or layout(),
        layout_digest=digest,
        layout_fields={},
        num_ranks=num_ranks,
    )
    count = itertools.count()
    return PullScheduler(context, ENDPOINTS[:num_ranks], new_nonce=lambda: f"nonce-{next(count)}")


def blocks(*ids: int) -> list[BlockId]:
    return [BlockId(i) for i in ids]


def handed_off(p: PullScheduler | None = None, prompt: list[int] = PROMPT) -> KVHandoff:
    request = FakeRequest(RequestId("p"), prompt, output_token_ids=[7], remote_decode=True)
    handoff = (p or scheduler()).request_finished(request, blocks(3, 4, 5, 6))
    assert handoff is not None
    return handoff


def staged(half: PullScheduler) -> PullInstructions:
    metadata = half.build_connector_meta(EMPTY_STEP)
    assert not half.has_staged()
    return PullInstructions() if metadata is None else PullInstructions.from_metadata(metadata)


def queued(d: PullScheduler, **changes: Any) -> FakeRequest:
    request = FakeRequest(RequestId("d"), PROMPT, handoff=handed_off(), **changes)
    d.request_queued(request)
    return request


def test_a_handoff_names_the_prompts_blocks_and_carries_the_first_token() -> None:
    p = scheduler()
    logprobs = [TokenLogprobs(7, -0.5, 1, [(7, -0.5)])]
    request = FakeRequest(
        RequestId("p"), PROMPT, output_token_ids=[7], first_logprobs=logprobs, remote_decode=True
    )
    handoff = p.request_finished(request, blocks(3, 4, 5, 6))
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


def test_a_request_that_is_not_for_another_engine_is_not_leased() -> None:
    p = scheduler()
    request = FakeRequest(RequestId("p"), PROMPT, output_token_ids=[7])
    assert p.request_finished(request, blocks(3, 4, 5)) is None
    assert not p.has_staged()


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
        ({"block_size": 64}, ("64 at P", "16 at D")),
        ({"endpoints": ENDPOINTS[:2]}, ("number of ranks is 2 at P", "1 at D")),
        ({"num_tokens": 39}, ("39 at P", "40 at D")),
        ({"block_ids": blocks(3)}, ("1 at P", "3 at D")),
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


def test_a_handoff_of_fewer_ranks_is_refused_with_both_numbers() -> None:
    handoff = handed_off(scheduler(num_ranks=2))
    d = scheduler("D", num_ranks=3)
    refusal = d.check_handoff(FakeRequest(RequestId("d"), PROMPT, handoff=handoff))
    assert refusal is not None
    assert "number of ranks is 2 at P and 3 at D" in refusal


def test_a_scheduler_half_has_one_side_channel_per_rank() -> None:
    context = scheduler(num_ranks=3)._context
    with pytest.raises(InternalError, match="2 side channels for 3 ranks"):
        PullScheduler(context, ENDPOINTS[:2], new_nonce=lambda: "n")


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
    ("num_computed", "match", "remote", "local"),
    [
        (0, Match(40, is_async=True), [3, 4, 5], [10, 11, 12]),
        (16, Match(24, is_async=True), [4, 5], [11, 12]),
        (32, Match(8, is_async=True), [5], [12]),
    ],
)
def test_only_the_suffix_is_loaded(
    num_computed: int, match: Match, remote: list[int], local: list[int]
) -> None:
    d = scheduler("D")
    request = queued(d)
    assert d.get_num_new_matched_tokens(request, num_computed) == match
    d.update_state_after_alloc(request, blocks(10, 11, 12, 13), match.num_tokens)
    (load,) = staged(d).loads
    assert (load.remote_block_ids, load.local_block_ids) == (remote, local)


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
    assert not d.has_staged()


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
    assert not p.has_staged()
    p.release_lease(handoff.nonce)
    assert [(e.nonce, e.end) for e in staged(p).ends] == [(handoff.nonce, LeaseEnd.RELEASED)]
    settled = Settled(request_id=RequestId("p"), end=LeaseEnd.RELEASED)
    p.update_connector_output(ConnectorReport(settled=[settled]))
    p.release_lease(handoff.nonce)
    assert not p.has_staged()


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
    assert d.num_unknown_reports == 3


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
