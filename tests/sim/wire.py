"""The exchange of the memory connector, with edges that can be cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.connectors.memory.exchange import Exchange

if TYPE_CHECKING:
    from pdserve.connectors.memory.exchange import ExchangeMember


class SimExchange(Exchange):
    """See `Exchange`.

    Attributes:
        cut: Pairs of engines that cannot reach one another, in either direction.
    """

    def __init__(self, *, is_direct: bool, is_driven: bool) -> None:
        super().__init__(is_direct=is_direct, is_driven=is_driven)
        self.cut: set[frozenset[str]] = set()

    def is_cut(self, one: ExchangeMember, other: ExchangeMember) -> bool:
        return frozenset((one.context.engine_id, other.context.engine_id)) in self.cut
