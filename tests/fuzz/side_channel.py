"""Frames of the side channel, authenticated, for the transfer thread of a P that runs."""

from __future__ import annotations

import contextlib
import itertools
import typing
from typing import Any, Final

import msgspec
from hypothesis import strategies as st

from pdserve.connectors.conformance.engines import prompt_of
from pdserve.connectors.nixl import NixlConnector
from pdserve.connectors.side_channel.frames import MAX_PAYLOAD_BYTES
from pdserve.connectors.transfer.protocol import Hello, ToServer
from tests.connectors.engines import Engine
from tests.connectors.test_side_channel import SECRET, Caller, hello
from tests.fuzz.values import bent, like, of

PROMPT: Final = prompt_of(40)
_KINDS: Final = [kind for kind in typing.get_args(ToServer) if kind is not Hello]


class SideChannelTarget:
    """A P and a D over NIXL, and somebody who knows the secret. See `Target`."""

    num_refused = 0

    def __init__(self) -> None:
        self._p, self._d = (
            Engine(NixlConnector(), name, secret=SECRET, handshake_timeout_s=5.0) for name in "PD"
        )
        self._hello = hello(self._p)
        self._ids = itertools.count()
        # Its lanes begin with the first memory that it hears of: what they open is no leak.
        self._server._seams.mover.meet(b"nobody", self._hello.pool)

    @property
    def _server(self) -> Any:
        thread: Any = self._p.ranks[0].worker
        return thread._runner._machine.server

    @property
    def num_held(self) -> int:
        """Leases and pushes."""
        return len(self._server.leases) + self._server.pushing.num_live

    def try_one(self, data: st.DataObject) -> None:
        """See `Target`: one connection, and what is said over it."""
        said: list[msgspec.Struct] = []
        if data.draw(st.integers(0, 4)):
            said.append(data.draw(like(self._hello)) if data.draw(st.booleans()) else self._hello)
        kinds = data.draw(st.lists(st.sampled_from(_KINDS), max_size=4))
        said += [data.draw(of(kind)) for kind in kinds]
        payloads = [msgspec.msgpack.encode(each)[: MAX_PAYLOAD_BYTES - 64] for each in said]
        if payloads and data.draw(st.booleans()):
            payloads[-1] = data.draw(bent(payloads[-1]))
        caller = Caller(self._p.endpoint)
        with caller.sock, contextlib.suppress(ConnectionError):  # it hangs up on what it dislikes
            caller.meet()
            for payload in payloads:
                caller.say(payload)
        self._p.step()

    def check_service(self) -> None:
        """See `Target`."""
        p, d = self._p, self._d
        d.received.clear()
        handoff = p.prefill(PROMPT, [1, 2, 3])
        d.load(d.queue(PROMPT, handoff, f"r{next(self._ids)}"), [4, 5, 6])
        d.until(lambda: d.received, timeout_s=60.0)
        assert d.holds([4, 5, 6], [1, 2, 3])
        p.until(lambda: not self.num_held, timeout_s=60.0)

    def close(self) -> None:
        """See `Target`."""
        for engine in (self._d, self._p):
            engine.close()
