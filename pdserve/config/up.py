"""Settings of `pdserve up` itself, beside those of its children: a frozen struct and its flags."""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.config.checks import POSITIVE, require, require_not_negative
from pdserve.config.setting import declare
from pdserve.config.tiers import KV_PORT, parse_tiers, require_chunk_size

ROLES_OF_UP: Final = {
    "prefill": "prefill engines",
    "decode": "decode engines",
    "both": "engines for both",
    "proxy": "the proxy",
}
"""What `pdserve up` runs, in words, by the prefix of the settings that are for it alone."""


class UpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A whole deployment on this host.

    Attributes:
        host: Address all its servers bind.
        port: The proxy's.
        prefill_port, decode_port, both_port: Of the first engine of the role; further ones count
            up.
        prefill_replicas, decode_replicas, both_replicas: Engines of the role; none of one of the
            first two only where there are some for both.
        kv_tiers: Of the store that the engines share, as `parse_tiers` reads it; empty starts none.
        kv_port, kv_http_port, kv_chunk_size: The store's.
        once: End after the demo request.
        prompt: What the demo request asks.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    prefill_port: int = 8100
    decode_port: int = 8200
    both_port: int = 8400
    prefill_replicas: int = 1
    decode_replicas: int = 1
    both_replicas: int = 0
    kv_tiers: str = ""
    kv_port: int = KV_PORT
    kv_http_port: int = 8301
    kv_chunk_size: int = 256
    once: bool = False
    prompt: str = "What is disaggregated serving?"
    max_tokens: int = 128
    start_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.kv_tiers:
            parse_tiers(self.kv_tiers)
        require_chunk_size("kv-chunk-size", self.kv_chunk_size)
        require_not_negative("both-replicas", self.both_replicas)
        for flag, count in (
            ("prefill-replicas", self.prefill_replicas),
            ("decode-replicas", self.decode_replicas),
        ):
            require_not_negative(flag, count)
            has_one = count + self.both_replicas > 0
            require(has_one, flag, count, f"{POSITIVE}, or --both-replicas must be")
        require(self.max_tokens > 0, "max-tokens", self.max_tokens, POSITIVE)
        require(self.start_timeout_s > 0, "start-timeout", self.start_timeout_s, POSITIVE)


UP_SETTINGS: Final = declare(
    "up",
    UpConfig,
    "deployment",
    (
        ("host", "host", "ADDRESS", "address all servers bind"),
        ("port", "port", "PORT", "of the proxy"),
        (
            "prefill-port",
            "prefill_port",
            "PORT",
            "of the first prefill engine; further ones count up",
        ),
        ("decode-port", "decode_port", "PORT", "of the first decode engine; further ones count up"),
        ("prefill-replicas", "prefill_replicas", "N", "prefill engines to start"),
        ("decode-replicas", "decode_replicas", "N", "decode engines to start"),
        ("both-port", "both_port", "PORT", "of the first engine for both; further ones count up"),
        (
            "both-replicas",
            "both_replicas",
            "N",
            "engines for both to start; the proxy's --split-policy predicted gives them home roles",
        ),
        (
            "kv-tiers",
            "kv_tiers",
            "TIERS",
            "keep KV beyond requests and restarts: cpu:SIZE[,disk:FOLDER:SIZE][,redis:redis://HOST:PORT]",
        ),
        ("kv-port", "kv_port", "PORT", "of the server that keeps it"),
        ("kv-http-port", "kv_http_port", "PORT", "of its HTTP side"),
        ("kv-chunk-size", "kv_chunk_size", "N", "tokens that are kept as one"),
        ("start-timeout", "start_timeout_s", "SECONDS", "for all of them to be ready"),
    ),
) + declare(
    "up",
    UpConfig,
    "demo request",
    (
        ("prompt", "prompt", "TEXT", "what it asks"),
        ("max-tokens", "max_tokens", "N", "how much it answers"),
        ("once", "once", "", "end after it, with exit code 0"),
    ),
)
