from __future__ import annotations

import math
import re

import pytest
import zmq

from pdserve.config.tiers import DiskTier, KvServerConfig, RedisTier, Tiers, parse_tiers
from pdserve.config.up import UpConfig
from pdserve.connectors.lmcache.settings import LMCacheSettings
from pdserve.errors import ConfigError


def test_all_tiers_are_read() -> None:
    assert parse_tiers("cpu:4GiB, disk:/data/kv:50G,redis:redis://cache:6380") == Tiers(
        cpu_bytes=4 << 30, disk=DiskTier("/data/kv", 50 << 30), redis=RedisTier("cache", 6380)
    )


def test_a_redis_server_has_its_usual_port() -> None:
    assert parse_tiers("redis:redis://cache,cpu:64M").redis == RedisTier("cache", 6379)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' is not a tier: use cpu, disk, redis; write it as cpu:4GiB,"),
        ("gpu:4GiB", "'gpu:4GiB' is not a tier"),
        ("cpu:4GiB,cpu:1GiB", "has two tiers 'cpu': give only one of each kind"),
        ("disk:/data:1GiB", "has no cpu tier, from which the other tiers are filled: add cpu:4GiB"),
        ("cpu:lots", "'cpu:lots' has no size: end it with a size such as 4GiB or 500M"),
        ("cpu", "'cpu' has no size"),
        ("cpu:-1", "the size -1: it must be positive"),
        ("cpu:1M", "is too small to hold a few chunks: use at least 64MiB"),
        ("cpu:4GiB,disk:data:1GiB", "does not name a folder with an absolute path"),
        ("cpu:4GiB,disk:/data", "does not name a folder with an absolute path"),
        ("cpu:4GiB,disk:/data:big", "'disk:/data:big' has no size"),
        (
            "cpu:4GiB,redis:cache:6379",
            "does not name a server: write only its address, as redis:redis://127.0.0.1:6379",
        ),
        ("cpu:4GiB,redis:redis://cache:70000", "'redis:redis://cache:70000': Port out of range"),
        ("cpu:4GiB,redis:redis://cache/2", "does not name a server"),
        ("cpu:4GiB,redis:redis://me:open@cache", "set LMCACHE_RESP_USERNAME and"),
    ],
)
def test_what_is_no_tier_is_refused_with_what_to_write(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_tiers(text)
    assert refused.value.param == "kv-tiers"
    assert str(refused.value).startswith("--kv-tiers: ")
    assert says in str(refused.value)
    assert "open" not in str(refused.value), "a password is not repeated"


def test_engines_look_for_the_store_where_it_listens_if_neither_is_told() -> None:
    port = KvServerConfig().port
    assert UpConfig().kv_port == port
    assert LMCacheSettings().server_url == f"tcp://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("name", "url"),
    [
        *(("url", f"tcp://{each}") for each in ("", "host", "host:", "host:x", "host:1/", "*:1")),
        *(("url", each) for each in ("127.0.0.1:83", "http://host:1", "ipc://", "tcp://a b:1")),
        *(("url", f"ipc:///{'x' * 107}"), ("http_url", "127.0.0.1:83"), ("url", "TCP://host:1")),
        *(("url", f"ipc:///{'é' * 54}"), ("url", "tcp://[::1]:8300"), ("url", "tcp://[::1%lo]:83")),
        *(("http_url", "http://"), ("http_url", "http://[::1"), ("http_url", "tcp://host:1")),
    ],
)
def test_what_is_no_address_of_a_store_is_refused(name: str, url: str) -> None:
    flag = f"--kv-transfer-config.lmcache.{name.replace('_', '-')}"
    with pytest.raises(ConfigError, match=f"{flag} is {re.escape(repr(url))}: write it as "):
        LMCacheSettings(**{name: url})


@pytest.mark.parametrize("url", ["tcp://kv-0.kv:8300", f"ipc:///{'x' * 106}", f"ipc:///{'é' * 53}"])
def test_addresses_of_stores_are_those_that_zeromq_takes(url: str) -> None:
    assert LMCacheSettings(url=url).server_url == url
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(url)


@pytest.mark.parametrize("number", [0.0, -1.0, math.nan, math.inf])
def test_a_stores_times_are_numbers_above_0(number: float) -> None:
    with pytest.raises(ConfigError, match=r"lmcache.timeout-s is .*: it must be a number above 0"):
        LMCacheSettings(timeout_s=number)


def test_settings_of_commands_are_checked_when_they_are_made() -> None:
    for make in (lambda: KvServerConfig(tiers="cpu:no"), lambda: UpConfig(kv_tiers="cpu:no")):
        with pytest.raises(ConfigError, match="has no size"):
            make()
    with pytest.raises(ConfigError, match="--chunk-size is 0"):
        KvServerConfig(chunk_size=0)
    for chunk_size in (-1, 1 << 40):
        with pytest.raises(ConfigError, match=f"--kv-chunk-size is {chunk_size}: use a multiple"):
            UpConfig(kv_chunk_size=chunk_size)
    with pytest.raises(ConfigError, match="--http-port is 8300: it is --port as well"):
        KvServerConfig(http_port=8300)
