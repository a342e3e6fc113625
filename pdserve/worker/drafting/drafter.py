"""What makes drafts: it sees a request's tokens and guesses those that follow.

A guess is never trusted: what a request puts out is the same for every drafter, and without one.
So ranks, stages and engines need not agree on anything but on the drafts of a step that they run
together: a drafter is a pure function of the tokens that it was told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.wire.step import NewRequest


class Drafter(Protocol):
    """Drafts for the rows of a batch."""

    def add(self, row: int, request: NewRequest) -> None:
        """Give `row` to a request, with the tokens it has already."""
        ...

    def remove(self, row: int) -> None:
        """Free `row`: its request is gone."""
        ...

    def note(self, row: int, token_ids: Sequence[int]) -> None:
        """Note tokens that the request of `row` has put out."""
        ...

    def propose(self, row: int, max_tokens: int) -> list[int]:
        """Return what may follow its tokens, at most so many of them; empty for no guess."""
        ...
