"""Settings of `pdserve bench serve`, except its data set: one frozen struct and its flags.

Names are vLLM's (`vllm bench serve`) wherever it has one. Knows no request.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from pdserve.config.checks import require
from pdserve.config.setting import declare


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
    """Whom to ask.

    Attributes:
        base_url: Without the API's path; empty takes `host` and `port`.
        backend: Which API is asked; all but openai-chat are the same.
        endpoint: Path of the API; one that ends in `chat/completions` is asked with messages.
            Empty takes the backend's.
        model: What requests name; empty takes the first of `/v1/models`.
        tokenizer: Directory of the model's tokenizer, or `boxed`; empty takes the directory that
            `/v1/models` names, if it is on this machine.
        api_keys: The first is sent; none takes OPENAI_API_KEY from the environment.
        header: Further headers of every request, as `NAME=VALUE`.
        label: What tables call it; empty takes the base URL.
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
        """The base URL, whichever way it was given."""
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
        """What `header` says."""
        return _named(self.header)

    def __post_init__(self) -> None:
        require(
            not self.base_url or self.base_url.startswith(("http://", "https://")),
            "base-url",
            self.base_url,
            "write it as http://127.0.0.1:8000, without the API's path",
        )
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
            require(_is_named(each), "header", each, "write it as NAME=VALUE")


class TrafficConfig(msgspec.Struct, frozen=True, kw_only=True):
    """When requests are sent, and how many at once.

    What rate, burstiness and ramp must be is checked by the law that is made of them
    (`bench.arrivals.Arrivals`).

    Attributes:
        request_rate: Per second; infinity makes all due at once.
        burstiness: Shape of the gamma distribution of gaps: 1 is Poisson, infinity constant.
        max_concurrency: Requests in flight at most; None sets no limit.
        ramp_up_strategy: The rate goes from `ramp_up_start_rps` to `ramp_up_end_rps` instead.
        cancel_share: Share of the requests that are given up at a random token.
        num_warmups: Requests before the run that are not counted.
        ready_check_timeout_s: How long to wait for the endpoint; 0 asks once.
        request_timeout_s: For one request, from when it is sent.
        num_client_processes: None chooses by the rate.
        ignore_eos: None asks for it where the data set's lengths are exact, as vLLM's client does.
        temperature: None leaves it to the server, as vLLM's client does.
        extra_body: A JSON object with further fields of every request.
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
        """What `extra_body` says."""
        content: Any = json.loads(self.extra_body or "{}")
        assert isinstance(content, dict)
        return content

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
        for flag, number in (
            ("num-warmups", self.num_warmups),
            ("ready-check-timeout-sec", self.ready_check_timeout_s),
        ):
            require(number >= 0, flag, number, "it must not be negative")
        require(0 <= self.cancel_share <= 1, "cancel-share", self.cancel_share, "use 0 to 1")
        require(
            self.temperature is None or self.temperature >= 0,
            "temperature",
            self.temperature,
            "it must not be negative",
        )
        try:
            content = json.loads(self.extra_body or "{}")
        except ValueError:
            content = None
        require(
            isinstance(content, dict),
            "extra-body",
            self.extra_body,
            'write it as a JSON object, as {"top_p": 0.9}',
        )


_METRICS: Final = ("ttft", "tpot", "itl", "e2el")


class ResultConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of the figures.

    Attributes:
        goodput: Objectives as `ttft:200`, in milliseconds.
        percentile_metrics: Which latencies are printed.
        metric_percentiles: Which percentiles of them.
        save_detailed: Save each request, too (`pdserve bench plot` draws from it).
        result_filename: Empty makes one of label, rate, model and date.
        metadata: Further entries of the saved result, as `NAME=VALUE`.
        allow_invalid: End with 0 although the figures may not be believed.
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
        """What `metadata` says."""
        return _named(self.metadata)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Which latencies are printed, one by one."""
        return _words(self.percentile_metrics)

    @property
    def percentiles(self) -> tuple[float, ...]:
        """Which percentiles, as numbers."""
        return tuple(float(word) for word in _words(self.metric_percentiles))

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
            require(_is_named(each), "metadata", each, "write it as NAME=VALUE")


def _is_named(text: str) -> bool:
    name, sign, _ = text.partition("=")
    return bool(sign and name.strip())


