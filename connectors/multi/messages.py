"""Messages between the two halves of the multi connector, which wrap their children's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdserve.wire.ids import RequestId
from pdserve.wire.transfer import ConnectorMetadata

if TYPE_CHECKING:
    from collections.abc import Mapping


class MultiInstructions(msgspec.Struct, frozen=True, omit_defaults=True):
    """To the worker halves, with a step or beside them.

    Attributes:
        payloads: Metadata of each child's scheduler half, by the child's name.
        num_loading: Tokens that each child loads inside this step.
        lost: Requests whose connectors failed to begin their loads inside this step.
    """

    payloads: dict[str, bytes]
    num_loading: dict[str, int] = {}
    lost: list[RequestId] = []

    @classmethod
    def of(cls, said: Mapping[str, ConnectorMetadata | None]) -> MultiInstructions:
        """Combine the children's metadata, leaving out those without any."""
        return cls({name: each.payload for name, each in said.items() if each is not None})

    def to_metadata(self) -> ConnectorMetadata | None:
        """Encode; None if there is nothing to say."""
        is_empty = not (self.payloads or self.lost)
        return None if is_empty else ConnectorMetadata(msgspec.msgpack.encode(self))

    @staticmethod
    def from_metadata(metadata: ConnectorMetadata) -> MultiInstructions:
        """Decode what `to_metadata` made."""
        return _INSTRUCTIONS.decode(metadata.payload)


class ChildNews(msgspec.Struct, frozen=True, omit_defaults=True):
    """To the scheduler half, from one rank.

    Attributes:
        child: Name of the child that the news concerns.
        payload: Payload of the child's worker half; None if the news is the multi connector's own.
        num_tokens, waited_s: Tokens loaded inside a step, and how long the step waited.
    """

    child: str
    payload: bytes | None = None
    num_tokens: int = 0
    waited_s: float = 0.0

    def to_payload(self) -> bytes:
        """Encode."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def from_payload(payload: bytes) -> ChildNews:
        """Decode what `to_payload` made."""
        return _CHILD_NEWS.decode(payload)


# Made here and not at the first use, which is in several threads: see `handover.instructions`.
_INSTRUCTIONS = msgspec.msgpack.Decoder(MultiInstructions)
_CHILD_NEWS = msgspec.msgpack.Decoder(ChildNews)
