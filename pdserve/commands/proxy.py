"""`pdserve proxy`: the routing proxy."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import msgspec

from pdserve.commands.announce import START, program
from pdserve.commands.model_directory import tokenizer_directory
from pdserve.commands.running import exit_code, require_free, require_tls
from pdserve.config.http import ProxyConfig
from pdserve.config.load import Resolved, Table, build
from pdserve.observe.log import log_event

log = logging.getLogger(START)


def run(table: Table, resolved: Mapping[str, Resolved]) -> int:
    """Run `pdserve proxy`."""
    config = build("proxy", ProxyConfig, table, resolved)
    if config.port:
        require_free(config.host, config.port, flag="port")
    if config.epp.port:
        require_free(config.host, config.epp.port, flag="epp-port")
    require_tls(config.tls)
    config = msgspec.structs.replace(config, tokenizer=tokenizer_directory(config.tokenizer))
    return asyncio.run(_serve(config))


async def _serve(config: ProxyConfig) -> int:
    from pdserve.proxy.app import run_proxy

    return exit_code(await run_proxy(config, on_ready=lambda url: _tell_ready(config, url)))


def _tell_ready(config: ProxyConfig, url: str) -> None:
    prefill, decode = (
        len({engine.rstrip("/") for engine in urls}) for urls in (config.prefill, config.decode)
    )
    log_event(log, "ready", url=url, prefill=prefill, decode=decode)
    for role, port, known in (("prefill", 8100, config.prefill), ("decode", 8200, config.decode)):
        if not known:
            start = f"{program()} {role} MODEL --port {port} --proxy {url}"
            log_event(log, f"no {role} engine yet", start=start)
