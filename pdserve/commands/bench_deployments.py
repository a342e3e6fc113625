"""Starts the deployments of a comparison as child processes, one after the other.

Knows topologies, flags and ports; knows no request and no figure. If a deployment cannot be
started, or one of its processes ends too early, an error names its logs, which are kept. However
the block of a deployment ends, none of its processes is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import aiohttp

from pdserve.bench.compare.topology import EnginePlace, Kind, Topology
from pdserve.bench.cores import PROXY, SERVERS, STORE, Watched
from pdserve.commands.children import Child, ChildFailedError, ChildSpec, while_alive
from pdserve.commands.demo import wait_ready
from pdserve.commands.segments import remove_ownerless
from pdserve.config.compare import CompareConfig
from pdserve.config.load import ENVIRONMENT_PREFIX, variable
from pdserve.config.schema import Role
from pdserve.config.tiers import store_words
from pdserve.errors import PdserveError

T = TypeVar("T")

_HOST: Final = "127.0.0.1"
_COMMAND: Final = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.BOTH: "serve"}
_END_WITHIN_S: Final = 20.0
_SHOWN_LINES: Final = 25


class DeploymentFailedError(PdserveError):
    """A deployment could not be started, or ended while it was needed."""


@dataclass(frozen=True, slots=True)
class DeployedProcess:
    """One process of a deployment.

    Attributes:
        part: Its part in `bench.cores`; an engine's process is its API server.
        role: Role of an engine; None for other processes.
    """

    spec: ChildSpec
    part: str
    url: str
    role: Role | None = None


@dataclass(slots=True)
class Running:
    """A deployment that is ready.

    Attributes:
        url: Where clients send requests.
        ready_s: Time from its first process until it was ready.
        watched: Its processes and its cores; None for a peer.
    """

    url: str
    ready_s: float
    lives: Sequence[asyncio.Task[None]] = field(default=(), repr=False)
    watched: Watched | None = None

    async def while_alive(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work`, unless a process of the deployment ends.

        Raises:
            ChildFailedError: One did.
        """
        return await while_alive(work, self.lives)


def members_of(
    topology: Topology, config: CompareConfig, *, model: str, ports: Sequence[int], secret: str
) -> list[DeployedProcess]:
    """Return the processes of a deployment: the store, if it has one, engines, and the proxy.

    Args:
        topology: A deployment that is not a peer.
        config: The user's settings for the processes.
        model: The model's directory.
        ports: One for each process; the last two are the store's.
        secret: The deployment's secret.
    """
    environ = {k: v for k, v in os.environ.items() if not k.startswith(ENVIRONMENT_PREFIX)}
    environ |= {variable("secret"): secret, variable("drain-delay"): "0"}
    members = []
    if topology.has_store:
        members.append(_store(config, ports[-2:], environ))
    for engine, port in zip(topology.engines, ports, strict=False):
        own = dict(environ)
        if config.gpus:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, engine.cores))
        members.append(
            DeployedProcess(
                ChildSpec(
                    name=engine.name,
                    arguments=[
                        _COMMAND[engine.role],
                        model,
                        *(_store_words(engine, ports[-2:]) if topology.has_store else ()),
                        *_engine_words(topology, engine, config, port),
                    ],
                    environ=own,
                    cores=engine.cores if config.pin and not config.gpus else (),
                ),
                SERVERS,
                f"http://{_HOST}:{port}",
                engine.role,
            )
        )
    if topology.has_proxy:
        members.append(_proxy(members, config, ports[len(topology.engines)], environ))
    return members


def _store(
    config: CompareConfig, ports: Sequence[int], environ: Mapping[str, str]
) -> DeployedProcess:
    words = ["kv-server", "--kv-tiers", config.kv_tiers]
    words += ["--port", str(ports[0]), "--http-port", str(ports[1])]
    words += ["--chunk-size", str(config.kv_chunk_size)]
    spec = ChildSpec(name="kv", arguments=words, environ=environ)
    return DeployedProcess(spec, STORE, f"tcp://{_HOST}:{ports[0]}")


