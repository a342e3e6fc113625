"""KV is exchanged, and an engine called back, where HTTP is served, unless somebody says where."""

from __future__ import annotations

import pytest

from pdserve.commands import engine
from pdserve.config.boxed import BOXED
from pdserve.config.http import ServerConfig
from pdserve.config.load import build, resolve
from pdserve.config.schema import EngineConfig, Role
from pdserve.config.settings import engine_table
from pdserve.http import own_address as module
from pdserve.http.own_address import own_address


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Addresses of others, and that of this host which the way to each leads from."""
    found = {"127.0.0.1": "127.0.0.1", "10.0.0.9": "10.0.0.2", "192.0.2.1": "172.16.0.2"}
    monkeypatch.setattr(module, "_source_towards", found.get)
    monkeypatch.setattr(module, "_is_ours", set(found.values()).__contains__)
    return found


@pytest.mark.parametrize(
    ("host", "address"), [("127.0.0.1", "127.0.0.1"), ("10.0.0.2", "10.0.0.2"), ("::1", "::1")]
)
def test_it_is_the_address_that_http_binds(host: str, address: str) -> None:
    assert own_address(ServerConfig(host=host)) == address


def test_a_name_becomes_an_address() -> None:
    assert own_address(ServerConfig(host="localhost")) == "127.0.0.1"


@pytest.mark.parametrize(
    ("server", "address"),
    [
        ({"proxy_urls": ("http://10.0.0.9:8000",)}, "10.0.0.2"),
        ({"proxy_urls": ("http://127.0.0.1:8000",)}, "127.0.0.1"),
        (
            {
                "advertise_url": "http://172.16.0.2:8100",
                "proxy_urls": ("http://10.0.0.9:8000",),
            },
            "172.16.0.2",
        ),
        (
            {"advertise_url": "http://10.7.7.7", "proxy_urls": ("http://10.0.0.9:8000",)},
            "10.0.0.2",
        ),
        ({}, "172.16.0.2"),
    ],
    ids=["proxy", "proxy here", "announced", "announced by another host", "nothing named"],
)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_of_a_wildcard_it_is_where_others_come_from(
    host: str, server: dict[str, object], address: str, routes: dict[str, str]
) -> None:
    assert own_address(ServerConfig(host=host, **server)) == address  # type: ignore[arg-type]


def test_without_a_way_out_it_is_the_loopback_one(
    routes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_source_towards", lambda address: None)
    assert own_address(ServerConfig(host="0.0.0.0")) == "127.0.0.1"


def test_the_way_to_an_address_of_this_host_leads_from_it() -> None:
    assert module._source_towards("127.0.0.1") == "127.0.0.1"
    assert module._is_ours("127.0.0.1")
    assert not module._is_ours("192.0.2.1")


@pytest.mark.parametrize(
    ("given", "host"),
    [
        ({}, "127.0.0.1"),
        ({"host": "10.0.0.2"}, "10.0.0.2"),
        ({"host": "10.0.0.2", "kv-transfer-config.host": "127.0.0.1"}, "127.0.0.1"),
        ({"host": "127.0.0.1", "kv-transfer-config.host": "10.0.0.3"}, "10.0.0.3"),
    ],
)
def test_a_host_that_somebody_says_wins(
    given: dict[str, object], host: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="pdserve")
    table = engine_table(Role.PREFILL)
    given = {"model": BOXED, "secret": "s", **given}
    values = resolve(table, command_line=given, environ={})
    server = build("server", ServerConfig, table, values)
    made = engine.with_kv_host(build("engine", EngineConfig, table, values), server, values)
    assert made.transfer.host == host
    follows = host != "127.0.0.1" and "kv-transfer-config.host" not in given
    assert ("follows --host" in caplog.text) is follows
