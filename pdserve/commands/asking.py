"""Queries a running proxy or engine for what only operators may see."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Final

from pdserve.errors import ConfigError, PeerError
from pdserve.http.plain_client import fetched, reason_and_remedy

if TYPE_CHECKING:
    from collections.abc import Sequence

_TIMEOUT_S: Final = 60.0


def asked(
    base_url: str,
    path: str,
    api_keys: Sequence[str],
    *,
    body: bytes | None = None,
    method: str | None = None,
    timeout_s: float = _TIMEOUT_S,
    remedy: str = "give the base URL of the proxy or of an engine with --url",
) -> bytes:
    """Return the body of an answer.

    Args:
        path: With its query.
        api_keys: The first is sent.
        body: JSON to send.
        method: By default POST with a body and GET without.
        remedy: What to do if the server cannot be reached.

    Raises:
        PeerError: The server cannot be reached, or refuses.
        ConfigError: It requires another API key, or does not know the engines in the body.
    """
    url = f"{base_url.rstrip('/')}{path}"
    headers = {"Content-Type": "application/json"} if body is not None else {}
    if api_keys:
        headers["Authorization"] = f"Bearer {api_keys[0]}"
    request = urllib.request.Request(url, body, headers, method=method)
    try:
        return fetched(request, timeout_s)
    except urllib.error.HTTPError as error:
        message = error_message(error.read()) or f"status {error.code}"
        if error.code in {401, 403}:
            raise ConfigError(
                f"{base_url} needs a key ({message}): give it with --api-key, or set "
                "PDSERVE_API_KEY",
                param="api-key",
            ) from error
        if error.code == 404 and body is not None:
            raise ConfigError(f"{base_url}: {message}", param="engines") from error
        raise PeerError(f"{url}: {message}") from error
    except OSError as error:
        reason, remedy = reason_and_remedy(error, remedy)
        raise PeerError(f"{base_url} cannot be reached ({reason}): {remedy}") from error


def error_message(body: bytes) -> str:
    """Return what an error object says; empty if it is none."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, RecursionError, KeyError, TypeError):
        return ""
