"""Plans which processes `pdserve up` starts, and with which flags. Starts none."""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.commands.children import ChildSpec
from pdserve.commands.model_directory import model_directory
from pdserve.commands.running import require_free, require_tls
from pdserve.config.boxed import BOXED
from pdserve.config.checks import WILDCARDS, require
from pdserve.config.connectors import check_settings
from pdserve.config.http import ProxyConfig, ServerConfig, TlsConfig
from pdserve.config.load import (
    ENVIRONMENT_PREFIX,
    Resolved,
    Source,
    build,
    resolve,
    variable,
)
from pdserve.config.log import LogConfig, LogFormat
from pdserve.config.policies import looks_at_prefixes
from pdserve.config.schema import EngineConfig, Role
from pdserve.config.settings import engine_table, proxy_table
from pdserve.config.tiers import LOOPBACK, store_words
from pdserve.config.up import ROLES_OF_UP, UpConfig
from pdserve.config.vllm.translate import ROLE, role_of
from pdserve.errors import ConfigError

_BY_ENVIRONMENT: Final = ("secret", "api-key", "operator-key")
"""Never on a command line, where every user of the machine can read them."""
BOTH: Final = Role.BOTH.value
ENGINE_ROLES: Final = ("prefill", "decode", BOTH)
KV_SERVER: Final = "kv-server"
"""Role of the member that keeps KV for the engines."""
_CHOSEN_HERE: Final = ("host", "port", "model", *ROLES_OF_UP)
"""Settings of the children that have another meaning on our own command line."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the deployment.

    Attributes:
        drain_s: Time that it may take to finish its requests when it is asked to end.
    """

    spec: ChildSpec
    role: str
    url: str
    drain_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DeploymentPlan:
    """A deployment that can be started.

    Attributes:
        members: The store first, if there is one, then engines, the proxy last.
        one_engine: Arguments of one engine beside it that does both, for comparison.
        api_keys: The proxy's; the demo request sends the first.
        shows_all: Whether all log lines of the children are shown.
        proxy_log_level: Level below which the proxy's log lines are hidden.
        log_format: Format of the children's logs.
        logs_requests: Whether the proxy has a line for each request.
        tls: The proxy's TLS settings, which are also used to query the members.
        heartbeat_timeout_s: Time for which a process may be stopped (SIGSTOP).
    """

    members: Sequence[Member]
    one_engine: Sequence[str]
    api_keys: Sequence[str]
    shows_all: bool
    proxy_log_level: str
    log_format: LogFormat
    logs_requests: bool
    tls: TlsConfig
    heartbeat_timeout_s: float


