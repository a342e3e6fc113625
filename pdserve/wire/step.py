"""One engine step: what the scheduler asks of the workers, and what they answer."""

from __future__ import annotations

import msgspec

from pdserve.wire.ids import BlockId, RequestId
from pdserve.wire.sampling import SamplingParams, TokenLogprobs
from pdserve.wire.transfer import ConnectorMetadata, Failed


class NewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request the worker does not know (also after preemption): sent whole.

    Attributes:
        output_token_ids: Tokens already out: after a preemption, or taken from a handoff.
        prediction_token_ids, cache_salt: See `GenerateRequest`.
        block_ids: Its whole block table.
        num_computed_tokens: Tokens whose KV the blocks hold before this step.
    """

    request_id: RequestId
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling: SamplingParams
    block_ids: list[BlockId]
    num_computed_tokens: int
    prediction_token_ids: list[int] = []
    cache_salt: str = ""


class KnownRequests(msgspec.Struct, frozen=True, kw_only=True):
    """Requests the worker knows, as columns: only what changed.

    Attributes:
        new_block_ids: Blocks appended to each request's table.
        num_computed_tokens: As of the start of this step.
        sampled_token_ids: What each request sampled since it was last scheduled, where the
            workers do not know it: with several pipeline stages, the first of which does not
            sample. Empty otherwise.
    """

    request_ids: list[RequestId] = []
    new_block_ids: list[list[BlockId]] = []
    num_computed_tokens: list[int] = []
    sampled_token_ids: list[list[int]] = []


class WaveStep(msgspec.Struct, frozen=True):
    """One step of a wave: data-parallel engines whose ranks share experts step together.

    Every engine runs equally many steps of a wave, empty ones where it has no work, and all
    learn in each step whether any of them is unfinished.

    Attributes:
        wave: Its number; the engines of a step are in the same one.
        is_unfinished: Whether this engine needs further steps.
    """

    wave: int
    is_unfinished: bool


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One step. A request samples a token when the step reaches the end of its tokens.

    Attributes:
        step_id: Increases by one per step.
        num_scheduled_tokens: Tokens to compute per request, in batch order; requests
            that only load KV are absent.
        gone_request_ids: Finished or preempted since the last step: forget them.
        loading_request_ids: Those whose first tokens the connector loads inside this step.
        num_draft_rows: Maximum draft tokens to verify in this step, which have blocks, by request;
            requests without any are absent.
        wave: Not None: the ranks run the layers that they share with other engines, even if
            there is no token here.
    """

    step_id: int
    new_requests: list[NewRequest]
    known_requests: KnownRequests
    num_scheduled_tokens: dict[RequestId, int]
    gone_request_ids: list[RequestId]
    loading_request_ids: list[RequestId] = []
    num_draft_rows: dict[RequestId, int] = {}
    connector_metadata: ConnectorMetadata | None = None
    wave: WaveStep | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens to compute in this step, without drafts."""
        return sum(self.num_scheduled_tokens.values())


class ExpertBalance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How evenly the experts of a pipeline stage are loaded, and what that cost. Totals only grow.

    Ratios are of the busiest ranks' tokens to the mean, summed over the stage's layers.

    Attributes:
        balance_ratio: Under the last window's load, as the experts lie now.
        ratio_before: Under the same load, as they lay in that window.
        num_rebalancings: Each through all layers; until the first, there are no ratios.
        num_moved: Copies of experts that were moved, on all ranks.
        moved_bytes: Their weights.
        rebalancing_s: Seconds this rank spent on it.
        longest_s: Maximum of these seconds after one step.
    """

    balance_ratio: float = 1.0
    ratio_before: float = 1.0
    num_rebalancings: int = 0
    num_moved: int = 0
    moved_bytes: int = 0
    rebalancing_s: float = 0.0
    longest_s: float = 0.0


class ModelRunnerOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step's results, in columns.

    Attributes:
        sampled_token_ids: What each of `request_ids` (those that sampled) has sampled: one token,
            and one more for each token of its draft that was right.
        num_drafted: Tokens of each draft that was computed, for requests that had one.
        non_finite_ids: Requests whose states or logits of this step are NaN or infinite. Nothing
            else that is said of them means anything, nor does the KV that they have written.
        unready_ids: Requests without a token because their grammars' masks are not ready: they
            compute their last token again in the next step.
        dead_ends: Requests without a token because none may follow, and why.
        rejected_ids: Requests without a token because their grammars do not allow those they have.
        failed_loads: Of the step's `loading_request_ids`, on whichever rank. What else is said of
            such a request means nothing.
        logprobs: For requests that asked for them: one entry per sampled token.
        prompt_logprobs: Logprobs of the prompt tokens computed in this step; the entry
            for prompt position p is produced by the step that computes position p - 1.
        pooled: Vectors of prompts that end in this step, where they are asked for: fp32, little
            endian.
        forward_s: Seconds in the model's forward alone.
        is_wave_over: For a step of a wave: no engine was unfinished in it.
        experts: As of before this step, where experts are balanced and it has changed.
    """

    step_id: int
    request_ids: list[RequestId] = []
    sampled_token_ids: list[list[int]] = []
    num_drafted: dict[RequestId, int] = {}
    non_finite_ids: list[RequestId] = []
    unready_ids: list[RequestId] = []
    dead_ends: dict[RequestId, str] = {}
    rejected_ids: list[RequestId] = []
    failed_loads: list[Failed] = []
    logprobs: dict[RequestId, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[RequestId, list[TokenLogprobs]] = {}
    pooled: dict[RequestId, bytes] = {}
    forward_s: float = 0.0
    is_wave_over: bool = False
    experts: ExpertBalance | None = None
