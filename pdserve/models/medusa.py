"""Medusa heads (Cai et al. 2024, arXiv 2401.10774): guess further tokens from one state.

From the final state of a token the model predicts the next token, head 0 the one after that, head 1
the one after that, and so on. A head is a few blocks of `x + silu(W x + b)` and an output head.

It reads two formats. That of the paper's code: `medusa_num_heads`; `0.0.linear.weight` and
`0.1.weight`, in `medusa_lm_head.pt` or safetensors. And vLLM's: `num_heads`;
`blocks.0.layers.0.weight` and `lm_heads.0.weight`, where output heads may have fewer tokens
(`truncated_vocab_size`, `token_map`), or be one for all (`original_lm_head`): the model's, unless
it has its own tensor.
"""

from __future__ import annotations

import re
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Final

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn import functional

from pdserve.errors import ConfigError
from pdserve.models.config_json import Fields, read_config
from pdserve.models.layers.embedding import vocab_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from pdserve.kernels.reference.linear import PackedLinear
    from pdserve.models.arch import ModelArch
    from pdserve.models.layers.parameter import Placement

MEDUSA_PT: Final = "medusa_lm_head.pt"
_PARAM: Final = "speculative-config.model"
_BLOCK: Final = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_OUTPUT: Final = re.compile(r"(\d+)\.\d+\.weight")
_TOKEN_MAP: Final = "token_map"