def _named(given: Iterable[str]) -> dict[str, str]:
    """Values by name; of equal names the last counts."""
    parts = (each.partition("=") for each in given)
    return {name.strip(): value.strip() for name, _, value in parts}


def _words(given: Iterable[str]) -> tuple[str, ...]:
    """Words that may also stand together, between commas."""
    return tuple(word.strip() for each in given for word in each.split(",") if word.strip())


# fmt: off
TARGET_SETTINGS: Final = declare(
    "target",
    TargetConfig,
    "endpoint",
    (
        ("base-url", "base_url", "URL", "of the server, without the API's path; empty is http://host:port"),
        ("host", "host", "ADDRESS", "of the server"),
        ("port", "port", "PORT", "of the server"),
        ("backend", "backend", "openai|vllm|openai-chat", "vLLM's names of the API: openai-chat asks with messages, the others with prompts; auto goes by --endpoint"),
        ("endpoint", "endpoint", "PATH", "/v1/completions or /v1/chat/completions; also: completions, chat; empty goes by --backend, or is /v1/completions"),
        ("model", "model", "NAME", "what requests name; empty takes the first that /v1/models has"),
        ("tokenizer", "tokenizer", "DIR", "of the model's tokenizer, or boxed; empty is what /v1/models names, if it is here"),
        ("api-key", "api_keys", "KEY", "sent as a bearer token (prefer PDSERVE_API_KEY or OPENAI_API_KEY)"),
        ("header", "header", "NAME=VALUE", "further headers of every request"),
        ("label", "label", "TEXT", "what tables call this run; empty is the base URL"),
    ),
)

TRAFFIC_SETTINGS: Final = declare(
    "traffic",
    TrafficConfig,
    "traffic",
    (
        ("request-rate", "request_rate", "RPS", "requests per second; inf sends all at once"),
        ("burstiness", "burstiness", "X", "of the gaps, gamma distributed: 1 is Poisson, below is burstier, inf is constant"),
        ("max-concurrency", "max_concurrency", "N", "requests in flight at most; auto sets no limit"),
        ("ramp-up-strategy", "ramp_up_strategy", "linear|exponential", "let the rate rise from request to request; auto keeps it"),
        ("ramp-up-start-rps", "ramp_up_start_rps", "RPS", "rate of the first request"),
        ("ramp-up-end-rps", "ramp_up_end_rps", "RPS", "rate of the last request"),
        ("cancel-share", "cancel_share", "SHARE", "of the requests, given up at a random token; no failures"),
        ("num-warmups", "num_warmups", "N", "requests before the run that are not counted, of other tokens"),
        ("ready-check-timeout-sec", "ready_check_timeout_s", "SECONDS", "how long to wait for the server; 0 asks once"),
        ("request-timeout-secs", "request_timeout_s", "SECONDS", "for one request; then it has failed"),
        ("num-client-processes", "num_client_processes", "N", "processes that send; auto is one per 400 requests/s"),
        ("ignore-eos", "ignore_eos", "", "ask for exactly as many tokens as the data set says (vLLM's ignore_eos); auto does for random and trace, as vLLM's client"),
        ("temperature", "temperature", "T", "of every request; none leaves it to the server, as vLLM's client"),
        ("extra-body", "extra_body", "JSON", "further fields of every request"),
    ),
)

RESULT_SETTINGS: Final = declare(
    "result",
    ResultConfig,
    "result",
    (
        ("goodput", "goodput", "SLO", "count requests that keep all of these, as ttft:200 tpot:50 e2el:5000 (ms)"),
        ("percentile-metrics", "percentile_metrics", "NAMES", "latencies to print: ttft,tpot,itl,e2el"),
        ("metric-percentiles", "metric_percentiles", "NUMBERS", "percentiles to print and to save; 50, 90, 95 and 99 are always saved"),
        ("save-result", "save_result", "", "write a JSON file"),
        ("save-detailed", "save_detailed", "", "with every request and token in it; pdserve bench plot needs it"),
        ("result-dir", "result_dir", "DIR", "where"),
        ("result-filename", "result_filename", "FILE", "how it is called; empty is LABEL-RATEqps-MODEL-DATE.json"),
        ("metadata", "metadata", "NAME=VALUE", "further entries of the saved JSON, as of a version or a machine"),
        ("progress", "progress", "", "say on stderr how far it is"),
        ("allow-invalid", "allow_invalid", "", "exit with 0 although the client was too slow, or others took its cores"),
    ),
)
# fmt: on
