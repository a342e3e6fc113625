"""What every policy owes, whichever it is: total, deterministic, never an unfit engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cli import make_parser
from pdserve.config.policies import POLICIES
from pdserve.errors import ConfigError
from pdserve.proxy.policies import BackendView, RouteRequest, choose, policy_named
from pdserve.proxy.policies.least_loaded import least_loaded
from tests.proxy.scripted import ScriptedEngine, text_of

views = st.lists(
    st.builds(
        BackendView,
        url=st.text(min_size=1, max_size=4),
        available=st.booleans(),
        in_flight=st.integers(0, 5),
        num_foreign=st.integers(0, 5),
        kv_usage=st.floats(0, 1),
        age_s=st.one_of(st.floats(0, 100), st.just(float("inf"))),
    ),
    max_size=6,
    unique_by=lambda view: view.url,
)
requests = st.builds(RouteRequest, sequence=st.integers(0, 1000), body_bytes=st.integers(0, 10))
each_policy = pytest.mark.parametrize("name", sorted(POLICIES))


@each_policy
@given(request=requests, candidates=views)
def test_a_policy_names_an_available_engine_whenever_there_is_one(name, request, candidates):
    chosen = choose(policy_named(name, flag="policy"), request, candidates)
    if any(view.available for view in candidates):
        assert chosen is not None
        assert chosen.available
        assert chosen in candidates
    else:
        assert chosen is None


@each_policy
@given(request=requests, candidates=views)
def test_a_policy_answers_the_same_question_alike(name, request, candidates):
    policy = policy_named(name, flag="policy")
    assert choose(policy, request, candidates) == choose(policy, request, list(candidates))


@each_policy
def test_a_policy_spreads_requests_over_equal_engines(name):
    candidates = [BackendView(str(i), True, age_s=0.0) for i in range(4)]
    policy = policy_named(name, flag="policy")
    chosen = [choose(policy, RouteRequest(i), candidates) for i in range(8)]
    assert {view.url for view in chosen if view} == {"0", "1", "2", "3"}


@given(request=requests, candidates=views.filter(lambda v: any(x.available for x in v)))
def test_least_loaded_never_prefers_an_engine_with_more_of_our_requests(request, candidates):
    fresh = [BackendView(v.url, v.available, v.in_flight, 0, 0.0, 0.0) for v in candidates]
    chosen = choose(least_loaded, request, fresh)
    assert chosen is not None
    assert chosen.in_flight == min(view.in_flight for view in fresh if view.available)


def test_least_loaded_forgets_a_snapshot_that_is_too_old():
    busy_long_ago = BackendView("a", True, in_flight=0, num_foreign=9, age_s=60.0)
    busier = BackendView("b", True, in_flight=1, age_s=0.0)
    chosen = choose(least_loaded, RouteRequest(0), [busy_long_ago, busier])
    assert chosen is busy_long_ago


def test_an_unknown_policy_is_refused_with_the_names_there_are():
    with pytest.raises(ConfigError, match="least_loaded, round_robin"):
        policy_named("best", flag="decode-policy")


def test_the_command_line_offers_the_policies_there_are(capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["proxy", "--help"])
    told = capsys.readouterr().out
    for flag in ("policy", "prefill-policy", "decode-policy"):
        assert f"--{flag} {'|'.join(POLICIES)}" in told


def last(request, candidates):
    return candidates[-1]


async def test_a_policy_is_a_function_and_its_line(make_stack, monkeypatch):
    monkeypatch.setitem(POLICIES, "last", f"{__name__}:last")
    engines = [ScriptedEngine("decode") for _ in range(3)]
    stack = await make_stack([], engines, decode_policy="last")
    for _ in range(3):
        async with stack.post() as response:
            assert (await response.json())["choices"][0]["text"] == text_of(3, 4)
    assert [len(engine.calls) for engine in engines] == [0, 0, 3]
    with pytest.raises(ConfigError, match="use one of last, least_loaded, round_robin"):
        policy_named("first", flag="decode-policy")
