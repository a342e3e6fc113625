"""Reads the types of a tool's parameters from its JSON Schema."""

from __future__ import annotations

_MAX_DEPTH = 8
_TYPES = ("object", "array", "number", "boolean", "null")


def types_of(schema: object, depth: int = 0) -> set[str]:
    """Return the JSON types that a schema or its alternatives name."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return set()
    given = schema.get("type")
    found = {given} if isinstance(given, str) else set()
    found |= {each for each in given if isinstance(each, str)} if isinstance(given, list) else set()
    for key in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(key)
        for branch in branches if isinstance(branches, list) else ():
            found |= types_of(branch, depth + 1)
    return found


def type_of(schema: object) -> str:
    """Return the JSON type of a schema's values that are not strings; integers are numbers."""
    types = types_of(schema)
    types |= {"number"} if "integer" in types else set()
    return next((each for each in _TYPES if each in types), _TYPES[0])


def is_text(schema: object) -> bool:
    """Whether values may be strings; in formats with unquoted values, they then are.

    Without a type they are strings, unless the schema describes them in another way.
    """
    types = types_of(schema)
    return "string" in types or (not types and not (isinstance(schema, dict) and "$ref" in schema))
