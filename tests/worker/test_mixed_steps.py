"""Random requests of every kind, in random steps on a recorded device: the tokens of each alone.

What runs alone runs on a CPU, prompt first and then token by token: no graph, no padding, no draft,
no preemption, nothing ahead. Embeddings of some tokens are NaN, among them the one that padding
has, so that whatever touches padding, or a request that has such a token, is lost as well.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pdserve.config.speculative import SpeculativeConfig
from pdserve.connectors.base import KVConnectorScheduler
from pdserve.engine.core import EngineCore
from pdserve.kernels.backend import REFERENCE
from pdserve.kernels.registry import kernels_on
from pdserve.models.weights import DummyWeights
from pdserve.observe.clock import ManualClock
from pdserve.text.grammar import GrammarCompiler
from pdserve.text.load import load_text
from pdserve.wire.ids import RequestId
from pdserve.wire.request import GenerateRequest
from pdserve.wire.sampling import Grammar, Pooling
from pdserve.worker.device import HostDevice
from pdserve.worker.graphs import decode_sizes
from tests.models.decoding import load
from tests.scheduler.invariants import assert_nothing_held, check
from tests.tiny_models import write_tokenizer
from tests.worker.capturable import CAPTURABLE
from tests.worker.draft_models import write_eagle, write_pair
from tests.worker.driver import TINY
from tests.worker.held_pool import HeldPool
from tests.worker.recorded_device import RecordedDevice
from tests.worker.test_ahead import AheadExecutor
from tests.worker.test_device_sampler import VOCAB, random_params
from tests.worker.test_graphs import CPU, Engine, Hooks

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.wire.request import EngineOutput
    from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput
    from pdserve.worker.step import LaunchedStep

POISON = [0, 207]
GRAMMARS = ("start: /[a-z]{30}/", 'start: "abcdefg" /[a-z]{3}/ "hijklm" /[0-9]{20}/')


@dataclass
class Told:
    """What is told of a request, which may have been given up."""

    tokens: list[int] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    end: str = ""
    is_given_up: bool = False

    def take(self, output: EngineOutput) -> None:
        self.tokens += output.new_token_ids
        entries = (output.prompt_logprobs or []) + (output.logprobs or [])
        self.numbers += [entry.logprob for entry in entries if entry is not None]
        if output.pooled is not None:
            self.numbers += np.frombuffer(output.pooled, "<f4").tolist()
        if output.finish_reason is not None:
            self.end = output.error_code or output.finish_reason.value

    def is_like(self, other: Told) -> bool:
        if self.is_given_up:
            return self.tokens == other.tokens[: len(self.tokens)]
        is_same = (self.tokens, self.end) == (other.tokens, other.end)
        return is_same and self.numbers == pytest.approx(other.numbers, abs=1e-3)


class WatchedRunner:
    """A runner some of whose steps have hooks. Checks which KV they write, and that it is there."""

    def __init__(self, engine: Engine, pool: HeldPool, rng: random.Random) -> None:
        self.may_follow, self.complete = engine.runner.may_follow, engine.runner.complete
        self._runner, self._kv, self._pool, self._rng = engine.runner, engine.kv, pool, rng
        device = engine.device
        self._seen = device.watch(engine.kv) if isinstance(device, RecordedDevice) else engine.kv
        self._before = engine.kv.clone()
        self._in_flight = 0
        self._blocks_of: dict[RequestId, list[int]] = {}
        self._may_change: set[int] = set()

    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        for new in step.new_requests:
            self._blocks_of[new.request_id] = list(new.block_ids)
        for request_id, blocks in step.new_block_ids.items():
            self._blocks_of[request_id] += blocks
        for request_id in step.num_scheduled_tokens:
            self._may_change.update(self._blocks_of[request_id])
        hooks = Hooks() if not self._in_flight and self._rng.random() < 0.1 else None
        self._in_flight += 1
        launched = self._runner.launch(step, hooks)
        assert hooks is None or len(hooks.calls) == (4 if step.num_scheduled_tokens else 0)
        return launched

    def collect(self, launched: LaunchedStep) -> ModelRunnerOutput:
        output = self._runner.collect(launched)
        self._in_flight -= 1
        if not self._in_flight:
            now, before, seen = (
                kv.view(torch.int32).flatten(1) for kv in (self._kv, self._before, self._seen)
            )
            assert torch.equal(now, seen), "KV that may leave is not computed"
            changed = (now != before).any(1).nonzero().flatten().tolist()
            assert self._may_change.issuperset(changed), "KV of others was written"
            self._before.copy_(self._kv)
            self._may_change.clear()
        if self._rng.random() < 0.7:
            self._pool.do()
            self._runner.finish_step()
        return output


def write_model(directory: Path, **arch: Any) -> Path:
    """Write a tiny model."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**TINY, "vocab_size": VOCAB, **arch}))
    slots = load(directory, load_format="dummy").model.slots()
    source = DummyWeights(seed=0, std=0.25, dtype=torch.float32, identity="")
    weights = {name: tensor.clone() for name, tensor in source.tensors(slots)}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_drafter(directory: Path, method: str) -> tuple[Path, SpeculativeConfig]:
    """Write a tiny model, and what drafts for it by a forward pass."""
    target, draft = write_pair(directory, num_layers=2, vocab_size=VOCAB)
    if method != "draft_model":
        draft = directory / method
        layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]} if method == "eagle3" else {}
        write_eagle(draft, method, vocab_size=VOCAB, **layers)
    return target, SpeculativeConfig(method=method, model=str(draft), num_speculative_tokens=3)


