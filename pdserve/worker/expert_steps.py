"""Coordinates the experts that ranks share in each step: token counts and waves.

Engines that share experts step together, in waves. Knows no model: the shared experts learn a
step's tokens before its forward pass, and may do work after its answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdserve.errors import InternalError

if TYPE_CHECKING:
    from pdserve.parallel.dispatch import ExpertParallel
    from pdserve.parallel.group import Group
    from pdserve.wire.step import ExpertBalance, ModelRunnerOutput, SchedulerOutput


class ExpertSteps:
    """Announces a rank's steps to the ranks that share its experts.

    Args:
        experts: None if it shares none.
        dp: The engines that step together.
    """

    def __init__(self, experts: ExpertParallel | None, dp: Group) -> None:
        self._experts = experts
        self._dp = dp
        self._is_open = False
        self._told: ExpertBalance | None = None

    def begin(self, step: SchedulerOutput, num_tokens: int) -> bool:
        """Announce the number of tokens of each engine; return whether the step's wave is over."""
        if step.wave is None:
            if self._dp.size > 1 and self._experts is not None:
                raise InternalError(
                    f"step {step.step_id} is in no wave: its experts are shared by "
                    f"{self._dp.size} engines"
                )
            self._open([num_tokens])
            return False
        engines = self._dp.gather_ints([num_tokens, step.wave.is_unfinished])
        self._open([num for num, _ in engines])
        return not any(is_unfinished for _, is_unfinished in engines)

    def _open(self, num_tokens: list[int]) -> None:
        if self._experts is not None:
            self._experts.begin_step(num_tokens)
            self._is_open = True

    def end(self) -> None:
        """End the step that was begun, if one was: experts may be moved."""
        if self._is_open:
            self._is_open = False
            assert self._experts is not None
            self._experts.end_step()

    def told_in(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """Return `output` with the balance of the experts, if that has changed."""
        if self._experts is None or self._experts.balance is self._told:
            return output
        self._told = self._experts.balance
        return msgspec.structs.replace(output, experts=self._told)
