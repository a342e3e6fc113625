"""Pure decisions: whether a request can run, and what a step computes.

The server has already checked requests, with better messages. They are checked again here because
a step serves many: one impossible request must not end the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from pdserve.connectors.base import KVSource
from pdserve.wire.sampling import MAX_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdserve.wire.request import GenerateRequest
    from pdserve.wire.sampling import SamplingParams
    from pdserve.wire.transfer import KVHandoff

Rank: TypeAlias = tuple[int, float, int]
"""Priority, arrival in seconds (later by `GenerateRequest.yields_s`), order of arrival."""
MAX_OVERTAKEN: Final = 8
"""Requests whose KV is ready that may start ahead of one whose KV is only planned."""
# Beyond these, fp32 logits overflow and cannot be sampled from. NaN is in no range.
_RANGES: Final = (
    ("temperature", 0.0, 1e6),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -1e6, 1e6),
    ("frequency_penalty", -1e6, 1e6),
    ("repetition_penalty", 1e-6, 1e6),
)
_MAX_LOGIT_BIAS: Final = 1e6


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity that a step may still use.

    Attributes:
        token_budget: Tokens that it may still compute.
        num_free_blocks: Blocks that could be taken.
        block_size: Tokens per block.
        may_split: Whether a request may compute less than it wants (chunked prefill).
        max_of_one: Maximum tokens of one request; 0 sets no limit. Only with `may_split`.
    """

    token_budget: int
    num_free_blocks: int
    block_size: int
    may_split: bool
    max_of_one: int = 0


class Candidate(msgspec.Struct, frozen=True):
    """A running request as the plan sees it.

    Attributes:
        num_wanted: Tokens to compute with an unlimited budget.
        num_computed: Tokens whose KV it has.
        num_blocks: Blocks it holds.
        rank: Smaller is served first and preempted last.
        is_decode: Whether it computes the token that it sampled last.
        is_pinned: Whether it may not be preempted.
    """

    num_wanted: int
    num_computed: int
    num_blocks: int
    rank: Rank
    is_decode: bool = False
    is_pinned: bool = False


class RunningPlan(msgspec.Struct, frozen=True):
    """Work of each running request in this step, by its index.

    Attributes:
        num_tokens: Tokens to compute; requests that sit this step out are absent.
        num_new_blocks: Blocks to append, for the same requests.
        preempted: Requests that give up their blocks, in order.
        budget_left: Tokens that may still be scheduled.
        is_short_of_blocks: Whether a request sits this step out for lack of blocks.
    """

    num_tokens: dict[int, int]
    num_new_blocks: dict[int, int]
    preempted: list[int]
    budget_left: int
    is_short_of_blocks: bool


