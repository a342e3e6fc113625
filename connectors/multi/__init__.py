"""Several connectors as one: a prompt's KV comes in parts, each from the cheapest that has it.

`sources` chooses who loads: of the connectors that have the next tokens, the one with the least
measured time per token. Loads beside the steps follow one after the other; loads inside a step
begin together. If a load fails, another source is asked; if there is none, the tokens are computed.
Every connector may save, sees only its own reports, and may hold a request's blocks after its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.connectors.base import Capabilities, KVConnectorBase
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.connectors.base import ConnectorContext, KVConnectorScheduler, KVConnectorWorker
    from pdserve.wire.transfer import Endpoint


class MultiConnector(KVConnectorBase, frozen=True, kw_only=True):
    """See `KVConnectorBase`.

    Attributes:
        connectors: At least two, with different names; at most one of them has peers.
    """

    connectors: tuple[KVConnectorBase, ...]

    @classmethod
    def of(cls, connectors: Sequence[KVConnectorBase]) -> MultiConnector:
        """Combine connectors; sources of equal cost are asked in this order.

        Raises:
            ConfigError: One is named twice, or two of them exchange KV with other engines.
        """
        names = [each.name for each in connectors]
        if len(set(names)) < len(names):
            raise _refusal(names, "name each connector once")
        with_peers = [each.name for each in connectors if each.capabilities.push]
        if len(with_peers) > 1:
            raise _refusal(names, f"of {' and '.join(with_peers)} choose one: both go to engines")
        return cls(
            name=",".join(names),
            capabilities=Capabilities(push=bool(with_peers)),
            connectors=tuple(connectors),
        )

    def make_scheduler(
        self, context: ConnectorContext, endpoints: Sequence[Endpoint]
    ) -> KVConnectorScheduler:
        """See `KVConnectorBase`."""
        from pdserve.connectors.multi.scheduler import MultiScheduler

        halves = {each.name: each.make_scheduler(context, endpoints) for each in self.connectors}
        return MultiScheduler(halves, block_size=context.layout.block_size)

    def make_worker(self, context: ConnectorContext, wake: Callable[[], None]) -> KVConnectorWorker:
        """See `KVConnectorBase`."""
        from pdserve.connectors.multi.worker import MultiWorker
        from pdserve.observe.clock import SystemClock

        halves = {each.name: each.make_worker(context, wake) for each in self.connectors}
        return MultiWorker(halves, clock=SystemClock())


def _refusal(names: Sequence[str], why: str) -> ConfigError:
    flag = "kv-transfer-config.kv-connector"
    return ConfigError(f"--{flag} is {','.join(names)!r}: {why}", param=flag)
