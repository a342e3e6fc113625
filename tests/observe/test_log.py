from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import warnings

import pytest
from aiohttp import web

from pdserve.config.log import LogConfig, LogFormat
from pdserve.observe.log import LogEvent, RepeatFilter, configure_logging, log_config, log_event
from tests.logs import unchanged_logging

JSON = LogConfig(format=LogFormat.JSON)


@pytest.fixture
def stream():
    stream = io.StringIO()
    with unchanged_logging():
        configure_logging(stream)
        yield stream


class Unprintable:
    """Nothing may look at it."""

    def __str__(self) -> str:
        raise AssertionError("it was formatted")


def happen() -> None:
    logger = logging.getLogger("pdserve.x")
    log_event(logger, "it happened", count=3, seconds=0.25, left_out=None, text='a "b"\n')


def test_an_event_is_a_date_a_level_fixed_text_and_fields(stream: io.StringIO):
    happen()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO pdserve\.x it happened "
        r'count=3 seconds=0\.25 text="a \\"b\\"\\n"\n',
        stream.getvalue(),
    )


@pytest.mark.parametrize("control", ["\x85", "\u2028", "\x9b", "\u202e"])
def test_no_field_ends_a_line_or_controls_a_terminal(stream: io.StringIO, control: str):
    log_event(logging.getLogger("pdserve.x"), "it happened", text=f"a{control}b", name="Zoë b")
    assert stream.getvalue().endswith(f'text="a\\u{ord(control):04x}b" name="Zoë b"\n')


def test_times_are_utc_to_the_millisecond(stream: io.StringIO):
    record = logging.LogRecord("pdserve.x", logging.INFO, "", 0, "x", (), None)
    record.created = 1e9 + 0.0625
    logging.getLogger("pdserve").handle(record)
    assert stream.getvalue().startswith("2001-09-09T01:46:40.062Z ")


def test_as_json_an_event_has_the_same_keys(stream: io.StringIO):
    configure_logging(stream, JSON)
    happen()
    told = json.loads(stream.getvalue())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]{8}\.\d{3}Z", told.pop("time"))
    assert told == {
        "level": "INFO",
        "logger": "pdserve.x",
        "event": "it happened",
        "count": 3,
        "seconds": 0.25,
        "text": 'a "b"\n',
    }


def test_as_json_an_exception_is_inside_of_its_line(stream: io.StringIO):
    configure_logging(stream, JSON)
    try:
        raise RuntimeError("a fault of ours")
    except RuntimeError as error:
        log_event(logging.getLogger("pdserve.x"), "failed", level=logging.ERROR, exc_info=error)
    [line] = stream.getvalue().splitlines()
    told = json.loads(line)
    assert (told["level"], told["event"]) == ("ERROR", "failed")
    assert told["exception"].endswith("RuntimeError: a fault of ours")


def test_what_is_no_json_number_is_text(stream: io.StringIO):
    configure_logging(stream, JSON)
    log_event(logging.getLogger("pdserve.x"), "counted", share=float("nan"))
    assert json.loads(stream.getvalue())["share"] == "nan"


@pytest.mark.parametrize("name", ["aiohttp.server", "asyncio"])
def test_what_libraries_say_has_the_same_form(stream: io.StringIO, name: str):
    configure_logging(stream, JSON)
    logging.getLogger(name).error("it is %d", 3)
    assert json.loads(stream.getvalue())["event"] == "it is 3"


def test_a_warning_of_python_has_the_same_form(stream: io.StringIO):
    configure_logging(stream, JSON)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        configure_logging(stream, JSON)
        warnings.warn("mind this", stacklevel=1)
    assert "mind this" in json.loads(stream.getvalue())["event"]


def test_nothing_is_formatted_that_is_not_logged(stream: io.StringIO):
    configure_logging(stream, LogConfig(requests=False))
    log_event(logging.getLogger("pdserve.x"), "x", level=logging.DEBUG, field=Unprintable())
    logging.getLogger("pdserve.requests").info(LogEvent("request", {"field": Unprintable()}))
    logging.getLogger("pdserve.requests").warning(LogEvent("request", {}, "req a failed"))
    assert stream.getvalue().endswith("WARNING pdserve.requests req a failed\n")
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize("config", [JSON, LogConfig(level="error", requests=False, stats=False)])
def test_processes_that_are_started_log_as_their_parent(stream: io.StringIO, config: LogConfig):
    configure_logging(stream, config)
    assert log_config() == config


def test_without_a_configuration_they_log_from_the_level_of_their_parent(
    caplog: pytest.LogCaptureFixture,
):
    with unchanged_logging():
        logging.getLogger("pdserve").handlers.clear()
        caplog.set_level(logging.ERROR, "pdserve")
        assert log_config() == LogConfig(level="error")


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
    assert line.endswith("INFO aiohttp.server refused what is no HTTP request (BadHttpMessage)")


def test_what_a_handler_raises_keeps_its_traceback(stream: io.StringIO):
    try:
        raise RuntimeError("a fault of ours")
    except RuntimeError:
        logging.getLogger("aiohttp.server").exception("Error handling request")
    assert "Traceback" in stream.getvalue()


def test_messages_of_one_form_are_counted_between_two_that_are_logged() -> None:
    passes = RepeatFilter(60.0)

    def logged(at_s: float, form: str) -> str | None:
        record = logging.LogRecord("store", logging.WARNING, "", 0, form, (int(at_s),), None)
        record.created = at_s
        return record.getMessage() if passes.filter(record) else None

    times = [0.0, 1.0, 59.0, 60.0, 61.0, 130.0]
    assert [logged(at_s, "chunk %d is refused") for at_s in times] == [
        *("chunk 0 is refused", None, None, "chunk 60 is refused (2 more before)"),
        *(None, "chunk 130 is refused (1 more before)"),
    ]
    assert logged(131.0, "task %d is not known") == "task 131 is not known"
