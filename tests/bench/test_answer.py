from __future__ import annotations

import json
from typing import Any

from pdserve.bench.answer import Answer, error_of


def fed(*events: Any, done: bool = True) -> Answer:
    """An answer to whose n-th event (from 0) came at n seconds."""
    answer = Answer()
    for at_s, event in enumerate(events):
        answer.feed(f"data: {json.dumps(event)}\n\n".encode(), float(at_s))
    if done:
        answer.feed(b"data: [DONE]\n\n", 99.0)
    answer.finish()
    return answer


def text(value: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": value, "finish_reason": finish, **more}]}


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": fields, "finish_reason": finish}]}


def usage(num_in: int, num_out: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": num_in, "completion_tokens": num_out}}


def test_a_chunk_with_the_role_alone_is_no_token() -> None:
    answer = fed(
        delta(role="assistant", content=""), delta(content="a"), delta("stop", content="b")
    )
    assert answer.chunk_s == [1.0, 2.0]
    assert (answer.text, answer.finish_reason, answer.error) == ("ab", "stop", "")


def test_a_role_that_comes_with_text_is_a_token() -> None:
    assert fed(delta(role="assistant", content="a"), delta("stop")).chunk_s == [0.0]


def test_reasoning_and_tool_calls_are_tokens() -> None:
    answer = fed(
        delta(role="assistant"),
        delta(reasoning_content="hm"),
        delta(tool_calls=[{"index": 0}]),
        delta("tool_calls"),
    )
    assert answer.chunk_s == [1.0, 2.0]


def test_a_chunk_without_text_is_a_token_if_nothing_else_explains_it() -> None:
    assert fed(text("a"), text(""), text("b", "length")).chunk_s == [0.0, 1.0, 2.0]


def test_a_bare_finish_reason_is_no_token() -> None:
    assert fed(text("a"), text("b"), text("", "stop"), usage(3, 2)).chunk_s == [0.0, 1.0]


def test_a_bare_finish_reason_is_the_token_that_the_servers_count_has_more() -> None:
    answer = fed(text("a"), text("b"), text("", "stop"), usage(3, 3))
    assert answer.chunk_s == [0.0, 1.0, 2.0]
    assert answer.usage == (3, 3)


def test_an_answer_of_an_end_alone_has_its_token_then() -> None:
    assert fed(text("", "stop"), usage(3, 1)).chunk_s == [0.0]
    assert fed(text("", "stop")).chunk_s == [0.0]


def test_an_answer_without_any_token_is_an_error() -> None:
    assert fed(text("", "stop"), usage(3, 0)).error == "the answer has no token"


def test_tokens_of_a_chunk_are_counted_by_their_ids() -> None:
    answer = fed(text("ab", token_ids=[5, 6]), text("c", "length", token_ids=[7]))
    assert answer.chunk_tokens == [2, 1]
    assert answer.token_ids == [5, 6, 7]


def test_tokens_of_a_chunk_are_counted_by_a_count_that_goes_on() -> None:
    first = {**text("ab"), "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    second = {**text("cde", "length"), "usage": {"prompt_tokens": 3, "completion_tokens": 5}}
    assert fed(first, second).chunk_tokens == [2, 3]


def test_a_count_that_comes_with_the_last_chunk_alone_is_of_all_chunks() -> None:
    last = {**text("d", "length"), "usage": {"prompt_tokens": 3, "completion_tokens": 3}}
    assert fed(text("a"), text("b"), last).chunk_tokens == [1, 1, 1]


def test_tokens_are_ones_where_nobody_counts_them() -> None:
    assert fed(text("abc"), text("d", "length"), usage(3, 9)).chunk_tokens == [1, 1]


def test_cached_tokens_are_those_that_the_usage_tells() -> None:
    told = usage(9, 1)
    told["usage"]["prompt_tokens_details"] = {"cached_tokens": 6}
    assert fed(text("a", "stop"), told).num_cached_tokens == 6
    assert fed(text("a", "stop"), usage(9, 1)).num_cached_tokens is None


def test_an_error_event_is_an_error_though_tokens_came() -> None:
    answer = fed(text("a"), {"error": {"message": "out of memory"}})
    assert answer.error == "out of memory"
    assert answer.chunk_s == [0.0]


def test_an_error_event_of_another_shape_is_an_error() -> None:
    assert fed({"object": "error", "message": "no", "code": 500}).error == "no"
    assert fed({"error": "no"}).error == "no"


def test_an_answer_that_ends_without_a_reason_broke_off() -> None:
    assert "broke off" in fed(text("a"), done=False).error


def test_a_finish_reason_is_an_end_without_done() -> None:
    assert not fed(text("a", "stop"), done=False).error


def test_an_event_that_is_not_openais_is_an_error() -> None:
    assert "not as OpenAI's API has it" in fed({"choices": 7}).error
    answer = Answer()
    answer.feed(b'data: {"choices": [{"text": "\xff"}]}\n\n', 0.0)
    assert "not as OpenAI's API has it" in answer.error


def test_what_a_refusal_says_is_told() -> None:
    assert error_of(400, b'{"error": {"message": "too long"}}') == "HTTP 400: too long"
    assert error_of(502, b"Bad Gateway") == "HTTP 502: Bad Gateway"
    assert error_of(503, b"") == "HTTP 503"
    assert error_of(500, b'{"error": "\xff"}').startswith("HTTP 500: {")
    assert error_of(500, b"[" * 100_000).startswith("HTTP 500: [")
