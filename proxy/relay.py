"""Server-sent events without re-encoding: bytes in, the same bytes out, whole events only.

`SseParser` splits a stream, for the prefill leg, whose few events are examined one by
one. `Relay` is the decode leg's hot path: it passes bytes on as they arrive and looks inside
only when a cheap search finds a marker. Events that begin with `{"pdserve_` are for the
proxy and are taken out; a model cannot produce one, because its text sits inside a JSON
string further on. Knows nothing of engines, clients or requests.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pdserve.proxy.errors import WorkerError
from pdserve.wire.hop import HANDOFF, INTERNAL

_BOUNDARY = re.compile(rb"\n\r?\n")
_LINE = re.compile(rb"\r?\n")
_MARKER = b'"' + INTERNAL.encode()
_HANDOFF = b'{"' + HANDOFF.encode() + b'"'
_ERROR = b'{"error"'
_DONE_DATA = b"[DONE]"
_DONE_EVENT = b"data: [DONE]\n\n"

MAX_EVENT_BYTES = 256 << 20
"""An engine that sends more than this without ending an event is not understood."""


class Event(NamedTuple):
    """One server-sent event: its bytes as received, blank line included, and its data."""

    raw: bytes
    data: bytes

    @property
    def is_done(self) -> bool:
        """Whether this is the end mark."""
        return self.data == _DONE_DATA

    @property
    def is_internal(self) -> bool:
        """Whether it is meant for the proxy."""
        return self.data.startswith(b"{" + _MARKER)

    @property
    def is_error(self) -> bool:
        """Whether it is an OpenAI error object."""
        return self.data.startswith(_ERROR)


class SseParser:
    """Cuts a byte stream into events, however the bytes are split. Lines end in LF or CRLF."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that `data` completes.

        Raises:
            WorkerError: An event is larger than `MAX_EVENT_BYTES`.
        """
        self._buffer += data
        events = []
        start = 0
        search_from = self._searched
        while match := _BOUNDARY.search(self._buffer, search_from):
            raw = bytes(self._buffer[start : match.end()])
            events.append(Event(raw, _data_of(raw)))
            start = search_from = match.end()
        del self._buffer[:start]
        if len(self._buffer) > MAX_EVENT_BYTES:
            raise WorkerError("the engine sent an event that does not end", reason="garbled")
        # A boundary has at most 3 bytes, so only the last 2 may begin one.
        self._searched = max(0, len(self._buffer) - 2)
        return events


class Relay:
    """Passes a decode stream through.

    Attributes:
        done: Whether the end mark has arrived; nothing after it is passed on.
        num_events: Events passed on, without the end mark.
        internal: Data of the events taken out.
        handoff: The one of these that ends the stream, from which another engine continues;
            that engine sends the end mark.
        error: Data of an error event. The stream ends before it; the caller decides
            whether the client sees it.
    """

    def __init__(self) -> None:
        self.done = False
        self.num_events = 0
        self.internal: list[bytes] = []
        self.handoff: bytes | None = None
        self.error: bytes | None = None
        self._tail = b""
        self._slow: SseParser | None = None

    def feed(self, chunk: bytes) -> bytes:
        """Return the whole events for the client that have not been returned yet."""
        if self.done or self.error is not None:
            return b""
        if self._slow is not None:
            return self._take(self._slow.feed(chunk))
        if self._tail:
            chunk = self._tail + chunk
        # JSON escapes CR, so a CR means lines framed with CRLF; and joining a long event
        # piece by piece is quadratic here and not in the parser.
        if b"\r" in chunk or len(self._tail) > 1 << 16:
            self._slow, self._tail = SseParser(), b""
            return self._take(self._slow.feed(chunk))
        end = chunk.rfind(b"\n\n") + 2
        if end == 1:
            self._tail = chunk
            return b""
        whole, self._tail = (chunk, b"") if end == len(chunk) else (chunk[:end], chunk[end:])
        if _MARKER in whole or _ERROR in whole or _DONE_EVENT in whole:
            return self._take(SseParser().feed(whole))
        self.num_events += whole.count(b"\n\n")
        return whole

    def _take(self, events: list[Event]) -> bytes:
        kept = []
        for event in events:
            if event.is_internal:
                self.internal.append(event.data)
                if event.data.startswith(_HANDOFF):
                    self.handoff = event.data
            elif event.is_done and self.handoff is not None:
                self.done = True
                break
            elif event.is_error:
                self.error = event.data
                break
            else:
                kept.append(event.raw)
                if event.is_done:
                    self.done = True
                    break
                self.num_events += 1
        return b"".join(kept)


def _data_of(raw: bytes) -> bytes:
    """Return the event's data: its data lines joined by LF (WHATWG HTML, section 9.2.6)."""
    if raw.startswith(b"data: ") and raw.find(b"\n") == len(raw) - 2 and b"\r" not in raw:
        return raw[6:-2]
    lines = []
    for line in _LINE.split(raw):
        if line.startswith(b"data:"):
            value = line[5:]
            lines.append(value[1:] if value.startswith(b" ") else value)
    return b"\n".join(lines)
