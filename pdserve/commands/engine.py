"""`pdserve prefill`, `decode` and `serve`: one engine and its API server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from pdserve.commands.announce import START, program
from pdserve.commands.model_directory import model_directory
from pdserve.commands.running import exit_code, require_free, require_tls
from pdserve.config.boxed import BOXED, boxed_heads_dir
from pdserve.config.connectors import check_settings
from pdserve.config.http import ServerConfig
from pdserve.config.load import Resolved, Source, Table, build
from pdserve.config.schema import EngineConfig, Role
from pdserve.config.speculative import MEDUSA, SpeculativeConfig
from pdserve.config.vllm.translate import ROLE, role_of
from pdserve.errors import ConfigError, EngineDeadError
from pdserve.http.own_address import own_address
from pdserve.observe.log import log_event

if TYPE_CHECKING:
    from pdserve.wire.request import EngineInfo

log = logging.getLogger("pdserve.engine")

_PROGRESS_INTERVAL_S = 1.0
_KV_HOST = "kv-transfer-config.host"


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
    engine = engine_config(role_of(role, str(resolved[ROLE].value)), table, resolved)
    server = build("server", ServerConfig, table, resolved)
    engine.transfer.require_secret("host", server.host)
    engine = with_kv_host(engine, server, resolved)
    if server.port:
        require_free(server.host, server.port, flag="port")
    require_tls(server.tls)
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
    speculative = config.speculative
    if speculative.model:
        directory = _draft_directory(speculative)
        speculative = msgspec.structs.replace(speculative, model=directory)
    return msgspec.structs.replace(config, role=role, model=model, speculative=speculative)


def _draft_directory(speculative: SpeculativeConfig) -> str:
    if speculative.method == MEDUSA and speculative.model == BOXED:
        return str(boxed_heads_dir())
    try:
        return str(model_directory(speculative.model))
    except ConfigError as error:
        flag = "speculative-config.model"
        raise ConfigError(f"--{flag}: {error}", param=flag) from None


def with_kv_host(
    engine: EngineConfig, server: ServerConfig, resolved: Mapping[str, Resolved]
) -> EngineConfig:
    """Exchange KV at the address where HTTP is served, unless another one is set."""
    if resolved[_KV_HOST].source is not Source.DEFAULT:
        return engine
    host = own_address(server)
    if host != engine.transfer.host:
        log_event(logging.getLogger(START), "KV follows --host", kv_host=host)
    transfer = msgspec.structs.replace(engine.transfer, host=host)
    return msgspec.structs.replace(engine, transfer=transfer)


async def _serve(engine: EngineConfig, server: ServerConfig) -> int:
    from pdserve.engine.dp_client import launch

    client = await launch(engine, progress=_Progress())
    # The core is starting meanwhile, so the server's imports do not delay it.
    from pdserve.server.app import run_server

    try:
        stopped_by = await run_server(
            client,
            engine_config=engine,
            server_config=server,
            on_ready=lambda url: _tell_ready(engine, server, client.info, url),
        )
    except EngineDeadError:
        if client.info is None:
            await client.wait_ready()  # raises ConfigError if the settings were at fault
        raise
    return exit_code(stopped_by)


class _Progress:
    """Logs an engine's progress while it starts; percentages at most once a second."""

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


def _tell_ready(
    engine: EngineConfig, server: ServerConfig, info: EngineInfo | None, url: str
) -> None:
    """Log that the engine is ready and, if it needs a proxy and has none, how to start one."""
    assert info is not None
    start = logging.getLogger(START)
    num_tokens = info.num_blocks * info.block_size
    log_event(
        start,
        "ready",
        url=url,
        role=info.role,
        model=info.model,
        dtype=info.dtype,
        max_model_len=info.max_model_len,
        kv_tokens=num_tokens,
        max_concurrency=round(num_tokens / info.max_model_len, 2),
        proxy=",".join(server.proxy_urls) or None,
    )
    if engine.role is not Role.BOTH and not server.proxy_urls:
        log_event(
            start,
            "its clients use a proxy, and it was started without one",
            start=f"{program()} proxy --{engine.role.value} {url} ...",
        )
