"""Conversations: each turn's prompt follows everything said before it.

`num_prompts` counts turns; the last conversation is shorter if they do not divide. Arrivals set the
start of conversations; a later turn is due a pause after the end of the previous answer. The plan
contains only the tokens that a turn adds: the client puts the history, with the received answers,
in front. The server reports the length of the whole prompt. The turns are groups (`turn 1` ...)
with their own figures: from the second on, a cache can hold all but the added tokens.
"""

from __future__ import annotations

import random

from pdserve.bench.datasets.prompts import PromptMaker, Segment
from pdserve.bench.records import Planned, RequestPlan
from pdserve.config.datasets import DatasetConfig


def make(config: DatasetConfig, prompts: PromptMaker) -> RequestPlan:
    """Make the plan. A conversation's turns have consecutive indices.

    Raises:
        ConfigError: A whole conversation exceeds the model's context.
    """
    own = config.multi_turn
    num_before_last = own.input_len + (own.num_turns - 1) * (own.turn_input_len + own.output_len)
    prompts.require_room(
        num_before_last,
        own.output_len,
        "--multi-turn-num-turns, --multi-turn-input-len, --multi-turn-turn-input-len or "
        "--multi-turn-output-len",
    )
    rng = random.Random(f"{config.seed}/multi-turn")
    requests: list[Planned] = []
    for index in range(config.num_prompts):
        session, turn = divmod(index, own.num_turns)
        key = f"session/{session}/{turn}"
        group = f"turn {turn + 1:0{len(str(own.num_turns))}}"
        if turn == 0:
            first = Planned(
                index=index,
                prompt=prompts.make([Segment(key, own.input_len)]),
                max_tokens=own.output_len,
                num_prompt_tokens=own.input_len,
                group=group,
            )
            requests.append(first)
            continue
        pause_s = rng.expovariate(1 / own.think_time_s) if own.think_time_s else 0.0
        requests.append(
            Planned(
                index=index,
                prompt=prompts.make_turn([Segment(key, own.turn_input_len)]),
                max_tokens=own.output_len,
                after=index - 1,
                delay_s=pause_s,
                group=group,
            )
        )
    return RequestPlan(
        requests=requests,
        description=(
            f"multi-turn turns={own.num_turns} in={own.input_len}+{own.turn_input_len} "
            f"out={own.output_len} think={own.think_time_s:g} s"
        ),
    )
