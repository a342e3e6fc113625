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
    from pdserve.proxy.brain.work import ServiceTimes
    from pdserve.text.tokenizer import Tokenizer

VOCAB_SIZE: Final = 50_000
"""Number of different output tokens."""
_LAYOUT: Final = re.compile(r"(?=.)(?:(\d{1,9})P)?(?:(\d{1,9})D)?(?:(\d{1,9})B)?")


@dataclass(frozen=True)
class FleetCosts:
    """Durations in a simulation, in seconds.

    Attributes:
        prefill, prefill_token, prefill_pair: A step with prompt tokens only: constant, per token,
            per pair of a token and an earlier one.
        decode, decode_request, decode_token: A step with output tokens: constant, per request, per
            token of context.
        hop: From the client through the proxy to an engine, or back.
        handover: From the first token at a prefill engine until the decode engine goes on, without
            the KV transfer.
        wire, wire_token: A KV transfer: constant, per token.
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
        """Return the seconds to compute a prompt alone."""
        num = num_tokens - num_cached
        pairs = num * (num_cached + num / 2)
        return self.prefill + self.prefill_token * num + self.prefill_pair * pairs

    def of_step(self, num_streams: float, kv_tokens: float) -> float:
        """Return the seconds of a step with output tokens only."""
        return self.decode + self.decode_request * num_streams + self.decode_token * kv_tokens

    def of_wire(self, num_tokens: int) -> float:
        """Return the seconds that the KV transfer of some tokens takes."""
        return self.wire + self.wire_token * num_tokens


@dataclass(frozen=True)
class FleetLayout:
    """Numbers of engines by role, and the size of each.

    Attributes:
        kv_tokens: Capacity of one engine's cache, in tokens.
        step_tokens: Token budget of one step.
        max_num_seqs: Maximum number of requests in one step.
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
        """Engines of all roles."""
        return self.num_prefill + self.num_decode + self.num_both

    def __str__(self) -> str:
        parts = ((self.num_prefill, "P"), (self.num_decode, "D"), (self.num_both, "B"))
        return "".join(f"{number}{letter}" for number, letter in parts if number)


def parse_layout(text: str) -> FleetLayout:
    """Parse a layout such as 4P4D, 6P2D or 8B.

    Raises:
        ConfigError: It is not a layout, or one that cannot serve.
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
        at_s: Arrival time, unless it follows another request.
        prompt: Its tokens; if it follows another request, those after the other's prompt and
            answer.
        after: Index of the request that it follows, `delay_s` after the other's end.
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
    """The outcome of one request.

    Attributes:
        at_s: Arrival time; None if it never arrived, because the request before it was not
            answered.
        num_cached: Cached tokens of its prompt.
        ttft_s, end_s: Times of its first token and its end, since its arrival; None if it was
            rejected or unfinished.
        token_s: Time at which the client had each of its tokens.
        was_split: Whether different engines did its prefill and its decode.
        is_rejected: Whether it was rejected on arrival.
        predicted_s: Predicted time to its first token from its dispatch, which was `sent_s` after
            its arrival.
        times: What it was predicted by.
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
    times: ServiceTimes | None = None
    sent_s: float = 0.0

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first, including the handover."""
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
    """Return the token at a position, for a request with this seed."""
    return 1 + (seed * 7919 + position * 104_729) % (VOCAB_SIZE - 1)


def least_computed(workload: Sequence[Work]) -> int:
    """Return the prompt tokens to compute if no whole grain is ever computed twice."""
    seen: set[int] = set()
    total = 0
    for work in workload:
        grains = grain_hashes(work.prompt, "")
        depth = next((i for i, grain in enumerate(grains) if grain not in seen), len(grains))
        total += len(work.prompt) - depth * GRAIN_TOKENS
        seen.update(grains)
    return total


def workload_of(requests: Sequence[Planned], tokenizer: Tokenizer) -> list[Work]:
    """Return scheduled requests as work with the same lengths, shared prefixes and times.

    Raises:
        ConfigError: All of them are due at once, which is not a sustained load.
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
