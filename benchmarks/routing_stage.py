"""Two real engines for both, a core each, and a proxy for each routing policy before them.

All are alive at once, so that requests can go to one policy after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.deployments import Asker, until_ready
from benchmarks.shapes import SMOLLM2_135M, write_model
from pdserve.bench.datasets.prompts import Segment
from pdserve.bench.endpoint import ask_served, reset_prefix_caches
from pdserve.bench.preparing import plan_of, prompts_of
from pdserve.bench.records import Planned
from pdserve.bench.target import Target
from pdserve.config.boxed import BOXED, boxed_model_dir

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from benchmarks.deployments import Processes
    from pdserve.bench.arrivals import ArrivalLaw
    from pdserve.bench.datasets.prompts import PromptMaker
    from pdserve.bench.endpoint import ServedModel
    from pdserve.bench.records import Outcome
    from pdserve.config.datasets import DatasetConfig

STICKY: Final = ("--policy", "prefix_sticky")
ARMS: Final = {
    "always_split": ((0,), (1,), ()),
    "always_local": ((0, 1), (0, 1), ("--policy", "round_robin")),
    "least_loaded": ((0, 1), (0, 1), ()),
    "prefix_sticky": ((0, 1), (0, 1), STICKY),
    "predicted": ((0, 1), (0, 1), (*STICKY, "--split-policy", "predicted")),
}
"""Engines for prompts, engines for tokens, and flags, of each proxy."""
PREDICTED: Final = "predicted"
_TAUGHT: Final = 24


class Stage:
    """Two engines and a proxy for each arm, ready.

    Attributes:
        model: Directory, or the boxed one's name.
        arms, logs: The proxies' URLs, and what they say.
        served: What they say that they serve.
        prompts: Writes prompts for it, as token ids.
    """

    served: ServedModel
    prompts: PromptMaker

    def __init__(
        self,
        model: str,
        engines: Sequence[str],
        arms: Mapping[str, str],
        logs: Mapping[str, Path],
    ) -> None:
        self.model = model
        self.engines = engines
        self.arms = arms
        self.logs = logs

    async def look(self) -> None:
        """Find out what is served."""
        target = Target(base_url=self.arms["least_loaded"])
        self.served = await ask_served(target, 5.0)
        self.prompts = prompts_of(target, self.served, tokenizer=self.model)

    def plan(self, dataset: DatasetConfig, law: ArrivalLaw) -> list[Planned]:
        """The requests of a block."""
        target = Target(base_url=self.arms["least_loaded"])
        return plan_of(dataset, law, target, self.served, tokenizer=self.model)[1]

    async def play(
        self, arm: str, plan: Sequence[Planned], *, places: int | None = None, slo: Any = None
    ) -> list[Outcome]:
        """Send a plan to an arm whose engines have nothing of it.

        Raises:
            SystemExit: The engines do not forget what they have.
        """
        for _ in range(20):
            reason = await reset_prefix_caches(Target(base_url=self.arms[arm]))
            if reason is None:
                break
            await asyncio.sleep(0.1)
        else:
            raise SystemExit(f"{arm}: {reason}")
        fields = {} if slo is None else {"slo": slo}
        asker = Asker(self.arms[arm], f"{arm}-", max_concurrency=places, extra_body=fields)
        try:
            return await asker.play(plan)
        finally:
            asker.close()


@contextlib.asynccontextmanager
async def staged(started: Processes, model: str, directory: Path) -> AsyncIterator[Stage]:
    """Start it all, and teach `predicted` what prompts and tokens take."""
    flags = ["--port", "0", "--num-threads", "1", "--max-num-batched-tokens", "512"]
    flags += ["--kv-transfer-config.kv-connector", "nixl", "--kv-cache-memory-bytes", "512MiB"]
    flags += ["--kv-events-config.enable-kv-cache-events", "--max-model-len", "4096"]
    if model == BOXED:
        model = str(boxed_model_dir())
    else:
        model = str(write_model(directory / "m", SMOLLM2_135M))
        flags += ["--load-format", "dummy"]
    cores = sorted(os.sched_getaffinity(0))[:2]
    name = Path(model).name
    begun = await asyncio.gather(
        *(started.start(f"{name}-{core}", "serve", model, *flags, core=core) for core in cores)
    )
    engines = [url for url, _ in begun]

    async def proxy(arm: str) -> tuple[str, Path]:
        prefill, decode, words = ARMS[arm]
        flags = ["--port", "0", "--tokenizer", model]
        for flag, numbers in (("--prefill", prefill), ("--decode", decode)):
            flags += [flag, *(engines[number] for number in numbers)]
        return await started.start(f"{name}-{arm}", "proxy", *flags, *words)

    proxies = dict(zip(ARMS, await asyncio.gather(*map(proxy, ARMS)), strict=True))
    arms = {arm: url for arm, (url, _) in proxies.items()}
    await until_ready(arms.values())
    stage = Stage(model, engines, arms, {arm: log for arm, (_, log) in proxies.items()})
    await stage.look()
    for arm in ARMS:
        num = _TAUGHT if arm == PREDICTED else 2  # engines that share a request have met then
        await stage.play(
            arm, prompts_in_turn(stage.prompts, "taught", num, (64, 256, 512)), places=3
        )
    yield stage


def prompts_in_turn(
    prompts: PromptMaker, key: str, num: int, lengths: Sequence[int], num_out: int = 16
) -> list[Planned]:
    """Requests that have nothing in common, of these lengths in turn."""
    return [
        Planned(
            index=index,
            prompt=prompts.make([Segment(f"{key}/{index}", lengths[index % len(lengths)])]),
            max_tokens=num_out,
            at_s=0.0,
        )
        for index in range(num)
    ]
