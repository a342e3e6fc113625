"""Settings that change nothing beside certain values of others, and what is said of them then.

A row is for what a command would take and never look at; what is wrong is refused by the setting's
struct. Each command's table has the rows for its settings.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from pdserve.config.bench import split_words
from pdserve.config.connectors import chosen, connector_settings
from pdserve.config.datasets import DATASET_SETTINGS, DatasetName
from pdserve.config.policies import PREDICTED, SHADOW, looks_at_prefixes
from pdserve.config.setting import IdleRow, canonical
from pdserve.config.vllm.commands import BENCH_RENAMED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_KV: Final = "kv-transfer-config"
_CONNECTOR: Final = f"{_KV}.kv-connector"
_EVENTS: Final = "kv-events-config"
_DRAFTS: Final = "speculative-config"
_SUFFIX: Final = f"{_DRAFTS}.suffix-decoding"


def _flags(prefix: str, names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}{name}" for name in names.split())


def engine_rows() -> tuple[IdleRow, ...]:
    """Return the rows of engines: pdserve's own, and one for each connector with settings."""
    own = {name: tuple(s.flag for s in found) for name, found in connector_settings().items()}
    urls = [flag for flags in own.values() for flag in flags if flag.endswith(".url")]
    fields = [flag.removeprefix(f"{_KV}.") for flag in urls]

    def row(name: str, flags: tuple[str, ...]) -> IdleRow:
        def is_idle(connectors: str, *values: str) -> bool:
            return name not in chosen(connectors, dict(zip(fields, values, strict=True)))

        return IdleRow(flags, (_CONNECTOR, *urls), is_idle, f"--{_CONNECTOR} is without {name}")

    return (*_ENGINE, *(row(name, flags) for name, flags in own.items()))


_ENGINE: Final = (
    IdleRow(
        _flags(f"{_EVENTS}.", "publisher endpoint replay-endpoint buffer-steps hwm max-queue-size")
        + _flags(f"{_EVENTS}.", "topic replay-topic port"),
        (f"{_EVENTS}.enable-kv-cache-events",),
        lambda is_on: not is_on,
        f"nothing is published without --{_EVENTS}.enable-kv-cache-events",
    ),
    IdleRow(
        _flags(f"{_EVENTS}.", "replay-endpoint buffer-steps topic replay-topic"),
        _flags(f"{_EVENTS}.", "enable-kv-cache-events endpoint publisher"),
        lambda is_on, endpoint, publisher: is_on and (endpoint is None or publisher == "null"),
        "there are no readers of vLLM's events",
    ),
    IdleRow(
        _flags(f"{_EVENTS}.", "endpoint"),
        _flags(f"{_EVENTS}.", "enable-kv-cache-events publisher"),
        lambda is_on, publisher: is_on and publisher == "null",
        f"--{_EVENTS}.publisher is null",
    ),
    IdleRow(
        _flags("eplb-config.", "window-size step-interval"),
        ("enable-eplb",),
        lambda is_on: not is_on,
        "experts are not rebalanced without --enable-eplb",
    ),
    IdleRow(
        _flags(f"{_DRAFTS}.", "prompt-lookup-max prompt-lookup-min"),
        (f"{_DRAFTS}.method",),
        lambda method: method == "suffix",
        "the method suffix has its own limits",
    ),
    IdleRow(
        _flags(f"{_SUFFIX}-", "max-tree-depth max-cached-requests max-spec-factor min-token-prob"),
        (f"{_DRAFTS}.method",),
        lambda method: method != "suffix",
        "it is for the method suffix alone",
    ),
    IdleRow(
        ("kv-cache-memory-bytes", "gpu-memory-utilization"),
        ("num-gpu-blocks-override",),
        lambda num_blocks: num_blocks is not None,
        "--num-gpu-blocks-override is the size of the pool",
    ),
    IdleRow(
        ("gpu-memory-utilization",),
        ("kv-cache-memory-bytes", "num-gpu-blocks-override"),
        lambda num_bytes, num_blocks: num_bytes is not None and num_blocks is None,
        "--kv-cache-memory-bytes is the size of the pool",
    ),
    IdleRow(
        _flags(f"{_KV}.", "port lease-s handshake-timeout-s transfer-timeout-s quarantine-s"),
        (_CONNECTOR,),
        lambda connectors: chosen(connectors, {}) == ["null"],
        f"no KV moves without --{_CONNECTOR}",
    ),
)

PROXY_ROWS: Final = (
    IdleRow(
        ("early-rejection",),
        ("split-policy",),
        lambda split: split not in (PREDICTED, SHADOW),
        f"without --split-policy {PREDICTED} or {SHADOW}, nothing is predicted",
    ),
    IdleRow(
        ("tokenizer", "chat-template"),
        ("prefill-policy", "decode-policy", "split-policy"),
        lambda *names: not looks_at_prefixes(*names),
        "these policies do not look at prompts",
    ),
    IdleRow(
        ("chat-template",),
        ("tokenizer", "prefill-policy", "decode-policy", "split-policy"),
        lambda tokenizer, *names: not tokenizer and looks_at_prefixes(*names),
        "without --tokenizer, prompts are compared as bytes",
    ),
)

_NO_STORE: Final = IdleRow(
    ("kv-port", "kv-http-port", "kv-chunk-size"),
    ("kv-tiers",),
    lambda tiers: not tiers,
    "there is no store without --kv-tiers",
)