def draw(rng: random.Random, longest: int) -> GenerateRequest:
    """Draw a request, without its id."""
    shared = list(range(20, 70))
    prompt = rng.choices(range(8, 200), k=rng.choice((1, 2, 3, 15, 17, 33, 70)))
    if rng.random() < 0.3:
        prompt = shared[: rng.choice((16, 32, 50))] + prompt
    if rng.random() < 0.3:
        prompt = (prompt[:5] * 8)[: rng.randint(2, 40)]  # for drafts
    if rng.random() < 0.08:
        prompt[rng.randrange(len(prompt))] = rng.choice(POISON)
    sampling = random_params(rng)
    fields: dict[str, Any] = {"max_tokens": rng.choice((1, 5, 9, 30)), "eos_token_ids": (2,)}
    if rng.random() < 0.2:
        fields |= {"stop_token_ids": tuple(rng.sample(range(VOCAB), 30)), "ignore_eos": True}
    if rng.random() < 0.04:
        fields |= {"prompt_logprobs": 1}
    if rng.random() < 0.1:
        fields |= {"grammar": Grammar(text=rng.choice(GRAMMARS)), "allowed_token_ids": None}
        fields |= {"bad_words": (), "max_tokens": 14}
    elif rng.random() < 0.04:
        fields |= {"pooling": rng.choice([*Pooling]), "max_tokens": 1}
    return GenerateRequest(
        request_id=RequestId(""),
        prompt_token_ids=prompt[:longest],
        sampling=msgspec.structs.replace(sampling, **fields),
        arrival_s=0.0,
        prediction_token_ids=rng.choices(range(8, VOCAB), k=6) if rng.random() < 0.2 else [],
    )


def serve(
    engine: Engine,
    pool: HeldPool,
    requests: dict[str, GenerateRequest],
    rng: random.Random,
    config: EngineConfig,
    *,
    num_blocks: int = 80,
    is_alone: bool = False,
) -> tuple[dict[str, Told], Counter[str]]:
    """Run requests that come, and sometimes go, at random; one by one if `is_alone`."""
    runner: Any = SimpleNamespace(runner=WatchedRunner(engine, pool, rng))
    executor = AheadExecutor(runner, rng, 1 if is_alone else 2)
    layout = msgspec.structs.replace(engine.info.layout, num_blocks=num_blocks)
    info: Any = SimpleNamespace(
        layout=layout, max_model_len=256, vocab_size=VOCAB, row_costs=(), draft_cost=0.0
    )
    core = EngineCore(
        executor, KVConnectorScheduler(), ManualClock(), config=config, workers=[info]
    )
    told = {name: Told() for name in requests}
    arriving = list(requests.items())
    scheduler = core.scheduler

    def take(outputs: list[EngineOutput]) -> None:
        for output in outputs:
            told[str(output.request_id)].take(output)

    while arriving or scheduler.num_requests or scheduler.num_in_flight:
        if arriving and (not scheduler.num_requests if is_alone else rng.random() < 0.4):
            name, request = arriving.pop()
            scheduler.add(msgspec.structs.replace(request, request_id=RequestId(name)))
        if not is_alone and rng.random() < 0.01:
            name = rng.choice([*requests])
            scheduler.abort([RequestId(name)])
            told[name].is_given_up = True
        core.step(take)
        check(scheduler)
    assert_nothing_held(scheduler)
    stats = scheduler.stats()
    counts = Counter(
        ahead=executor.num_ahead,
        preempted=stats.num_preemptions,
        accepted=sum(stats.accepted_by_position),
        given_up=sum(each.is_given_up for each in told.values()),
    )
    return told, counts + Counter(each.end for each in told.values())


