"""Every setting of the HTTP servers: those of engines, and the proxy."""

from __future__ import annotations

import enum

import msgspec

from pdserve.config.checks import (
    leads_to,
    require,
    require_keys,
    require_not_negative,
    require_one_of,
    require_port,
    require_positive,
    require_url,
)
from pdserve.config.objectives import MIN_SLO_MS, objectives_by_model


class KVTransfer(enum.Enum):
    """How KV gets from a prefill to a decode engine.

    AUTO: written by the prefill engine where both engines can and the pair's recent pushes
    arrived, else read by the decode engine. PUSH: the same whatever became of former pushes. PULL:
    always read.
    """

    AUTO = "auto"
    PUSH = "push"
    PULL = "pull"


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a client may take of an HTTP server: bytes and time.

    Attributes:
        max_body_bytes: Of one request.
        body_memory_bytes: For the bodies of all requests that run, with the copies that are made
            of them; None is 256 MiB, or eight of the largest bodies if that is more.
        header_timeout_s: From the first byte of a request's headers to their last, and from a
            new connection to its first request.
        body_timeout_s: How long a body may go without progress.
        send_timeout_s: How long a client may take nothing of what is sent to it.
    """

    max_body_bytes: int = 16 << 20
    body_memory_bytes: int | None = None
    header_timeout_s: float = 30.0
    body_timeout_s: float = 30.0
    send_timeout_s: float = 300.0

    @property
    def body_memory(self) -> int:
        """Bytes for all bodies together."""
        if self.body_memory_bytes is not None:
            return self.body_memory_bytes
        return max(256 << 20, 8 * self.max_body_bytes)

    def __post_init__(self) -> None:
        for flag, number in (
            ("max-body-bytes", self.max_body_bytes),
            ("header-timeout", self.header_timeout_s),
            ("body-timeout", self.body_timeout_s),
            ("send-timeout", self.send_timeout_s),
        ):
            require_positive(flag, number)
        require(
            self.body_memory >= 6 * self.max_body_bytes,
            "body-memory-bytes",
            self.body_memory,
            "it must be at least six times --max-body-bytes, because a body is held with two "
            "copies and leaves as much memory to other requests",
        )


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """TLS of one process: what it shows of itself, and whom it believes. Files are PEM.

    Attributes:
        keyfile: Key of the certificate; empty if it stands in `certfile`.
        certfile: What is shown to clients, and to servers that ask for it; with what stands
            between it and the CA. Empty: HTTP without TLS.
        ca_certs: CAs of others' certificates; empty believes the system's.
        cert_reqs: Of clients: 0 wants no certificate, 1 checks those that are shown, 2 wants one.
    """

    keyfile: str = ""
    certfile: str = ""
    ca_certs: str = ""
    cert_reqs: int = 0

    def __post_init__(self) -> None:
        require(
            bool(self.certfile) or not self.keyfile,
            "ssl-keyfile",
            self.keyfile,
            "it needs the matching certificate: give --ssl-certfile",
        )
        require(
            self.cert_reqs in (0, 1, 2),
            "ssl-cert-reqs",
            self.cert_reqs,
            "use 0 (no client certificates), 1 (verified if present) or 2 (required)",
        )
        require(
            not self.cert_reqs or bool(self.certfile and self.ca_certs),
            "ssl-cert-reqs",
            self.cert_reqs,
            "client certificates need TLS (--ssl-certfile) and the CAs that sign them "
            "(--ssl-ca-certs)",
        )


class CorsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which pages of other origins browsers let ask what is a client's; `*` stands for all.

    Attributes:
        allowed_methods, allowed_headers: What they may send.
        allow_credentials: Whether browsers may add cookies.
    """

    allowed_origins: tuple[str, ...] = ("*",)
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False

    def __post_init__(self) -> None:
        for origin in self.allowed_origins:
            scheme, _, host = origin.partition("://")
            is_origin = bool(scheme and host) and "/" not in host
            require(
                origin == "*" or is_origin,
                "allowed-origins",
                origin,
                "write origins such as https://chat.example.com, without a path, or * for all",
            )


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the servers of engines and proxies have in common.

    Attributes:
        port: 0 takes a free one.
        operator_keys: Open what only operators may ask; without any only this host may.
        root_path: What a reverse proxy before this server leaves at the front of paths.
        drain_delay_s: How long requests are still taken after SIGTERM, while `/readyz` says that
            none are wanted: whoever sends them has to notice.
        shutdown_timeout_s: How long running requests may go on then.
        limits: What its clients may take.
        accept_former_signatures: Whether engines and proxies of release 0.1 are believed, whose
            words may be sent again by whoever has heard them.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    operator_keys: tuple[str, ...] = ()
    root_path: str = ""
    tls: TlsConfig = TlsConfig()
    cors: CorsConfig = CorsConfig()
    drain_delay_s: float = 5.0
    shutdown_timeout_s: float = 30.0
    limits: HttpLimits = HttpLimits()
    accept_former_signatures: bool = False

    def __post_init__(self) -> None:
        require_port(self.port)
        require_keys("api-key", self.api_keys)
        require_keys("operator-key", self.operator_keys)
        require(
            not self.root_path or (self.root_path[0] == "/" and self.root_path[-1] != "/"),
            "root-path",
            self.root_path,
            "write it as /models/llama, without a slash at its end",
        )
        require_not_negative("drain-delay", self.drain_delay_s)
        require_not_negative("shutdown-timeout", self.shutdown_timeout_s)


