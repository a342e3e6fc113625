"""Tokens that grammars leave no choice of, where several ranks run a step."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from pdserve.config.speculative import SpeculativeConfig
from pdserve.parallel.group import World
from pdserve.parallel.mesh import MeshShape
from pdserve.wire.ids import RequestId
from pdserve.wire.sampling import Grammar
from pdserve.wire.step import NewRequest
from pdserve.worker.drafting.drafts import ForcedTokens
from tests.ranks import run_ranks
from tests.tiny_models import write_tokenizer
from tests.worker.driver import TINY, params
from tests.worker.spread import Requests, config_of, serve

if TYPE_CHECKING:
    from pathlib import Path

KNOWN = {0: [5, 6, 7, 8], 1: [], 2: [9]}


def _ask(world: World) -> list[dict[int, list[int]]]:
    forced = ForcedTokens(KNOWN.__getitem__ if world.tp.is_first else lambda _: [], world.tp)
    for row, grammar in enumerate((Grammar(text="a"), Grammar(text="b"), None, Grammar(text="c"))):
        request = NewRequest(
            request_id=RequestId(str(row)),
            prompt_token_ids=[1],
            output_token_ids=[],
            sampling=params(grammar=grammar),
            block_ids=[],
            num_computed_tokens=0,
        )
        forced.add(row, request)
    forced.remove(3)
    return [forced.of(wanted) for wanted in ({0: 3, 1: 2, 2: 2}, {2: 2, 3: 2}, {1: 1}, {})]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_rank_has_the_forced_tokens_that_the_first_knows(num_ranks: int) -> None:
    found = run_ranks(MeshShape(tp=num_ranks), _ask) if num_ranks > 1 else [_ask(World.alone())]
    assert found == [[{0: [5, 6, 7]}, {}, {}, {}]] * num_ranks


@pytest.mark.slow
def test_two_ranks_put_forced_tokens_out_in_few_steps(tmp_path: Path) -> None:
    arch = {**TINY, "num_hidden_layers": 2, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(arch))
    write_tokenizer(tmp_path, 300)
    text = 'start: "' + "".join(chr(97 + place * 7 % 26) for place in range(80)) + '"'
    sampling = params(temperature=1.0, seed=4, max_tokens=60, grammar=Grammar(text=text))
    requests: Requests = {"r": ([4, 5, 6], sampling)}
    alone = serve(World.alone(), config_of(tmp_path, MeshShape()), requests)
    tp = MeshShape(tp=2)
    drafting = SpeculativeConfig(
        method="ngram", num_speculative_tokens=7, prompt_lookup_min=4, prompt_lookup_max=5
    )
    first, _ = run_ranks(tp, serve, config_of(tmp_path, tp, speculative=drafting), requests)
    assert first.tokens == alone.tokens
    assert first.num_accepted > 0
    assert first.num_steps < alone.num_steps
