"""HTTP requests to engines: releases of leases, small queries, and the start of legs.

Knows aiohttp and the engines' paths; decides nothing.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from functools import partial
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from pdserve.http.control import proof_headers
from pdserve.observe.log import log_event
from pdserve.proxy.background import BackgroundTasks
from pdserve.proxy.connections import FAILURES, failure_of, open_session
from pdserve.proxy.errors import WorkerError
from pdserve.proxy.leg import Leg
from pdserve.wire.hop import RELEASE_PATH, ReleaseRequest

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping, Sequence

log = logging.getLogger(__name__)

RELEASE_TRIES = 4
RELEASE_TIMEOUT_S = 2.0
ORDER_TIMEOUT_S = 5.0

_OUT_OF_REACH = frozenset(
    {errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.ETIMEDOUT}
)
"""The host did not refuse the connection: open ones may hang without ever saying so."""


class EngineHttp:
    """The proxy's side of every connection to an engine.

    Args:
        secret: Signs requests reserved for the deployment's own parts; empty signs nothing.
    """

    def __init__(self, *, secret: str) -> None:
        self._secret = secret
        self.background = BackgroundTasks()
        self.tls: ssl.SSLContext | bool = True
        """For https engines; to be set before anything is asked. True: the system's CAs."""
        self._opened: aiohttp.ClientSession | None = None

    @property
    def _session(self) -> aiohttp.ClientSession:
        """The session, opened on first use, inside the event loop."""
        if self._opened is None:
            self._opened = open_session(self.tls)
        return self._opened

    def leg(self, url: str, body: bytes, headers: Mapping[str, str]) -> Leg:
        """Start a POST of `body`. The leg must be ended by `close`, `drain` or `abandon`."""
        return Leg(self.background, self._session, url, body, headers)

    async def get_json(
        self, url: str, timeout_s: float, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        """Return the status and the body of a GET.

        Raises:
            WorkerError: No answer, or none in time.
        """
        try:
            return await self._ask("GET", url, timeout_s, headers)
        except WorkerError as error:
            cause = error.__cause__
            if isinstance(cause, aiohttp.ClientOSError) and cause.errno in _OUT_OF_REACH:
                raise WorkerError(f"{url} cannot be reached: {cause}", reason="timeout") from error
            raise

    async def post_empty(self, url: str, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """POST an empty body; on failure return the status (0: no answer) and the message."""
        try:
            status, body = await self._ask("POST", url, ORDER_TIMEOUT_S, headers)
        except WorkerError as error:
            return 0, error.detail
        if status == 200:
            return None
        return status, f"{url} answered {status} {body.decode(errors='replace')}".strip()

    async def order(
        self, url: str, path: str, body: msgspec.Struct, timeout_s: float
    ) -> tuple[int, bytes]:
        """POST a request reserved for the deployment's parts; return the status and the answer.

        Raises:
            WorkerError: No answer, or none in time.
        """
        data = msgspec.json.encode(body)
        proof = proof_headers(self._secret, "POST", path, data)
        headers = {"Content-Type": "application/json", **proof}
        return await self._ask("POST", url + path, timeout_s, headers, data)

    async def _ask(
        self,
        method: str,
        url: str,
        timeout_s: float,
        headers: Mapping[str, str],
        data: bytes | None = None,
    ) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(timeout_s):
                sent = self._session.request(method, url, data=data, headers=headers)
                async with sent as response:
                    return response.status, await response.read()
        except TimeoutError as error:
            late = f"{url}: no answer within {timeout_s:g} s"
            raise WorkerError(late, reason="timeout") from error
        except FAILURES as error:
            raise failure_of(url, error) from error

    def release(self, prefill_url: str, nonces: Sequence[str], *, after: Leg | None = None) -> None:
        """Give leases at one engine back, in the background, one after the other.

        Args:
            after: The leg that reads the KV; its end is waited for. To a reader not yet told to
                stop, a lease that ends looks like lost KV.
        """
        self.background.start(self._release_all(prefill_url, nonces, after))

    async def _release_all(
        self, prefill_url: str, nonces: Sequence[str], after: Leg | None
    ) -> None:
        if after is not None:
            await after.ended.wait()
        for nonce in nonces:
            if not await self._release(prefill_url, nonce):
                return

    async def _release(self, prefill_url: str, nonce: str) -> bool:
        """Give one lease back; return whether the engine answers."""
        tell = partial(log_event, log, level=logging.WARNING, engine=prefill_url, nonce=nonce)
        failure: object = None
        for attempt in range(RELEASE_TRIES):
            try:
                status, _ = await self.order(
                    prefill_url, RELEASE_PATH, ReleaseRequest(nonce=nonce), RELEASE_TIMEOUT_S
                )
                if status < 500:
                    if status >= 400:
                        tell("release refused", status=status)
                    return True
                failure = status
            except WorkerError as error:
                if error.reason == "connect":
                    return False  # not reachable: the lease died with its engine
                failure = error
            await asyncio.sleep(0.05 * 2**attempt)
        tell("lease left to expire", reason=str(failure))
        return False

    async def close(self, timeout_s: float) -> None:
        """Finish the background work, then close every connection."""
        await self.background.join(timeout_s)
        if self._opened is not None:
            await self._opened.close()
