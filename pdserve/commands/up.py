"""`pdserve up`: prefill engines, decode engines and a proxy on this host, and one request.

Life of a deployment: check the ports, start the children, wait until they are ready, send
the demo request through the proxy and show where its time went, serve until Ctrl-C (or,
with `--once`, end there), drain the proxy, then the engines. A child that dies is started
again. Imports no engine: the children do.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import functools
import itertools
import json
import os
import re
import secrets
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import aiohttp

from pdserve.commands.announce import given_lines, program, title
from pdserve.commands.children import Child, ChildFailedError, ChildSpec
from pdserve.commands.demo import DemoFailedError, Question, ask, wait_ready
from pdserve.commands.findings import Grade, RunningEngine, compatible
from pdserve.commands.model_directory import model_directory
from pdserve.commands.running import require_free, run_until_signalled
from pdserve.config.boxed import BOXED
from pdserve.config.connectors import read_settings
from pdserve.config.http import ProxyConfig, ServerConfig
from pdserve.config.load import (
    ENVIRONMENT_PREFIX,
    Resolved,
    Source,
    Table,
    build,
    resolve,
    variable,
)
from pdserve.config.schema import EngineConfig, Role
from pdserve.config.settings import LogConfig, engine_table, proxy_table
from pdserve.config.up import UpConfig
from pdserve.errors import ConfigError
from pdserve.wire.hop import INFO_PATH

T = TypeVar("T")

_BY_ENVIRONMENT: Final = ("secret", "api-key", "operator-key")
"""Never on a command line, where every user of the machine can read them."""
_CHOSEN_HERE: Final = ("host", "port", "model", "prefill", "decode", "proxy")
"""Settings of the children that have another meaning on our own command line."""
_LOG_LINE: Final = re.compile(r"[\d:]+ ([DIWEC]) pdserve\.")
_LEVELS: Final = "DIWEC"
_KILL_AFTER_S: Final = 10.0
_DEMO_LINE_TIMEOUT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the deployment."""

    spec: ChildSpec
    role: str
    url: str


def run(table: Table, resolved: Mapping[str, Resolved]) -> int:
    """Run `pdserve up`.

    Raises:
        ConfigError: A setting or the model cannot be used, or a port is taken.
    """
    config = build("up", UpConfig, table, resolved)
    members = plan(config, table, resolved, environ=os.environ)
    supervisor = Supervisor(
        config,
        members,
        model=str(resolved["model"].value),
        api_keys=_texts(resolved["proxy.api-key"].value or resolved["api-key"].value),
        shows_all=resolved["log-level"].value == "debug",
        proxy_log_level=_proxy_log_level(resolved),
        shutdown_timeout_s=float(str(resolved["shutdown-timeout"].value)),
        heartbeat_timeout_s=float(str(resolved["heartbeat-timeout"].value)),
    )
    say("\n".join([title("up"), *given_lines(resolved)]))
    say(f"  (all else at its default: {program()} up --help)")
    return run_until_signalled(supervisor.run(), on_second_signal=supervisor.kill)


def plan(
    config: UpConfig, table: Table, resolved: Mapping[str, Resolved], *, environ: Mapping[str, str]
) -> list[Member]:
    """Decide which processes make up the deployment; engines first, the proxy last.

    Raises:
        ConfigError: The model cannot be used, two processes want one port, or a port is taken.
    """
    written = str(resolved["model"].value)
    model = str(model_directory(written))
    num_ranks = sum(
        replicas * _num_ranks(role, resolved)
        for role, replicas in (
            ("prefill", config.prefill_replicas),
            ("decode", config.decode_replicas),
        )
    )
    threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    inherited = {k: v for k, v in environ.items() if not k.startswith(ENVIRONMENT_PREFIX)}
    secret = str(resolved["secret"].value or secrets.token_hex(32))

    ports: dict[int, str] = {}
    members: list[Member] = []

    def add(role: str, name: str, port: int, flag: str, arguments: list[str]) -> None:
        if port in ports:
            raise ConfigError(f"--{flag} {port} is already the port of {ports[port]}", param=flag)
        ports[port] = name
        require_free(config.host, port, flag=flag)
        given = _given(role, resolved)
        _check(role, given)
        hidden = {flag: given[flag].value for flag in _BY_ENVIRONMENT if flag in given}
        hidden["secret"] = secret
        spec = ChildSpec(
            name=name,
            arguments=[
                role,
                *arguments,
                "--host",
                config.host,
                "--port",
                str(port),
                *arguments_of(role, resolved),
            ],
            environ={**inherited, **{variable(f): _variable_text(v) for f, v in hidden.items()}},
        )
        members.append(Member(spec, role, f"http://{_url_host(config.host)}:{port}"))

    for role, first_port, count in (
        ("prefill", config.prefill_port, config.prefill_replicas),
        ("decode", config.decode_port, config.decode_replicas),
    ):
        for index in range(count):
            name = role if count == 1 else f"{role}{index}"
            arguments = [model, "--engine-id", name]
            if not resolved["served-model-name"].value:
                arguments += ["--served-model-name", written]
            if resolved["num-threads"].value is None:
                arguments += ["--num-threads", str(threads)]
            add(role, name, first_port + index, f"{role}-port", arguments)
    engines = [
        word
        for role in ("prefill", "decode")
        for word in (f"--{role}", *(member.url for member in members if member.role == role))
    ]
    add("proxy", "proxy", config.port, "port", engines)
    return members


