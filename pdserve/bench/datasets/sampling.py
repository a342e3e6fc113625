"""Samples entries of a file at random without holding the whole file.

Every entry gets a random number from the seed and its position; entries are examined in ascending
order of that number until enough are good. That equals shuffling the whole file and using the first
good ones. Memory is proportional to the number of requests, and the file is read once, or again if
few of its entries are good.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

from pdserve.bench.datasets.prompts import PromptMaker
from pdserve.bench.datasets.reading import Entry
from pdserve.bench.records import Planned, Prompt, RequestPlan
from pdserve.config.datasets import DatasetConfig

T = TypeVar("T")
Asked = tuple[Prompt, int | None, int]
"""A prompt, its tokens if they were counted, and the number of output tokens."""

_GROWTH: Final = 4
_SPARE: Final = 64


class Sample(Generic[T]):
    """A sample of a file's entries.

    Attributes:
        taken: Entries in random order, or in the file's.
        left_out: Number of examined entries that were left out, by reason.
    """

    def __init__(self) -> None:
        self.taken: list[T] = []
        self.left_out: Counter[str] = Counter()

    @property
    def notes(self) -> list[str]:
        """The entries left out, in words."""
        num = sum(self.left_out.values())
        if not num:
            return []
        reasons = ", ".join(f"{count} {why}" for why, count in self.left_out.most_common())
        return [f"{num} of {num + len(self.taken)} examined entries were left out: {reasons}"]


def sample(
    read: Callable[[], Iterator[Entry]],
    num: int,
    *,
    accept: Callable[[Entry], T | str],
    seed: int,
    shuffle: bool,
) -> Sample[T]:
    """Return `num` good entries, or all good ones if there are fewer.

    Args:
        read: Starts reading the file.
        accept: Converts an entry, or returns in a few words why it is left out. Converted entries
            must not be strings.
        seed: Seed of the order.
        shuffle: If false, entries keep the file's order, and it is not read to its end.
    """
    if not shuffle:
        result: Sample[T] = Sample()
        _take(read(), num, accept, result)
        return result
    num_held = 2 * num + _SPARE
    while True:
        rng = random.Random(f"{seed}/sample")
        num_entries = 0

        def keyed() -> Iterator[tuple[float, int, Entry]]:
            nonlocal num_entries
            for entry in read():
                num_entries += 1
                yield rng.random(), num_entries, entry  # noqa: B023 (used up in this round)

        # A tie goes by place; entries are never compared.
        held = heapq.nsmallest(num_held, keyed())
        result = Sample()
        _take((entry for _, _, entry in held), num, accept, result)
        if len(result.taken) == num or num_entries <= num_held:
            return result
        num_held *= _GROWTH


def _take(
    entries: Iterator[Entry], num: int, accept: Callable[[Entry], T | str], result: Sample[T]
) -> None:
    for entry in entries:
        if len(result.taken) == num:
            return
        verdict = accept(entry)
        if isinstance(verdict, str):
            result.left_out[verdict] += 1
        else:
            result.taken.append(verdict)


def fill(taken: list[T], num: int, *, seed: int) -> tuple[list[T], list[str]]:
    """Repeat entries at random until there are `num`, as vLLM does, and add a note."""
    num_missing = num - len(taken)
    if num_missing <= 0 or not taken:
        return taken, []
    more = random.Random(f"{seed}/fill").choices(taken, k=num_missing)
    note = (
        f"the file has {len(taken)} usable entries: {num_missing} requests repeat others, and may "
        "be answered from the prefix cache (--no-oversample sends fewer)"
    )
    return [*taken, *more], [note]


def plan_of(
    config: DatasetConfig,
    prompts: PromptMaker,
    read: Callable[[], Iterator[Entry]],
    accept: Callable[[Entry], Asked | str],
    *,
    description: str,
) -> RequestPlan:
    """Plan requests from a file's entries; see `sample`."""
    found = sample(
        read,
        config.num_prompts,
        accept=accept,
        seed=config.seed,
        shuffle=not config.disable_shuffle,
    )
    taken, notes = found.taken, found.notes
    num_uncounted = sum(num_prompt is None for _, num_prompt, _ in taken)
    if num_uncounted and prompts.max_model_len is not None:
        notes.append(
            f"{num_uncounted} prompts were not counted, so they may exceed the model's "
            f"{prompts.max_model_len} tokens: --tokenizer DIR with the model's tokenizer counts "
            "them"
        )
    if not config.no_oversample:
        taken, more = fill(taken, config.num_prompts, seed=config.seed)
        notes += more
    requests = [
        Planned(index=index, prompt=prompt, max_tokens=num_output, num_prompt_tokens=num_prompt)
        for index, (prompt, num_prompt, num_output) in enumerate(taken)
    ]
    return RequestPlan(requests=requests, description=description, notes=notes)
