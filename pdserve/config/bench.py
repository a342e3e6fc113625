"""Settings of `pdserve bench serve`, except its data set: one frozen struct and its flags.

Names are vLLM's (`vllm bench serve`) wherever it has one. Knows no request.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from pdserve.config.checks import require, require_finite, require_not_negative, require_url
from pdserve.config.setting import declare, parse_object
from pdserve.errors import ConfigError


class RampUp(enum.Enum):
    """How the rate goes from the first to the last request."""

    LINEAR = "linear"
    EXPONENTIAL = "exponential"


class AskedBackend(enum.Enum):
    """vLLM's names for the API's two endpoints."""

    OPENAI = "openai"
    VLLM = "vllm"
    OPENAI_CHAT = "openai-chat"

    @property
    def path(self) -> str:
        """Where its requests go."""
        return "/v1/chat/completions" if self is AskedBackend.OPENAI_CHAT else "/v1/completions"


class TargetConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The endpoint to measure.

    Attributes:
        base_url: Without the API's path; empty uses `host` and `port`.
        backend: Which API to use; all but openai-chat are the same.
        endpoint: Path of the API; one that ends in `chat/completions` receives messages.
            Empty uses the backend's.
        model: Model that requests name; empty uses the first of `/v1/models`.
        tokenizer: Directory of the model's tokenizer, or `boxed`; empty uses the directory that
            `/v1/models` names, if it is on this machine.
        api_keys: The first is sent; if there are none, OPENAI_API_KEY is.
        header: Additional headers for every request, as `NAME=VALUE`.
        label: Name in tables; empty uses the base URL.
    """

    base_url: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    backend: AskedBackend | None = None
    endpoint: str = ""
    model: str = ""
    tokenizer: str = ""
    api_keys: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    label: str = ""

    @property
    def url(self) -> str:
        """The base URL, from `base_url` or from host and port."""
        return self.base_url.rstrip("/") or f"http://{self.host}:{self.port}"

    @property
    def path(self) -> str:
        """The endpoint's path; its short names are written out."""
        return {
            "chat": AskedBackend.OPENAI_CHAT.path,
            "completions": AskedBackend.OPENAI.path,
            "": (self.backend or AskedBackend.OPENAI).path,
        }.get(self.endpoint, self.endpoint)

    @property
    def headers(self) -> dict[str, str]:
        """`header` by name."""
        return _named(self.header)

    def __post_init__(self) -> None:
        if self.base_url:
            require_url(self.base_url, "base-url")
        require(
            not self.base_url.rstrip("/").endswith("/v1"),
            "base-url",
            self.base_url,
            "leave /v1 out: it belongs to --endpoint",
        )
        require(0 < self.port <= 65535, "port", self.port, "use 1 to 65535")
        require(
            self.path.startswith("/") and self.path.endswith("/completions"),
            "endpoint",
            self.endpoint,
            "use completions, chat, or a path that ends in /completions or /chat/completions",
        )
        is_chat = self.path.endswith("/chat/completions")
        require(
            self.backend is None or is_chat == (self.backend is AskedBackend.OPENAI_CHAT),
            "endpoint",
            self.endpoint,
            f"--backend {self.backend and self.backend.value} asks another API; leave one of "
            "them out",
        )
        for each in self.header:
            require(_is_named(each), "header", each, "write it as NAME=VALUE, in printable letters")


