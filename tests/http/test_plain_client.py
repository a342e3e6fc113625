"""Blocking requests to servers of a deployment."""

from __future__ import annotations

import http.server
import socketserver
import ssl
import threading
import urllib.error
from typing import TYPE_CHECKING

import pytest

from pdserve.http.plain_client import fetched, reason_and_remedy

if TYPE_CHECKING:
    from collections.abc import Iterator


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"here")

    def log_message(self, *_: object) -> None:
        pass


class Ssh(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        self.request.recv(4096)


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), request.param) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("url", [Page], indirect=True)
def test_a_server_is_asked_directly_whatever_the_environment_says(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert fetched(url, 5.0) == b"here"


@pytest.mark.parametrize("url", [Ssh], indirect=True)
def test_a_server_that_does_not_speak_http_is_one_that_cannot_be_reached(url: str) -> None:
    with pytest.raises(OSError, match=r"no HTTP server answers there: .*SSH-2\.0"):
        fetched(url, 5.0)


@pytest.mark.parametrize(("code", "says"), [(19, "SSL_CERT_FILE"), (62, "its certificate names")])
def test_a_certificate_that_is_not_trusted_has_its_own_remedy(code: int, says: str) -> None:
    refused = ssl.SSLCertVerificationError("certificate verify failed")
    refused.verify_code = code
    _, remedy = reason_and_remedy(urllib.error.URLError(refused), "give another URL")
    assert says in remedy
    assert reason_and_remedy(OSError("refused"), "give another URL") == (
        "refused",
        "give another URL",
    )
