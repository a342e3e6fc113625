"""A decode step of the Llama-3.1-8B shape: its bits, and its share of what reading it must take.

The model is the engine's own decoder over the device's kernels. A step is launched kernel by kernel
(*eager*), and captured once and replayed (*graph*); beside it stands the same step in plain torch.
A step's share is that of the time in which its weights and KV are read at the rate of a copy.
"""

from __future__ import annotations

import gc
import itertools
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.llama import ARCH, Rows, StepBytes, layers_of, make_kv, make_model
from benchmarks.gpu.plain_step import PlainStep
from benchmarks.gpu.runner_step import ASKED, NUM_BESIDE, PROMPTS, RunnerBench
from benchmarks.gpu.timing import DEVICE, IS_DRY, Experiments, sized, time_eager, time_in_graph
from pdserve.kernels.reference import sampling as reference
from pdserve.kernels.reference.sampling import Draws
from pdserve.kernels.registry import kernels_on
from pdserve.kernels.step import StepInputs

BATCHES = sized((1, 8, 64), dry=(1, 3))
CONTEXTS = sized((128, 2048), dry=(17, 64))
PROMPT = sized(300, dry=40)
LONG_PROMPT = sized(2000, dry=60)
NUM_TOKENS = sized(12, dry=4)
CHUNKS = sized((1, 63, 64, 100), dry=(1, 15, 16))


def run(limit_s: float) -> dict[str, Any]:
    """Run everything; a dry run has no graphs."""
    experiments = Experiments("step", limit_s)
    told = _Told()
    with torch.inference_mode():
        copied = experiments.run("copy", _copy_rate)
        bytes_per_us = copied["bytes_per_us"] if copied else 3.0e6
        engines: list[Engine] = []

        def build() -> dict[str, Any]:
            engines.append(Engine())
            return {"seconds": engines[0].seconds, "kernels": engines[0].kernels}

        experiments.run("model", build)
        if engines:
            engine = engines.pop()
            _measure(engine, experiments, bytes_per_us)
            _measure_runner(engine, experiments)
            del engine
        experiments.run("run as the reference", lambda: told.messages)
        gc.collect()
        if not IS_DRY:
            torch.cuda.empty_cache()
        _measure_plain(experiments, bytes_per_us)
    return experiments.results


