"""A scheduler small enough to read: it drives a worker step by step, as a test says."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.parallel.place import RankPlace
from pdserve.wire.ids import BlockId, EngineId, Incarnation, RequestId
from pdserve.wire.sampling import SamplingParams
from pdserve.wire.step import ModelRunnerOutput, NewRequest, SchedulerOutput
from pdserve.worker.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdserve.config.schema import EngineConfig
    from pdserve.worker.info import WorkerInfo

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "dtype": "float32",
}

GREEDY = SamplingParams(max_tokens=100, seed=0, temperature=0.0)


def params(**fields: Any) -> SamplingParams:
    """`GREEDY` with other fields."""
    return msgspec.structs.replace(GREEDY, **fields)


@contextmanager
def workers() -> Iterator[Callable[[EngineConfig], Driver]]:
    """Start workers of one rank, each with a driver; they are closed at the end."""
    started: list[Worker] = []

    def start(config: EngineConfig) -> Driver:
        worker = Worker(
            config,
            place=RankPlace(),
            incarnation=Incarnation("life"),
            engine_id=EngineId("engine"),
            wake=lambda: None,
            progress=lambda _: None,
        )
        started.append(worker)
        return Driver(worker, worker.start())

    try:
        yield start
    finally:
        for worker in started:
            worker.close(1.0)


class Driver:
    """Requests of one worker: their tokens, their blocks, and the steps that compute them."""

    def __init__(self, worker: Worker, info: WorkerInfo) -> None:
        self.worker = worker
        self.info = info
        self.tokens: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self._num_computed: dict[str, int] = {}
        self._blocks: dict[str, list[BlockId]] = {}
        self._waiting: dict[str, tuple[list[int], list[int], SamplingParams]] = {}
        # Taken from the end: block ids fall while positions rise.
        self._free = [BlockId(i) for i in range(info.layout.num_blocks)]
        self._gone: list[RequestId] = []
        self._step_id = 0

    def add(
        self,
        name: str,
        prompt: list[int],
        sampling: SamplingParams = GREEDY,
        outputs: list[int] | None = None,
    ) -> None:
        """A request arrives, perhaps with tokens that are out already."""
        self.outputs[name] = list(outputs or [])
        self.tokens[name] = prompt + self.outputs[name]
        self._num_computed[name] = 0
        self._blocks[name] = []
        self._waiting[name] = (prompt, list(self.outputs[name]), sampling)

    def drop(self, name: str) -> None:
        """A request is gone; the next step says so."""
        self._gone.append(RequestId(name))
        self._free += self._blocks.pop(name)
        del self.tokens[name], self._num_computed[name]

    def step(
        self, num_tokens: dict[str, int], rows: dict[str, int] | None = None
    ) -> ModelRunnerOutput:
        """Compute so many tokens of each request, and take what was sampled.

        Args:
            rows: For drafts behind them.
        """
        output = self.worker.execute(self.plan(num_tokens, rows))
        self.take(output)
        return output

    def take(self, output: ModelRunnerOutput) -> None:
        """Take what was sampled in a step."""
        for name in (*output.unready_ids, *output.spoiled_ids):
            self._num_computed[name] -= 1
        for name, tokens in zip(output.request_ids, output.sampled_token_ids, strict=True):
            self.tokens[name] += tokens
            self.outputs[name] += tokens
            self._num_computed[name] += len(tokens) - 1

    def plan(
        self, num_tokens: dict[str, int], rows: dict[str, int] | None = None
    ) -> SchedulerOutput:
        """Return the step that computes so many tokens of each request: they count from here on."""
        rows = rows or {}
        new, known = [], []
        for name, num in num_tokens.items():
            end = self._num_computed[name] + num + rows.get(name, 0)
            lacking = -(-end // self.info.layout.block_size) - len(self._blocks[name])
            fresh = [self._free.pop() for _ in range(max(0, lacking))]
            self._blocks[name] += fresh
            if name in self._waiting:
                prompt, outputs, sampling = self._waiting.pop(name)
                new.append(
                    NewRequest(
                        request_id=RequestId(name),
                        prompt_token_ids=prompt,
                        output_token_ids=outputs,
                        sampling=sampling,
                        block_ids=list(self._blocks[name]),
                        num_computed_tokens=0,
                    )
                )
            else:
                known.append((RequestId(name), fresh, self._num_computed[name]))
            self._num_computed[name] += num
        gone, self._gone = self._gone, []
        self._step_id += 1
        return SchedulerOutput(
            step_id=self._step_id,
            new_requests=new,
            new_block_ids={name: fresh for name, fresh, _ in known if fresh},
            num_computed_tokens=[computed for *_, computed in known],
            num_scheduled_tokens={RequestId(n): t for n, t in num_tokens.items()},
            num_draft_rows={RequestId(n): t for n, t in rows.items()},
            gone_request_ids=gone,
        )

    def take_back(self, name: str) -> None:
        """A request has sampled nothing: its last token is computed again."""
        self._num_computed[name] -= 1

    def remaining(self, name: str) -> int:
        """Tokens of a request that are not computed."""
        return len(self.tokens[name]) - self._num_computed[name]

    def run(self, name: str, num_outputs: int, *, chunk: int = 10_000) -> list[int]:
        """Compute one request alone, `chunk` tokens a step at most, and return its outputs."""
        while len(self.outputs[name]) < num_outputs:
            self.step({name: min(chunk, self.remaining(name))})
        return self.outputs[name]
