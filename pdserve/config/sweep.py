"""Settings of a sweep. Knows no endpoint and no figure."""

from __future__ import annotations

import math
import re
from typing import Final

import msgspec

from pdserve.config.bench import RESULT_SETTINGS, TARGET_SETTINGS, TRAFFIC_SETTINGS
from pdserve.config.datasets import DATASET_SETTINGS
from pdserve.config.idle import SWEEP_ROWS
from pdserve.config.load import Table
from pdserve.config.setting import declare
from pdserve.errors import ConfigError

DEFAULT_SHARE: Final = 0.9
"""Of the requests that must meet the objectives, as in DistServe (OSDI 2024)."""

_SHARE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")


class SweepConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which loads to measure, and the objectives that the highest good load must meet.

    Attributes:
        request_rates: Requests per second to measure, ascending when it runs.
        max_concurrencies: Requests in flight to measure, each as a closed loop.
        slo: Objectives of a request as `ttft:500`, in milliseconds, and at most one word as
            `p99`: the share of requests that must meet all of them (default p90).
        start_rate, start_concurrency: Where the search starts if no loads are given;
            if neither is set, it searches over rates.
        max_rate, max_concurrency_limit: The highest loads that it tries.
        bisect: Narrow down the highest load that meets the objectives.
        tolerance: The search ends when the load that failed exceeds the one
            that met the objectives by at most this share.
        num_runs: Runs of each load.
        seconds_per_run: Requests per run follow the rate: rate x seconds; None sends
            `num_prompts` at every load.
        reset_caches: Reset the engines' prefix caches before every run. Without it, or if they
            cannot, every run has its own seed.
    """

    request_rates: tuple[str, ...] = ()
    max_concurrencies: tuple[int, ...] = ()
    slo: tuple[str, ...] = ()
    start_rate: float | None = None
    start_concurrency: int | None = None
    max_rate: float = 1024.0
    max_concurrency_limit: int = 4096
    bisect: bool = True
    tolerance: float = 0.05
    num_runs: int = 1
    seconds_per_run: float | None = None
    reset_caches: bool = True

    def __post_init__(self) -> None:
        rates = self.rates
        if len(set(rates)) < len(rates):
            _refuse("request-rates", list(self.request_rates), "name each rate once")
        loads = self.max_concurrencies
        if any(load < 1 for load in loads) or len(set(loads)) < len(loads):
            _refuse("max-concurrencies", list(loads), "give different numbers of at least 1")
        given = [
            flag
            for flag, value in (
                ("request-rates", rates),
                ("max-concurrencies", loads),
                ("start-rate", self.start_rate),
                ("start-concurrency", self.start_concurrency),
            )
            if value
        ]
        if len(given) > 1:
            raise ConfigError(
                f"--{given[0]} and --{given[1]} cannot be combined: a sweep varies either the "
                "rate or the concurrency, over a list or from a start value",
                param=given[1],
            )
        if not rates and not loads and not self.objectives:
            raise ConfigError(
                "there is nothing to sweep: give loads (--request-rates 1,2,4 or "
                "--max-concurrencies 1,8,64), or objectives to search for (--slo ttft:500 itl:50)",
                param="request-rates",
            )
        if not rates and not loads and not self.bisect:
            raise ConfigError(
                "--no-bisect leaves no loads to measure: give --request-rates or "
                "--max-concurrencies",
                param="bisect",
            )
        for flag, number in (
            ("start-rate", self.start_rate),
            ("start-concurrency", self.start_concurrency),
            ("max-rate", self.max_rate),
            ("max-concurrency-limit", self.max_concurrency_limit),
            ("tolerance", self.tolerance),
            ("num-runs", self.num_runs),
            ("seconds-per-run", self.seconds_per_run),
        ):
            if number is not None and not 0 < number < math.inf:
                _refuse(flag, number, "it must be above 0")
        for flag, start, most, limit in (
            ("start-rate", self.start_rate, self.max_rate, "max-rate"),
            (
                "start-concurrency",
                self.start_concurrency,
                self.max_concurrency_limit,
                "max-concurrency-limit",
            ),
        ):
            if start is not None and start > most:
                _refuse(flag, start, f"raise --{limit}, which is {most:g}")
        if self.seconds_per_run is not None and self.is_over_concurrency:
            _refuse(
                "seconds-per-run",
                self.seconds_per_run,
                "it applies to rates only; a closed loop sends --num-prompts",
            )
        _ = self.share

    @property
    def rates(self) -> list[float]:
        """The rates as numbers.

        Raises:
            ConfigError: One is not a number above 0.
        """
        words = [word for item in self.request_rates for word in item.replace(",", " ").split()]
        found = []
        for word in words:
            try:
                rate = float(word)
            except ValueError:
                rate = math.nan
            if not 0 < rate < math.inf:
                _refuse("request-rates", word, "rates are numbers above 0, such as 0.5,1,2,4")
            found.append(rate)
        return found

    @property
    def is_over_concurrency(self) -> bool:
        """Whether the load is a number of requests in flight, not a rate."""
        return bool(self.max_concurrencies or self.start_concurrency)

    @property
    def objectives(self) -> tuple[str, ...]:
        """The words of `slo` that limit a figure."""
        return tuple(word for item in self.slo for word in item.split() if ":" in word)

    @property
    def share(self) -> float:
        """Of the requests, how many must meet the objectives.

        Raises:
            ConfigError: A word of `slo` is neither an objective nor a share.
        """
        words = [word for item in self.slo for word in item.split() if ":" not in word]
        matches = [_SHARE.fullmatch(word) for word in words]
        if None in matches or len(words) > 1:
            _refuse(
                "slo",
                " ".join(words),
                "write objectives and one share, such as ttft:500 itl:50 p99",
            )
        if words and not self.objectives:
            _refuse("slo", words[0], "a share needs objectives, such as ttft:500 p99")
        match = matches[0] if matches else None
        share = DEFAULT_SHARE if match is None else float(match[1]) / 100
        if not share > 0:
            _refuse("slo", words[0], "the share must be above 0, such as p90")
        return share


def _refuse(flag: str, value: object, remedy: str) -> None:
    raise ConfigError(f"--{flag} is {value}: {remedy}", param=flag)


# fmt: off
SWEEP_SETTINGS: Final = declare(
    "sweep",
    SweepConfig,
    "sweep",
    (
        ("request-rates", "request_rates", "RATE", "requests per second to measure, as 1,2,4,8"),
        ("max-concurrencies", "max_concurrencies", "N", "requests in flight to measure, as 1,8,64"),
        ("slo", "slo", "SLO", "objectives of a request in ms, and the share of requests that must meet them, as ttft:500 itl:50 p99; the default share is p90"),
        ("start-rate", "start_rate", "RATE", "rate at which the search starts if no rates are given (1)"),
        ("start-concurrency", "start_concurrency", "N", "concurrency at which the search starts, instead of a rate"),
        ("max-rate", "max_rate", "RATE", "highest rate that the search tries"),
        ("max-concurrency-limit", "max_concurrency_limit", "N", "highest concurrency that the search tries"),
        ("bisect", "bisect", "", "narrow down the highest load that meets --slo"),
        ("tolerance", "tolerance", "SHARE", "precision of the search: 0.05 ends within 5 percent"),
        ("num-runs", "num_runs", "N", "runs of each load"),
        ("seconds-per-run", "seconds_per_run", "SECONDS", "send rate x seconds requests instead of --num-prompts"),
        ("reset-caches", "reset_caches", "", "reset the engines' prefix caches before every run; otherwise every run sends other prompts"),
    ),
)
# fmt: on
"""All settings of a `SweepConfig` whose root is called `sweep`."""


_LOADS: Final = frozenset(
    ("request-rate", "max-concurrency", "ramp-up-strategy", "ramp-up-start-rps", "ramp-up-end-rps")
)
_KEPT_RESULTS: Final = frozenset(("result-dir", "result-filename", "progress", "allow-invalid"))


def sweep_table() -> Table:
    """The settings of `pdserve bench sweep`: those of `bench serve` except its load."""
    return Table(
        (
            *SWEEP_SETTINGS,
            *TARGET_SETTINGS,
            *DATASET_SETTINGS,
            *(setting for setting in TRAFFIC_SETTINGS if setting.flag not in _LOADS),
            *(setting for setting in RESULT_SETTINGS if setting.flag in _KEPT_RESULTS),
        ),
        defaults={"num-prompts": 100},
        idle=SWEEP_ROWS,
    )
