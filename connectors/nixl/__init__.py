"""KV over NIXL: D reads P's leased blocks with one-sided READs.

`worker` is a facade over the thread in `transfer`, which runs `serving` (what P does) and
`peers` (what D does) over a `reactor`; these speak `protocol` over `channel` and `frames`,
and move bytes with `agent`. The scheduler half is `pdserve.connectors.pull.scheduler`.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from pdserve.connectors.pull.scheduler import PullScheduler
from pdserve.observe.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.connectors.base import (
        ConnectorContext,
        ConnectorFactory,
        KVConnectorScheduler,
        KVConnectorWorker,
    )
    from pdserve.wire.transfer import Endpoint


class NixlFactory:
    """See `ConnectorFactory`.

    Args:
        quarantine_s: How long a lost transfer may stay in flight before the NIXL agent is
            destroyed, which ends it for certain, and every other transfer of the rank.
    """

    def __init__(self, *, quarantine_s: float = 30.0) -> None:
        self._quarantine_s = quarantine_s

    def scheduler(
        self, context: ConnectorContext, endpoints: list[Endpoint]
    ) -> KVConnectorScheduler:
        """See `ConnectorFactory`."""
        return PullScheduler(context, endpoints, new_nonce=secrets.token_urlsafe)

    def worker(self, context: ConnectorContext, wake: Callable[[], None]) -> KVConnectorWorker:
        """See `ConnectorFactory`."""
        # The worker half needs torch, which the scheduler's side must not import.
        from pdserve.connectors.nixl.worker import NixlWorker

        return NixlWorker(context, wake, clock=SystemClock(), quarantine_s=self._quarantine_s)


FACTORY: ConnectorFactory = NixlFactory()
