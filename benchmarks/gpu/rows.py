"""Norms, activation, rotation, digests, sums over ranks: their time, and share of the copy rate.

Sizes are those of Llama-3.1-8B, and of DeepSeek-V3 for latents, in bf16. Calls follow one another
in a graph. Inputs of few tokens stay in the L2 cache, as they do in a step; those of thousands are
rotated through more than it holds. Every call is checked against its reference, and rows against
the same rows alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.peaks import copied, random_words
from benchmarks.gpu.timing import DEVICE, Experiments, num_rotated, sized, time_in_graph
from pdserve.kernels.cases.attention import rope_table
from pdserve.kernels.cuda import activation, digest, gelu, masks, norm, ranks, rope
from pdserve.kernels.cuda.launch import without_overlap
from pdserve.kernels.digest import place_keys, word_constants
from pdserve.kernels.ops import Ops
from pdserve.kernels.reference.masks import mask, num_words

WIDTH, INNER = sized((4096, 14336), (64, 96))
HEADS, KV_HEADS, HEAD_DIM = sized((32, 8, 128), (4, 2, 16))
LATENT_HEADS, NOPE, LATENT, ROTARY = sized((128, 128, 512, 64), (4, 16, 32, 8))
TOKENS = sized((1, 64, 4096), (1, 3))
REFERENCE = Ops()
_TOLERANCE = 1.6e-2


@dataclass(frozen=True)
class Operation:
    """A call and what it moves.

    Attributes:
        call: On one set of inputs.
        reference: The same by the reference.
        make: A set of inputs for a number of tokens.
        rows: Positions of the arguments that have a row for each token.
        num_bytes: Read and written by a call for one token.
    """

    call: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    make: Callable[[int], tuple[Any, ...]]
    rows: tuple[int, ...]
    num_bytes: int


def operations() -> dict[str, Operation]:
    """Return them by name."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)

    def places(tokens: int, num_slots: int) -> tuple[Tensor, Tensor]:
        positions = torch.randint(0, 4096, (tokens,), device=DEVICE)
        return positions, torch.randperm(num_slots, device=DEVICE)[:tokens]

    def for_rope(tokens: int) -> tuple[Any, ...]:
        blocks = tokens // 64 + 1
        positions, slots = places(tokens, blocks * 64)
        kv = random(blocks, 2, 2, KV_HEADS, 64, HEAD_DIM)[:, 1]
        table = rope_table(4096, HEAD_DIM, DEVICE)
        width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        return random(tokens, width), positions, table, kv, slots, None, None, 1e-5

    def for_normed_rope(tokens: int) -> tuple[Any, ...]:
        return *for_rope(tokens)[:5], random(HEAD_DIM), random(HEAD_DIM), 1e-6

    def for_latent(tokens: int) -> tuple[Any, ...]:
        blocks = tokens // 64 + 1
        positions, slots = places(tokens, blocks * 64)
        return (
            random(tokens, LATENT_HEADS, NOPE + ROTARY),
            random(tokens, LATENT_HEADS, LATENT + ROTARY),
            random(tokens, LATENT + ROTARY),
            positions,
            rope_table(4096, ROTARY, DEVICE),
            random(blocks, 2, 1, 1, 64, LATENT + ROTARY)[:, 1],
            slots,
            random(LATENT),
            1e-6,
        )

    qkv_bytes = 2 * 2 * (HEADS + 2 * KV_HEADS) * HEAD_DIM
    latent_bytes = 2 * 2 * (LATENT_HEADS * ROTARY + LATENT + ROTARY)
    return {
        "rms_norm": Operation(
            norm.rms_norm,
            REFERENCE.rms_norm,
            lambda t: (random(t, WIDTH), random(WIDTH), 1e-5),
            (0,),
            2 * 2 * WIDTH,
        ),
        "add_rms_norm": Operation(
            norm.add_rms_norm,
            REFERENCE.add_rms_norm,
            lambda t: (random(t, WIDTH), random(t, WIDTH), random(WIDTH), 1e-5),
            (0, 1),
            4 * 2 * WIDTH,
        ),
        "silu_and_mul": Operation(
            activation.silu_and_mul,
            REFERENCE.silu_and_mul,
            lambda t: (random(t, 2 * INNER),),
            (0,),
            3 * 2 * INNER,
        ),
        "gelu_and_mul": Operation(
            gelu.gelu_and_mul,
            REFERENCE.gelu_and_mul,
            lambda t: (random(t, 2 * INNER),),
            (0,),
            3 * 2 * INNER,
        ),
        "rope_and_cache": Operation(
            rope.rope_and_cache, REFERENCE.rope_and_cache, for_rope, (0, 1, 4), qkv_bytes
        ),
        "rope_and_cache with norms": Operation(
            rope.rope_and_cache, REFERENCE.rope_and_cache, for_normed_rope, (0, 1, 4), qkv_bytes
        ),
        "rope_and_latent": Operation(
            rope.rope_and_latent,
            REFERENCE.rope_and_latent,
            for_latent,
            (0, 1, 2, 3, 6),
            latent_bytes,
        ),
    }