def plan(
    config: UpConfig, resolved: Mapping[str, Resolved], *, environ: Mapping[str, str]
) -> DeploymentPlan:
    """Decide which processes make up the deployment, and their arguments.

    Raises:
        ConfigError: The model cannot be used, two processes want one port, or a port is taken.
    """
    if not resolved["secret"].value:
        drawn = Resolved(secrets.token_hex(32), Source.COMMAND_LINE, "drawn")
        resolved = {**resolved, "secret": drawn}
    written = str(resolved["model"].value)
    model = str(model_directory(written))
    replicas = (
        ("prefill", config.prefill_port, config.prefill_replicas),
        ("decode", config.decode_port, config.decode_replicas),
        (BOTH, config.both_port, config.both_replicas),
    )
    num_ranks = sum(count * _num_ranks(role, resolved) for role, _, count in replicas if count)
    looks = _looks_at_prefixes(resolved)
    threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    read_here = (ENVIRONMENT_PREFIX, "VLLM_")  # children get flags instead
    inherited = {k: v for k, v in environ.items() if not k.startswith(read_here)}

    ports: dict[int, str] = {}
    members: list[Member] = []

    def claim(name: str, host: str, port: int, flag: str) -> None:
        require(0 < port <= 65535, flag, port, "use 1 to 65535")
        if port in ports:
            raise ConfigError(f"--{flag} {port} is already the port of {ports[port]}", param=flag)
        ports[port] = name
        require_free(host, port, flag=flag)

    def add(role: str, name: str, port: int, flag: str, arguments: list[str]) -> None:
        claim(name, config.host, port, flag)
        given = _given(role, resolved)
        tls = _check(role, given, port)
        hidden = {flag: given[flag].value for flag in _BY_ENVIRONMENT if flag in given}
        spec = ChildSpec(
            name=name,
            arguments=[
                command_of(role),
                *arguments,
                "--host",
                config.host,
                "--port",
                str(port),
                "--drain-delay",
                str(resolved["drain-delay"].value),
                *arguments_of(role, resolved),
            ],
            environ={**inherited, **{variable(f): _variable_text(v) for f, v in hidden.items()}},
        )
        scheme = "https" if tls.certfile else "http"
        members.append(
            Member(
                spec,
                role,
                f"{scheme}://{_url_host(config.host)}:{port}",
                drain_s=sum(
                    float(str(given.get(flag, resolved[flag]).value))
                    for flag in ("drain-delay", "shutdown-timeout")
                ),
            )
        )

    connector = ["--kv-transfer-config.kv-connector", "nixl"]
    if config.kv_tiers:
        claim("kv", LOOPBACK, config.kv_port, "kv-port")
        claim("kv", LOOPBACK, config.kv_http_port, "kv-http-port")
        members.append(_kv_server(config, resolved, inherited))
        connector = store_words("nixl", members[0].url, f"http://{LOOPBACK}:{config.kv_http_port}")
    for role, first_port, count in replicas:
        for index in range(count):
            name = role if count == 1 else f"{role}{index}"
            # All engines are on this host, even if the proxy serves others.
            kv_host = ["--kv-transfer-config.host", LOOPBACK]
            arguments = [model, "--engine-id", name, *kv_host, *connector]
            if not resolved["served-model-name"].value:
                arguments += ["--served-model-name", written]
            if looks and _caches_prefixes(role, resolved):
                arguments.append("--kv-events-config.enable-kv-cache-events")
            if resolved["num-threads"].value is None:
                arguments += ["--num-threads", str(threads)]
            add(role, name, first_port + index, f"{role}-port", arguments)
    engines = [
        word
        for role in ("prefill", "decode")
        for word in (f"--{role}", *(each.url for each in members if each.role in (role, BOTH)))
    ]
    if looks:
        engines += ["--tokenizer", model]
    add("proxy", "proxy", config.port, "port", engines)
    for_gateways = _given("proxy", resolved).get("epp-port")
    if for_gateways is not None and for_gateways.value:
        claim("gateways", config.host, int(str(for_gateways.value)), "epp-port")
    other_port = next(port for port in itertools.count(config.port + 1) if port not in ports)
    one_engine = [command_of(BOTH), written, *arguments_of(BOTH, resolved)]
    return DeploymentPlan(
        members=members,
        one_engine=[*one_engine, "--port", str(other_port)],
        api_keys=_texts(resolved["proxy.api-key"].value or resolved["api-key"].value),
        shows_all=resolved["log-level"].value == "debug",
        proxy_log_level=_proxy_log_level(resolved),
        log_format=LogFormat(resolved["log-format"].value),
        logs_requests=_logs_requests(resolved),
        tls=_check("proxy", _given("proxy", resolved), config.port),
        heartbeat_timeout_s=float(str(resolved["heartbeat-timeout"].value)),
    )


def _kv_server(
    config: UpConfig, resolved: Mapping[str, Resolved], environ: Mapping[str, str]
) -> Member:
    words = ["--kv-tiers", config.kv_tiers, "--port", str(config.kv_port)]
    words += ["--http-port", str(config.kv_http_port)]
    words += ["--chunk-size", str(config.kv_chunk_size)]
    for flag in ("log-level", "log-format"):
        words += _words(flag, resolved[flag].value)
    spec = ChildSpec(name="kv", arguments=[KV_SERVER, *words], environ=environ)
    return Member(spec, KV_SERVER, f"tcp://{LOOPBACK}:{config.kv_port}")