def arguments_of(role: str, resolved: Mapping[str, Resolved]) -> list[str]:
    """Return, as words of `role`'s command line, what somebody set for it."""
    given = _given(role, resolved)
    if role == "proxy" and _proxy_log_level(resolved) != "debug":
        # Its line about the demo request is wanted at any level; the rest is left out here.
        given.pop("log-level", None)
    return [
        word
        for flag, item in given.items()
        if flag not in _BY_ENVIRONMENT
        for word in _words(flag, item.value)
    ]


def _proxy_log_level(resolved: Mapping[str, Resolved]) -> str:
    """From which level up the proxy's log is to be shown."""
    given = _given("proxy", resolved).get("log-level")
    return "info" if given is None else str(given.value)


def _given(role: str, resolved: Mapping[str, Resolved]) -> dict[str, Resolved]:
    """What somebody set for `role`: for it alone, or for all that have the setting."""
    table = proxy_table() if role == "proxy" else engine_table(Role(role))
    given = {}
    for setting in table.settings:
        flag = setting.flag
        shared = None if flag in _CHOSEN_HERE else resolved.get(flag)
        for item in (resolved.get(f"{role}.{flag}"), shared):
            if item is not None and item.source is not Source.DEFAULT:
                given[flag] = item
                break
    return given


def _num_ranks(role: str, resolved: Mapping[str, Resolved]) -> int:
    """Ranks of one engine of `role`, of all its engine cores."""
    flags = {flag: item.value for flag, item in _given(role, resolved).items()}
    table = engine_table(Role(role))
    values = resolve(table, command_line={"model": BOXED, **flags}, environ={})
    parallel = build("engine", EngineConfig, table, values).parallel
    return parallel.num_ranks * parallel.data_parallel_size


def _check(role: str, given: Mapping[str, Resolved]) -> None:
    """Refuse here what a child would refuse, before any is started.

    Raises:
        ConfigError: A setting cannot be used.
    """
    flags = {flag: item.value for flag, item in given.items()}
    if role == "proxy":
        table = proxy_table()
        values = resolve(table, command_line=flags, environ={})
        build("proxy", ProxyConfig, table, values)
    else:
        table = engine_table(Role(role))
        values = resolve(table, command_line={"model": BOXED, **flags}, environ={})
        transfer = build("engine", EngineConfig, table, values).transfer
        read_settings(transfer.kv_connector, transfer.settings)
        build("server", ServerConfig, table, values)
    build("log", LogConfig, table, values)


def _words(flag: str, value: object) -> list[str]:
    """A setting as words of a command line."""
    match value:
        case bool():
            return [f"--{flag}" if value else f"--no-{flag}"]
        case None:
            return [f"--{flag}", "auto"]
        case tuple():
            return [f"--{flag}", *map(str, value)]
        case enum.Enum():
            return [f"--{flag}={value.value}"]
        case _:
            return [f"--{flag}={value}"]


def _variable_text(value: object) -> str:
    return json.dumps(value) if isinstance(value, (list, tuple)) else str(value)


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, tuple) else ()


