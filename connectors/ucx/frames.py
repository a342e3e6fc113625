"""Messages on the side channel by which two movers agree on a copy.

The receiver posts its receive first and draws the message's tag, so every message that arrives is
awaited, and none is mistaken for another. Each announced tag gets one message, or `SendBroken` ends
all messages that are awaited from that peer. Messages from strangers have no such tag.

    READ    FetchCopy ----->             WRITE   OfferCopy ----->
            <------ message                      <------ TakeCopy
            DropCopy ------>  (unwanted)         message ------->
                                                 <---- CopyLanded
                                                 WithdrawCopy -->  (unwanted)
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Size = Annotated[int, msgspec.Meta(ge=1)]
Tag = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

MAX_COPY_BYTES = 64 << 20
"""Size limit of copies of more than one block: no engine cuts transfers into larger ones."""
MAX_TRIAL_BYTES = 1 << 16
"""Size limit of messages that are fetched only to test the connection."""


class FetchCopy(msgspec.Struct, frozen=True, tag="fetch"):
    """Asks the recipient to send units of its memory.

    Attributes:
        units: int32, little-endian; if empty, send `unit_bytes` arbitrary bytes.
    """

    tag: Tag
    unit_bytes: Size
    units: bytes


class DropCopy(msgspec.Struct, frozen=True, tag="drop"):
    """The message fetched under this tag is no longer wanted; it may be sent empty."""

    tag: Tag


class OfferCopy(msgspec.Struct, frozen=True, tag="offer"):
    """Offers bytes to be written to these units of the recipient's memory."""

    copy_id: int
    unit_bytes: Size
    units: bytes


class TakeCopy(msgspec.Struct, frozen=True, tag="take"):
    """Asks for an offered copy; its receive is posted."""

    copy_id: int
    tag: Tag


class CopyLanded(msgspec.Struct, frozen=True, tag="landed"):
    """An offered copy is written or, with a reason, never will be."""

    copy_id: int
    why_not: str = ""


class WithdrawCopy(msgspec.Struct, frozen=True, tag="withdraw"):
    """An offered copy must not be written any more; an empty message answers a `TakeCopy`."""

    copy_id: int


class SendBroken(msgspec.Struct, frozen=True, tag="broken"):
    """A message could not be sent; no other message awaited from this sender will arrive."""


Frame = FetchCopy | DropCopy | OfferCopy | TakeCopy | CopyLanded | WithdrawCopy | SendBroken

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Frame).decode
