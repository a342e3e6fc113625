"""The line per request: what stands in it, and at which level it is."""

from __future__ import annotations

import logging

import pytest

from pdserve.observe.request_log import (
    MAX_LINE_CHARS,
    MovedKV,
    StoredKV,
    fields_of,
    kv_path,
    log_request,
    times_of,
    with_line,
)
from pdserve.wire.finished import Finished

SERVED = Finished(
    request_id="3f2a",
    outcome="ok",
    status=200,
    path="/v1/completions",
    model="my model",
    kv_path="push",
    prompt_tokens=512,
    cached_tokens=128,
    output_tokens=64,
    total_ms=412.04,
    ttft_ms=33.2,
    ttft_terms={"prefill": 31.9},
    kv_mode="push",
    kv_bytes=99,
)
REFUSED = Finished(
    request_id="a",
    outcome="shed",
    status=503,
    reason="no_decode_available",
    stage="queued",
    path="/v1/completions",
)


def test_the_line_says_how_it_ended_what_was_asked_and_how_much_it_was() -> None:
    assert with_line(SERVED, " ttft=33.2ms").line == (
        'req 3f2a ok status=200 endpoint=/v1/completions path=push model="my model" '
        "in=512 cached=128 out=64 total=412.0ms ttft=33.2ms"
    )


def test_the_line_of_one_that_failed_says_why_and_where_and_leaves_out_what_nobody_knows() -> None:
    assert with_line(REFUSED, " | ladder shed(no_engine)").line == (
        "req a shed status=503 reason=no_decode_available stage=queued endpoint=/v1/completions "
        "out=0 total=0.0ms | ladder shed(no_engine)"
    )


def test_as_json_the_line_has_the_same_keys() -> None:
    told = {key: value for key, value in fields_of(SERVED).items() if value is not None}
    assert told == {
        "request": "3f2a",
        "outcome": "ok",
        "status": 200,
        "endpoint": "/v1/completions",
        "path": "push",
        "model": "my model",
        "in": 512,
        "cached": 128,
        "out": 64,
        "total_ms": 412.04,
        "ttft_ms": 33.2,
        "ttft_terms_ms": {"prefill": 31.9},
        "kv_bytes": 99,
    }


def test_a_name_of_any_length_makes_no_longer_line() -> None:
    ended = Finished(request_id="a", outcome="ok", status=200, path="/", model="x" * 5000)
    assert len(with_line(ended, "").line) == MAX_LINE_CHARS


@pytest.mark.parametrize(
    ("outcome", "status", "level"),
    [
        ("ok", 200, "INFO"),
        ("client_error", 400, "INFO"),
        ("shed", 429, "INFO"),
        ("disconnected", 499, "INFO"),
        ("shed", 503, "WARNING"),
        ("error", 502, "WARNING"),
        ("error", 200, "WARNING"),  # a stream that broke off
    ],
)
def test_what_a_server_failed_is_a_warning_and_what_a_client_did_is_not(
    caplog: pytest.LogCaptureFixture, outcome: str, status: int, level: str
) -> None:
    caplog.set_level(logging.INFO, "pdserve.requests")
    log_request(Finished(request_id="a", outcome=outcome, status=status, path="/", line="req a"))
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [(level, "req a")]


def test_a_path_says_what_a_store_had() -> None:
    assert kv_path("push", has_store=True) == "push+store"
    assert kv_path("local", has_store=False) == "local"
    assert kv_path("", has_store=False) == ""


def test_the_time_to_first_token_is_taken_apart() -> None:
    told = times_of(
        0.0481,
        {
            "queue": 0.0004,
            "prefill": 0.0319,
            "kv": 0.0063,
            "handover": 0.0022,
            "first_step": 0.0073,
        },
        num_prompt_tokens=4096,
        kv=MovedKV(8_400_000, 0.0063, store=StoredKV(3072, 21_000, 1e-5)),
        gaps_s=[0.006, 0.0061, 0.0098],
    )
    assert told == (
        " ttft=48.1ms = queue 0.4 + prefill 31.9 + kv 6.3 "
        "(8.4 MB, 1.3 GB/s) + handover 2.2 + first step 7.3 | itl p50 6.1 max 9.8"
        " | kv from store 3072 of 4096, 2.1 GB/s"
    )


def test_of_two_gaps_in_the_middle_the_line_has_the_longer_as_its_fields_do() -> None:
    gaps_s = [0.001, 0.004, 0.008, 0.009]
    told = times_of(None, {}, num_prompt_tokens=3, gaps_s=gaps_s)
    assert told == " | itl p50 8.0 max 9.0"


def test_a_request_without_a_token_has_no_times() -> None:
    assert times_of(None, {}, num_prompt_tokens=3) == ""
