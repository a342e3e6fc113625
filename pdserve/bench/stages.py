"""Asks a pdserve deployment for the stages of each request during the run.

pdserve's proxies and engines keep their last finished requests (`/debug/requests`); their data on
ours goes into the outcomes. Other servers are asked only once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp
import msgspec

from pdserve.bench.records import Outcome
from pdserve.wire.seal import UNREADABLE

FETCH_EVERY: Final = 1024
"""Requests that may finish before the server is asked again; it keeps 4096."""
_NUM_KEPT: Final = 4096


class ReportedRequest(msgspec.Struct, kw_only=True):
    """A server's record of one finished request, as far as used here."""

    request_id: str
    seq: int = 0
    ttft_terms: dict[str, float] | None = None
    second_token_terms: dict[str, float] | None = None
    kv_mode: str | None = None
    prefill: str | None = None
    decode: str | None = None


class _Page(msgspec.Struct, kw_only=True):
    finished: list[ReportedRequest]


class Stages:
    """The records from one server so far.

    Attributes:
        is_reporting: Whether it reports stages at all; known after `begin`.
        by_id: Records by request id.
    """

    def __init__(
        self, session: aiohttp.ClientSession, base_url: str, headers: Mapping[str, str]
    ) -> None:
        self._session = session
        self._url = f"{base_url.rstrip('/')}/debug/requests"
        self._headers = dict(headers)
        self._seq = 0
        self.is_reporting = False
        self.by_id: dict[str, ReportedRequest] = {}

    async def begin(self) -> None:
        """Find out whether it reports stages, and where to begin."""
        page = await self._ask(1)
        self.is_reporting = page is not None
        if page is not None and page.finished:
            self._seq = max(each.seq for each in page.finished)

    async def fetch(self) -> None:
        """Read the requests that ended since the last time."""
        if not self.is_reporting:
            return
        page = await self._ask(_NUM_KEPT)
        for each in page.finished if page is not None else ():
            self.by_id[each.request_id] = each
            self._seq = max(self._seq, each.seq)

    def lacks(self, outcomes: Sequence[Outcome]) -> bool:
        """Whether an answered request has no record yet."""
        return any(each.is_good and each.request_id not in self.by_id for each in outcomes)

    def fill_in(self, outcomes: Sequence[Outcome]) -> None:
        """Put the records into the outcomes."""
        for outcome in outcomes:
            line = self.by_id.get(outcome.request_id)
            if line is not None:
                outcome.stages = line.ttft_terms or {}
                outcome.second_stages = line.second_token_terms or {}
                outcome.kv_mode = line.kv_mode or ""

    async def engines(self) -> list[dict[str, str]]:
        """Return the engines of the deployment that served, as far as it reports them."""
        seen: dict[tuple[str, str], None] = {}
        for line in self.by_id.values():
            for role, url in (("prefill", line.prefill), ("decode", line.decode)):
                if url:
                    seen[role, url] = None
        return [{"role": role, "url": url} for role, url in sorted(seen)]

    async def _ask(self, number: int) -> _Page | None:
        parameters: dict[str, Any] = {"finished": number, "after": self._seq}
        try:
            async with self._session.get(
                self._url, params=parameters, headers=self._headers
            ) as response:
                if response.status != 200:
                    return None
                return msgspec.json.decode(await response.read(), type=_Page)
        except (aiohttp.ClientError, TimeoutError, *UNREADABLE):
            return None
