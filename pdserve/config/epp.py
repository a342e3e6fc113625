"""Settings of the endpoint picker, through which gateways ask the proxy for engines."""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.config.checks import require, require_port


class EppConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where gateways ask which engines should serve a request (Envoy's external processing).

    Attributes:
        port: Port on the proxy's host; 0 picks a free one, None serves no gateways.
        certfile, keyfile: Its TLS certificate and key, PEM; without them there is no TLS. They are
            not the proxy's own, because gateways trust certificates that engines do not.
    """

    port: int | None = None
    certfile: str = ""
    keyfile: str = ""

    def __post_init__(self) -> None:
        if self.port is not None:
            require_port(self.port, "epp-port")
        for flag, name in (("epp-ssl-certfile", self.certfile), ("epp-ssl-keyfile", self.keyfile)):
            is_whole = not name or (self.certfile and self.keyfile and self.port is not None)
            require(
                bool(is_whole),
                flag,
                name,
                "TLS needs --epp-port, --epp-ssl-certfile and --epp-ssl-keyfile together",
            )


EPP_FLAGS: Final = (
    (
        "epp-port",
        "epp.port",
        "PORT",
        "port for gateways that relay the requests themselves (ext_proc); needs pdserve[epp]",
    ),
    ("epp-ssl-certfile", "epp.certfile", "FILE", "certificate for the gateways"),
    ("epp-ssl-keyfile", "epp.keyfile", "FILE", "its key"),
)
"""Rows for `declare`."""
