"""A pool of grammars whose threads do nothing until they are told to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.worker.grammar import GrammarPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.text.grammar import GrammarCompiler


class HeldPool(GrammarPool):
    """A pool whose threads do nothing until `release`."""

    def __init__(self, load: Callable[[], GrammarCompiler]) -> None:
        super().__init__(load)
        self._held: list[Callable[[], None]] = []

    def submit(self, work: Callable[[], None], *, is_slow: bool = False) -> None:
        self._held.append(work)

    def release(self) -> None:
        """Have everything done that was submitted."""
        held, self._held[:] = self._held[:], []
        for work in held:
            super().submit(work)

    def do(self) -> None:
        """Do everything that was submitted, in this thread."""
        held, self._held[:] = self._held[:], []
        for work in held:
            work()
