"""`/drain` of a proxy: request and answer."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

PATH: Final = "/drain"
MAX_DEADLINE_S: Final = 86400.0
DEADLINE_S: Final = 30.0


class DrainRequest(msgspec.Struct, frozen=True):
    """The body of `POST /drain`, and, without a deadline, of `DELETE /drain`.

    Attributes:
        url: The engine's base URL, as the proxy knows it.
        deadline_s: What still runs there shortly before that goes on elsewhere.
    """

    url: str
    deadline_s: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_DEADLINE_S)] = DEADLINE_S


class DrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `POST /drain`, once it is over.

    Attributes:
        is_empty: Nothing of this proxy runs there, and the engine, if it says, holds no request and
            no KV that others may read.
        seconds: How long it took.
        num_finished: Exchanges that ended there by themselves.
        num_moved: Exchanges that were ended there, and go on elsewhere.
        num_left: Exchanges of this proxy that still run there.
    """

    url: str
    is_empty: bool
    seconds: float
    num_finished: int
    num_moved: int
    num_left: int = 0
