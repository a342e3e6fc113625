"""Blocking requests of commands and threads to servers of a deployment.

They never go through `HTTP_PROXY`, which is for other servers.
"""

from __future__ import annotations

import http.client
import os
import ssl
import urllib.request

_HOST_IS_ANOTHER = (62, 64)
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""


def fetched(request: urllib.request.Request | str, timeout_s: float) -> bytes:
    """Return the body of an answer.

    Raises:
        OSError: There is none, or it is not HTTP; a `urllib.error.HTTPError` if the server refused.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as response:
            body: bytes = response.read()
    except http.client.HTTPException as error:
        raise OSError(f"no HTTP server answers there: {error!r}") from error
    return body


def reason_and_remedy(error: Exception, remedy: str) -> tuple[str, str]:
    """Return why there was no answer, and what to do about it.

    Args:
        remedy: What to do unless the server's certificate is the reason.
    """
    reason = getattr(error, "reason", error)
    if isinstance(reason, ssl.SSLCertVerificationError):
        remedy = (
            "use a host that its certificate names"
            if reason.verify_code in _HOST_IS_ANOTHER
            else "set SSL_CERT_FILE to the file of the CA that signed its certificate"
        )
    return reason_of(error), remedy


def reason_of(error: BaseException) -> str:
    """Say why there was no answer; not where, as aiohttp does, which names TLS in any case."""
    cause = getattr(error, "os_error", getattr(error, "reason", error))
    if isinstance(cause, ssl.SSLError) or not isinstance(cause, OSError) or not cause.errno:
        return str(cause)
    return os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)
