from __future__ import annotations

import asyncio
import json
import logging
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

import pdserve
from pdserve.config.schema import CacheConfig
from pdserve.connectors.side_channel.frames import Fault
from pdserve.observe.vllm_series import VLLM_SERIES, SeriesScope
from pdserve.server.metrics import KV_FAULTS, ServerMetrics
from pdserve.wire.request import EngineStats
from pdserve.wire.transfer import LoadFailure
from tests.cli.process import ROOT
from tests.server.conftest import make_engine, scripted, serving, until

FROM_THE_START = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_by_source_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:request_queue_time_seconds_count",
    "vllm:request_prefill_time_seconds_count",
    "vllm:request_decode_time_seconds_count",
    "vllm:request_prompt_tokens_count",
    "vllm:request_generation_tokens_count",
    "pdserve_stage_duration_seconds_count",
    "pdserve_kv_blocks",
    "pdserve_kv_transfer_seconds_count",
    "pdserve_kv_transfer_wait_seconds_count",
    "pdserve_kv_transfer_bytes_total",
    "pdserve_kv_transfer_descriptors_total",
    "pdserve_kv_transfer_failures_total",
    "pdserve_kv_lease_expired_total",
    "pdserve_kv_loads_total",
    "pdserve_kv_ladder_total",
    "pdserve_recompute_tokens_total",
    "pdserve_grammar_rows_sat_out_total",
    "vllm:tool_call_parser_invocations_total",
    "pdserve_kv_digest_seconds_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:external_prefix_cache_hits_total",
    "pdserve_kv_tier_loaded_bytes_total",
    "pdserve_kv_tier_load_seconds_total",
    "pdserve_kv_tier_saved_bytes_total",
    "pdserve_kv_tier_save_seconds_total",
    "pdserve_kv_tier_dropped_saves_total",
    "pdserve_kv_tier_refused_saves_total",
    "pdserve_kv_tier_digest_mismatches_total",
    "pdserve_kv_tier_lookup_timeouts_total",
    "pdserve_kv_tier_server_up",
    "pdserve_kv_events_published_total",
    "pdserve_kv_events_dropped_total",
    "pdserve_kv_events_queued",
    "pdserve_client_disconnects_total",
    "pdserve_event_loop_lag_seconds_count",
}


async def scrape(server) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    status, exposition = await server.get("/metrics")
    assert status == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
    }


def named(samples, name: str, **labels: str) -> float:
    """The one sample of a name with these labels among its own."""
    [value] = [
        value
        for (sample, own), value in samples.items()
        if sample == name and labels.items() <= dict(own).items()
    ]
    return value


async def test_a_ready_engine_is_healthy_live_and_ready(server):
    assert await server.get("/health") == (200, "")
    assert (await server.get("/livez"))[0] == 200
    assert (await server.get("/readyz"))[0] == 200


async def test_an_engine_that_starts_is_live_but_not_ready(text):
    engine = make_engine(text, ready=False)
    async with serving(text, engine) as server:
        assert (await server.get("/livez"))[0] == 200
        assert (await server.get("/readyz")) == (503, "the engine is starting\n")
        assert (await server.get("/health"))[0] == 503
        engine.become_ready()
        assert (await server.get("/readyz"))[0] == 200


async def test_a_dead_engine_is_live_but_not_ready_and_says_why(server):
    server.engine.die("out of luck")
    assert (await server.get("/livez"))[0] == 200
    status, reason = await server.get("/readyz")
    assert status == 503
    assert "out of luck" in reason


async def test_models_are_listed_with_root_and_length(server):
    _, body = await server.get("/v1/models")
    [model] = json.loads(body)["data"]
    assert (model["id"], model["root"], model["max_model_len"]) == ("tiny", "tiny", 2048)


async def test_every_name_is_answered_under_the_first(text):
    """As vLLM does, and as it documents --served-model-name."""
    async with serving(text, make_engine(text), served_model_name=("org/tiny", "t")) as server:
        for name in ("org/tiny", "t"):
            answer = await server.ok("/v1/completions", {"prompt": "The", "model": name})
            assert answer["model"] == "org/tiny"


async def test_load_is_the_number_of_requests_that_run_in_vllms_shape(text):
    async with serving(text, make_engine(text, step_s=0.2)) as server:
        assert json.loads((await server.get("/load"))[1]) == {"server_load": 0}
        request = asyncio.create_task(server.ok("/v1/completions", {"prompt": "The"}))
        await until(lambda: bool(server.engine.running))
        assert json.loads((await server.get("/load"))[1]) == {"server_load": 1}
        request.cancel()
        await until(lambda: not server.service.text_requests)
        assert json.loads((await server.get("/load"))[1]) == {"server_load": 0}


