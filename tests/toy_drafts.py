"""Drafters of the toy's ranks: right, wrong, and whatever else a draft may be."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.toy_executor import TOY_EOS, TOY_NAN, TOY_VOCAB_SIZE, ToyModel, chain
from tests.toy_request import ToyRequest

ToyDrafter = Callable[[ToyRequest, int], list[int]]

_MODEL = ToyModel()


def right(request: ToyRequest, num_tokens: int) -> list[int]:
    """What the request will put out."""
    value = 0
    for token_id in request.tokens:
        value = chain(value, token_id)
    draft = []
    for _ in range(num_tokens):
        draft.append(_MODEL.sample(value, request.sampling))
        value = chain(value, draft[-1])
    return draft


def wrong(request: ToyRequest, num_tokens: int) -> list[int]:
    """What it never puts out at that place."""
    return [(token_id + 1) % TOY_VOCAB_SIZE for token_id in right(request, num_tokens)]


def mixed(request: ToyRequest, num_tokens: int) -> list[int]:
    """Right for some tokens, and of any length."""
    rng = random.Random(len(request.tokens))
    draft = right(request, rng.randint(0, num_tokens))
    return [token_id if rng.random() < 0.7 else TOY_EOS for token_id in draft]


def spoiling(request: ToyRequest, num_tokens: int) -> list[int]:
    """Half of them with a token that makes values NaN."""
    draft = right(request, num_tokens)
    return draft if len(request.tokens) % 2 else [*draft[:-1], TOY_NAN]


TOY_DRAFTERS: dict[str, ToyDrafter] = {"right": right, "wrong": wrong, "mixed": mixed}
