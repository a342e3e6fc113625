"""Ranks as Ray actors, over the nodes of a cluster that runs already.

Ray finds the places and starts the actors; steps and answers travel over our own encrypted
links, because a Ray call takes longer than a step may wait. Ranks on the engine core's own
node come first, so that a pipeline's first stage is near it, and the ranks of a node are
neighbours in the mesh.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pdserve.errors import ConfigError
from pdserve.executor.base import RankDiedError
from pdserve.executor.channel import WakeEvent
from pdserve.executor.messages import WORKER, Launch
from pdserve.executor.ranked import RankedExecutor
from pdserve.executor.zmq_links import ZmqHub
from pdserve.imports import SHORT_SPIN
from pdserve.observe.liveness import NUM_LOOKS
from pdserve.observe.log import configure_logging, log_config
from pdserve.parallel.place import RankPlace, rank_places
from pdserve.parallel.rendezvous import Rendezvous, listen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdserve.config.schema import EngineConfig
    from pdserve.executor.channel import Waiter
    from pdserve.parallel.place import CorePlace
    from pdserve.wire.ids import EngineId, Incarnation

# Room in use may soon become free; nodes are less likely to join soon.
_PLACE_TIMEOUT_S = 60.0
_GROW_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 3.0
_KILL_TIMEOUT_S = 5.0
_MAX_STORY = 300
_FLAG = "distributed-executor-backend"


class Place(msgspec.Struct, frozen=True):
    """The place of an actor.

    Attributes:
        node_id: Ray's name of the node; a machine may have several in a test.
        address: The node's address for others.
        machine: Equal for actors that share cores, memory and the loopback address.
    """

    node_id: str
    address: str
    machine: str
    pid: int


class RankActor:
    """One rank's process, as Ray's actor. It does not inherit the engine core's environment."""

    def __init__(self) -> None:
        os.environ.update(SHORT_SPIN | os.environ)

    def place(self) -> bytes:
        """Return its place: an encoded `Place`."""
        address = ray.util.get_node_ip_address()
        return msgspec.msgpack.encode(
            Place(
                node_id=ray.get_runtime_context().get_node_id(),
                address=address,
                machine=f"{socket.gethostname()}/{address}",
                pid=os.getpid(),
            )
        )

    def listen(self, host: str) -> bytes:
        """Bind the port where this rank 0's world will meet; return an encoded `Rendezvous`."""
        listener, rendezvous = listen(host)
        listener.detach()  # joining the world takes it over
        return msgspec.msgpack.encode(rendezvous)

    def run(self, launch: bytes) -> int:
        """Run as the rank that an encoded `Launch` describes, until told to close."""
        from pdserve.executor import rank

        decoded = msgspec.msgpack.decode(launch, type=Launch)
        configure_logging(sys.stderr, decoded.log)  # which Ray keeps
        return rank.run(decoded)