class TrafficConfig(msgspec.Struct, frozen=True, kw_only=True):
    """When requests are sent, and how many at once.

    `bench.arrivals.Arrivals`, which is made of them, checks rate, burstiness and ramp.

    Attributes:
        request_rate: Per second; infinity makes all due at once.
        burstiness: Shape of the gamma distribution of gaps: 1 is Poisson, infinity constant.
        max_concurrency: Maximum number of requests in flight; None sets no limit.
        ramp_up_strategy: The rate goes from `ramp_up_start_rps` to `ramp_up_end_rps` instead.
        cancel_share: Share of the requests that the client cancels at a random token.
        num_warmups: Uncounted requests before the run.
        ready_check_timeout_s: How long to wait for the endpoint; 0 asks once.
        request_timeout_s: Limit for one request, from the time it is sent.
        num_client_processes: None chooses by the rate.
        ignore_eos: None sets it if the data set's lengths are exact, as vLLM's client does.
        temperature: None leaves it to the server, as vLLM's client does.
        extra_body: A JSON object with additional fields for every request.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ramp_up_strategy: RampUp | None = None
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None
    cancel_share: float = 0.0
    num_warmups: int = 0
    ready_check_timeout_s: float = 0.0
    request_timeout_s: float = 1800.0
    num_client_processes: int | None = None
    ignore_eos: bool | None = None
    temperature: float | None = None
    extra_body: str = ""

    @property
    def extra_fields(self) -> dict[str, Any]:
        """`extra_body`, parsed."""
        return dict(parse_object(self.extra_body or "{}"))

    def __post_init__(self) -> None:
        require(
            self.request_timeout_s > 0,
            "request-timeout-secs",
            self.request_timeout_s,
            "it must be above 0",
        )
        for flag, count in (
            ("max-concurrency", self.max_concurrency),
            ("num-client-processes", self.num_client_processes),
        ):
            require(count is None or count > 0, flag, count, "it must be at least 1")
        require_not_negative("num-warmups", self.num_warmups)
        require_not_negative("ready-check-timeout-sec", self.ready_check_timeout_s)
        require_not_negative("temperature", self.temperature)
        require_finite("temperature", self.temperature)
        require(0 <= self.cancel_share <= 1, "cancel-share", self.cancel_share, "use 0 to 1")
        try:
            parse_object(self.extra_body or "{}")
        except ValueError as error:
            remedy = 'write it as a JSON object, as {"top_p": 0.9}'
            raise ConfigError(f"--extra-body: {error}; {remedy}", param="extra-body") from None


_METRICS: Final = ("ttft", "tpot", "itl", "e2el")


class ResultConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the figures are printed and saved.

    Attributes:
        goodput: Objectives as `ttft:200`, in milliseconds.
        percentile_metrics: Which latencies are printed.
        metric_percentiles: Which percentiles of them.
        save_detailed: Save each request too, for `pdserve bench plot`.
        result_filename: Empty builds it from label, rate, model and date.
        metadata: Additional entries for the saved result, as `NAME=VALUE`.
        allow_invalid: Exit with 0 even if the figures are not valid.
    """

    goodput: tuple[str, ...] = ()
    percentile_metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    metric_percentiles: tuple[str, ...] = ("99",)
    save_result: bool = False
    save_detailed: bool = False
    result_dir: str = "."
    result_filename: str = ""
    metadata: tuple[str, ...] = ()
    progress: bool = True
    allow_invalid: bool = False

    @property
    def further_entries(self) -> dict[str, str]:
        """`metadata` by name."""
        return _named(self.metadata)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Which latencies are printed, one by one."""
        return split_words(self.percentile_metrics)

    @property
    def percentiles(self) -> tuple[float, ...]:
        """Which percentiles, as numbers."""
        words = split_words(self.metric_percentiles)
        return tuple(dict.fromkeys(float(word) for word in words))

    def __post_init__(self) -> None:
        for name in self.metrics:
            require(
                name in _METRICS, "percentile-metrics", name, f"use some of {','.join(_METRICS)}"
            )
        try:
            is_right = all(0 < percent <= 100 for percent in self.percentiles)
        except ValueError:
            is_right = False
        require(
            is_right,
            "metric-percentiles",
            ",".join(self.metric_percentiles),
            "write numbers above 0 and up to 100, as 50,90,99.9",
        )
        require(
            not self.save_detailed or self.save_result,
            "save-detailed",
            self.save_detailed,
            "it needs --save-result",
        )
        for each in self.metadata:
            require(
                _is_named(each), "metadata", each, "write it as NAME=VALUE, in printable letters"
            )


def _is_named(text: str) -> bool:
    """Whether it is NAME=VALUE, which a header's line or a file in UTF-8 can hold."""
    name, sign, _ = text.partition("=")
    return bool(sign and name.strip()) and text.isprintable()


def _named(given: Iterable[str]) -> dict[str, str]:
    """Values by name; the last one wins."""
    parts = (each.partition("=") for each in given)
    return {name.strip(): value.strip() for name, _, value in parts}


def split_words(given: Iterable[str]) -> tuple[str, ...]:
    """Split words that are joined by commas."""
    return tuple(word.strip() for each in given for word in each.split(",") if word.strip())


