"""Settings of `pdserve up` itself, beside those of its children: a frozen struct and its flags."""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.config.checks import (
    POSITIVE,
    require,
    require_positive,
    require_text,
)
from pdserve.config.setting import declare
from pdserve.config.tiers import KV_PORT, parse_tiers, require_chunk_size

ROLES_OF_UP: Final = {
    "prefill": "prefill engines",
    "decode": "decode engines",
    "both": "engines for both",
    "proxy": "the proxy",
}
"""What `pdserve up` runs, in words, by the prefix of the settings that are for it alone."""

_MAX_REPLICAS: Final = 1000
"""Of each role: one host runs no more, and each has its port."""


class UpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A whole deployment on this host.

    Attributes:
        host: Address on which all its servers listen.
        port: Port of the proxy.
        prefill_port, decode_port, both_port: Port of the first engine of the role; the others count
            up.
        prefill_replicas, decode_replicas, both_replicas: Engines of the role; none of one of the
            first two only where there are some for both.
        kv_tiers: Tiers of the engines' KV store, for `parse_tiers`; empty starts no store.
        kv_port, kv_http_port, kv_chunk_size: The store's.
        once: Whether to exit after the demo request.
        prompt: Prompt of the demo request.
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
        prefill, decode = self.prefill_replicas, self.decode_replicas
        for flag, count in (
            ("both-replicas", self.both_replicas),
            ("prefill-replicas", prefill),
            ("decode-replicas", decode),
        ):
            require(0 <= count <= _MAX_REPLICAS, flag, count, f"use 0 to {_MAX_REPLICAS}")
        for flag, count in (("prefill-replicas", prefill), ("decode-replicas", decode)):
            has_one = count + self.both_replicas > 0
            require(has_one, flag, count, f"{POSITIVE}, or --both-replicas must be")
        require_text("prompt", self.prompt)
        require_positive("max-tokens", self.max_tokens)
        require_positive("start-timeout", self.start_timeout_s)


# fmt: off
UP_SETTINGS: Final = declare(
    "up",
    UpConfig,
    "deployment",
    (
        ("host", "host", "ADDRESS", "address on which all servers listen"),
        ("port", "port", "PORT", "port of the proxy"),
        ("prefill-port", "prefill_port", "PORT", "port of the first prefill engine; the others count up"),
        ("decode-port", "decode_port", "PORT", "port of the first decode engine; the others count up"),
        ("prefill-replicas", "prefill_replicas", "N", "prefill engines to start"),
        ("decode-replicas", "decode_replicas", "N", "decode engines to start"),
        ("both-port", "both_port", "PORT", "port of the first engine for both; the others count up"),
        ("both-replicas", "both_replicas", "N", "engines for both roles to start; --proxy.split-policy predicted gives them home roles"),
        ("kv-tiers", "kv_tiers", "TIERS", "keep KV beyond requests and restarts: cpu:SIZE[,disk:FOLDER:SIZE][,redis:redis://HOST:PORT]"),
        ("kv-port", "kv_port", "PORT", "port of the KV server"),
        ("kv-http-port", "kv_http_port", "PORT", "HTTP port of the KV server"),
        ("kv-chunk-size", "kv_chunk_size", "N", "tokens per chunk in the KV server"),
        ("start-timeout", "start_timeout_s", "SECONDS", "time limit for all processes to become ready"),
    ),
) + declare(
    "up",
    UpConfig,
    "demo request",
    (
        ("prompt", "prompt", "TEXT", "prompt of the demo request"),
        ("max-tokens", "max_tokens", "N", "maximum output tokens of the demo request"),
        ("once", "once", "", "exit after the demo request, with code 0"),
    ),
)
# fmt: on
