"""Where a request of the scheduler stands, the legal moves, and what it may wait for."""

from __future__ import annotations

import enum


class State(enum.Enum):
    """Where a request stands.

    WAITING has no blocks. RECEIVING has blocks that a load, or a peer, fills; one load may follow
    another. RUNNING is in the batch; its connector may have its blocks read meanwhile. LEASED has
    finished here, a peer may read its blocks. CLOSING is over for the client while a transfer or a
    step may still touch its blocks. DONE holds nothing.
    """

    WAITING = "waiting"
    RECEIVING = "receiving"
    RUNNING = "running"
    LEASED = "leased"
    CLOSING = "closing"
    DONE = "done"


LEGAL_MOVES = frozenset(
    {
        (State.WAITING, State.RUNNING),
        (State.WAITING, State.RECEIVING),
        (State.WAITING, State.DONE),
        (State.RECEIVING, State.RUNNING),
        (State.RECEIVING, State.WAITING),
        (State.RECEIVING, State.CLOSING),
        (State.RECEIVING, State.DONE),
        (State.RUNNING, State.WAITING),
        (State.RUNNING, State.RECEIVING),
        (State.RUNNING, State.LEASED),
        (State.RUNNING, State.CLOSING),
        (State.RUNNING, State.DONE),
        (State.LEASED, State.DONE),
        (State.CLOSING, State.DONE),
    }
)


OVER = frozenset({State.LEASED, State.CLOSING, State.DONE})
"""Its client gets nothing more from here."""


class Wait(enum.Enum):
    """What a CLOSING request waits for before its blocks may be given back.

    STEP: the last step in flight that has it. LOAD: the report of what writes its blocks.
    HOLD: nothing that its connector began reads its blocks any more.
    """

    STEP = "step"
    LOAD = "load"
    HOLD = "hold"
