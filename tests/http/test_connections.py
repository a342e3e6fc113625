"""Slow, oversized and malformed requests, at a proxy and at an engine's server alike."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import resource
import socket
from urllib.parse import urlsplit

import pytest

from pdserve.config.http import ProxyConfig
from pdserve.proxy.app import Proxy
from tests.cli.process import free_ports
from tests.http.conftest import connected

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
TCP_CLOSE = 7
"""Of the kernel's `tcp_states.h`: the other side has reset the connection."""
GOOD = b'{"prompt": "The", "max_tokens": 1}'


@pytest.mark.parametrize(("host", "is_given"), [("::", True), ("::", False), ("", False)])
async def test_the_wildcard_of_ipv6_is_for_both_families_at_one_port(host, is_given):
    port = free_ports(1)[0] if is_given else 0
    proxy = Proxy(ProxyConfig(host=host, port=port, shutdown_timeout_s=1.0))
    try:
        url = await proxy.start()
        for address in ("127.0.0.1", "::1"):
            _, writer = await asyncio.open_connection(address, urlsplit(url).port)
            writer.close()
    finally:
        await proxy.stop()


@pytest.mark.slow
async def test_headers_that_never_end_are_given_up_with_a_408(serve):
    async with connected(await serve(header_timeout_s=0.2)) as wire:
        wire.send(HEAD)
        status, error = await wire.refusal()
        assert (status, error["code"]) == (408, "request_timeout")
        assert await wire.is_closed()


@pytest.mark.slow
async def test_headers_that_drip_are_given_up_as_well(serve):
    async with connected(await serve(header_timeout_s=0.3)) as wire:

        async def drip() -> None:
            for byte in HEAD * 100:
                wire.send(bytes([byte]))
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        status, _ = await wire.refusal()
        assert status == 408
        dripping.cancel()


async def test_a_connection_that_says_nothing_is_closed(serve):
    async with connected(await serve(header_timeout_s=0.1)) as wire:
        assert await wire.is_closed()


@pytest.mark.slow
async def test_headers_of_a_second_request_have_the_same_deadline(serve):
    async with connected(await serve(header_timeout_s=0.2)) as wire:
        wire.send(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await wire.answer())[0] == 200
        wire.send(HEAD)
        assert (await wire.refusal())[0] == 408
        assert await wire.is_closed()


@pytest.mark.slow
async def test_a_connection_between_two_requests_stays_open(serve):
    async with connected(await serve(header_timeout_s=0.1)) as wire:
        for _ in range(2):
            wire.send(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await wire.answer())[0] == 200
            await asyncio.sleep(0.3)  # what must not happen would have happened by then


@pytest.mark.slow
@pytest.mark.parametrize("path", [b"/v1/completions", b"/tokenize"])
async def test_a_body_without_progress_is_given_up_with_a_408(serve, path):
    async with connected(await serve(body_timeout_s=0.2)) as wire:
        wire.send(HEAD.replace(b"/v1/completions", path) + b"Content-Length: 100\r\n\r\n{")
        status, error = await wire.refusal()
        assert (status, error["code"]) == (408, "request_timeout")


@pytest.mark.slow
async def test_a_body_that_drips_is_given_up_and_one_that_gets_on_is_not(serve):
    url = await serve(body_timeout_s=0.4)  # 200 bytes are due in that time
    padded = b'{"max_tokens": 1,' + b" " * 1000 + GOOD[1:]

    async def send(num_bytes: int) -> int:
        async with connected(url) as wire:
            wire.send(HEAD + f"Content-Length: {len(padded)}\r\n\r\n".encode())
            answered = asyncio.create_task(wire.answer())
            for begin in range(0, len(padded), num_bytes):
                wire.send(padded[begin : begin + num_bytes])
                await asyncio.sleep(0.1)
                if answered.done():
                    break
            return (await answered)[0]

    assert await asyncio.gather(send(1), send(200)) == [408, 200]


@pytest.mark.slow
async def test_a_client_that_reads_nothing_more_of_its_answers_is_hung_up_on(serve):
    host, port = (await serve(send_timeout_s=0.5)).removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await loop.sock_connect(sock, (host, int(port)))
        asking = loop.sock_sendall(sock, b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 10_000)
        async with asyncio.timeout(30.0):
            with contextlib.suppress(ConnectionError):
                await asking
            while sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != TCP_CLOSE:
                await asyncio.sleep(0.05)


async def test_who_may_read_without_a_limit_still_has_one_for_headers(serve):
    async with connected(await serve(send_timeout_s=math.inf, header_timeout_s=0.1)) as wire:
        assert await wire.is_closed()


async def test_a_length_over_the_limit_is_refused_before_the_body_comes(serve):
    async with connected(await serve(max_body_bytes=1000)) as wire:
        wire.send(HEAD + b"Content-Length: 1001\r\n\r\n")
        status, error = await wire.refusal()
        assert (status, error["code"]) == (413, "request_too_large")
        assert "1000" in error["message"]


async def test_a_body_in_chunks_ends_at_the_limit(serve):
    async with connected(await serve(max_body_bytes=1000)) as wire:
        wire.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001)
        assert (await wire.refusal())[0] == 413


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"garbage\r\n\r\n",
        b"POST /v1/completions HTTP/9.9\r\n\r\n",
        HEAD.replace(b"application/json", b"application/\0json") + b"Content-Length: 2\r\n\r\n{}",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZZ\r\n{}\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n-5\r\n",
        HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
