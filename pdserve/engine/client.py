"""The interface through which an API server uses an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from pdserve.wire.ids import RequestId
    from pdserve.wire.request import (
        EngineInfo,
        EngineOutput,
        EngineStats,
        GenerateRequest,
        Sibling,
    )
    from pdserve.wire.trace import ProcessTrace


class EngineClient(Protocol):
    """An engine as its API server sees it."""

    @property
    def info(self) -> EngineInfo | None:
        """Facts about the engine; None until it is ready."""
        ...

    @property
    def stats(self) -> EngineStats | None:
        """The newest snapshot; None until the first."""
        ...

    @property
    def core_stats(self) -> Sequence[EngineStats | None]:
        """The newest snapshot of each engine core; their sum is `stats`."""
        ...

    @property
    def dead_reason(self) -> str | None:
        """Reason why the engine has ended; None before."""
        ...

    @property
    def stall_reason(self) -> str | None:
        """Reason why the engine should get no requests now, although it has not ended."""
        ...

    def generate(
        self, request: GenerateRequest, siblings: Sequence[Sibling] = ()
    ) -> AsyncGenerator[EngineOutput, None]:
        """Submit a request, with others for its prompt, and yield the outputs of all of them.

        The last output of each has a `finish_reason`; the generator ends when all have ended.
        Closing it early (or cancelling the task in it) aborts those that have not. Either all
        requests are taken, or none.

        Raises:
            EngineDeadError: The engine ended before the requests did.
            OverloadedError: Too many requests, or too many prompt tokens, wait already.
            UnavailableError: The engine is not ready yet or is shutting down.
        """
        ...

    async def abort(self, request_ids: Sequence[RequestId]) -> None:
        """Forget some of the requests that were submitted: they count as ended.

        Ids that are unknown or have ended are ignored.
        """
        ...

    async def release_lease(self, nonce: str) -> None:
        """Give up a lease that will not be read. Unknown nonces are ignored."""
        ...

    async def keep_leases(self, nonces: Sequence[str]) -> None:
        """Extend leases whose handoffs are not delivered yet, by a lease time from now.

        Unknown nonces are ignored.
        """
        ...

    async def hand_over(self, request_ids: Sequence[RequestId]) -> None:
        """Lease running requests out as they are, for another engine to continue them.

        The last output of each is then its handoff. Ids of requests that are unknown, or wait, or
        whose KV is still on its way, are ignored: those continue here.
        """
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""
        ...

    async def trace(self, seconds: float) -> list[ProcessTrace]:
        """Return the trace of the last `seconds` of each engine core, as far as it is kept.

        Raises:
            EngineDeadError: A core has ended, or ends before it has answered.
        """
        ...

    async def close(self, *, timeout_s: float) -> None:
        """End the engine; running requests may finish within `timeout_s`."""
        ...


class LaunchedEngine(EngineClient, Protocol):
    """An engine whose processes this one has started."""

    async def wait_ready(self) -> EngineInfo:
        """Wait until the engine serves.

        Raises:
            ConfigError: Its settings, model or device cannot be used.
            EngineDeadError: It ended for another reason.
        """
        ...
