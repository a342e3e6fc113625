"""How long P goes on with a push that does not get on. Pure; `pushing` acts on the answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.config.schema import TransferConfig
    from pdserve.connectors.transfer.pushes import Push

_NEVER = float("inf")


def why_overdue(
    push: Push, now_s: float, *, transfer: TransferConfig, last_step_s: float
) -> str | None:
    """Why a push is given up now; None = it is not.

    Args:
        now_s: Monotonic seconds, like all times here.
        last_step_s: When this rank of P last ran a step.
    """
    lease_s = transfer.lease_s
    if push.expect is None:
        late = now_s >= push.since_s + lease_s
        return f"no request came for it in {lease_s:.1f} s" if late else None
    if now_s >= push.alive_s + lease_s:
        return f"no sign of life from {push.expect.decode.engine_id} for {lease_s:.1f} s"
    if now_s >= push.incomplete_since_s + lease_s:
        # One of its ranks has given up, perhaps, and another that was not told so waits on.
        return f"only some of D's ranks have registered for {lease_s:.1f} s"
    if now_s >= _stuck_at_s(push, lease_s, last_step_s):
        # Its pool may be full of what D would read, had it the blocks that wait for this.
        return f"D's blocks wait, and no step has run here for {lease_s:.1f} s"
    timeout_s = transfer.transfer_timeout_s
    if any(now_s >= part.posted_since_s + timeout_s for part in push.parts.values()):
        return f"a write to {push.expect.decode.engine_id} has not ended in {timeout_s:.1f} s"
    if any(now_s >= part.until_s for part in push.parts.values()):
        return f"D did not say in {timeout_s:.1f} s if it has it all"
    return None


def due_s(push: Push, *, transfer: TransferConfig, last_step_s: float) -> float:
    """When something has to be done about a push by the clock; inf = never."""
    if push.ending is not None:
        return _NEVER
    lease_s = transfer.lease_s
    since_s = push.since_s if push.expect is None else push.alive_s
    untils_s = (
        min(part.until_s, part.posted_since_s + transfer.transfer_timeout_s)
        for part in push.parts.values()
    )
    stuck_s = _stuck_at_s(push, lease_s, last_step_s)
    since_s = min(since_s, push.incomplete_since_s)
    return min(since_s + lease_s, stuck_s, push.next_progress_s, *untils_s)


def _stuck_at_s(push: Push, lease_s: float, last_step_s: float) -> float:
    """When a push that has not begun is given up, for nothing goes on at this engine."""
    return max(push.waits_since_s, last_step_s) + lease_s
