"""Steps through the engine's own model runner: what one costs, host and all.

Requests come with KV that is there already, and each step computes a token of every one, and maybe
a prompt beside them. Between steps nothing waits; the time is that from one step's call to the next
one's.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.gpu.llama import ARCH, DTYPE, MAX_POSITIONS
from benchmarks.gpu.timing import DEVICE, sized
from pdserve.config.schema import EngineConfig, ModelConfig, SchedulerConfig
from pdserve.kernels.registry import kernels_on
from pdserve.models.registry import LoadedModel
from pdserve.parallel.group import World
from pdserve.wire.ids import BlockId, RequestId
from pdserve.wire.sampling import SamplingParams
from pdserve.wire.step import NewRequest, SchedulerOutput
from pdserve.worker.device import device_of
from pdserve.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.gpu.llama import Rows
    from pdserve.models.decoder import Decoder
    from pdserve.wire.step import ModelRunnerOutput

CONTEXT = sized(1024, dry=20)
NUM_STEPS = sized(60, dry=5)
NUM_PROMPTS = sized(12, dry=3)
PROMPTS = sized((16, 64, 100, 128, 256, 300, 512, 700, 1000), dry=(16, 40))
NUM_BESIDE = sized(8, dry=1)
"""Requests that decode beside a prompt."""
_GREEDY = SamplingParams(max_tokens=NUM_STEPS, seed=0, temperature=0.0)
ASKED = {
    "greedy": _GREEDY,
    "drawn": msgspec.structs.replace(_GREEDY, temperature=0.8),
    "drawn, top_p": msgspec.structs.replace(_GREEDY, temperature=0.8, top_p=0.9),
    "penalties": msgspec.structs.replace(_GREEDY, frequency_penalty=0.5),
}


class RunnerBench:
    """A model runner over a model and a pool of KV.

    Attributes:
        warm_up_s: Seconds that its warm-up took.
        has_graphs: Whether it replays.
    """

    def __init__(
        self,
        model: Decoder,
        kv: Tensor,
        rows: Rows,
        max_num_rows: int,
        *,
        has_graphs: bool = True,
    ) -> None:
        self._rows = rows
        self._step_id = 0
        self._gone: list[RequestId] = []
        loaded = LoadedModel(
            model,
            ARCH,
            DTYPE,
            MAX_POSITIONS,
            weights_digest="",
            layers=range(ARCH.num_layers),
            num_kv_heads=ARCH.num_kv_heads,
            vocab=model.vocab,
            experts=None,
            sampling=kernels_on(DEVICE).sampling,
        )
        self._runner = ModelRunner(
            loaded,
            kv,
            EngineConfig(
                model=ModelConfig(model="m"),
                scheduler=SchedulerConfig(max_num_seqs=max_num_rows, max_num_batched_tokens=2048),
            ),
            device=device_of(DEVICE, has_graphs=has_graphs),
            world=World.alone(),
        )
        began = time.perf_counter()
        self._runner.rehearse(print)
        self._runner.capture(print)
        self.warm_up_s = round(time.perf_counter() - began, 1)
        self.has_graphs = self._runner.runs_ahead

    def run(self, batch: int, sampling: SamplingParams) -> dict[str, Any]:
        """Decode `batch` rows; microseconds of a step, and of the part in which the host waits."""
        names = [RequestId(f"{batch} {sampling.temperature} {row}") for row in range(batch)]
        new = [self._request(name, row, sampling) for row, name in enumerate(names)]
        computed: list[int] = []
        walls, waits = [], []
        tokens: list[int] = []
        for at in range(CONTEXT, CONTEXT + NUM_STEPS):
            output, wall_us = self._step(new, computed, dict.fromkeys(names, 1))
            walls.append(wall_us)
            waits.append(output.forward_s * 1e6)
            tokens.append(output.sampled_token_ids[0][0])
            new, computed = [], [at] * batch
        self._gone += names
        return {
            "us": round(statistics.median(walls), 1),
            "forward_us": round(statistics.median(waits), 1),
            "worst_us": round(max(walls[2:]), 1),
            "tokens_per_s": round(batch / statistics.median(walls) * 1e6, 1),
            "tokens": tokens[:8],
        }

    def run_prompts(self, num_tokens: int, num_beside: int) -> dict[str, Any]:
        """Compute prompts, one a step, beside rows that decode; microseconds of a step.

        Args:
            num_tokens: Of each prompt.
            num_beside: Rows that decode.
        """
        names = [RequestId(f"{num_tokens} beside {row}") for row in range(num_beside)]
        new = [self._request(name, row, _GREEDY) for row, name in enumerate(names)]
        computed: list[int] = []
        walls: list[float] = []
        tokens: list[int] = []
        for number in range(NUM_PROMPTS):
            name = RequestId(f"prompt {number} of {num_tokens} beside {num_beside}")
            prompt = self._request(name, num_beside, _GREEDY, num_tokens)
            scheduled = dict.fromkeys(names, 1) | {name: num_tokens}
            output, wall_us = self._step([*new, prompt], computed, scheduled)
            walls.append(wall_us)
            tokens += [each for (each,) in output.sampled_token_ids]
            self._gone.append(name)
            new, computed = [], [CONTEXT + number] * num_beside
        self._gone += names
        return {
            "us": round(statistics.median(walls), 1),
            "worst_us": round(max(walls[2:]), 1),
            "tokens": tokens[: 2 * (num_beside + 1)],
        }

    def _request(
        self, name: RequestId, row: int, sampling: SamplingParams, num_new: int = 1
    ) -> NewRequest:
        """Return a request of one row, which computes its last `num_new` tokens."""
        num_tokens = CONTEXT if num_new == 1 else num_new
        return NewRequest(
            request_id=name,
            prompt_token_ids=self._rows.prompt(row, num_tokens).tolist(),
            output_token_ids=[],
            sampling=msgspec.structs.replace(sampling, seed=row),
            block_ids=[BlockId(block) for block in self._rows.blocks(row)],
            num_computed_tokens=num_tokens - num_new,
        )

    def _step(
        self, new: list[NewRequest], computed: list[int], scheduled: dict[RequestId, int]
    ) -> tuple[ModelRunnerOutput, float]:
        """Run a step; return what it put out, and its microseconds."""
        gone, self._gone = self._gone, []
        self._step_id += 1
        step = SchedulerOutput(
            step_id=self._step_id,
            new_requests=new,
            num_computed_tokens=computed,
            num_scheduled_tokens=scheduled,
            gone_request_ids=gone,
        )
        began = time.perf_counter()
        output = self._runner.execute(step)
        wall_us = (time.perf_counter() - began) * 1e6
        assert not output.non_finite_ids, output.non_finite_ids
        return output, wall_us
