"""The result of a comparison (deployments, runs, single-engine rates) and its file.

The file keeps every run with its outcomes, so that tables and plots can be made from it again
(`pdserve bench plot`). Knows no process and no picture.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from pdserve.bench.files import write_file
from pdserve.bench.goodput import Slo
from pdserve.bench.records import Outcome, Run
from pdserve.errors import ConfigError
from pdserve.wire.seal import UNREADABLE

FORMAT: Final = "pdserve-comparison-1"
_TICKS_PER_S: Final = 100_000


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """One side of the comparison.

    Attributes:
        label: Unique name in tables and legends.
        words: Its description.
        is_disaggregated: Whether prefill and decode run on different engines.
        is_peer: Whether it was already running, on unknown resources.
        num_cores: Cores that its engines share; 0 for a peer.
        num_prefill, num_decode: Engines of a P/D deployment.
        is_crowded: Whether some of its engines share a core.
        commands: Commands that start it, as a person would write them.
        ready_s: Seconds from its first process until it is ready, for each start.
    """

    label: str
    words: str
    is_disaggregated: bool = False
    is_peer: bool = False
    num_cores: int = 0
    num_prefill: int = 0
    num_decode: int = 0
    is_crowded: bool = False
    commands: tuple[str, ...] = ()
    ready_s: list[float] = []


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one deployment.

    Attributes:
        rate: Requests per second; None if the data set sets the times of its requests.
        repeat: 0, 1, ...; runs of one repeat are near one another in time.
    """

    deployment: str
    rate: float | None
    repeat: int
    run: Run


class EngineRates(msgspec.Struct, frozen=True, kw_only=True):
    """The rates of one engine alone on its share of the cores, with the comparison's requests.

    Attributes:
        num_cores: Cores of that engine.
        ctx_rate: Prompts per second, when it does nothing else.
        gen_rate: Answers per second, when all prompts are in its cache.
        out_tok_s: Output tokens per second of the same run.
    """

    num_cores: int
    ctx_rate: float
    gen_rate: float
    out_tok_s: float

    @property
    def bound_per_core(self) -> float:
        """The rate-matched bound, in output tokens per second and core.

        `out_tok_s / (num_ctx * gen_rate / ctx_rate + num_gen)` is the output per core with exactly
        enough prefill cores for the decode cores that neither side waits for the other. It ignores
        handoffs, proxy and client, and that engines cannot be divided: a deployment can approach
        but not exceed it. The name and the formula are TensorRT-LLM's.
        """
        num_ctx, num_gen = self.num_cores, self.num_cores
        return self.out_tok_s / (num_ctx * self.gen_rate / self.ctx_rate + num_gen)

    def reach(self, num_prefill: int, num_decode: int) -> float:
        """Return the output tokens per second of whole engines: the slower side sets the pace."""
        requests = min(num_prefill * self.ctx_rate, num_decode * self.gen_rate)
        return requests * self.out_tok_s / self.gen_rate

    @property
    def best_share(self) -> float:
        """Prefill engines per decode engine at which neither waits."""
        return self.gen_rate / self.ctx_rate


class Comparison(msgspec.Struct, kw_only=True):
    """A comparison, from which every report is derived.

    Attributes:
        format: Version of the file format.
        title: One line: model and data set.
        model: Model as the user wrote it.
        baseline: Label of the deployment that ratios refer to.
        deployments: Deployments in the order of the table.
        measured: Runs in order of time.
        rates: Rates of one engine; None if not measured.
        slos: Objectives; goodput counts requests that meet all of them.
        command: Command that repeats the comparison.
        environment: Hardware, software and date, by name.
        notes: Sentences about what happened while it ran.
    """

    format: str = FORMAT
    title: str
    model: str
    baseline: str
    deployments: list[Deployment]
    measured: list[Measured]
    rates: EngineRates | None = None
    slos: list[Slo] = []
    command: str = ""
    environment: dict[str, str] = {}
    notes: list[str] = []

    def deployment(self, label: str) -> Deployment:
        """Return the deployment with this label."""
        return next(each for each in self.deployments if each.label == label)

    def runs(self, label: str, rate: float | None) -> list[Run]:
        """Runs of a deployment at a rate, by repeat."""
        found = [m for m in self.measured if m.deployment == label and m.rate == rate]
        return [each.run for each in sorted(found, key=lambda each: each.repeat)]

    def why_not(self, label: str, rate: float | None) -> list[str]:
        """Why runs of a deployment at a rate are not valid; empty if all are."""
        runs = self.runs(label, rate)
        return list(dict.fromkeys(reason for run in runs for reason in run.health.why_not))

    @property
    def request_rates(self) -> list[float | None]:
        """The rates that were measured, lowest first."""
        rates = dict.fromkeys(each.rate for each in self.measured)
        return sorted(rates, key=lambda rate: -1.0 if rate is None else rate)


