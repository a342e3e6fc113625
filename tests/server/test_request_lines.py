"""The line of a request at an engine says how it ended, also if it never began."""

from __future__ import annotations

import logging

import pytest

from tests.server.conftest import make_engine, scripted, serving

COMPLETIONS = "/v1/completions"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "pdserve.requests")
    return lambda: [
        (each.levelname, each.getMessage())
        for each in caplog.records
        if each.name == "pdserve.requests"
    ]


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        (COMPLETIONS, ["no object"], 400, "invalid_value"),
        (COMPLETIONS, {"prompt": "x", "temperature": -1}, 400, "invalid_value"),
        (COMPLETIONS, {"prompt": "x", "model": "other"}, 404, "model_not_found"),
        (COMPLETIONS, {"prompt": [1] * 100_000}, 400, "context_length_exceeded"),
        ("/v1/nothing", {}, 404, "not_found"),
        ("/score", {"text_1": "x"}, 400, "invalid_value"),
    ],
)
async def test_a_refused_request_has_one_line_that_is_no_warning(
    text, lines, path, body, status, reason
):
    async with serving(text, make_engine(text)) as server:
        assert (await server.refused(path, body, X_Request_Id="3f2a"))[0] == status
    [(level, line)] = lines()
    assert level == "INFO"
    start = f"req 3f2a client_error status={status} reason={reason} endpoint={path} out=0 total="
    assert line.startswith(start), line


async def test_a_wrong_key_has_a_line(text, lines):
    async with serving(text, make_engine(text), api_keys=("k",)) as server:
        await server.refused(COMPLETIONS, {"prompt": "x"})
    [(level, line)] = lines()
    assert level == "INFO"
    assert " client_error status=401 reason=invalid_api_key " in line


async def test_an_engine_that_ends_is_a_warning_with_its_reason(text, lines):
    async with serving(text, make_engine(text, die_after=2)) as server:
        await server.stream(COMPLETIONS, {"prompt": "The"})
        await server.post(COMPLETIONS, {"prompt": "The"})
    [(_, first), (_, second)] = lines()
    assert [level for level, _ in lines()] == ["WARNING", "WARNING"]
    assert " error status=200 reason=engine_dead " in first  # its stream had begun
    assert " shed status=503 reason=engine_dead " in second


async def test_a_served_request_tells_its_model_its_path_and_its_sizes(text, lines):
    engine = scripted(text, "a dog")
    async with serving(text, engine, served_model_name=("mine", "other")) as server:
        await server.ok(COMPLETIONS, {"prompt": "The", "model": "other"})
    [(level, line)] = lines()
    assert level == "INFO"
    assert " ok status=200 endpoint=/v1/completions path=local model=mine in=1 cached=0 " in line


@pytest.mark.parametrize(
    ("max_tokens", "how"), [(1, " ok path=local"), (2, " handed_over path=pull")]
)
async def test_the_path_of_a_prefill_leg_says_whether_another_engine_goes_on(
    text, lines, max_tokens, how
):
    leg = {"do_remote_decode": True, "pdserve": {"final_length": True}}
    body = {"prompt": "The", "max_tokens": max_tokens, "kv_transfer_params": leg}
    async with serving(text, make_engine(text)) as server:
        await server.ok(COMPLETIONS, body)
    [(_, line)] = lines()
    assert how in line.replace(f" status=200 endpoint={COMPLETIONS}", "")
