"""The worker half: routes instructions to the children, and labels their reports."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, TypeVar

import msgspec

from pdserve.connectors.base import KVConnectorWorker
from pdserve.connectors.multi.messages import ChildNews, MultiInstructions
from pdserve.errors import ConfigError
from pdserve.wire.transfer import (
    ConnectorMetadata,
    ConnectorReport,
    Failed,
    LoadFailure,
    Received,
    Settled,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from pdserve.connectors.base import KVLayout
    from pdserve.observe.clock import Clock
    from pdserve.wire.ids import RequestId
    from pdserve.wire.transfer import Endpoint

F = TypeVar("F", Settled, Received, Failed)


class MultiWorker(KVConnectorWorker):
    """See `KVConnectorWorker`.

    Args:
        halves: Worker halves, by the names of their connectors.
        clock: Measures how long steps wait for loads.
    """

    def __init__(self, halves: Mapping[str, KVConnectorWorker], *, clock: Clock) -> None:
        self._halves = halves
        self._layerwise: list[tuple[str, KVConnectorWorker]] = []
        self._clock = clock
        self._step = MultiInstructions({})
        self._waited_s: defaultdict[str, float] = defaultdict(float)
        self._waits: dict[str, ChildNews] = {}

    def register_kv_caches(self, kv: torch.Tensor, layout: KVLayout) -> Endpoint | None:
        """See `KVConnectorWorker`.

        Raises:
            ConfigError: More than one of them has a side channel.
        """
        halves = self._halves.items()
        endpoints = {name: half.register_kv_caches(kv, layout) for name, half in halves}
        there = {name: each for name, each in endpoints.items() if each is not None}
        if len(there) > 1:
            raise ConfigError(
                f"--kv-transfer-config.kv-connector is {','.join(endpoints)!r}: use only one of "
                f"{' and '.join(there)}, because peers reach an engine at one address only",
                param="kv-transfer-config.kv-connector",
            )
        return next(iter(there.values()), None)

    def post(self, metadata: ConnectorMetadata) -> None:
        """See `KVConnectorWorker`."""
        for name, payload in MultiInstructions.from_metadata(metadata).payloads.items():
            self._halves[name].post(ConnectorMetadata(payload))

    def start_load_kv(self, metadata: ConnectorMetadata) -> bool:
        """See `KVConnectorWorker`."""
        self._step = MultiInstructions.from_metadata(metadata)
        self._waited_s.clear()
        self._layerwise = [
            (name, self._halves[name])
            for name, payload in self._step.payloads.items()
            if self._halves[name].start_load_kv(ConnectorMetadata(payload))
        ]
        return bool(self._layerwise)

    def wait_for_layer_load(self, layer: int) -> None:
        """See `KVConnectorWorker`."""
        for name, half in self._layerwise:
            began_s = self._clock.monotonic_s()
            half.wait_for_layer_load(layer)
            self._waited_s[name] += self._clock.monotonic_s() - began_s

    def save_kv_layer(self, layer: int) -> None:
        """See `KVConnectorWorker`."""
        for _, half in self._layerwise:
            half.save_kv_layer(layer)

    def wait_for_save(self) -> Sequence[Failed]:
        """See `KVConnectorWorker`."""
        step, self._step = self._step, MultiInstructions({})
        for name, num_tokens in step.num_loading.items():
            waited_s = self._waited_s[name]
            self._waits[name] = ChildNews(name, num_tokens=num_tokens, waited_s=waited_s)
        why = "its connector has failed to begin it"
        lost = [Failed(request_id=e, reason=LoadFailure.ABORTED, detail=why) for e in step.lost]
        first: dict[RequestId, Failed] = {}
        for name, half in self._halves.items():
            lost += _named(name, half.wait_for_save())
        for each in lost:  # tokens loaded after a gap are useless
            known = first.setdefault(each.request_id, each)
            if each.num_valid_tokens < known.num_valid_tokens:
                first[each.request_id] = each
        return list(first.values())

    def get_finished(self) -> ConnectorReport:
        """See `KVConnectorWorker`."""
        reports = [(name, half.get_finished()) for name, half in self._halves.items()]
        waits, self._waits = self._waits, {}
        news = list(waits.values())
        news += [ChildNews(name, payload) for name, each in reports for payload in each.payloads]
        faults: Counter[str] = Counter()
        for _, each in reports:
            faults.update(each.faults)
        return ConnectorReport(
            settled=[fact for name, each in reports for fact in _named(name, each.settled)],
            received=[fact for name, each in reports for fact in _named(name, each.received)],
            failed=[fact for name, each in reports for fact in _named(name, each.failed)],
            faults=dict(faults),
            payloads=[each.to_payload() for each in news],
            slices=[each for _, report in reports for each in report.slices],
            clock_id=next((each.clock_id for _, each in reports if each.clock_id), ""),
        )

    def close(self, timeout_s: float) -> None:
        """See `KVConnectorWorker`. All halves are closed, even if one of them raises."""
        until_s = self._clock.monotonic_s() + timeout_s
        with contextlib.ExitStack() as ends:
            for half in self._halves.values():
                ends.callback(_close, half, self._clock, until_s)


def _named(name: str, facts: Sequence[F]) -> list[F]:
    return [msgspec.structs.replace(each, connector=name) for each in facts]


def _close(half: KVConnectorWorker, clock: Clock, until_s: float) -> None:
    half.close(max(0.0, until_s - clock.monotonic_s()))
