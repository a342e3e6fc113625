"""The white space that schema-constrained JSON may contain. Knows no grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_SPACES: Final = r" |\r?\n[ \t]{0,64}"


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