# fmt: off
TARGET_SETTINGS: Final = declare(
    "target",
    TargetConfig,
    "endpoint",
    (
        ("base-url", "base_url", "URL", "base URL of the server, without the API's path; empty is http://host:port"),
        ("host", "host", "ADDRESS", "address of the server"),
        ("port", "port", "PORT", "port of the server"),
        ("backend", "backend", "openai|vllm|openai-chat", "vLLM's names of the API: openai-chat sends messages, the others send prompts; auto follows --endpoint"),
        ("endpoint", "endpoint", "PATH", "/v1/completions or /v1/chat/completions, or in short completions or chat; empty follows --backend, or is /v1/completions"),
        ("model", "model", "NAME", "model that requests name; empty uses the first in /v1/models"),
        ("tokenizer", "tokenizer", "DIR", "directory of the model's tokenizer, or boxed; empty uses the one in /v1/models, if it is on this machine"),
        ("api-key", "api_keys", "KEY", "sent as a bearer token (prefer PDSERVE_API_KEY or OPENAI_API_KEY)"),
        ("header", "header", "NAME=VALUE", "additional headers for every request"),
        ("label", "label", "TEXT", "name of this run in tables; empty is the base URL"),
    ),
)

TRAFFIC_SETTINGS: Final = declare(
    "traffic",
    TrafficConfig,
    "traffic",
    (
        ("request-rate", "request_rate", "RPS", "requests per second; inf sends all at once"),
        ("burstiness", "burstiness", "X", "burstiness of the arrivals, whose gaps follow a gamma distribution: 1 is Poisson, less is burstier, inf is constant"),
        ("max-concurrency", "max_concurrency", "N", "maximum number of requests in flight; auto sets no limit"),
        ("ramp-up-strategy", "ramp_up_strategy", "linear|exponential", "change the rate from request to request; auto keeps it constant"),
        ("ramp-up-start-rps", "ramp_up_start_rps", "RPS", "rate of the first request"),
        ("ramp-up-end-rps", "ramp_up_end_rps", "RPS", "rate of the last request"),
        ("cancel-share", "cancel_share", "SHARE", "share of requests that the client cancels at a random token; they do not count as failures"),
        ("num-warmups", "num_warmups", "N", "uncounted requests before the run, with other tokens"),
        ("ready-check-timeout-sec", "ready_check_timeout_s", "SECONDS", "maximum time to wait for the server; 0 asks once"),
        ("request-timeout-secs", "request_timeout_s", "SECONDS", "time after which a request counts as failed"),
        ("num-client-processes", "num_client_processes", "N", "number of client processes; auto is one per 400 requests/s"),
        ("ignore-eos", "ignore_eos", "", "ask for exactly the output lengths of the data set (vLLM's ignore_eos); auto does so for random and trace, as vLLM's client does"),
        ("temperature", "temperature", "T", "temperature of every request; none leaves it to the server, as vLLM's client does"),
        ("extra-body", "extra_body", "JSON", "additional fields for every request"),
    ),
)

RESULT_SETTINGS: Final = declare(
    "result",
    ResultConfig,
    "result",
    (
        ("goodput", "goodput", "SLO", "count requests that meet all of these objectives, as ttft:200 tpot:50 e2el:5000 (ms)"),
        ("percentile-metrics", "percentile_metrics", "NAMES", "latencies to print: ttft,tpot,itl,e2el"),
        ("metric-percentiles", "metric_percentiles", "NUMBERS", "percentiles to print and save; 50, 90, 95 and 99 are always saved"),
        ("save-result", "save_result", "", "save the result as a JSON file"),
        ("save-detailed", "save_detailed", "", "include every request and token in the file; pdserve bench plot needs them"),
        ("result-dir", "result_dir", "DIR", "folder of the file"),
        ("result-filename", "result_filename", "FILE", "name of the file; empty is LABEL-RATEqps-MODEL-DATE.json"),
        ("metadata", "metadata", "NAME=VALUE", "additional entries for the saved JSON, such as a version or a machine"),
        ("progress", "progress", "", "show progress on stderr"),
        ("allow-invalid", "allow_invalid", "", "exit with 0 even if the client was too slow or other programs used its cores"),
    ),
)
# fmt: on
