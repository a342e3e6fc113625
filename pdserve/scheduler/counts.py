"""Counters of a scheduler: they only grow, and each label is there from the start."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING

from pdserve.scheduler.ladder import Remedy
from pdserve.wire.request import STEP_TOKEN_BOUNDS
from pdserve.wire.transfer import KVMode, LeaseEnd, LoadFailure

if TYPE_CHECKING:
    from pdserve.scheduler.request import Request
    from pdserve.wire.transfer import Received


class Counters:
    """The counters of one scheduler; see `EngineStats` for what each means.

    Args:
        max_drafted: Tokens of a draft, at most.
    """

    def __init__(self, *, max_drafted: int) -> None:
        self.preemptions = 0
        self.generation_tokens = 0
        self.prompt_tokens = 0
        self.local_compute_tokens = 0
        self.local_cache_hit_tokens = 0
        self.external_kv_tokens = 0
        self.kv_bytes = 0
        self.kv_descriptors = 0
        self.recompute_tokens = 0
        self.forward_s = 0.0
        self.steps_by_tokens = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self.step_tokens = 0
        self.corrupted = 0
        self.drafts = 0
        self.draft_tokens = 0
        self.accepted_by_position = [0] * max_drafted
        self.sat_out = 0
        self.load_failures = Counter({each.value: 0 for each in LoadFailure})
        self.lease_ends = Counter({each.value: 0 for each in LeaseEnd})
        self.loads = Counter({each.value: 0 for each in KVMode})
        self.ladder = Counter({each.value: 0 for each in Remedy})
        self.faults: Counter[str] = Counter()
        self._kv_seconds = {"wait": 0.0, "transfer": 0.0, "digest": 0.0}

    @property
    def kv_seconds(self) -> dict[str, float]:
        """Seconds, summed over the loads that arrived; digest is a part of transfer."""
        return dict(self._kv_seconds)

    def step(self, num_tokens: int, forward_s: float) -> None:
        """Count a step that has come back; one without tokens computed nothing."""
        self.forward_s += forward_s
        if num_tokens:
            self.steps_by_tokens[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1
            self.step_tokens += num_tokens

    def draft(self, num_tokens: int, num_accepted: int) -> None:
        """Count a draft that was verified, of which so many tokens were right."""
        self.drafts += 1
        self.draft_tokens += num_tokens
        for position in range(num_accepted):
            self.accepted_by_position[position] += 1

    def prompt(self, request: Request, *, num_hit: int, num_external: int) -> None:
        """Count a prompt whose KV is here or being computed, in the request as well.

        Only once for each request, however often it is preempted.
        """
        if request.num_preemptions:
            return
        num_prompt = len(request.prompt_token_ids)
        num_hit = min(num_hit, num_prompt)
        num_external = min(num_external, num_prompt - num_hit)  # outputs may come with it
        request.count_prompt(num_hit, num_external)
        self.prompt_tokens += num_prompt
        self.local_cache_hit_tokens += num_hit
        self.external_kv_tokens += num_external
        self.local_compute_tokens += num_prompt - num_hit - num_external

    def loaded(self, received: Received) -> None:
        """Count a load that is complete."""
        self.kv_bytes += received.num_bytes
        self.kv_descriptors += received.num_descriptors
        self.loads[received.mode.value] += 1
        self._kv_seconds["wait"] += received.wait_s
        self._kv_seconds["transfer"] += received.transfer_s
        self._kv_seconds["digest"] += received.digest_s

    def count_failure(self, reason: LoadFailure) -> None:
        """Count a load that failed."""
        self.load_failures[reason.value] += 1

    def count_remedy(self, remedy: Remedy) -> None:
        """Count a remedy that was chosen for a request."""
        self.ladder[remedy.value] += 1