class RayExecutor(RankedExecutor):
    """See `Executor`. Needs a running cluster: `RAY_ADDRESS`, or one started on this machine.

    Args:
        core: Place of this engine core. Cores that share a world are not placed by Ray.
        worker: As in `Launch`.

    Raises:
        ConfigError: There is no cluster, or it has no room.
        RankDiedError: It has room, but cannot start a rank there.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        core: CorePlace,
        engine_id: EngineId,
        incarnation: Incarnation,
        progress: Callable[[str], None],
        worker: str = WORKER,
    ) -> None:
        if core.num_cores > 1:
            raise ConfigError(
                f"--{_FLAG} is 'ray', but the ranks of {core.num_cores} data-parallel engine "
                "cores that share experts can only run on one machine: use multiprocess",
                param=_FLAG,
            )
        num_ranks = config.parallel.num_ranks
        ranks = RayRanks(num_ranks, device=config.device)
        try:
            places = ranks.place(progress)
            rendezvous = ranks.meet(places)
            hub, posts = _hubs(num_ranks)
        except BaseException:
            ranks.kill()
            ranks.close()
            raise
        of_ranks = rank_places(config.parallel, core, rendezvous)
        if ranks.has_gpus:
            # Ray shows each actor only its own device.
            of_ranks = [
                msgspec.structs.replace(place, local_index=0, num_local=1) for place in of_ranks
            ]
        else:
            of_ranks = _by_machine(of_ranks, [place.machine for place in places])
        ranks.launches = [
            Launch(
                log=log_config(),
                config=config,
                place=place,
                engine_id=engine_id,
                incarnation=incarnation,
                ends=hub.ends(place.engine_rank),
                post_ends=posts.ends(place.engine_rank),
                worker=worker,
            )
            for place in of_ranks
        ]
        self.places = places
        super().__init__(
            hub,
            posts,
            ranks,
            places=of_ranks,
            max_in_flight=max(2, config.parallel.pipeline_parallel_size),
            look_s=config.liveness.heartbeat_timeout_s / NUM_LOOKS,
            progress=progress,
        )


class RayRanks:
    """See `Ranks`: actors in one placement group, packed onto as few nodes as possible.

    Args:
        device: As in `EngineConfig`; auto takes GPUs if the cluster has enough of them.

    Attributes:
        has_gpus: Whether each rank is given a GPU (else a CPU).
        launches: Set before `start`, in rank order.

    Raises:
        ConfigError: There is no cluster.
    """

    def __init__(self, num_ranks: int, *, device: str) -> None:
        self.launches: list[Launch] = []
        self._num_ranks = num_ranks
        self._has_connected = not ray.is_initialized()
        if self._has_connected:
            _connect()
        num_gpus = int(ray.cluster_resources().get("GPU", 0))
        self.has_gpus = device == "cuda" or (device == "auto" and num_gpus >= num_ranks)
        self._resource = "GPU" if self.has_gpus else "CPU"
        self._group: Any = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []
        self._ended: dict[int, str] = {}
        self._places: list[Place] = []
        self._wake_event = WakeEvent()
        self._watcher: threading.Thread | None = None
        self._is_closing = threading.Event()

    def place(self, progress: Callable[[str], None]) -> list[Place]:
        """Find room and start the actors, which wait there for their `Launch`.

        Returns:
            Their places, in rank order.

        Raises:
            ConfigError: The cluster has no room.
            RankDiedError: An actor cannot be started.
        """
        what = f"{self._num_ranks} {self._resource}s"
        total = int(ray.cluster_resources().get(self._resource, 0))
        is_large_enough = total >= self._num_ranks
        timeout_s = _PLACE_TIMEOUT_S if is_large_enough else _GROW_TIMEOUT_S
        progress(f"asking Ray for {what}; it has {total}")
        self._group = placement_group([{self._resource: 1}] * self._num_ranks, strategy="PACK")
        if not self._group.wait(timeout_s):
            raise ConfigError(
                f"Ray did not find room for {what} within {timeout_s:g} s (it has {total}"
                f"{', in use' if is_large_enough else ''}): add nodes, or lower "
                "--tensor-parallel-size or --pipeline-parallel-size",
                param="tensor-parallel-size",
            )
        options = {"num_gpus": 1} if self.has_gpus else {"num_cpus": 1}
        actors = [
            ray.remote(RankActor)
            .options(
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
                **options,
            )
            .remote()
            for bundle in range(self._num_ranks)
        ]
        self._actors = actors
        found = [
            msgspec.msgpack.decode(place, type=Place)
            for place in _answers([actor.place.remote() for actor in actors])
        ]
        here = ray.get_runtime_context().get_node_id()
        order = sorted(
            range(self._num_ranks), key=lambda i: (found[i].node_id != here, found[i].node_id, i)
        )
        self._actors = [actors[i] for i in order]
        self._places = [found[i] for i in order]
        nodes = Counter(place.node_id for place in self._places)
        progress(f"Ray gave {what} on {len(nodes)} nodes")
        return self._places

    def meet(self, places: list[Place]) -> Rendezvous | None:
        """Make rank 0 bind the address where the ranks will meet; None for one rank.

        Raises:
            RankDiedError: Rank 0 has died.
        """
        if len(places) == 1:
            return None
        is_one_machine = len({place.machine for place in places}) == 1
        host = "127.0.0.1" if is_one_machine else places[0].address
        (answer,) = _answers([self._actors[0].listen.remote(host)])
        return msgspec.msgpack.decode(answer, type=Rendezvous)

    def start(self) -> None:
        """See `Ranks`."""
        self._runs = [
            actor.run.remote(msgspec.msgpack.encode(launch))
            for actor, launch in zip(self._actors, self.launches, strict=True)
        ]
        self._watcher = threading.Thread(target=self._watch, name="ray-ranks", daemon=True)
        self._watcher.start()

    def wake_on(self, waiter: Waiter) -> None:
        """See `Ranks`."""
        waiter.watch(self._wake_event.fd)

    def ended(self) -> dict[int, str]:
        """See `Ranks`."""
        return dict(self._ended)

    def look(self) -> dict[int, str]:
        """See `Ranks`. One that is stopped answers its links no more: they are lost."""
        return {}

    def kill(self) -> None:
        """See `Ranks`."""
        for actor in self._actors:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)

    def close(self) -> None:
        """See `Ranks`."""
        if self._runs:
            ray.wait(self._runs, num_returns=len(self._runs), timeout=_KILL_TIMEOUT_S)
        self._is_closing.set()
        if self._watcher is not None:
            self._watcher.join()
        if self._group is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                remove_placement_group(self._group)
        if self._has_connected:
            with _sigterm_kept():
                ray.shutdown()
        self._wake_event.close()

    def _watch(self) -> None:
        """Note each rank's end as Ray reports it: a return, or an actor or node that died."""
        left = {run: rank for rank, run in enumerate(self._runs)}
        while left and not self._is_closing.is_set():
            done, _ = ray.wait(list(left), num_returns=1, timeout=0.5)
            for run in done:
                rank = left.pop(run)
                place = self._places[rank]
                self._ended[rank] = f"pid {place.pid} on {place.address} {_how(run)}"
                self._wake_event.set()


