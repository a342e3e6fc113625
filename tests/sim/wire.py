"""The exchange of the memory connector, with edges that can be cut."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from pdserve.connectors.memory.exchange import Exchange

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.connectors.memory.worker import MemoryWorker
    from pdserve.wire.transfer import Endpoint


class SimExchange(Exchange):
    """Whoever asks is told by `asked_by`: the simulation has one thread.

    Attributes:
        cut: Pairs of engines that cannot reach one another, in either direction.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cut: set[frozenset[str]] = set()
        self._names: dict[Endpoint, str] = {}
        self._asker = ""

    def name(self, endpoint: Endpoint, engine: str) -> None:
        """Say whose endpoint it is."""
        self._names[endpoint] = engine

    @contextmanager
    def asked_by(self, engine: str) -> Iterator[None]:
        """What is looked for in here is looked for by `engine`."""
        former, self._asker = self._asker, engine
        try:
            yield
        finally:
            self._asker = former

    def find(self, endpoint: Endpoint) -> MemoryWorker | None:
        if frozenset((self._asker, self._names.get(endpoint, ""))) in self.cut:
            return None
        return super().find(endpoint)
