"""JSON schemas of the keywords that are kept, and what an output of a schema must be."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import jsonschema
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from pdserve.text.grammar import GrammarCompiler

_NAMES = st.text("abcdefgh_", min_size=1, max_size=6)
_PATTERNS = ("^[a-z]{1,4}$", "^(ab|cd)+$", "^[0-9]{3}-[A-F]*$", "^.{2,5}$")
_SMALL = st.integers(0, 4)


@st.composite
def _integers(draw: st.DrawFn) -> dict[str, Any]:
    low, size = draw(st.integers(-500, 500)), draw(st.integers(0, 1000))
    return draw(
        st.sampled_from(
            (
                {"type": "integer"},
                {"type": "integer", "minimum": low},
                {"type": "integer", "minimum": low, "maximum": low + size},
                {"type": "number", "exclusiveMinimum": low, "maximum": low + size + 1},
                {"type": "number"},
            )
        )
    )


@st.composite
def _strings(draw: st.DrawFn) -> dict[str, Any]:
    shortest = draw(_SMALL)
    return draw(
        st.sampled_from(
            (
                {"type": "string"},
                {"type": "string", "minLength": shortest, "maxLength": shortest + draw(_SMALL)},
                {"type": "string", "pattern": draw(st.sampled_from(_PATTERNS))},
                {"type": "string", "format": draw(st.sampled_from(("date", "uuid", "time")))},
            )
        )
    )


@st.composite
def _arrays(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    fewest = draw(st.integers(0, 2))
    schema = {"type": "array", "items": draw(inner), "minItems": fewest}
    if draw(st.booleans()):
        schema["maxItems"] = fewest + draw(_SMALL)
    if draw(st.booleans()):
        schema["prefixItems"] = [draw(inner)]
    return schema


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(_NAMES, inner, max_size=4))
    names = sorted(properties)
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if names:
        schema["required"] = draw(st.lists(st.sampled_from(names), unique=True))
    others = draw(st.sampled_from((None, False, {"type": "boolean"})))
    if others is not None:
        schema["additionalProperties"] = others
    return schema


_TREE = {
    "type": "object",
    "properties": {"left": {"$ref": "#/$defs/tree"}, "value": {"type": "integer"}},
    "required": ["value"],
    "additionalProperties": False,
}
schemas = st.recursive(
    st.sampled_from(
        (
            {"type": "boolean"},
            {"type": "null"},
            {"const": {"a": [1, "x"]}},
            {"$ref": "#/$defs/tree"},
            {"$ref": "#/$defs/shared"},
        )
    )
    | st.lists(st.sampled_from((1, "a", None, True, [1], "\n")), min_size=1, unique_by=repr).map(
        lambda values: {"enum": values}
    )
    | _integers()
    | _strings(),
    lambda inner: (
        _arrays(inner)
        | _objects(inner)
        | st.lists(inner, min_size=1, max_size=3).map(lambda each: {"anyOf": each})
    ),
    max_leaves=8,
)


@st.composite
def _whole(draw: st.DrawFn) -> dict[str, Any]:
    shared = draw(_integers() | _strings())
    return {**draw(_objects(schemas)), "$defs": {"tree": _TREE, "shared": shared}}


def draw_schemas(number: int, *, first_seed: int = 0) -> list[dict[str, Any]]:
    """Return so many schemas, all different; the same for the same seed."""
    found: dict[str, dict[str, Any]] = {}
    for batch in itertools.count(first_seed):

        @seed(batch)
        @settings(
            max_examples=40,  # more of a seed are all alike
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(_whole())
        def take(schema: dict[str, Any]) -> None:
            found.setdefault(json.dumps(schema), schema)

        take()
        if len(found) >= number:
            return list(found.values())[:number]
    raise AssertionError


def why_wrong(
    schema: dict[str, Any], choice: dict[str, Any], compiler: GrammarCompiler
) -> str | None:
    """What is wrong with an output of `schema`; None if nothing is.

    Args:
        choice: Of an answer, with `token_ids`.
    """
    text = choice["text"]
    if choice["finish_reason"] == "length":  # it was going to be one
        grammar = json.dumps({"grammars": [{"json_schema": schema}]})
        is_begin = compiler.compile(grammar).consume_tokens(choice["token_ids"])
        return None if is_begin else f"{text!r} begins no output"
    if choice["finish_reason"] != "stop":
        return f"it ended by {choice['finish_reason']}"
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{str(error).splitlines()[0]} in {text!r}"
    return None
