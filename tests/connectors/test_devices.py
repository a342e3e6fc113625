"""UCX listens where the side channel does, and nowhere else."""

from __future__ import annotations

import functools
import ipaddress
import socket
from typing import TYPE_CHECKING, NamedTuple

import psutil
import pytest

from pdserve.connectors.conformance.engines import prompt_of
from pdserve.connectors.nixl import NixlConnector
from pdserve.connectors.transfer_thread.host import net_devices
from tests.connectors.engines import Engine, RemoteEngine
from tests.connectors.making import making

if TYPE_CHECKING:
    from pathlib import Path


class Address(NamedTuple):
    address: str


INTERFACES = {
    "lo": [Address("127.0.0.1"), Address("10.9.9.9"), Address("::1")],
    "eth0": [Address("02:fc:00:00:00:01"), Address("192.0.2.2"), Address("fd00::2")],
    "eth1:kv": [Address("10.0.0.7")],
}


@pytest.fixture
def infiniband(tmp_path: Path) -> Path:
    for port, state in (("mlx5_0/ports/1", "4: ACTIVE\n"), ("mlx5_1/ports/1", "1: DOWN\n")):
        (tmp_path / port).mkdir(parents=True)
        (tmp_path / port / "state").write_text(state)
    return tmp_path


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_a_loopback_address_leaves_the_loopback_device_alone(host: str, infiniband: Path) -> None:
    assert net_devices(host, interfaces=lambda: INTERFACES, infiniband=infiniband) == "lo"


@pytest.mark.parametrize(
    ("host", "device"), [("192.0.2.2", "eth0"), ("fd00:0::2", "eth0"), ("10.0.0.7", "eth1")]
)
def test_an_address_leaves_its_device_and_the_rdma_ports_that_are_up(
    host: str, device: str, infiniband: Path
) -> None:
    devices = net_devices(host, interfaces=lambda: INTERFACES, infiniband=infiniband)
    assert devices == f"{device},mlx5_0:1"


def test_an_address_of_no_device_leaves_all_of_them(infiniband: Path) -> None:
    for host in ("10.9.9.9", "203.0.113.5"):  # the first is announced from the loopback device
        assert net_devices(host, interfaces=lambda: INTERFACES, infiniband=infiniband) is None


def has_a_network() -> bool:
    return any(
        not ipaddress.ip_address(each.address).is_loopback
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family == socket.AF_INET
    )


@pytest.mark.slow
@pytest.mark.skipif(not has_a_network(), reason="there is no device but the loopback one")
@pytest.mark.parametrize(("own", "is_loopback"), [({}, True), ({"UCX_NET_DEVICES": "all"}, False)])
def test_an_engine_on_loopback_listens_nowhere_else_unless_its_user_says_so(
    own: dict[str, str], *, is_loopback: bool
) -> None:
    prompt = prompt_of(40)
    with (
        making(RemoteEngine) as remote,
        making(functools.partial(Engine, NixlConnector())) as local,
    ):
        p, d = remote("P", environment=own), local("D")
        d.load(d.queue(prompt, p.prefill(prompt, [7, 2, 3]), "r"), [4, 5, 6])
        d.until(lambda: d.received)
        listening = {
            connection.laddr.ip
            for connection in psutil.Process(p.process.pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
    assert all(ipaddress.ip_address(each).is_loopback for each in listening) is is_loopback
    assert listening
