"""What the proxy reads in bodies: of clients, who may write what they like, and of engines."""

from __future__ import annotations

import pytest

from pdserve.errors import BadRequestError
from pdserve.proxy.bodies import ClientBody, merged, stages_in, without_internals
from pdserve.proxy.errors import RefusedError, WorkerError, failure_in
from tests.proxy.handoffs import empty_handoff


def body(raw: bytes) -> ClientBody:
    return ClientBody(raw, created=1, fallback_seed=2)


@pytest.mark.parametrize("space", [b"", b" ", b"\n    ", b"\t \r\n"])
@pytest.mark.parametrize("prompts", [b'["a",%b"b"]', b"[[1],%b[2]]"])
def test_several_prompts_are_not_pushed_however_they_are_spaced(space, prompts):
    spaced = prompts.replace(b"[", b"[" + space) % space
    assert not body(b'{"prompt":%b}' % spaced).is_pushable


@pytest.mark.parametrize("prompt", [b'"a"', b"[1, 2]", b"[\n  1\n]", b'[\n  "a"\n]', b"[[ 1]]"])
def test_one_prompt_is_pushed_however_it_is_spaced(prompt):
    assert body(b'{"prompt":%b}' % prompt).is_pushable


@pytest.mark.parametrize("name", ["n", "max_tokens", "logprobs"])
@pytest.mark.parametrize("value", [b'"\xff"', b"1e999", b'["\xff", "a"]'])
def test_a_value_that_cannot_be_read_is_the_clients_mistake(name, value):
    with pytest.raises(BadRequestError) as refusal:
        body(b'{"%b":%b}' % (name.encode(), value))
    assert refusal.value.error_code == "invalid_json"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_body_in_another_encoding_is_refused_with_the_remedy(encoding):
    with pytest.raises(BadRequestError, match="send it in UTF-8, without a byte order mark"):
        body('{"prompt": "a"}'.encode(encoding))


@pytest.mark.parametrize("half", [rb"a\ud83d", rb"\uD83Dx", rb"\ude00", rb"\ud83d\ude00\ude00"])
def test_half_of_a_character_is_named(half):
    whole = rb"\\ud83d \ud83d\ude00"
    assert body(b'{"prompt": "%b"}' % whole).is_pushable
    with pytest.raises(BadRequestError, match=r"\\u[dD]\w{3} at byte \d+ is half of a character"):
        body(b'{"prompt": "%b", "model": "%b"}' % (whole, half))
    with pytest.raises(BadRequestError, match=r"\(byte \d+\)$"):
        body(b'{"prompt": "%b", "stream": ja}' % whole)


ODD = [
    b"\xff",
    b'{"\xff":1}',
    b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"pdserve_handoff":{"pdserve":{"handoffs":["\xff"]}}}',
    '{"pdserve_handoff":{"pdserve":{"handoffs":["é"]}}}'.encode(),
    b'{"pdserve_handoff":{"pdserve":5}}',
]


@pytest.mark.parametrize("answer", ODD)
def test_an_odd_answer_is_its_engines_failure(answer):
    marked = answer.replace(b"{", b'{"pdserve_handoff":1,', 1) if b"pd" not in answer else answer
    with pytest.raises(WorkerError) as failure:
        empty_handoff("http://engine").read(marked or b'"pdserve_handoff"')
        without_internals(answer)
    assert failure.value.reason == "garbled"


@pytest.mark.parametrize("answer", ODD)
def test_an_odd_refusal_is_still_a_refusal(answer):
    failure = failure_in("http://engine", 400, answer, retry_after=None, load_failures=None)
    assert isinstance(failure, RefusedError)
    assert failure.body.startswith(b'{"error":')


@pytest.mark.parametrize("inner", [b"5", b'{"x":"\xff"}', b"[" * 5000, b'{"queue_s":"soon"}'])
def test_odd_measurements_are_none(inner):
    assert stages_in(b'{"pdserve_stages":%b,"\xff":1}' % inner) is None


@pytest.mark.parametrize("prefilled", [b"[]", b'{"choices":[5]}', b'{"choices":5}', b"\xff"])
def test_answers_that_cannot_be_joined_are_an_engines_failure(prefilled):
    with pytest.raises(WorkerError):
        merged(prefilled, b'{"choices":[]}')
