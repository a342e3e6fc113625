"""What `pdserve up` tells its children, and how long it waits for them; none is started."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.commands.up import Supervisor
from pdserve.commands.up_plan import DeploymentPlan, plan
from pdserve.config.boxed import BOXED
from pdserve.config.http import ProxyConfig
from pdserve.config.load import build, resolve
from pdserve.config.settings import up_table
from pdserve.config.up import UpConfig
from pdserve.errors import ConfigError
from tests.cli.process import free_neighbours, free_ports

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PORTS = ("port", "prefill-port", "decode-port", "both-port", "kv-port", "kv-http-port")
FOR_BOTH = {"prefill-replicas": 0, "decode-replicas": 0, "both-replicas": 3}


def planned(given: dict[str, object]) -> DeploymentPlan:
    table = up_table()
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    for role in ("prefill", "decode", "both"):
        num = given.get(f"{role}-replicas", 1)
        if isinstance(num, int) and num > 1:
            ports[f"{role}-port"] = free_neighbours(num)
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


def test_engines_for_both_exchange_kv_and_stand_in_both_of_the_proxys_lists() -> None:
    *engines, proxy = planned(
        {**FOR_BOTH, "both.max-num-seqs": 5, "decode.max-num-seqs": 6}
    ).members
    assert [(each.role, each.spec.name) for each in engines] == [
        ("both", f"both{index}") for index in range(3)
    ]
    for each in engines:
        words = each.spec.arguments
        assert words[0] == "serve"
        assert words[words.index("--kv-transfer-config.kv-connector") + 1] == "nixl"
        assert "--max-num-seqs=5" in words
    urls, words = [each.url for each in engines], proxy.spec.arguments
    for flag in ("--prefill", "--decode"):
        begin = words.index(flag) + 1
        assert words[begin : begin + 4] == [*urls, words[begin + 3]]
        assert words[begin + 3].startswith("--")


def test_the_engine_to_compare_with_has_the_same_settings_and_a_port_of_its_own() -> None:
    first = free_neighbours(2)
    deployment = planned({"port": first, "prefill-port": first + 1, "dtype": "float32"})
    *words, flag, port = deployment.one_engine
    assert (*words, flag) == ("serve", BOXED, "--dtype=float32", "--port")
    assert not any(member.url.endswith(f":{port}") for member in deployment.members)


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"prefill-replicas": 0}, "prefill-replicas"),
        ({"decode-replicas": 0}, "decode-replicas"),
        ({"decode-replicas": -1, "both-replicas": 1}, "decode-replicas"),
        ({"both-replicas": -1}, "both-replicas"),
        ({"port": -1}, "port"),
        ({"port": 0}, "port"),
        ({"decode-replicas": 2, "decode-port": 65535}, "decode-port"),
        (
            {**FOR_BOTH, "both.kv-transfer-config.kv-role": "kv_producer"},
            "kv-transfer-config.kv-role",
        ),
    ],
)
def test_a_deployment_where_nobody_does_a_part_of_the_work_or_listens_is_refused(
    given: dict[str, object], flag: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(given)
    assert refused.value.param == flag


def test_the_secret_that_is_drawn_is_every_members_and_lets_kv_leave_this_host() -> None:
    deployment = planned({"kv-transfer-config.host": "192.0.2.1"})
    [drawn] = {member.spec.environ["PDSERVE_SECRET"] for member in deployment.members}
    assert len(drawn) == 64
    assert not any(drawn in word for each in deployment.members for word in each.spec.arguments)
    assert drawn not in deployment.one_engine


def test_the_port_for_gateways_is_one_that_no_member_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.commands.up_plan.require_free", lambda *_, **__: None)
    planned({"port": 7, "proxy.epp-port": ProxyConfig().port})
    for flag in ("port", "decode-port"):
        with pytest.raises(ConfigError) as refused:
            planned({flag: 7, "proxy.epp-port": 7})
        assert refused.value.param == "epp-port"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "0", "127.1", "0x7f.1"])
def test_members_are_asked_on_loopback_however_their_address_is_written(host: str) -> None:
    for member in planned({"host": host}).members:
        assert member.url.startswith("http://127.0.0.1:")


async def test_an_output_that_nobody_reads_ends_the_start_as_it_ends_any_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_: str) -> None:
        raise BrokenPipeError

    async def ready(*_: object, **__: object) -> None:
        pass

    supervisor = Supervisor(UpConfig(), planned({}))
    monkeypatch.setattr("pdserve.commands.up.say", broken)
    monkeypatch.setattr("pdserve.commands.up.wait_ready", ready)
    chosen = list(zip(supervisor._members, supervisor._children, strict=True))
    session: Any = None
    with pytest.raises(BrokenPipeError):
        await supervisor._all_ready(session, chosen, 0.0)


async def test_who_is_late_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment = planned({})
    prefill, decode, proxy = deployment.members

    async def ready(_: object, url: str, **__: object) -> None:
        await asyncio.sleep(0 if url == prefill.url else 60)

    monkeypatch.setattr("pdserve.commands.up.wait_ready", ready)
    monkeypatch.setattr("pdserve.commands.children.Child.run", lambda _: asyncio.sleep(60))
    supervisor = Supervisor(UpConfig(start_timeout_s=0.05), deployment)
    running = asyncio.create_task(supervisor.run())
    while "Not ready" not in (out := capsys.readouterr().out):
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait({running})
    late = f"(--start-timeout): decode ({decode.url}), proxy ({proxy.url}).\n"
    assert out.endswith(late)


class _Told:
    """An HTTP session that tells a dtype of each engine; none of one that starts."""

    def __init__(self, dtypes: dict[str, str | None], *, alone: str = "", role: str = "") -> None:
        self._dtypes = dtypes
        self._alone = alone
        self._role = role

    @contextlib.asynccontextmanager
    async def get(self, url: str) -> AsyncIterator[_Told]:
        self._url = url.removesuffix("/pdserve/info")
        yield self

    async def json(self) -> dict[str, object]:
        dtype = self._dtypes[self._url]
        if dtype is None:
            return {"engine": None}
        role = self._role or ("prefill" if self._url == next(iter(self._dtypes)) else "decode")
        endpoints = [] if self._alone in (self._url, "all") else [{"host": "::1", "port": 1}]
        layout = {"layout_digest": dtype, "layout": {"dtype": dtype}}
        return {"engine": {"role": role, "endpoints": endpoints, **layout}}


async def test_engines_that_cannot_pair_are_an_error() -> None:
    deployment = planned({})
    prefill, decode, _ = (member.url for member in deployment.members)
    supervisor = Supervisor(UpConfig(), deployment)
    session: Any = _Told({prefill: "float32", decode: "float32"})
    await supervisor._require_pairs(session)
    session = _Told({prefill: None, decode: "float32"})
    await supervisor._require_pairs(session)
    session = _Told({prefill: "float32", decode: "bfloat16"})
    with pytest.raises(
        ConfigError,
        match="dtype float32 and bfloat16; start both with the same model and --dtype",
    ):
        await supervisor._require_pairs(session)
    alike = dict.fromkeys((prefill, decode), "float32")
    session = _Told(alike, alone=prefill)
    with pytest.raises(ConfigError, match=rf"{prefill} has no connector for it; add nixl to --kv-"):
        await supervisor._require_pairs(session)
    session = _Told(alike, alone="all", role="both")  # each serves whole requests
    await supervisor._require_pairs(session)
