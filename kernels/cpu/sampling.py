"""Tokens drawn from logits in the host's memory."""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor, get_num_threads

from pdserve.kernels.cpu.marshal import refused
from pdserve.kernels.reference.sampling import Draws

_DRAW = struct.Struct("@9P3qi").pack


class DrawOps:
    """The call that draws tokens, in one library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._draw = library.pd_draw

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
        if logits.dtype != torch.float32 or not logits.is_contiguous():
            raise TypeError(f"want contiguous fp32, got {logits.dtype} {logits.stride()}")
        num_rows, vocab_size = logits.shape
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
