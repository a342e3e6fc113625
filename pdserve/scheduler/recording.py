"""What a scheduler records for traces: its steps, and how full everything is.

Costs a few microseconds a step (`python -m benchmarks.trace`). Requests are recorded where they
leave (`roster`). Decides nothing and has no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.observe.trace import CLOCK_ID
from pdserve.wire.trace import CountersEvent, SliceEvent, StepEvent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.kvcache.manager import KVCacheManager
    from pdserve.observe.trace import Recorder
    from pdserve.scheduler.inflight import Step
    from pdserve.scheduler.roster import Roster
    from pdserve.wire.transfer import ConnectorReport

SAMPLE_INTERVAL_S = 0.01
"""Between two looks at the counters while there are requests."""


class Recording:
    """Fills `recorder`.

    Args:
        kv_bytes_per_token: To count what is on its way here.
        is_pipelined: Steps run at the same time.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        roster: Roster,
        kv: KVCacheManager,
        kv_bytes_per_token: int,
        is_pipelined: bool,
    ) -> None:
        self._recorder = recorder
        self._roster = roster
        self._ledger = kv.ledger
        self._kv_bytes_per_token = kv_bytes_per_token
        self._is_pipelined = is_pipelined
        self._last_retired_s = self._sampled_s = float("-inf")
        self._last_sample: tuple[dict[str, int], dict[str, int], int] | None = None

    def step(self, step: Step, forward_s: float, now_s: float) -> None:
        """A step has come back; one without tokens leaves no trace.

        One that was submitted while another ran began after that.
        """
        if step.num_computed_after:
            submitted_s, last_s = step.submitted_s, self._last_retired_s
            self._recorder.add(
                StepEvent(
                    now_s,
                    submitted_s if self._is_pipelined or submitted_s > last_s else last_s,
                    submitted_s,
                    step.step_id,
                    len(step.num_computed_after),
                    step.num_prefill_tokens,
                    step.num_decode_tokens,
                    forward_s,
                )
            )
        self._last_retired_s = now_s

    def ranks(self, report: ConnectorReport, now_s: float) -> None:
        """What threads of ranks did; those by another machine's clock say nothing here."""
        if report.clock_id == CLOCK_ID:
            for each in report.slices:
                start_s, end_s, track = each.start_s, each.end_s, each.track
                self._recorder.add(SliceEvent(now_s, start_s, track, each.name, each.facts, end_s))

    def sample(self, now_s: float) -> None:
        """Record the counters if they have changed: every so often, and when all is quiet."""
        roster = self._roster
        if now_s - self._sampled_s < SAMPLE_INTERVAL_S and roster.requests:
            return
        self._sampled_s = now_s
        receiving = roster.receiving
        num_bytes = 0
        if receiving:
            num_tokens = sum(request.num_external_tokens for request in receiving.values())
            num_bytes = num_tokens * self._kv_bytes_per_token
        blocks = self._ledger.blocks_by_state()
        requests = {
            "waiting": len(roster.waiting),
            "receiving": len(receiving),
            "running": len(roster.running),
            "leased": len(roster.leased),
        }
        sample = (requests, blocks, num_bytes)
        if sample == self._last_sample:
            return
        self._last_sample = sample
        counters: dict[str, Mapping[str, float]] = {
            "requests": requests,
            "KV blocks": blocks,
            "KV in flight": {"bytes": num_bytes},
        }
        self._recorder.add(CountersEvent(now_s, counters))
