"""Sends the requests of a comparison to one deployment, with empty caches.

Knows no figure, and only the kind and the label of a topology.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from typing import Final

from pdserve.bench.compare.topology import Kind, Topology
from pdserve.bench.endpoint import reset_prefix_caches
from pdserve.bench.progress import ProgressLine
from pdserve.bench.records import Planned, Run
from pdserve.bench.runner import Options, PlanOrigin, run_plan
from pdserve.bench.target import ApiEndpoint, Target
from pdserve.commands.bench_deployments import Running
from pdserve.config.compare import CompareConfig
from pdserve.errors import PeerError

_RESET_TRIES: Final = 20
_RESET_AGAIN_S: Final = 0.1


class Player:
    """Sends requests to the deployments of one comparison.

    Args:
        config: The model's name, and the API key for peers.
        sampling, seed: Written into runs.
        shows_progress: Whether to show a line on stderr during a run.

    Attributes:
        notes: Sentences about what happened, in order, each once.
    """

    def __init__(
        self, config: CompareConfig, *, sampling: str, seed: int, shows_progress: bool
    ) -> None:
        self._config = config
        self._endpoint = ApiEndpoint(config.endpoint)
        self._sampling = sampling
        self._seed = seed
        self._shows_progress = shows_progress
        self.notes: dict[str, None] = {}

    def note(self, *sentences: str) -> None:
        """Add sentences to the report."""
        self.notes.update(dict.fromkeys(sentences))

    def target(self, topology: Topology, running: Running) -> Target:
        """Return the target for a deployment; a peer names its model itself."""
        is_peer = topology.kind is Kind.PEER
        return Target(
            base_url=running.url,
            model="" if is_peer else self._config.model,
            endpoint=self._endpoint,
            api_key=self._config.api_key if is_peer else "",
            label=topology.label,
        )

    async def play(
        self,
        running: Running,
        requests: Sequence[Planned],
        target: Target,
        options: Options,
        *,
        dataset: str = "",
        arrivals: str = "",
    ) -> Run:
        """Carry out a plan while the deployment is alive.

        Raises:
            ChildFailedError: A process of it ended.
            PdserveError: As in `run_plan`.
        """
        with contextlib.closing(ProgressLine(sys.stderr)) as line:
            return await running.while_alive(
                run_plan(
                    requests,
                    target,
                    options,
                    origin=PlanOrigin(dataset, arrivals, self._sampling, self._seed),
                    on_progress=line if self._shows_progress else None,
                    watched=running.watched,
                )
            )

    async def reset(self, topology: Topology, target: Target) -> None:
        """Reset the prefix caches; a peer that cannot do so is noted.

        Raises:
            PeerError: A deployment that was started here does not reset them.
        """
        for _ in range(_RESET_TRIES):
            reason = await reset_prefix_caches(target)
            if reason is None:
                return
            if topology.kind is Kind.PEER:
                break
            await asyncio.sleep(_RESET_AGAIN_S)
        if topology.kind is not Kind.PEER:
            raise PeerError(f"{topology.label} did not reset its prefix caches: {reason}")
        self.note(f"{topology.label} kept its cached prefixes between runs ({reason}).")