def _hubs(num_ranks: int) -> tuple[ZmqHub, ZmqHub]:
    """Return hubs for steps and for posts, at the address by which Ray knows this node."""
    host = ray.util.get_node_ip_address()
    hub = ZmqHub(num_ranks, host=host)
    try:
        return hub, ZmqHub(num_ranks, host=host)
    except BaseException:
        hub.close()
        raise


def _connect() -> None:
    """Join the cluster that RAY_ADDRESS names, or the one that runs on this machine.

    Raises:
        ConfigError: There is none.
    """
    address = os.environ.get("RAY_ADDRESS") or "auto"
    try:
        _require_listener(address)
        with _sigterm_kept():
            ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError) as error:
        where = "on this machine" if address == "auto" else f"at RAY_ADDRESS={address}"
        raise ConfigError(
            f"--{_FLAG} is 'ray', but there is no cluster {where} ({error}): start one with `ray "
            "start --head`, or name it in RAY_ADDRESS",
            param=_FLAG,
        ) from None


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Restore the SIGTERM handler, which Ray replaces when it starts and when it stops."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _require_listener(address: str) -> None:
    """Refuse at once an address that Ray would try for a minute or more.

    Raises:
        OSError: No process listens at `address`, if it is of the form "host:port".
    """
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()


def _by_machine(places: Sequence[RankPlace], machines: Sequence[str]) -> list[RankPlace]:
    """Return the places with each machine's ranks numbered separately."""
    num_local, seen = Counter(machines), Counter[str]()
    found: list[RankPlace] = []
    for place, machine in zip(places, machines, strict=True):
        found.append(
            msgspec.structs.replace(place, local_index=seen[machine], num_local=num_local[machine])
        )
        seen[machine] += 1
    return found


def _answers(calls: Sequence[Any]) -> list[bytes]:
    """Return the first answers of newly placed actors.

    Raises:
        RankDiedError: One of them has died, or does not answer.
    """
    try:
        answers: list[bytes] = ray.get(calls, timeout=_PLACE_TIMEOUT_S)
    except ray.exceptions.RayError as error:
        raise RankDiedError(f"Ray cannot start a rank: {_story(error)}") from None
    return answers


def _how(run: Any) -> str:
    try:
        return f"exited with code {ray.get(run)}"
    except ray.exceptions.RayError as error:
        return f"died: {_story(error)}"


def _story(error: Exception) -> str:
    """Shorten Ray's error of many lines to one, without the constant parts."""
    text = " ".join(str(error).split()).partition(" Some common causes")[0]
    return text[max(0, text.rfind("The actor ")) :][:_MAX_STORY]
