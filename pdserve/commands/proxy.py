"""`pdserve proxy`: the routing proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from pdserve.commands.announce import program, settings_text
from pdserve.commands.running import exit_code, require_free, start_logging
from pdserve.config.http import ProxyConfig
from pdserve.config.load import Resolved, Table, build


def run(table: Table, resolved: Mapping[str, Resolved]) -> int:
    """Run `pdserve proxy`."""
    config = build("proxy", ProxyConfig, table, resolved)
    if config.port:
        require_free(config.host, config.port, flag="port")
    print(settings_text("proxy", resolved), flush=True)
    start_logging(table, resolved)
    return asyncio.run(_serve(config))


async def _serve(config: ProxyConfig) -> int:
    from pdserve.proxy.app import run_proxy

    return exit_code(
        await run_proxy(config, on_ready=lambda url: print(_next_steps(config, url), flush=True))
    )


def _next_steps(config: ProxyConfig, url: str) -> str:
    lines = [f"Listening on {url} (OpenAI's API; {url}/metrics)"]
    for role, port, known in (("prefill", 8100, config.prefill), ("decode", 8200, config.decode)):
        if not known:
            lines.append(
                f"No {role} engine yet: start one with\n"
                f"  {program()} {role} MODEL --port {port} --proxy {url}"
            )
    return "\n".join(lines)
