"""Prompts that share a few prefixes: vLLM's `prefix_repetition`.

Each prefix begins the same number of prompts, in random order. vLLM sends `num_prompts //
num_prefixes` per prefix and drops the rest; here the rest is sent too, one more for the first
prefixes.
"""

from __future__ import annotations

import random

from pdserve.bench.datasets.prompts import PromptMaker, Segment
from pdserve.bench.records import Planned, RequestPlan
from pdserve.config.datasets import DatasetConfig
from pdserve.errors import ConfigError


def make(config: DatasetConfig, prompts: PromptMaker) -> RequestPlan:
    """Make the plan.

    Raises:
        ConfigError: There are more prefixes than prompts, or they exceed the model's context.
    """
    own = config.prefix_repetition
    if own.num_prefixes > config.num_prompts:
        raise ConfigError(
            f"--prefix-repetition-num-prefixes is {own.num_prefixes}, more than --num-prompts "
            f"{config.num_prompts}, so no prefix would repeat: lower it, or raise --num-prompts",
            param="prefix-repetition-num-prefixes",
        )
    num_prompt_tokens = own.prefix_len + own.suffix_len
    prompts.require_room(
        num_prompt_tokens,
        own.output_len,
        "--prefix-repetition-prefix-len, --prefix-repetition-suffix-len or "
        "--prefix-repetition-output-len",
    )
    order = [index % own.num_prefixes for index in range(config.num_prompts)]
    if not config.disable_shuffle:
        random.Random(f"{config.seed}/prefix_repetition").shuffle(order)
    requests = [
        Planned(
            index=index,
            prompt=prompts.make(
                [
                    Segment(f"prefix/{prefix}", own.prefix_len),
                    Segment(f"suffix/{index}", own.suffix_len),
                ]
            ),
            max_tokens=own.output_len,
            num_prompt_tokens=num_prompt_tokens,
        )
        for index, prefix in enumerate(order)
    ]
    return RequestPlan(
        requests=requests,
        description=(
            f"prefix_repetition prefixes={own.num_prefixes}x{own.prefix_len} "
            f"suffix={own.suffix_len} out={own.output_len}"
        ),
    )
