"""Turns the settings of a data set into the requests of a run.

`make_plan` is pure except for the file that some data sets read: the same settings, the same
tokenizer and the same file make the same plan, byte for byte. Requests that exceed the model's
context are refused (synthetic data sets) or left out and counted (data sets from a file); nothing
is cut silently. `arrivals` sets due times, except for data sets with their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from pdserve.bench.datasets import (
    custom,
    interference,
    multi_turn,
    prefix_repetition,
    random_tokens,
    sharegpt,
    trace,
)
from pdserve.bench.datasets.prompts import PromptMaker
from pdserve.bench.records import RequestPlan
from pdserve.config.datasets import DatasetConfig, DatasetName
from pdserve.errors import ConfigError

_MAKERS: Final[Mapping[DatasetName, Callable[[DatasetConfig, PromptMaker], RequestPlan]]] = {
    DatasetName.RANDOM: random_tokens.make,
    DatasetName.SHAREGPT: sharegpt.make,
    DatasetName.CUSTOM: custom.make,
    DatasetName.PREFIX_REPETITION: prefix_repetition.make,
    DatasetName.TRACE: trace.make,
    DatasetName.MULTI_TURN: multi_turn.make,
    DatasetName.PD_INTERFERENCE: interference.make,
}


def make_plan(config: DatasetConfig, prompts: PromptMaker) -> RequestPlan:
    """Return the requests of a run, in order of `index`, with notes about them.

    Args:
        config: Which data set, how much of it, and its seed.
        prompts: Writes prompts for one endpoint and one model, and knows their context.

    Raises:
        ConfigError: A setting does not fit the model or the endpoint, or the file cannot be
            used; the message names the flag, or the file, the line and the field.
    """
    plan = _MAKERS[config.name](config, prompts.with_seed(config.seed))
    if not plan.requests:
        raise ConfigError(
            f"--dataset-name {config.name.value} gives no requests"
            + "".join(f"; {note}" for note in plan.notes)
            + ": use another file, a wider window, or a model with a longer context",
            param="dataset-name",
        )
    return plan
