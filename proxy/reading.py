"""Reads connections into one buffer that all of them share.

asyncio makes 256 KiB of memory for each read and cuts it to what came. That takes longer than
the read itself, and for a token is a third of all that the proxy does. Knows nothing of what
is read.
"""

from __future__ import annotations

import asyncio

_NUM_BYTES = 64 << 10
_BUFFER = memoryview(bytearray(_NUM_BYTES))
"""An event loop fills it and empties it in one go, so no connection finds another's bytes."""


class SharedReader(asyncio.BufferedProtocol):
    """Stands between a transport and the protocol that its bytes are for.

    Use one event loop per process.
    """

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self._protocol = protocol

    @classmethod
    def put_before(cls, protocol: asyncio.Protocol, transport: asyncio.Transport) -> None:
        """Let `protocol`, whose transport this is, read in this way from now on."""
        if transport.get_protocol() is protocol:
            transport.set_protocol(cls(protocol))

    def get_buffer(self, sizehint: int) -> memoryview:
        """See the base class."""
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        """See the base class."""
        self._protocol.data_received(bytes(_BUFFER[:nbytes]))

    def eof_received(self) -> bool | None:
        """See the base class."""
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        """See the base class."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """See the base class."""
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """See the base class."""
        self._protocol.connection_lost(exc)
