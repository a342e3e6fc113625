"""HTTPS: between clients, proxy and engines, with a private CA; and files that cannot be used."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from pdserve.commands.demo import wait_ready
from pdserve.config.http import ProxyConfig, TlsConfig
from pdserve.errors import ConfigError
from pdserve.http.tls import client_context, server_context
from pdserve.proxy.app import Proxy
from tests.cli.process import pdserve_here
from tests.http.certificates import Authority
from tests.server.conftest import events, make_engine, until
from tests.server.test_lifecycle import Running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def of_the_deployment(authority: Authority) -> TlsConfig:
    return TlsConfig(**authority.issue("deployment"), ca_certs=authority.ca_certs)


@contextlib.asynccontextmanager
async def deployment(
    tls: TlsConfig, text: Any, model_dir: Path
) -> AsyncIterator[tuple[Proxy, str]]:
    """A proxy and an engine that registers with it, both with this TLS."""
    proxy = Proxy(ProxyConfig(port=0, tls=tls, shutdown_timeout_s=1.0))
    url = await proxy.start()
    engine = Running(model_dir, make_engine(text), proxy_urls=(url,), tls=tls)
    try:
        await engine.until_ready()
        await until(lambda: bool(proxy.backends.available))
        yield proxy, url
    finally:
        await proxy.stop()
        if not engine.task.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await engine.task


async def test_whoever_waits_for_a_server_is_told_of_a_certificate_that_is_not_believed(
    of_the_deployment,
):
    proxy = Proxy(ProxyConfig(port=0, tls=of_the_deployment, shutdown_timeout_s=1.0))
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(30):
            with pytest.raises(ConfigError, match=r"not believed .*: it .* --ssl-ca-certs the CA"):
                await wait_ready(session, await proxy.start())
    finally:
        await proxy.stop()


async def test_a_proxy_and_its_engine_and_their_client_speak_https(
    of_the_deployment, text, model_dir
):
    async with deployment(of_the_deployment, text, model_dir) as (proxy, url):
        [engine] = proxy.backends
        assert engine.url.startswith("https://127.0.0.1:")
        believes = client_context(TlsConfig(ca_certs=of_the_deployment.ca_certs))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=believes)) as client:
            body = {"prompt": "The", "max_tokens": 8, "seed": 1}
            async with client.post(f"{url}/v1/completions", json=body) as response:
                whole = (await response.json())["choices"][0]["text"]
            body["stream"] = True
            async with client.post(f"{url}/v1/completions", json=body) as response:
                chunks = events(await response.read())
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
        async with aiohttp.ClientSession() as stranger:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await stranger.get(f"{url}/livez")


async def test_where_clients_need_a_certificate_engines_and_proxies_show_theirs(
    authority, text, model_dir
):
    tls = TlsConfig(**authority.issue("part"), ca_certs=authority.ca_certs, cert_reqs=2)
    async with deployment(tls, text, model_dir) as (_, url):
        for shown, is_welcome in (({}, False), (authority.issue("client"), True)):
            context = client_context(TlsConfig(ca_certs=authority.ca_certs, **shown))
            connector = aiohttp.TCPConnector(ssl=context)
            async with aiohttp.ClientSession(connector=connector) as client:
                if is_welcome:
                    async with client.get(f"{url}/readyz") as response:
                        assert response.status == 200
                else:
                    with pytest.raises((aiohttp.ClientError, ssl.SSLError, ConnectionError)):
                        await client.get(f"{url}/readyz")


async def test_an_engine_says_that_it_does_not_believe_its_proxy(
    authority, of_the_deployment, text, model_dir, tmp_path, caplog
):
    proxy = Proxy(ProxyConfig(port=0, tls=of_the_deployment, shutdown_timeout_s=1.0))
    url = await proxy.start()
    other = TlsConfig(ca_certs=Authority(tmp_path, "other").ca_certs)
    engine = Running(model_dir, make_engine(text), proxy_urls=(url,), tls=other)
    await until(lambda: "registration failed" in caplog.text)
    assert "certificate verify failed" in caplog.text
    assert "--ssl-ca-certs" in caplog.text
    os.kill(os.getpid(), signal.SIGTERM)
    await engine.task
    await proxy.stop()


def refusal(**files: Any) -> str:
    """What is said of files that cannot be used."""
    with pytest.raises(ConfigError) as refused:
        server_context(TlsConfig(**files))
    return refused.value.message


def test_a_file_that_cannot_be_used_is_named_with_its_flag(authority, tmp_path):
    good, other = authority.issue("good"), authority.issue("other")
    locked = authority.issue("locked", passphrase="secret")
    text = tmp_path / "text"
    text.write_text("no PEM")
    broken = tmp_path / "broken"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    for files, told in (
        ({**good, "certfile": "/nowhere"}, "--ssl-certfile /nowhere cannot be read: No such file"),
        ({**good, "keyfile": str(tmp_path)}, f"--ssl-keyfile {tmp_path} cannot be read: Is a dir"),
        ({**good, "certfile": str(text)}, f"--ssl-certfile {text} contains no certificate"),
        ({**good, "keyfile": good["certfile"]}, f"{good['certfile']} contains no private key"),
        ({"certfile": good["certfile"]}, f"{good['certfile']} contains no private key"),
        ({**good, "keyfile": other["keyfile"]}, f"{other['keyfile']} does not match the cert"),
        (locked, f"--ssl-keyfile {locked['keyfile']} is encrypted"),
        ({**good, "certfile": str(broken)}, f"--ssl-certfile {broken} cannot be used"),
        ({**good, "ca_certs": "/nowhere"}, "--ssl-ca-certs /nowhere cannot be read"),
        ({**good, "ca_certs": str(broken)}, f"--ssl-ca-certs {broken} cannot be used"),
    ):
        assert told in refusal(**files)


def test_a_key_may_stand_behind_its_certificate(authority, tmp_path):
    files = authority.issue("good")
    both = tmp_path / "both.pem"
    both.write_bytes(b"".join((tmp_path / f"good.{n}").read_bytes() for n in files))
    assert server_context(TlsConfig(certfile=str(both))) is not None


@pytest.mark.slow
@pytest.mark.parametrize("command", [("proxy",), ("serve", "boxed")])
def test_a_server_ends_before_it_starts_anything(command):
    done = pdserve_here(*command, "--port", "0", "--ssl-certfile", "/nowhere")
    assert done.returncode == 3
    assert "--ssl-certfile /nowhere cannot be read" in done.stderr


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"keyfile": "k"}, "--ssl-keyfile is 'k': it needs"),
        ({"certfile": "c", "cert_reqs": 3}, "--ssl-cert-reqs is 3: use 0"),
        ({"certfile": "c", "cert_reqs": 2}, "--ssl-cert-reqs is 2: .*--ssl-ca-certs"),
    ],
)
def test_settings_that_do_not_go_together_say_what_is_missing(settings, told):
    with pytest.raises(ConfigError, match=told):
        TlsConfig(**settings)
