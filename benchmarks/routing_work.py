"""Workloads for comparing routing policies: traces of real services, and conversations made up."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.planner.work import VOCAB_SIZE, FleetCosts, Work, output_token

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_TRACE_BLOCK = 512


@dataclass(frozen=True)
class Shape:
    """Requests of about one length each, so many a second, for so long."""

    num_prompt: int
    num_output: int
    per_s: float
    seconds: float


def conversations(
    num_requests: int,
    per_s: float,
    *,
    num_turns: int = 5,
    num_systems: int = 4,
    system_tokens: int = 1024,
    seed: int = 0,
) -> list[Work]:
    """Conversations of some turns each, with what was said before in every prompt.

    A turn begins some seconds after the one before it should be over, whenever it is; first turns
    come at random.

    Args:
        per_s: Requests, all turns counted.
        num_systems: System prompts; each conversation begins with one of them.
    """
    rng = random.Random(seed)
    systems = [_tokens(rng, system_tokens) for _ in range(num_systems)]
    turns: list[tuple[float, list[int], int]] = []
    at_s = 0.0
    for _ in range(num_requests // num_turns):
        at_s += rng.expovariate(per_s / num_turns)
        prompt, turn_s = list(rng.choice(systems)), at_s
        for _ in range(num_turns):
            prompt = prompt + _tokens(rng, rng.randint(100, 1200))
            num_output = rng.randint(60, 300)
            turns.append((turn_s, prompt, num_output))
            prompt = prompt + _tokens(rng, num_output)  # its place is taken below
            turn_s += 1.0 + 0.02 * num_output + rng.expovariate(1 / 8)
    return _with_answers(turns, num_turns)


def _with_answers(turns: Sequence[tuple[float, list[int], int]], num_turns: int) -> list[Work]:
    """Put what the engines will have answered into the prompts that repeat it.

    What a request answers follows from its number, which is its place in the order of arrival.
    """
    order = sorted(range(len(turns)), key=lambda i: turns[i][0])
    number_of = {index: number for number, index in enumerate(order)}
    written: dict[int, list[int]] = {}
    for index, (_, prompt, _) in enumerate(turns):
        prompt = list(prompt)
        first = index - index % num_turns
        for earlier in range(first, index):
            start, num = len(turns[earlier][1]), turns[earlier][2]
            seed = number_of[earlier]
            prompt[start : start + num] = [output_token(seed, start + i) for i in range(num)]
        written[index] = prompt
    return [Work(turns[i][0], written[i], turns[i][2], session=str(i // num_turns)) for i in order]


def mooncake(
    path: Path, num_requests: int, per_s: float, *, max_tokens: int = 60_000
) -> list[Work]:
    """Requests of a trace with names of its prompts' blocks, at another pace.

    Those whose prompt is longer than `max_tokens` are left out.
    """
    rows = []
    with path.open() as lines:
        for line in lines:
            row = json.loads(line)
            if row["input_length"] + row["output_length"] <= max_tokens:
                rows.append(row)
            if len(rows) == num_requests:
                break
    blocks: dict[int, list[int]] = {}
    work = []
    times = _paced([row["timestamp"] / 1e3 for row in rows], per_s)
    for at_s, row in zip(times, rows, strict=True):
        prompt: list[int] = []
        for name in row["hash_ids"]:
            if name not in blocks:
                blocks[name] = _tokens(random.Random(name), _TRACE_BLOCK)
            prompt += blocks[name]
        work.append(Work(at_s, prompt[: row["input_length"]], max(1, row["output_length"])))
    return work


def azure(path: Path, num_requests: int, per_s: float) -> list[Work]:
    """Requests of a trace that says their lengths alone: no prompt begins like another."""
    rng = random.Random(0)
    with path.open() as lines:
        rows = list(itertools.islice(csv.DictReader(lines), num_requests))
    times = _paced([float(row["arrived_at"]) for row in rows], per_s)
    return [
        Work(at_s, _tokens(rng, int(row["num_prefill_tokens"])), int(row["num_decode_tokens"]))
        for at_s, row in zip(times, rows, strict=True)
    ]


def decode_heavy(path: Path, num_requests: int, per_s: float) -> list[Work]:
    """The same with short prompts and long answers."""
    return [
        Work(work.at_s, work.prompt[: max(1, len(work.prompt) // 4)], 4 * work.num_output)
        for work in azure(path, num_requests, per_s)
    ]


def part_of(work: Sequence[Work], first: int, per_s: float) -> list[Work]:
    """The requests from one of them on, so many a second."""
    part = work[first:]
    start_s, end_s = part[0].at_s, part[-1].at_s
    factor = (len(part) - 1) / per_s / (end_s - start_s)
    return [dataclasses.replace(each, at_s=(each.at_s - start_s) * factor) for each in part]


def greedy(num_requests: int, per_s: float, *, times: float, seed: int = 0) -> list[Work]:
    """Prompts of two tenants, of which one sends so many times as many as the other.

    Args:
        per_s: Requests of the other one.
    """
    rng = random.Random(seed)
    work: list[Work] = []
    for tenant, rate in (("modest", per_s), ("greedy", per_s * times)):
        at_s, share = 0.0, rate / (per_s * (1 + times))
        for _ in range(round(num_requests * share)):
            at_s += rng.expovariate(rate)
            prompt = _tokens(rng, rng.randint(200, 4000))
            work.append(Work(at_s, prompt, rng.randint(20, 200), tenant))
    return sorted(work, key=lambda each: each.at_s)


def always_first(num_requests: int, per_s: float, *, is_alone: bool = False) -> float:
    """Return the TTFT p99 of `greedy`'s other tenant if it never waits for a prompt not begun.

    Two prefill engines compute one prompt after another, without interrupting any, and are never
    idle unless the tenant is alone.
    """
    rng, costs = random.Random(0), FleetCosts()

    def prompt_s() -> float:
        return costs.of_prompt(rng.randint(200, 4000))

    free_s = [0.0, 0.0] if is_alone else [prompt_s(), prompt_s()]
    at_s, ttfts = 0.0, []
    for _ in range(num_requests):
        at_s += rng.expovariate(per_s)
        while not is_alone and min(free_s) < at_s:
            free_s[free_s.index(min(free_s))] += prompt_s()
        engine = free_s.index(min(free_s))
        free_s[engine] = max(at_s, free_s[engine]) + prompt_s()
        ttfts.append(free_s[engine] - at_s + 2 * costs.hop)
    return sorted(ttfts)[int(0.99 * (num_requests - 1))]


def turned(first: Shape, then: Shape, *, seed: int = 0) -> list[Work]:
    """Requests of one shape for some time, and of another one from then on."""
    rng = random.Random(seed)
    work: list[Work] = []
    begun_s = 0.0
    for shape in (first, then):
        at_s = begun_s + rng.expovariate(shape.per_s)
        while at_s < begun_s + shape.seconds:
            num_prompt, num_output = (
                rng.randint(num // 2, num + num // 2)
                for num in (shape.num_prompt, shape.num_output)
            )
            work.append(Work(at_s, _tokens(rng, num_prompt), num_output))
            at_s += rng.expovariate(shape.per_s)
        begun_s += shape.seconds
    return work


def _tokens(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(number)]


def _paced(times_s: Sequence[float], per_s: float) -> list[float]:
    """The same arrivals, so many a second on average. Those of one moment are spread over a second.

    Traces that count in seconds would else have bursts that nobody has sent.
    """
    rng = random.Random(0)
    spread = sorted(at_s + rng.random() for at_s in times_s)
    span_s = spread[-1] - spread[0]
    factor = (len(spread) - 1) / per_s / span_s if span_s > 0 else 1.0
    return [(at_s - spread[0]) * factor for at_s in spread]
