"""What `pdserve up` tells its children, and how long it waits for them; none is started."""

from __future__ import annotations

from pdserve.commands.up_plan import DeploymentPlan, plan
from pdserve.config.boxed import BOXED
from pdserve.config.load import build, resolve
from pdserve.config.settings import up_table
from pdserve.config.up import UpConfig
from tests.cli.process import free_ports

PORTS = ("port", "prefill-port", "decode-port", "kv-port", "kv-http-port")


def planned(given: dict[str, object]) -> DeploymentPlan:
    table = up_table()
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    values = resolve(table, command_line={"model": BOXED, **ports, **given}, environ={})
    return plan(build("up", UpConfig, table, values), values, environ={})


def test_each_child_may_drain_for_as_long_as_it_was_told() -> None:
    given = {"shutdown-timeout": 7.0, "proxy.shutdown-timeout": 100.0, "prefill.drain-delay": 2.0}
    drains = {member.role: member.drain_s for member in planned(given).members}
    assert drains == {"prefill": 9.0, "decode": 7.0, "proxy": 100.0}


def test_a_store_logs_as_the_others_do() -> None:
    store, *_ = planned({"kv-tiers": "cpu:64MiB", "log-format": "json"}).members
    assert store.role == "kv-server"
    assert "--log-format=json" in store.spec.arguments
