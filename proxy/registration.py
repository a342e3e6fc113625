"""The endpoints by which engines register, renew their lease and deregister.

Accepts them from senders that know the deployment's secret; `backends` holds the set of engines.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

import msgspec
from aiohttp import web

from pdserve.config.schema import Role
from pdserve.errors import BadRequestError, HandshakeError
from pdserve.http.answers import error_answer, json_answer
from pdserve.http.control import Verifier
from pdserve.observe.log import log_event
from pdserve.wire.hop import REGISTER_PATH, Deregistration, Registration
from pdserve.wire.seal import UNREADABLE

if TYPE_CHECKING:
    from pdserve.proxy.draining import Drains
    from pdserve.proxy.services import Services

Message = TypeVar("Message")

log = logging.getLogger(__name__)

_MAX_REFUSALS = 1000
"""Refused engines that are remembered: their number is up to whoever sends registrations."""


class Registrations:
    """Accepts the registrations of engines.

    Args:
        drains: Moves the requests of an engine that is ending to other engines.
    """

    def __init__(self, services: Services, drains: Drains) -> None:
        config = services.config
        self._drains = drains
        self._bodies = services.bodies
        self._verifier = Verifier(
            config.secret,
            accept_former=config.accept_former_signatures,
            new_nonce=services.new_nonce,
        )
        self._backends = services.backends
        self._checks = services.checks
        self._refusals: dict[str, str] = {}

    def routes(self) -> list[web.RouteDef]:
        """Its paths."""
        return [
            web.post(REGISTER_PATH, self._register),
            web.delete(REGISTER_PATH, self._deregister),
        ]

    async def _register(self, request: web.Request) -> web.Response:
        registration = await self._signed(request, Registration)
        url, engine = registration.url.rstrip("/"), registration.engine
        try:
            self._backends.require_fit(registration)
            if not self._backends.knows(url, engine):
                await self._checks.reach.require(url, Role(registration.role), engine)
            self._checks.watch(self._backends.register(registration))
        except HandshakeError as error:
            # The engine keeps asking: logging once is enough.
            if self._refusals.get(registration.url) != error.message:
                if len(self._refusals) >= _MAX_REFUSALS:
                    self._refusals.clear()
                self._refusals[registration.url] = error.message
                log_event(
                    log,
                    "registration refused",
                    level=logging.ERROR,
                    engine=registration.url,
                    reason=error.message,
                )
            return error_answer(error, status=409)
        self._refusals.pop(registration.url, None)
        return json_answer({"lease_s": registration.lease_s})

    async def _deregister(self, request: web.Request) -> web.Response:
        leaving = await self._signed(request, Deregistration)
        backend, engine = self._backends.get(leaving.url.rstrip("/")), leaving.engine
        info = None if backend is None else backend.info
        if info and engine and info.incarnation != engine.incarnation:
            return json_answer({})  # another life is at this URL by now
        self._backends.deregister(leaving.url)
        if backend is not None and leaving.deadline_s is not None:
            self._drains.leave(backend, leaving.deadline_s)
        return json_answer({})

    async def _signed(self, request: web.Request, type_: type[Message]) -> Message:
        """Read a message that only the deployment's own parts may send.

        Raises:
            UnauthorizedError: It is from another sender: see `Verifier.check`.
            BadRequestError: It is not such a message.
        """
        body = await self._bodies.read(request)
        self._verifier.check(request, body)
        try:
            return msgspec.json.decode(body, type=type_)
        except UNREADABLE as error:
            raise BadRequestError(f"the registration cannot be read: {error}") from None
