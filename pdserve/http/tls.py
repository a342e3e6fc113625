"""Makes TLS contexts from settings, for a server and for its own requests.

Each file is read when a process starts, and an error names it. Knows no connection.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.config.http import TlsConfig


def server_context(tls: TlsConfig) -> ssl.SSLContext | None:
    """Return a server's TLS context; None if it uses no TLS. Reads files.

    Raises:
        ConfigError: A file cannot be used.
    """
    if not tls.certfile:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _show(context, tls)
    if tls.ca_certs:
        _believe(context, tls.ca_certs)
    context.verify_mode = ssl.VerifyMode(tls.cert_reqs)
    return context


def client_context(tls: TlsConfig) -> ssl.SSLContext | bool:
    """Return the TLS context for requests to other servers; True is aiohttp's own. Reads files.

    Raises:
        ConfigError: A file cannot be used.
    """
    if not (tls.certfile or tls.ca_certs):
        return True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if tls.ca_certs:
        _believe(context, tls.ca_certs)
    else:
        context.load_default_certs()
    if tls.certfile:
        _show(context, tls)
    return context


def _show(context: ssl.SSLContext, tls: TlsConfig) -> None:
    """Make `context` present the certificate."""
    key_flag = "ssl-keyfile" if tls.keyfile else "ssl-certfile"
    keyfile = tls.keyfile or tls.certfile
    _require("ssl-certfile", tls.certfile, b"CERTIFICATE-----", "certificate")
    _require(key_flag, keyfile, b"PRIVATE KEY-----", "private key")

    def ask() -> str:
        raise _refused(key_flag, keyfile, "is encrypted: give a key without a passphrase")

    try:
        context.load_cert_chain(tls.certfile, keyfile, password=ask)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            why = f"does not match the certificate in --ssl-certfile {tls.certfile}"
            raise _refused(key_flag, keyfile, why) from None
        why = f"cannot be used with the key in {keyfile}: {error.reason or error}"
        raise _refused("ssl-certfile", tls.certfile, why) from None


def _believe(context: ssl.SSLContext, ca_certs: str) -> None:
    """Make `context` trust these CAs and no others."""
    _require("ssl-ca-certs", ca_certs, b"CERTIFICATE-----", "certificate")
    try:
        context.load_verify_locations(ca_certs)
    except ssl.SSLError as error:
        why = f"cannot be used: {error.reason or error}"
        raise _refused("ssl-ca-certs", ca_certs, why) from None


def _require(flag: str, name: str, mark: bytes, what: str) -> None:
    """Check that a file can be read and contains `mark`."""
    try:
        content = Path(name).read_bytes()
    except OSError as error:
        raise _refused(flag, name, f"cannot be read: {error.strerror}") from None
    if mark not in content:
        raise _refused(flag, name, f"contains no {what} in PEM format")


def _refused(flag: str, name: str, why: str) -> ConfigError:
    return ConfigError(f"--{flag} {name} {why}", param=flag)