class MedusaArch(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of Medusa heads.

    Attributes:
        num_layers: Blocks of each head.
        hidden_size, vocab_size: Those of the model.
        draft_vocab_size: Number of tokens that they can predict.
        has_one_head: Whether they share an output head.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    has_one_head: bool


def read_medusa(directory: Path, target: ModelArch, num_tokens: int) -> MedusaArch:
    """Return the shape of the heads in a directory.

    Args:
        num_tokens: Maximum tokens of a draft.

    Raises:
        ConfigError: They are not for `target`, or there are fewer.
    """
    fields = Fields("Medusa heads", read_config(directory, _PARAM), param=_PARAM)
    for name, theirs in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        value = fields.count(name, theirs)
        if value != theirs:
            raise fields.error(name, value, f"the model's is {theirs}: use heads made for it")
    own = "medusa_num_heads" not in fields
    num_heads = "num_heads" if own else "medusa_num_heads"
    arch = MedusaArch(
        num_heads=fields.count(num_heads),
        num_layers=fields.count("num_hidden_layers" if own else "medusa_num_layers", 1),
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=fields.count("truncated_vocab_size", target.vocab_size),
        has_one_head=fields.flag("original_lm_head", default=False),
    )
    if arch.num_heads < num_tokens:
        remedy = f"there are drafts of {num_tokens} tokens: use num_speculative_tokens of no more"
        raise fields.error(num_heads, arch.num_heads, remedy)
    if arch.draft_vocab_size > target.vocab_size:
        remedy = f"the model has {target.vocab_size} tokens"
        raise fields.error("truncated_vocab_size", arch.draft_vocab_size, remedy)
    return arch


class MedusaHeads:
    """Heads of one rank: whole blocks, and output heads for its part of their vocabulary.

    Args:
        target: The model's own logits for this rank's part of the vocabulary.

    Attributes:
        num_heads: Number of heads.
        hidden_size, dtype, device: Those of their input.
        vocab: This rank's rows of the output heads, of `vocab_size`.
        token_ids: `[vocab_size]`, the model's token for each row; None: the same.
        num_weights: Weight elements that this rank reads for a guess of all heads.

    Raises:
        ConfigError: The tensors cannot be read, or do not fit the configuration.
    """

    def __init__(
        self,
        arch: MedusaArch,
        directory: Path,
        placement: Placement,
        *,
        target: Callable[[Tensor], Tensor],
    ) -> None:
        tensors = _Tensors(directory, arch)
        self.num_heads = arch.num_heads
        self.hidden_size, self.dtype = arch.hidden_size, placement.dtype
        self.device = placement.device
        self.vocab = vocab_rows(arch.draft_vocab_size, placement.world.tp)
        self.vocab_size = arch.draft_vocab_size
        self.token_ids = tensors.token_ids
        heads = range(arch.num_heads)
        # The first blocks of all heads read the same states: one product.
        self._first = _packed([tensors.block(head, 0) for head in heads], placement)
        self._further = [
            [_packed([tensors.block(head, layer)], placement) for head in heads]
            for layer in range(1, arch.num_layers)
        ]
        self._outputs: list[Callable[[Tensor], Tensor]] = [
            target
            if weight is None
            else _output(weight[self.vocab.start : self.vocab.stop], placement)
            for weight in tensors.outputs()
        ]
        output = len(self.vocab) * arch.hidden_size
        blocks = arch.num_layers * arch.hidden_size**2
        self.num_weights = blocks + output * len(self._outputs) / arch.num_heads

    def __call__(self, hidden: Tensor, num_heads: int) -> Tensor:
        """Logits of the first heads for some states.

        Args:
            hidden: `[N, hidden_size]`, normed final states.

        Returns:
            `[num_heads * N, len(vocab)]` fp32, head by head.
        """
        num_rows, size = hidden.shape
        first = functional.silu(self._first(hidden)).view(num_rows, -1, size)[:, :num_heads]
        states = (hidden[:, None] + first).transpose(0, 1).contiguous()
        for layer in self._further:
            for state, block in zip(states, layer, strict=False):
                state += functional.silu(block(state))
        if len(self._outputs) == 1:
            return self._outputs[0](states.view(-1, size))
        pairs = zip(self._outputs, states, strict=False)
        return torch.cat([output(state) for output, state in pairs])


class _Tensors:
    """The tensors of a directory by vLLM's names, read on use.

    Attributes:
        token_ids: The token map, if there is one.
    """

    def __init__(self, directory: Path, arch: MedusaArch) -> None:
        self._where, self._arch = directory, arch
        self._stored = {_vllm_name(name): tensor for name, tensor in _read(directory)}
        self._has_bias = "blocks.0.layers.0.bias" in self._stored
        self.token_ids: Tensor | None = None
        if arch.draft_vocab_size < arch.vocab_size:
            self.token_ids = self._get(_TOKEN_MAP, arch.draft_vocab_size).long()
            if not ((self.token_ids >= 0) & (self.token_ids < arch.vocab_size)).all():
                raise self._error(f"{_TOKEN_MAP} has ids that are no tokens of the model")

    def block(self, head: int, layer: int) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a block."""
        name, size = f"blocks.{head}.layers.{layer}", self._arch.hidden_size
        bias = self._get(f"{name}.bias", size) if self._has_bias else None
        return self._get(f"{name}.weight", size, size), bias

    def outputs(self) -> list[Tensor | None]:
        """`[draft_vocab_size, hidden_size]` for each output head; None is the model's own."""
        arch = self._arch
        if not arch.has_one_head:
            return [self._output(f"lm_heads.{head}.weight") for head in range(arch.num_heads)]
        name = "lm_heads.0.weight"
        is_models = name not in self._stored and self.token_ids is None
        return [None if is_models else self._output(name)]

    def _output(self, name: str) -> Tensor:
        arch, stored = self._arch, self._stored.get(name)
        if stored is not None and self.token_ids is not None and len(stored) == arch.vocab_size:
            return self._get(name, arch.vocab_size, arch.hidden_size)[self.token_ids]
        return self._get(name, arch.draft_vocab_size, arch.hidden_size)

    def _get(self, name: str, *shape: int) -> Tensor:
        tensor = self._stored.get(name)
        if tensor is None:
            raise self._error(f"{name} is missing")
        if tensor.shape != shape:
            raise self._error(f"{name} is {list(tensor.shape)}, and should be {list(shape)}")
        return tensor

    def _error(self, what: str) -> ConfigError:
        return ConfigError(
            f"the Medusa heads in {str(self._where)!r} do not fit: {what}", param=_PARAM
        )


def _packed(parts: list[tuple[Tensor, Tensor | None]], placement: Placement) -> PackedLinear:
    """Return blocks with the same input as one product."""
    size = len(parts[0][0])
    packed = placement.kernels.linear(
        size * len(parts),
        size,
        dtype=placement.dtype,
        device=placement.device,
        has_bias=parts[0][1] is not None,
    )
    for index, (weight, bias) in enumerate(parts):
        packed.write(index * size, weight)
        if bias is not None:
            packed.write_bias(index * size, bias)
    return packed


def _output(weight: Tensor, placement: Placement) -> PackedLinear:
    head = placement.kernels.linear(
        *weight.shape, dtype=placement.dtype, device=placement.device, out_dtype=torch.float32
    )
    head.write(0, weight)
    return head


def _vllm_name(name: str) -> str:
    """Return vLLM's name of a tensor, which may have the name of the paper's code."""
    name = name.removeprefix("medusa_heads.").removeprefix("medusa_head.")
    if block := _BLOCK.fullmatch(name):
        head, layer, kind = block.groups()
        return f"blocks.{head}.layers.{layer}.{kind}"
    output = _OUTPUT.fullmatch(name)
    return f"lm_heads.{output[1]}.weight" if output else name


def _read(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a directory, by their names there.

    Raises:
        ConfigError: There are none, or a file cannot be read.
    """
    paths = sorted(directory.glob("*.safetensors")) or list(directory.glob(MEDUSA_PT))
    if not paths:
        raise ConfigError(
            f"{str(directory)!r} has neither *.safetensors nor {MEDUSA_PT}, so it holds no Medusa "
            "heads",
            param=_PARAM,
        )
    for path in paths:
        try:
            if path.suffix == ".pt":
                tensors = torch.load(path, map_location="cpu", weights_only=True)
            else:
                tensors = load_file(path)
            yield from tensors.items()
        except (OSError, RuntimeError, EOFError, SafetensorError, UnpicklingError) as error:
            raise ConfigError(f"{path} cannot be read: {error}", param=_PARAM) from None
