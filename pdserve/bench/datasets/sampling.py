"""Samples entries of a file at random without holding the whole file.

Every entry gets a random number, by the seed and its place; those with the least are looked at in
that order until enough are good. That is what shuffling the whole file and taking the first good
ones does. Memory is proportional to what is asked for, and the file is read once, or again if
few of its entries are good.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

from pdserve.bench.datasets.plan import RequestPlan
from pdserve.bench.datasets.prompts import PromptMaker
from pdserve.bench.datasets.reading import Entry
from pdserve.bench.records import Planned, Prompt
from pdserve.config.datasets import DatasetConfig

T = TypeVar("T")
Asked = tuple[Prompt, int | None, int]
"""A prompt, its tokens if they were counted, and how many are asked for."""

_GROWTH: Final = 4
_SPARE: Final = 64


class Sample(Generic[T]):
    """What was taken.

    Attributes:
        taken: In random order, or in the file's.
        left_out: How many of the entries that were looked at were left out, by reason.
    """

    def __init__(self) -> None:
        self.taken: list[T] = []
        self.left_out: Counter[str] = Counter()

    @property
    def notes(self) -> list[str]:
        """What was left out, in words."""
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
    """Take `num` good entries, or all good ones if there are fewer.

    Args:
        read: Begins to read the file.
        accept: Makes of an entry what is wanted, or says in a few words why it is left out.
            Not for entries that are text.
        seed: Of the order.
        shuffle: If not, the file's own order is kept, and it is not read to its end.
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
    """Repeat entries at random until there are `num`, as vLLM does; with a note if any were."""
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
    """Plan requests of a file's entries; see `sample`."""
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
