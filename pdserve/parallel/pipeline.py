"""Sends intermediate tensors from one pipeline stage to the next."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

    from pdserve.parallel.group import Group


# Maximum number of sends pending in gloo, which reports their completion only to a wait.
_MAX_LEAVING = 8


class StageLink:
    """Sends to the next stage and receives from the one before, in step order.

    Both sides know the shape of a tensor (the step's tokens are on every rank), so no metadata is
    sent. Sends are asynchronous: the stage continues with its next micro-batch, and the tensor is
    kept until it has been sent. Stages of one host pass CPU tensors through shared memory.
    """

    def __init__(self, pp: Group, device: torch.device, dtype: torch.dtype) -> None:
        self._pp = pp
        self._device, self._dtype = device, dtype
        self._shared = pp.shared if device.type == "cpu" else None
        self._leaving: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, hidden: Tensor) -> None:
        """Send `hidden` to the next stage; it must not be changed afterwards."""
        if self._shared is not None:
            self._shared.send_next(hidden)
            return
        while self._leaving and (
            self._leaving[0][0].is_completed() or len(self._leaving) == _MAX_LEAVING
        ):
            self._leaving.popleft()[0].wait()
        hidden = hidden.contiguous()
        work = dist.isend(hidden, dst=self._pp.next, group=self._pp.device)
        assert work is not None
        self._leaving.append((work, hidden))

    def recv(self, *shape: int) -> Tensor:
        """Receive a tensor from the previous stage.

        Returns:
            `shape`, of the link's dtype.
        """
        hidden = torch.empty(shape, dtype=self._dtype, device=self._device)
        if self._shared is not None:
            self._shared.recv_prev(hidden)
        else:
            dist.recv(hidden, src=self._pp.prev, group=self._pp.device)
        return hidden
