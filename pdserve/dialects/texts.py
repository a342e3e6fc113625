"""Extracts texts from bodies whose parts may have any type."""

from __future__ import annotations

from typing import Any, Final

from pdserve.errors import BadRequestError

_BILLING: Final = "x-anthropic-billing-header"
"""Beginning of a line that Claude Code changes with each request. It would keep prompts from
sharing a prefix, and means nothing to a model."""


def without_billing(text: str) -> str:
    """Return what the system is told, without Claude Code's own first line."""
    return text.partition("\n")[2] if text.startswith(_BILLING) else text


def text_of(content: object, kinds: frozenset[str], where: str, param: str) -> list[str]:
    """Return the texts of a message's content.

    Args:
        content: A string, or a list of parts with a `type` and a `text` (or a `refusal`).
        kinds: Types of parts that are text.
        where: What the content is called in an error.
        param: The field of the body that it is in.

    Raises:
        BadRequestError: It is something else.
    """
    if isinstance(content, str):
        return [content]
    if content is None:
        return []
    if not isinstance(content, list):
        raise BadRequestError(f"{where} must be a string or a list of parts", param=param)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            raise BadRequestError(
                f"{where}[{index}] has type {kind!r}: only text parts are supported", param=param
            )
        field = "refusal" if kind == "refusal" else "text"
        texts.append(string_in(part, field, f"{where}[{index}]", param))
    return texts


def string_in(fields: dict[str, Any], name: str, where: str, param: str) -> str:
    """Return a string that must be among some fields.

    Raises:
        BadRequestError: It is not there, or is something else.
    """
    value = fields.get(name)
    if not isinstance(value, str):
        raise BadRequestError(f"{where}.{name} must be a string, got {value!r}", param=param)
    return value
