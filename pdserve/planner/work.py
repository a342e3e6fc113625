"""Work of engines in virtual time: requests, durations and outcomes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pdserve.bench.records import Outcome
from pdserve.errors import ConfigError
from pdserve.wire.ids import GRAIN_TOKENS, grain_hashes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.bench.records import Planned
    from pdserve.text.tokenizer import Tokenizer

VOCAB_SIZE: Final = 50_000
"""Tokens that answers are made of."""
_LAYOUT: Final = re.compile(r"(?=.)(?:(\d+)P)?(?:(\d+)D)?(?:(\d+)B)?")


@dataclass(frozen=True)
class FleetCosts:
    """What takes how long, in seconds.

    Attributes:
        prefill, prefill_token, prefill_pair: Of a step with prompt tokens alone: constant, each
            token, each pair of a token and one before it.
        decode, decode_request, decode_token: Of a step with output tokens: constant, each
            request, each token of its context.
        hop: From the client to an engine through the proxy, and back.
        handover: From a prefill engine that has its token to the decode engine, without the KV.
        wire, wire_token: Of KV: constant, each token.
    """

    prefill: float = 4e-3
    prefill_token: float = 45e-6
    prefill_pair: float = 2.5e-9
    decode: float = 7e-3
    decode_request: float = 60e-6
    decode_token: float = 6e-8
    hop: float = 3e-3
    handover: float = 6e-3
    wire: float = 1e-3
    wire_token: float = 8e-6

    def of_prompt(self, num_tokens: int, num_cached: int = 0) -> float:
        """Seconds to compute a prompt, with nothing beside it."""
        num = num_tokens - num_cached
        pairs = num * (num_cached + num / 2)
        return self.prefill + self.prefill_token * num + self.prefill_pair * pairs

    def of_step(self, num_streams: float, kv_tokens: float) -> float:
        """Seconds of a step with output tokens alone."""
        return self.decode + self.decode_request * num_streams + self.decode_token * kv_tokens

    def of_wire(self, num_tokens: int) -> float:
        """Seconds that the KV of some tokens is on its way."""
        return self.wire + self.wire_token * num_tokens


@dataclass(frozen=True)
class FleetLayout:
    """How many engines of each role there are, and how large they are.

    Attributes:
        kv_tokens: Room of one engine's cache.
        step_tokens: Token budget of one step.
        max_num_seqs: Requests in one step at most.
    """

    num_prefill: int
    num_decode: int
    num_both: int = 0
    kv_tokens: int = 700_000
    step_tokens: int = 2048
    max_num_seqs: int = 256
    max_model_len: int = 131_072

    @property
    def num_engines(self) -> int:
        """All of them."""
        return self.num_prefill + self.num_decode + self.num_both

    def __str__(self) -> str:
        parts = ((self.num_prefill, "P"), (self.num_decode, "D"), (self.num_both, "B"))
        return "".join(f"{number}{letter}" for number, letter in parts if number)


def parse_layout(text: str) -> FleetLayout:
    """Return the layout that 4P4D, 6P2D or 8B means.

    Raises:
        ConfigError: It means none, or one that cannot serve.
    """
    found = _LAYOUT.fullmatch(text)
    layout = FleetLayout(*(int(number or 0) for number in found.groups())) if found else None
    if layout is None or not (layout.num_both or (layout.num_prefill and layout.num_decode)):
        raise ConfigError(
            f"--layout is {text!r}: write layouts such as 4P4D (prefill and decode engines), 8B "
            "(engines for both) or 1P1D2B",
            param="layout",
        )
    return layout


@dataclass(frozen=True)
class Work:
    """One request of a workload.

    Attributes:
        at_s: When it comes, if it follows none.
        prompt: What stands in it; of one that follows another, what comes behind that one's prompt
            and answer.
        after: Place in the workload of the request that it follows, `delay_s` after its end.
    """

    at_s: float
    prompt: Sequence[int]
    num_output: int
    tenant: str = ""
    session: str = ""
    after: int | None = None
    delay_s: float = 0.0


@dataclass
class FleetOutcome:
    """What became of one request.

    Attributes:
        at_s: When it came; None: it never did, as what it follows was not answered.
        num_cached: Tokens of its prompt that were not computed for it.
        ttft_s, end_s: Since its arrival; None: it was refused, or not over at the end.
        token_s: When each of its tokens was there.
        was_split: Whether its prompt was computed by another engine than the rest.
        is_rejected: It was turned away as it came.
        predicted_s: To the first token, from when it was sent on; as it was `sent_s` after it came.
        error: Mean relative error of what that was predicted by, of late.
    """

    num_prompt: int
    num_output: int
    tenant: str = ""
    at_s: float | None = None
    num_cached: int = 0
    ttft_s: float | None = None
    end_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    was_split: bool = False
    is_rejected: bool = False
    predicted_s: float | None = None
    error: float = 0.0
    sent_s: float = 0.0

    @property
    def tpot_s(self) -> float:
        """Mean time of each token behind the first one, the hand-over included."""
        if self.ttft_s is None or self.end_s is None or self.num_output < 2:
            return 0.0
        return (self.end_s - self.ttft_s) / (self.num_output - 1)

    def as_measured(self, index: int) -> Outcome:
        """Return it as a benchmark's client would have seen it."""
        at_s = self.at_s or 0.0
        is_over = self.end_s is not None
        return Outcome(
            index=index,
            request_id=str(index),
            scheduled_s=at_s,
            sent_s=at_s,
            chunk_s=self.token_s,
            chunk_tokens=[1] * len(self.token_s),
            end_s=self.token_s[-1] if self.token_s else at_s,
            num_prompt_tokens=self.num_prompt,
            num_output_tokens=len(self.token_s),
            num_cached_tokens=self.num_cached,
            error="" if is_over else "turned away" if self.is_rejected else "not over",
        )


def output_token(seed: int, position: int) -> int:
    """The token that a request of this seed has at a position."""
    return 1 + (seed * 7919 + position * 104_729) % (VOCAB_SIZE - 1)


def least_computed(workload: Sequence[Work]) -> int:
    """Prompt tokens that are computed if nothing is ever computed twice, in whole grains."""
    seen: set[int] = set()
    total = 0
    for work in workload:
        grains = grain_hashes(work.prompt, "")
        depth = next((i for i, grain in enumerate(grains) if grain not in seen), len(grains))
        total += len(work.prompt) - depth * GRAIN_TOKENS
        seen.update(grains)
    return total


def workload_of(requests: Sequence[Planned], tokenizer: Tokenizer) -> list[Work]:
    """Return scheduled requests as work: as long, as alike, at the same times.

    Raises:
        ConfigError: All of them are due at once, which is no load that lasts.
    """
    place_of = {each.index: place for place, each in enumerate(requests)}
    if len(requests) > 1 and not any(each.at_s for each in requests):
        raise ConfigError(
            "all requests arrive at once: give --request-rate RPS, or use a data set that has "
            "arrival times (--dataset-name trace)",
            param="request-rate",
        )
    return [
        Work(
            at_s=each.at_s or 0.0,
            prompt=_tokens(each, tokenizer),
            num_output=each.max_tokens,
            after=None if each.after is None else place_of[each.after],
            delay_s=each.delay_s,
        )
        for each in requests
    ]


def _tokens(request: Planned, tokenizer: Tokenizer) -> list[int]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return [token for token in prompt if isinstance(token, int)]
