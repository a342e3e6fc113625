"""Derives the address under which others reach this host from `--host`."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from pdserve.config.http import ServerConfig

_ELSEWHERE: Final = "192.0.2.1"
"""An address that no host has (RFC 5737): its route is the route out of this host."""


def own_address(server: ServerConfig) -> str:
    """Return a numeric address of this host that peers can reach.

    It is the address that HTTP binds. For a wildcard it is the announced address, if this host has
    it; else the source address of the route to the first proxy, or out of this host; else loopback.
    Sends only queries to a name server.
    """
    addresses = _addresses(server.host) if server.host else ["0.0.0.0"]
    if not addresses:
        return server.host  # whoever binds it says what is wrong
    if not ipaddress.ip_address(addresses[0]).is_unspecified:
        return addresses[0]
    for address in _hosts_of([server.advertise_url]):
        if _is_ours(address):
            return address
    for address in [*_hosts_of(server.proxy_urls), _ELSEWHERE]:
        source = _source_towards(address)
        if source is not None:
            return source
    return "127.0.0.1"


def _hosts_of(urls: Iterable[str]) -> list[str]:
    return [address for url in urls for address in _addresses(urlsplit(url).hostname or "")]


def _addresses(host: str) -> list[str]:
    """The numeric addresses of a host, IPv4 first; may be empty."""
    if not host:
        return []
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(each[4][0]) for each in sorted(found, key=lambda each: each[0] != socket.AF_INET)]


def _is_ours(address: str) -> bool:
    with _datagrams(address) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _source_towards(address: str) -> str | None:
    with _datagrams(address) as probe:
        try:
            probe.connect((address, 9))  # a datagram socket sends nothing for it
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _datagrams(address: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
