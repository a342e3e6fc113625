"""What of JSON schemas is changed before they become grammars."""

from __future__ import annotations

import copy

import pytest

from pdserve.text.schemas import without_idle

TEXT = {"type": "string"}
MAP = {"type": "object", "additionalProperties": {"type": "boolean"}}
NAMED = MAP | {"propertyNames": TEXT}
LIST = {"type": "array"}
IDLE = LIST | {"uniqueItems": False}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (NAMED, MAP),
        (MAP | {"propertyNames": True}, MAP),
        (MAP | {"propertyNames": {"description": "an id"}}, MAP),
        ({"anyOf": [NAMED, {"type": "null"}]}, {"anyOf": [MAP, {"type": "null"}]}),
        ({"$defs": {"a": NAMED}, "$ref": "#/$defs/a"}, {"$defs": {"a": MAP}, "$ref": "#/$defs/a"}),
        ({"items": {"properties": {"x": IDLE}}}, {"items": {"properties": {"x": LIST}}}),
        ({"prefixItems": [IDLE], "items": False}, {"prefixItems": [LIST], "items": False}),
        ({"additionalProperties": {"not": IDLE}}, {"additionalProperties": {"not": LIST}}),
    ],
)
def test_keywords_that_exclude_nothing_are_left_out_wherever_there_are_schemas(given, kept) -> None:
    before = copy.deepcopy(given)
    assert without_idle(given) == kept
    assert given == before


@pytest.mark.parametrize(
    "given",
    [
        MAP | {"propertyNames": {"pattern": "^a"}},
        MAP | {"propertyNames": {"type": "string", "enum": ["a"]}},
        MAP | {"propertyNames": False},
        LIST | {"uniqueItems": True},
        {"properties": {"propertyNames": TEXT, "uniqueItems": TEXT}},
        {"enum": [NAMED, IDLE], "default": IDLE},
        {"properties": 3, "anyOf": "x", "items": None},
    ],
)
def test_what_excludes_something_or_is_no_keyword_stays(given) -> None:
    assert without_idle(given) == given
