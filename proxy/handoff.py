"""The handoff of one attempt: what a decode engine continues from, and its leases.

    with Handoff(prefill, http, metrics, story) as handoff:
        handoff.read(data)        # the prefill leg looks through what its engine says
        handoff.complete(answer)  # and has ended: the decode leg may go on
        handoff.spend()           # the decode leg has ended well: its engine has ended the leases

It owns the leases from the moment it is read. On every exit from the block except after `spend`,
cancellation included, they are given back, here and nowhere else. An abandoned leg may still read
a handoff after the block: that one is given back at once.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.errors import BadRequestError
from pdserve.proxy.bodies import Fields
from pdserve.proxy.errors import WorkerError
from pdserve.wire.hop import HANDOFF, OURS, PARAMS, PdserveParams
from pdserve.wire.seal import UNREADABLE
from pdserve.wire.transfer import HANDOFFS

if TYPE_CHECKING:
    from typing import Self

    from pdserve.proxy.backend import Backend
    from pdserve.proxy.client import EngineHttp
    from pdserve.proxy.leg import Leg
    from pdserve.proxy.metrics import Metrics
    from pdserve.proxy.services import Services
    from pdserve.proxy.story import Story

_NAMES = tuple(f'"{name}"'.encode() for name in (HANDOFF, PARAMS))
"""As they stand in JSON: what is without them is not decoded."""


class Handoff:
    """The data with which a decode engine continues a prefill engine's work; empty until read.

    Args:
        prefill: The engine that provides it and holds the leases.

    Attributes:
        life: That engine's life when it was asked; None if it does not say.
        params: The `kv_transfer_params` to forward.
        cached_tokens: Prompt tokens found in a prefix cache, per choice, if the engine says.
        answer: The prefill engine's JSON if the client wants one piece, else None.
        reader: The newest leg that reads the KV. Leases are given back only after it has ended: a
            lease that ended during its read would look to it like lost KV.
    """

    def __init__(self, prefill: Backend, http: EngineHttp, metrics: Metrics, story: Story) -> None:
        self.prefill = prefill
        self._http = http
        self._metrics = metrics
        self._story = story
        self._nonces: list[str] = []
        self._is_over = False
        self._completed = asyncio.Event()
        self.life = None if prefill.info is None else prefill.info.incarnation
        self.params: dict[str, Any] = {}
        self.cached_tokens: list[int] | None = None
        self.answer: bytes | None = None
        self.reader: Leg | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._give_back()

    @property
    def is_read(self) -> bool:
        """Whether the prefill engine has given it."""
        return bool(self.params)

    @property
    def is_complete(self) -> bool:
        """Whether a decode engine may go on from it: the prefill leg has ended well."""
        return self._completed.is_set()

    def read(self, data: bytes) -> bool:
        """Own the handoff in an event's data or in a whole answer; return whether there is one.

        Raises:
            WorkerError: There is one and it cannot be read.
        """
        if not any(name in data for name in _NAMES):
            return False
        try:
            fields = msgspec.json.decode(data, type=Fields)
            raw = fields.get(HANDOFF) or fields.get(PARAMS)
            params = None if raw is None else msgspec.json.decode(raw)
            if params is None:
                return False
            ours = msgspec.convert(params[OURS], PdserveParams)
            if ours.handoffs is None:
                raise BadRequestError(f"{PARAMS}.{OURS} has no handoffs")
            leases = [HANDOFFS.peek(text) for text in ours.handoffs if text is not None]
        except (BadRequestError, *UNREADABLE, KeyError, TypeError) as error:
            message = f"{self.prefill.url} sent a handoff that cannot be read: {error!r}"
            raise WorkerError(message, reason="garbled") from error
        self.params = params
        self.cached_tokens = ours.cached_tokens
        self._nonces = [lease.nonce for lease in leases]
        if self._is_over:
            self._give_back()
        return True

    def complete(self, answer: bytes | None = None) -> None:
        """Note that the prefill leg ended well, with its whole answer if any; release decoding."""
        self.answer = answer
        self._completed.set()

    async def completed(self) -> None:
        """Wait until a decode engine's output may be passed on."""
        await self._completed.wait()

    def spend(self) -> None:
        """Forget the leases: the decode engine has ended them."""
        self._nonces = []

    def _give_back(self) -> None:
        nonces, self._nonces = self._nonces, []
        if nonces:
            self._metrics.releases.inc()
            self._story.tell("handoff given back")
            self._http.release(self.prefill.url, nonces, after=self.reader)


def leave(leg: Leg, engine: Backend, services: Services, story: Story) -> None:
    """Hang up on a stream, and give back the handoff that its engine may have been asked for."""
    if not leg.may_move and leg.moved is None:
        leg.hang_up()
        return
    with Handoff(engine, services.http, services.metrics, story) as late, suppress(WorkerError):
        if leg.moved is not None:  # one that cannot be read changes nothing about why this is left
            late.read(leg.moved)
    leg.abandon(late.read)  # what is read now is given back at once, too