def measured(operation: Operation, tokens: int) -> dict[str, Any]:
    """Check an operation, then time it."""
    error = _error(operation, min(tokens, 64))
    moved = operation.num_bytes * tokens
    sets = [operation.make(tokens) for _ in range(num_rotated(moved, at_most=8))]
    calls = sized(max(8, min(64, 4096 // tokens)), 2)
    timing = time_in_graph(lambda i: operation.call(*sets[i % len(sets)]), calls=calls)
    with without_overlap():
        in_turn = time_in_graph(lambda i: operation.call(*sets[i % len(sets)]), calls=calls)
    return timing.row(
        gb_per_s=timing.gb_per_s(moved),
        without_overlap_us=round(in_turn.us, 3),
        in_l2=moved * len(sets) < 40 << 20,
        **error,
    )


def _error(operation: Operation, tokens: int) -> dict[str, Any]:
    """Return how far from the reference it is, and whether rows alone have equal bits."""
    args = operation.make(tokens)
    wanted = operation.reference(*_cloned(args))
    alone = []
    for i in range(tokens):
        row = [
            x[i : i + 1] if position in operation.rows else x
            for position, x in enumerate(_cloned(args))
        ]
        alone.append(operation.call(*row))
    found = operation.call(*_cloned(args))
    near = torch.isclose(found, wanted, rtol=_TOLERANCE, atol=_TOLERANCE)
    return {
        "far_from_reference": int((~near).sum()),
        "of": near.numel(),
        "max_error": float((found.float() - wanted.float()).abs().max()),
        "rows_alone_equal": torch.equal(torch.cat(alone), found),
    }


def _cloned(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.clone() if isinstance(x, Tensor) else x for x in args)


def digested(block_size: int, tokens: int) -> dict[str, Any]:
    """Time digests of whole blocks, and check them, bit for bit."""
    layers = sized(32, 2)
    kv = torch.randn(
        tokens // block_size, layers, 2, KV_HEADS, block_size, HEAD_DIM, device=DEVICE
    ).bfloat16()
    spans = torch.tensor([[i, i, 0, block_size, 0] for i in range(len(kv))])
    constants = word_constants(block_size, HEAD_DIM // 2)
    keys = place_keys(range(layers), 2, range(KV_HEADS))
    few = spans[:2]
    wanted = REFERENCE.kv_digests(kv, few, constants, keys, 2)
    assert torch.equal(digest.kv_digests(kv, few, constants, keys, 2), wanted), "digests differ"
    on_device = [x.to(DEVICE) for x in (spans, constants, keys)]
    timing = time_in_graph(
        lambda _: digest.digests_on_device(kv, *on_device, len(kv)), calls=sized(2, 1)
    )
    return timing.row(gb_per_s=timing.gb_per_s(kv.nbytes), mib=kv.nbytes >> 20)


def summed(num_ranks: int, tokens: int) -> dict[str, Any]:
    """Time the sum of what ranks have, and check it, bit for bit."""
    dtype = sized(torch.bfloat16, torch.float32)  # the interpreter rounds to bf16 wrongly
    parts = torch.randn(num_ranks, tokens * WIDTH, device=DEVICE, dtype=dtype)
    found = ranks.sum_ranks(parts)
    timing = time_in_graph(lambda _: ranks.sum_ranks(parts), calls=sized(8, 2))
    return timing.row(
        gb_per_s=timing.gb_per_s(parts.nbytes + found.nbytes),
        equal=torch.equal(found, REFERENCE.sum_ranks(parts)),
    )


def masked(num_rows: int) -> dict[str, Any]:
    """Time the masks of rows of logits, and check them."""
    vocab_size = sized(128256, 211)
    logits = torch.randn(num_rows, vocab_size, device=DEVICE)
    words = random_words(num_rows * num_words(vocab_size) * 4).view(num_rows, -1)
    words[:, 0], words[:, 1] = torch.arange(num_rows), 0
    found, wanted = logits.clone(), logits.clone()
    masks.mask(found, words)
    mask(wanted, words)
    timing = time_in_graph(lambda _: masks.mask(logits, words), calls=sized(8, 2))
    moved = 2 * logits.nbytes + words.nbytes
    return timing.row(gb_per_s=timing.gb_per_s(moved), equal=torch.equal(found, wanted))


def run(limit_s: float) -> dict[str, Any]:
    """Run the part."""
    experiments = Experiments("rows", limit_s)
    experiments.run("copy", copied)
    for name, operation in operations().items():
        for tokens in TOKENS:
            experiments.run(
                f"{name}, {tokens} tokens",
                lambda: measured(operation, tokens),  # noqa: B023
            )
    for size in sized((16, 64), (4,)):
        experiments.run(
            f"kv_digests, blocks of {size}",
            lambda: digested(size, sized(4096, 8)),  # noqa: B023
        )
    for tokens in TOKENS:
        experiments.run(f"sum_ranks of 4, {tokens} tokens", lambda: summed(4, tokens))  # noqa: B023
    for num_rows in sized((16, 256), (3,)):
        experiments.run(f"mask of {num_rows} rows", lambda: masked(num_rows))  # noqa: B023
    return experiments.results