def _url_host(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


class Supervisor:
    """The members of a deployment as child processes, from first start to last exit.

    Args:
        members: Engines first, the proxy last.
        model: MODEL as it was written.
        api_keys: The proxy's; the demo request sends the first.
        shows_all: Whether all that the children log is shown.
        proxy_log_level: What the proxy logs below it is not shown.
        shutdown_timeout_s: How long the children may drain.
        heartbeat_timeout_s: How long one may be stopped.
    """

    def __init__(
        self,
        config: UpConfig,
        members: Sequence[Member],
        *,
        model: str,
        api_keys: Sequence[str],
        shows_all: bool,
        proxy_log_level: str,
        shutdown_timeout_s: float,
        heartbeat_timeout_s: float,
    ) -> None:
        self._config = config
        self._shows_all = shows_all
        self._proxy_level = _LEVELS.index(proxy_log_level[0].upper())
        self._shutdown_timeout_s = shutdown_timeout_s
        self._model = model
        self._members = members
        self._proxy = members[-1]
        self._headers = {"Authorization": f"Bearer {api_keys[0]}"} if api_keys else {}
        self._demo_id = f"demo-{secrets.token_hex(4)}"
        self._question = Question(config.prompt, config.max_tokens, is_chat=True)
        self._demo_line: asyncio.Future[str] | None = None
        self._is_ready = False
        self._width = max(len(member.spec.name) for member in members)
        self._children = [
            Child(
                member.spec,
                on_line=functools.partial(self._on_line, member.spec.name),
                say=functools.partial(self._on_line, "up"),
                heartbeat_timeout_s=heartbeat_timeout_s,
            )
            for member in members
        ]
        self._lives: list[asyncio.Task[None]] = []

    async def run(self) -> int:
        """Start, show, serve; returns the exit code.

        Raises:
            ConfigError: The engines cannot exchange KV.
        """
        started_s = time.monotonic()
        self._demo_line = asyncio.get_running_loop().create_future()
        self._lives = [asyncio.create_task(child.run()) for child in self._children]
        try:
            async with aiohttp.ClientSession() as session:
                try:
                    async with asyncio.timeout(self._config.start_timeout_s):
                        await self._while_alive(self._all_ready(session, started_s))
                except TimeoutError:
                    say(f"Not ready after {self._config.start_timeout_s:g} s (--start-timeout).")
                    return 1
                with contextlib.suppress(aiohttp.ClientError):  # one that has just died is told of
                    await self._require_pairs(session)
                self._is_ready = True
                answered = await self._while_alive(self._demo(session))
            if self._config.once or not answered:
                return 0 if answered else 1
            say(self._next_steps())
            await self._while_alive(asyncio.Event().wait())
            return 0
        except ChildFailedError as error:
            say(f"{error}; ending the others.")
            return error.code if error.code > 0 else 1
        finally:
            await self._stop()

    def kill(self) -> None:
        """End every child at once."""
        for child in self._children:
            child.kill()

    async def _while_alive(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work`, unless a child cannot be kept alive."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, *self._lives}, return_when=asyncio.FIRST_COMPLETED)
            for life in self._lives:
                if life.done():
                    life.result()
            return await task
        finally:
            task.cancel()

    async def _all_ready(self, session: aiohttp.ClientSession, started_s: float) -> None:
        roles = Counter(member.role for member in self._members if member.role != "proxy")

        async def one(member: Member, child: Child) -> None:
            engines = roles if member.role == "proxy" else None
            await wait_ready(session, member.url, engines=engines)
            child.was_ready = True
            name = member.spec.name.ljust(self._width)
            say(f"  {name}  {member.url}  ready after {time.monotonic() - started_s:.1f} s")

        async with asyncio.TaskGroup() as group:
            for member, child in zip(self._members, self._children, strict=True):
                group.create_task(one(member, child))

    async def _require_pairs(self, session: aiohttp.ClientSession) -> None:
        """Check that KV can go from every prefill engine to every decode engine.

        The proxy would serve all the same: each request on one engine.

        Raises:
            ConfigError: It cannot; the message names what differs.
        """
        peers: dict[str, list[RunningEngine]] = {"prefill": [], "decode": []}
        for member in self._members:
            if member.role != "proxy":
                async with session.get(f"{member.url}{INFO_PATH}") as response:
                    engine = (await response.json())["engine"]
                digest, layout = engine["layout_digest"], engine["layout"]
                peers[member.role].append(RunningEngine(member.url, member.role, digest, layout))
        for one, other in itertools.product(peers["prefill"], peers["decode"]):
            finding = compatible(one, other)
            if finding.verdict is not Grade.OK:
                raise ConfigError(f"{finding.text}; {finding.remedy}")

    async def _demo(self, session: aiohttp.ClientSession) -> bool:
        """Send the demo request; False if it was not answered."""

        async def send(question: Question, name: str, on_text: Callable[[str], None]) -> None:
            await ask(
                session,
                self._proxy.url,
                question,
                request_id=name,
                headers=self._headers,
                on_text=on_text,
            )

        try:
            # The first transfer between two engines makes them acquainted; show the second.
            first = f"{self._demo_id}-first"
            try:
                await send(Question("Hello", 2, is_chat=True), first, lambda _: None)
            except DemoFailedError as error:
                if error.status != 400:
                    raise
                # The model has no chat template.
                self._question = dataclasses.replace(self._question, is_chat=False)
                await send(Question("Hello", 2, is_chat=False), first, lambda _: None)
            say(f"\n{_bold(self._question.text)}")
            await send(self._question, self._demo_id, lambda text: say(text, end=""))
        except DemoFailedError as error:
            say(f"\nThe demo request failed: {error}")
            return False
        say("\n")
        assert self._demo_line is not None
        try:
            line = await asyncio.wait_for(self._demo_line, _DEMO_LINE_TIMEOUT_S)
        except TimeoutError:
            say(f"  (the proxy has logged nothing about {self._demo_id})")
        else:
            say(f"  {line}")
        return True

    def _on_line(self, name: str, line: str) -> None:
        """Show a log line of a child, or of our own.

        Not shown, below warnings and but for --log-level debug: what the proxy says while
        the engines start, what the engines say of requests that the proxy tells of as well,
        and the demo request, of which the proxy's line becomes the summary.
        """
        is_proxy = name == self._proxy.spec.name
        if self._demo_id in line:
            _, found, rest = line.partition(f"req {self._demo_id} ")
            if found and is_proxy and self._demo_line is not None and not self._demo_line.done():
                self._demo_line.set_result(rest)
            return
        match = _LOG_LINE.match(line)
        if match is not None:
            level = _LEVELS.index(match[1])
            if is_proxy and level < self._proxy_level:
                return
            if is_proxy != self._is_ready and match[1] == "I" and not self._shows_all:
                return
        print(f"{name.ljust(self._width)} | {line}", file=sys.stderr, flush=True)

    def _next_steps(self) -> str:
        url = self._proxy.url
        body = json.dumps(self._question.body)
        key = ' -H "Authorization: Bearer $PDSERVE_API_KEY"' if self._headers else ""
        engines = "\n".join(
            f"  {member.spec.name.ljust(self._width)}  {member.url}" for member in self._members
        )
        return f"""
Serving OpenAI's API on {_bold(url)}; Ctrl-C drains and ends all, a second one kills.
{engines}
Ask it something from another terminal:
  curl {url}{self._question.path}{key} \\
    -H 'Content-Type: application/json' -d {shlex.quote(body)}
Compare with one engine that does both:
  {program()} serve {shlex.quote(self._model)} --port {self._config.port + 1}
See it at work, and what it counts:
  {url}/dashboard
  curl {url}/metrics
"""

    async def _stop(self) -> None:
        """Drain the proxy, then those that read KV, then those that are read from.

        Nothing is left when this returns.
        """
        timeout_s = self._shutdown_timeout_s + _KILL_AFTER_S
        try:
            for role in ("proxy", "decode", "prefill"):
                pairs = zip(self._members, self._children, strict=True)
                stops = (child.stop(timeout_s) for member, child in pairs if member.role == role)
                await asyncio.gather(*stops)
            await asyncio.gather(*self._lives, return_exceptions=True)
        finally:
            self.kill()


def say(text: str, end: str = "\n") -> None:
    """Write to the person who started all this."""
    print(text, end=end, flush=True)


def _bold(text: str) -> str:
    is_terminal = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return f"\x1b[1m{text}\x1b[0m" if is_terminal else text
