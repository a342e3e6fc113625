"""Settings of `pdserve plan`, except those it shares with `bench serve`."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from pdserve.config.bench import RESULT_SETTINGS, TRAFFIC_SETTINGS
from pdserve.config.checks import POSITIVE, require, require_not_negative, require_url
from pdserve.config.datasets import DATASET_SETTINGS
from pdserve.config.load import Table
from pdserve.config.policies import POLICIES, PREDICTED, SPLIT_POLICIES
from pdserve.config.setting import declare
from pdserve.config.sweep import SWEEP_SETTINGS
from pdserve.errors import ConfigError


class PlanConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is planned.

    Attributes:
        num_engines: How many there are.
        layout: Layouts to compare, as 2P2D; empty finds them.
        url: Base URL of a proxy that has learned what its engines take; empty: `prompt_times` and
            `step_times` say it.
        check: Requests of the workload to play at `url`; 0 plays none.
        policy: Of the proxy: a routing policy, and behind a slash a split policy.
        prompt_times: Milliseconds of a prompt: constant, each token, each pair of a token and one
            before it.
        step_times: Of a step: constant, each stream, each token of KV.
        wire_times: Of KV on its way: constant, each token.
        hop_ms: Through the proxy, one way; a hand-over takes two. None takes what `url` says, or 3.
        times_error: By which share all times may be off; None takes what `url` has learned, or 0.1.
        kv_tokens: Room of one engine's cache; None takes what `url` says, or 700,000.
        max_model_len: None takes what `url` says, or 131,072.
        model: For the commands that are printed; empty takes what `url` serves.
        tokenizer: Of data sets of text, and of requests that are played.
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
            "--layout says it, too: leave one of them out",
        )
        require(
            self.num_engines is None or self.num_engines > 0,
            "num-engines",
            self.num_engines,
            POSITIVE,
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
                not self.check, "check", self.check, "it needs a deployment to play at: --url URL"
            )
        require_not_negative("check", self.check)
        name, _, split = self.policy.partition("/")
        require(
            name in POLICIES and (split or "always") in {*SPLIT_POLICIES, PREDICTED},
            "policy",
            self.policy,
            f"use one of {', '.join(POLICIES)}, alone or as NAME/SPLIT with one of "
            f"{', '.join(SPLIT_POLICIES)}, {PREDICTED}",
        )
        milliseconds(self.prompt_times, 3, "prompt-times", "4 0.045 2.5e-6")
        milliseconds(self.step_times, 3, "step-times", "7 0.06 6e-5")
        milliseconds(self.wire_times, 2, "wire-times", "1 0.008")
        if self.hop_ms is not None:
            require_not_negative("hop-ms", self.hop_ms)
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
            require(number is None or number > 0, flag, number, POSITIVE)


def milliseconds(
    words: tuple[str, ...], count: int, flag: str, example: str
) -> tuple[float, ...] | None:
    """Return the times that a flag gives; None if it is not given.

    Raises:
        ConfigError: They are not as many, or one is no time.
    """
    if not words:
        return None
    try:
        times = tuple(float(part) for word in words for part in word.split(","))
    except ValueError:
        times = ()
    require(
        len(times) == count and all(0 <= each < math.inf for each in times),
        flag,
        " ".join(words),
        f"write {count} times in milliseconds, as {example}",
    )
    return times


# fmt: off
_SETTINGS: Final = (
    *declare(
        "plan",
        PlanConfig,
        "plan",
        (
            ("num-engines", "num_engines", "N", "how many there are; one of several GPUs counts once"),
            ("layout", "layout", "LAYOUT", "compare these instead, as 4P4D 8B 2P2D4B: prefill and decode engines, and engines for both"),
            ("policy", "policy", "NAME[/SPLIT]", "of the proxy: a routing policy, and a split policy"),
            ("model", "model", "MODEL", "for the commands that are printed; empty is what --url serves"),
            ("json", "json", "", "print one JSON object"),
        ),
    ),
    *declare(
        "plan",
        PlanConfig,
        "what engines take",
        (
            ("url", "url", "URL", "of a proxy with --split-policy predicted or shadow: what it has learned"),
            ("check", "check", "N", "play the first N requests there, and say how far off their simulation is"),
            ("prompt-times", "prompt_times", "MS", "of a prompt: constant, each token, each pair of a token and one before it, as 4 0.045 2.5e-6"),
            ("step-times", "step_times", "MS", "of a step: constant, each stream, each token of their KV, as 7 0.06 6e-5"),
            ("wire-times", "wire_times", "MS", "of KV on its way: constant, each token, as 1 0.008"),
            ("hop-ms", "hop_ms", "MS", "through the proxy, to an engine or to the client; auto is what --url says, or 3"),
            ("times-error", "times_error", "SHARE", "by which times may be off; auto is what --url says, or 0.1"),
            ("kv-tokens", "kv_tokens", "N", "room of an engine's cache; auto is what --url says, or 700000"),
            ("max-model-len", "max_model_len", "N", "tokens of prompt and output; auto is what --url says, or 131072"),
            ("max-num-batched-tokens", "max_num_batched_tokens", "N", "of a step"),
            ("max-num-seqs", "max_num_seqs", "N", "requests in a step"),
            ("tokenizer", "tokenizer", "DIR", "of the model, or boxed; empty is what --url names, if it is here, else boxed"),
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
    )
