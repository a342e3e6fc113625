"""The NIXL mover: lanes that post, and the agent through which peers reach this rank.

That agent (the target) belongs to the transfer thread, which alone touches it. Where NIXL cannot
make it again after a fence, that is tried now and then; until it can, nobody is met, and what needs
a peer fails with that reason.
"""

from __future__ import annotations

import logging
import socket
import uuid
from collections import Counter
from typing import TYPE_CHECKING

import torch

from pdserve.connectors.nixl.agent import AgentError, NixlAgent
from pdserve.connectors.nixl.descriptors import (
    DescriptorWatch,
    TaintedNumbers,
    max_descriptors,
    num_open_descriptors,
    num_silent_connections,
)
from pdserve.connectors.nixl.lanes import Lanes
from pdserve.connectors.transfer.seams import ExposedMemory
from pdserve.connectors.transfer_thread.host import HostProcesses, net_devices, region_of
from pdserve.observe.log import log_event

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.connectors.base import ConnectorContext
    from pdserve.observe.clock import Clock

_log = logging.getLogger(__name__)

_TARGET_AGAIN_S = 0.5
_NEVER = float("inf")
_SCRATCH_UNIT_BYTES = 4096
_SCRATCH_UNITS = 16


class NixlMover(Lanes):
    """See `Mover`.

    Args:
        kv: This rank's KV memory, contiguous.
        host: Address on which the side channel listens.
        wake: Called from a lane when `deliver` has something to do.
        num_lanes, backends: See `NixlSettings`.

    Attributes:
        faults: What should stay rare, by name, since whoever reports it last emptied this.
        why_fence: See `ThreadMover`.
    """

    def __init__(
        self,
        context: ConnectorContext,
        *,
        kv: torch.Tensor,
        host: str,
        wake: Callable[[], None],
        clock: Clock,
        num_lanes: int,
        backends: Sequence[str],
    ) -> None:
        self._context = context
        self._backends = backends
        self._kv = kv
        self._scratch = torch.zeros(
            _SCRATCH_UNITS * _SCRATCH_UNIT_BYTES, dtype=torch.uint8, device=kv.device
        )
        self._pool_region = region_of(kv, context.layout.block_bytes)
        self._scratch_region = region_of(self._scratch, _SCRATCH_UNIT_BYTES)
        self._net_devices = net_devices(host)
        self._numbers = TaintedNumbers()
        self._agent: NixlAgent | None = None
        self._target_due_s = _NEVER
        self.faults: Counter[str] = Counter()
        self.why_fence = ""
        self.processes = HostProcesses(is_direct=True)
        self._watch = DescriptorWatch(
            tidy=self.tidy,
            renew=self._renew_all,
            faults=self.faults,
            clock=clock,
            num_open=num_open_descriptors,
            num_silent=num_silent_connections,
            limit=max_descriptors,
        )
        super().__init__(
            num_lanes=num_lanes,
            make_agent=self._make_lane_agent,
            pool=self._pool_region,
            scratch=self._scratch_region,
            wake=wake,
            clock=clock,
            quarantine_s=context.config.transfer.quarantine_s,
        )

    @property
    def target(self) -> ExposedMemory | None:
        """See `Mover`."""
        if self._agent is None:
            return None
        return ExposedMemory(self._agent.metadata(), self._pool_region, self._scratch_region)

    @property
    def due_s(self) -> float:
        """When `tick` has to be called next."""
        return min(self._target_due_s, self._watch.due_s)

    def start(self) -> None:
        """Make the target, in the thread that it will belong to.

        Raises:
            ConfigError: NIXL cannot be loaded.
            AgentError: NIXL cannot make it.
        """
        self._use_device()
        self._agent = self._make_agent("")

    def tick(self) -> None:
        """Make the target again, if that is due; look at the descriptors once a second."""
        if self._clock.monotonic_s() >= self._target_due_s:
            self._renew_target()
        self._watch.tick()

    def may_wait(self) -> bool:
        """See `ThreadMover`: the lanes wake whoever waits."""
        return True

    def drive(self) -> None:
        """Help what peers do here. That one of them has died is for its own end to report."""
        if self._agent is None:
            return
        try:
            self._agent.progress()
        except AgentError as error:
            log_event(_log, "kv peer's transfer failed here", level=logging.WARNING, reason=error)

    def fence(self) -> None:
        """See `Mover`: destroy the target, and make another."""
        self.why_fence = ""
        self._end_target()
        self._renew_target()

    def tidy(self) -> None:
        """Close the connections to any agent here whose other sides have ended."""
        self.drive()
        super().tidy()

    def take_faults(self) -> Counter[str]:
        """Return counts, by name, of events that should stay rare, since the last call."""
        faults = self.faults.copy()
        self.faults.clear()
        num_resets = self.take_num_resets()
        if num_resets:
            faults["agent_reset"] += num_resets
        return faults

    def close(self, timeout_s: float) -> bool:
        """End everything; return whether the lanes have ended in time."""
        has_ended = super().close(timeout_s)
        self._end_target()
        return has_ended

    def _renew_all(self, reason: str) -> None:
        """Make all agents here again: the target now, each lane's when it has nothing to do."""
        self.renew(reason)
        self.why_fence = reason

    def _end_target(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()

    def _renew_target(self) -> None:
        try:
            self._agent = self._make_agent("")
        except AgentError as error:
            self.faults["agent_not_made"] += 1
            self._target_due_s = self._clock.monotonic_s() + _TARGET_AGAIN_S
            log_event(_log, "kv target cannot be made", level=logging.ERROR, reason=error)
        else:
            self._target_due_s = _NEVER

    def _make_lane_agent(self, number: int) -> NixlAgent:
        self._use_device()
        return self._make_agent(f"lane{number}-")

    def _make_agent(self, part: str) -> NixlAgent:
        role, rank = self._context.config.role.value, self._context.rank
        name = f"{role}-{socket.gethostname()}-{rank}-{part}{uuid.uuid4().hex}"
        try:
            agent = NixlAgent(
                name,
                self._backends,
                net_devices=self._net_devices,
                is_on_gpu=self._kv.is_cuda,
            )
        except AgentError:
            self._numbers.take_out()
            raise
        try:
            for region in (self._pool_region, self._scratch_region):
                agent.register(region)
        except AgentError:
            agent.close()
            raise
        return agent

    def _use_device(self) -> None:
        """UCX uses the calling thread's current context."""
        if self._kv.is_cuda:
            torch.cuda.set_device(self._kv.device)
