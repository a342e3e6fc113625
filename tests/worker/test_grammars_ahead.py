"""Steps whose tokens grammars rule are given to a device before those they depend on have come."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from pdserve.config.schema import ModelConfig
from pdserve.errors import InternalError
from pdserve.text.grammar import GrammarCompiler
from pdserve.text.load import load_text
from pdserve.wire.sampling import Grammar
from pdserve.worker import device_sampler
from pdserve.worker.device import HostDevice
from pdserve.worker.grammar import GrammarPool
from tests.tiny_models import write_tokenizer
from tests.worker.driver import params
from tests.worker.recorded_device import RecordedDevice
from tests.worker.test_ahead import PLAIN, AheadExecutor, generate
from tests.worker.test_graphs import CPU, Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pdserve.wire.sampling import SamplingParams
    from pdserve.worker.device import Device

VOCAB = 211
GRAMMARS = ("start: /[a-f]{4,30}/", 'start: ("ab" | "ac" | "b")+ "z"', "start: /[a-c]{2}/")


class LatePool(GrammarPool):
    """A pool whose threads sleep before some of their work."""

    def submit(self, work: Callable[[], None], *, is_slow: bool = False) -> None:
        rng = random.Random(threading.get_ident() ^ time.monotonic_ns())

        def late() -> None:
            if rng.random() < 0.4:
                time.sleep(rng.random() * 0.01)
            work()

        super().submit(late, is_slow=is_slow)


def bound(index: int, **fields: object) -> SamplingParams:
    asked = {"temperature": 1.5 * (index % 4 != 0), "seed": index, "eos_token_ids": (2,)}
    grammar = Grammar(text=GRAMMARS[index % len(GRAMMARS)])
    return params(**(asked | {"grammar": grammar, "max_tokens": 20} | fields))


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Callable[[type[GrammarPool]], GrammarPool]]:
    """Makes pools, which are closed in the end."""
    write_tokenizer(tmp_path, VOCAB)
    text = load_text(ModelConfig(model=str(tmp_path)))
    made: list[GrammarPool] = []

    def make(kind: type[GrammarPool]) -> GrammarPool:
        made.append(kind(lambda: GrammarCompiler(text)))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def played(
    directory: Path,
    device: Device,
    pool: GrammarPool,
    asked: list[SamplingParams],
    *,
    in_flight: int,
    abort: str = "",
    num_blocks: int = 40,
) -> tuple[dict[str, list[int]], AheadExecutor, int]:
    engine = Engine(directory, device, grammars=pool)
    return generate(engine, asked, max_in_flight=in_flight, abort=abort, num_blocks=num_blocks)


@pytest.mark.slow
def test_masks_hold_no_step_up_and_tokens_are_those_of_a_host_that_waits(
    tmp_path: Path, pools: Callable[[type[GrammarPool]], GrammarPool]
) -> None:
    asked = [bound(i) for i in range(6)] + [msgspec.structs.replace(PLAIN[1], max_tokens=15)]
    wanted, *_ = played(tmp_path, HostDevice(CPU), pools(GrammarPool), asked, in_flight=1)
    found, executor, _ = played(tmp_path, RecordedDevice(), pools(GrammarPool), asked, in_flight=2)
    assert found == wanted
    assert executor.num_ahead > 5
    assert any(tokens[-1] == 2 for tokens in wanted.values()), "some end behind steps in vain"
    assert any(len(tokens) == 20 for tokens in wanted.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in (1, 2, 3))]
)
def test_rows_whose_masks_are_late_get_their_tokens_later_and_the_same(
    tmp_path: Path,
    pools: Callable[[type[GrammarPool]], GrammarPool],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    asked = [bound(i + seed) for i in range(6)] + [msgspec.structs.replace(PLAIN[2], max_tokens=25)]
    wanted, *_ = played(tmp_path, HostDevice(CPU), pools(GrammarPool), asked, in_flight=1)
    monkeypatch.setattr(device_sampler, "PATIENCE_S", 0.0005)
    found, executor, _ = played(tmp_path, RecordedDevice(), pools(LatePool), asked, in_flight=2)
    assert found == wanted
    assert executor.num_ahead
    assert executor.num_sat_out


@pytest.mark.slow
def test_requests_with_grammars_are_preempted_and_given_up_amid_steps_ahead(
    tmp_path: Path, pools: Callable[[type[GrammarPool]], GrammarPool]
) -> None:
    letters = Grammar(text="start: /[a-f]{36}/")
    asked = [bound(i, grammar=letters, max_tokens=36) for i in range(6)]
    wanted, *_ = played(tmp_path, HostDevice(CPU), pools(GrammarPool), asked, in_flight=1)
    found, executor, num_preempted = played(
        tmp_path, RecordedDevice(), pools(LatePool), asked, in_flight=2, num_blocks=8
    )
    assert found == wanted
    assert num_preempted
    assert executor.num_ahead
    found, *_ = played(tmp_path, RecordedDevice(), pools(LatePool), asked, in_flight=2, abort="r5")
    cut = found.pop("r5")
    assert cut == wanted.pop("r5")[: len(cut)]
    assert found == wanted


def test_a_grammar_beside_other_rules_is_waited_for(
    tmp_path: Path, pools: Callable[[type[GrammarPool]], GrammarPool]
) -> None:
    asked = [bound(0), bound(1, logit_bias={70: 3.0}), bound(2, frequency_penalty=0.5)]
    wanted, *_ = played(tmp_path, HostDevice(CPU), pools(GrammarPool), asked, in_flight=1)
    found, *_ = played(tmp_path, RecordedDevice(), pools(GrammarPool), asked, in_flight=2)
    assert found == wanted


def test_masks_of_all_rows_come_in_one_copy_and_not_before_the_tokens_they_follow(
    tmp_path: Path,
    pools: Callable[[type[GrammarPool]], GrammarPool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_sampler, "PATIENCE_S", 30.0)
    pool, device = pools(GrammarPool), RecordedDevice()
    pool.compiled(GRAMMARS[0])
    engine = Engine(tmp_path, device, grammars=pool)
    for name in ("a", "b", "c"):
        engine.add(name, [5], bound(0))
    every = dict.fromkeys(("a", "b", "c"), 1)
    before = engine.runner.launch(engine.plan(every))
    step = engine.plan(every)
    assert engine.runner.may_follow(step)
    device.copies.clear()
    behind = engine.runner.launch(step)
    assert not behind.is_over
    num_inputs = len(device.copies)
    with pytest.raises(InternalError, match="not collected"):
        engine.runner.complete()
    first = engine.runner.collect(before)
    engine.runner.complete()
    masks, tokens = device.copies[num_inputs:]
    assert masks == 3 * (2 + -(-VOCAB // 32)) * 4
    assert tokens == 3 * 8
    second = engine.runner.collect(behind)
    assert not first.unready_ids
    assert not second.unready_ids
    assert first.sampled_token_ids == [first.sampled_token_ids[0]] * 3
    assert second.sampled_token_ids == [second.sampled_token_ids[0]] * 3


def test_a_prompt_that_is_computed_token_by_token_beside_a_grammar_is_waited_for(
    tmp_path: Path,
    pools: Callable[[type[GrammarPool]], GrammarPool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_sampler, "PATIENCE_S", 30.0)
    engine = Engine(tmp_path, RecordedDevice(), grammars=pools(GrammarPool))
    engine.add("ruled", [5], bound(0))
    launched = engine.runner.launch(engine.plan({"ruled": 1}))
    engine.add("prompt", [1, 2, 3])
    for follows in (False, False, True, True):
        step = engine.plan({"ruled": 1, "prompt": 1})
        assert engine.runner.may_follow(step) is follows
        behind = engine.runner.launch(step) if follows else None
        engine.runner.collect(launched)
        launched = behind or engine.runner.launch(step)
