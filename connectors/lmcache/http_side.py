"""The HTTP side of an LMCache server: which engines it knows, and how it is made to drop chunks.

No engine needs it: what it does not answer is as if it were not there.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Engine(msgspec.Struct):
    model_name: str


class _Status(msgspec.Struct):
    non_cuda_context_meta: dict[str, _Engine]


class StoreHttpSide:
    """Asked by the threads of one rank, none of which waits longer than it is told to.

    Attributes:
        url: Empty if the server has none.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s

    def models(self) -> set[str]:
        """Names under which the server's engines have registered; none if it does not say."""
        answer = self._ask("GET", "status")
        try:
            engines = msgspec.json.decode(answer, type=_Status).non_cuda_context_meta.values()
        except msgspec.DecodeError:
            return set()
        return {each.model_name for each in engines}

    def drop(self, keys: Sequence[dict[str, Any]]) -> None:
        """Have objects deleted in all tiers, though somebody may be about to read them in vain."""
        for tier in ("l1", "l2"):  # a server without a second tier refuses to look there
            body = msgspec.json.encode({"keys": keys, "tier": tier, "force": True})
            self._ask("DELETE", "cache/objects", body)

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """What it says; nothing if it is not there, refuses, or is no such server."""
        if not self.url:
            return b""
        headers = {} if body is None else {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/{path}", body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as told:
                answer: bytes = told.read()
        except urllib.error.HTTPError as error:
            error.close()
            return b""
        except (OSError, http.client.HTTPException):
            return b""
        return answer