class Engine:
    """The model, its pool of KV, and steps over both.

    Attributes:
        seconds: That it took to make them.
    """

    def __init__(self) -> None:
        began = time.perf_counter()
        self.rows = Rows(BATCHES[-1], max(*CONTEXTS, LONG_PROMPT + NUM_TOKENS), DEVICE)
        self.model = make_model(DEVICE)
        self.kv = make_kv(self.rows.num_blocks, DEVICE)
        self._layers = layers_of(self.kv)
        self.sampling = kernels_on(DEVICE).sampling
        _wait()
        self.seconds = round(time.perf_counter() - began, 1)

    @property
    def kernels(self) -> str:
        """Where they are, and on which device."""
        gib = torch.cuda.memory_allocated() / (1 << 30) if not IS_DRY else 0.0
        return f"{DEVICE}, {gib:.1f} GiB allocated"

    def step(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Return logits, `[T, vocab_size]`, and the likeliest tokens, `[T]`."""
        logits = self.model.logits(self.model.forward(inputs, self._layers))
        return logits, self.sampling.largest(logits)[0]

    def last(self, inputs: StepInputs) -> Tensor:
        """Return the logits of the last token, `[vocab_size]`."""
        return self.model.logits(self.model.forward(inputs, self._layers)[-1:])[0]

    def generate(self, prompt: Tensor, chunks: tuple[int, ...]) -> tuple[list[int], list[Tensor]]:
        """Compute a prompt in chunks, the last one the rest, then tokens one by one.

        Returns:
            Tokens, and the logits each was chosen from.
        """
        tokens, at, logits = prompt, 0, prompt.new_empty(0)
        for size in (*chunks, len(prompt) - sum(chunks)):
            logits = self.last(self.rows.chunk(0, tokens[at : at + size], at))
            at += size
        seen = [logits]
        while len(seen) < NUM_TOKENS:
            chosen = int(seen[-1].argmax())
            tokens = torch.cat([tokens, torch.tensor([chosen])])
            seen.append(self.last(self.rows.chunk(0, tokens[at:], at)))
            at += 1
        return [int(each.argmax()) for each in seen], seen


class Graph:
    """One step, captured; its results are rewritten by each replay."""

    def __init__(self, step: Callable[[], tuple[Tensor, Tensor]]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles what is not compiled yet
            step()
            step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.logits, self.tokens = step()
        self.replay = self._graph.replay

    def close(self) -> None:
        """Give its memory back."""
        self._graph.reset()


def _measure(engine: Engine, experiments: Experiments, bytes_per_us: float) -> None:
    experiments.run("prompt in chunks, then decode", lambda: _chunks(engine))
    experiments.run("decode beside a prompt's chunk", lambda: _mixed(engine))
    # Before the rest, as it rewrites KV that eager steps and graphs both read.
    experiments.run(f"prompt of {LONG_PROMPT}", lambda: _long_prompt(engine))
    shapes = [(batch, context) for context in CONTEXTS for batch in BATCHES]
    eager: dict[tuple[int, int], Tensor] = {}

    def run_eager(batch: int, context: int) -> dict[str, Any]:
        inputs = engine.rows.decode(batch, context)
        found = _timed(lambda: engine.step(inputs), StepBytes.of(batch, context), bytes_per_us)
        eager[batch, context] = engine.step(inputs)[0].clone()
        found["row 0 as alone"] = torch.equal(
            eager[batch, context][0], eager[BATCHES[0], context][0]
        )
        return found

    for batch, context in shapes:
        experiments.run(
            f"eager B={batch} context={context}", lambda b=batch, c=context: run_eager(b, c)
        )
    for batch in (BATCHES[0], BATCHES[-1]):
        experiments.run(f"sampling B={batch}", lambda b=batch: _sampling(engine, b))
    if IS_DRY:
        return
    if experiments.run("graph with padding", lambda: _padded(engine)) is None:
        return  # what cannot be captured once cannot be captured at all

    def run_graph(batch: int, context: int) -> dict[str, Any]:
        inputs = engine.rows.decode(batch, context)
        graph = Graph(lambda: engine.step(inputs))
        found = _timed(graph.replay, StepBytes.of(batch, context), bytes_per_us)
        wanted = eager[batch, context]
        found["logits as eager"] = torch.equal(graph.logits, wanted)
        found["tokens as eager"] = torch.equal(graph.tokens, engine.sampling.largest(wanted)[0])
        graph.close()
        return found

    for batch, context in shapes:
        experiments.run(
            f"graph B={batch} context={context}", lambda b=batch, c=context: run_graph(b, c)
        )
    for batch in (BATCHES[0], BATCHES[-1]):
        experiments.run(
            f"kernels B={batch} context={CONTEXTS[-1]}", lambda b=batch: _kernels(engine, b)
        )


def _measure_runner(engine: Engine, experiments: Experiments) -> None:
    """Run steps through the model runner, as an engine does, and some of them without graphs."""
    benches: list[RunnerBench] = []

    def build(*, has_graphs: bool = True) -> dict[str, Any]:
        rows, max_num_rows = engine.rows, BATCHES[-1]
        bench = RunnerBench(engine.model, engine.kv, rows, max_num_rows, has_graphs=has_graphs)
        benches.append(bench)
        return {"warm-up": bench.warm_up_s, "has graphs": bench.has_graphs}

    def measure_prompts(named: str) -> None:
        for num_tokens, beside in itertools.product(PROMPTS, (0, NUM_BESIDE)):
            experiments.run(
                f"{named} prompt of {num_tokens} beside {beside}",
                lambda n=num_tokens, b=beside: benches[-1].run_prompts(n, b),
            )

    experiments.run("runner", build)
    for batch in BATCHES if benches else ():
        for name, sampling in ASKED.items():
            experiments.run(
                f"runner B={batch} {name}", lambda b=batch, s=sampling: benches[0].run(b, s)
            )
    if benches:
        measure_prompts("runner")
        experiments.run("runner, launched", lambda: build(has_graphs=False))
        measure_prompts("runner, launched,")


def _chunks(engine: Engine) -> dict[str, Any]:
    """Compute one prompt in several ways, and all its tokens at once: are bits and tokens equal?"""
    prompt = engine.rows.prompt(0, PROMPT)
    tokens, logits = engine.generate(prompt, ())
    cut_tokens, cut_logits = engine.generate(prompt, CHUNKS)
    whole = torch.cat([prompt, torch.tensor(tokens[:-1])])
    at_once, chosen = engine.step(engine.rows.chunk(0, whole, 0))
    return {
        "tokens": tokens,
        "tokens in chunks are equal": tokens == cut_tokens,
        "logits in chunks are equal": all(map(torch.equal, logits, cut_logits)),
        "tokens at once are equal": chosen[PROMPT - 1 :].tolist() == tokens,
        "logits at once are equal": all(map(torch.equal, logits, at_once[PROMPT - 1 :])),
        "largest difference": max(
            float((a - b).abs().max()) for a, b in zip(logits, at_once[PROMPT - 1 :], strict=True)
        ),
    }


def _mixed(engine: Engine) -> dict[str, Any]:
    """Compute rows alone, then together with a chunk of another row's prompt."""
    context, batch = CONTEXTS[0], BATCHES[1] - 1
    alone, _ = engine.step(engine.rows.decode(batch, context))
    alone = alone.clone()
    prompt = engine.rows.prompt(batch, PROMPT)
    chunk = engine.last(engine.rows.chunk(batch, prompt, 0)).clone()
    together, _ = engine.step(engine.rows.mixed(batch, context, prompt))
    return {
        "decode rows are equal": torch.equal(together[:batch], alone),
        "the chunk's last row is equal": torch.equal(together[-1], chunk),
    }


def _padded(engine: Engine) -> dict[str, Any]:
    """Replay a graph with more rows than requests: theirs are eager's bits, and KV is untouched."""
    batch, context = 3, CONTEXTS[0]
    wanted = engine.step(engine.rows.decode(batch, context))[0].clone()
    inputs = engine.rows.decode(batch, context, padding=1)
    graph = Graph(lambda: engine.step(inputs))
    before = engine.kv[0].clone()
    graph.replay()
    found = {
        "rows are equal": torch.equal(graph.logits[:batch], wanted),
        "block 0 is untouched": torch.equal(engine.kv[0], before),
    }
    graph.close()
    return found


def _long_prompt(engine: Engine) -> dict[str, Any]:
    inputs = engine.rows.chunk(0, engine.rows.prompt(0, LONG_PROMPT), 0)
    timing = time_eager(lambda _: engine.last(inputs), budget_s=1.0)
    weights = StepBytes.of(0, 0).weights // 2 - ARCH.vocab_size * ARCH.hidden_size
    attention = 2 * ARCH.num_layers * ARCH.num_heads * ARCH.head_dim * LONG_PROMPT**2
    return timing.row(tflop_per_s=timing.tflop_per_s(2 * weights * LONG_PROMPT + attention))


def _sampling(engine: Engine, batch: int) -> dict[str, Any]:
    """Time the choice of tokens, and compare it with the reference's."""
    logits = torch.randn(batch, ARCH.vocab_size, device=DEVICE) * 3
    whole, rows = 1 << 53, torch.arange(batch, device=DEVICE)
    draws = Draws(
        rows=rows.int(),
        scale=torch.full_like(rows, 1.6, dtype=torch.float32),
        min_p=torch.zeros(batch, device=DEVICE),
        top_k=torch.full_like(rows, 50, dtype=torch.int32),
        top_p=torch.full_like(rows, int(0.9 * whole)),
        uniform=(torch.rand(batch, device=DEVICE, dtype=torch.float64) * whole).long(),
    )
    largest, draw = engine.sampling.largest, engine.sampling.draw
    tokens, peaks = largest(logits)
    found: dict[str, Any] = {
        "largest": time_in_graph(lambda _: largest(logits)).us,
        "likeliest are the reference's": torch.equal(tokens, reference.largest(logits)[0]),
    }
    for by_k in (False, True):
        for by_p in (False, True):
            name = "drawn" + " by k" * by_k + " by p" * by_p
            asked = draws._replace(
                top_k=draws.top_k * by_k,
                top_p=draws.top_p if by_p else torch.full_like(rows, whole),
            )

            def run(_: int, asked: Draws = asked, by_k: bool = by_k, by_p: bool = by_p) -> None:
                draw(logits, peaks, asked, tokens, by_k=by_k, by_p=by_p)

            run(0)
            wanted = tokens.clone()
            reference.draw(logits, peaks, asked, wanted, by_k=by_k, by_p=by_p)
            found[f"{name}: as the reference, of {batch}"] = int((tokens == wanted).sum())
            found[name] = time_in_graph(run).us
    return found


def _kernels(engine: Engine, batch: int) -> list[tuple[str, int, float]]:
    """Microseconds of each kernel of one replay, with how often it ran; most first."""
    inputs = engine.rows.decode(batch, CONTEXTS[-1])
    graph = Graph(lambda: engine.step(inputs))
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        graph.replay()
        torch.cuda.synchronize()
    graph.close()
    spent = [
        (event.key[:70], event.count, round(float(event.self_device_time_total), 1))
        for event in profile.key_averages()
    ]
    return sorted(spent, key=lambda each: -each[2])[:20]


def _measure_plain(experiments: Experiments, bytes_per_us: float) -> None:
    made: list[PlainStep] = []
    experiments.run("plain", lambda: made.append(PlainStep(BATCHES[-1], CONTEXTS[-1], DEVICE)))
    if not made:
        return
    plain = made[0]

    def run_plain(batch: int, context: int) -> dict[str, Any]:
        token_ids = torch.arange(batch, device=DEVICE)

        def step() -> tuple[Tensor, Tensor]:
            logits = plain(token_ids, context)
            return logits, logits.argmax(-1)

        size = StepBytes.of(batch, context)
        if IS_DRY:
            return _timed(step, size, bytes_per_us)
        graph = Graph(step)
        found = _timed(graph.replay, size, bytes_per_us)
        graph.close()
        return found

    for context in CONTEXTS:
        for batch in BATCHES:
            experiments.run(
                f"plain graph B={batch} context={context}",
                lambda b=batch, c=context: run_plain(b, c),
            )


def _timed(call: Callable[[], object], size: StepBytes, bytes_per_us: float) -> dict[str, Any]:
    """Time a step on the device, and as the host sees one step after another."""
    timing = time_eager(lambda _: call(), budget_s=0.5)
    walls = []
    for _ in range(sized(10, dry=2)):
        began = time.perf_counter()
        call()
        _wait()
        walls.append((time.perf_counter() - began) * 1e6)
    floor = size.floor_us(bytes_per_us)
    return timing.row(
        wall_us=round(statistics.median(walls), 1),
        floor_us=round(floor, 1),
        share=round(floor / timing.us, 3),
    )


def _copy_rate() -> dict[str, Any]:
    """Bytes read and written in a microsecond by a copy of 2 GiB."""
    source = torch.empty(sized(1 << 30, dry=1 << 16), dtype=torch.bfloat16, device=DEVICE).normal_()
    target = torch.empty_like(source)
    timing = time_eager(lambda _: target.copy_(source))
    return timing.row(bytes_per_us=round(2 * source.nbytes / timing.us, 1))


def _wait() -> None:
    if not IS_DRY:
        torch.cuda.synchronize()


class _Told(logging.Handler):
    """What the registry of kernels says of operations that run as the reference.

    Attributes:
        messages: In order.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger("pdserve.kernels").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