def _store_words(engine: EnginePlace, ports: Sequence[int]) -> list[str]:
    connector = "" if engine.role is Role.BOTH else "nixl"
    return store_words(connector, f"tcp://{_HOST}:{ports[0]}", f"http://{_HOST}:{ports[1]}")


def _engine_words(
    topology: Topology, engine: EnginePlace, config: CompareConfig, port: int
) -> list[str]:
    num = len(engine.cores)
    words = ["--host", _HOST, "--port", str(port), "--engine-id", engine.name]
    words += ["--served-model-name", config.model]
    if not config.gpus:
        words += ["--num-threads", str(num)]
    elif num > 1:
        words += ["--tensor-parallel-size", str(num)]
    words += shlex.split(config.engine_args)
    match engine.role:
        case Role.PREFILL:
            return words + shlex.split(config.prefill_args)
        case Role.DECODE:
            return words + shlex.split(config.decode_args)
        case Role.BOTH:
            words += shlex.split(config.colocated_args)
            if topology.chunk_tokens is not None:
                words += ["--max-num-batched-tokens", str(topology.chunk_tokens)]
            if topology.kind is not Kind.PEER:
                chunked = "enable" if topology.is_chunked else "no-enable"
                words.append(f"--{chunked}-chunked-prefill")
            return words


def _proxy(
    engines: Sequence[DeployedProcess], config: CompareConfig, port: int, environ: Mapping[str, str]
) -> DeployedProcess:
    """A proxy that knows its engines from the start; one for both roles is in both lists."""
    words = ["proxy", "--host", _HOST, "--port", str(port)]
    for flag, other in (("--prefill", Role.DECODE), ("--decode", Role.PREFILL)):
        words += [flag, *(e.url for e in engines if e.part == SERVERS and e.role is not other)]
    words += shlex.split(config.proxy_args)
    spec = ChildSpec(name="proxy", arguments=words, environ=environ)
    return DeployedProcess(spec, PROXY, f"http://{_HOST}:{port}")


def commands_of(topology: Topology, config: CompareConfig) -> tuple[str, ...]:
    """Return commands with which a person would start the same deployment, on default ports."""
    counts = {
        Role.PREFILL: 8100,
        Role.DECODE: 8200,
        Role.BOTH: 8001 if topology.has_proxy else 8000,
    }
    ports = []
    for engine in topology.engines:
        ports.append(counts[engine.role])
        counts[engine.role] += 1
    ports += [8000, 8300, 8301]
    found = []
    for member in members_of(topology, config, model=config.model, ports=ports, secret=""):
        words = shlex.join(["pdserve", *member.spec.arguments])
        if member.spec.cores:
            words = f"taskset -c {','.join(map(str, member.spec.cores))} {words}"
        if "CUDA_VISIBLE_DEVICES" in member.spec.environ and config.gpus:
            words = f"CUDA_VISIBLE_DEVICES={member.spec.environ['CUDA_VISIBLE_DEVICES']} {words}"
        found.append(words)
    return tuple(found)


