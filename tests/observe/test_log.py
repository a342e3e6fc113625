from __future__ import annotations

import asyncio
import io
import logging

import pytest
from aiohttp import web

from pdserve.observe.log import MovedKV, configure_logging, log_event, request_line


@pytest.fixture
def stream():
    stream = io.StringIO()
    loggers = [logging.getLogger(name) for name in ("pdserve", "aiohttp.server")]
    before = [(each.handlers[:], each.filters[:], each.level, each.propagate) for each in loggers]
    configure_logging(stream)
    yield stream
    for each, values in zip(loggers, before, strict=True):
        each.handlers[:], each.filters[:], each.level, each.propagate = values


def test_an_event_is_fixed_text_and_fields(stream: io.StringIO):
    logger = logging.getLogger("pdserve.x")
    log_event(logger, "it happened", count=3, seconds=0.25, left_out=None, text='a "b"\n')
    assert stream.getvalue().endswith(
        'I pdserve.x it happened count=3 seconds=0.25 text="a \\"b\\"\\n"\n'
    )


def test_a_level_that_is_off_is_not_logged(stream: io.StringIO):
    log_event(logging.getLogger("pdserve.x"), "detail", level=logging.DEBUG)
    assert stream.getvalue() == ""


async def test_what_is_no_http_is_one_line_and_no_traceback(stream: io.StringIO):
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        reader, writer = await asyncio.open_connection(*runner.addresses[0])
        writer.write(b"GET / HTTP/1.1\r\nContent-Length: -5\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()
    finally:
        await runner.cleanup()
    [line] = stream.getvalue().splitlines()
    assert line.endswith("I aiohttp.server refused what is no HTTP request (BadHttpMessage)")


def test_what_a_handler_raises_keeps_its_traceback(stream: io.StringIO):
    try:
        raise RuntimeError("a fault of ours")
    except RuntimeError:
        logging.getLogger("aiohttp.server").exception("Error handling request")
    assert "Traceback" in stream.getvalue()


def test_a_requests_line_is_its_time_to_first_token_taken_apart():
    line = request_line(
        "3f2a",
        "ok",
        num_tokens=(512, 64),
        ttft_s=0.0481,
        stages={
            "queue": 0.0004,
            "prefill": 0.0319,
            "kv": 0.0063,
            "handover": 0.0022,
            "first_step": 0.0073,
        },
        kv=MovedKV(8_400_000, 0.0063),
        gaps_s=[0.006, 0.0061, 0.0098],
    )
    assert line == (
        "req 3f2a ok in=512 out=64 ttft=48.1ms = queue 0.4 + prefill 31.9 + kv 6.3 "
        "(8.4 MB, 1.3 GB/s) + handover 2.2 + first step 7.3 | itl p50 6.1 max 9.8"
    )


def test_a_request_without_a_token_has_no_times():
    line = request_line("a", "client_left", num_tokens=(3, 0), ttft_s=None, stages={})
    assert line == "req a client_left in=3 out=0"
