"""Settings of the endpoint picker, through which gateways ask the proxy for engines."""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.config.checks import require, require_port


class EppConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where gateways ask which engines a request is to go to (Envoy's external processing).

    Attributes:
        port: On the proxy's own host; 0 takes a free one, None answers no gateways.
        certfile, keyfile: What TLS shows there, PEM; without a certificate there is none. They are
            not the proxy's own, since gateways believe certificates that engines do not.
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
                "TLS takes --epp-port, --epp-ssl-certfile and --epp-ssl-keyfile together",
            )


EPP_FLAGS: Final = (
    (
        "epp-port",
        "epp.port",
        "PORT",
        "where gateways ask that carry the requests themselves (ext_proc); needs pdserve[epp]",
    ),
    ("epp-ssl-certfile", "epp.certfile", "FILE", "certificate to show them"),
    ("epp-ssl-keyfile", "epp.keyfile", "FILE", "its key"),
)
"""Rows for `declare`."""