def serve_all(
    directory: Path,
    seeds: range,
    *,
    scheduler: SchedulerConfig,
    speculative: SpeculativeConfig | None = None,
    num_requests: int = 12,
    on_host: bool = False,
) -> Counter[str]:
    """Serve the requests of each seed together and alone, and count what happened.

    Args:
        on_host: Serve them on this CPU, by its kernels.

    Raises:
        AssertionError: Something else was told of a request.
    """
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory, VOCAB)
    pool = HeldPool(lambda: GrammarCompiler(load_text(ModelConfig(model=str(directory)))))
    kernels = kernels_on(CPU) if on_host else REFERENCE
    host = Engine(
        directory, HostDevice(CPU), kernels=kernels, scheduler=most(1, 256), grammars=pool
    )
    engine = Engine(
        directory,
        HostDevice(CPU) if on_host else RecordedDevice(),
        kernels=kernels if on_host else CAPTURABLE,
        scheduler=scheduler,
        speculative=speculative,
        grammars=pool,
    )
    longest = 256 if scheduler.enable_chunked_prefill else scheduler.max_num_batched_tokens
    total: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        requests = {f"{seed} {i}": draw(rng, longest) for i in range(num_requests)}
        alone = config_of(most(1, 256), None, caches=False)
        wanted, _ = serve(host, pool, requests, rng, alone, is_alone=True)
        together = config_of(scheduler, speculative, caches=rng.random() < 0.5)
        num_blocks = rng.choice((10, 14, 80))
        told, counts = serve(engine, pool, requests, rng, together, num_blocks=num_blocks)
        for name, request in requests.items():
            assert told[name].is_like(wanted[name]), (name, request, told[name], wanted[name])
        total += counts
    pool.close()
    if not on_host:
        total["replayed prompts"] = sum(size not in decode_sizes(99) for size in engine.replayed)
    return total


def config_of(
    scheduler: SchedulerConfig, speculative: SpeculativeConfig | None, *, caches: bool
) -> EngineConfig:
    """Return what a core must know of an engine."""
    return EngineConfig(
        model=ModelConfig(model="m"),
        cache=CacheConfig(enable_prefix_caching=caches),
        scheduler=scheduler,
        speculative=speculative or SpeculativeConfig(),
    )


def most(max_num_seqs: int, max_num_batched_tokens: int, **fields: Any) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, **fields
    )


BY_ONE = most(3, 7, long_prefill_token_threshold=1)
NGRAM = SpeculativeConfig(
    method="ngram", num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=5
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheduler", "speculative", "num_requests"),
    [(most(3, 17), None, 12), (most(3, 17), NGRAM, 12), (BY_ONE, None, 5)],
    ids=["", "drafts", "prompts token by token"],
)
def test_requests_in_mixed_steps_get_the_tokens_that_they_get_alone(
    tmp_path: Path,
    scheduler: SchedulerConfig,
    speculative: SpeculativeConfig | None,
    num_requests: int,
) -> None:
    counts = serve_all(
        write_model(tmp_path / "m"),
        range(1),
        scheduler=scheduler,
        speculative=speculative,
        num_requests=num_requests,
    )
    assert counts["replayed prompts"] > 9, counts
    assert counts["ahead"] > 9 or counts["accepted"], counts


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("scheduler", "speculative", "arch"),
    [
        (most(4, 40), None, {}),
        (most(4, 40), NGRAM, {}),
        (most(1, 33), NGRAM, {}),
        (most(1, 1), None, {}),
        (BY_ONE, NGRAM, {}),
        (most(3, 7), None, {}),
        (most(20, 13), None, {}),
        (most(18, 50), None, {}),
        (most(5, 130, enable_chunked_prefill=False), NGRAM, {}),
        (most(6, 21), SpeculativeConfig(method="suffix"), {}),
        (most(4, 40), None, {"architectures": ["MistralForCausalLM"], "sliding_window": 19}),
    ],
)
def test_so_they_do_in_many_engines(
    tmp_path: Path,
    scheduler: SchedulerConfig,
    speculative: SpeculativeConfig | None,
    arch: dict[str, Any],
) -> None:
    directory = write_model(tmp_path / "m", **arch)
    assert serve_all(directory, range(10), scheduler=scheduler, speculative=speculative)


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_so_they_do_where_a_forward_pass_drafts(tmp_path: Path, method: str) -> None:
    directory, speculative = write_drafter(tmp_path, method)
    counts = serve_all(directory, range(10), scheduler=most(4, 40), speculative=speculative)
    assert counts["replayed prompts"], counts


@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_so_they_do_on_a_host_where_a_draft_may_be_nan(tmp_path: Path, method: str) -> None:
    directory, speculative = write_drafter(tmp_path, method)
    assert serve_all(
        directory, range(3), scheduler=most(4, 40), speculative=speculative, on_host=True
    )["accepted"]
