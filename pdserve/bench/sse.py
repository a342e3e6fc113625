"""Parses server-sent events from bytes as they arrive (WHATWG HTML, section 9.2.6).

Reads may end anywhere: inside a character, between CR and LF, in the middle of a field. Knows
no connection and no JSON.
"""

from __future__ import annotations

from typing import Final

_BOM: Final = b"\xef\xbb\xbf"


class EventParser:
    """Collects bytes, and returns the data of each complete event."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_first = True

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; return the data of newly completed events, in order.

        Data of several lines is joined by line feeds. Comments, other fields, and events
        without data are left out.
        """
        data = self._rest + data
        if self._is_first:
            if len(data) < len(_BOM) and _BOM.startswith(data):
                self._rest = data
                return []
            data = data.removeprefix(_BOM)
            self._is_first = False
        if b"\r" in data:
            # A CR at the very end may be half of a CRLF: it waits for the next byte.
            held = b"\r" if data.endswith(b"\r") else b""
            data = data[: len(data) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        else:
            held = b""
        *events, rest = data.split(b"\n\n")
        self._rest = rest + held
        return [found for event in events if (found := _data_of(event)) is not None]


def _data_of(event: bytes) -> bytes | None:
    if event.startswith(b"data: ") and b"\n" not in event:  # what nearly all servers send
        return event[6:]
    values = []
    for line in event.split(b"\n"):
        name, _, value = line.partition(b":")
        if name == b"data":
            values.append(value.removeprefix(b" "))
    return b"\n".join(values) if values else None
