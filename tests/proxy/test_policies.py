"""What every policy owes, whichever it is: total, deterministic, never an unfit engine."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cli import make_parser
from pdserve.config.policies import POLICIES, PREFIX_POLICIES
from pdserve.errors import ConfigError
from pdserve.proxy.policies import (
    BackendView,
    RouteRequest,
    policy_named,
    split_policy_named,
)
from pdserve.proxy.policies.choosing import cache_aware, least_loaded, prefix_sticky
from tests.proxy.scripted import ScriptedEngine, text_of

views = st.lists(
    st.builds(
        BackendView,
        url=st.text(min_size=1, max_size=4),
        in_flight=st.integers(0, 5),
        num_foreign=st.integers(0, 5),
        kv_usage=st.floats(0, 1),
        age_s=st.one_of(st.floats(0, 100), st.just(float("inf"))),
        hit_tokens=st.sampled_from([0, 256, 512, 1024]),
        pending_tokens=st.sampled_from([0, 100, 20_000]),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda view: view.url,
)
requests = st.builds(
    RouteRequest,
    sequence=st.integers(0, 1000),
    prompt_tokens=st.sampled_from([0, 1024, 1100]),
)
each_policy = pytest.mark.parametrize("name", sorted(POLICIES))
each_prefix_policy = pytest.mark.parametrize("name", sorted(PREFIX_POLICIES & POLICIES.keys()))


@each_policy
@given(request=requests, candidates=views)
def test_a_policy_names_one_of_the_engines_that_it_is_shown(name, request, candidates):
    assert policy_named(name, flag="policy")(request, candidates) in candidates


@each_policy
@given(request=requests, candidates=views)
def test_a_policy_answers_the_same_question_alike(name, request, candidates):
    policy = policy_named(name, flag="policy")
    assert policy(request, candidates) == policy(request, list(candidates))


@each_policy
def test_a_policy_spreads_requests_over_equal_engines(name):
    candidates = [BackendView(str(i), age_s=0.0) for i in range(4)]
    policy = policy_named(name, flag="policy")
    chosen = [policy(RouteRequest(i), candidates) for i in range(8)]
    assert {view.url for view in chosen if view} == {"0", "1", "2", "3"}


@pytest.mark.parametrize("name", sorted(POLICIES.keys() - PREFIX_POLICIES))
@given(request=requests, hits=st.lists(st.sampled_from([0, 256, 1024]), min_size=2, max_size=4))
def test_a_policy_that_looks_at_prefixes_is_among_prefix_policies(name, request, hits):
    policy = policy_named(name, flag="policy")
    told = [
        BackendView(str(i), age_s=0.0, hit_tokens=h, pending_tokens=h // 2)
        for i, h in enumerate(hits)
    ]
    untold = [dataclasses.replace(view, hit_tokens=0, pending_tokens=0) for view in told]
    chosen = policy(dataclasses.replace(request, prompt_tokens=0), untold)
    assert policy(request, told).url == chosen.url, f"add {name} to PREFIX_POLICIES"


@given(request=requests, candidates=views)
def test_least_loaded_never_prefers_an_engine_with_more_of_our_requests(request, candidates):
    fresh = [BackendView(v.url, v.in_flight, 0, 0.0, 0.0) for v in candidates]
    chosen = least_loaded(request, fresh)
    assert chosen is not None
    assert chosen.in_flight == min(view.in_flight for view in fresh)


def test_least_loaded_forgets_a_snapshot_that_is_too_old():
    busy_long_ago = BackendView("a", in_flight=0, num_foreign=9, age_s=60.0)
    busier = BackendView("b", in_flight=1, age_s=0.0)
    chosen = least_loaded(RouteRequest(0), [busy_long_ago, busier])
    assert chosen is busy_long_ago


@each_prefix_policy
@given(request=requests, candidates=views, more=st.sampled_from([256, 512]))
def test_an_engine_that_has_more_of_the_prompt_is_not_less_attractive(
    name, request, candidates, more
):
    policy = policy_named(name, flag="policy")
    chosen = policy(request, candidates)
    if chosen is None:
        return
    warmer = dataclasses.replace(chosen, hit_tokens=chosen.hit_tokens + more)
    others = [warmer if view is chosen else view for view in candidates]
    assert policy(request, others) is warmer


@each_prefix_policy
@given(request=requests, candidates=views, which=st.integers(0, 5))
def test_an_engine_that_has_more_to_do_is_not_more_attractive(name, request, candidates, which):
    policy = policy_named(name, flag="policy")
    chosen = policy(request, candidates)
    if chosen is None:
        return
    busier = [
        dataclasses.replace(
            view, in_flight=view.in_flight + 100, pending_tokens=view.pending_tokens + 50_000
        )
        if view is not chosen and index == which
        else view
        for index, view in enumerate(candidates)
    ]
    assert policy(request, busier) in (chosen, *(v for v in busier if v in candidates))


def warm(url: str, hit_tokens: int, pending_tokens: int = 0, in_flight: int = 0) -> BackendView:
    return BackendView(
        url,
        in_flight=in_flight,
        age_s=0.0,
        hit_tokens=hit_tokens,
        pending_tokens=pending_tokens,
    )


def test_a_prompt_stays_with_its_engine_until_that_is_saturated():
    request = RouteRequest(0, prompt_tokens=4000)
    cold = warm("cold", 0)
    for pending, stays in ((0, True), (9_000, True), (16_384, True), (16_385, False)):
        engine = warm("warm", 3584, pending, in_flight=3)
        chosen = prefix_sticky(request, [cold, engine])
        assert (chosen is engine) is stays, pending


def test_a_prompt_that_is_new_for_the_most_part_goes_where_it_is_computed_first():
    request = RouteRequest(0, prompt_tokens=4000)
    cold = warm("cold", 0)
    assert prefix_sticky(request, [cold, warm("w", 1024, 1000)]).url == "w"
    assert prefix_sticky(request, [cold, warm("w", 1024, 1025)]).url == "cold"


def test_cache_aware_follows_the_longest_match_while_the_load_is_balanced():
    request = RouteRequest(0, prompt_tokens=1000)
    idle, some = warm("idle", 0), warm("some", 256)
    assert cache_aware(request, [idle, some, warm("w", 512, in_flight=60)]).url == "w"
    assert cache_aware(request, [idle, some, warm("w", 512, in_flight=65)]).url != "w"
    assert cache_aware(request, [warm("idle", 0), warm("s", 256, in_flight=1)]).url == "idle"


def test_an_unknown_policy_is_refused_with_the_names_there_are():
    with pytest.raises(ConfigError, match=", ".join(sorted(POLICIES))):
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
    with pytest.raises(ConfigError, match=r"use one of .*, last, "):
        policy_named("first", flag="decode-policy")


def test_a_split_policy_weighs_what_the_decode_engine_lacks():
    prefill = warm("p", 0)
    expected = {
        (1000, 0): {
            "always": "",
            "never": "never_split",
            "llmd": "",
            "ppd": "",
            "isl_bounding": "",
        },
        (1000, 990): {"llmd": "mostly_cached", "ppd": "mostly_cached"},
        (1000, 600): {"llmd": "", "ppd": "mostly_cached", "isl_bounding": "mostly_cached"},
        (10_000, 7000): {"ppd": "", "isl_bounding": ""},
        (10_000, 8000): {"ppd": "", "isl_bounding": "mostly_cached"},
        (0, 0): {"always": "", "never": "never_split"},
    }
    for (prompt_tokens, hit), reasons in expected.items():
        for name, reason in reasons.items():
            policy = split_policy_named(name, flag="split-policy")
            request = RouteRequest(0, prompt_tokens=prompt_tokens)
            assert policy(request, prefill, warm("d", hit)) == reason, (name, prompt_tokens, hit)
    with pytest.raises(ConfigError, match="use one of always, isl_bounding, llmd, never, ppd"):
        split_policy_named("perhaps", flag="split-policy")


async def test_what_is_not_split_is_a_decode_engines_alone_and_it_is_said_why(make_stack):
    prefill, decode = [ScriptedEngine("prefill")], [ScriptedEngine("decode") for _ in range(2)]
    stack = await make_stack(prefill, decode, split_policy="ppd", decode_policy="prefix_sticky")
    body = {"prompt": list(range(2000)), "max_tokens": 4, "seed": 3}
    for _ in range(3):
        async with stack.post(body) as response:
            assert (await response.json())["choices"][0]["text"] == text_of(3, 4)
    assert len(prefill[0].calls) == 1
    assert sorted(len(engine.calls) for engine in decode) == [0, 3]
    metrics = await stack.metrics()
    name = 'pdserve_disagg_decisions_total{decision="local",reason="mostly_cached"}'
    assert metrics[name] == 2


@pytest.mark.slow
async def test_what_is_split_takes_decode_engines_in_turn_whatever_the_split_policy(make_stack):
    prefill, decode = [ScriptedEngine("prefill")], [ScriptedEngine("decode") for _ in range(2)]
    stack = await make_stack(prefill, decode, split_policy="llmd", decode_policy="round_robin")
    for number in range(4):
        body = {"prompt": [number] * 600, "max_tokens": 4, "seed": 3}
        async with stack.post(body) as response:
            assert response.status == 200
    assert [len(engine.calls) for engine in decode] == [2, 2]
