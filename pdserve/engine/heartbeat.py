"""Judges an engine core's health by its loop's answers and its process's state. Pure.

The loop never waits for a step, so a heartbeat is answered within milliseconds whatever the
ranks do. An unanswered one is judged by the state of the core's process meanwhile
(`observe/liveness`):

    stopped                  not ready at the second look; given up after the heartbeat time-out
    asleep, and silent       not ready and given up after the heartbeat time-out
    busy, and silent         not ready after the heartbeat time-out; given up after the step
                             time-out, like a step that does not come back

A core that is given up is killed. Otherwise it could wake at any time, and write to a client, or
into the KV memory of a peer, that no longer expects it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.observe.liveness import NUM_LOOKS, ProcessWatch

if TYPE_CHECKING:
    from pdserve.config.schema import LivenessConfig

_NUM_STOPPED_LOOKS = 2
"""Looks before a stopped core counts as not ready: a debugger's stop may be short."""


class CoreWatch:
    """Watches one core.

    Attributes:
        stall_reason: Reason why the core should get no requests now; None if it may.
    """

    def __init__(self, process: ProcessWatch, config: LivenessConfig) -> None:
        self._process = process
        self._config = config
        self._last_sent = 0
        self._last_answered = self._answered_before = 0
        self._is_expected = False
        self._num_silent = 0
        self.look_s = config.heartbeat_timeout_s / NUM_LOOKS
        self.stall_reason: str | None = None

    def expect(self) -> None:
        """Note that the core has begun its loop, and answers from now on."""
        self._is_expected = True

    def next(self) -> int | None:
        """Return the number of the heartbeat to send now; None before the core answers any."""
        if not self._is_expected:
            return None
        self._last_sent += 1
        return self._last_sent

    def answered(self, number: int) -> None:
        """Note that the core's loop has answered."""
        self._last_answered = number

    def look(self) -> str | None:
        """Return why to give the core up, or None; call once per `look_s`, before `next`."""
        self._process.look()
        # Answers that come one look late, one after the other, are answers.
        has_answered = self._last_answered > self._answered_before
        is_silent = self._last_answered < self._last_sent and not has_answered
        self._answered_before = self._last_answered
        self._num_silent = self._num_silent + 1 if is_silent else 0
        silent_s = self._num_silent * self.look_s
        num_stopped = self._process.num_stopped
        timeout_s = self._config.heartbeat_timeout_s
        if num_stopped >= _NUM_STOPPED_LOOKS:
            self.stall_reason = f"the engine core is stopped, for {num_stopped * self.look_s:g} s"
        elif self._num_silent >= NUM_LOOKS:
            self.stall_reason = f"the engine core has not answered for {silent_s:g} s"
        else:
            self.stall_reason = None
        if num_stopped >= NUM_LOOKS:
            return f"the engine core was stopped for {timeout_s:g} s (--heartbeat-timeout)"
        if min(self._num_silent, self._process.num_idle) >= NUM_LOOKS:
            return (
                f"the engine core did nothing and did not answer for {timeout_s:g} s "
                "(--heartbeat-timeout)"
            )
        if silent_s >= self._config.step_timeout_s:
            return (
                f"the engine core did not answer for {self._config.step_timeout_s:g} s "
                "(--step-timeout)"
            )
        return None
