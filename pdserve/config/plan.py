"""Settings of `pdserve plan`, except those it shares with `bench serve`."""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.config.bench import RESULT_SETTINGS, TRAFFIC_SETTINGS
from pdserve.config.checks import (
    require,
    require_not_negative,
    require_positive,
    require_url,
)
from pdserve.config.datasets import DATASET_SETTINGS
from pdserve.config.idle import PLAN_ROWS
from pdserve.config.load import Table
from pdserve.config.policies import PREDICTED, SPLIT_POLICIES, require_policy
from pdserve.config.setting import declare
from pdserve.config.sweep import SWEEP_SETTINGS
from pdserve.errors import ConfigError

MAX_ENGINES: Final = 1000
"""Engines up to which a choice of the router costs the same."""
_MAX_MS: Final = 3_600_000.0


class PlanConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to plan.

    Attributes:
        num_engines: Number of engines.
        layout: Layouts to compare, as 2P2D; empty finds them.
        url: Base URL of a proxy that has learned its engines' times; if empty, `prompt_times` and
            `step_times` give them.
        check: Requests of the workload to send to `url`; 0 sends none.
        policy: The proxy's routing policy and, after a slash, its split policy.
        prompt_times: Milliseconds of a prompt: constant, per token, per pair of a token and one
            before it.
        step_times: Milliseconds of a step: constant, per stream, per token of KV.
        wire_times: Milliseconds of a KV transfer: constant, per token.
        hop_ms: Through the proxy, one way; a handoff takes two. None uses what `url` reports, or 3.
        times_error: Share by which times may be off; None uses what `url` has learned, or 0.1.
        kv_tokens: Tokens that one engine's cache can hold; None uses what `url` reports, or 700,000.
        max_model_len: None uses what `url` reports, or 131,072.
        model: Model in the printed commands; empty uses the one that `url` serves.
        tokenizer: For data sets of text, and for requests that are sent.
        api_keys: The first is sent.
        json: Print one JSON object instead of tables.
    """

    num_engines: int | None = None
    layout: tuple[str, ...] = ()
    url: str = ""
    check: int = 0
    policy: str = f"prefix_sticky/{PREDICTED}"
    prompt_times: tuple[str, ...] = ()
    step_times: tuple[str, ...] = ()
    wire_times: tuple[str, ...] = ()
    hop_ms: float | None = None
    times_error: float | None = None
    kv_tokens: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    model: str = ""
    tokenizer: str = ""
    api_keys: tuple[str, ...] = ()
    json: bool = False

    def __post_init__(self) -> None:
        if self.num_engines is None and not self.layout:
            raise ConfigError(
                "--num-engines is missing: say how many engines there are, such as --num-engines "
                "8, or which layouts to compare, such as --layout 4P4D 8B",
                param="num-engines",
            )
        require(
            not (self.num_engines is not None and self.layout),
            "num-engines",
            self.num_engines,
            "--layout gives the number too: leave one of them out",
        )
        require(
            self.num_engines is None or 0 < self.num_engines <= MAX_ENGINES,
            "num-engines",
            self.num_engines,
            f"use 1 to {MAX_ENGINES}",
        )
        if self.url:
            require_url(self.url, "url")
        else:
            for flag, given in (
                ("prompt-times", self.prompt_times),
                ("step-times", self.step_times),
            ):
                if not given:
                    raise ConfigError(
                        f"--{flag} is missing: give it, or name a proxy that has learned it, such "
                        "as --url http://127.0.0.1:8000",
                        param=flag,
                    )
            require(
                not self.check, "check", self.check, "it needs a running deployment: give --url URL"
            )
        require_not_negative("check", self.check)
        require_policy(self.policy, (*SPLIT_POLICIES, PREDICTED))
        milliseconds(self.prompt_times, 3, "prompt-times", "4 0.045 2.5e-6")
        milliseconds(self.step_times, 3, "step-times", "7 0.06 6e-5")
        milliseconds(self.wire_times, 2, "wire-times", "1 0.008")
        require(
            self.hop_ms is None or 0 <= self.hop_ms <= _MAX_MS,
            "hop-ms",
            self.hop_ms,
            "use milliseconds of up to an hour",
        )
        if self.times_error is not None:
            require(
                0 <= self.times_error < 1, "times-error", self.times_error, "use 0 to 1, as 0.1"
            )
        for flag, number in (
            ("kv-tokens", self.kv_tokens),
            ("max-model-len", self.max_model_len),
            ("max-num-batched-tokens", self.max_num_batched_tokens),
            ("max-num-seqs", self.max_num_seqs),
        ):
            require_positive(flag, number)


def milliseconds(
    words: tuple[str, ...], count: int, flag: str, example: str
) -> tuple[float, ...] | None:
    """Return the times that a flag gives; None if it is not given.

    Raises:
        ConfigError: There are more or fewer, or one is not a time.
    """
    if not words:
        return None
    try:
        times = tuple(float(part) for word in words for part in word.split(","))
    except ValueError:
        times = ()
    require(
        len(times) == count and all(0 <= each <= _MAX_MS for each in times),
        flag,
        " ".join(words),
        f"write {count} times in milliseconds of up to an hour each, such as {example}",
    )
    return times


# fmt: off
_SETTINGS: Final = (
    *declare(
        "plan",
        PlanConfig,
        "plan",
        (
            ("num-engines", "num_engines", "N", "number of engines; an engine with several GPUs counts once"),
            ("layout", "layout", "LAYOUT", "layouts to compare instead, as 4P4D 8B 2P2D4B: prefill engines, decode engines, and engines for both"),
            ("policy", "policy", "NAME[/SPLIT]", "the proxy's routing policy and split policy"),
            ("model", "model", "MODEL", "model in the printed commands; empty is the one that --url serves"),
            ("json", "json", "", "print one JSON object"),
        ),
    ),
    *declare(
        "plan",
        PlanConfig,
        "what engines take",
        (
            ("url", "url", "URL", "proxy with --split-policy predicted or shadow, whose learned times are used"),
            ("check", "check", "N", "send the first N requests to --url, and show how far the simulation is off"),
            ("prompt-times", "prompt_times", "MS", "time of a prompt: constant, per token, per pair of a token and an earlier one, as 4 0.045 2.5e-6"),
            ("step-times", "step_times", "MS", "time of a step: constant, per stream, per token of KV, as 7 0.06 6e-5"),
            ("wire-times", "wire_times", "MS", "time of a KV transfer: constant, per token, as 1 0.008"),
            ("hop-ms", "hop_ms", "MS", "time through the proxy, to an engine or to the client; auto is what --url reports, or 3"),
            ("times-error", "times_error", "SHARE", "share by which times may be off; auto is what --url reports, or 0.1"),
            ("kv-tokens", "kv_tokens", "N", "tokens that an engine's cache can hold; auto is what --url reports, or 700000"),
            ("max-model-len", "max_model_len", "N", "maximum tokens of prompt and output; auto is what --url reports, or 131072"),
            ("max-num-batched-tokens", "max_num_batched_tokens", "N", "of a step"),
            ("max-num-seqs", "max_num_seqs", "N", "maximum number of requests per step"),
            ("tokenizer", "tokenizer", "DIR", "directory of the model's tokenizer, or boxed; empty is the one that --url names, if it is on this machine, else boxed"),
            ("api-key", "api_keys", "KEY", "sent as a bearer token (prefer PDSERVE_API_KEY)"),
        ),
    ),
)
# fmt: on
_TRAFFIC: Final = frozenset(("request-rate", "burstiness"))


def plan_table() -> Table:
    """The settings of `pdserve plan`."""
    return Table(
        (
            *_SETTINGS,
            *(each for each in SWEEP_SETTINGS if each.flag == "slo"),
            *DATASET_SETTINGS,
            *(each for each in TRAFFIC_SETTINGS if each.flag in _TRAFFIC),
            *(each for each in RESULT_SETTINGS if each.flag == "progress"),
        ),
        defaults={"num-prompts": 400},
        idle=PLAN_ROWS,
    )
