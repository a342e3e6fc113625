"""`pdserve prefill`, `decode` and `serve`: one engine and its API server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import assert_never

import msgspec

from pdserve.commands.announce import program, settings_text
from pdserve.commands.model_directory import model_directory
from pdserve.commands.running import exit_code, require_free, start_logging
from pdserve.config.connectors import check_settings
from pdserve.config.http import ServerConfig
from pdserve.config.load import Resolved, Table, build
from pdserve.config.schema import EngineConfig, Role
from pdserve.errors import EngineDeadError

log = logging.getLogger("pdserve.engine")

_PROGRESS_INTERVAL_S = 1.0

_COMMAND = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.BOTH: "serve"}


def run_prefill(table: Table, resolved: Mapping[str, Resolved]) -> int:
    """Run `pdserve prefill`."""
    return _run(Role.PREFILL, table, resolved)


def run_decode(table: Table, resolved: Mapping[str, Resolved]) -> int:
    """Run `pdserve decode`."""
    return _run(Role.DECODE, table, resolved)


def run_serve(table: Table, resolved: Mapping[str, Resolved]) -> int:
    """Run `pdserve serve`."""
    return _run(Role.BOTH, table, resolved)


def _run(role: Role, table: Table, resolved: Mapping[str, Resolved]) -> int:
    engine = engine_config(role, table, resolved)
    server = build("server", ServerConfig, table, resolved)
    engine.transfer.require_secret("host", server.host)
    if server.port:
        require_free(server.host, server.port, flag="port")
    print(settings_text(_COMMAND[role], resolved), flush=True)
    start_logging(table, resolved)
    return asyncio.run(_serve(engine, server))


def engine_config(role: Role, table: Table, resolved: Mapping[str, Resolved]) -> EngineConfig:
    """Build an engine's settings; its model becomes a directory on this machine.

    Raises:
        ConfigError: A setting or the model cannot be used.
    """
    config = build("engine", EngineConfig, table, resolved)
    check_settings(config.transfer.kv_connector, config.transfer.settings)
    written = config.model.model
    model = msgspec.structs.replace(
        config.model,
        model=str(model_directory(written)),
        served_model_name=config.model.served_model_name or (written,),
    )
    return msgspec.structs.replace(config, role=role, model=model)


async def _serve(engine: EngineConfig, server: ServerConfig) -> int:
    from pdserve.engine.dp_client import launch

    client = await launch(engine, progress=_Progress())
    # The core is on its way: what the server imports costs no time of the start.
    from pdserve.server.app import run_server

    try:
        stopped_by = await run_server(
            client,
            engine_config=engine,
            server_config=server,
            on_ready=lambda url: print(_next_steps(engine, server, url), flush=True),
        )
    except EngineDeadError:
        if client.info is None:
            await client.wait_ready()  # raises ConfigError if the settings were at fault
        raise
    return exit_code(stopped_by)


class _Progress:
    """Logs what an engine says while it starts; of what takes long, a percentage a second."""

    def __init__(self) -> None:
        self._last_s: float | None = None

    def __call__(self, text: str) -> None:
        if text.endswith("%"):
            now_s = time.monotonic()
            if self._last_s is None:
                self._last_s = now_s
            if now_s - self._last_s < _PROGRESS_INTERVAL_S:
                return
            self._last_s = now_s
        else:
            self._last_s = None
        log.info("%s", text)


def _next_steps(engine: EngineConfig, server: ServerConfig, url: str) -> str:
    match engine.role:
        case Role.BOTH:
            return f"Ready: OpenAI's API on {url} ({url}/metrics)"
        case Role.PREFILL | Role.DECODE:
            role = engine.role.value
            ready = f"Ready: {role} engine on {url} ({url}/metrics)."
            if server.proxy_urls:
                return f"{ready} Its users talk to {', '.join(server.proxy_urls)}"
            return f"{ready} Its users talk to a proxy:\n  {program()} proxy --{role} {url} ..."
        case _:
            assert_never(engine.role)
