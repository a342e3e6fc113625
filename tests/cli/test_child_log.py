"""What a supervisor makes of its children's lines."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging

import pytest

from pdserve.commands import child_log
from pdserve.config.log import LogFormat

TEXT = "2026-11-23T09:41:07.302Z WARNING pdserve.requests req a shed status=503"
RECORD = {
    "time": "2026-11-23T09:41:07.302Z",
    "level": "WARNING",
    "logger": "pdserve.requests",
    "event": "request",
    "request": "a",
}


def test_level_logger_and_request_are_read_from_either_form() -> None:
    text, record = child_log.read(TEXT), child_log.read(json.dumps(RECORD))
    for line in (text, record):
        assert (line.level, line.logger) == (logging.WARNING, "pdserve.requests")
    assert text.request == ("a", "shed status=503")
    assert record.request == ("a", json.dumps(RECORD))


@pytest.mark.parametrize("line", ["terminate called", "{not json", "[1]", '{"level": "INFO"}'])
def test_what_is_not_ours_has_no_level(line: str) -> None:
    told = child_log.read(line)
    assert (told.level, told.request) == (None, ("", ""))


def test_as_json_every_line_is_one_object_that_names_its_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for line in (json.dumps(RECORD), "terminate called"):
        child_log.show("decode", child_log.read(line), LogFormat.JSON, width=9)
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first == {"process": "decode", **RECORD}
    assert (second["process"], second["event"]) == ("decode", "terminate called")


def test_as_text_a_line_stands_behind_the_name(capsys: pytest.CaptureFixture[str]) -> None:
    child_log.show("decode", child_log.read(TEXT), LogFormat.TEXT, width=7)
    assert capsys.readouterr().err == f"decode  | {TEXT}\n"


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_line_for_which_there_is_no_room_is_lost() -> None:
    with contextlib.redirect_stderr(Full()):
        child_log.show("decode", child_log.read(TEXT), LogFormat.TEXT, width=7)
