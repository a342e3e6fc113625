"""What two movers say to one another, over the side channel, to agree on a copy.

Whoever receives posts its receive first and draws the message's tag, so no message ever comes that
nobody waits for, and none is taken for another. Each tag that is told gets one message, or all that
are awaited from there end with `SendBroken`. What UCX brings from strangers has no such tag.

    READ    FetchCopy ----->             WRITE   OfferCopy ----->
            <------ message                      <------ TakeCopy
            DropCopy ------>  (unwanted)         message ------->
                                                 <---- CopyLanded
                                                 WithdrawCopy -->  (unwanted)
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

Size = Annotated[int, msgspec.Meta(ge=1)]
Tag = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

MAX_TRIAL_BYTES = 1 << 16
"""Of what is fetched only to try the way."""


class FetchCopy(msgspec.Struct, frozen=True, tag="fetch"):
    """Send these units of the memory of whoever hears this.

    Attributes:
        units: int32, little-endian; without any, `unit_bytes` of no meaning are to be sent.
    """

    tag: Tag
    unit_bytes: Size
    units: bytes


class DropCopy(msgspec.Struct, frozen=True, tag="drop"):
    """What was fetched under this tag is not wanted; an empty message will do."""

    tag: Tag


class OfferCopy(msgspec.Struct, frozen=True, tag="offer"):
    """Something is there to be written to these units of the memory of whoever hears this."""

    copy_id: int
    unit_bytes: Size
    units: bytes


class TakeCopy(msgspec.Struct, frozen=True, tag="take"):
    """Send what was offered; a receive is posted."""

    copy_id: int
    tag: Tag


class CopyLanded(msgspec.Struct, frozen=True, tag="landed"):
    """What was offered is written, or, with a reason, never will be."""

    copy_id: int
    why_not: str = ""


class WithdrawCopy(msgspec.Struct, frozen=True, tag="withdraw"):
    """What was offered is not to be written any more; an empty message answers a `TakeCopy`."""

    copy_id: int


class SendBroken(msgspec.Struct, frozen=True, tag="broken"):
    """A message could not be sent: none of those that are awaited from here will come."""


Frame = FetchCopy | DropCopy | OfferCopy | TakeCopy | CopyLanded | WithdrawCopy | SendBroken

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Frame).decode


def to_units(units: bytes) -> npt.NDArray[np.int32]:
    """The units that a frame names."""
    return np.frombuffer(units, dtype="<i4")
