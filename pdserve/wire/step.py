"""One engine step: what the scheduler asks of the workers, and what they answer."""

from __future__ import annotations

import msgspec

from pdserve.wire.ids import BlockId, RequestId
from pdserve.wire.sampling import SamplingParams, TokenLogprobs
from pdserve.wire.transfer import ConnectorMetadata, Failed


class NewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request the worker does not know (also after preemption): sent whole.

    Attributes:
        output_token_ids: Tokens already output: before a preemption, or taken from a handoff.
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


class WaveStep(msgspec.Struct, frozen=True):
    """One step of a wave: data-parallel engines whose ranks share experts step together.

    Every engine runs the same number of steps in a wave, empty ones where it has no work, and
    all learn in each step whether any of them is unfinished.

    Attributes:
        wave: Number of the wave; the engines of a step are in the same one.
        is_unfinished: Whether this engine needs further steps.
    """

    wave: int
    is_unfinished: bool


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step. A request samples a token when the step reaches the end of its tokens.

    Of `known_ids`, the requests that the worker knows, it has only what changed.

    Attributes:
        step_id: Increases by one per step.
        num_scheduled_tokens: Tokens to compute per request, in batch order; requests
            that only load KV are absent.
        num_computed_tokens: Of each known request, as of the start of this step.
        new_block_ids: Blocks appended to the tables of known requests, by request that got some.
        sampled_token_ids: Tokens each known request sampled since it was last scheduled, if the
            workers do not know them: with several pipeline stages, the first of which does
            not sample. Empty otherwise.
        gone_request_ids: Finished or preempted since the last step: forget them.
        loading_request_ids: Requests whose first tokens the connector loads in this step.
        num_draft_rows: Maximum draft tokens to verify in this step, by request; they have blocks.
            Requests without any are absent.
        wave: If not None, the ranks run the layers that they share with other engines, even if
            this engine has no token to compute.
    """

    step_id: int
    num_scheduled_tokens: dict[RequestId, int]
    new_requests: list[NewRequest] = []
    num_computed_tokens: list[int] = []
    new_block_ids: dict[RequestId, list[BlockId]] = {}
    sampled_token_ids: list[list[int]] = []
    gone_request_ids: list[RequestId] = []
    loading_request_ids: list[RequestId] = []
    num_draft_rows: dict[RequestId, int] = {}
    connector_metadata: ConnectorMetadata | None = None
    wave: WaveStep | None = None

    @property
    def known_ids(self) -> list[RequestId]:
        """Requests of the step that are not new, in its order."""
        new = {each.request_id for each in self.new_requests}
        return [each for each in self.num_scheduled_tokens if each not in new]

    @property
    def num_tokens(self) -> int:
        """Tokens to compute in this step, without drafts."""
        return sum(self.num_scheduled_tokens.values())


class ExpertBalance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How evenly a pipeline stage's experts are loaded, and the cost of this. Totals only grow.

    Ratios compare the busiest ranks' tokens with the mean, summed over the stage's layers.

    Attributes:
        balance_ratio: Ratio for the last window's load with the current placement of experts.
        ratio_before: Ratio for the same load with the placement during that window.
        num_rebalancings: Passes through all layers; until the first, there are no ratios.
        num_moved: Copies of experts that were moved, on all ranks.
        moved_bytes: Bytes of their weights.
        rebalancing_s: Seconds this rank spent rebalancing.
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
        sampled_token_ids: Tokens sampled by each of `request_ids` (those that sampled): one, and
            one more for each accepted token of its draft.
        num_drafted: Computed tokens of each draft, for requests that had one.
        non_finite_ids: Requests whose states or logits of this step are NaN or infinite. All
            their other results are meaningless, and so is the KV that they have written.
        unready_ids: Requests without a token because their grammars' masks are not ready: they
            compute their last token again in the next step.
        spoiled_ids: Requests without a token because, with a draft behind their last one, their
            values are NaN or infinite, which may be the draft's fault: they compute it again
            without one, and what they have written of it is meaningless.
        dead_ends: Requests without a token because none may follow, and why.
        rejected_ids: Requests without a token because their grammars reject their tokens so far.
        failed_loads: Those of the step's `loading_request_ids` that failed on any rank. All
            other results of such a request are meaningless.
        logprobs: For requests that asked for them: one entry per sampled token.
        prompt_logprobs: Logprobs of the prompt tokens computed in this step; the entry
            for prompt position p is produced by the step that computes position p - 1.
        pooled: Vectors of prompts that end in this step, if asked for: fp32, little endian.
        forward_s: Seconds in the model's forward alone.
        is_wave_over: For a step of a wave: whether all engines were finished in it.
        experts: State before this step, if experts are balanced and it has changed.
    """

    step_id: int
    request_ids: list[RequestId] = []
    sampled_token_ids: list[list[int]] = []
    num_drafted: dict[RequestId, int] = {}
    non_finite_ids: list[RequestId] = []
    unready_ids: list[RequestId] = []
    spoiled_ids: list[RequestId] = []
    dead_ends: dict[RequestId, str] = {}
    rejected_ids: list[RequestId] = []
    failed_loads: list[Failed] = []
    logprobs: dict[RequestId, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[RequestId, list[TokenLogprobs]] = {}
    pooled: dict[RequestId, bytes] = {}
    forward_s: float = 0.0
    is_wave_over: bool = False
    experts: ExpertBalance | None = None

    @property
    def ids_without_token(self) -> list[RequestId]:
        """Requests whose tokens end in the step, and that have got none."""
        return [*self.unready_ids, *self.spoiled_ids, *self.dead_ends, *self.rejected_ids]
