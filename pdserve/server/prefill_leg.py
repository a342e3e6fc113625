"""The prefill leg that a decode engine sends itself when a gateway chose the engines.

A proxy of pdserve sends both legs of a request. A gateway sends the request once, to the decode
engine, with a sealed order (PREFILL_HEADER) that names the prefill engine. The decode engine has
the prompt prefilled there and pulls the KV. If anything fails before the handoff is here, or the
load fails afterwards, it computes the prompt itself, within its budget for that.

The order is trusted because it is sealed with the deployment's secret: clients cannot make an
engine send requests to addresses of their choice.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import aiohttp
import msgspec
from aiohttp import hdrs, web

from pdserve.config.checks import is_loopback
from pdserve.errors import BadRequestError, HandoffRefusedError
from pdserve.http.access import API_KEY_HEADER
from pdserve.http.control import proof_headers
from pdserve.http.parsing import top_level
from pdserve.http.protocol import SamplingFields
from pdserve.http.tls import client_context
from pdserve.observe.log import log_event
from pdserve.server.service import REQUEST_ID, SERVICE, UNDO
from pdserve.wire.hop import (
    KV_MODE_HEADER,
    PARAMS,
    PREFILL_HEADER,
    PREFILL_ORDERS,
    RELEASE_PATH,
    REQUEST_ID_HEADER,
    TIME_LEFT_HEADER,
    YIELDS_HEADER,
    KVTransferParams,
    PdserveParams,
    ReleaseRequest,
)
from pdserve.wire.transfer import HANDOFFS, KVMode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from pdserve.server.service import Service

_log = logging.getLogger(__name__)

T = TypeVar("T", bound=SamplingFields)

_SEED_BITS: Final = 48
_CONNECT_TIMEOUT_S: Final = 5.0
_LEG_TIMEOUT_S: Final = 1800.0
"""Of a leg whose request says of no time that is left."""
_LOOK_S: Final = 1.0
"""Between two looks at an engine that has not answered, and for each of them; the second in a row
that fails ends the leg. A prefill may take minutes, an engine that is there answers looks."""
_RELEASE_TIMEOUT_S: Final = 5.0
_PASSED_ON: Final = (hdrs.AUTHORIZATION, API_KEY_HEADER, TIME_LEFT_HEADER, YIELDS_HEADER)


class PrefillLegError(Exception):
    """A leg that has brought no handoff; the message says why.

    Args:
        outcome: One of `metrics.PREFILL_LEGS`. A refused request is refused here as well, in
            this server's words.
    """

    def __init__(self, message: str, *, outcome: str = "failed") -> None:
        super().__init__(message)
        self.outcome = outcome


class PrefillLegs:
    """Sends prefill legs, and releases leases. Create it while the event loop runs.

    Args:
        service: Provides settings and metrics.
    """

    def __init__(self, service: Service, session: aiohttp.ClientSession) -> None:
        self._service = service
        self._session = session
        self._secret = service.engine_config.transfer.secret
        self._releases: set[asyncio.Task[None]] = set()

    async def prefill(
        self, request: web.Request, url: str, path: str, data: bytes
    ) -> KVTransferParams:
        """Have a prompt prefilled; return the transfer parameters for the decode leg.

        Args:
            url: Base URL of the prefill engine.
            path: The endpoint there.
            data: The request's body.

        Returns:
            The handoff; without one, parameters to compute the prompt here.
        """
        pinned = PdserveParams(
            created=int(self._service.clock.wall_s()), seed=secrets.randbits(_SEED_BITS)
        )
        ours = msgspec.structs.replace(pinned, final_length=True)
        params = KVTransferParams(do_remote_decode=True, pdserve=ours)
        # Told nothing before it is all there, so that there is one way for it to fail.
        asked = {**top_level(data), "stream": False, PARAMS: params}
        asked.pop("stream_options", None)
        headers = {
            **{name: request.headers[name] for name in _PASSED_ON if name in request.headers},
            hdrs.CONTENT_TYPE: "application/json",
            REQUEST_ID_HEADER: request[REQUEST_ID],
            KV_MODE_HEADER: KVMode.PULL.value,
        }
        try:
            answer = await self._answer(url, path, msgspec.json.encode(asked), headers)
            handed_over = self._handed_over(request, url, answer)
        except PrefillLegError as failure:
            self._service.metrics.prefill_leg(failure.outcome)
            is_failure = failure.outcome == "failed"
            if is_failure:
                log_event(
                    _log,
                    "prefill leg failed: the prompt is computed here",
                    level=logging.WARNING,
                    request=request[REQUEST_ID],
                    engine=url,
                    reason=str(failure),
                )
            return KVTransferParams(pdserve=msgspec.structs.replace(pinned, is_fallback=is_failure))
        self._service.metrics.prefill_leg("handed_over")
        return handed_over

    def release(self, url: str, nonces: list[str]) -> None:
        """Release leases in the background; if their engine is gone, so are they."""
        task = asyncio.create_task(self._release(url, nonces))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def close(self) -> None:
        """End the background tasks."""
        await asyncio.gather(*self._releases, return_exceptions=True)
        await self._session.close()

    def _handed_over(self, request: web.Request, url: str, answer: bytes) -> KVTransferParams:
        """Take ownership of the handoff in an answer.

        Raises:
            PrefillLegError: There is none that all choices can continue from.
        """
        try:
            raw = top_level(answer).get(PARAMS)
            if raw is None:
                raise PrefillLegError("every choice ended at the prefill engine", outcome="ended")
            params = msgspec.json.decode(raw, type=KVTransferParams)
            handoffs = (params.pdserve or PdserveParams()).handoffs or []
            held = [HANDOFFS.peek(text).nonce for text in handoffs if text is not None]
        except (BadRequestError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise PrefillLegError(f"the prefill engine's answer cannot be read: {error}") from error
        if not held or None in handoffs:
            self.release(url, held)
            raise PrefillLegError("a choice ended at the prefill engine", outcome="ended")
        request[UNDO] = partial(self.release, url, held)
        return params

    async def _answer(self, url: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """Return a prefill engine's answer.

        Raises:
            PrefillLegError: The engine refuses, fails, or is gone.
        """
        post = asyncio.create_task(self._post(url + path, body, headers))
        watch = asyncio.create_task(self._until_lost(url))
        try:
            await asyncio.wait({post, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not post.done():
                raise PrefillLegError(f"no answer to /livez within {_LOOK_S:g} s, twice")
            return post.result()
        finally:
            for task in (post, watch):
                task.cancel()
            await asyncio.gather(post, watch, return_exceptions=True)

    async def _post(self, url: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        try:
            async with self._session.post(
                url, data=body, headers=headers, allow_redirects=False
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise PrefillLegError(f"{type(error).__name__}: {error}") from error
        if response.status != 200:
            is_ours = 400 <= response.status < 500 and response.status != 429
            raise PrefillLegError(
                f"{response.status}: {answer[:500].decode(errors='replace')}",
                outcome="refused" if is_ours else "failed",
            )
        return answer

    async def _until_lost(self, url: str) -> None:
        """Poll an engine until it has failed to answer twice in a row."""
        num_failed = 0
        timeout = aiohttp.ClientTimeout(total=_LOOK_S)
        while num_failed < 2:
            await asyncio.sleep(_LOOK_S)
            try:
                async with self._session.get(f"{url}/livez", timeout=timeout):
                    num_failed = 0
            except (aiohttp.ClientError, OSError, TimeoutError):
                num_failed += 1

    async def _release(self, url: str, nonces: list[str]) -> None:
        timeout = aiohttp.ClientTimeout(total=_RELEASE_TIMEOUT_S)
        for nonce in nonces:
            body = msgspec.json.encode(ReleaseRequest(nonce=nonce))
            headers = {
                hdrs.CONTENT_TYPE: "application/json",
                **proof_headers(self._secret, "POST", RELEASE_PATH, body),
            }
            try:
                async with self._session.post(
                    url + RELEASE_PATH, data=body, headers=headers, timeout=timeout
                ):
                    pass
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                log_event(_log, "lease left to expire", engine=url, nonce=nonce, reason=str(error))
                return


_LEGS: web.AppKey[PrefillLegs] = web.AppKey("prefill_legs", PrefillLegs)


async def running_legs(app: web.Application) -> AsyncGenerator[None, None]:
    """Provide an app with `PrefillLegs`; for its `cleanup_ctx`."""
    service = app[SERVICE]
    context = await asyncio.to_thread(client_context, service.server_config.tls)
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=context),
        timeout=aiohttp.ClientTimeout(total=_LEG_TIMEOUT_S, sock_connect=_CONNECT_TIMEOUT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
    )
    app[_LEGS] = legs = PrefillLegs(service, session)
    yield
    await legs.close()


async def as_ordered(request: web.Request, body: T, data: bytes, path: str) -> T:
    """Return a request as served here, once another engine has done its part.

    Args:
        request: A request with an order.
        body: `data`, decoded.
        path: The endpoint that `data` is for.

    Raises:
        BadRequestError, HandoffRefusedError: The caller is not authorized, or the order is not
            this deployment's.
    """
    service = request.app[SERVICE]
    secret = service.engine_config.transfer.secret
    if not (secret or is_loopback(request.remote or "")):
        raise HandoffRefusedError(
            f"{PREFILL_HEADER} came from {request.remote}, and without a secret only this host "
            "may send it: give every engine and proxy the same one as PDSERVE_SECRET"
        )
    order = PREFILL_ORDERS.open(request.headers[PREFILL_HEADER], secret)
    service.require_ready()
    params = await request.app[_LEGS].prefill(request, order.url, path, data)
    return msgspec.structs.replace(body, kv_transfer_params=params)
