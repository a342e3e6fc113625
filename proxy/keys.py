"""Which paths are under the deployment's API key, whether a header brings it, what engines get.

Programs send `Authorization: Bearer KEY`. Pages that people open take it as the password of a
Basic dialog, too, which a browser shows by itself.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from typing import TYPE_CHECKING

from aiohttp import hdrs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CHALLENGE = 'Basic realm="pdserve", charset="UTF-8"'

_PATHS = frozenset({"/tokenize", "/detokenize", "/reset_prefix_cache", "/dashboard"})


def needs_key(path: str) -> bool:
    """Whether only those who know the key may ask for `path`."""
    return path in _PATHS or path.startswith(("/v1/", "/debug/", "/dashboard/"))


def is_for_people(path: str) -> bool:
    """Whether a browser asks for `path`: then a refusal challenges it."""
    return path == "/dashboard" or path.startswith("/dashboard/")


def is_known(authorization: str, keys: Sequence[str], path: str) -> bool:
    """Whether an `Authorization` header brings one of `keys`, or none is needed."""
    if not keys:
        return True
    scheme, _, given = authorization.partition(" ")
    # A header's bytes need not be UTF-8: aiohttp escapes those that are not.
    token = given.strip().encode("utf-8", "surrogateescape")
    match scheme.lower():
        case "bearer":
            offered = token
        case "basic" if is_for_people(path):
            offered = _password(token)
        case _:
            offered = b""
    # Every key is compared, so that the time taken tells nothing about any.
    return bool(sum(hmac.compare_digest(offered, key.encode()) for key in keys))


def engine_headers(keys: Sequence[str], client: Mapping[str, str]) -> dict[str, str]:
    """Return the header that engines want: with the first of `keys`, or the client's own key."""
    if keys:
        return {hdrs.AUTHORIZATION: f"Bearer {keys[0]}"}
    # One that is not ASCII is no key, and could not be sent on.
    if client.get(hdrs.AUTHORIZATION, "\x80").isascii():
        return {hdrs.AUTHORIZATION: client[hdrs.AUTHORIZATION]}
    return {}


def _password(token: bytes) -> bytes:
    """Return the password of a Basic token (RFC 7617); empty if it is none."""
    try:
        return base64.b64decode(token, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""