async def test_one_model_can_be_asked_for(text):
    async with serving(text, make_engine(text), served_model_name=("org/tiny", "t")) as server:
        for name in ("org/tiny", "t"):
            status, body = await server.get(f"/v1/models/{name}")
            assert status == 200
            assert json.loads(body)["id"] == name
            assert json.loads(body) in json.loads((await server.get("/v1/models"))[1])["data"]
        status, body = await server.get("/v1/models/tiny")
    assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")


@pytest.mark.slow
async def test_traffic_adds_no_series(server):
    before = (await scrape(server)).keys()
    for path, body in (
        ("/v1/completions", {"prompt": "The", "n": 2}),
        ("/v1/completions", {"prompt": "The", "stream": True}),
        ("/v1/completions", {"prompt": "The", "model": "other", "user": "somebody"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/nothing", {}),
    ):
        async with server.session.post(server.url + path, json=body) as response:
            await response.read()
    assert (await scrape(server)).keys() == before


async def test_every_engine_core_has_series_of_its_own():
    stats = EngineStats(num_running=3, num_waiting=2, num_receiving=1, generation_tokens=7)
    client = SimpleNamespace(core_stats=[None, stats], stats=stats, info=None)
    metrics = ServerMetrics("m", cast(Any, client), CacheConfig())
    metrics.of_core[1].first_token(0.5)
    lines = (await metrics.render()).decode().splitlines()
    for series, *values in (
        ('num_requests_running{engine="%",model_name="m"}', 0, 3),
        ('num_requests_waiting{engine="%",model_name="m"}', 0, 3),
        ('num_requests_waiting_by_reason{engine="%",model_name="m",reason="capacity"}', 0, 2),
        ('num_requests_waiting_by_reason{engine="%",model_name="m",reason="deferred"}', 0, 1),
        ('generation_tokens_total{engine="%",model_name="m"}', 0, 7),
        ('time_to_first_token_seconds_count{engine="%",model_name="m"}', 0, 1),
    ):
        for core, value in enumerate(values):
            assert f"vllm:{series.replace('%', str(core))} {value:.1f}" in lines


async def test_every_series_of_vllms_that_is_here_is_there_and_no_other(server):
    names = {name for name, _ in await scrape(server) if name.startswith("vllm:")}
    bare = {re.sub(r"_(?:bucket|sum|count|total)$", "", name) for name in names}
    bare |= names  # one name of vLLM's ends in _total by itself
    here = {
        each.name
        for each in VLLM_SERIES
        if each.scope in (SeriesScope.SUMMED, SeriesScope.OBSERVED, SeriesScope.SERVED)
    }
    assert here <= bare
    own = {name.removesuffix("_total") for name in here}
    assert {
        re.sub(r"_(?:bucket|sum|count)$", "", name).removesuffix("_total") for name in names
    } <= own


async def test_steps_are_counted_by_their_tokens(text):
    async with serving(text, scripted(text, "a dog")) as server:
        await server.ok("/v1/completions", {"prompt": "The", "max_tokens": 4})
        samples = await scrape(server)
    num_steps = named(samples, "vllm:iteration_tokens_total_count")
    assert num_steps >= 2
    assert named(samples, "vllm:iteration_tokens_total_sum") >= num_steps
    assert named(samples, "vllm:iteration_tokens_total_bucket", le="1.0") >= 1


async def test_http_requests_are_counted_by_path_method_and_status(server):
    await server.ok("/v1/completions", {"prompt": "The", "max_tokens": 1})
    await server.refused("/v1/completions", {"prompt": 3})
    async with server.session.request("PATCH", server.url + "/pot") as response:
        assert response.status == 404
    samples = await scrape(server)
    post = {"handler": "/v1/completions", "method": "POST"}
    assert named(samples, "http_requests_total", status="2xx", **post) == 1
    assert named(samples, "http_requests_total", status="4xx", **post) == 1
    assert named(samples, "http_request_duration_seconds_count", **post) == 2
    assert named(samples, "http_requests_total", status="4xx", handler="none", method="other") == 1
    assert not any(dict(labels).get("handler") == "/metrics" for _, labels in samples)


async def test_the_version_is_the_packages(server):
    _, body = await server.get("/version")
    assert json.loads(body) == {"version": pdserve.__version__}


async def test_the_prefix_cache_is_reset_and_the_answer_is_empty_as_vllms(server):
    url = server.url + "/reset_prefix_cache?reset_external=false"
    async with server.session.post(url) as response:
        assert (response.status, await response.read()) == (200, b"")
    assert server.engine.num_prefix_cache_resets == 1


@pytest.mark.parametrize("name", ["reset_running_requests", "reset_external"])
async def test_a_reset_that_is_not_supported_is_refused_by_name(server, name):
    status, error = await server.refused(f"/reset_prefix_cache?{name}=true", {})
    assert (status, error["param"]) == (400, name)
    assert server.engine.num_prefix_cache_resets == 0


async def test_nothing_is_reset_before_the_engine_is_ready(text):
    engine = make_engine(text, ready=False)
    async with serving(text, engine) as server:
        assert (await server.refused("/reset_prefix_cache", {}))[0] == 503
    assert engine.num_prefix_cache_resets == 0


async def test_a_reset_wants_the_api_key(text):
    async with serving(text, make_engine(text), api_keys=("k",)) as server:
        assert (await server.refused("/reset_prefix_cache", {}))[0] == 401
        assert server.engine.num_prefix_cache_resets == 0
        headers = {"Authorization": "Bearer k"}
        async with server.session.post(server.url + "/reset_prefix_cache", headers=headers) as got:
            assert got.status == 200
    assert server.engine.num_prefix_cache_resets == 1


async def test_tokenize_and_detokenize_are_each_others_inverse(server):
    answer = await server.ok("/tokenize", {"prompt": "The dog 🙂", "return_token_strs": True})
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2048
    back = await server.ok("/detokenize", {"tokens": answer["tokens"]})
    assert back == {"prompt": "The dog 🙂"}


async def test_tokenize_renders_messages_as_chat_does(server):
    messages = [{"role": "user", "content": "hi"}]
    answer = await server.ok("/tokenize", {"messages": messages})
    assert answer["token_strs"] is None
    await server.ok("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert server.engine.requests[0].prompt_token_ids == answer["tokens"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [100000]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
async def test_a_wrong_field_is_named(server, path, body, field):
    status, error = await server.refused(path, body)
    assert (status, error["param"]) == (400, field)


async def test_a_long_prompt_is_tokenized_off_the_loop_with_the_same_result(server, text):
    prompt = "The lazy dog. " * 5000
    answer = await server.ok("/tokenize", {"prompt": prompt})
    assert answer["tokens"] == text.tokenizer.encode(prompt)


async def test_every_series_is_there_from_the_start(text):
    async with serving(text, make_engine(text, ready=False)) as server:
        samples = await scrape(server)
    assert {name for name, _ in samples} >= FROM_THE_START
    assert all(
        value == 0
        for (name, _), value in samples.items()
        if name.endswith(("_total", "_count", "_sum"))
        if "event_loop_lag" not in name and not name.startswith(("process_", "python_"))
    )
    for failure in LoadFailure:
        assert named(samples, "pdserve_kv_transfer_failures_total", reason=failure.value) == 0
    for fault in KV_FAULTS:
        assert named(samples, "pdserve_kv_transfer_faults_total", fault=fault) == 0
    for state in ("free", "cached", "held", "leased", "receiving"):
        assert named(samples, "pdserve_kv_blocks", state=state) == 0


def test_every_fault_that_is_counted_between_processes_has_a_series():
    counted = {f"frame_{fault.value}" for fault in Fault}
    literal = re.compile(r"""faults(?:\[|=\{)"(\w+)\"""")
    for folder in ("connectors", "pdserve/scheduler", "pdserve/engine", "pdserve/executor"):
        for path in (ROOT / folder).rglob("*.py"):
            if not {"memory", "conformance"}.intersection(path.parts):
                counted.update(literal.findall(path.read_text()))
    assert counted == set(KV_FAULTS)


async def test_a_request_is_counted_once_everywhere(text):
    async with serving(text, scripted(text, "a dog")) as server:
        answer = await server.ok("/v1/completions", {"prompt": "The"})
        samples = await scrape(server)
    num_output = answer["usage"]["completion_tokens"]
    assert named(samples, "vllm:request_success_total", finished_reason="stop") == 1
    assert named(samples, "vllm:time_to_first_token_seconds_count") == 1
    assert named(samples, "vllm:inter_token_latency_seconds_count") == num_output - 1
    assert named(samples, "vllm:request_generation_tokens_sum") == num_output
    assert named(samples, "vllm:request_prompt_tokens_sum") == answer["usage"]["prompt_tokens"]
    for parameter in ("params_n", "params_max_tokens", "num_preemptions", "inference_time_seconds"):
        assert named(samples, f"vllm:request_{parameter}_count") == 1
    assert named(samples, "vllm:request_max_num_generation_tokens_sum") == num_output
    assert named(samples, "vllm:request_prefill_kv_computed_tokens_sum") == 1
    assert named(samples, "vllm:request_time_per_output_token_seconds_count") == 1
    assert named(samples, "vllm:prompt_tokens_by_source_total", source="local_compute") == 1


async def test_a_prompt_of_several_choices_is_computed_as_often_as_it_was(text):
    body = {"prompt": list(range(3, 43)), "n": 3, "max_tokens": 4}
    async with serving(text, make_engine(text, max_num_seqs=1)) as server:
        await server.ok("/v1/completions", body)
        samples = await scrape(server)
    computed = named(samples, "vllm:prompt_tokens_by_source_total", source="local_compute")
    assert computed < 3 * 40
    assert named(samples, "vllm:request_prefill_kv_computed_tokens_sum") == computed


async def test_the_stages_sum_to_the_time_to_the_first_token(text):
    async with serving(text, make_engine(text, prefill_s=0.02)) as server:
        for _ in range(3):
            await server.ok("/v1/completions", {"prompt": "The", "max_tokens": 2})
        samples = await scrape(server)
    stages = sum(
        value
        for (name, _), value in samples.items()
        if name == "pdserve_stage_duration_seconds_sum"
    )
    ttft_s = named(samples, "vllm:time_to_first_token_seconds_sum")
    assert stages == pytest.approx(ttft_s)
    assert ttft_s >= 0.06


async def test_an_error_is_counted_as_one(text):
    async with serving(text, make_engine(text, die_after=2)) as server:
        await server.stream("/v1/completions", {"prompt": "The"})
        samples = await scrape(server)
    assert named(samples, "vllm:request_success_total", finished_reason="error") == 1
    assert named(samples, "pdserve_client_disconnects_total", stage="decode") == 0


async def test_a_request_is_one_line_in_the_log(text, caplog):
    caplog.set_level(logging.INFO, logger="pdserve.requests")
    async with serving(text, scripted(text, "a dog", prefill_s=0.01)) as server:
        await server.ok("/v1/completions", {"prompt": "The"}, X_Request_Id="3f2a")
    [record] = [r for r in caplog.records if r.name == "pdserve.requests"]
    line = record.getMessage()
    found = re.fullmatch(
        r"req 3f2a ok status=200 endpoint=/v1/completions path=local model=tiny in=1 cached=0"
        r" out=\d total=[\d.]+ms ttft=([\d.]+)ms = server ([\d.]+)(?: \+ queue ([\d.]+))?"
        r" \+ prefill ([\d.]+)"
        r" \| itl p50 [\d.]+ max [\d.]+",
        line,
    )
    assert found, line
    ttft, *parts = (float(part or 0.0) for part in found.groups())
    assert sum(parts) == pytest.approx(ttft, abs=0.2)


@pytest.mark.parametrize("body", [{"prompt": "The", "n": 2}, {"prompt": ["The", "dog"]}])
async def test_several_choices_are_one_line(text, caplog, body):
    caplog.set_level(logging.INFO, logger="pdserve.requests")
    async with serving(text, scripted(text, "a dog")) as server:
        await server.ok("/v1/completions", body)
    assert len([r for r in caplog.records if r.name == "pdserve.requests"]) == 1


async def test_cached_tokens_are_known_as_soon_as_one_choice_has_a_token(text, caplog):
    caplog.set_level(logging.INFO, logger="pdserve.requests")
    engine = make_engine(text, num_cached_tokens=16, max_num_seqs=1, die_after=2)
    async with serving(text, engine) as server:
        await server.stream("/v1/completions", {"prompt": list(range(3, 43)), "n": 2})
    [record] = [r for r in caplog.records if r.name == "pdserve.requests"]
    assert " in=40 cached=16 out=2 " in record.getMessage()


async def test_a_stalled_engine_is_not_ready_and_says_why_until_it_goes_on(text) -> None:
    engine = make_engine(text)
    async with serving(text, engine) as server:
        engine.stall_reason = "the engine core is stopped, for 2 s"
        assert await server.get("/readyz") == (503, "the engine core is stopped, for 2 s\n")
        assert (await server.get("/health"))[0] == 503
        assert (await server.get("/livez"))[0] == 200
        engine.stall_reason = None
        assert (await server.get("/readyz"))[0] == 200
