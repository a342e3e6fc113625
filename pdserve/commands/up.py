"""`pdserve up`: engines of each role and a proxy on this host, and one request.

Life of a deployment: check the ports, start the children, wait until they are ready, send
the demo request through the proxy and show where its time went, serve until Ctrl-C (or,
with `--once`, end there), drain the proxy, then the engines. A child that dies is started
again. Imports no engine: the children do.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import secrets
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import aiohttp

from pdserve.commands import child_log
from pdserve.commands.announce import START, given_lines, program, say, title
from pdserve.commands.children import Child, ChildFailedError, while_alive
from pdserve.commands.demo import DemoFailedError, Question, ask, wait_ready
from pdserve.commands.findings import Grade, RunningEngine, compatible
from pdserve.commands.running import run_until_signalled
from pdserve.commands.segments import remove_ownerless
from pdserve.commands.up_plan import BOTH, ENGINE_ROLES, KV_SERVER, DeploymentPlan, Member, plan
from pdserve.config.load import (
    Resolved,
    Table,
    build,
)
from pdserve.config.log import LOG_LEVELS
from pdserve.config.up import UpConfig
from pdserve.errors import ConfigError
from pdserve.http.tls import client_context
from pdserve.wire.hop import INFO_PATH

_KILL_AFTER_S: Final = 10.0
_DEMO_LINE_TIMEOUT_S: Final = 2.0


def run(table: Table, resolved: Mapping[str, Resolved]) -> int:
    """Run `pdserve up`.

    Raises:
        ConfigError: A setting or the model cannot be used, or a port is taken.
    """
    config = build("up", UpConfig, table, resolved)
    supervisor = Supervisor(config, plan(config, resolved, environ=os.environ))
    say("\n".join([title("up"), *given_lines(resolved)]))
    say(f"  (all else at its default: {program()} up --help)")
    return run_until_signalled(supervisor.run(), on_second_signal=supervisor.kill)


class Supervisor:
    """The members of a deployment as child processes, from first start to last exit."""

    def __init__(self, config: UpConfig, deployment: DeploymentPlan) -> None:
        self._config = config
        self._shows_all = deployment.shows_all
        self._proxy_level = LOG_LEVELS[deployment.proxy_log_level]
        self._log_format = deployment.log_format
        self._logs_requests = deployment.logs_requests
        self._tls = deployment.tls
        self._one_engine = deployment.one_engine
        self._members = members = deployment.members
        self._proxy = members[-1]
        api_keys = deployment.api_keys
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
                heartbeat_timeout_s=deployment.heartbeat_timeout_s,
            )
            for member in members
        ]
        self._lives: list[asyncio.Task[None]] = []

    async def run(self) -> int:
        """Start, show, serve; returns the exit code.

        Raises:
            ConfigError: The engines cannot exchange KV, or a certificate is not believed.
        """
        started_s = time.monotonic()
        self._demo_line = asyncio.get_running_loop().create_future()
        try:
            connector = aiohttp.TCPConnector(ssl=client_context(self._tls))
            async with aiohttp.ClientSession(connector=connector) as session:
                try:
                    async with asyncio.timeout(self._config.start_timeout_s):
                        # Engines ask for the store when they start.
                        for roles in ((KV_SERVER,), (*ENGINE_ROLES, "proxy")):
                            await self._start(session, roles, started_s)
                except TimeoutError:
                    say(self._late_words())
                    return 1
                self._is_ready = True
                answered = await while_alive(self._demo(session), self._lives)
            if self._config.once or not answered:
                return 0 if answered else 1
            say(self._next_steps())
            await while_alive(asyncio.Event().wait(), self._lives)
            return 0
        except ChildFailedError as error:
            say(f"{error}; stopping the other processes.")
            return error.code if error.code > 0 else 1
        finally:
            await self._stop()

    def kill(self) -> None:
        """End every child at once."""
        for child in self._children:
            child.kill()

    async def _start(
        self, session: aiohttp.ClientSession, roles: Sequence[str], started_s: float
    ) -> None:
        """Start all members of some roles, and wait until they are ready."""
        pairs = zip(self._members, self._children, strict=True)
        chosen = [(member, child) for member, child in pairs if member.role in roles]
        self._lives += [asyncio.create_task(child.run()) for _, child in chosen]
        await while_alive(self._all_ready(session, chosen, started_s), self._lives)

    async def _all_ready(
        self,
        session: aiohttp.ClientSession,
        chosen: Sequence[tuple[Member, Child]],
        started_s: float,
    ) -> None:
        roles = Counter(member.role for member in self._members if member.role in ENGINE_ROLES)

        async def one(member: Member, child: Child) -> None:
            engines = roles if member.role == "proxy" else None
            await wait_ready(session, member.url, engines=engines)
            child.was_ready = True
            name = member.spec.name.ljust(self._width)
            say(f"  {name}  {member.url}  ready after {time.monotonic() - started_s:.1f} s")

        async def each(pairs: Sequence[tuple[Member, Child]]) -> None:
            async with asyncio.TaskGroup() as group:
                for member, child in pairs:
                    group.create_task(one(member, child))

        proxies = [pair for pair in chosen if pair[0].role == "proxy"]
        try:
            await each([pair for pair in chosen if pair not in proxies])
            if proxies:  # which take in no engine that does not fit the first
                with contextlib.suppress(aiohttp.ClientError):  # one that has just died
                    await self._require_pairs(session)
                await each(proxies)
        except BaseExceptionGroup as error:  # as of an output that nobody reads any more
            raise error.exceptions[0] from None

    def _late_words(self) -> str:
        pairs = zip(self._members, self._children, strict=True)
        late = ", ".join(
            f"{member.spec.name} ({member.url})" for member, child in pairs if not child.was_ready
        )
        return f"Not ready after {self._config.start_timeout_s:g} s (--start-timeout): {late}."

    async def _require_pairs(self, session: aiohttp.ClientSession) -> None:
        """Check that every decode engine can use the KV of every prefill engine.

        Otherwise the proxy would serve each request on one engine.

        Raises:
            ConfigError: It cannot; the message names what differs.
        """
        peers: list[RunningEngine] = []
        for member in self._members:
            if member.role in ENGINE_ROLES:
                async with session.get(f"{member.url}{INFO_PATH}") as response:
                    engine = (await response.json())["engine"]
                if engine is None:  # it starts anew, after a death that is reported elsewhere
                    continue
                peers.append(RunningEngine.told(member.url, engine))
        for one, other in itertools.combinations(peers, 2):
            if one.role == other.role and (one.role != BOTH or not one.hands_over):
                continue
            finding = compatible(one, other)
            if finding.verdict is Grade.FAIL:
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
            # The first transfer between two engines connects them; show the second.
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
        if not self._logs_requests:
            return True
        assert self._demo_line is not None
        try:
            line = await asyncio.wait_for(self._demo_line, _DEMO_LINE_TIMEOUT_S)
        except TimeoutError:
            say(f"  (the proxy has logged nothing about {self._demo_id})")
        else:
            say(f"  {line}")
        return True

    def _on_line(self, name: str, line: str) -> None:
        """Show a log line of a child or of the supervisor.

        Unless --log-level is debug, lines below warnings are hidden if they repeat what is shown
        otherwise: the proxy's while the engines start, the engines' on requests that the proxy logs
        too, and each one's settings and readiness. Of the demo request only the proxy's line is
        used, as the summary.
        """
        is_proxy = name == self._proxy.spec.name
        entry = child_log.read(line)
        if self._demo_id in line:
            is_demo = is_proxy and entry.request[0] == self._demo_id
            if is_demo and self._demo_line is not None and not self._demo_line.done():
                self._demo_line.set_result(entry.request[1])
            return
        if entry.level is not None:
            if is_proxy and entry.level < self._proxy_level:
                return
            is_known = entry.logger == START or is_proxy != self._is_ready
            if is_known and entry.level == logging.INFO and not self._shows_all:
                return
        child_log.show(name, entry, self._log_format, width=self._width)

    def _next_steps(self) -> str:
        url = self._proxy.url
        body = json.dumps(self._question.body)
        key = ' -H "Authorization: Bearer $PDSERVE_API_KEY"' if self._headers else ""
        if self._tls.ca_certs:
            key += f" --cacert {shlex.quote(self._tls.ca_certs)}"
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
  {program()} {shlex.join(self._one_engine)}
See it at work, and what it counts:
  {url}/dashboard
  curl {url}/metrics
"""

    async def _stop(self) -> None:
        """Drain the proxy, then engines that read KV, then those that are read, then the store.

        No process is left when this returns.
        """
        pairs = list(zip(self._members, self._children, strict=True))
        try:
            for role in ("proxy", "decode", BOTH, "prefill", KV_SERVER):
                stops = (
                    child.stop(member.drain_s + _KILL_AFTER_S)
                    for member, child in pairs
                    if member.role == role
                )
                await asyncio.gather(*stops)
            await asyncio.gather(*self._lives, return_exceptions=True)
        finally:
            self.kill()
            remove_ownerless()


def _bold(text: str) -> str:
    is_terminal = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return f"\x1b[1m{text}\x1b[0m" if is_terminal else text
