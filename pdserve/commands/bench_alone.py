"""Measures one engine of a P/D deployment alone: its rates, for the rate-matched bound.

It is started before the deployments, so that the pace of `pd-interference` can be measured on it,
too. Knows no figure of the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from pdserve.bench.compare.result import EngineRates
from pdserve.bench.compare.topology import EnginePlace, Kind, Topology
from pdserve.bench.records import Planned
from pdserve.bench.runner import Options
from pdserve.bench.target import Target
from pdserve.commands.bench_deployments import Running
from pdserve.commands.bench_playing import Player
from pdserve.config.schema import Role

_NUM_REQUESTS: Final = 48
_MAX_TOKENS: Final = 24_000
"""Maximum tokens of the sample, which has to fit the engine's cache."""
_CONCURRENCY: Final = 16


def one_engine(topologies: Sequence[Topology]) -> Topology | None:
    """Return one engine with the cores of the smallest one, of a P/D deployment if there is one.

    None if every deployment is already running.
    """
    engines = _of_pd(topologies) or [each for one in topologies for each in one.engines]
    if not engines:
        return None
    cores = min((engine.cores for engine in engines), key=len)
    return Topology("one engine", Kind.REPLICAS, (EnginePlace("engine", Role.BOTH, cores),))


def why_no_bound(topologies: Sequence[Topology]) -> str | None:
    """Return why there is no rate-matched bound, empty without P/D; None if there can be one."""
    engines = _of_pd(topologies)
    if not engines:
        return ""
    if len({len(engine.cores) for engine in engines}) > 1:
        return (
            "The rate-matched bound was not measured: the engines have different numbers of cores."
        )
    return None


def _of_pd(topologies: Sequence[Topology]) -> list[EnginePlace]:
    return [each for one in topologies if one.kind is Kind.DISAGGREGATED for each in one.engines]


async def measure_rates(
    player: Player,
    alone: Topology,
    running: Running,
    target: Target,
    options: Options,
    requests: Sequence[Planned],
) -> EngineRates | None:
    """Measure prompts and tokens per second of one engine; None if requests failed.

    Args:
        player: Sends the requests, and notes a failure.
        alone: The engine, which is `running`.
        target: Its address and model.
        options: Options of the comparison's runs.
        requests: Requests of the comparison; a sample of them is sent as fast as possible.
    """
    sample = sample_of(requests)
    quick = msgspec.structs.replace(
        options, max_concurrency=_CONCURRENCY, with_stages=False, ignore_eos=True
    )
    await player.reset(alone, target)
    asked = [msgspec.structs.replace(each, max_tokens=1) for each in sample]
    ctx = await player.play(running, asked, target, quick)
    again = msgspec.structs.replace(quick, num_warmups=0)
    gen = await player.play(running, sample, target, again)
    good = [each for each in gen.outcomes if each.is_good]
    if len(good) < len(sample) or not all(each.is_good for each in ctx.outcomes):
        player.note("The rate-matched bound was not measured: requests failed.")
        return None
    tokens = sum(each.num_output_tokens for each in good)
    return EngineRates(
        num_cores=len(alone.engines[0].cores),
        ctx_rate=len(ctx.outcomes) / ctx.duration_s,
        gen_rate=len(good) / gen.duration_s,
        out_tok_s=tokens / gen.duration_s,
    )


def sample_of(requests: Sequence[Planned]) -> list[Planned]:
    """Return some requests in the plan's proportions, all due at once; none follows another."""
    able = [each for each in requests if each.after is None]
    tokens = sum((each.num_prompt_tokens or 0) + each.max_tokens for each in able)
    step = max(1, math.ceil(len(able) / _NUM_REQUESTS), math.ceil(tokens / _MAX_TOKENS))
    step = min(step, len(able))
    # Sorted by group: every n-th request of a repeating plan could be of one group only.
    chosen = sorted(able, key=lambda each: (each.group, each.index))[step // 2 :: step]
    return [
        msgspec.structs.replace(each, at_s=0.0, cancel_after_tokens=None)
        for each in sorted(chosen, key=lambda each: each.index)
    ]
