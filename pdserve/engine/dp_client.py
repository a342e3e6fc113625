"""Several engine cores and their coordinator, as one `EngineClient`.

A request goes to the core with the least waiting * 4 + running, and stays there; the layers above
do not know which. The number of a core's waiting requests comes from the coordinator; requests
sent since its last count are taken as waiting, so that a burst spreads before the first answer. The
engine is ready when all its cores are, and when one ends unasked, all do: cores that share experts
cannot continue, and those that do not still count as one engine to its supervisor.

The engine has one id and one incarnation, by which proxies know it; a handoff carries those of
the core that made it (`ID-dp0` and so on) and that core's side channels.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from pdserve.engine.coordinator import Counts
from pdserve.engine.coordinator_process import CoordinatorProcess
from pdserve.engine.core_client import launch_engine
from pdserve.engine.launch import require_ranks, shares_experts
from pdserve.engine.open_requests import MergedOutputs
from pdserve.errors import (
    ConfigError,
    EngineDeadError,
    InternalError,
    ShuttingDownError,
    StartingError,
)
from pdserve.observe.liveness import NUM_LOOKS
from pdserve.parallel.place import CorePlace
from pdserve.parallel.rendezvous import listen
from pdserve.wire.ids import EngineId, Incarnation
from pdserve.wire.request import EngineStats, KVStoreStats, sibling_of, with_siblings

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from pdserve.config.schema import EngineConfig
    from pdserve.engine.client import LaunchedEngine
    from pdserve.engine.core_client import CoreClient
    from pdserve.wire.ids import RequestId
    from pdserve.wire.request import EngineInfo, EngineOutput, GenerateRequest, Sibling
    from pdserve.wire.trace import ProcessTrace

_HOST = "127.0.0.1"
_WAITING_WEIGHT = 4
_LAST_WORDS_S = 0.1
"""When a rank dies, cores that share its world may report before the one that knows why."""


async def launch(config: EngineConfig, *, progress: Callable[[str], None]) -> LaunchedEngine:
    """Start an engine: one core, or several with a coordinator. They load in the background.

    Raises:
        ConfigError: The settings share experts, but the model or the executor cannot; or there are
            more ranks than the model has parts for.
    """
    require_ranks(config)
    is_shared = shares_experts(config)
    if config.parallel.data_parallel_size == 1:
        return await launch_engine(config, progress=progress)
    if is_shared and config.parallel.executor_backend == "ray":
        raise ConfigError(
            "--distributed-executor-backend is 'ray', but engine cores that share experts need "
            "their ranks on one machine: use multiprocess, or --data-parallel-size 1",
            param="distributed-executor-backend",
        )
    client = DataParallelClient(config)
    try:
        await client.start(progress, is_shared=is_shared)
    except BaseException:
        await client.close(timeout_s=0.0)
        raise
    return client


class DataParallelClient:
    """See `EngineClient`. Made by `launch`; lives in one event loop."""

    def __init__(self, config: EngineConfig) -> None:
        life = secrets.token_hex(8)
        self._config = config
        self._incarnation = Incarnation(life)
        self._engine_id = EngineId(config.engine_id or f"{config.role.value}-{life[:6]}")
        self._cores: list[CoreClient] = []
        self._counts = [Counts(core) for core in range(config.parallel.data_parallel_size)]
        self._info: EngineInfo | None = None
        self._dead_reason: str | None = None
        self._is_config_error = False
        self._is_closing = False
        self._is_ending = False
        self._ended = asyncio.Event()
        self._coordinator: CoordinatorProcess | None = None

    async def start(self, progress: Callable[[str], None], *, is_shared: bool) -> None:
        """Start the processes. Once."""
        num_cores = len(self._counts)
        self._coordinator = coordinator = CoordinatorProcess(
            num_cores,
            look_s=self._config.liveness.heartbeat_timeout_s / NUM_LOOKS,
            on_counts=self._learn,
            on_end=self._end,
        )
        listener, rendezvous = listen(_HOST) if is_shared else (None, None)
        try:
            for index in range(num_cores):
                place = CorePlace(local_index=index, num_local=num_cores)
                if rendezvous is not None:
                    if index:
                        rendezvous = msgspec.structs.replace(rendezvous, listen_fd=None)
                    place = msgspec.structs.replace(
                        place, index=index, num_cores=num_cores, rendezvous=rendezvous
                    )
                self._cores.append(
                    await launch_engine(
                        _core_config(self._config, self._engine_id, index),
                        progress=_prefixed(progress, f"dp{index}: "),
                        core=place,
                        coordinator=coordinator.addresses,
                        on_dead=self._on_dead,
                    )
                )
        finally:
            if listener is not None:
                listener.close()

    @property
    def info(self) -> EngineInfo | None:
        """See `EngineClient`. Its endpoints are those of all cores, in order."""
        if self._info is None and self._cores:
            infos = [core.info for core in self._cores if core.info is not None]
            if len(infos) == len(self._counts):
                self._info = _merged_info(infos, self._engine_id, self._incarnation)
                if len({info.layout_digest for info in infos}) > 1:
                    self._end(f"engine cores differ: {[info.layout for info in infos]}")
        return self._info

    @property
    def stats(self) -> EngineStats | None:
        """See `EngineClient`."""
        known = [stats for stats in self.core_stats if stats is not None]
        return merged_stats(known) if known else None

    @property
    def core_stats(self) -> list[EngineStats | None]:
        """See `EngineClient`."""
        return [core.stats for core in self._cores] or [None] * len(self._counts)

    @property
    def dead_reason(self) -> str | None:
        """See `EngineClient`."""
        return self._dead_reason

    @property
    def stall_reason(self) -> str | None:
        """See `EngineClient`."""
        reasons = (
            f"engine core {index}: {core.stall_reason}"
            for index, core in enumerate(self._cores)
            if core.stall_reason is not None
        )
        return next(reasons, None)

    @property
    def pids(self) -> list[int]:
        """Process ids of the cores."""
        return [core.pid for core in self._cores]

    @property
    def coordinator_pid(self) -> int:
        """Process id of the coordinator."""
        assert self._coordinator is not None
        return self._coordinator.pid

    async def wait_ready(self) -> EngineInfo:
        """See `LaunchedEngine`."""
        for core in self._cores:
            await core.wait_settled()
        info = self.info
        if info is None or self._dead_reason is not None:
            await self._ended.wait()
            reason = self._dead_reason or "the engine ended while it started"
            raise ConfigError(reason) if self._is_config_error else EngineDeadError(reason)
        return info

    async def generate(
        self, request: GenerateRequest, siblings: Sequence[Sibling] = ()
    ) -> AsyncGenerator[EngineOutput, None]:
        """See `EngineClient`. Each core gets the prompt of its choices once."""
        if self._dead_reason is not None:
            raise EngineDeadError(self._dead_reason)
        if self._is_closing:
            raise ShuttingDownError("this engine")
        if self.info is None:
            raise StartingError
        choices = list(with_siblings(request, siblings))
        for choice in choices:
            if any(core.serves(choice.request_id) for core in self._cores):
                raise InternalError(f"request {choice.request_id} is running already")
        outputs = MergedOutputs(
            [
                _of_core(index, core.generate(first, [sibling_of(other) for other in others]))
                for index, core, (first, *others) in self._spread(choices)
            ]
        )
        try:
            while (output := await outputs.next()) is not None:
                yield output
        except EngineDeadError as error:
            await self._ended.wait()  # the other cores' ends are known then
            raise EngineDeadError(self._dead_reason or error.message) from error
        finally:
            for unread in await outputs.close():
                if unread.handoff is not None:
                    await self.release_lease(unread.handoff.nonce)

    def _spread(
        self, choices: Sequence[GenerateRequest]
    ) -> list[tuple[int, CoreClient, list[GenerateRequest]]]:
        """Give each choice to the least busy core, counting the choices before it."""
        loads = [
            CoreLoad(num_answering=core.num_answering, num_sent=core.num_sent)
            for core in self._cores
        ]
        shares: list[list[GenerateRequest]] = [[] for _ in self._cores]
        for choice in choices:
            index = least_busy(self._counts, loads)
            shares[index].append(choice)
            loads[index] = CoreLoad(
                num_answering=loads[index].num_answering + 1, num_sent=loads[index].num_sent + 1
            )
        return [
            (index, core, share)
            for index, (core, share) in enumerate(zip(self._cores, shares, strict=True))
            if share
        ]

    async def abort(self, request_ids: Sequence[RequestId]) -> None:
        """See `EngineClient`. Cores ignore the ids of others."""
        for core in self._cores:
            await core.abort(request_ids)

    async def release_lease(self, nonce: str) -> None:
        """See `EngineClient`. The core that made the lease knows it."""
        for core in self._cores:
            await core.release_lease(nonce)

    async def keep_leases(self, nonces: Sequence[str]) -> None:
        """See `EngineClient`. Cores ignore the leases of others."""
        for core in self._cores:
            await core.keep_leases(nonces)

    async def hand_over(self, request_ids: Sequence[RequestId]) -> None:
        """See `EngineClient`. Cores ignore the ids of others."""
        for core in self._cores:
            await core.hand_over(request_ids)

    async def reset_prefix_cache(self) -> None:
        """See `EngineClient`."""
        for core in self._cores:
            await core.reset_prefix_cache()

    async def trace(self, seconds: float) -> list[ProcessTrace]:
        """See `EngineClient`."""
        traces = await asyncio.gather(*(core.trace(seconds) for core in self._cores))
        return [trace for of_core in traces for trace in of_core]

    async def close(self, *, timeout_s: float) -> None:
        """See `EngineClient`. The coordinator goes last: cores leave together, through it."""
        self._is_closing = True
        await asyncio.gather(*(core.close(timeout_s=timeout_s) for core in self._cores))
        self._ended.set()
        if self._coordinator is not None:
            await self._coordinator.close()

    def _learn(self, counts: list[Counts]) -> None:
        self._counts = counts

    def _on_dead(self) -> None:
        for core in self._cores:
            if core.is_config_error:
                self._is_config_error |= self._dead_reason is None
                self._end(core.dead_reason or "")
                return
        if self._is_closing:
            self._tell_deaths()
        elif not self._is_ending:
            self._is_ending = True
            asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._tell_deaths)

    def _tell_deaths(self) -> None:
        stories = [
            f"engine core {index}: {core.dead_reason or f'it ended with code {core.exit_code}'}"
            for index, core in enumerate(self._cores)
            if core.dead_reason is not None or core.exit_code is not None
        ]
        self._end("; ".join(stories))

    def _end(self, reason: str) -> None:
        """End all cores at once, except those that have reported why they end and clean up."""
        if self._dead_reason is None:
            self._dead_reason = reason
        self._ended.set()
        for core in self._cores:
            if core.dead_reason is None:
                core.fail(reason)


class CoreLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a core as its server knows it: exact, but without the number that wait.

    Attributes:
        num_answering: Requests sent that have not ended.
        num_sent: Requests sent since the start.
    """

    num_answering: int
    num_sent: int