def up_rows(flags: Sequence[str]) -> tuple[IdleRow, ...]:
    """Return the rows of `pdserve up`.

    Args:
        flags: Those of one role alone. Engines for both need not be there: the printed command of
            one engine to compare with has what is for them.
    """

    def row(role: str) -> IdleRow:
        own = tuple(each for each in flags if role != "both" and each.startswith(f"{role}."))
        number = f"{role}-replicas"
        return IdleRow((f"{role}-port", *own), (number,), lambda num: not num, f"--{number} is 0")

    return (_NO_STORE, *map(row, ("prefill", "decode", "both")))


DOCTOR_ROWS: Final = (
    IdleRow(("block-size",), ("kv-server",), lambda url: not url, "it needs --kv-server"),
)

DRAIN_ROWS: Final = (IdleRow(("deadline",), ("resume",), bool, "--resume ends a drain at once"),)

_TARGET: Final = IdleRow(("host", "port"), ("base-url",), bool, "--base-url names the server")


_OUTPUT_LENS: Final = tuple(BENCH_RENAMED["output-len"].split())
"""Flags that vLLM's --output-len sets all at once, whatever the data set."""


def _of_another(kind: DatasetName) -> Iterator[IdleRow]:
    """Yield the rows of the settings that one data set alone has."""
    prefix, why = f"dataset.{kind.field}.", f"it is for --dataset-name {kind.value}"
    own = [each.flag for each in DATASET_SETTINGS if each.path.startswith(prefix)]
    lens = [flag for flag in own if flag in _OUTPUT_LENS]

    def is_idle(name: DatasetName, *values: int | None) -> bool:
        is_for_any = len(set(values)) == 1 and f"{canonical(name.value)}-output-len" in _OUTPUT_LENS
        return name is not kind and not is_for_any

    others = tuple(flag for flag in own if flag not in lens)
    yield IdleRow(others, ("dataset-name",), lambda name: name is not kind, why)
    yield IdleRow(tuple(lens), ("dataset-name", *_OUTPUT_LENS), is_idle, why)


_DATASETS: Final = (
    IdleRow(
        ("disable-shuffle", "no-oversample"),
        ("dataset-name",),
        lambda name: not name.reads_a_file,
        "it is for data sets that read a file",
    ),
    *itertools.chain.from_iterable(map(_of_another, DatasetName)),
    IdleRow(
        ("num-prompts",),
        ("dataset-name",),
        lambda name: name is DatasetName.PD_INTERFERENCE,
        "pd-interference sends requests for --interference-duration",
    ),
)
_AT_ONCE: Final = IdleRow(
    ("burstiness",),
    ("request-rate", "ramp-up-strategy", "dataset-name"),
    lambda rate, ramp, name: rate == float("inf") and ramp is None and not name.has_own_times,
    "without --request-rate all requests are sent at once",
)
BENCH_ROWS: Final = (_TARGET, *_DATASETS, _AT_ONCE)
PLAN_ROWS: Final = (
    *_DATASETS,
    IdleRow(("api-key",), ("url",), lambda url: not url, "nobody is asked without --url"),
)
SWEEP_ROWS: Final = (
    _TARGET,
    *_DATASETS,
    IdleRow(
        ("num-prompts",),
        ("seconds-per-run",),
        lambda seconds: seconds is not None,
        "--seconds-per-run says how many are sent",
    ),
    IdleRow(
        ("tolerance", "max-rate", "max-concurrency-limit"),
        ("bisect", "slo"),
        lambda bisects, slo: not (bisects and slo),
        "without --slo and --bisect, only the given loads are measured",
    ),
    IdleRow(
        ("burstiness", "max-rate"),
        ("max-concurrencies", "start-concurrency"),
        lambda loads, start: bool(loads or start),
        "the load is a number of requests in flight",
    ),
    IdleRow(
        ("max-concurrency-limit",),
        ("max-concurrencies", "start-concurrency"),
        lambda loads, start: not (loads or start),
        "the load is a rate",
    ),
)


def _kinds(words: tuple[str, ...]) -> frozenset[str]:
    return frozenset(word.removesuffix("+store") for word in split_words(words))


_TOPOLOGIES: Final = ("topologies",)
_ONE_ENGINE: Final = {"colocated", "colocated-unchunked"}
COMPARE_ROWS: Final = (
    *_DATASETS,
    IdleRow(
        ("kv-tiers", "kv-chunk-size"),
        _TOPOLOGIES,
        lambda words: not any(word.endswith("+store") for word in split_words(words)),
        "no deployment has a store: write one as pd+store",
    ),
    IdleRow(
        ("prefill-args", "decode-args"),
        _TOPOLOGIES,
        lambda words: "pd" not in _kinds(words),
        "no deployment is pd",
    ),
    IdleRow(
        ("pd", "proxy-args"),
        _TOPOLOGIES,
        lambda words: _kinds(words) <= _ONE_ENGINE,
        "every deployment is one engine",
    ),
    IdleRow(
        ("colocated-args", "chunk-tokens"),
        _TOPOLOGIES,
        lambda words: _kinds(words) <= {"pd"},
        "no deployment is colocated",
    ),
    IdleRow(("api-key",), ("peer",), lambda peers: not peers, "there is no --peer"),
    IdleRow(
        ("request-rate",), ("request-rates",), bool, "--request-rates has the rates to compare at"
    ),
    IdleRow(("pin",), ("gpus",), bool, "engines on --gpus run on all cores"),
)