class Starter:
    """Starts deployments, one at a time.

    Args:
        config: The user's settings for the processes.
        model: The model's directory.
    """

    def __init__(self, config: CompareConfig, model: str) -> None:
        self._config = config
        self._model = model
        self._children: list[Child] = []

    def kill(self) -> None:
        """End every process at once."""
        for child in self._children:
            child.kill()

    @contextlib.asynccontextmanager
    async def started(self, topology: Topology) -> AsyncIterator[Running]:
        """A deployment that is ready, and ends with the block.

        Raises:
            DeploymentFailedError: It was not ready in time, or a process of it ended.
        """
        num = len(topology.engines) + topology.has_proxy + 2 * topology.has_store
        members = members_of(
            topology,
            self._config,
            model=self._model,
            ports=_free_ports(num),
            secret=secrets.token_hex(16),
        )
        with contextlib.ExitStack() as files:
            logs = files.enter_context(_Logs(topology.label))
            children = [
                Child(
                    member.spec,
                    on_line=logs.writer(member.spec.name),
                    say=logs.writer(member.spec.name),
                    may_restart=False,
                )
                for member in members
            ]
            self._children = children
            lives = [asyncio.create_task(child.run()) for child in children]
            try:
                yield await self._until_ready(topology, members, children, lives)
            except ChildFailedError as error:
                raise DeploymentFailedError(logs.keep(topology.label, str(error))) from None
            except TimeoutError:
                limit_s = self._config.start_timeout_s
                raise DeploymentFailedError(
                    logs.keep(topology.label, f"not ready after {limit_s:g} s (--start-timeout)")
                ) from None
            finally:
                await self._stop(members, children, lives)

    async def _until_ready(
        self,
        topology: Topology,
        members: Sequence[DeployedProcess],
        children: Sequence[Child],
        lives: Sequence[asyncio.Task[None]],
    ) -> Running:
        since_s = time.monotonic()
        entrance = members[-1]
        running = Running(entrance.url, 0.0, lives)
        roles = [member.role for member in members if member.role is not None]
        known = {role.value: roles.count(role) for role in roles} if topology.has_proxy else None

        async def all_ready() -> None:
            async with aiohttp.ClientSession() as session:
                for member, child in zip(members, children, strict=True):
                    is_proxy = member.part == PROXY
                    await wait_ready(session, member.url, engines=known if is_proxy else None)
                    child.was_ready = True

        async with asyncio.timeout(self._config.start_timeout_s):
            await running.while_alive(all_ready())
        running.ready_s = time.monotonic() - since_s
        processes = {
            child.pid: member.part
            for member, child in zip(members, children, strict=True)
            if child.pid is not None
        }
        cores = {core for engine in topology.engines for core in engine.cores}
        running.watched = Watched(
            processes, os.sched_getaffinity(0) if self._config.gpus else cores
        )
        return running

    async def _stop(
        self,
        members: Sequence[DeployedProcess],
        children: Sequence[Child],
        lives: Sequence[asyncio.Task[None]],
    ) -> None:
        """Stop the proxy, then engines that read KV, then those that are read, then the store."""
        try:
            for kinds in ((PROXY,), (Role.DECODE,), (Role.PREFILL, Role.BOTH), (STORE,)):
                pairs = zip(members, children, strict=True)
                await asyncio.gather(
                    *(
                        child.stop(_END_WITHIN_S)
                        for member, child in pairs
                        if (member.role or member.part) in kinds
                    )
                )
            await asyncio.gather(*lives, return_exceptions=True)
        finally:
            for child in children:
                child.kill()
            await asyncio.gather(*lives, return_exceptions=True)
            self._children = []
            remove_ownerless()


class _Logs:
    """Logs of a deployment's processes, in a directory that is removed if all goes well."""

    def __init__(self, label: str) -> None:
        name = "".join(letter if letter.isalnum() else "-" for letter in label)
        self._directory = Path(tempfile.mkdtemp(prefix=f"pdserve-compare-{name}-"))
        self._lines: dict[str, list[str]] = {}
        self._is_kept = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_kept:
            self._directory.rmdir()

    def writer(self, name: str) -> Callable[[str], None]:
        """Return what takes the lines of one process."""
        return self._lines.setdefault(name, []).append

    def keep(self, label: str, reason: str) -> str:
        """Write the logs to the directory; returns a message with the last lines of each."""
        self._is_kept = True
        parts = [f"{label}: {reason}"]
        for name, lines in self._lines.items():
            path = self._directory / f"{name}.log"
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            parts.append(f"--- the end of {path}")
            parts += lines[-_SHOWN_LINES:]
        return "\n".join(parts)


def _free_ports(num: int) -> list[int]:
    """Return ports that are free now; bound at the same time, so that no two are equal."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(num):
            probe = stack.enter_context(socket.socket())
            probe.bind((_HOST, 0))
            ports.append(probe.getsockname()[1])
        return ports