def least_busy(counts: Sequence[Counts], loads: Sequence[CoreLoad]) -> int:
    """Return the index of the core with the least waiting * 4 + running; the first of several.

    Args:
        counts: The last report of each core, which may be slightly old.
    """
    scores: list[int] = []
    for core, load in zip(counts, loads, strict=True):
        num_waiting = core.num_waiting + load.num_sent - core.num_taken
        num_waiting = min(num_waiting, load.num_answering)
        num_running = load.num_answering - num_waiting
        scores.append(num_waiting * _WAITING_WEIGHT + num_running)
    return scores.index(min(scores))


async def _of_core(
    index: int, outputs: AsyncGenerator[EngineOutput, None]
) -> AsyncGenerator[EngineOutput, None]:
    """Yield `outputs`; the first output of each request names its core."""
    seen: set[RequestId] = set()
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            if index and output.request_id not in seen:
                seen.add(output.request_id)
                output = msgspec.structs.replace(output, core=index)
            yield output


def merged_stats(cores: Sequence[EngineStats]) -> EngineStats:
    """Sum statistics over engine cores; counts by name are summed name by name.

    Balanced experts are shared by all cores, so only the first core's report of them counts.
    """
    fields: dict[str, object] = {}
    for name in EngineStats.__struct_fields__:
        values = [getattr(core, name) for core in cores]
        if name == "experts":
            fields[name] = values[0]
        elif name == "kv_store":
            fields[name] = _merged_stores([each for each in values if each is not None])
        elif isinstance(values[0], list):
            fields[name] = [sum(each) for each in zip(*values, strict=True)]
        elif isinstance(values[0], dict):
            total: Counter[str] = Counter()
            for value in values:
                total.update(value)
            fields[name] = dict(total)
        else:
            fields[name] = sum(values)
    return msgspec.convert(fields, EngineStats)


