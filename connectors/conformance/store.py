"""Tests for every connector that keeps KV for later prompts; they need no peer.

A request computes a prompt, layer by layer, and ends; its blocks are reused as soon as the
connector lets go of them. Another request with the same prompt loads the stored KV: each layer
must be there once `wait_for_layer_load` returns, or all of them when the load is reported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.connectors.conformance.bench import NUM_TOKENS, PROMPT, Bench
from pdserve.connectors.conformance.engines import FIRST_TOKEN
from pdserve.wire.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.connectors.base import Match
    from pdserve.connectors.conformance.engines import Engine, KitRequest

_SEED, _OTHER = 1, 9


class StoreConformance(Bench):
    """One engine saves and loads. `decode_shape` is not used."""

    def test_what_a_prompt_left_is_loaded_and_no_layer_is_read_before_it_is_there(self) -> None:
        p = self.new("P")
        self._save(p)
        num_whole = NUM_TOKENS - NUM_TOKENS % p.block_size
        assert self._load_what_was_saved(p) == num_whole

    def test_only_what_is_not_here_is_loaded(self) -> None:
        p = self.new("P")
        self._save(p)
        request, blocks, here = self._arrive(p), self.p_blocks(1), p.block_size
        p.fill(blocks, _OTHER)
        num_tokens = self._load(p, request, blocks, num_computed=here)
        assert num_tokens == NUM_TOKENS - NUM_TOKENS % p.block_size - here
        assert p.holds(blocks, _OTHER, 0, here)

    def test_a_prompt_has_nothing_of_another_prompt_or_salt(self) -> None:
        p = self.new("P")
        self._save(p)
        other = [*PROMPT[: p.block_size], *([3] * p.block_size)]
        for request, num_tokens in (
            (p.new_request([3, *PROMPT]), 0),
            (p.new_request(PROMPT, cache_salt="another"), 0),
            (p.new_request(other), p.block_size),
        ):
            p.arrive(request)
            assert self._match(p, request).num_tokens == num_tokens

    def test_a_save_that_goes_on_when_its_request_is_aborted_reads_what_was_there(self) -> None:
        p = self.new("P")
        self._save(p, FinishReason.ABORT)
        self._load_what_was_saved(p)

    def test_a_save_that_goes_on_when_its_request_is_preempted_reads_what_was_there(self) -> None:
        p = self.new("P")
        self._save(p, None)
        self._load_what_was_saved(p)

    # --- steps

    def _load_what_was_saved(self, engine: Engine) -> int:
        request, blocks = self._arrive(engine), self.p_blocks(1)
        engine.fill(blocks, _OTHER)
        num_tokens = self._load(engine, request, blocks)
        assert engine.holds(blocks, _SEED, 0, num_tokens)
        return num_tokens

    def _arrive(self, engine: Engine) -> KitRequest:
        request = engine.new_request(PROMPT)
        engine.arrive(request)
        return request

    def _match(self, engine: Engine, request: KitRequest, num_computed: int = 0) -> Match:
        """Return what can be loaded, once the connector knows."""
        ask = engine.scheduler.get_num_new_matched_tokens
        engine.until(lambda: ask(request, num_computed) is not None)
        match = ask(request, num_computed)
        assert match is not None
        return match

    def _save(self, engine: Engine, ending: FinishReason | None = FinishReason.LENGTH) -> None:
        """Compute the prompt in two steps; `None` preempts it. Overwrite its blocks."""
        request, blocks = self._arrive(engine), self.p_blocks(0)
        engine.fill(blocks, _OTHER)
        assert not self._match(engine, request).num_tokens
        table, generations = self.ids(blocks), [1] * len(blocks)
        engine.scheduler.update_state_after_alloc(request, table, 0, generations=generations)
        for start, end in ((0, 24), (24, NUM_TOKENS)):
            engine.compute(request, blocks, start, end, seed=_SEED)
        request.output_token_ids.append(FIRST_TOKEN)
        request.finish_reason = ending
        scheduler = engine.scheduler
        let_go = scheduler.preempted if ending is None else scheduler.request_finished
        hold = let_go(request, table, generations)
        if hold is not None:
            engine.until(lambda: hold.hold_id in [each.nonce for each in engine.settled])
        engine.fill(blocks, _OTHER)

    def _load(
        self, engine: Engine, request: KitRequest, blocks: Sequence[int], num_computed: int = 0
    ) -> int:
        """Load what is stored, checking each layer once it must be there; return the tokens."""
        match, table = self._match(engine, request, num_computed), self.ids(blocks)
        engine.scheduler.update_state_after_alloc(
            request, table, match.num_tokens, generations=[1] * len(table)
        )
        end = num_computed + match.num_tokens
        if match.is_async:
            engine.until(lambda: engine.received)
            assert engine.holds(blocks, _SEED, num_computed, end)
        else:
            start = min(end, NUM_TOKENS - 1)
            loaded = num_computed, end
            engine.compute(request, blocks, start, NUM_TOKENS, seed=_SEED, loaded=loaded)
        return match.num_tokens
