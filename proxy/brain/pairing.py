"""The joint decision as routing asks for it, with what it has learned and what it has decided.

Learns from every request that ended well: how long its prompt took, how far apart its tokens were,
how long its KV was on the way. Until it knows enough, the other policies decide.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from pdserve.proxy.brain.decision import PairCandidate, decide
from pdserve.proxy.brain.ledger import WorkLedger
from pdserve.proxy.brain.model import ServiceModel
from pdserve.proxy.story import Mode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pdserve.proxy.backend import Backend
    from pdserve.proxy.brain.decision import PairDecision
    from pdserve.proxy.brain.ledger import LedgerEntry
    from pdserve.proxy.brain.prompt import RoutePrompt
    from pdserve.proxy.story import Story

_NUM_KEPT: Final = 1024
_MIN_GAPS: Final = 4


class Pairing:
    """See the module.

    Args:
        itl_slo_s: The objective for the time between two tokens.

    Attributes:
        model: What it has learned.
        decisions: The last ones, each with the id of its request or none.
    """

    def __init__(self, itl_slo_s: float) -> None:
        self._itl_slo_s = itl_slo_s
        self._ledger = WorkLedger()
        self.model = ServiceModel()
        self.decisions: deque[PairDecision] = deque(maxlen=_NUM_KEPT)

    def decide(
        self,
        prompt: RoutePrompt,
        prefills: Sequence[Backend],
        decodes: Sequence[Backend],
        known: Mapping[str, int],
        may_pair: Callable[[str, str], bool],
    ) -> PairDecision | None:
        """Return the best pair; None until there is enough to decide by.

        Args:
            prefills, decodes: Engines that may take either part; any may do both.
            known: Tokens of the prompt that engines have, by URL.
        """
        if not self.model.is_known or not prompt.num_tokens:
            return None
        urls = {each.url for each in prefills}, {each.url for each in decodes}
        candidates = [
            PairCandidate(
                url,
                is_prefill=url in urls[0],
                is_decode=url in urls[1],
                hit_tokens=min(known.get(url, 0), prompt.num_tokens),
                work=self._ledger.of(url),
            )
            for url in dict.fromkeys(each.url for each in (*prefills, *decodes))
        ]
        decision = decide(
            prompt.num_tokens,
            candidates,
            self.model,
            itl_slo_s=self._itl_slo_s,
            may_pair=may_pair,
        )
        if decision is not None:
            self.decisions.append(decision)
        return decision

    def hold(
        self, engine: Backend, kind: str, prompt: RoutePrompt, num_cached: int
    ) -> AbstractContextManager[LedgerEntry]:
        """Count a leg as work of its engine while the block runs; see `WorkLedger.hold`."""
        return self._ledger.hold(engine.url, kind, prompt.num_tokens, num_cached)

    def learn(self, story: Story) -> None:
        """Take what was measured of a request that has ended well."""
        model, stages = self.model, story.prefill_stages
        model.learn_output(story.num_output_tokens)
        if stages is not None and stages.num_choices == 1 and stages.prefill_s > 0:
            num_computed = stages.prompt_tokens - stages.cached_tokens
            model.learn_prompt(num_computed, stages.cached_tokens, stages.prefill_s)
        gap_s = _gap_s(story)
        if story.stream_work is not None and gap_s is not None:
            model.learn_step(*story.stream_work, gap_s)
        stages, known = story.decode_stages, story.known.get("decode")
        if stages is not None and stages.kv_bytes and known is not None and stages.kv_transfer_s:
            model.learn_wire(stages.prompt_tokens - known.num_tokens, stages.kv_transfer_s)

    def as_json(self) -> dict[str, object]:
        """Return what `/debug/decisions` shows: the newest first."""
        fits = {"prefill": self.model.prefill, "step": self.model.step, "wire": self.model.wire}
        return {
            "is_known": self.model.is_known,
            "mean_output_tokens": round(self.model.mean_output, 1),
            "model": {
                name: {
                    "samples": fit.num_samples,
                    "error": round(fit.error, 4),
                    "weights": fit.weights,
                }
                for name, fit in fits.items()
            },
            "decisions": [each.as_json() for each in reversed(self.decisions)],
        }


def _gap_s(story: Story) -> float | None:
    """How far apart a request's tokens were; None if it does not show.

    Of an answer in one piece it does where the first token came from another engine.
    """
    if len(story.token_gaps) >= _MIN_GAPS:
        return story.token_gaps.median_s
    num, first_s = story.num_output_tokens, story.first_token_s
    is_split = story.mode is Mode.DISAGGREGATED and not story.streamed
    if not is_split or first_s is None or num <= _MIN_GAPS:
        return None
    return (story.clock.monotonic_s() - first_s) / (num - 1)
