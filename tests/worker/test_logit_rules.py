"""What a token costs a request with many rules: no tensor made of lists, no look at every word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from pdserve.worker.logit_rules import LogitRules
from tests.worker.driver import params

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VOCAB = 5000
CPU = torch.device("cpu")
MAKERS = {"tensor", "as_tensor", "from_numpy"}
"""Of tensors from Python values."""


class Calls(TorchFunctionMode):
    """Names of what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Word(tuple[int, ...]):
    """A word that counts how often any of its kind was looked at."""

    __slots__ = ()
    num_looks = 0

    def __iter__(self) -> Iterator[int]:
        Word.num_looks += 1
        return super().__iter__()


def test_a_token_builds_nothing_however_many_rules_its_request_has() -> None:
    rules = LogitRules(
        params(
            logit_bias=dict.fromkeys(range(VOCAB), 0.5),
            allowed_token_ids=tuple(range(1, VOCAB)),
            bad_words=tuple((token,) for token in range(100, 2000)),
            min_tokens=5,
            eos_token_ids=(2, 3),
            repetition_penalty=1.3,
            frequency_penalty=0.2,
        ),
        prompt=list(range(VOCAB)),
        outputs=[],
        vocab_size=VOCAB,
        device=CPU,
    )
    row = torch.zeros(VOCAB)
    with Calls() as seen:
        for token in range(10, 20):
            rules.apply(row)
            rules.note(token)
    assert seen.names
    assert not MAKERS.intersection(seen.names)


def test_words_are_looked_at_once_and_not_for_every_token() -> None:
    words = tuple(Word((token, token + 1, token + 2)) for token in range(1000))
    rules = LogitRules(
        params(bad_words=words), prompt=[1], outputs=[], vocab_size=VOCAB, device=CPU
    )
    Word.num_looks = 0
    for token in (7, 8):
        rules.apply(torch.zeros(VOCAB))
        rules.note(token)
    row = torch.zeros(VOCAB)
    rules.apply(row)
    assert row.isinf().nonzero().tolist() == [[9]]
    assert Word.num_looks == 0


def test_penalties_count_tokens_that_come_one_by_one_as_those_that_were_there() -> None:
    penalties = params(repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    tokens = [token * 7 % 200 for token in range(300)]
    prompt = [3, 5, 5, 4999]
    grown = LogitRules(penalties, prompt=prompt, outputs=[], vocab_size=VOCAB, device=CPU)
    for token in tokens:
        grown.note(token)
    whole = LogitRules(penalties, prompt=prompt, outputs=tokens, vocab_size=VOCAB, device=CPU)
    rows = logits.clone(), logits.clone()
    grown.apply(rows[0])
    whole.apply(rows[1])
    assert torch.equal(rows[0], rows[1])


def test_only_the_penalties_that_a_request_has_are_computed() -> None:
    def calls(**fields: float) -> list[str]:
        rules = LogitRules(
            params(**fields), prompt=[1, 2, 3], outputs=[2], vocab_size=VOCAB, device=CPU
        )
        row = torch.randn(VOCAB)
        with Calls() as seen:
            rules.apply(row)
        return seen.names

    every = calls(repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1)
    assert [every.count(name) for name in ("where", "sub_")] == [1, 2]
    repetition, frequency = calls(repetition_penalty=1.3), calls(frequency_penalty=0.2)
    assert [repetition.count(name) for name in ("where", "sub_")] == [1, 0]
    assert [frequency.count(name) for name in ("where", "sub_")] == [0, 1]
