"""What can go wrong on the wire of one rank; here nothing does."""

from __future__ import annotations

import enum


class Spoil(enum.Enum):
    """What becomes of bytes on their way."""

    CORRUPT = "corrupt"
    TRUNCATE = "truncate"


class Trouble:
    """Asked at each opportunity. See `connectors.faulty` for one that makes any."""

    def frame_polls(self) -> int:
        """For how many more polls of this rank a frame to it is under way."""
        return 0

    def loses_link(self) -> bool:
        """Whether a link breaks, with what is under way, as this rank sends over it."""
        return False

    def copy_polls(self) -> int:
        """For how many more polls a copy of this rank takes."""
        return 0

    def spoils(self) -> Spoil | None:
        """What becomes of the last bytes of a copy into this rank's memory."""
        return None
