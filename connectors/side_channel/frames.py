"""Authenticated frames for the side channel, as a pure state machine over bytes.

Each side opens with a preamble: a magic that names the protocol, and a fresh nonce. Every
frame after it is

    length (4 bytes, big endian) | HMAC-SHA256 (32 bytes) | payload

keyed by the deployment's secret, both nonces and the direction, over the frame's sequence
number and payload. So a frame cannot be forged or edited, nor replayed, reordered, dropped
or reflected: in another connection the key differs, in the same one the sequence number.
Payloads are not encrypted: they name blocks and leases, never tokens. This module knows
neither sockets nor what a payload means.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from pdserve.connectors.transfer.seams import Fault, FrameError
from pdserve.wire.seal import PROTOCOL, Purpose, key_for

MAX_PAYLOAD_BYTES = 1 << 20

_NAME = b"pdserve"
_MAGIC = _NAME + bytes([PROTOCOL])
_NONCE_BYTES = 32
_MAC_BYTES = hashlib.sha256().digest_size
_HEADER_BYTES = 4 + _MAC_BYTES
_PREAMBLE_BYTES = len(_MAGIC) + _NONCE_BYTES


class FrameSession:
    """One connection's framing, both directions.

    Args:
        is_client: Whether this side connected.
        nonce: 32 random bytes, used for one connection only.
    """

    def __init__(self, secret: bytes, *, is_client: bool, nonce: bytes) -> None:
        if len(nonce) != _NONCE_BYTES:
            raise ValueError(f"nonce has {len(nonce)} bytes, must have {_NONCE_BYTES}")
        self._secret = secret
        self.is_client = is_client
        self._nonce = nonce
        self._buffer = bytearray()
        self._unsent = [_MAGIC + nonce]
        self._waiting: list[bytes] = []
        self._send_key: bytes | None = None
        self._receive_key = b""
        self._num_sent = 0
        self._num_received = 0

    @property
    def is_authenticated(self) -> bool:
        """Whether the peer has proven, by a good frame, that it knows the secret."""
        return self._num_received > 0

    def send(self, payload: bytes) -> None:
        """Queue a frame, which is held back until the peer's preamble has arrived.

        Args:
            payload: At most `MAX_PAYLOAD_BYTES`; the peer refuses more.
        """
        if self._send_key is None:
            self._waiting.append(payload)
        else:
            self._unsent.append(self._seal(payload))

    def take_unsent(self) -> bytes:
        """Return the bytes for the wire queued since the last call."""
        unsent, self._unsent = self._unsent, []
        return b"".join(unsent)

    def receive(self, data: bytes) -> list[bytes]:
        """Take bytes off the wire; return the payloads of all frames they complete.

        Raises:
            FrameError: The bytes are no frame of this deployment's. Close the connection.
        """
        buffer = self._buffer
        buffer += data
        if self._send_key is None:
            self._check_magic()
            if len(buffer) < _PREAMBLE_BYTES:
                return []
            self._establish(bytes(buffer[len(_MAGIC) : _PREAMBLE_BYTES]))
            del buffer[:_PREAMBLE_BYTES]
        payloads = []
        while len(buffer) >= _HEADER_BYTES:
            (length,) = struct.unpack_from(">I", buffer)
            if length > MAX_PAYLOAD_BYTES:
                raise FrameError(
                    Fault.OVERSIZE,
                    f"a frame has {length} bytes; at most {MAX_PAYLOAD_BYTES} are allowed",
                )
            end = _HEADER_BYTES + length
            if len(buffer) < end:
                break
            mac, payload = bytes(buffer[4:_HEADER_BYTES]), bytes(buffer[_HEADER_BYTES:end])
            expected = _mac(self._receive_key, self._num_received, payload)
            if not hmac.compare_digest(mac, expected):
                raise FrameError(
                    Fault.UNAUTHENTIC,
                    "a frame's HMAC does not match: the peer has another secret or replays it",
                )
            self._num_received += 1
            del buffer[:end]
            payloads.append(payload)
        return payloads

    def _check_magic(self) -> None:
        seen = bytes(self._buffer[: len(_MAGIC)])
        if seen == _MAGIC[: len(seen)]:
            return
        if seen[:-1] == _NAME:
            raise FrameError(
                Fault.MAGIC,
                f"the peer speaks protocol {seen[-1]} and this engine speaks {PROTOCOL}",
            )
        raise FrameError(Fault.MAGIC, f"the connection starts with {seen!r} instead of {_MAGIC!r}")

    def _establish(self, peer_nonce: bytes) -> None:
        client, server = (self._nonce, peer_nonce) if self.is_client else (peer_nonce, self._nonce)
        to_server = _key(self._secret, b"to server", client, server)
        to_client = _key(self._secret, b"to client", client, server)
        self._send_key, self._receive_key = (
            (to_server, to_client) if self.is_client else (to_client, to_server)
        )
        waiting, self._waiting = self._waiting, []
        self._unsent.extend(self._seal(payload) for payload in waiting)

    def _seal(self, payload: bytes) -> bytes:
        assert self._send_key is not None
        mac = _mac(self._send_key, self._num_sent, payload)
        self._num_sent += 1
        return struct.pack(">I", len(payload)) + mac + payload


def _key(secret: bytes, label: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    key = key_for(secret, Purpose.SIDE_CHANNEL)
    return hmac.digest(key, label + client_nonce + server_nonce, "sha256")


def _mac(key: bytes, sequence: int, payload: bytes) -> bytes:
    return hmac.digest(key, struct.pack(">Q", sequence) + payload, "sha256")