def command_of(role: str) -> str:
    """Return the name of the command that runs a member of `role`."""
    return "serve" if role == BOTH else role


def arguments_of(role: str, resolved: Mapping[str, Resolved]) -> list[str]:
    """Return the settings given for `role`, as words of its command line."""
    given = _given(role, resolved)
    if role == "proxy" and _proxy_log_level(resolved) != "debug":
        # Its line on the demo request is needed at any level; other lines are hidden here.
        given.pop("log-level", None)
    return [
        word
        for flag, item in given.items()
        if flag not in _BY_ENVIRONMENT
        for word in _words(flag, item.value)
    ]


def _caches_prefixes(role: str, resolved: Mapping[str, Resolved]) -> bool:
    given = _given(role, resolved).get("enable-prefix-caching")
    return given is None or bool(given.value)


def _looks_at_prefixes(resolved: Mapping[str, Resolved]) -> bool:
    """Whether the proxy needs to know which prefixes the engines hold."""
    given = _given("proxy", resolved)
    flags = ("prefill-policy", "decode-policy", "split-policy")
    return looks_at_prefixes(*(str(given[flag].value) for flag in flags if flag in given))


def _proxy_log_level(resolved: Mapping[str, Resolved]) -> str:
    """Return the lowest level of the proxy's log that is shown."""
    given = _given("proxy", resolved).get("log-level")
    return "info" if given is None else str(given.value)


def _logs_requests(resolved: Mapping[str, Resolved]) -> bool:
    given = _given("proxy", resolved).get("log-requests")
    return given is None or bool(given.value)


def _given(role: str, resolved: Mapping[str, Resolved]) -> dict[str, Resolved]:
    """Return what is set for `role`: for it alone, or for all roles with that setting."""
    table = proxy_table() if role == "proxy" else engine_table(Role(role))
    given = {}
    for setting in table.settings:
        flag = setting.flag
        if setting.note:
            continue  # this command reports it
        shared = None if flag in _CHOSEN_HERE else resolved.get(flag)
        for item in (resolved.get(f"{role}.{flag}"), shared):
            if item is not None and item.source is not Source.DEFAULT:
                given[flag] = item
                break
    return given


def _num_ranks(role: str, resolved: Mapping[str, Resolved]) -> int:
    """Return the ranks of one engine of `role`, over all its engine cores."""
    flags = {flag: item.value for flag, item in _given(role, resolved).items()}
    table = engine_table(Role(role))
    values = resolve(table, command_line={"model": BOXED, **flags}, environ={})
    parallel = build("engine", EngineConfig, table, values).parallel
    return parallel.num_ranks * parallel.data_parallel_size


def _check(role: str, given: Mapping[str, Resolved], port: int) -> TlsConfig:
    """Refuse here what a child would refuse, before any is started; return its TLS settings.

    Raises:
        ConfigError: A setting cannot be used.
    """
    flags = {flag: item.value for flag, item in given.items()} | {"port": port}
    if role == "proxy":
        table = proxy_table()
        values = resolve(table, command_line=flags, environ={})
        tls = build("proxy", ProxyConfig, table, values).tls
    else:
        table = engine_table(Role(role))
        values = resolve(table, command_line={"model": BOXED, **flags}, environ={})
        is_for = role_of(Role(role), str(values[ROLE].value))
        require(is_for is Role(role), ROLE, values[ROLE].value, f"use --{is_for.value}-replicas")
        transfer = build("engine", EngineConfig, table, values).transfer
        check_settings(transfer.kv_connector, transfer.settings)
        tls = build("server", ServerConfig, table, values).tls
    build("log", LogConfig, table, values)
    require_tls(tls)
    return tls


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
    # Sockets take 127.1 and 0 as well, but no client of HTTP does.
    with contextlib.suppress(OSError):
        host = socket.inet_ntoa(socket.inet_aton(host))
    if host in WILDCARDS:
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
