"""The scheduler's outputs for clients, kept until they are fetched, and its counters."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING, Any

from pdserve.scheduler.ladder import Remedy
from pdserve.wire.request import STEP_TOKEN_BOUNDS, EngineOutput, FinishReason
from pdserve.wire.transfer import KVMode, LeaseEnd, LoadFailure

if TYPE_CHECKING:
    from pdserve.scheduler.request import Request
    from pdserve.wire.ids import RequestId
    from pdserve.wire.request import ErrorCode
    from pdserve.wire.sampling import TokenLogprobs
    from pdserve.wire.transfer import Received

_NUM_OUTPUTS_WITH_STAGES = 2  # at D, the first token has no stages of its own


class OutputBuffer:
    """A buffer of outputs; those of one request keep their order."""

    def __init__(self) -> None:
        self._outputs: list[EngineOutput] = []
        self._beginning: set[RequestId] = set()

    def drain(self) -> list[EngineOutput]:
        """Return all outputs since the last call, those of requests that have just begun first.

        Passing an output on takes a fraction of a millisecond: that is nothing between two tokens
        of a stream, but a large part of what can still be saved for a first token.
        """
        outputs, self._outputs = self._outputs, []
        beginning, self._beginning = self._beginning, set()
        if beginning:
            outputs.sort(key=lambda output: output.request_id not in beginning)
        return outputs

    def tokens(
        self,
        request: Request,
        num_tokens: int,
        logprobs: list[TokenLogprobs] | None,
        *,
        prompt_logprobs: list[TokenLogprobs | None] | None = None,
        pooled: bytes | None = None,
        finish: FinishReason | None,
        stop_reason: int | None,
    ) -> None:
        """Add the newest output tokens of `request`, and its handoff if it ends as HANDOFF.

        Args:
            logprobs: Logprobs of at least `num_tokens` tokens.
        """
        is_last = finish is not None
        num_before = len(request.output_token_ids) - num_tokens
        is_beginning = num_before < _NUM_OUTPUTS_WITH_STAGES
        has_stages = is_last or is_beginning
        drafts = request.drafts
        if is_beginning:
            self._beginning.add(request.request_id)
        self._outputs.append(
            EngineOutput(
                request_id=request.request_id,
                new_token_ids=request.output_token_ids[num_before:],
                logprobs=None if logprobs is None else logprobs[:num_tokens],
                prompt_logprobs=prompt_logprobs,
                pooled=pooled,
                finish_reason=finish,
                stop_reason=stop_reason,
                handoff=request.handoff if finish is FinishReason.HANDOFF else None,
                num_cached_tokens=request.num_cached_prompt_tokens,
                num_computed_tokens=_num_computed(request) if has_stages else 0,
                stages=request.times.stages() if has_stages else None,
                load_failures=request.load_failures if has_stages else [],
                kv_mode="" if request.kv_mode is None else request.kv_mode.value,
                num_preemptions=request.num_preemptions if is_last else 0,
                num_drafted=0 if drafts is None else drafts.num_drafted,
                num_accepted=0 if drafts is None else drafts.num_accepted,
            )
        )

    def handed_over(
        self,
        request: Request,
        logprobs: TokenLogprobs | None,
        *,
        finish: FinishReason | None,
        stop_reason: int | None,
    ) -> None:
        """Add the newest output token of `request`, which another engine sampled."""
        self._outputs.append(
            EngineOutput(
                request_id=request.request_id,
                new_token_ids=[request.output_token_ids[-1]],
                logprobs=None if logprobs is None else [logprobs],
                finish_reason=finish,
                stop_reason=stop_reason,
                num_cached_tokens=request.num_cached_prompt_tokens,
                kv_mode="" if request.kv_mode is None else request.kv_mode.value,
            )
        )

    def error(
        self,
        request_id: RequestId,
        why: str,
        code: ErrorCode | None = None,
        *,
        retry_after_s: float | None = None,
        load_failures: list[str] | None = None,
    ) -> None:
        """Add the error that ends a request, or that refuses one."""
        self._outputs.append(
            EngineOutput(
                request_id=request_id,
                finish_reason=FinishReason.ERROR,
                error=why,
                error_code="" if code is None else code.value,
                retry_after_s=retry_after_s,
                load_failures=load_failures or [],
            )
        )

    def abort(self, request: Request, why: str) -> None:
        """Add the end of a `request` that lacked only the time to be served."""
        self._outputs.append(
            EngineOutput(request_id=request.request_id, finish_reason=FinishReason.ABORT, error=why)
        )


def _num_computed(request: Request) -> int:
    """Return the prompt tokens whose KV was computed here for `request`."""
    if request.kv_mode is not None:
        return 0
    return max(0, len(request.prompt_token_ids) - request.num_cached_tokens)


class Counters:
    """Counters that only grow, with each label from the start; see `EngineStats` for meanings.

    Args:
        max_drafted: Maximum tokens of a draft.
    """

    def __init__(self, *, max_drafted: int) -> None:
        self.num_preemptions = 0
        self.generation_tokens = 0
        self.prompt_tokens = 0
        self.local_compute_tokens = 0
        self.local_cache_hit_tokens = 0
        self.external_kv_tokens = 0
        self.peer_kv_tokens = 0
        self.kv_bytes_received = 0
        self.kv_descriptors = 0
        self.recompute_tokens = 0
        self.forward_s = 0.0
        self.steps_by_tokens = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self.num_step_tokens = 0
        self.num_corrupted = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.accepted_by_position = [0] * max_drafted
        self.num_sat_out = 0
        self.kv_load_failures = Counter({each.value: 0 for each in LoadFailure})
        self.lease_ends = Counter({each.value: 0 for each in LeaseEnd})
        self.kv_loads = Counter({each.value: 0 for each in KVMode})
        self.kv_ladder = Counter({each.value: 0 for each in Remedy})
        self.kv_faults: Counter[str] = Counter()
        self.kv_seconds = {"wait": 0.0, "transfer": 0.0, "digest": 0.0}

    def copied(self) -> dict[str, Any]:
        """Return their current values by their names in `EngineStats`."""
        return vars(self) | {
            "steps_by_tokens": self.steps_by_tokens.copy(),
            "accepted_by_position": self.accepted_by_position.copy(),
            "kv_load_failures": dict(self.kv_load_failures),
            "lease_ends": dict(self.lease_ends),
            "kv_loads": dict(self.kv_loads),
            "kv_ladder": dict(self.kv_ladder),
            "kv_seconds": self.kv_seconds.copy(),
        }

    def step(self, num_tokens: int, forward_s: float) -> None:
        """Count a step that has come back; one without tokens computed nothing."""
        self.forward_s += forward_s
        if num_tokens:
            self.steps_by_tokens[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1
            self.num_step_tokens += num_tokens

    def draft(self, num_tokens: int, num_accepted: int) -> None:
        """Count a verified draft, whose first `num_accepted` tokens were right."""
        self.num_drafts += 1
        self.num_draft_tokens += num_tokens
        for position in range(num_accepted):
            self.accepted_by_position[position] += 1

    def prompt(self, request: Request, *, num_hit: int, num_external: int) -> None:
        """Count a prompt whose KV is here or being computed, also in `request`.

        Counts each request only once, however often it is preempted.
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
        if request.kv_mode is not None:
            self.peer_kv_tokens += num_external
        self.local_compute_tokens += num_prompt - num_hit - num_external

    def loaded(self, received: Received) -> None:
        """Count a completed load."""
        self.kv_bytes_received += received.num_bytes
        self.kv_descriptors += received.num_descriptors
        self.kv_loads[received.mode.value] += 1
        self.kv_seconds["wait"] += received.wait_s
        self.kv_seconds["transfer"] += received.transfer_s
        self.kv_seconds["digest"] += received.digest_s

    def count_preemption(self) -> None:
        """Count a request that has lost its blocks."""
        self.num_preemptions += 1

    def count_failure(self, reason: LoadFailure) -> None:
        """Count a load that failed."""
        self.kv_load_failures[reason.value] += 1

    def count_remedy(self, remedy: Remedy) -> None:
        """Count a remedy that was chosen for a request."""
        self.kv_ladder[remedy.value] += 1
