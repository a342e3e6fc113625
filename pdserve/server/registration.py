"""Registers this engine with proxies and keeps the registration alive.

A registration is a lease, renewed three times within its length, so that a proxy that starts
later or restarts learns of the engine automatically, and forgets one that stops renewing.

A name may stand for several proxies, as a headless service of Kubernetes does: where it has
several addresses, each is a proxy of its own. It is resolved anew as often as a lease is renewed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from typing import TYPE_CHECKING, TypeAlias, cast
from urllib.parse import urlsplit

import aiohttp
import msgspec

from pdserve.config.http import TlsConfig
from pdserve.http.control import Stamps, proof_headers
from pdserve.http.tls import client_context
from pdserve.observe.log import log_event
from pdserve.wire.hop import NONCE_HEADER, REGISTER_PATH, Deregistration, Registration
from pdserve.wire.seal import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from pdserve.wire.hop import RoleName
    from pdserve.wire.request import EngineInfo

Resolve: TypeAlias = "Callable[[str], Awaitable[frozenset[str]]]"

_log = logging.getLogger(__name__)

LEASE_S = 9.0
_NO_TLS = TlsConfig()
_TIMEOUT = aiohttp.ClientTimeout(total=3.0)
_RETRY_S = 1.0
_REPEAT_S = 30.0
"""What stays wrong is said again so often."""
_TRY_LATER = (408, 429)
_MAX_REASON_CHARS = 1000


class Registrar:
    """Registers one engine with its proxies, in the background.

    Args:
        proxy_urls: Base URLs.
        url: Where proxies reach this engine.
        info: The engine's description.
        secret: The deployment's secret; empty signs nothing.
        tls: TLS settings for https proxies.
        lease_s: Seconds that a registration is valid.
        resolve: Returns the URLs of the proxies that a URL stands for.
    """

    def __init__(
        self,
        proxy_urls: Sequence[str],
        *,
        url: str,
        info: EngineInfo,
        secret: str,
        tls: TlsConfig = _NO_TLS,
        lease_s: float = LEASE_S,
        resolve: Resolve | None = None,
    ) -> None:
        self._places_of = resolve or places_of
        self._proxy_urls = [proxy.rstrip("/") for proxy in proxy_urls]
        self._url = url
        self._info = info
        self._secret = secret
        self._tls = tls
        self._stamps = Stamps(secrets.token_urlsafe(12))
        self._lease_s = lease_s
        self._session: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._places: dict[str, frozenset[str]] = {}
        self._asked: set[str] = set()
        self._refusals: dict[str, str] = {}

    @property
    def is_settled(self) -> bool:
        """Whether every proxy was asked and none refuses; unreachable ones do not count."""
        are_known = self._places.keys() == set(self._proxy_urls)
        wanted = frozenset[str]().union(*self._places.values())
        return are_known and not self._refusals and wanted <= self._asked

    @property
    def refusal(self) -> str | None:
        """Which proxies refuse this engine, and why; None if no known answer is a refusal."""
        refusals = [f"{proxy} refuses it: {why}" for proxy, why in self._refusals.items()]
        return "; ".join(refusals) or None

    async def start(self) -> None:
        """Begin to register.

        Raises:
            ConfigError: A file of TLS cannot be used.
        """
        context = await asyncio.to_thread(client_context, self._tls)
        connector = aiohttp.TCPConnector(ssl=context)
        self._session = aiohttp.ClientSession(timeout=_TIMEOUT, connector=connector)
        self._tasks = [
            asyncio.create_task(self._follow(proxy), name=f"register with {proxy}")
            for proxy in self._proxy_urls
        ]

    async def stop(self, *, deadline_s: float) -> None:
        """Deregister from every proxy; one that does not answer forgets it with the lease.

        Args:
            deadline_s: Seconds that the engine still serves its running requests.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            body = Deregistration(self._url, self._info.role, self._info, deadline_s)
            calls = [
                self._call("DELETE", place, body, name=proxy)
                for proxy, places in self._places.items()
                for place in places
            ]
            await asyncio.gather(*calls)
            await self._session.close()

    async def _follow(self, proxy: str) -> None:
        """Register for ever with every proxy that a URL stands for."""
        keeping: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                # While a name cannot be resolved, its known proxies are kept; if none is known,
                # a request to the name itself reports the problem.
                known = self._places.get(proxy, frozenset({proxy}))
                places = self._places[proxy] = await self._places_of(proxy) or known
                for gone in keeping.keys() - places:
                    keeping.pop(gone).cancel()
                    self._refusals.pop(gone, None)
                    self._asked.discard(gone)
                for place in places - keeping.keys():
                    keeping[place] = asyncio.create_task(self._keep(place, proxy))
                await asyncio.sleep(self._lease_s / 3)
        finally:
            for task in keeping.values():
                task.cancel()
            await asyncio.gather(*keeping.values(), return_exceptions=True)

    async def _keep(self, proxy: str, name: str) -> None:
        """Register for ever; logs what the proxy answers when it changes, and now and then.

        Args:
            proxy: Its URL, whose host is an address where `name` stands for several.
        """
        role = cast("RoleName", self._info.role)
        body = Registration(self._url, role, self._info, self._lease_s)
        last: str | None = "never asked"
        logged_s = 0.0
        loop = asyncio.get_running_loop()
        while True:
            status, failure = await self._call("POST", proxy, body, name=name)
            if failure is None:
                self._refusals.pop(proxy, None)
            elif 400 <= status < 500 and status not in _TRY_LATER:
                self._refusals[proxy] = failure
            self._asked.add(proxy)
            if failure is None and last is not None:
                log_event(_log, "registered", proxy=proxy, url=self._url)
            elif failure is not None and (failure != last or loop.time() >= logged_s + _REPEAT_S):
                logged_s = loop.time()
                level = logging.WARNING
                log_event(_log, "registration failed", level=level, proxy=proxy, reason=failure)
            last = failure
            await asyncio.sleep(self._lease_s / 3 if failure is None else _RETRY_S)

    async def _call(
        self, method: str, proxy: str, body: Registration | Deregistration, *, name: str
    ) -> tuple[int, str | None]:
        """Return the proxy's status, 0 without an answer, and the reason for a refusal."""
        data = msgspec.json.encode(body)
        try:
            status, answer, nonce = await self._send(method, proxy, data, name)
            if nonce is not None and self._stamps.learn(proxy, nonce):
                status, answer, _ = await self._send(method, proxy, data, name)
            return status, None if status < 300 else _reason(status, answer)
        except aiohttp.ClientSSLError as error:
            return 0, f"its certificate is not believed, or ours: {error} (see --ssl-ca-certs)"
        except (aiohttp.ClientConnectorError, TimeoutError):
            return 0, "no answer there yet; asking again until there is one"
        except (aiohttp.ClientError, OSError) as error:
            return 0, f"{type(error).__name__}: {error}"

    async def _send(
        self, method: str, proxy: str, data: bytes, name: str
    ) -> tuple[int, bytes, str | None]:
        """Return the proxy's status, its answer, and the nonce that it wants proof for."""
        assert self._session is not None
        stamp = self._stamps.for_(proxy)
        headers = {
            "Content-Type": "application/json",
            **proof_headers(self._secret, method, REGISTER_PATH, data, stamp=stamp),
        }
        async with self._session.request(
            method,
            proxy + REGISTER_PATH,
            data=data,
            headers=headers,
            server_hostname=urlsplit(name).hostname,  # what its certificate names
        ) as response:
            return response.status, await response.read(), response.headers.get(NONCE_HEADER)


async def places_of(url: str) -> frozenset[str]:
    """Return the URLs of the servers that a URL stands for; none if it does not resolve now.

    Two addresses of different families belong to one server: `localhost` has two.
    """
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the second: it is no name at all
        return frozenset()
    for family in (socket.AF_INET, socket.AF_INET6):
        hosts = {str(where[0]) for kind, _, _, _, where in found if kind is family}
        if len(hosts) > 1:
            named = (f"[{host}]" if family is socket.AF_INET6 else host for host in hosts)
            port = "" if parts.port is None else f":{parts.port}"
            return frozenset(f"{parts.scheme}://{host}{port}{parts.path}" for host in named)
    return frozenset({url})


def _reason(status: int, answer: bytes) -> str:
    """Return a proxy's refusal in its own words, or a description of its answer."""
    try:
        text = str(msgspec.json.decode(answer)["error"]["message"])
    except (*UNREADABLE, KeyError, TypeError):
        text = f"{status}: {answer.decode(errors='replace')}"
    return text[:_MAX_REASON_CHARS]
