"""KV over NIXL: D reads P's leased blocks, or P writes into those that D has reserved.

`worker` is a facade over the thread in `transfer`. That one runs both sides over a `reactor`: P's
(`serving` what is read, `pushing` what is written) and D's (`peers` it is connected to, `loads`
that it reads, `receiving` what is written to it). They speak `protocol` over `channel` and
`frames`, and have bytes moved by `lanes`, each a thread with an `agent` of its own.
The scheduler half is `pdserve.connectors.handover.scheduler`.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from pdserve.connectors.handover.scheduler import HandoverScheduler
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
    """See `ConnectorFactory`."""

    def scheduler(
        self, context: ConnectorContext, endpoints: list[Endpoint]
    ) -> KVConnectorScheduler:
        """See `ConnectorFactory`."""
        return HandoverScheduler(
            context, endpoints, new_nonce=secrets.token_urlsafe, clock=SystemClock()
        )

    def worker(self, context: ConnectorContext, wake: Callable[[], None]) -> KVConnectorWorker:
        """See `ConnectorFactory`."""
        # The worker half needs torch, which the scheduler's side must not import.
        from pdserve.connectors.nixl.worker import NixlWorker

        quarantine_s = context.config.transfer.quarantine_s
        return NixlWorker(context, wake, clock=SystemClock(), quarantine_s=quarantine_s)


FACTORY: ConnectorFactory = NixlFactory()