async def test_what_is_no_http_is_a_400_in_openais_shape(serve, request_bytes, caplog):
    async with connected(await serve()) as wire:
        wire.send(request_bytes)
        status, error = await wire.refusal()
        assert (status, error["type"]) == (400, "invalid_request_error")
        wire.writer.write_eof()
        assert await wire.is_closed()
    assert "Traceback" not in caplog.text  # or whoever likes could fill the log


async def test_an_encoding_that_cannot_be_read_is_no_matter_of_what_the_client_installs(serve):
    async with connected(await serve()) as wire:
        wire.send(HEAD + b"Content-Encoding: zstd\r\nContent-Length: 2\r\n\r\n{}")
        status, error = await wire.refusal()
        assert (status, error["code"]) == (415, "unsupported_media_type")
        assert "Content-Encoding" in error["message"]
        assert "install" not in error["message"]


@pytest.mark.parametrize("encoding", [b"compress", b"gzip, gzip"])
async def test_a_body_in_an_unknown_encoding_is_a_415_that_says_what_is_read(serve, encoding):
    async with connected(await serve()) as wire:
        length = f"Content-Length: {len(GOOD)}\r\n\r\n".encode()
        wire.send(HEAD + b"Content-Encoding: " + encoding + b"\r\n" + length + GOOD)
        status, error = await wire.refusal()
        assert (status, error["param"]) == (415, "Content-Encoding")
        assert f"{encoding.decode()!r}: use gzip or deflate" in error["message"]


async def test_headers_that_are_too_large_are_a_431_that_says_how_large_they_may_be(serve):
    async with connected(await serve()) as wire:
        wire.send(HEAD + b"X: " + b"y" * 10000 + b"\r\n\r\n")
        status, error = await wire.refusal()
        assert (status, error["code"]) == (431, "headers_too_large")
        assert "8190 bytes" in error["message"]


async def test_more_headers_than_are_read_are_a_431(serve):
    async with connected(await serve()) as wire:
        wire.send(HEAD + b"X: y\r\n" * 5000 + b"\r\n")
        status, error = await wire.refusal()
        assert (status, error["code"]) == (431, "headers_too_large")
        assert "too many headers" in error["message"]


@pytest.mark.parametrize("path", [b"/v1/completions", b"/nowhere"])
@pytest.mark.parametrize(("expected", "shown"), [(b"miracles", "miracles"), (b"\xff", r"\udcff")])
async def test_an_unknown_expectation_is_a_417_in_openais_shape(
    serve, path, expected, shown, caplog
):
    async with connected(await serve()) as wire:
        head = HEAD.replace(b"/v1/completions", path)
        wire.send(head + b"Expect: " + expected + b"\r\nContent-Length: 2\r\n\r\n{}")
        status, error = await wire.refusal()
        assert (status, error["code"]) == (417, "expectation_failed")
        assert shown in error["message"]
    assert "Traceback" not in caplog.text


async def test_a_client_that_expects_to_be_told_to_go_on_is(serve):
    async with connected(await serve()) as wire:
        wire.send(HEAD + f"Expect: 100-continue\r\nContent-Length: {len(GOOD)}\r\n\r\n".encode())
        assert (await wire.answer())[0] == 100
        wire.send(GOOD)
        assert (await wire.answer())[0] == 200


async def test_a_stream_to_a_client_of_http_1_0_ends_with_its_connection(serve):
    """It knows no chunks, so nothing else says where the answer ends."""
    body = b'{"prompt": "The", "max_tokens": 2, "stream": true}'
    async with connected(await serve()) as wire:
        head = HEAD.replace(b"1.1", b"1.0") + b"Connection: keep-alive\r\n"
        wire.send(head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await asyncio.wait_for(wire.reader.read(), 10.0)
        assert answer.startswith(b"HTTP/1.0 200")
        assert answer.endswith(b"data: [DONE]\n\n")


async def test_without_a_free_descriptor_clients_are_hung_up_on_and_the_log_stays_short(
    serve, caplog, monkeypatch
):
    monkeypatch.setattr(asyncio.constants, "ACCEPT_RETRY_DELAY", 0.02)
    url = await serve()
    host, port = url.removeprefix("http://").split(":")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting, taken = [], []
    try:
        for _ in range(20):  # the kernel connects them; nobody has accepted them
            client = socket.create_connection((host, int(port)))
            client.setblocking(False)
            waiting.append(client)
        resource.setrlimit(resource.RLIMIT_NOFILE, (waiting[-1].fileno() + 10, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(10.0):
            ends = [await loop.sock_recv(client, 1) for client in waiting]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)
        for client in waiting:
            client.close()
    assert ends == [b""] * 20
    assert len(caplog.text.splitlines()) == 1, caplog.text
    assert "connections refused num=20" in caplog.text
    async with asyncio.timeout(10.0), connected(url) as wire:
        wire.send(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await wire.answer())[0] == 200


@pytest.mark.slow
async def test_a_body_that_nobody_reads_begins_no_headers(serve):
    async with connected(await serve(header_timeout_s=0.2)) as wire:
        wire.send(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n")
        assert (await wire.answer())[0] == 404
        wire.send(b"0123456789")
        await asyncio.sleep(0.6)  # what must not happen would have happened by then
        wire.send(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await wire.answer())[0] == 200
