"""JSON schemas: the types they name, and the white space of what follows them. Knows no grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_DEPTH = 8
_TYPES = ("object", "array", "number", "boolean", "null")
_SPACES: Final = r" |\r?\n[ \t]{0,64}"


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


def with_bounded_spaces(schema: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Return a JSON schema whose output has no more white space than people write.

    That is one space, or a new line and its indentation; otherwise a model that is unsure how to
    continue would write new lines until its last token.

    Args:
        options: llguidance's options, which override those of the schema itself (`x-guidance`);
            both may change the white space (`whitespace_pattern`, `whitespace_flexible`).
    """
    given = schema.get("x-guidance")
    own = (given if isinstance(given, dict) else {}) | options
    if not own.keys() & {"whitespace_pattern", "whitespace_flexible"}:
        own["whitespace_pattern"] = _SPACES
    return {**schema, "x-guidance": own}
