"""The HTTP API of an LMCache server: which engines it knows, and how to drop chunks.

Engines do not depend on it: a failed request counts as if there were no HTTP side.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.http.plain_client import fetched
from pdserve.wire.seal import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Engine(msgspec.Struct):
    model_name: str


class _Status(msgspec.Struct):
    non_cuda_context_meta: dict[str, _Engine]


class StoreHttpSide:
    """Client for the threads of one rank; no call waits longer than the time-out.

    Attributes:
        url: The server's URL; empty if it has no HTTP side.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s

    def version(self) -> str:
        """Return the server's version of LMCache; empty if it does not answer."""
        try:
            return msgspec.json.decode(self._ask("GET", "version"), type=str).partition("-")[0]
        except UNREADABLE:
            return ""

    def models(self) -> set[str]:
        """Return the names under which engines have registered; empty if it does not answer."""
        answer = self._ask("GET", "status")
        try:
            engines = msgspec.json.decode(answer, type=_Status).non_cuda_context_meta.values()
        except UNREADABLE:
            return set()
        return {each.model_name for each in engines}

    def drop(self, keys: Sequence[dict[str, Any]]) -> None:
        """Delete objects from all tiers, even if a reader that is about to load them will fail."""
        for tier in ("l1", "l2"):  # a server without a second tier refuses the second request
            body = msgspec.json.encode({"keys": keys, "tier": tier, "force": True})
            self._ask("DELETE", "cache/objects", body)

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Return the response body; empty if the request fails or is refused."""
        if not self.url:
            return b""
        headers = {} if body is None else {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/{path}", body, headers, method=method)
        try:
            return fetched(request, self._timeout_s)
        except urllib.error.HTTPError as error:
            error.close()
            return b""
        except OSError:
            return b""