def compact(run: Run) -> Run:
    """Return the run with times rounded to 10 us and without text, for a file."""
    return msgspec.structs.replace(run, outcomes=[_compact(each) for each in run.outcomes])


def _compact(outcome: Outcome) -> Outcome:
    return msgspec.structs.replace(
        outcome,
        scheduled_s=round(outcome.scheduled_s, 5),
        sent_s=round(outcome.sent_s, 5),
        end_s=round(outcome.end_s, 5),
        chunk_s=[round(at, 5) for at in outcome.chunk_s],
        text="",
        stages={name: round(ms, 3) for name, ms in outcome.stages.items()},
        second_stages={name: round(ms, 3) for name, ms in outcome.second_stages.items()},
    )


def save(
    comparison: Comparison, path: Path, *, headline: Mapping[str, object] | None = None
) -> None:
    """Write a comparison as JSON.

    Instead of `chunk_s` a request has `chunk_ticks`: the first chunk's time and then the gaps, in
    units of 10 us; `chunk_tokens` is left out if every chunk has one token. The file is then a
    third of the size.

    Args:
        comparison: A comparison of runs returned by `compact`.
        path: Its directory is created if missing; an existing file is replaced.
        headline: A summary for readers; `load` ignores it.

    Raises:
        ConfigError: The file cannot be written.
    """
    content = msgspec.to_builtins(comparison)
    if headline is not None:
        content["headline"] = headline
    for each in content["measured"]:
        for outcome in each["run"]["outcomes"]:
            at = [round(at_s * _TICKS_PER_S) for at_s in outcome.pop("chunk_s", ())]
            if set(outcome.get("chunk_tokens", ())) == {1}:
                del outcome["chunk_tokens"]
            outcome["chunk_ticks"] = [*at[:1], *(b - a for a, b in itertools.pairwise(at))]
    write_file(path, msgspec.json.encode(content))


def is_comparison(content: bytes) -> bool:
    """Whether a file's content was written by `save`."""
    return f'"format":"{FORMAT}"'.encode() in content[:200].replace(b" ", b"")


def load(path: Path) -> Comparison:
    """Read a file of `save`.

    Raises:
        ConfigError: The file cannot be read or is not a comparison.
    """
    try:
        content = msgspec.json.decode(path.read_bytes())
        for each in content["measured"]:
            for outcome in each["run"]["outcomes"]:
                ticks = itertools.accumulate(outcome.pop("chunk_ticks"))
                outcome["chunk_s"] = [tick / _TICKS_PER_S for tick in ticks]
                outcome.setdefault("chunk_tokens", [1] * len(outcome["chunk_s"]))
        return msgspec.convert(content, type=Comparison)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (*UNREADABLE, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a saved comparison: {error}") from error


def of_runs(runs: Sequence[Run], slos: Sequence[Slo]) -> Comparison:
    """Return a comparison of separate runs; equal labels are repeats.

    The first run's label is the baseline. Runs have no topology, so the cores are unknown.
    """
    labels = list(dict.fromkeys(run.label for run in runs))
    measured = []
    for label in labels:
        measured += [
            Measured(deployment=label, rate=None, repeat=index, run=run)
            for index, run in enumerate(each for each in runs if each.label == label)
        ]
    return Comparison(
        title=", ".join(dict.fromkeys(f"{run.model}: {run.dataset}" for run in runs)),
        model=runs[0].model,
        baseline=labels[0],
        deployments=[
            Deployment(
                label=label,
                words=", ".join(
                    dict.fromkeys(f"{r.base_url}, {r.arrivals}" for r in runs if r.label == label)
                ),
                is_peer=True,
            )
            for label in labels
        ],
        measured=measured,
        slos=list(slos),
    )