def plan_running(
    candidates: Sequence[Candidate],
    room: Room,
    *,
    freed_by: Callable[[int], int] | None,
    max_decodes: int | None = None,
) -> RunningPlan:
    """Divide the token budget among the running requests, preempting where blocks are short.

    Behind the first, which leaves them a token each, requests that want only one come before
    prompts: a stream whose KV has come meanwhile does not wait for the end of a prompt.

    Args:
        candidates: In the order in which they are served.
        freed_by: Blocks that preempting a candidate would free; None forbids preemption,
            and a request that lacks blocks sits the step out.
        max_decodes: Maximum decoding requests in the step: the others are left for the steps
            that follow while this one is in flight. None sets no limit.

    Returns:
        A plan that fits the budget and the free blocks. O(candidates) without
        preemption, O(candidates) more for each victim.
    """
    tokens: dict[int, int] = {}
    new_blocks: dict[int, int] = {}
    preempted: list[int] = []
    free, budget = room.num_free_blocks, room.token_budget
    block_size, may_split, max_of_one = room.block_size, room.may_split, room.max_of_one
    decodes_left = len(candidates) if max_decodes is None else max_decodes
    is_short = False
    order = list(range(len(candidates)))
    if any(each.num_wanted > 1 for each in candidates):  # most steps only decode
        order = [index for index in order if candidates[index].num_wanted > 0]
        order[1:] = sorted(
            order[1:], key=lambda i: candidates[i].num_wanted > 1 and not candidates[i].is_decode
        )
    for index in order:
        request = candidates[index]
        if budget <= 0:
            break
        if request.num_wanted <= 0 or (preempted and index in preempted):
            continue
        if request.is_decode and decodes_left <= 0:
            continue
        if request.num_wanted > budget and not may_split:
            continue
        num = min(request.num_wanted, budget, max_of_one or budget)
        if index == order[0] and num > 1 and may_split:
            num_single = sum(candidates[other].num_wanted == 1 for other in order)
            num = min(num, max(1, budget - min(num_single, decodes_left)))
        need = max(0, -(-(request.num_computed + num) // block_size) - request.num_blocks)
        while need > free and freed_by is not None:
            victims = [
                i
                for i in range(len(candidates))
                if i not in preempted and not candidates[i].is_pinned
            ]
            if not victims or victims == [index]:
                break  # the missing blocks are held for others, and will be freed in time
            victim = max(victims, key=lambda i: candidates[i].rank)
            free += freed_by(victim) + new_blocks.pop(victim, 0)
            if victim in tokens:
                budget += tokens.pop(victim)
                decodes_left += candidates[victim].is_decode
            preempted.append(victim)
            if victim == index:
                break
        if preempted and index in preempted:
            continue
        if need > free:
            is_short = True
            continue
        tokens[index] = num
        new_blocks[index] = need
        free -= need
        budget -= num
        if request.is_decode:
            decodes_left -= 1
    return RunningPlan(tokens, new_blocks, preempted, budget, is_short)


def next_line(heads: Mapping[KVSource, Rank], *, num_overtaken: int) -> KVSource | None:
    """Return the line whose first request is next.

    That is the one of best rank, unless its KV is only planned while the KV of a request of equal
    or better priority is ready. An engine whose blocks are full of unread KV cannot compute more:
    blocks taken here for planned KV would only keep the ready KV from being read. While the ready
    KV does not fit, no planned request is given blocks either.

    Args:
        heads: The rank of each line's first request; smaller is better.
        num_overtaken: Requests with ready KV that have started in the place of the first planned
            one, which lets at most `MAX_OVERTAKEN` pass.
    """
    if not heads:
        return None
    best = min(heads, key=lambda line: heads[line])
    ready = heads.get(KVSource.READY)
    if best is not KVSource.PLANNED or ready is None or num_overtaken >= MAX_OVERTAKEN:
        return best
    return KVSource.READY if ready[0] <= heads[KVSource.PLANNED][0] else KVSource.PLANNED


def plan_admission(
    room: Room,
    *,
    num_tokens: int,
    num_computed: int,
    num_hit_blocks: int,
    num_hit_free: int,
    num_reserved_blocks: int,
) -> int | None:
    """Return how many tokens a waiting request may compute if it starts now; None if it may not.

    All its tokens must fit into the pool now, although the blocks are taken chunk by
    chunk: a prompt that starts and cannot continue would only be preempted.

    Args:
        num_tokens: All its tokens.
        num_computed: Tokens whose KV it starts with.
        num_hit_blocks: Cached blocks among them.
        num_hit_free: Those of them that leave the free list.
        num_reserved_blocks: Blocks kept for the growth of running requests.
    """
    need = -(-num_tokens // room.block_size) - num_hit_blocks + num_hit_free
    if need + num_reserved_blocks > room.num_free_blocks:
        return None
    wanted = num_tokens - num_computed
    if wanted > room.token_budget and not room.may_split:
        return None
    return min(wanted, room.token_budget, room.max_of_one or room.token_budget)


def refusal_of(request: GenerateRequest, *, vocab_size: int, max_model_len: int) -> str | None:
    """Return what is wrong with `request`; None if it can be run. O(prompt tokens)."""
    prompt = request.prompt_token_ids
    if not prompt:
        return "the prompt is empty"
    if len(prompt) >= max_model_len:
        return (
            f"the prompt has {len(prompt)} tokens, the maximum context length is "
            f"{max_model_len} tokens"
        )
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        return f"the prompt has token ids outside of the vocabulary (0 to {vocab_size - 1})"
    if request.handoff is not None:
        refusal = refusal_of_handoff(request.handoff, vocab_size=vocab_size)
        if refusal is not None:
            return refusal
    if request.sampling.prompt_logprobs is not None and not request.is_computed_here:
        return "prompt_logprobs come from the engine that computes the prompt"
    if request.sampling.pooling is not None and (request.remote_decode or request.handoff):
        return "the vector of a prompt comes from an engine that has the request alone"
    return _refusal_of_sampling(request.sampling, vocab_size)


def refusal_of_handoff(handoff: KVHandoff, *, vocab_size: int) -> str | None:
    """Return what is wrong with a request's handoff; None if it can be used."""
    first = handoff.first_token_ids
    if not first or not 0 <= min(first) <= max(first) < vocab_size:
        return f"the handoff has no usable first token: {first}"
    if handoff.first_logprobs is not None and len(handoff.first_logprobs) != len(first):
        return f"the handoff has {len(handoff.first_logprobs)} logprobs of {len(first)} tokens"
    return None


def _refusal_of_sampling(sampling: SamplingParams, vocab_size: int) -> str | None:
    if sampling.max_tokens < 1:
        return f"max_tokens is {sampling.max_tokens}: it must be positive"
    for name, low, high in _RANGES:
        value = getattr(sampling, name)
        if not low <= value <= high:
            return f"{name} is {value}: it must be from {low} to {high}"
    for name, number in (
        ("logprobs", sampling.logprobs),
        ("prompt_logprobs", sampling.prompt_logprobs),
    ):
        if number is not None and not 0 <= number <= MAX_LOGPROBS:
            return f"{name} is {number}: it must be from 0 to {MAX_LOGPROBS}"
    if not all(abs(bias) <= _MAX_LOGIT_BIAS for bias in sampling.logit_bias.values()):
        return f"logit_bias has a value beyond {_MAX_LOGIT_BIAS}"
    if any(not 0 <= token_id < vocab_size for token_id in sampling.logprob_token_ids):
        return f"logprob_token_ids has ids outside of the vocabulary (0 to {vocab_size - 1})"
    allowed = sampling.allowed_token_ids
    if allowed is not None and not any(0 <= token_id < vocab_size for token_id in allowed):
        return "allowed_token_ids leaves nothing of the vocabulary"
    return None
