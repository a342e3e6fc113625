"""Access control: clients may generate, operators may do what affects everybody.

A client's API key allows generation and nothing else. Paths that show or affect other clients'
requests (`/debug`, the dashboard, `/reset_prefix_cache`, `/drain`) are for operators: they need an
operator key if one is configured. If none is, only this host may use them, with an API key if there
are any. An operator may do everything that a client may.

Programs send `Authorization: Bearer KEY`, or those of Anthropic's API `X-Api-Key: KEY`. Pages for
people also accept it as the password of a Basic dialog, which browsers show.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import socket
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from aiohttp import hdrs

from pdserve.config.checks import is_loopback
from pdserve.errors import ForbiddenError, UnauthorizedError
from pdserve.http.pooling_bodies import POOLING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiohttp import web

    from pdserve.config.http import ProxyConfig

_CLIENTS: Final = ("/v1/", "/tokenize", "/detokenize", *POOLING)
_OPERATORS: Final = ("/debug/", "/dashboard", "/reset_prefix_cache", "/drain")
API_KEY_HEADER: Final = "X-Api-Key"
_PARTS: Final = "/pdserve/"
"""Paths that engines and proxies of one deployment use among themselves."""
_FORWARDED: Final = (
    hdrs.FORWARDED,
    hdrs.VIA,
    hdrs.X_FORWARDED_FOR,
    hdrs.X_FORWARDED_HOST,
    hdrs.X_FORWARDED_PROTO,
    "X-Real-IP",
)
"""A request with one of these headers was forwarded for another host."""


class Access:
    """The keys of one server.

    Args:
        api_keys: Clients send one of them; if there are none, no key is needed.
        operator_keys: Operators send one of them.
    """

    def __init__(self, api_keys: Sequence[str], operator_keys: Sequence[str]) -> None:
        self._api_keys = [key.encode() for key in api_keys]
        self._operator_keys = [key.encode() for key in operator_keys]

    def check(self, request: web.Request) -> None:
        """Check that the sender of a request may make it.

        Raises:
            UnauthorizedError: The key is missing or wrong.
            ForbiddenError: No key would help, because no operator key is configured.
        """
        path = request.path
        if path.startswith(_OPERATORS):
            if self._operator_keys:
                self._require(request, self._operator_keys, "the operator's key")
                return
            self._require_this_host(request)
        if self._api_keys and path.startswith((*_CLIENTS, *_OPERATORS)):
            self._require(request, [*self._api_keys, *self._operator_keys], "the API key")

    @staticmethod
    def _require(request: web.Request, keys: Sequence[bytes], name: str) -> None:
        offered = _offered(request)
        # Every key is compared, so that the time taken tells nothing about any.
        if not sum(hmac.compare_digest(offered, key) for key in keys):
            raise UnauthorizedError(
                f"{name} is missing or wrong: send it as `Authorization: Bearer KEY`",
                challenge='Basic realm="pdserve", charset="UTF-8"'
                if _is_for_people(request.path)
                else "Bearer",
            )

    @staticmethod
    def _require_this_host(request: web.Request) -> None:
        is_forwarded = any(name in request.headers for name in _FORWARDED)
        is_a_page = request.method != hdrs.METH_GET and hdrs.ORIGIN in request.headers
        # A page of a site whose name leads here by now (DNS rebinding) looks like one of ours.
        is_a_page |= not _is_of_this_host(request.headers.get(hdrs.HOST, ""))
        if is_forwarded or is_a_page or not is_loopback(request.remote or ""):
            raise ForbiddenError(
                f"{request.path} is for operators, and without an operator key only programs on "
                "this host may ask for it, by its address: start the server with "
                "PDSERVE_OPERATOR_KEY, and send the key as `Authorization: Bearer KEY`"
            )


def engine_headers(keys: Sequence[str], client: Mapping[str, str]) -> dict[str, str]:
    """Return the header for engines, with the first of `keys` or else the client's own key."""
    if keys:
        return {hdrs.AUTHORIZATION: f"Bearer {keys[0]}"}
    given = client.get(hdrs.AUTHORIZATION)
    if given is None and API_KEY_HEADER in client:
        given = f"Bearer {client[API_KEY_HEADER]}"
    # One that is not ASCII is no key, and could not be sent on.
    return {hdrs.AUTHORIZATION: given} if given is not None and given.isascii() else {}


def operator_headers(config: ProxyConfig, client: Mapping[str, str]) -> dict[str, str]:
    """The same for paths that only operators may use."""
    return engine_headers(config.operator_keys or config.api_keys, client)


def is_clients(path: str) -> bool:
    """Whether `path` is for clients, not only for operators or other parts."""
    return not path.startswith((*_OPERATORS, _PARTS))


def _is_of_this_host(host: str) -> bool:
    """Whether a Host header has an address, this host's own name, or nothing."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name in ("", "localhost", socket.gethostname().lower()):
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_for_people(path: str) -> bool:
    """Whether browsers ask for `path`, so that a refusal must include a challenge."""
    return path.startswith("/dashboard")


def _offered(request: web.Request) -> bytes:
    """Return the key in a request; empty if it has none."""
    if API_KEY_HEADER in request.headers and hdrs.AUTHORIZATION not in request.headers:
        return request.headers[API_KEY_HEADER].strip().encode("utf-8", "surrogateescape")
    scheme, _, given = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    # A header's bytes need not be UTF-8: aiohttp escapes those that are not.
    token = given.strip().encode("utf-8", "surrogateescape")
    match scheme.lower():
        case "bearer":
            return token
        case "basic" if _is_for_people(request.path):
            return _password(token)
        case _:
            return b""


def _password(token: bytes) -> bytes:
    """Return the password of a Basic token (RFC 7617); empty if it is not valid."""
    try:
        return base64.b64decode(token, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""
