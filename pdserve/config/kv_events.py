"""Settings of KV events: how an engine publishes them, and what `pdserve kv-events` reads."""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.config.checks import (
    is_loopback,
    require,
    require_not_negative,
    require_port,
    require_url,
)
from pdserve.config.setting import declare

_MAX_QUEUED: Final = 1_000_000_000
"""ZeroMQ's limits have 32 bits."""


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The keys are vLLM's, but for the last two.

    Events go to proxies of pdserve whenever they are enabled, and to readers of vLLM's events if
    there is an endpoint for them. Those are not encrypted, and have the tokens of all prompts.

    Attributes:
        enable_kv_cache_events: Whether anything is published at all.
        publisher: zmq, or null: nothing in vLLM's shape; None: zmq if there is an endpoint.
        endpoint: Where readers of vLLM's events subscribe; engine core i of several takes the
            i-th port behind it. It is bound if its host is a loopback one or stands for all
            (* or ::), else connected to, as vLLM does.
        replay_endpoint: Where they ask for what they have missed; None answers nobody.
        buffer_steps: Batches that are kept for that.
        hwm: Batches that wait for a slow reader, at most; what is more, it misses.
        max_queue_size: Steps whose events wait to be published, at most; what is more is lost.
        topic: The first frame of each batch.
        replay_topic: Whether replayed batches have that frame, too: vLLM's have since its #45177;
            Dynamo 1.6 and SGLang's readers read those without it alone.
        port: Of the stream for proxies of pdserve; its snapshots take the next one, and engine
            core i the i-th pair behind. 0 takes free ones. The host is the transfer's.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    replay_topic: bool = True
    port: int = 0

    def __post_init__(self) -> None:
        prefix = "kv-events-config"
        require(
            self.publisher in (None, "zmq", "null"),
            f"{prefix}.publisher",
            self.publisher,
            "use zmq, or null to publish nothing in vLLM's shape",
        )
        require(
            self.endpoint is not None or (self.publisher != "zmq" and not self.replay_endpoint),
            f"{prefix}.endpoint",
            self.endpoint,
            "give an address such as tcp://127.0.0.1:5557; there is no default, because everyone "
            "who can connect to it can read all prompts",
        )
        for key, endpoint in (
            ("endpoint", self.endpoint),
            ("replay-endpoint", self.replay_endpoint),
        ):
            require(
                endpoint is None or _is_endpoint(endpoint),
                f"{prefix}.{key}",
                endpoint,
                "write it as tcp://127.0.0.1:5557, tcp://*:5557 or ipc:///run/kv-events",
            )
        for key, number in (
            ("buffer-steps", self.buffer_steps),
            ("hwm", self.hwm),
            ("max-queue-size", self.max_queue_size),
        ):
            require(0 < number <= _MAX_QUEUED, f"{prefix}.{key}", number, f"use 1 to {_MAX_QUEUED}")
        require_port(self.port, f"{prefix}.port")

    def require_prefix_caching(self, *, is_on: bool) -> None:
        """Refuse to publish what is not kept."""
        require(
            is_on or not self.enable_kv_cache_events,
            "kv-events-config.enable-kv-cache-events",
            self.enable_kv_cache_events,
            "KV events report prefixes that can be reused: leave --enable-prefix-caching on",
        )

    def require_secret(self, secret: str, host: str) -> None:
        """Refuse to publish to everybody who reaches `host`."""
        require(
            bool(secret) or not self.enable_kv_cache_events or is_loopback(host),
            "kv-transfer-config.host",
            host,
            "it serves KV events, and there is no secret: give every engine and proxy the same "
            "one as PDSERVE_SECRET, or use a loopback host",
        )


def _is_endpoint(endpoint: str) -> bool:
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc":
        return bool(address)
    host, _, port = address.rpartition(":")
    return scheme == "tcp" and bool(host) and port.isdecimal() and 0 < int(port) < 1 << 16


class KVEventsReaderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which engine's events to read, and for how long.

    Attributes:
        url: Base URL of an engine.
        seconds: Time to listen; 0 listens until Ctrl-C.
        secret: The deployment's shared secret.
    """

    url: str = "http://127.0.0.1:8100"
    seconds: float = 0.0
    secret: str = ""

    def __post_init__(self) -> None:
        require_url(self.url, "url")
        require_not_negative("seconds", self.seconds)


# fmt: off
KV_EVENTS_READER_SETTINGS: Final = declare(
    "reader",
    KVEventsReaderConfig,
    "KV events",
    (
        ("url", "url", "URL", "base URL of the engine"),
        ("seconds", "seconds", "N", "time to listen; 0 listens until Ctrl-C"),
        ("secret", "secret", "TEXT", "the deployment's shared secret (prefer PDSERVE_SECRET)"),
    ),
)
# fmt: on