class ServerConfig(HttpConfig, frozen=True, kw_only=True):
    """The HTTP side of one engine.

    Attributes:
        proxy_urls: Proxies to register with, and to leave on shutdown.
        advertise_url: What to register as; empty means the address that is bound, and of a
            wildcard the one that the way to the proxy leads from.
        reasoning_field: What answers call the reasoning.
    """

    proxy_urls: tuple[str, ...] = ()
    advertise_url: str = ""
    reasoning_field: str = "reasoning"

    def __post_init__(self) -> None:
        super().__post_init__()
        for url in self.proxy_urls:
            require_url(url, "proxy")
        if self.advertise_url:
            require_url(self.advertise_url, "advertise-url")
        require_one_of("reasoning-field", self.reasoning_field, "reasoning", "reasoning_content")


class EppConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where gateways ask which engines should serve a request (Envoy's external processing).

    Attributes:
        port: Port on the proxy's host; 0 picks a free one, None serves no gateways.
        certfile, keyfile: Its TLS certificate and key, PEM; without them there is no TLS. They are
            not the proxy's own, because gateways trust certificates that engines do not.
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
                "TLS needs --epp-port, --epp-ssl-certfile and --epp-ssl-keyfile together",
            )


class ProxyConfig(HttpConfig, frozen=True, kw_only=True):
    """The routing proxy. It holds no state that a restart would miss.

    Attributes:
        prefill, decode: Base URLs of engines known from the start.
        prefill_policy, decode_policy: Names of routing policies: see `policies`.
        split_policy: Name of the one that says whether a request is split between two engines.
        ttft_slo_s, itl_slo_s: Objectives for the first token and for the time between two, where
            a request names none, for the split policy `predicted`. A first one of 0 is a second,
            or three times what the prompt takes alone.
        model_slo: Objectives of requests for one model, as `objectives_by_model` reads them.
        early_rejection: With `predicted`, requests that would miss their objectives get 429.
        tenant_header: Names the header by which who is in front of the proxy says whose share a
            request is of; empty: it is its API key's, where keys are checked.
        tokenizer, chat_template: The directory of the engines' tokenizer, and a file in place of
            its template; for policies that look at prefixes. Without a tokenizer, prompts of text
            are known by their bytes.
        kv_mode: Who moves the KV. A request of several prompts or choices is always pulled.
        max_concurrent_requests: Requests in flight at most; further ones queue.
        queue_size: Requests that may queue; further ones get 429.
        request_timeout_s: One absolute limit for a request, from arrival.
        retry_max_retries: Further engines to try before the first byte.
        cb_failure_threshold: Failures in a row that open an engine's breaker.
        cb_timeout_s: How long it stays open before one request may try again.
        secret: The deployment's secret; engines that register must know it.
        epp: Where gateways are answered that carry the requests themselves.
    """

    epp: EppConfig = EppConfig()
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    prefill_policy: str = "least_loaded"
    decode_policy: str = "least_loaded"
    split_policy: str = "always"
    ttft_slo_s: float = 0.0
    itl_slo_s: float = 0.05
    model_slo: tuple[str, ...] = ()
    early_rejection: bool = True
    tenant_header: str = ""
    tokenizer: str = ""
    chat_template: str = ""
    kv_mode: KVTransfer = KVTransfer.AUTO
    secret: str = ""
    max_concurrent_requests: int = 1024
    queue_size: int = 4096
    queue_timeout_s: float = 60.0
    request_timeout_s: float = 1800.0
    retry_max_retries: int = 3
    cb_failure_threshold: int = 3
    cb_timeout_s: float = 5.0
    health_check_interval_s: float = 1.0
    health_check_timeout_s: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for flag, urls in (("prefill", self.prefill), ("decode", self.decode)):
            for url in urls:
                require_url(url, flag)
                require(
                    not leads_to(url, self.host, self.port),
                    flag,
                    url,
                    "that is the proxy itself, and it would send requests to itself without end: "
                    "give an engine's URL",
                )
        for flag, number in (
            ("max-concurrent-requests", self.max_concurrent_requests),
            ("queue-timeout-secs", self.queue_timeout_s),
            ("request-timeout-secs", self.request_timeout_s),
            ("cb-failure-threshold", self.cb_failure_threshold),
            ("health-check-interval-secs", self.health_check_interval_s),
            ("health-check-timeout-secs", self.health_check_timeout_s),
        ):
            require_positive(flag, number)
        for flag, number in (
            ("queue-size", self.queue_size),
            ("retry-max-retries", self.retry_max_retries),
            ("cb-timeout-duration-secs", self.cb_timeout_s),
        ):
            require_not_negative(flag, number)
        require(
            not self.port or self.epp.port != self.port,
            "epp-port",
            self.epp.port,
            "it is the proxy's own --port: choose another one",
        )
        least_s = MIN_SLO_MS / 1e3
        for flag, limit_s in (("itl-slo", self.itl_slo_s), ("ttft-slo", self.ttft_slo_s or 1.0)):
            require(limit_s >= least_s, flag, limit_s, f"use {least_s:g} or more")
        objectives_by_model(self.model_slo)
