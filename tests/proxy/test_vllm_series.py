"""vLLM's series on the proxy: its clients' requests, and counts of engines that outlive these."""

from __future__ import annotations

import asyncio
import re

import msgspec
import pytest

from pdserve.config.schema import Role
from pdserve.observe.clock import ManualClock
from pdserve.observe.vllm_series import VLLM_SERIES, SeriesScope
from pdserve.proxy.backend import Backend, Breaker, Health
from pdserve.proxy.fitting import misfits
from pdserve.proxy.totals import Totals
from pdserve.wire.request import EngineInfo, EngineStats
from tests.board.vllm_names import BOARD_NAMES
from tests.proxy.conftest import until
from tests.proxy.scripted import PROMPT_TOKENS, ScriptedEngine

OF_ALL = '{engine="all",model_name="tiny"}'


def of(series: dict[str, float], name: str, **labels: str) -> float:
    """The sum of the series of a name with these labels among its own."""
    found = [
        value
        for key, value in series.items()
        if key.partition("{")[0] == f"vllm:{name}"
        and all(f'{label}="{wanted}"' in key for label, wanted in labels.items())
    ]
    assert found, f"no {name}{labels}"
    return sum(found)


@pytest.fixture
async def stack(make_stack):
    prefill, decode = ScriptedEngine("prefill"), ScriptedEngine("decode")
    prefill.stages = {
        "prompt_tokens": PROMPT_TOKENS,
        "computed_tokens": PROMPT_TOKENS - 2,
        "finish_reasons": ["handoff"],
        "max_tokens": 4,
        "ttft_s": 0.25,
    }
    decode.stages = {"finish_reasons": ["length"], "kv_bytes": 4096, "kv_transfer_s": 0.5}
    return await make_stack([prefill], [decode])


async def test_a_request_is_counted_once_although_two_engines_serve_it(stack):
    await stack.stream()
    told = await stack.metrics()
    assert of(told, "request_success_total", finished_reason="length") == 1
    assert of(told, "request_success_total") == 1
    assert of(told, "prompt_tokens_total") == PROMPT_TOKENS
    assert of(told, "generation_tokens_total") == 4
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_time_per_output_token_seconds",
        "request_params_n",
        "request_num_preemptions",
        "nixl_xfer_time_seconds",
    ):
        assert told[f"vllm:{name}_count{OF_ALL}"] == 1, name
    for name, total in (
        ("request_prompt_tokens", PROMPT_TOKENS),
        ("request_generation_tokens", 4),
        ("request_max_num_generation_tokens", 4),
        ("request_params_max_tokens", 4),
        ("request_prefill_kv_computed_tokens", PROMPT_TOKENS - 2),
        ("nixl_bytes_transferred", 4096),
        ("nixl_xfer_time_seconds", 0.5),
    ):
        assert told[f"vllm:{name}_sum{OF_ALL}"] == total, name
    # As many as there were reads: the last three tokens may come in one.
    assert 1 <= told[f"vllm:inter_token_latency_seconds_count{OF_ALL}"] <= 3


async def test_the_first_token_of_an_answer_in_one_piece_is_when_its_engine_had_it(make_stack):
    engine = ScriptedEngine("both")

    async def whole(call, request):
        answer = await engine.answer(call, request)
        body = answer.text.replace('"prefill_s": 0.001', '"prefill_s": 0.001, "ttft_s": 0.125')
        answer.text = body
        return answer

    engine.hook = whole
    stack = await make_stack(decode=[engine])
    async with stack.post() as response:
        assert response.status == 200
    told = await stack.metrics()
    ttft_s = told[f"vllm:time_to_first_token_seconds_sum{OF_ALL}"]
    assert 0.125 <= ttft_s < 0.125 + told[f"vllm:e2e_request_latency_seconds_sum{OF_ALL}"]


async def test_a_client_that_leaves_is_an_abort(make_stack):
    decode = ScriptedEngine("decode")
    decode.gate.clear()
    stack = await make_stack([ScriptedEngine("prefill")], [decode])
    running = asyncio.create_task(stack.stream())
    await until(lambda: len(decode.calls) == 1)
    running.cancel()
    await until(lambda: decode.ended["cancelled"] == 1)
    told = await stack.metrics()
    assert of(told, "request_success_total", finished_reason="abort") == 1
    assert of(told, "e2e_request_latency_seconds_count") == 0


async def test_tokens_of_a_stream_count_while_it_runs(make_stack):
    decode = ScriptedEngine("decode")
    decode.gate.clear()
    stack = await make_stack([ScriptedEngine("prefill")], [decode])
    running = asyncio.create_task(stack.stream())
    await until(lambda: len(decode.calls) == 1)
    await stack.until_stages("decode")
    told = await stack.metrics()
    assert of(told, "prompt_tokens_total") == PROMPT_TOKENS
    assert of(told, "generation_tokens_total") >= 1
    decode.gate.set()
    await running
    assert of(await stack.metrics(), "generation_tokens_total") == 4


async def test_what_the_engines_count_is_summed_by_role(make_stack):
    engines = [ScriptedEngine("decode"), ScriptedEngine("decode")]
    stack = await make_stack([ScriptedEngine("prefill")], engines)
    for number, engine in enumerate(engines, 1):
        engine.load |= {"num_running": number, "num_receiving": 1, "num_preemptions": number}

    async def settled() -> dict[str, float]:
        async with asyncio.timeout(30):
            while True:
                told = await stack.metrics()
                if of(told, "num_preemptions_total", engine="decode") == 3:
                    return told
                await asyncio.sleep(0.01)

    told = await settled()
    assert of(told, "num_requests_running", engine="decode") == 3
    assert of(told, "num_requests_waiting", engine="decode") == 2
    assert of(told, "num_requests_waiting_by_reason", reason="deferred", engine="decode") == 2
    assert of(told, "num_requests_running", engine="prefill") == 0
    assert of(told, "kv_cache_usage_perc", engine="decode") == pytest.approx(0.1)
    info = next(key for key in told if "cache_config_info" in key and 'engine="decode"' in key)
    assert 'num_gpu_blocks="200"' in info
    assert 'block_size="16"' in info


