"""A connector as another package adds one: the one `FLIPPED` names, over memory that can flip.

The test writes the number of a block into the file that `FLIP_FILE` names; one bit of that block
changes then, behind the engine's back, and the file is removed.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.connectors.base import Capabilities, KVConnectorBase
from pdserve.connectors.registry import find

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pdserve.connectors.base import (
        ConnectorContext,
        KVConnectorScheduler,
        KVConnectorWorker,
        KVLayout,
    )
    from pdserve.wire.transfer import Endpoint


_INNER = find(os.environ["FLIPPED"])


class FlippedConnector(KVConnectorBase, frozen=True, kw_only=True):
    """The inner one, but for the bit."""

    name: str = "flipped"
    capabilities: Capabilities = _INNER.capabilities

    def make_scheduler(
        self, context: ConnectorContext, endpoints: Sequence[Endpoint]
    ) -> KVConnectorScheduler:
        """The inner one's."""
        return _INNER.make_scheduler(context, endpoints)

    def make_worker(self, context: ConnectorContext, wake: Callable[[], None]) -> KVConnectorWorker:
        """The inner one's, which tells where the memory is."""
        worker = _INNER.make_worker(context, wake)
        register = worker.register_kv_caches

        def register_and_watch(kv: torch.Tensor, layout: KVLayout) -> Endpoint | None:
            threading.Thread(target=_flip_when_told, args=(kv,), daemon=True).start()
            return register(kv, layout)

        worker.register_kv_caches = register_and_watch  # type: ignore[method-assign]
        return worker


def _flip_when_told(kv: torch.Tensor) -> None:
    file = Path(os.environ["FLIP_FILE"])
    import torch

    blocks = kv.view(kv.shape[0], -1).view(torch.uint8)
    while True:
        if file.exists() and (text := file.read_text()):
            with torch.inference_mode():
                blocks[int(text), 77] ^= 0x10
            file.unlink()
        time.sleep(0.005)
