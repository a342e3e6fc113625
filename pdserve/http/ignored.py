"""Finds unknown fields of a request body and reports them to the client.

As in vLLM such fields are harmless. Unlike in vLLM a header of the answer names each of them once,
so that misspelt ones are noticed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import msgspec
from aiohttp import web

from pdserve.http.parsing import top_level
from pdserve.http.protocol import Prediction, ResponseFormat, StreamOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

IGNORED_HEADER: Final = "X-Pdserve-Ignored-Fields"
MAX_NAMED: Final = 16
MAX_NAME_CHARS: Final = 64
_NESTED: Final[dict[str, type[msgspec.Struct]]] = {
    "prediction": Prediction,
    "response_format": ResponseFormat,
    "stream_options": StreamOptions,
}
_IGNORED: web.RequestKey[list[str]] = web.RequestKey("ignored_fields", list)


def note_ignored(
    request: web.Request,
    fields: Mapping[str, msgspec.Raw],
    kind: type[msgspec.Struct],
    *,
    also: Sequence[str] = (),
) -> Sequence[str]:
    """Make the answer name the unknown fields of a body; return their names.

    Args:
        fields: The body, undecoded.
        kind: Struct for bodies of this endpoint.
        also: Names of nested parts that are unknown too.

    Raises:
        BadRequestError: A name is not valid text.
    """
    ignored = [name for name in fields if name not in kind.__struct_encode_fields__]
    for outer, inner_kind in _NESTED.items():
        inner = bytes(fields.get(outer, b""))
        if outer not in ignored and inner.startswith(b"{"):
            known = inner_kind.__struct_encode_fields__
            ignored += [f"{outer}.{name}" for name in top_level(inner) if name not in known]
    ignored += also
    request[_IGNORED] = ignored
    return ignored


async def tell_ignored(request: web.Request, response: web.StreamResponse) -> None:
    """Put a request's noted fields into a header; for an app's `on_response_prepare`."""
    ignored = request.get(_IGNORED)
    if not ignored:
        return
    named = [
        quote(name[:MAX_NAME_CHARS], safe=".", errors="replace") for name in ignored[:MAX_NAMED]
    ]
    if len(ignored) > MAX_NAMED:
        named.append("...")
    response.headers[IGNORED_HEADER] = ", ".join(named)
