"""Tokens drawn from logits in the host's memory, and described."""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor, get_num_threads

from pdserve.kernels.cpu.marshal import refused
from pdserve.kernels.reference.logprobs import Described
from pdserve.kernels.reference.sampling import Draws

_DRAW = struct.Struct("@9P3qi").pack
_DESCRIBE = struct.Struct("@6P3qi").pack


class ChoiceOps:
    """The calls that draw tokens and describe them, in one library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._draw = library.pd_draw
        self._describe = library.pd_describe

    def draw(
        self,
        logits: Tensor,
        peaks: Tensor,
        draws: Draws,
        tokens: Tensor,
        *,
        by_k: bool,
        by_p: bool,
    ) -> None:
        """See ``reference.sampling.draw``; each row is looked at for what it asks for."""
        num_rows, vocab_size = _shape_of(logits)
        status = self._draw(
            _DRAW(
                logits.data_ptr(),
                peaks.data_ptr(),
                draws.rows.data_ptr(),
                draws.scale.data_ptr(),
                draws.min_p.data_ptr(),
                draws.top_k.data_ptr(),
                draws.top_p.data_ptr(),
                draws.uniform.data_ptr(),
                tokens.data_ptr(),
                len(draws.rows),
                num_rows,
                vocab_size,
                get_num_threads(),
            )
        )
        if status:
            raise refused("draw", status)

    def describe(self, logits: Tensor, tokens: Tensor, num_top: Tensor) -> Described:
        """See ``reference.logprobs.describe``."""
        num_rows, vocab_size = _shape_of(logits)
        widest = int(num_top.max()) if num_rows else 0
        if widest > vocab_size or num_top.dtype != torch.int32 or tokens.dtype != torch.int64:
            raise TypeError(
                f"want int64 and at most {vocab_size} in int32, got {tokens}, {num_top}"
            )
        found = Described(
            torch.empty(num_rows, dtype=torch.float64),
            torch.empty(num_rows, dtype=torch.int64),
            torch.zeros(num_rows, widest, dtype=torch.int64),
        )
        status = self._describe(
            _DESCRIBE(
                logits.data_ptr(),
                tokens.data_ptr(),
                num_top.data_ptr(),
                found.normalisers.data_ptr(),
                found.ranks.data_ptr(),
                found.top.data_ptr(),
                num_rows,
                vocab_size,
                widest,
                get_num_threads(),
            )
        )
        if status:
            raise refused("describe", status)
        return found


def _shape_of(logits: Tensor) -> torch.Size:
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise TypeError(f"want contiguous fp32, got {logits.dtype} {logits.stride()}")
    return logits.shape
