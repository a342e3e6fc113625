"""Validates settings as they are made; each refusal names flag, value and remedy."""

from __future__ import annotations

import ipaddress
import math
import sys
from typing import Final
from urllib.parse import urlsplit

from pdserve.errors import ConfigError

POSITIVE: Final = "it must be positive"
WILDCARDS: Final = ("0.0.0.0", "::", "")
"""Hosts that stand for every address of this host."""
_LOCALHOST: Final = "127.0.0.1"


def require(condition: bool, flag: str, value: object, remedy: str) -> None:
    """Refuse a value unless the condition holds.

    Args:
        remedy: What to do about it, for the message.

    Raises:
        ConfigError: It does not hold.
    """
    if not condition:
        raise ConfigError(f"--{flag} is {value!r}: {remedy}", param=flag)


def require_port(port: int, flag: str = "port") -> None:
    """Refuse what is no TCP port."""
    require(0 <= port <= 65535, flag, port, "use 1 to 65535, or 0 for a free one")


def is_url(url: str) -> bool:
    """Whether it is a base URL of HTTP: with a host and a port, and nothing that logs must hide."""
    try:
        parts = urlsplit(url)
        has_host = bool((parts.hostname or "").encode("idna")) and parts.port != 0
    except ValueError:
        return False
    is_base = not ("@" in parts.netloc or parts.query or parts.fragment)
    return has_host and is_base and url.startswith(("http://", "https://"))


def require_url(url: str, flag: str) -> None:
    """Refuse what is no URL of HTTP."""
    require(is_url(url), flag, url, "write it as http://127.0.0.1:8100")


def leads_to(url: str, host: str, port: int) -> bool:
    """Whether a URL surely leads to a server on this host that binds `host` and `port`."""
    parts = urlsplit(url)
    its_port = parts.port or (443 if parts.scheme == "https" else 80)
    hosts = [parts.hostname or "", host]
    its_host, host = (_LOCALHOST if each == "localhost" else each for each in hosts)
    is_ours = its_host == host or (host in WILDCARDS and is_loopback(its_host))
    return is_ours and its_port == port


def require_positive(flag: str, value: float | None) -> None:
    """Refuse a number that is not above 0; None passes."""
    require(value is None or value > 0, flag, value, POSITIVE)


def require_finite(flag: str, value: float | None) -> None:
    """Refuse infinity and what is no number; None passes."""
    require(value is None or math.isfinite(value), flag, value, "use a number that is not infinite")


def require_not_negative(flag: str, value: float | None) -> None:
    """Refuse a negative number; None passes."""
    require(value is None or value >= 0, flag, value, "it must not be negative")


def require_text(flag: str, value: str) -> None:
    """Refuse text with bytes that Python could not decode, which no JSON can carry."""
    is_text = not any("\ud800" <= each <= "\udfff" for each in value)
    require(
        is_text, flag, value, f"write it in {sys.getfilesystemencoding()}, or set LC_ALL=C.UTF-8"
    )


def require_one_of(flag: str, value: str, *choices: str) -> None:
    """Refuse a value that is none of the choices."""
    *most, last = choices
    require(value in choices, flag, value, f"use {', '.join(most)} or {last}")


def require_keys(flag: str, keys: tuple[str, ...]) -> None:
    """Refuse an empty key, of a variable that was not set: every client could send it."""
    for key in keys:
        require(bool(key.strip()), flag, key, "give a key, or leave the flag out")


def is_loopback(host: str) -> bool:
    """Whether an address, or the name localhost, is reached from this host alone."""
    try:
        return (
            host == "localhost" or ipaddress.ip_address(host.split("%", maxsplit=1)[0]).is_loopback
        )
    except ValueError:
        return False
