"""Random tokens, of exact lengths: vLLM's `random`.

Lengths are drawn evenly from n (1 - r) to n (1 + r), rounded outwards, prompts and outputs apart.
All prompts begin with the same `prefix_len` tokens; the rest of each is its own.
"""

from __future__ import annotations

import math
import random

from pdserve.bench.datasets.prompts import PromptMaker, Segment
from pdserve.bench.records import Planned, RequestPlan
from pdserve.config.datasets import DatasetConfig


def make(config: DatasetConfig, prompts: PromptMaker) -> RequestPlan:
    """Make the plan.

    Raises:
        ConfigError: The longest prompt and the longest output exceed the model's context.
    """
    own = config.random
    inputs, outputs = (
        _range(own.input_len, own.range_ratio),
        _range(own.output_len, own.range_ratio),
    )
    prompts.require_room(
        own.prefix_len + inputs[1],
        outputs[1],
        "--random-input-len, --random-prefix-len or --random-output-len",
    )
    rng = random.Random(f"{config.seed}/random")
    requests = []
    for index in range(config.num_prompts):
        num_input, num_output = rng.randint(*inputs), rng.randint(*outputs)
        requests.append(
            Planned(
                index=index,
                prompt=prompts.make(
                    [Segment("prefix", own.prefix_len), Segment(f"random/{index}", num_input)]
                ),
                max_tokens=num_output,
                num_prompt_tokens=own.prefix_len + num_input,
            )
        )
    words = f"random in={own.input_len} out={own.output_len}"
    if own.range_ratio:
        words += f" range={own.range_ratio:g}"
    if own.prefix_len:
        words += f" prefix={own.prefix_len}"
    return RequestPlan(requests=requests, description=words)


def _range(num: int, ratio: float) -> tuple[int, int]:
    return max(1, math.floor(num * (1 - ratio))), max(1, math.ceil(num * (1 + ratio)))
