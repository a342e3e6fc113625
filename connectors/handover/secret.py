"""When a deployment may do without a secret."""

from __future__ import annotations

from pdserve.errors import ConfigError

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def check_secret(*, host: str, secret: str) -> bytes:
    """Return the deployment's secret as bytes.

    Raises:
        ConfigError: It is empty although the side channel is reachable from elsewhere.
    """
    if not secret and host not in _LOOPBACK:
        raise ConfigError(
            f"--secret is empty and --kv-transfer-config.host is {host!r}: give every engine and "
            "proxy the same PDSERVE_SECRET, or use a loopback host",
            param="secret",
        )
    return secret.encode()
