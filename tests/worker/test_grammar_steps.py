"""A runner whose grammars are late: rows sit out, also in steps that were planned before."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

from pdserve.config.schema import EngineConfig, ModelConfig, SchedulerConfig
from pdserve.kernels.registry import kernels_on
from pdserve.models.registry import load_model
from pdserve.parallel.group import World
from pdserve.text.grammar import GrammarCompiler
from pdserve.text.load import load_text
from pdserve.wire.sampling import Grammar
from pdserve.worker import kv_memory
from pdserve.worker.device import device_of
from pdserve.worker.model_runner import ModelRunner
from tests.tiny_models import write_tokenizer
from tests.worker.driver import TINY, Driver, params
from tests.worker.held_pool import HeldPool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pdserve.wire.step import ModelRunnerOutput

CPU = torch.device("cpu")
VOCAB = 300
BOUND = params(
    temperature=1.0, seed=3, eos_token_ids=(2,), grammar=Grammar(text="start: /[a-z]{40}/")
)


class Engine(Driver):
    """A driver of a runner with one pool of grammars."""

    def __init__(self, directory: Path) -> None:
        (directory / "config.json").write_text(json.dumps({**TINY, "vocab_size": VOCAB}))
        write_tokenizer(directory, VOCAB)
        model = ModelConfig(model=str(directory), load_format="dummy")
        config = EngineConfig(
            model=model, scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=128)
        )
        kernels = kernels_on(CPU, lambda _: None)
        loaded = load_model(config, CPU, kernels, World.alone(), lambda _: None)
        layout = kv_memory.layout_of_block(
            loaded.arch, loaded.dtype, 16, num_layers=2, num_kv_heads=2
        )
        layout = msgspec.structs.replace(layout, num_blocks=40)
        self.pool = HeldPool(lambda: GrammarCompiler(load_text(model)))
        runner = ModelRunner(
            loaded,
            kv_memory.allocate(layout, CPU),
            config,
            device=device_of(CPU),
            world=World.alone(),
            grammars=self.pool,
        )
        super().__init__(runner, SimpleNamespace(layout=layout))  # type: ignore[arg-type]

    def step_planned_early(self, name: str, num_tokens: dict[str, int]) -> ModelRunnerOutput:
        """A step that was planned when `name` seemed to have a token more."""
        self._num_computed[name] += 1
        output = self.step(num_tokens)
        self._num_computed[name] -= 1
        return output

    def known(self) -> None:
        """Let the pool do what it has, and wait until it has."""
        self.pool.release()
        time.sleep(0.02)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    yield made
    made.pool.close()


def test_a_row_that_sat_out_gets_the_token_that_it_would_have_got(engine: Engine) -> None:
    prompt = list(range(3, 30))
    for name in ("late", "prompt"):
        engine.add(name, prompt, BOUND)
    engine.add("free", prompt, params(temperature=1.0, seed=4))
    output = engine.step({"late": 27, "prompt": 27, "free": 27})
    assert output.unready_ids == ["late", "prompt"]
    assert output.request_ids == ["free"]
    output = engine.step_planned_early("late", {"late": 1, "free": 1})
    assert output.unready_ids == ["late"]
    engine.known()
    output = engine.step_planned_early("late", {"late": 1, "prompt": 1, "free": 1})
    while output.unready_ids:
        engine.known()
        output = engine.step(dict.fromkeys(output.unready_ids, 1))
    for _ in range(6):
        engine.known()
        for name in ("late", "prompt"):
            while engine.step({name: 1}).unready_ids:
                engine.known()
    assert engine.outputs["late"] == engine.outputs["prompt"]
    assert len(set(engine.outputs["late"])) > 2
