"""JSON schemas: the types they name, and the white space of what follows them. Knows no grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_DEPTH = 8
_UNIONS: Final = ("anyOf", "oneOf")
_CONDITIONS: Final = ("not", "if")
_ANNOTATIONS: Final = {"title", "description", "default", "examples", "deprecated", "$comment"}
_NAMES: Final = {
    bool: "boolean",
    dict: "object",
    float: "number",
    int: "integer",
    list: "array",
    str: "string",
    type(None): "null",
}
_TYPES = ("object", "array", "number", "boolean", "null")
_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords with schemas by names."""
_SCHEMAS: Final = frozenset(
    {*_MAPS, *_UNIONS, *_CONDITIONS, "allOf", "additionalProperties", "items", "prefixItems"}
)
"""Keywords with schemas."""
_SPACES: Final = r" |\r?\n[ \t]{0,64}"


def types_of(schema: object, depth: int = 0) -> set[str]:
    """Return the JSON types that a schema or its alternatives name."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return set()
    given = schema.get("type")
    found = {given} if isinstance(given, str) else set()
    found |= {each for each in given if isinstance(each, str)} if isinstance(given, list) else set()
    found |= {_NAMES[type(each)] for each in values_of(schema) or ()} if given is None else set()
    for key in (*_UNIONS, "allOf"):
        branches = schema.get(key)
        for branch in branches if isinstance(branches, list) else ():
            found |= types_of(branch, depth + 1)
    return found


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists; None if it lists none."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) else None


def branches_of(schema: Mapping[str, Any], depth: int = 0) -> list[dict[str, Any]]:
    """Return the alternatives of a schema, each of one type at most.

    Raises:
        ValueError: It combines schemas in another way than by listing them.
    """
    parts = [key for key in (*_UNIONS, "allOf", *_CONDITIONS) if key in schema]
    if parts:
        key, *others = [*parts, *(schema.keys() - _ANNOTATIONS - {*parts})]
        branches = schema[key] if isinstance(schema[key], list) else []
        is_listed = key in _UNIONS or (key == "allOf" and len(branches) == 1)
        if not is_listed or others or depth > _MAX_DEPTH:
            raise ValueError(f"strings cannot be limited by {', '.join(parts)} beside other keys")
        listed = (each for each in branches if isinstance(each, dict))
        return [each for branch in listed for each in branches_of(branch, depth + 1)]
    values, found = values_of(schema), []
    for name in sorted(types_of(schema)):
        names = {name, "integer"} if name == "number" else {name}
        fitting = [each for each in values or () if _NAMES[type(each)] in names]
        if values is None:
            found.append({**schema, "type": name})
        elif fitting:
            rest = {key: value for key, value in schema.items() if key != "const"}
            found.append({**rest, "type": name, "enum": fitting})
    return found or [dict(schema)]


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
    is_described = isinstance(schema, dict) and schema.keys() & {"$ref", "allOf", *_UNIONS}
    return "string" in types or (not types and not is_described)


def without_idle(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON schema without keywords that exclude nothing, which llguidance does not know.

    Zod writes that names of properties are strings, and others that items need not be unique.
    """
    whole = dict(schema)
    pending = [whole]
    while pending:
        each = pending.pop()
        if _is_any_name(each.get("propertyNames")):
            del each["propertyNames"]
        if each.get("uniqueItems") is False:
            del each["uniqueItems"]
        for key in _SCHEMAS & each.keys():
            given = each[key]
            if isinstance(given, dict) and key not in _MAPS:
                each[key] = dict(given)
                pending.append(each[key])
            elif isinstance(given, dict | list):
                inner = each[key] = given.copy()
                places = list(inner) if isinstance(inner, dict) else range(len(inner))
                for place in places:
                    if isinstance(inner[place], dict):
                        inner[place] = dict(inner[place])
                        pending.append(inner[place])
    return whole


def _is_any_name(schema: object) -> bool:
    """Whether each name of a property follows a schema."""
    if not isinstance(schema, dict):
        return schema is True
    return not schema.keys() - _ANNOTATIONS - {"type"} and schema.get("type", "string") == "string"


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
    return {**without_idle(schema), "x-guidance": own}
