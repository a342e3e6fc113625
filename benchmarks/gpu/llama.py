"""The Llama-3.1-8B shape with random weights made where they are used, and what a step of it reads.

In a dry run it is a tiny shape, in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.timing import sized
from pdserve.config.numerics import NumericsMode
from pdserve.kernels.registry import kernels_on
from pdserve.kernels.step import StepInputs
from pdserve.models.arch import ModelArch, RopeArch, RopeKind
from pdserve.models.decoder import Decoder
from pdserve.models.layers.parameter import Placement

_ROPE = RopeArch(
    theta=500000.0,
    kind=RopeKind.LLAMA3,
    factor=8.0,
    original_max_positions=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)


def _llama(
    hidden: int, inner: int, layers: int, heads: tuple[int, int], head_dim: int, vocab: int
) -> ModelArch:
    return ModelArch(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        tie_embeddings=False,
        rope=_ROPE,
        qk_norm=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        windows=(None,) * layers,
        max_position_embeddings=131072,
        eos_token_ids=(),
        bos_token_id=None,
        dtype="bfloat16",
        initializer_range=0.02,
    )


ARCH = sized(_llama(4096, 14336, 32, (32, 8), 128, 128256), dry=_llama(64, 96, 2, (4, 2), 16, 211))
DTYPE = sized(torch.bfloat16, dry=torch.float32)
BLOCK_SIZE = sized(64, dry=16)
MAX_POSITIONS = sized(8192, dry=512)
STD = sized(ARCH.initializer_range, dry=0.25)


def make_model(device: torch.device, numerics: NumericsMode = NumericsMode.EXACT) -> Decoder:
    """Make the decoder, run by the device's kernels, with random weights: always the same."""
    placement = Placement(device, DTYPE, kernels_on(device, print, numerics))
    model = Decoder(ARCH, placement, max_positions=MAX_POSITIONS)
    torch.manual_seed(1)
    for name, slot in model.slots().items():
        assert slot.load is not None
        tensor = torch.empty(slot.shape, dtype=DTYPE, device=device)
        slot.load(tensor.fill_(1.0) if name.endswith("norm.weight") else tensor.normal_(std=STD))
    return model


def make_kv(num_blocks: int, device: torch.device) -> Tensor:
    """Return a pool of random KV, `[num_blocks, layers, 2, kv heads, block size, head dim]`."""
    shape = num_blocks, ARCH.num_layers, 2, ARCH.num_kv_heads, BLOCK_SIZE, ARCH.head_dim
    return torch.empty(shape, dtype=DTYPE, device=device).normal_()


def layers_of(kv: Tensor) -> list[Tensor]:
    """Return the pool's view of each layer."""
    return [kv[:, layer] for layer in range(ARCH.num_layers)]


@dataclass(frozen=True, slots=True)
class StepBytes:
    """What a decode step must read.

    Attributes:
        weights: All of them, but for the embedding.
        kv: Of every row's context.
    """

    weights: int
    kv: int

    @classmethod
    def of(cls, batch: int, context: int) -> StepBytes:
        """Count those of `batch` rows of `context` tokens each."""
        query, kv = ARCH.num_heads * ARCH.head_dim, ARCH.num_kv_heads * ARCH.head_dim
        attention = ARCH.hidden_size * (2 * query + 2 * kv)
        mlp = 3 * ARCH.hidden_size * ARCH.intermediate_size
        weights = ARCH.num_layers * (attention + mlp) + ARCH.vocab_size * ARCH.hidden_size
        return cls(
            weights * DTYPE.itemsize,
            batch * context * ARCH.num_layers * 2 * kv * DTYPE.itemsize,
        )

    def floor_us(self, bytes_per_us: float) -> float:
        """Return the time that reading takes at a rate."""
        return (self.weights + self.kv) / bytes_per_us


class Rows:
    """Rows that own disjoint, shuffled blocks of a pool; row r is the same in every batch.

    Args:
        num_rows: At most in a batch.
        max_context: At most of a row.
    """

    def __init__(self, num_rows: int, max_context: int, device: torch.device) -> None:
        self._device = device
        each = -(-max_context // BLOCK_SIZE)
        self.num_blocks = num_rows * each + 1
        generator = torch.Generator().manual_seed(2)
        ids = 1 + torch.randperm(self.num_blocks - 1, generator=generator)
        self._tables = ids.view(num_rows, each).to(torch.int32)
        self._tokens = torch.randint(ARCH.vocab_size, (num_rows, max_context), generator=generator)

    def decode(self, batch: int, context: int, *, padding: int = 0) -> StepInputs:
        """Inputs of a step that computes the last token of `batch` contexts.

        Args:
            padding: Rows after them that compute nothing: no context, no slot.
        """
        lens = torch.full((batch,), context)
        inputs = self._inputs(lens - 1, lens, self._tokens[:batch, context - 1], list(range(batch)))
        if not padding:
            return self._there(inputs)
        token_ids, positions, slots, tables, _, context_lens = inputs
        zeros = torch.zeros(padding, dtype=torch.int64)
        return self._there(
            (
                torch.cat([token_ids, zeros]),
                torch.cat([positions, zeros]),
                torch.cat([slots, zeros - 1]),
                torch.cat([tables, tables.new_zeros(padding, tables.shape[1])]),
                torch.arange(batch + padding + 1),
                torch.cat([context_lens, zeros]),
            )
        )

    def chunk(self, row: int, tokens: Tensor, start: int) -> StepInputs:
        """Inputs of a step that computes one row's `tokens`, the first of them at `start`."""
        end = torch.tensor([start + len(tokens)])
        return self._there(self._inputs(torch.tensor([start]), end, tokens.cpu(), [row]))

    def mixed(self, batch: int, context: int, tokens: Tensor) -> StepInputs:
        """Inputs of `batch` rows as in `decode`, and of the first `tokens` of the row behind."""
        start = torch.cat([torch.full((batch,), context - 1), torch.zeros(1, dtype=torch.int64)])
        end = torch.cat([torch.full((batch,), context), torch.tensor([len(tokens)])])
        both = torch.cat([self._tokens[:batch, context - 1], tokens])
        return self._there(self._inputs(start, end, both, list(range(batch + 1))))

    def blocks(self, row: int) -> list[int]:
        """Return all blocks of a row, in order."""
        return self._tables[row].tolist()

    def prompt(self, row: int, num_tokens: int) -> Tensor:
        """Return the first tokens of a row, on the host."""
        return self._tokens[row, :num_tokens]

    def _inputs(
        self, start: Tensor, end: Tensor, tokens: Tensor, rows: list[int]
    ) -> tuple[Tensor, ...]:
        num = end - start
        query_start = torch.cat([torch.zeros(1, dtype=torch.int64), num.cumsum(0)])
        positions = torch.cat(
            [torch.arange(int(a), int(b)) for a, b in zip(start, end, strict=True)]
        )
        tables = self._tables[rows]
        owner = torch.repeat_interleave(torch.arange(len(rows)), num)
        slots = tables[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        return tokens, positions, slots, tables, query_start, end

    def _there(self, inputs: tuple[Tensor, ...]) -> StepInputs:
        token_ids, positions, slots, tables, query_start, context_lens = inputs
        return StepInputs(
            token_ids=token_ids.to(self._device, torch.int64),
            positions=positions.to(self._device, torch.int64),
            slot_mapping=slots.to(self._device, torch.int64),
            block_tables=tables.to(self._device, torch.int32).contiguous(),
            query_start=query_start.to(self._device, torch.int32),
            context_lens=context_lens.to(self._device, torch.int32),
        )
