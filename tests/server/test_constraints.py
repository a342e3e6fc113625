"""What outputs must be: fields to grammars, and what of them is refused, in words and in time."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import BadRequestError, OverloadedError
from pdserve.server import constraints
from pdserve.server.constraints import GrammarChecks
from pdserve.server.sampling import Wanted
from pdserve.text.grammar import GrammarCompiler

if TYPE_CHECKING:
    from tests.server.conftest import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"prompt": "Once upon", "max_tokens": 3}
MESSAGES = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def takes(server: Server, text: str, output: str) -> bool:
    """Whether a grammar takes `output` as a whole one."""
    assert server.service.text is not None
    matcher = GrammarCompiler(server.service.text).compile(text)
    tokenizer = server.service.text.tokenizer
    tokens = tokenizer.encode(output, add_special_tokens=False)
    return bool(matcher.consume_tokens(tokens)) and matcher.is_accepting()


SAME = {
    "an object": (
        '{"a": [1]}',
        "[1]",
        [
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"json_object": True}},
        ],
    ),
    "a schema": (
        '{"a": 12}',
        '{"a": "12"}',
        [
            {"response_format": schema_format(SCHEMA)},
            {"structured_outputs": {"json": SCHEMA}},
            {"structured_outputs": {"json": json.dumps(SCHEMA)}},
            {"guided_json": SCHEMA},
            {"guided_json": json.dumps(SCHEMA)},
        ],
    ),
    "tight JSON": (
        '{"a":12}',
        '{"a": 12}',
        [
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            {
                "response_format": schema_format(SCHEMA),
                "structured_outputs": {"disable_any_whitespace": True},
            },
        ],
    ),
    "JSON with spaces": (
        '{"a":  12}',
        '{"a":\n12}',
        [{"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " *"}}],
    ),
    "JSON spaced as people space it": (
        '{\n  "a": 12\n}',
        '{\n\n"a": 12}',
        [{"response_format": schema_format(SCHEMA)}],
    ),
    "a regular expression": (
        "ab-12",
        "ab-x",
        [{"structured_outputs": {"regex": "[a-c]+-[0-9]+"}}, {"guided_regex": "[a-c]+-[0-9]+"}],
    ),
    "a choice": (
        'no "é"/\n',
        "no",
        [
            {"structured_outputs": {"choice": ["yes", 'no "é"/\n']}},
            {"guided_choice": ["yes", 'no "é"/\n']},
        ],
    ),
    "Lark": (
        "1+2",
        "1+",
        [
            {"structured_outputs": {"grammar": 'start: N ("+" N)*\nN: /[0-9]+/'}},
            {"guided_grammar": 'start: N ("+" N)*\nN: /[0-9]+/'},
        ],
    ),
    "GBNF": ("1+2", "1+", [{"guided_grammar": 'root ::= n ("+" n)*\nn ::= [0-9]+'}]),
}


@pytest.mark.parametrize(("whole", "wrong", "bodies"), SAME.values(), ids=SAME)
async def test_a_constraint_is_the_same_grammar_in_all_its_spellings(server, whole, wrong, bodies):
    texts = []
    for fields in bodies:
        for path, body in ((COMPLETIONS, PROMPT), (CHAT, MESSAGES)):
            await server.ok(path, body | fields)
            (request,) = server.engine.requests[-1:]
            texts.append(request.sampling.grammar.text)
    assert takes(server, texts[0], whole)
    assert not takes(server, texts[0], wrong)
    assert len(set(texts)) == 1


async def test_a_format_of_text_constrains_nothing(server):
    await server.ok(CHAT, MESSAGES | {"response_format": {"type": "text"}})
    assert server.engine.requests[-1].sampling.grammar is None


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format", "'xml'"),
        ({"response_format": {}}, "response_format", "type"),
        ({"response_format": "json"}, "response_format", "object"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "structural_tag"),
        (
            {"response_format": schema_format({"type": "array", "uniqueItems": True})},
            "response_format",
            "uniqueItems",
        ),
        ({"response_format": schema_format([])}, "response_format", "list"),
        ({"guided_json": {"$ref": "http://example.com/schema"}}, "guided_json", "example.com"),
        ({"guided_json": {"$ref": "#/$defs/gone"}}, "guided_json", "/$defs/gone"),
        (
            {"guided_json": {"type": "object", "x-guidance": {"lenient": True}, "contains": {}}},
            "guided_json",
            "contains",
        ),
        (
            {"guided_json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
            "guided_json",
            "otherwise use anyOf",
        ),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": {"enum": []}}, "guided_json", "Unsatisfiable"),
        ({"guided_json": {"allOf": [{"$ref": "#"}]}}, "guided_json", "no output"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "no output"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-ahead"),
        ({"guided_regex": "("}, "guided_regex", "unclosed"),
        ({"guided_choice": []}, "guided_choice", "no choice"),
        ({"guided_choice": [1]}, "guided_choice", "str"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar", "Expected"),
        ({"guided_grammar": 'root ::= "a\\'}, "guided_grammar", "guided_grammar"),
        ({"guided_grammar": "root ::= " + "(" * 9000}, "guided_grammar", "recursion"),
        ({"guided_grammar": "start: gone"}, "guided_grammar", "gone"),
        ({"guided_grammar": "start: <|gone|>"}, "guided_grammar", "gone"),
        ({"structured_outputs": {}}, "structured_outputs", "is empty"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.choice",
            "two",
        ),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs",
            "spaced",
        ),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "structural_tag"),
        ({"structured_outputs": {"other": 1}}, "structured_outputs", "other"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "two"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
        ({"guided_regex": "a" * (1 << 18)}, "guided_regex", "bytes"),
        ({"guided_regex": "a" * 700_000}, "guided_regex", "bytes"),
        ({"guided_grammar": 'root ::= "' + "a" * (1 << 15) + '"'}, "guided_grammar", "characters"),
    ],
)
async def test_what_cannot_be_a_grammar_is_refused_with_its_field_and_the_reason(
    server, fields, param, named
):
    for path, body in ((COMPLETIONS, PROMPT), (CHAT, MESSAGES)):
        status, error = await server.refused(path, body | fields)
        assert (status, error["param"]) == (400, param)
        assert named in error["message"]
    assert not server.engine.requests


HOSTILE = {
    "deep": '{"type":"object","properties":{"a":' * 3000 + "{}" + "}}" * 3000,
    "chain": json.dumps(
        {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(6000)}}
    ),
    "properties": json.dumps(
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(6000)}}
    ),
    "products": json.dumps(
        {
            "allOf": [
                {"anyOf": [{"properties": {f"k{i}": {"const": j}}} for j in range(3)]}
                for i in range(20)
            ]
        }
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_schema_is_refused_within_a_second(server, schema):
    """Or within one of processor time, where the machine does something else meanwhile."""
    await server.ok(CHAT, MESSAGES | {"response_format": {"type": "json_object"}})
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    status, error = await server.refused(CHAT, MESSAGES | {"guided_json": schema})
    assert min(time.monotonic() - start_s, time.process_time() - start_cpu_s) < 1.2
    assert (status, error["param"]) == (400, "guided_json")


async def test_what_came_before_is_known_without_a_thread(server, monkeypatch):
    bodies = [{"guided_json": SCHEMA}, {"guided_json": {"type": "array", "uniqueItems": True}}]
    first = [await server.post(COMPLETIONS, PROMPT | body) for body in bodies]
    monkeypatch.setattr(server.service.grammar_checks, "_threads", None)
    again = [await server.post(COMPLETIONS, PROMPT | body) for body in bodies]
    assert [status for status, _ in again] == [status for status, _ in first] == [200, 400]
    assert again[1][1]["error"]["message"] == first[1][1]["error"]["message"]


async def test_what_another_engine_has_compiled_is_compiled_for_who_asks_here_first(text):
    checks = GrammarChecks(text)
    wanted = Wanted("guided_json", "json", {"type": "array", "uniqueItems": True})
    try:
        assert await checks.grammar_of(wanted, is_checked=True)
        with pytest.raises(BadRequestError, match="uniqueItems"):
            await checks.grammar_of(wanted, is_checked=False)
        with pytest.raises(BadRequestError, match="uniqueItems"):
            await checks.grammar_of(wanted, is_checked=True)  # it is known to be none
    finally:
        checks.close()


class AtOnce:
    """Threads that are done before anyone waits."""

    def submit(self, work):
        work()


async def test_a_grammar_that_is_there_is_used_however_late_the_loop_looks(text, monkeypatch):
    checks = GrammarChecks(text)
    checks.close()
    monkeypatch.setattr(checks, "_threads", AtOnce())
    monkeypatch.setattr(constraints, "TIMEOUT_S", 0.0)
    wanted = Wanted("guided_json", "json", SCHEMA)
    assert await checks.grammar_of(wanted, is_checked=True)


async def test_who_waits_too_long_for_others_grammars_is_told_to_come_again(text, monkeypatch):
    checks = GrammarChecks(text)
    others = threading.Event()
    try:
        for _ in range(constraints._NUM_THREADS):
            checks._threads.submit(others.wait)
        monkeypatch.setattr(constraints, "TIMEOUT_S", 0.01)
        with pytest.raises(OverloadedError, match="other requests"):
            await checks.grammar_of(Wanted("guided_json", "json", SCHEMA), is_checked=True)
    finally:
        others.set()
        checks.close()
