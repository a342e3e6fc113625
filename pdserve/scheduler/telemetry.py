"""The scheduler's telemetry: statistics, traces of steps, and learned step times.

Recording costs a few microseconds per step (`python -m benchmarks.trace`), learning one or two on
average. Requests are recorded where they end (`state`). Decides nothing and has no clock.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import TYPE_CHECKING, Final

from pdserve.observe.linear_fit import LinearFit
from pdserve.observe.trace import CLOCK_ID
from pdserve.wire.learned import LearnedTimes
from pdserve.wire.request import EngineStats
from pdserve.wire.trace import CountersEvent, SliceEvent, StepEvent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.scheduler.request import Request
    from pdserve.scheduler.state import SchedulerState
    from pdserve.scheduler.steps import Step
    from pdserve.wire.ids import RequestId
    from pdserve.wire.step import ExpertBalance, ModelRunnerOutput
    from pdserve.wire.trace import EngineRequest
    from pdserve.wire.transfer import ConnectorReport

SAMPLE_INTERVAL_S = 0.01
"""Time between two samples of the counters while there are requests."""


_MIN_SAMPLES: Final = 5
"""Samples from which a fit is reported: those of several engines together are enough sooner."""
_NUM_EACH: Final = 64
"""First steps of either kind, all of which are learned from."""
_EVERY_S: Final = 0.2
"""Time between two steps that are learned from, after those."""
_REPORT_S: Final = 1.0
"""Time between two updates of the report, unless a fit has twice as many samples."""


class Telemetry:
    """Reads `state`, and fills its recorder.

    Args:
        is_reported: Whether the times of steps are reported to proxies. They are not learned with
            several stages or drafts: a step is not the time between two tokens there.
    """

    def __init__(self, state: SchedulerState, *, is_reported: bool) -> None:
        self._state = state
        self._recorder = state.recorder
        self._is_pipelined = state.dimensions.num_stages > 1
        is_plain = not self._is_pipelined and not state.dimensions.max_drafted
        self._learner = StepLearner() if is_reported and is_plain else None
        self._last_retired_s = self._sampled_s = float("-inf")
        self._experts: ExpertBalance | None = None
        self._last_sample: tuple[dict[str, int], dict[str, int], int] | None = None

    def step(self, step: Step, result: ModelRunnerOutput, now_s: float) -> None:
        """Record a step that has come back, if it had tokens.

        A step that was submitted while another one ran began when that one ended.
        """
        if step.num_computed_after:
            submitted_s, last_s = step.submitted_s, self._last_retired_s
            begun_s = submitted_s if self._is_pipelined or submitted_s > last_s else last_s
            if self._learner is not None:
                self._learner.step(step, self._state.requests, now_s - begun_s, now_s)
            self._recorder.add(
                StepEvent(
                    now_s,
                    begun_s,
                    submitted_s,
                    step.step_id,
                    len(step.num_computed_after),
                    step.num_prefill_tokens,
                    step.num_decode_tokens,
                    result.forward_s,
                )
            )
        self._last_retired_s = now_s
        if result.experts is not None:
            self._experts = result.experts

    def ranks(self, report: ConnectorReport, now_s: float) -> None:
        """Record what ranks' threads did, unless it was timed by another machine's clock."""
        if report.clock_id == CLOCK_ID:
            for each in report.slices:
                start_s, end_s, track = each.start_s, each.end_s, each.track
                self._recorder.add(SliceEvent(now_s, start_s, track, each.name, each.facts, end_s))

    def sample(self, now_s: float) -> None:
        """Record the counters if they have changed: at intervals, and when no request is left.

        Call this whenever they may have changed.
        """
        state = self._state
        if now_s - self._sampled_s < SAMPLE_INTERVAL_S and state.requests:
            return
        self._sampled_s = now_s
        receiving = state.receiving
        num_bytes = 0
        if receiving:
            num_tokens = sum(request.num_external_tokens for request in receiving.values())
            num_bytes = num_tokens * state.dimensions.kv_bytes_per_token
        blocks = state.kv.ledger.blocks_by_state()
        requests = {
            "waiting": len(state.waiting),
            "receiving": len(receiving),
            "running": len(state.running),
            "leased": len(state.leased),
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

    def stats(self) -> EngineStats:
        """Return a snapshot."""
        state = self._state
        counters = state.counters
        counts = counters.copied()
        counts["kv_faults"] = dict(counters.kv_faults + Counter(state.connector.faults))
        return EngineStats(
            num_running=len(state.running),
            num_waiting=len(state.waiting),
            num_receiving=len(state.receiving),
            num_prompts=len(state.prompts),
            blocks=state.kv.ledger.blocks_by_state(),
            num_blocks=state.kv.pool.num_blocks,
            num_steps=state.steps.num_built,
            prefix_cache_queries=counters.prompt_tokens,
            prefix_cache_hits=counters.local_cache_hit_tokens,
            experts=self._experts,
            kv_store=copy.copy(state.connector.store_stats),
            kv_source_tokens=dict(state.connector.num_loaded),
            **counts,
        )

    def learned(self, now_s: float) -> LearnedTimes | None:
        """Return the times of steps to report to proxies; None: nothing to report."""
        return None if self._learner is None else self._learner.report(now_s)

    def requests(self, now_s: float) -> list[EngineRequest]:
        """Return the trace, until now, of each request that is not forgotten yet."""
        return [request.traced(now_s) for request in self._state.requests.values()]


class StepLearner:
    """Fits of the times of prompts and steps: to every step at first, then to occasional ones.

    A request that computes one token is a stream, whatever that token is; one that computes more
    is a prompt, or a part of one.
    """

    def __init__(self) -> None:
        self._prompts = LinearFit(3, min_samples=_MIN_SAMPLES)
        self._steps = LinearFit(3, min_samples=_MIN_SAMPLES)
        self._due_s = self._reported_s = float("-inf")
        self._next_prompts = self._next_steps = _MIN_SAMPLES
        self._report: LearnedTimes | None = None

    def step(
        self, step: Step, requests: Mapping[RequestId, Request], seconds: float, now_s: float
    ) -> None:
        """Learn from a step that has come back, if one is due."""
        after = step.num_computed_after
        is_of_streams = step.num_prefill_tokens + step.num_decode_tokens == len(after)
        fit = self._steps if is_of_streams else self._prompts
        if now_s < self._due_s and fit.num_samples >= _NUM_EACH:
            return
        if step.loading:
            return  # the step has waited for its loads
        self._due_s = now_s + _EVERY_S
        if is_of_streams:
            fit.learn((1.0, float(len(after)), float(sum(after.values()))), seconds)
            return
        num_streams = kv_tokens = num_prompts = num_tokens = 0
        pairs = 0.0
        for request_id, num in step.num_tokens.items():
            num_after = after[request_id]
            if num == 1:
                num_streams += 1
                kv_tokens += num_after
                continue
            request = requests.get(request_id)
            num_prompts += request is None or num_after >= len(request.prompt_token_ids)
            num_tokens += num
            pairs += num * (num_after - num / 2)
        if num_streams:
            if not self._steps.is_known:
                return
            seconds -= self._steps.predict((1.0, float(num_streams), float(kv_tokens)))
        if seconds > 0:
            fit.learn((float(num_prompts), float(num_tokens), pairs), seconds)

    def report(self, now_s: float) -> LearnedTimes | None:
        """Return the current report; None while nothing is known."""
        num_prompts, num_steps = self._prompts.num_samples, self._steps.num_samples
        knows_more = num_prompts >= self._next_prompts or num_steps >= self._next_steps
        if knows_more or (self._report is not None and now_s - self._reported_s >= _REPORT_S):
            self._next_prompts = max(_MIN_SAMPLES, 2 * num_prompts)
            self._next_steps = max(_MIN_SAMPLES, 2 * num_steps)
            self._reported_s = now_s
            self._report = LearnedTimes(self._prompts.sums, self._steps.sums)
        return self._report
