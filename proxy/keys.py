"""The key that a proxy sends to the engines: the deployment's, or whatever the client sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import hdrs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.config.schema import ProxyConfig


def engine_headers(keys: Sequence[str], client: Mapping[str, str]) -> dict[str, str]:
    """Return the header that engines want: with the first of `keys`, or the client's own key."""
    if keys:
        return {hdrs.AUTHORIZATION: f"Bearer {keys[0]}"}
    # One that is not ASCII is no key, and could not be sent on.
    if client.get(hdrs.AUTHORIZATION, "\x80").isascii():
        return {hdrs.AUTHORIZATION: client[hdrs.AUTHORIZATION]}
    return {}


def operator_headers(config: ProxyConfig, client: Mapping[str, str]) -> dict[str, str]:
    """The same for what only operators may ask."""
    return engine_headers(config.operator_keys or config.api_keys, client)
