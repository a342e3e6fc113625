from __future__ import annotations

import pytest

from pdserve.commands.catalogue import COMMANDS
from pdserve.config.datasets import DatasetConfig, DatasetName
from pdserve.config.load import Table, resolve

TABLES = {command.name: command.table() for command in COMMANDS}


def told(table: Table, given: dict[str, object], environ: dict[str, str] | None = None) -> set[str]:
    """Flags of which it is said that they change nothing."""
    values = resolve(table, command_line=given, environ=environ or {})
    return {line.partition(" changes nothing: ")[0] for line in table.notes(values)}


@pytest.mark.parametrize("name", TABLES)
def test_rows_are_of_the_commands_own_settings_and_defaults_are_not_told(name: str) -> None:
    table = TABLES[name]
    flags = {setting.flag for setting in table.settings}
    assert {flag for row in table.idle for flag in (*row.flags, *row.beside)} <= flags
    assert told(table, {}) == set()


@pytest.mark.parametrize(
    ("name", "given", "idle"),
    [
        (
            "serve",
            {"kv-events-config": '{"endpoint": "tcp://*:5557"}'},
            "kv-events-config.endpoint",
        ),
        (
            "serve",
            {"kv-events-config.enable-kv-cache-events": "1", "kv-events-config.topic": "t"},
            "kv-events-config.topic",
        ),
        (
            "serve",
            {
                "kv-events-config.enable-kv-cache-events": "1",
                "kv-events-config.endpoint": "tcp://*:5557",
                "kv-events-config.publisher": "null",
            },
            "kv-events-config.endpoint",
        ),
        ("serve", {"eplb-config.window-size": "9"}, "eplb-config.window-size"),
        (
            "serve",
            {
                "speculative-config.method": "ngram",
                "speculative-config.suffix-decoding-max-tree-depth": "9",
            },
            "speculative-config.suffix-decoding-max-tree-depth",
        ),
        (
            "serve",
            {
                "speculative-config.method": "suffix",
                "speculative-config.prompt-lookup-max": "9",
            },
            "speculative-config.prompt-lookup-max",
        ),
        (
            "serve",
            {"num-gpu-blocks-override": "9", "kv-cache-memory-bytes": "1GiB"},
            "kv-cache-memory-bytes",
        ),
        (
            "serve",
            {"kv-cache-memory-bytes": "1GiB", "gpu-memory-utilization": "0.5"},
            "gpu-memory-utilization",
        ),
        ("serve", {"kv-transfer-config.lease-s": "9"}, "kv-transfer-config.lease-s"),
        (
            "prefill",
            {"kv-transfer-config.kv-connector": "ucx", "kv-transfer-config.nixl.lanes": "4"},
            "kv-transfer-config.nixl.lanes",
        ),
        (
            "decode",
            {"kv-transfer-config.lmcache.save": "all"},
            "kv-transfer-config.lmcache.save",
        ),
        ("proxy", {"early-rejection": True}, "early-rejection"),
        ("proxy", {"tokenizer": "boxed"}, "tokenizer"),
        ("proxy", {"policy": "prefix_sticky", "chat-template": "f"}, "chat-template"),
        ("up", {"kv-chunk-size": "64"}, "kv-chunk-size"),
        ("up", {"both-port": "9000"}, "both-port"),
        (
            "up",
            {"decode-replicas": "0", "both-replicas": "2", "decode": '{"max-num-seqs": 9}'},
            "decode.max-num-seqs",
        ),
        ("doctor", {"block-size": "64"}, "block-size"),
        ("drain", {"resume": True, "deadline": "9"}, "deadline"),
        ("bench serve", {"base-url": "http://a:1", "port": "9"}, "port"),
        ("bench serve", {"burstiness": "0.5"}, "burstiness"),
        ("bench sweep", {"seconds-per-run": "9", "num-prompts": "9"}, "num-prompts"),
        ("bench sweep", {"max-concurrencies": "1,2", "tolerance": "0.1"}, "tolerance"),
        ("bench sweep", {"start-concurrency": "1", "max-rate": "9", "slo": "itl:9"}, "max-rate"),
        ("bench compare", {"num-prompts": "9"}, "num-prompts"),
        ("bench compare", {"kv-chunk-size": "64"}, "kv-chunk-size"),
        ("bench compare", {"topologies": "colocated", "pd": "1:1"}, "pd"),
        ("bench compare", {"topologies": ["pd"], "chunk-tokens": "64"}, "chunk-tokens"),
        ("plan", {"api-key": "k"}, "api-key"),
    ],
    ids=str,
)
def test_what_another_setting_leaves_idle_is_told(
    name: str, given: dict[str, object], idle: str
) -> None:
    assert told(TABLES[name], given) == {f"--{idle}"}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        (
            "serve",
            {
                "kv-events-config.enable-kv-cache-events": "1",
                "kv-events-config.endpoint": "tcp://*:5557",
                "kv-events-config.topic": "t",
            },
        ),
        ("prefill", {"kv-transfer-config.nixl.lanes": "4", "kv-transfer-config.lease-s": "9"}),
        (
            "serve",
            {
                "kv-transfer-config.lmcache.url": "tcp://a:1",
                "kv-transfer-config.lmcache.save": "all",
            },
        ),
        ("proxy", {"split-policy": "predicted", "early-rejection": False, "tokenizer": "boxed"}),
        ("up", {"kv-tiers": "cpu:1GiB", "kv-chunk-size": "64"}),
        ("bench serve", {"dataset-name": "trace", "burstiness": "0.5"}),
        ("bench sweep", {"slo": "itl:9", "tolerance": "0.1", "max-rate": "9"}),
        ("bench compare", {"topologies": "replicas+store", "kv-chunk-size": "64", "pd": "2:1"}),
    ],
    ids=str,
)
def test_what_is_used_is_not_told(name: str, given: dict[str, object]) -> None:
    assert told(TABLES[name], given) == set()


def test_settings_of_another_data_set_are_told() -> None:
    given = {"dataset-name": "multi-turn", "random-input-len": 9, "multi-turn-input-len": 9}
    idle = {"--disable-shuffle", "--random-input-len"}
    assert told(TABLES["bench serve"], given | {"disable-shuffle": True}) == idle
    for name in DatasetName:
        assert name.field in DatasetConfig.__struct_fields__


def test_a_length_for_any_data_set_is_told_only_of_those_that_have_none() -> None:
    table, given = TABLES["bench serve"], {"output-len": 9}
    assert told(table, given) == told(table, given | {"dataset-name": "prefix_repetition"}) == set()
    assert len(told(table, given | {"dataset-name": "multi-turn"})) == 4


def test_a_variable_may_be_for_another_command() -> None:
    assert told(TABLES["bench serve"], {}, {"PDSERVE_PORT": "9"}) == set()
    assert told(TABLES["proxy"], {}, {"PDSERVE_TOKENIZER": "boxed"}) == set()
