"""The client against a server that answers as scripted, over real sockets and processes."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from pdserve.bench.records import Outcome, Planned, Run
from pdserve.bench.runner import Options, RunProgress, run_plan
from pdserve.bench.target import ApiEndpoint, Target
from pdserve.errors import ConfigError, PeerError
from tests.bench.scripted import ScriptedServer, request, script, scripted_server

pytestmark = pytest.mark.slow

GAPS_S = [0.02, 0.005, 0.04]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as started:
        yield started


async def run(
    server: ScriptedServer,
    plan: list[Planned],
    *,
    chat: bool = False,
    **options: Any,
) -> Run:
    endpoint = ApiEndpoint.CHAT if chat else ApiEndpoint.COMPLETIONS
    target = Target(base_url=server.url, endpoint=endpoint)
    return await run_plan(plan, target, Options(**{"num_processes": 1, **options}))


def seen_by_the_server(server: ScriptedServer, outcome: Outcome) -> dict[str, Any]:
    return server.times()[outcome.request_id]


async def test_times_are_those_that_the_server_wrote_at(server: ScriptedServer) -> None:
    prompt = script(first_s=0.03, gaps_s=GAPS_S)
    least_s = float("inf")
    # Others may hold the machine for a while; a client that is wrong is wrong in every run.
    for _ in range(10):
        found = await run(server, [request(n, prompt, at_s=n * 0.02) for n in range(20)])
        for_all = []
        for outcome in found.outcomes:
            times = seen_by_the_server(server, outcome)
            client, theirs = outcome.chunk_s, times["token_s"]
            assert len(client) == 4
            for_all += [
                abs((a - client[0]) - (b - theirs[0]))
                for a, b in zip(client[1:], theirs[1:], strict=True)
            ]
            assert outcome.ttft_s >= theirs[0] - times["arrived_s"]
            assert outcome.tpot_s == pytest.approx((client[-1] - client[0]) / 3)
        least_s = min(least_s, sorted(for_all)[len(for_all) // 4])
        if least_s < 0.001:
            return
    raise AssertionError(f"times are wrong by {least_s * 1e3:.1f} ms, and by more in most chunks")


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("cut", [1, 7])
async def test_text_and_tokens_are_whole_wherever_reads_end(
    server: ScriptedServer, cut: int, line_end: str
) -> None:
    prompt = script(gaps_s=[0.001] * 2, texts=["é", "€😀", "."], cut=cut, line_end=line_end)
    [outcome] = (await run(server, [request(0, prompt)], keep_text=True)).outcomes
    assert (outcome.text, len(outcome.chunk_s), outcome.error) == ("é€😀.", 3, "")


async def test_tokens_are_counted_as_the_server_says(server: ScriptedServer) -> None:
    prompt = script(gaps_s=[0.001], tokens=[3, 2], prompt_tokens=11)
    [outcome] = (await run(server, [request(0, prompt)])).outcomes
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens) == (11, 5)


async def test_a_chat_answer_begins_with_its_text_not_with_its_role(
    server: ScriptedServer,
) -> None:
    prompt = script(first_s=0.1, role_first_s=0.01, gaps_s=[0.001])
    [outcome] = (await run(server, [request(0, prompt)], chat=True)).outcomes
    assert len(outcome.chunk_s) == 2
    assert outcome.ttft_s >= 0.1


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"status": 429}, "HTTP 429: as the script says"),
        ({"end": "error_event", "gaps_s": [0.001]}, "as the script says"),
        ({"end": "break", "gaps_s": [0.001], "usage": "none"}, "broke off"),
    ],
)
async def test_what_goes_wrong_is_an_error_and_no_figure(
    server: ScriptedServer, fields: dict[str, Any], error: str
) -> None:
    [outcome] = (await run(server, [request(0, script(**fields))])).outcomes
    assert error in outcome.error
    assert not outcome.is_good


async def test_an_answer_that_takes_too_long_has_failed(server: ScriptedServer) -> None:
    [outcome] = (
        await run(server, [request(0, script(first_s=30.0))], request_timeout_s=0.1)
    ).outcomes
    assert outcome.error == "the answer did not end within 0.1 s"


@pytest.mark.parametrize("fields", [{"length": True}, {"end": "no_done"}])
async def test_an_answer_may_have_a_length_and_need_not_say_done(
    server: ScriptedServer, fields: dict[str, Any]
) -> None:
    [outcome] = (await run(server, [request(0, script(gaps_s=[0.01], **fields))])).outcomes
    assert (outcome.error, len(outcome.chunk_s)) == ("", 2)


async def test_requests_go_out_when_they_are_due_whatever_came_back() -> None:
    prompt = script(first_s=3.0)
    with scripted_server() as server:  # its own: it counts what is open at once
        found = await run(server, [request(n, prompt, at_s=0.05 * n) for n in range(6)])
        assert server.max_open() == 6
    assert [each.scheduled_s for each in found.outcomes] == pytest.approx(
        [0.05 * n for n in range(6)]
    )
    sent = [each.sent_s for each in found.outcomes]
    assert sent == sorted(sent)


async def test_a_limit_of_places_holds_and_waiting_for_one_is_no_lag_of_the_client(
    server: ScriptedServer,
) -> None:
    prompt = script(first_s=0.08)
    found = await run(server, [request(n, prompt) for n in range(9)], max_concurrency=3)
    edges = [(each.sent_s, 1) for each in found.outcomes]
    edges += [(each.end_s, -1) for each in found.outcomes]
    in_flight, most = 0, 0
    for _, step in sorted(edges):
        in_flight += step
        most = max(most, in_flight)
    assert most == 3
    waited = [each for each in found.outcomes if each.scheduled_s > 0]
    assert len(waited) == 6
    ends = {each.end_s for each in found.outcomes}
    assert all(each.scheduled_s in ends for each in waited)


@pytest.mark.parametrize("after_tokens", [0, 2])
async def test_a_request_that_is_given_up_is_hung_up_and_no_failure(
    server: ScriptedServer, after_tokens: int
) -> None:
    prompt = script(first_s=0.15, gaps_s=[0.15] * 6)
    # A run that goes on: it is the hang-up that ends the answer, not the end of the client.
    plan = [
        request(0, prompt, cancel_after_tokens=after_tokens),
        request(1, script(first_s=0.01), at_s=1.2),
    ]
    outcome, _ = (await run(server, plan)).outcomes
    assert (outcome.is_cancelled, outcome.error) == (True, "")
    assert len(outcome.chunk_s) == after_tokens
    times = seen_by_the_server(server, outcome)
    assert not times["is_whole"]
    assert len(times["token_s"]) <= after_tokens + 1


async def test_a_request_may_be_given_up_by_the_clock(server: ScriptedServer) -> None:
    plan = [request(0, script(first_s=60.0), cancel_after_s=0.1)]
    [outcome] = (await run(server, plan)).outcomes
    assert outcome.is_cancelled
    assert 0.1 <= outcome.end_s - outcome.sent_s < 30.0


async def test_a_turn_follows_what_was_said_before_it(server: ScriptedServer) -> None:
    plan = [
        request(0, [1, 2], max_tokens=2),
        Planned(index=1, prompt=[3], max_tokens=2, after=0, delay_s=0.1),
        Planned(index=2, prompt=[4, 5], max_tokens=1, after=1),
    ]
    found = await run(server, plan)
    bodies = server.bodies()
    prompts = [bodies[each.request_id]["prompt"] for each in found.outcomes]
    assert prompts == [[1, 2], [1, 2, 100, 101, 3], [1, 2, 100, 101, 3, 100, 101, 4, 5]]
    first, second, _ = found.outcomes
    assert second.scheduled_s == pytest.approx(first.end_s + 0.1)
    assert second.sent_s >= second.scheduled_s


async def test_a_chat_turn_follows_the_answer_as_the_assistants(server: ScriptedServer) -> None:
    plan = [
        request(0, [{"role": "user", "content": "Hi"}], max_tokens=2),
        Planned(index=1, prompt="And?", max_tokens=1, after=0),
    ]
    found = await run(server, plan, chat=True)
    assert server.bodies()[found.outcomes[1].request_id]["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": " w0 w1"},
        {"role": "user", "content": "And?"},
    ]


async def test_turns_behind_a_failed_one_fail_with_a_reason(server: ScriptedServer) -> None:
    plan = [
        request(0, script(status=500)),
        Planned(index=1, prompt="x", max_tokens=1, after=0),
        Planned(index=2, prompt="y", max_tokens=1, after=1),
    ]
    found = await run(server, plan)
    assert [bool(each.error) for each in found.outcomes] == [True, True, True]
    assert "request 0" in found.outcomes[1].error


async def test_processes_share_a_plan_and_conversations_stay_together(
    server: ScriptedServer,
) -> None:
    plan = [request(n, [n + 1], max_tokens=2, at_s=0.01 * n) for n in range(8)]
    plan += [Planned(index=8 + n, prompt=[99], max_tokens=1, after=n) for n in range(8)]
    found = await run(server, plan, num_processes=3)
    assert [each.index for each in found.outcomes] == list(range(16))
    assert all(each.is_good for each in found.outcomes)
    assert found.health.num_processes == 3


async def test_warm_ups_are_sent_before_and_share_no_prompt_with_the_run(
    server: ScriptedServer,
) -> None:
    plan = [request(n, [700 + n, 800, 900], max_tokens=2) for n in range(2)]
    found = await run(server, plan, num_warmups=3)
    assert len(found.outcomes) == 2
    bodies = server.bodies()
    warm = [body["prompt"] for name, body in bodies.items() if "warmup" in name]
    mine = [prompt for prompt in warm if prompt[-1] in (700, 701)]
    # They are sent at once, and may arrive in any order.
    assert sorted(mine) == [[900, 800, 700], [900, 800, 700], [900, 800, 701]]


async def test_what_is_not_asked_for_is_left_to_the_server(server: ScriptedServer) -> None:
    found = await run(server, [request(0, [1], max_tokens=3)])
    assert server.bodies()[found.outcomes[0].request_id] == {
        "model": "scripted",
        "prompt": [1],
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_what_is_asked_for_is_in_the_body(server: ScriptedServer) -> None:
    found = await run(
        server,
        [request(0, [1], max_tokens=3)],
        ignore_eos=True,
        temperature=0.0,
        extra_body={"top_p": 0.5},
    )
    assert server.bodies()[found.outcomes[0].request_id] == {
        "model": "scripted",
        "prompt": [1],
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
        "top_p": 0.5,
    }


async def test_progress_is_told_to_the_end(server: ScriptedServer) -> None:
    told: list[RunProgress] = []
    plan = [request(n, script(gaps_s=[0.01]), at_s=0.1 * n) for n in range(8)]
    target = Target(base_url=server.url)
    found = await run_plan(plan, target, Options(num_processes=1), on_progress=told.append)
    assert len(told) > 2
    assert (told[-1].done, told[-1].total, told[-1].in_flight) == (8, 8, 0)
    ttfts_s = sorted(each.ttft_s for each in found.outcomes)
    assert ttfts_s[0] / 1.5 <= told[-1].ttft_p50_s <= ttfts_s[-1] * 1.5


async def test_a_run_that_is_cut_short_has_what_had_ended(server: ScriptedServer) -> None:
    plan = [request(0, script()), request(1, script(first_s=600)), request(2, script(), at_s=600)]
    options = Options(num_processes=1, ends_early=True)

    def cut(progress: RunProgress) -> None:
        if progress.done and not running.cancelling():
            running.cancel()

    running = asyncio.create_task(
        run_plan(plan, Target(base_url=server.url), options, on_progress=cut)
    )
    found = await running
    assert [each.index for each in found.answered] == [0]
    assert found.num_unfinished == 2
    assert found.health.num_processes == 1
    assert found.health.cpu_share > 0  # its client has told of itself
    assert "cut short: 1 of 3 requests had ended" in found.health.why_not[0]


async def test_a_key_that_is_wrong_is_said_before_the_run() -> None:
    with scripted_server("--api-key", "right") as guarded:
        plan = [request(0, [1])]
        with pytest.raises(PeerError, match="bad key"):
            await run_plan(plan, Target(base_url=guarded.url, model="m", api_key="wrong"))
        found = await run_plan(plan, Target(base_url=guarded.url, model="m", api_key="right"))
        assert found.outcomes[0].is_good


async def test_nobody_at_the_url_is_said_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(PeerError, match=r"does not answer.*--ready-check-timeout-sec"):
        await run_plan([request(0, [1])], Target(base_url=url, model="m"))


async def test_token_ids_for_chat_are_refused_before_anything_is_sent() -> None:
    target = Target(base_url="http://127.0.0.1:9", endpoint=ApiEndpoint.CHAT, model="m")
    with pytest.raises(ConfigError, match="token ids"):
        await run_plan([request(0, [1, 2])], target)


async def test_a_plan_without_due_times_is_refused() -> None:
    with pytest.raises(ConfigError, match="no due time"):
        await run_plan(
            [request(0, [1], at_s=None)], Target(base_url="http://127.0.0.1:9", model="m")
        )


async def test_a_client_that_dies_ends_the_run(server: ScriptedServer) -> None:
    with pytest.raises(RuntimeError, match="a client process ended"):
        await run_plan(
            [request(0, [1])],
            Target(base_url=server.url),
            Options(num_processes=1),
            environ={"PYTHONPATH": "/nonexistent", "PYTHONHOME": "/nonexistent"},
        )


def test_a_run_is_the_same_after_it_was_saved(server: ScriptedServer, tmp_path: Any) -> None:
    from pdserve.bench.figures import figures
    from pdserve.bench.files import load, save

    found = asyncio.run(run(server, [request(0, script(gaps_s=[0.01]))]))
    path = tmp_path / "deep" / "run.json"
    save(found, figures(found), path)
    loaded, kept = load(path)
    assert loaded == found
    assert kept == json.loads(json.dumps(figures(found)))
