"""What stands at a store's HTTP URL may be anything: engines start, and go on, all the same."""

from __future__ import annotations

import socketserver
import threading
from typing import TYPE_CHECKING, ClassVar

import pytest

from pdserve.connectors.lmcache.http_side import StoreHttpSide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KNOWN = b'{"non_cuda_context_meta": {"7": {"model_name": "a", "world_size": 1}}, "more": [1]}'


class Answers(socketserver.StreamRequestHandler):
    """Says the same to everybody, once it has heard a request."""

    said: ClassVar[bytes] = b""

    def handle(self) -> None:
        self.request.recv(4096)
        self.wfile.write(self.said)


@pytest.fixture
def says() -> Iterator[Callable[[bytes], StoreHttpSide]]:
    """What is asked of a server that answers with these bytes."""
    with socketserver.TCPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()

        def serve(said: bytes) -> StoreHttpSide:
            Answers.said = said
            return StoreHttpSide(f"http://127.0.0.1:{server.server_address[1]}/", 5.0)

        yield serve
        server.shutdown()
        thread.join()


def answer(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.0 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


def test_engines_of_a_server_are_known_by_the_names_of_their_models(
    says: Callable[[bytes], StoreHttpSide],
) -> None:
    assert says(answer(KNOWN)).models() == {"a"}


@pytest.mark.parametrize(
    "said",
    [
        answer(b'["what"]'),
        answer(b'{"non_cuda_context_meta": null}'),
        answer(b"<html>"),
        answer(b'{"non_cuda_context_meta": {"a": {"model_name": "\xff"}}}'),
        answer(b'{"x": ' + b"[" * 100_000),
        answer(KNOWN, "503 Service Unavailable"),
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f",  # ZMQ's greeting
        b"",
    ],
)
def test_what_is_no_lmcache_server_knows_nobody_and_drops_nothing(
    says: Callable[[bytes], StoreHttpSide], said: bytes
) -> None:
    assert says(said).models() == set()
    says(said).drop([{"chunk_hash_hex": "00"}])


def test_a_server_without_an_http_side_is_not_asked() -> None:
    assert StoreHttpSide("", 5.0).models() == set()
