"""A network between a prefill and a decode engine, on one machine: it can be slow, or silent.

Three network namespaces in a row, P's, a router's and D's; the test, and with it the proxy, is
connected to the router too. Between P and D the router can drop every packet without a word, and
what leaves P can be made slow (by a token bucket: netem is not in every kernel). Needs root and
iproute2.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType


@dataclass(frozen=True)
class Host:
    """One namespace, and its address."""

    namespace: str
    address: str


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    return done.stdout


def _require_tools() -> None:
    missing = [tool for tool in ("ip", "ss", "tc") if shutil.which(tool) is None]
    if missing:
        raise RuntimeError(f"no {' and no '.join(missing)} here: install iproute2")
    if os.geteuid() != 0:
        raise RuntimeError("network namespaces need root, and this is another user")


def free_nets(known: Iterable[IPv4Network]) -> list[str]:
    """Draw three neighbouring /24 nets of which no address is in a known one, as `10.64.0`.

    Raises:
        RuntimeError: There are none.
    """
    whole = list(IPv4Network("10.64.0.0/10").subnets(new_prefix=22))
    free = [net for net in whole if not any(net.overlaps(each) for each in known)]
    if not free:
        raise RuntimeError("every net of 10.64.0.0/10 is routed already; end what made them")
    nets = list(secrets.choice(free).subnets(new_prefix=24))[:3]
    return [str(net.network_address).removesuffix(".0") for net in nets]


def _known_nets() -> list[IPv4Network]:
    """What this machine has routes to, but for the one to everywhere."""
    routes = json.loads(_ip("-json", "-4", "route", "show", "table", "all"))
    named = {str(route["dst"]) for route in routes} - {"default"}
    return [IPv4Network(each) for each in named]


class Network:
    """See the module. Use as a context manager; nothing of it is left afterwards.

    Attributes:
        proxy: The address of this machine in it.
        prefill, decode: Where engines run.
    """

    def __init__(self) -> None:
        _require_tools()
        self._name = secrets.token_hex(3)
        self._nets = free_nets(_known_nets())
        self._router = f"r{self._name}"
        self.proxy = f"{self._nets[0]}.2"
        self.prefill = Host(f"p{self._name}", f"{self._nets[1]}.2")
        self.decode = Host(f"d{self._name}", f"{self._nets[2]}.2")
        self._is_partitioned = False
        self._is_slow = False
        self._silent: list[list[str]] = []

    def __enter__(self) -> Self:
        try:
            self._build()
        except subprocess.CalledProcessError as error:
            self._remove()
            raise RuntimeError(f"{error.cmd}: {error.stderr}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def partition(self) -> None:
        """From now on nothing that P and D send one another arrives, and nobody is told."""
        if not self._is_partitioned:
            self._is_partitioned = True
            for rule in self._rules():
                _ip("-n", self._router, "rule", "add", *rule)

    def silence(self, ports: Iterable[int], *, is_prefill: bool) -> None:
        """From now on nothing arrives that P, or D, sends from some ports, and nobody is told."""
        device = "to-p" if is_prefill else "to-d"
        for port in ports:
            rule = ["iif", device, "ipproto", "tcp", "sport", str(port), "blackhole"]
            self._silent.append(rule)
            _ip("-n", self._router, "rule", "add", *rule)

    def slow(self, kbit_per_s: int) -> None:
        """Let this much out of P, which is where KV comes from."""
        self.fast()
        self._is_slow = True
        _tc(
            *("-n", self.prefill.namespace, "qdisc", "add", "dev", "eth0", "root", "tbf"),
            *("rate", f"{kbit_per_s}kbit", "burst", "32kb", "latency", "400ms"),
        )

    def fast(self) -> None:
        """Undo `slow`."""
        if self._is_slow:
            self._is_slow = False
            _tc("-n", self.prefill.namespace, "qdisc", "del", "dev", "eth0", "root")

    def has_leftovers(self) -> bool:
        """Whether connections that P has closed still send what a partition held up."""
        return bool(
            _ip("netns", "exec", self.prefill.namespace, "ss", "-Htn", "state", "fin-wait-1")
        )

    def heal(self) -> bool:
        """Undo all; tell whether the two were cut off from one another."""
        self.fast()
        for rule in self._silent:
            _ip("-n", self._router, "rule", "del", *rule)
        self._silent = []
        was_partitioned, self._is_partitioned = self._is_partitioned, False
        if was_partitioned:
            for rule in self._rules():
                _ip("-n", self._router, "rule", "del", *rule)
        return was_partitioned

    def _rules(self) -> list[list[str]]:
        _, p, d = self._nets
        return [
            ["iif", "to-p", "to", f"{d}.0/24", "blackhole"],
            ["iif", "to-d", "to", f"{p}.0/24", "blackhole"],
        ]

    def _build(self) -> None:
        router, (root_net, *nets) = self._router, self._nets
        for namespace in (router, self.prefill.namespace, self.decode.namespace):
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
        for device, host, net in zip(
            ("to-p", "to-d"), (self.prefill, self.decode), nets, strict=True
        ):
            inside = ("peer", "name", "eth0", "netns", host.namespace)
            _ip("-n", router, "link", "add", device, "type", "veth", *inside)
            _ip("-n", router, "addr", "add", f"{net}.1/24", "dev", device)
            _ip("-n", router, "link", "set", device, "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.namespace, "link", "set", "eth0", "up")
            _ip("-n", host.namespace, "route", "add", "default", "via", f"{net}.1")
        root = f"v{self._name}"
        _ip("link", "add", root, "type", "veth", "peer", "name", "to-root", "netns", router)
        _ip("-n", router, "addr", "add", f"{root_net}.1/24", "dev", "to-root")
        _ip("-n", router, "link", "set", "to-root", "up")
        _ip("addr", "add", f"{self.proxy}/24", "dev", root)
        _ip("link", "set", root, "up")
        for net in nets:
            _ip("route", "add", f"{net}.0/24", "via", f"{root_net}.1")
        forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
        _ip("netns", "exec", router, "sh", "-c", forward)

    def _remove(self) -> None:
        """Links and routes go with the namespaces at their ends."""
        for namespace in (self.prefill.namespace, self.decode.namespace, self._router):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _tc(*arguments: str) -> None:
    subprocess.run(["tc", *arguments], check=True, capture_output=True, text=True)
