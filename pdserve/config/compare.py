"""Settings of `pdserve bench compare` and `bench plot`: frozen structs and their flags.

Data set, traffic and objectives are those of `bench serve`. Knows no deployment.
"""

from __future__ import annotations

import math
import shlex
from typing import Final

import msgspec

from pdserve.config.bench import split_words
from pdserve.config.boxed import BOXED
from pdserve.config.checks import (
    require,
    require_not_negative,
    require_one_of,
    require_positive,
)
from pdserve.config.setting import declare
from pdserve.config.tiers import parse_tiers, require_chunk_size

CHUNK_TOKENS: Final = 512
"""Token budget of a colocated engine on cores: the first default of vLLM's chunked prefill, chosen
for ITL. With the engines' default of 2048 most prompts would be a single chunk, and the baseline no
better than without chunks."""

_BUDGET: Final = "--max-num-batched-tokens"


class CompareConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which deployments to compare, and how.

    Attributes:
        model: The model that all of them serve.
        topologies: Kinds of deployments, by name; `+store` adds a KV store.
        kv_tiers: Tiers of such a store, for `parse_tiers`; only shared memory, so that no run
            finds what another run has left.
        kv_chunk_size: Chunk size of such a store.
        pd: Prefill and decode engines of each P/D deployment, as `2:1`.
        chunk_tokens: Token budgets of a step; each chunked colocated kind is started with each
            of them. Empty takes `CHUNK_TOKENS` on cores, and on GPUs, or where the engines' own
            words have a budget, leaves that.
        cores: Cores for every deployment; empty uses all that this process may use.
        gpus: Devices for every deployment, instead of cores.
        pin: Whether each engine runs only on its own cores.
        peer: Running endpoints of other systems, with or without `label=`.
        api_key: Sent to peers.
        endpoint: completions or chat.
        num_runs: Runs of each deployment at each rate.
        request_rates: Requests per second; empty uses `--request-rate`.
        bound: Measure one engine alone, for the rate-matched bound.
        engine_args: Additional flags for every engine; the other four are for some processes.
        report: The page; empty writes none.
        result: The JSON; empty puts it beside the report.
        start_timeout_s: Time limit for one deployment to become ready.
        pause_s: Pause between two runs.
    """

    model: str = ""
    topologies: tuple[str, ...] = ("colocated", "replicas", "colocated-unchunked", "pd")
    pd: tuple[str, ...] = ("1:1",)
    kv_tiers: str = "cpu:1GiB"
    kv_chunk_size: int = 256
    chunk_tokens: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    pin: bool = True
    peer: tuple[str, ...] = ()
    api_key: str = ""
    endpoint: str = "completions"
    num_runs: int = 3
    request_rates: tuple[str, ...] = ()
    bound: bool = True
    engine_args: str = ""
    colocated_args: str = ""
    prefill_args: str = ""
    decode_args: str = ""
    proxy_args: str = ""
    report: str = "pdserve-compare.html"
    result: str = ""
    start_timeout_s: float = 600.0
    pause_s: float = 0.5

    @property
    def rates(self) -> tuple[float, ...]:
        """`request_rates` as numbers."""
        return tuple(float(word) for word in split_words(self.request_rates))

    @property
    def budgets(self) -> tuple[int, ...]:
        """`chunk_tokens`, or its default; empty leaves the engine's own."""
        words = shlex.split(f"{self.engine_args} {self.colocated_args}")
        has_own = any(word.partition("=")[0].replace("_", "-") == _BUDGET for word in words)
        return self.chunk_tokens or (() if self.gpus or has_own else (CHUNK_TOKENS,))

    @property
    def kinds(self) -> tuple[str, ...]:
        """`topologies`, one by one."""
        return split_words(self.topologies)

    def __post_init__(self) -> None:
        require_positive("num-runs", self.num_runs)
        require_positive("start-timeout", self.start_timeout_s)
        tiers = parse_tiers(self.kv_tiers)
        require(
            tiers.disk is None and tiers.redis is None,
            "kv-tiers",
            self.kv_tiers,
            "compare with a cpu tier alone: what a run leaves elsewhere is the next one's hit",
        )
        require_chunk_size("kv-chunk-size", self.kv_chunk_size)
        require_not_negative("pause", self.pause_s)
        for budget in self.chunk_tokens:
            require_positive("chunk-tokens", budget)
        try:
            are_rates = all(0 < rate < math.inf for rate in self.rates)
            are_rates = are_rates and len(set(self.rates)) == len(self.rates)
        except ValueError:
            are_rates = False
        require(
            are_rates,
            "request-rates",
            " ".join(self.request_rates),
            "write requests per second, each rate once, as 1 2 4 8",
        )
        require(
            not (self.cores and self.gpus),
            "gpus",
            self.gpus,
            "deployments share --cores or --gpus, not both",
        )
        require_one_of("endpoint", self.endpoint, "completions", "chat")
        for flag, units in (("cores", self.cores), ("gpus", self.gpus)):
            require(len(set(units)) == len(units), flag, units, "name each of them once")
        for flag, words in (
            ("engine-args", self.engine_args),
            ("colocated-args", self.colocated_args),
            ("prefill-args", self.prefill_args),
            ("decode-args", self.decode_args),
            ("proxy-args", self.proxy_args),
        ):
            try:
                shlex.split(words)
            except ValueError as error:
                require(False, flag, words, f"it is not a line of words ({error})")


class PlotConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to plot.

    Attributes:
        files: Saved runs, sweeps, or a comparison.
        output: The page.
    """

    files: tuple[str, ...] = ()
    output: str = "pdserve-plot.html"


# fmt: off
COMPARE_SETTINGS: Final = (
    *declare(
        "compare",
        CompareConfig,
        "deployments",
        (
            ("model", "model", "MODEL", f"model that all deployments serve: a directory in Hugging Face format, or {BOXED}"),
            ("topologies", "topologies", "KIND", "deployments to compare: colocated, replicas, colocated-unchunked, replicas-unchunked, pd; each can also have a KV store, as pd+store"),
            ("pd", "pd", "P:D", "prefill and decode engines of each P/D deployment, as 1:1 2:1"),
            ("kv-tiers", "kv_tiers", "cpu:SIZE", "tiers of the KV stores"),
            ("kv-chunk-size", "kv_chunk_size", "N", "tokens per chunk in the KV stores"),
            ("chunk-tokens", "chunk_tokens", "N", "token budgets of chunked colocated engines, one deployment for each; empty is 512 on cores and the engine's default on GPUs"),
            ("cores", "cores", "N", "cores that each deployment uses, as 0,1; empty uses all"),
            ("gpus", "gpus", "N", "GPUs that each deployment uses, as 0,1; an engine with several gets --tensor-parallel-size"),
            ("pin", "pin", "", "pin each engine to its own cores"),
            ("peer", "peer", "URL", "running endpoints of other systems to compare with, as http://host:8000 or label=http://host:8000"),
            ("api-key", "api_key", "KEY", "API key for the peers"),
            ("engine-args", "engine_args", "WORDS", "flags for every engine, as one word: --engine-args='--load-format dummy'"),
            ("colocated-args", "colocated_args", "WORDS", "flags for colocated engines only"),
            ("prefill-args", "prefill_args", "WORDS", "flags for prefill engines only"),
            ("decode-args", "decode_args", "WORDS", "flags for decode engines only"),
            ("proxy-args", "proxy_args", "WORDS", "for proxies"),
            ("start-timeout", "start_timeout_s", "SECONDS", "time limit for a deployment to become ready"),
        ),
    ),
    *declare(
        "compare",
        CompareConfig,
        "comparison",
        (
            ("num-runs", "num_runs", "N", "runs of each deployment, alternating with the others"),
            ("request-rates", "request_rates", "RPS", "compare at each of these rates, as 1 2 4; empty is --request-rate"),
            ("endpoint", "endpoint", "completions|chat", "API endpoint that requests go to"),
            ("bound", "bound", "", "measure one engine alone, for the rate-matched bound"),
            ("pause", "pause_s", "SECONDS", "pause between two runs"),
            ("report", "report", "FILE", "HTML report with table and plots; empty writes none"),
            ("result", "result", "FILE", "JSON file with every run; empty puts it beside the report"),
        ),
    ),
)

PLOT_SETTINGS: Final = declare(
    "plot",
    PlotConfig,
    "plot",
    (
        ("files", "files", "FILE", "saved runs (bench serve --save-result --save-detailed), sweeps, or a comparison"),
        ("output", "output", "FILE", "the page"),
    ),
)
# fmt: on