def _merged_stores(stores: Sequence[KVStoreStats]) -> KVStoreStats | None:
    if not stores:
        return None
    is_up = all(each.is_up for each in stores)
    return msgspec.structs.replace(stores[0].plus(stores[1:]), is_up=is_up)


def _merged_info(
    cores: Sequence[EngineInfo], engine_id: EngineId, incarnation: Incarnation
) -> EngineInfo:
    return msgspec.structs.replace(
        cores[0],
        engine_id=engine_id,
        incarnation=incarnation,
        num_blocks=sum(core.num_blocks for core in cores),
        max_num_seqs=sum(core.max_num_seqs for core in cores),
        endpoints=[endpoint for core in cores for endpoint in core.endpoints],
        kv_events=[endpoint for core in cores for endpoint in core.kv_events],
        can_push=False,  # a ticket names one core, and its sender cannot choose one
    )


def _core_config(config: EngineConfig, engine_id: EngineId, index: int) -> EngineConfig:
    """Return a core's own settings: handoffs name it, and side channels have successive ports."""
    transfer = config.transfer
    if transfer.port:
        port = transfer.port + index * config.parallel.num_ranks
        transfer = msgspec.structs.replace(transfer, port=port)
    return msgspec.structs.replace(config, engine_id=f"{engine_id}-dp{index}", transfer=transfer)


def _prefixed(progress: Callable[[str], None], prefix: str) -> Callable[[str], None]:
    return lambda text: progress(prefix + text)