async def test_what_is_here_of_vllms_series_is_on_the_proxy_but_for_what_servers_alone_have(stack):
    names = {key.partition("{")[0] for key in await stack.metrics()}
    bare = names | {re.sub(r"_(?:bucket|sum|count|total)$", "", name) for name in names}
    here = {
        each.name
        for each in VLLM_SERIES
        if each.scope not in (SeriesScope.ABSENT, SeriesScope.SERVED)
        and not each.name.endswith("*")
    }
    assert here <= bare
    assert set(BOARD_NAMES) <= names


# --- the sums, without a proxy


def engine(role: Role = Role.DECODE, life: str = "") -> Backend:
    backend = Backend("http://e", role, True, Breaker(ManualClock(), 3, 1.0))
    backend.models = [{"id": "m"}]
    backend.health = Health.READY
    backend.snapshot = (life, EngineStats())
    return backend


def counted(totals: Totals, *backends: Backend) -> dict[tuple[str, ...], float]:
    totals.look(backends, ())
    return {
        (sample.name.removeprefix("vllm:"), *sorted(sample.labels.values())): sample.value
        for family in totals.collect()
        for sample in family.samples
        if "cache_config" not in sample.name
    }


def test_a_dead_engines_counts_stay_in_the_sums_and_its_gauges_do_not() -> None:
    totals, dies, lives = Totals(), engine(), engine()
    for backend in (dies, lives):
        totals.add(backend, EngineStats(num_preemptions=5, num_running=2))
    assert counted(totals, dies, lives)["num_requests_running", "decode", "m"] == 4
    dies.health = Health.UNREACHABLE
    assert counted(totals, dies, lives)["num_requests_running", "decode", "m"] == 2
    for there in ((dies, lives), (lives,), ()):
        assert counted(totals, *there)["num_preemptions_total", "decode", "m"] == 10


def test_a_new_life_of_an_engine_begins_at_zero() -> None:
    totals, backend = Totals(), engine()
    totals.add(backend, EngineStats(num_preemptions=5))
    backend.snapshot = ("another", EngineStats(num_preemptions=5))
    totals.add(backend, EngineStats(num_preemptions=1))
    totals.add(backend, EngineStats(num_preemptions=3))
    assert counted(totals, backend)["num_preemptions_total", "decode", "m"] == 5 + 2


def test_an_engine_that_has_another_role_than_before_is_left_out_until_it_is_asked() -> None:
    totals, backend = Totals(), engine()
    totals.add(backend, EngineStats(num_preemptions=5))
    backend.role = Role.PREFILL
    assert counted(totals, backend)["num_preemptions_total", "decode", "m"] == 5
    totals.add(backend, EngineStats(num_preemptions=7))
    assert counted(totals, backend)["num_preemptions_total", "m", "prefill"] == 2


def test_what_an_engine_counted_before_the_proxy_began_is_not_the_proxys() -> None:
    totals, backend = Totals(), engine()
    backend.snapshot = None
    totals.add(backend, EngineStats(num_preemptions=1000))
    totals.add(backend, EngineStats(num_preemptions=1001))
    assert counted(totals, backend)["num_preemptions_total", "decode", "m"] == 1


def test_an_engine_that_begins_again_without_saying_so_takes_nothing_away() -> None:
    totals, backend = Totals(), engine()
    for number in (5, 1, 2):
        totals.add(backend, EngineStats(num_preemptions=number))
    assert counted(totals, backend)["num_preemptions_total", "decode", "m"] == 5 + 1


def test_an_older_count_that_comes_late_does_not_count_what_followed_it_twice() -> None:
    totals, backend = Totals(), engine(life="life-1")
    backend.info = msgspec.convert(ScriptedEngine("decode").info(), EngineInfo)
    for number in (0, 9, 5, 10):  # two checks ran at once
        totals.add(backend, EngineStats(num_preemptions=number, num_steps=number))
    assert counted(totals, backend)["num_preemptions_total", "decode", "m"] == 10


def test_an_engine_that_two_urls_lead_to_counts_once_and_is_named() -> None:
    totals, one, other = Totals(), engine(life="life-1"), engine(life="life-1")
    one.info = other.info = msgspec.convert(ScriptedEngine("decode").info(), EngineInfo)
    for number, backend in enumerate((one, other, one, other)):
        stats = EngineStats(num_preemptions=number, num_steps=number, num_running=2)
        totals.add(backend, stats)
    told = counted(totals, one, other)
    assert told["num_preemptions_total", "decode", "m"] == 3
    assert told["num_requests_running", "decode", "m"] == 2
    assert [found.event for found in misfits(one, other)] == ["two URLs lead to one engine"]


def test_steps_of_several_engines_are_one_histogram() -> None:
    totals, one, other = Totals(), engine(), engine()
    totals.add(one, EngineStats(steps_by_tokens=[1, *[0] * 12, 2], num_step_tokens=40001))
    totals.add(other, EngineStats(steps_by_tokens=[3, *[0] * 13], num_step_tokens=3))
    told = counted(totals, one, other)
    assert told["iteration_tokens_total_sum", "decode", "m"] == 40004
    assert told["iteration_tokens_total_count", "decode", "m"] == 6
    assert told["iteration_tokens_total_bucket", "1.0", "decode", "m"] == 4
