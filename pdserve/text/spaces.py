"""The white space that schema-constrained JSON may contain. Knows no grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_SPACES: Final = r" |\r?\n[ \t]{0,64}"


def with_bounded_spaces(schema: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Return a JSON schema whose texts have no more white space than people write.

    That is one space, or a new line and what indents it: a model that is not sure how to go on
    would else write new lines until its last token.

    Args:
        options: llguidance's, which go before those of the schema itself (`x-guidance`); either
            may say otherwise (`whitespace_pattern`, `whitespace_flexible`).
    """
    given = schema.get("x-guidance")
    own = (given if isinstance(given, dict) else {}) | options
    if not own.keys() & {"whitespace_pattern", "whitespace_flexible"}:
        own["whitespace_pattern"] = _SPACES
    return {**schema, "x-guidance": own}
