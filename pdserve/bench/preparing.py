"""Turns settings into the parts of a run: target, arrival process and plan.

`bench serve` uses it once; a sweep and a comparison for many rates and endpoints.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pdserve.bench.arrivals import ArrivalLaw, cancel_some, schedule
from pdserve.bench.datasets.prompts import PromptMaker
from pdserve.bench.datasets.registry import make_plan
from pdserve.bench.endpoint import ServedModel
from pdserve.bench.records import Planned, RequestPlan
from pdserve.bench.runner import Options
from pdserve.bench.target import ApiEndpoint, Target
from pdserve.config.bench import TargetConfig, TrafficConfig
from pdserve.config.boxed import BOXED, boxed_model_dir
from pdserve.config.datasets import DatasetConfig
from pdserve.errors import ConfigError
from pdserve.text.tokenizer import Tokenizer

_TOKENIZER_FILE = "tokenizer.json"


def target_of(config: TargetConfig, environ: Mapping[str, str]) -> Target:
    """Return the target that the settings describe."""
    is_chat = config.path.endswith("/chat/completions")
    keys = config.api_keys or (environ.get("OPENAI_API_KEY", ""),)
    return Target(
        base_url=config.url,
        model=config.model,
        endpoint=ApiEndpoint.CHAT if is_chat else ApiEndpoint.COMPLETIONS,
        api_key=keys[0],
        label=config.label,
        path=config.path,
        further_headers=config.headers,
    )


def arrivals_of(config: TrafficConfig) -> ArrivalLaw:
    """Return the arrival process that the settings describe.

    Raises:
        ConfigError: There is no such process.
    """
    return ArrivalLaw(
        rate=config.request_rate,
        burstiness=config.burstiness,
        ramp=config.ramp_up_strategy,
        ramp_start_rps=config.ramp_up_start_rps,
        ramp_end_rps=config.ramp_up_end_rps,
    )


def traffic_of(config: TrafficConfig, dataset: DatasetConfig) -> TrafficConfig:
    """Return the traffic settings with open values decided by the data set."""
    if config.ignore_eos is not None:
        return config
    return msgspec.structs.replace(config, ignore_eos=dataset.name.has_exact_lengths)


def options_of(config: TrafficConfig, *, keep_text: bool = False) -> Options:
    """Return the options of a run from the settings."""
    return Options(
        max_concurrency=config.max_concurrency,
        num_processes=config.num_client_processes or 0,
        num_warmups=config.num_warmups,
        request_timeout_s=config.request_timeout_s,
        ready_timeout_s=config.ready_check_timeout_s,
        ignore_eos=bool(config.ignore_eos),
        temperature=config.temperature,
        extra_body=config.extra_fields,
        keep_text=keep_text,
    )


def tokenizer_of(given: str, served: ServedModel) -> Tokenizer | None:
    """Return the tokenizer of a served model, if it is on this machine.

    Args:
        given: A directory, or `boxed`; empty uses the endpoint's.
        served: What the endpoint reports; only a directory on this machine helps.

    Raises:
        ConfigError: `given` is neither, or its files cannot be used.
    """
    if given:
        directory = boxed_model_dir() if given == BOXED else Path(os.path.expanduser(given))
        if not (directory / _TOKENIZER_FILE).is_file():
            raise ConfigError(
                f"--tokenizer is {given}, but {directory} has no {_TOKENIZER_FILE}: name the "
                f"directory of the model's tokenizer, or {BOXED} for the model that comes with "
                "pdserve",
                param="tokenizer",
            )
        return Tokenizer.from_directory(directory)
    for name in (served.root, served.model):
        if name == BOXED:
            return Tokenizer.from_directory(boxed_model_dir())
        if name and Path(name).is_absolute() and (Path(name) / _TOKENIZER_FILE).is_file():
            return Tokenizer.from_directory(Path(name))
    return None


def prompts_of(target: Target, served: ServedModel, *, tokenizer: str = "") -> PromptMaker:
    """Return the prompt maker for an endpoint.

    Args:
        target: The endpoint.
        served: The model that it serves.
        tokenizer: See `tokenizer_of`.

    Raises:
        ConfigError: `tokenizer` cannot be used.
    """
    return PromptMaker(
        tokenizer_of(tokenizer, served),
        endpoint=target.endpoint,
        max_model_len=served.max_model_len,
    )


def plan_of(
    dataset: DatasetConfig,
    arrivals: ArrivalLaw,
    target: Target,
    served: ServedModel,
    *,
    tokenizer: str = "",
    cancel_share: float = 0.0,
) -> tuple[RequestPlan, list[Planned]]:
    """Return a data set's plan, and its requests with due times and cancellations.

    Raises:
        ConfigError: The data set does not fit the model or the endpoint, or its times and the
            arrivals contradict each other.
    """
    if dataset.name.has_own_times and arrivals != ArrivalLaw():
        raise ConfigError(
            f"--dataset-name {dataset.name.value} sets the times of its requests itself: leave "
            "out --request-rate, --burstiness and --ramp-up-strategy",
            param="request-rate",
        )
    plan = make_plan(dataset, prompts_of(target, served, tokenizer=tokenizer))
    scheduled = schedule(plan.requests, arrivals, dataset.seed)
    return plan, cancel_some(scheduled, cancel_share, dataset.seed)


def arrivals_in_words(dataset: DatasetConfig, traffic: TrafficConfig) -> str:
    """Return arrivals as in results."""
    words = "the data set's own" if dataset.name.has_own_times else str(arrivals_of(traffic))
    if traffic.max_concurrency is not None:
        words += f" concurrency={traffic.max_concurrency}"
    if traffic.cancel_share:
        words += f" cancelled={traffic.cancel_share:g}"
    return words


def sampling_in_words(traffic: TrafficConfig) -> str:
    """Return the sampling settings of requests; the server chooses the others."""
    left = traffic.temperature is None
    words = "temperature left to the server" if left else f"temperature {traffic.temperature:g}"
    return f"{words}, ends of text ignored" if traffic.ignore_eos else words
