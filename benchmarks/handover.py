"""What it costs that one engine prefills and another decodes: one `serve` beside P/D, over HTTP.

One `serve`, one prefill and one decode engine, of a thread each, and a proxy per way of moving
KV, all alive at once; requests go to them in turns, so that noise hits all alike. Prints one
JSON object.

    python -m benchmarks.handover [--rounds N] [--loaded N] [--model boxed|135m] [--modes pull,push]
                                   [--num-in N] [--text]

`idle`: what a request's first token takes, compared with `serve` pair by pair, and where the
time of the first and of the second token goes. The terms are means over the middle half of the
requests, by what they add up to: `client` is what lies outside of the proxy, and indented terms
(`relay.server`) are parts of the one before the dot.

`with_schema`: by how much the first token, and the wait from there to the second, are longer if the
output follows a JSON schema, and where the time of the first goes then.

`loaded`: the same hand-over while 16 streams run at the decode engine. `without_wire_ms` is the
second token minus the first one, at the client's side of the proxy, without the bytes' transfer
and the decode engine's own first step; `without_wire_and_step_ms` is also without the rest of
the step that was running when the KV had come, which a step cannot be spared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from benchmarks.deployments import Asker, Told, processes, told, until_ready
from benchmarks.engine import environment
from benchmarks.shapes import SMOLLM2_135M, write_model
from pdserve.bench.records import Planned
from pdserve.config.boxed import boxed_model_dir

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from benchmarks.deployments import Processes
    from pdserve.bench.records import Outcome

SERVE = "serve"
NUM_OUT = 8
NUM_STREAMS = 16
_WARM_UP = 4
SCHEMA = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
        "required": ["name", "count"],
        "additionalProperties": False,
    },
}
"""Of outputs that are longer than those that are asked for."""


@dataclass
class Place:
    """Somewhere to send requests: `serve`, or a proxy.

    Attributes:
        logs: Of all processes that a request passes, by name.
        has_schema: Whether outputs follow one.
    """

    url: str
    logs: dict[str, Path]
    has_schema: bool = False


@dataclass
class Asked:
    """One request of two tokens or more, seen from both sides.

    Attributes:
        told: What each process wrote of it, by the process' name.
    """

    outcome: Outcome
    told: dict[str, Told]

    @property
    def second_s(self) -> float:
        """From the first token to the second."""
        return self.outcome.chunk_s[1] - self.outcome.chunk_s[0]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="requests per mode when idle")
    parser.add_argument("--loaded", type=int, default=150, help="the same beside 16 streams")
    parser.add_argument("--model", default="boxed,135m", help="boxed, 135m, or both")
    parser.add_argument("--modes", default="pull,push")
    parser.add_argument("--num-in", type=int, default=512, help="tokens of a prompt when idle")
    parser.add_argument("--text", action="store_true", help="the boxed model's prompts are text")
    args = parser.parse_args()
    models = {}
    for name in args.model.split(","):
        with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory:
            models[name] = asyncio.run(_run(args, name, Path(directory)))
    result = {
        "benchmark": "handover",
        "environment": environment(1),
        "deployments": "serve, prefill, decode: one thread each; a proxy per mode; all at once",
        "goals": {
            "ttft_over_serve_ms_p50": "wire + 15",
            "with_schema": {"ttft_over_ms_p50": 0.5, "second_token_over_ms_p50": 0.5},
            "loaded": {"without_wire_ms_p50": 5.0, "without_wire_ms_p99": 15.0},
        },
        "models": models,
    }
    print(json.dumps(result, indent=1))


async def _run(args: argparse.Namespace, model: str, directory: Path) -> dict[str, Any]:
    rng = random.Random(7)
    prompts = _Prompts(rng, model, num_in=args.num_in, as_text=args.text)
    modes = args.modes.split(",")
    async with processes(directory) as started:
        places = await _deploy(started, model, directory, modes)
        await _ask(rng, prompts, places, _WARM_UP)
        bound = {f"{mode} with a schema": replace(places[mode], has_schema=True) for mode in modes}
        await _ask(rng, prompts, bound, _WARM_UP)
        idle = await _ask(rng, prompts, places | bound, args.rounds)
        with_schema = {mode: idle.pop(f"{mode} with a schema") for mode in modes}
        found: dict[str, Any] = {
            "idle": _idle(idle),
            "with_schema": {mode: _over(with_schema[mode], idle[mode]) for mode in modes},
        }
        num_out = 1500
        if args.loaded:
            by_proxy = {mode: places[mode] for mode in modes}
            async with _streams(prompts, by_proxy, num_out) as running:
                await _ask(rng, prompts, by_proxy, _WARM_UP)
                since = len(running.gaps_s)
                loaded = await _ask(rng, prompts, by_proxy, args.loaded)
                gaps = running.gaps_s[since:]
            found["loaded"] = {
                "streams": NUM_STREAMS,
                "gap_between_tokens_ms": _spread(gaps),
                **{mode: _loaded(asked) for mode, asked in loaded.items()},
            }
    return found


async def _deploy(
    started: Processes, model: str, directory: Path, modes: Sequence[str]
) -> dict[str, Place]:
    """Start everything."""
    flags = ["--port", "0", "--num-threads", "1", "--no-enable-prefix-caching"]
    if model == "boxed":
        flags = ["boxed", *flags, "--kv-cache-memory-bytes", "512MiB"]
    else:
        path = write_model(directory / "m", SMOLLM2_135M)
        flags = [str(path), *flags, "--kv-cache-memory-bytes", "1GiB", "--load-format", "dummy"]
        flags += ["--max-model-len", "2048"]
    places = {}
    for mode in modes:
        url, log = await started.start(mode, "proxy", "--port", "0", "--kv-mode", mode)
        places[mode] = Place(url, {"proxy": log})
    url, log = await started.start(SERVE, SERVE, *flags)
    proxies = [place.url for place in places.values()]
    engines = {}
    for role in ("prefill", "decode"):
        _, engines[role] = await started.start(role, role, *flags, "--proxy", *proxies)
    await until_ready(proxies)
    for place in places.values():
        place.logs |= engines
    places[SERVE] = Place(url, {SERVE: log})
    return places


async def _ask(
    rng: random.Random,
    prompts: _Prompts,
    places: dict[str, Place],
    num_rounds: int,
) -> dict[str, list[Asked]]:
    """Ask every place once a round, in another order each time, one request at a time."""
    run_id = f"{rng.getrandbits(48):012x}"
    askers = {
        name: Asker(
            place.url,
            f"{name.replace(' ', '-')}-{run_id}-",
            may_merge=True,
            schema=SCHEMA if place.has_schema else None,
        )
        for name, place in places.items()
    }
    outcomes: dict[str, list[Outcome]] = {name: [] for name in places}
    for number in range(num_rounds):
        for name in rng.sample(list(places), len(places)):
            # Where in a running step a request comes is left to chance.
            await asyncio.sleep(rng.uniform(0.01, 0.04))
            outcomes[name] += await askers[name].ask(
                [prompts.plan(number, prompts.num_in, NUM_OUT)]
            )
    await asyncio.sleep(0.5)  # the last lines are written
    for asker in askers.values():
        asker.close()
    asked = {}
    for name, place in places.items():
        lines = {process: told(log.read_text()) for process, log in place.logs.items()}
        asked[name] = [
            Asked(outcome, {process: lines[process][outcome.request_id] for process in lines})
            for outcome in outcomes[name]
        ]
    return asked


class _Prompts:
    """Never the same one twice.

    The boxed model gets pieces of the text it has learned, so that it answers in whole letters.
    """

    def __init__(self, rng: random.Random, model: str, *, num_in: int, as_text: bool) -> None:
        self._rng = rng
        self._text: list[int] = []
        self.num_in = num_in
        self._tokenizer: Tokenizer | None = None
        if model == "boxed":
            directory = boxed_model_dir()
            tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
            self._text = tokenizer.encode((directory / "corpus.txt").read_text()).ids
            self._tokenizer = tokenizer if as_text else None

    def plan(self, index: int, num_in: int, num_out: int) -> Planned:
        """A request that is due at once."""
        return Planned(index=index, prompt=self._draw(num_in), max_tokens=num_out, at_s=0.0)

    def _draw(self, num_tokens: int) -> list[int] | str:
        if not self._text:
            return [300 + self._rng.randrange(40000) for _ in range(num_tokens)]
        start = self._rng.randrange(len(self._text) - num_tokens)
        drawn = self._text[start : start + num_tokens]
        return drawn if self._tokenizer is None else self._tokenizer.decode(drawn)


class _Streams:
    """Long streams, each begun again when it ends.

    Attributes:
        gaps_s: Between tokens, of all streams.
    """

    def __init__(self) -> None:
        self.gaps_s: list[float] = []
        self.num_begun = 0


@contextlib.asynccontextmanager
async def _streams(
    prompts: _Prompts, places: dict[str, Place], num_out: int
) -> AsyncIterator[_Streams]:
    running = _Streams()
    urls = [place.url for place in places.values()]

    async def one(index: int) -> None:
        asker = Asker(urls[index % len(urls)], f"stream-{index}-", may_merge=True)
        num_tokens = num_out * (index + 1) // NUM_STREAMS  # they shall not all end at once
        try:
            for number in itertools.count():
                running.num_begun += 1
                [outcome] = await asker.ask([prompts.plan(number, 32, num_tokens)])
                running.gaps_s += outcome.itl_s[1:]
                num_tokens = num_out
        finally:
            asker.close()

    tasks = [asyncio.create_task(one(index)) for index in range(NUM_STREAMS)]
    try:
        while running.num_begun < NUM_STREAMS:
            await asyncio.sleep(0.1)
        await asyncio.sleep(2.0)
        yield running
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ---- figures -------------------------------------------------------------------------------


def _idle(asked: dict[str, list[Asked]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    serve = asked[SERVE]
    found[SERVE] = {
        "ttft_ms": _spread([each.outcome.ttft_s for each in serve]),
        "first_token_terms_ms": _terms(serve, _first_of_serve),
    }
    for mode, those in asked.items():
        if mode == SERVE:
            continue
        over = [
            each.outcome.ttft_s - beside.outcome.ttft_s
            for each, beside in zip(those, serve, strict=True)
        ]
        wire_ms = statistics.median(_wire_ms(each) for each in those)
        over_ms = statistics.median(over) * 1e3
        found[mode] = {
            "ttft_ms": _spread([each.outcome.ttft_s for each in those]),
            "ttft_over_serve_ms": _spread(over),
            "wire_ms_p50": round(wire_ms, 2),
            "is_within_wire_and_15_ms": over_ms <= wire_ms + 15.0,
            "first_token_terms_ms": _terms(those, _first_of_pair),
            "second_token_ms": _spread([each.second_s for each in those]),
            "second_token_terms_ms": _terms(those, _second_of_pair),
            "second_token_less_serve_ms_p50": round(
                statistics.median(
                    each.second_s - beside.second_s
                    for each, beside in zip(those, serve, strict=True)
                )
                * 1e3,
                2,
            ),
        }
    return found


def _over(asked: list[Asked], beside: list[Asked]) -> dict[str, Any]:
    pairs = [*zip(asked, beside, strict=True)]
    return {
        "ttft_over_ms": _spread([a.outcome.ttft_s - b.outcome.ttft_s for a, b in pairs]),
        "second_token_over_ms": _spread([a.second_s - b.second_s for a, b in pairs]),
        "first_token_terms_ms": _terms(asked, _first_of_pair),
    }


def _loaded(asked: list[Asked]) -> dict[str, Any]:
    without_wire = [_without_wire_ms(each) / 1e3 for each in asked]
    without_step = [max(0.0, _without_wire_ms(each) - _step_wait_ms(each)) / 1e3 for each in asked]
    return {
        "requests": len(asked),
        "without_wire_ms": _spread(without_wire),
        "without_wire_and_step_ms": _spread(without_step),
        "own_first_step_ms": _spread([_proxy(each).second["first_step"] / 1e3 for each in asked]),
        "wire_ms": _spread([_wire_ms(each) / 1e3 for each in asked]),
        "ttft_ms": _spread([each.outcome.ttft_s for each in asked]),
        "second_token_ms": _spread([each.second_s for each in asked]),
        "second_token_terms_ms": _terms(asked, _second_of_pair),
    }


def _proxy(asked: Asked) -> Told:
    return asked.told["proxy"]


def _wire_ms(asked: Asked) -> float:
    """The transfer of the bytes alone: no waiting, no digests."""
    terms = _proxy(asked).second
    beside = terms.get("kv.wait", 0.0) + terms.get("kv.digest", 0.0)
    return max(0.0, terms["kv"] - beside)


def _without_wire_ms(asked: Asked) -> float:
    second = _proxy(asked).second
    return max(0.0, _proxy(asked).second_ms - _wire_ms(asked) - second["first_step"])


def _step_wait_ms(asked: Asked) -> float:
    return min(_proxy(asked).second.get("handover.step", 0.0), _without_wire_ms(asked))


def _first_of_serve(asked: Asked) -> tuple[float, dict[str, float]]:
    line = asked.told[SERVE]
    total = asked.outcome.ttft_s * 1e3
    return total, {**line.first, "client": total - line.ttft_ms}


def _first_of_pair(asked: Asked) -> tuple[float, dict[str, float]]:
    line = _proxy(asked)
    total = asked.outcome.ttft_s * 1e3
    terms = {**line.first, "client": total - line.ttft_ms}
    terms["relay.server"] = asked.told["prefill"].first.get("server", 0.0)
    return total, terms


def _second_of_pair(asked: Asked) -> tuple[float, dict[str, float]]:
    line = _proxy(asked)
    total = asked.second_s * 1e3
    terms = {**line.second, "client": total - line.second_ms}
    terms["handover.server"] = asked.told["decode"].first.get("server", 0.0)
    return total, terms


def _terms(
    asked: list[Asked], terms_of: Callable[[Asked], tuple[float, dict[str, float]]]
) -> dict[str, float]:
    rows = sorted((terms_of(each) for each in asked), key=lambda row: row[0])
    middle = rows[len(rows) // 4 : len(rows) - len(rows) // 4]
    names = {name: None for _, terms in middle for name in terms}
    means = {
        name: round(statistics.fmean(terms.get(name, 0.0) for _, terms in middle), 2)
        for name in names
    }
    return {"all": round(statistics.fmean(total for total, _ in middle), 2), **means}


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """p10, p50 and p99, in milliseconds."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    return {
        name: round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e3, 2)
        for name, share in (("p10", 0.10), ("p50", 0.50), ("p99", 0.99))
    }


if __name__ == "__main__":
    main()
