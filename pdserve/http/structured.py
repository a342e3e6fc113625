"""Structured outputs in requests: OpenAI's `response_format`, vLLM's `structured_outputs`.

Only their shapes; the server turns them into a grammar.
"""

from __future__ import annotations

from typing import Any

import msgspec


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The `json_schema` of a response format; `strict` changes nothing, outputs always follow it.

    Attributes:
        json_schema: An object, or true or false.
    """

    name: str | None = None
    json_schema: Any = msgspec.field(name="schema", default=None)
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's `response_format`."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """vLLM's `structured_outputs`: one of the first five, and the spacing of JSON.

    Attributes:
        json: A JSON schema, or its text.
        json_object: Any JSON object.
        grammar: In Lark, or in the EBNF of llama.cpp (GBNF).
        disable_any_whitespace: JSON without white space between its tokens.
        whitespace_pattern: A regular expression for the white space allowed there instead.
    """

    json: Any = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_additional_properties: bool | None = None
    structural_tag: Any = None
