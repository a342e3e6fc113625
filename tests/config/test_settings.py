from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from pdserve.config import connectors
from pdserve.config.bench import ResultConfig, TargetConfig, TrafficConfig
from pdserve.config.connectors import check_settings, read_settings
from pdserve.config.datasets import DatasetConfig
from pdserve.config.doctor import DOCTOR_SETTINGS, DoctorConfig
from pdserve.config.http import ProxyConfig, ServerConfig
from pdserve.config.load import Table, build, resolve
from pdserve.config.log import LogConfig
from pdserve.config.schema import EngineConfig, Role, TransferConfig
from pdserve.config.setting import parse
from pdserve.config.settings import (
    bench_serve_table,
    engine_table,
    proxy_table,
    up_table,
)
from pdserve.config.speculative import WITH_MODEL
from pdserve.config.up import UpConfig
from pdserve.connectors.nixl import NixlSettings
from pdserve.connectors.registry import find
from pdserve.errors import ConfigError
from pdserve.worker.kv_memory import block_size_on

ENGINE = engine_table(Role.BOTH)
ROOTS: list[tuple[str, type[msgspec.Struct], Table]] = [
    ("engine", EngineConfig, ENGINE),
    ("server", ServerConfig, ENGINE),
    ("log", LogConfig, ENGINE),
    ("proxy", ProxyConfig, proxy_table()),
    ("up", UpConfig, up_table()),
    ("doctor", DoctorConfig, Table(DOCTOR_SETTINGS)),
    ("target", TargetConfig, bench_serve_table()),
    ("traffic", TrafficConfig, bench_serve_table()),
    ("dataset", DatasetConfig, bench_serve_table()),
    ("result", ResultConfig, bench_serve_table()),
]


def leaves(struct: type[msgspec.Struct], path: str) -> Iterator[str]:
    for info in msgspec.structs.fields(struct):
        if isinstance(info.type, type) and issubclass(info.type, msgspec.Struct):
            yield from leaves(info.type, f"{path}.{info.name}")
        else:
            yield f"{path}.{info.name}"


@pytest.mark.parametrize(("root", "struct", "table"), ROOTS, ids=[root for root, _, _ in ROOTS])
def test_every_field_of_the_schema_has_exactly_one_flag(
    root: str, struct: type[msgspec.Struct], table: Table
) -> None:
    # The command is the role, and what connectors are told is theirs to declare.
    fields = set(leaves(struct, root)) - {"engine.role", "engine.transfer.settings"}
    shown = [s.path for s in table.settings if s.path.startswith(f"{root}.") and not s.hidden]
    paths = [path for path in shown if not path.startswith("engine.transfer.settings.")]
    assert sorted(paths) == sorted(fields)


@pytest.mark.parametrize(
    "table", [table for _, _, table in ROOTS], ids=lambda t: str(len(t.settings))
)
def test_no_flag_stands_twice(table: Table) -> None:
    flags = [s.flag for s in table.settings] + [s.flag for s in table.shorthands]
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize(
    ("root", "struct", "table"), ROOTS[:3] + ROOTS[4:5], ids=["engine", "server", "log", "up"]
)
def test_every_word_the_help_offers_is_accepted(
    root: str, struct: type[msgspec.Struct], table: Table
) -> None:
    for setting in table.settings:
        if "|" in setting.metavar and setting.path.startswith(f"{root}."):
            for word in setting.metavar.split("|"):
                given: dict[str, object] = {"model": "m", setting.flag: parse(setting, word)}
                if setting.path.startswith("engine.parallel."):
                    given["enable-expert-parallel"] = True  # some words are about experts
                if word in WITH_MODEL:
                    given["speculative-config.model"] = "m"
                build(root, struct, table, resolve(table, command_line=given, environ={}))


@pytest.mark.parametrize(
    ("role", "port", "connector"),
    [(Role.PREFILL, 8100, "nixl"), (Role.DECODE, 8200, "nixl"), (Role.BOTH, 8000, "null")],
)
def test_a_role_sets_the_port_and_the_connector(role: Role, port: int, connector: str) -> None:
    table = engine_table(role)
    resolved = resolve(table, command_line={"model": "m"}, environ={})
    assert build("server", ServerConfig, table, resolved).port == port
    assert build("engine", EngineConfig, table, resolved).transfer.kv_connector == connector


def test_a_transfer_config_as_vllm_writes_it_is_read() -> None:
    raw = {"model": "m", "kv-transfer-config": '{"kv_connector": "memory", "secret": "s"}'}
    transfer = build(
        "engine", EngineConfig, ENGINE, resolve(ENGINE, command_line=raw, environ={})
    ).transfer
    assert (transfer.kv_connector, transfer.secret) == ("memory", "s")


@pytest.mark.parametrize(
    "given",
    [
        {"kv-transfer-config.nixl.lanes": "3"},
        {"kv-transfer-config.nixl": '{"lanes": 3}'},
        {"kv-transfer-config": '{"nixl": {"lanes": 3}}'},
    ],
    ids=["flag", "object", "object in an object"],
)
def test_what_one_connector_alone_is_told_reaches_it(given: dict[str, object]) -> None:
    values = resolve(ENGINE, command_line={"model": "m", **given}, environ={})
    told = build("engine", EngineConfig, ENGINE, values).transfer.settings
    assert read_settings("nixl", told) == NixlSettings(lanes=3)
    # As it comes to a process of its own.
    heard = msgspec.msgpack.decode(msgspec.msgpack.encode(told))
    assert find("nixl", heard).settings == NixlSettings(lanes=3)


def test_a_connector_names_the_flag_the_value_and_the_remedy_of_what_it_refuses() -> None:
    for lanes in (0, 65):
        with pytest.raises(
            ConfigError, match=rf"--kv-transfer-config\.nixl\.lanes is {lanes}: use"
        ):
            find("nixl", {"nixl.lanes": lanes})


def test_a_connector_that_reaches_no_other_process_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="contains 'memory', which joins engines of one process"):
        check_settings("nixl, memory", {})


def test_the_connector_of_another_package_brings_its_flags_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shelf.py").write_text(SHELF)
    metadata = tmp_path / "shelf-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[pdserve.connectors]\nmy_shelf = shelf:Shelf\nlost = no_such_module:Lost\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    connectors.entry_points_by_name.cache_clear()
    try:
        table = engine_table(Role.BOTH)
        given = {"model": "m", "kv-transfer-config.my-shelf.url": "tcp://[::1]:7"}
        values = resolve(table, command_line=given, environ={})
        transfer = build("engine", EngineConfig, table, values).transfer
        shelf = find("my_shelf", transfer.settings)
        assert msgspec.structs.asdict(shelf.settings) == {"url": "tcp://[::1]:7", "depth": 2}
        help_of = {setting.flag: setting.help for setting in table.settings}
        assert help_of["kv-transfer-config.my-shelf.url"] == "where it stands"
        with pytest.raises(ConfigError, match="'lost' cannot be imported from no_such_module:Lost"):
            find("lost")
    finally:
        connectors.entry_points_by_name.cache_clear()


SHELF = """
from typing import Annotated

import msgspec

from pdserve.connectors.base import KVConnectorBase


class Settings(msgspec.Struct, frozen=True):
    url: Annotated[str, msgspec.Meta(description="where it stands")] = ""
    depth: int = 2


class Shelf(KVConnectorBase, frozen=True):
    name: str = "my_shelf"
    settings: Settings = Settings()
"""


def test_what_is_no_engines_url_is_refused_before_the_doctor_begins() -> None:
    with pytest.raises(ConfigError, match="--peer is 'localhost:8100'"):
        DoctorConfig(peer=("http://127.0.0.1:8100", "localhost:8100"))


def test_one_policy_sets_both_and_either_may_differ() -> None:
    table = proxy_table()
    raw = {"policy": "round_robin", "decode-policy": "least_loaded"}
    config = build("proxy", ProxyConfig, table, resolve(table, command_line=raw, environ={}))
    assert (config.prefill_policy, config.decode_policy) == ("round_robin", "least_loaded")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("port", 70000),
        ("port", -1),
        ("proxy", ("127.0.0.1:8000",)),
        ("proxy", ("http://a..b:8000",)),
        ("proxy", ("http://[::1",)),
        ("proxy", ("http://127.0.0.1:port",)),
        ("proxy", ("http://:8000",)),
        ("shutdown-timeout", -1),
        ("shutdown-timeout", "nan"),
        ("drain-delay", -1),
        ("root-path", "llm"),
        ("root-path", "/llm/"),
        ("allowed-origins", ("chat.example.com",)),
        ("api-key", ("right", "")),
    ],
)
def test_a_server_setting_that_cannot_be_names_its_flag(flag: str, value: object) -> None:
    given = {flag: value}
    with pytest.raises(ConfigError, match=f"--{flag} is"):
        build("server", ServerConfig, ENGINE, resolve(ENGINE, command_line=given, environ={}))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("generation-config", "mine.json"),
        ("kv-cache-memory-bytes", 0),
        ("max-num-seqs", 1 << 64 - 1),
        ("max-num-batched-tokens", 10**12),
        ("num-threads", 10**6),
        ("data-parallel-size", 10**6),
        ("kv-events-config.hwm", 1 << 31),
        ("kv-events-config.buffer-steps", 1 << 31),
        ("max-waiting", -1),
        ("max-waiting-tokens", -1),
        ("max-request-tokens", -1),
        ("seed", 2**63),
        ("served-model-name", ("",)),
        ("served-model-name", ("\udcff",)),
        ("engine-id", "\udcff"),
    ],
)
def test_an_engine_setting_that_cannot_be_names_its_flag(flag: str, value: object) -> None:
    given = {"model": "M", flag: value}
    with pytest.raises(ConfigError, match=f"--{flag} is"):
        build("engine", EngineConfig, ENGINE, resolve(ENGINE, command_line=given, environ={}))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("port", 70000),
        ("prefill", ("localhost:8100",)),
        ("decode", ("ftp://x",)),
        ("decode", ("http://user:password@x:8100",)),
        ("decode", ("http://x:8100?of=me",)),
        ("max-concurrent-requests", 0),
        ("request-timeout-secs", 0),
        ("queue-size", -1),
        ("api-key", (" ",)),
    ],
)
def test_a_proxy_setting_that_cannot_be_names_its_flag(flag: str, value: object) -> None:
    table = proxy_table()
    with pytest.raises(ConfigError, match=f"--{flag} is"):
        build("proxy", ProxyConfig, table, resolve(table, command_line={flag: value}, environ={}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor-parallel-size": 0}, "--tensor-parallel-size is 0"),
        ({"pipeline-layers": (1, 2)}, "give one positive number for each of 1 stages"),
        ({"distributed-executor-backend": "inline", "tensor-parallel-size": 2}, "2 ranks need"),
        ({"enable-sequence-parallel": True}, "it needs --tensor-parallel-size above 1"),
        ({"enable-eplb": True}, "it needs --enable-expert-parallel"),
        ({"all2all-backend": "all_to_all"}, "it needs --enable-expert-parallel"),
        ({"expert-placement-strategy": "round_robin"}, "it needs --enable-expert-parallel"),
        ({"eplb-config.step-interval": 0}, "--eplb-config.step-interval is 0"),
        (
            {"enable-expert-parallel": True, "eplb-config.num-redundant-experts": 4},
            "--eplb-config.num-redundant-experts is 4: it needs --enable-eplb",
        ),
    ],
)
def test_a_parallel_setting_that_cannot_be_says_what_would(
    given: dict[str, object], message: str
) -> None:
    values = resolve(ENGINE, command_line={"model": "m", **given}, environ={})
    with pytest.raises(ConfigError, match=message):
        build("engine", EngineConfig, ENGINE, values)


def test_an_eplb_config_as_vllm_writes_it_is_read() -> None:
    raw = {
        "model": "m",
        "enable-expert-parallel": True,
        "enable-eplb": True,
        "eplb-config": '{"num_redundant_experts": 4, "window_size": 10}',
    }
    values = resolve(ENGINE, command_line=raw, environ={})
    eplb = build("engine", EngineConfig, ENGINE, values).parallel.eplb
    assert (eplb.num_redundant_experts, eplb.window_size) == (4, 10)


def test_one_rank_is_inline_and_several_are_processes() -> None:
    for size, backend in ((1, "inline"), (2, "multiprocess")):
        given = {"model": "m", "tensor-parallel-size": size}
        values = resolve(ENGINE, command_line=given, environ={})
        parallel = build("engine", EngineConfig, ENGINE, values).parallel
        assert parallel.executor_backend == backend


@pytest.mark.parametrize(
    ("given", "device", "block_size"),
    [("auto", "cpu", 16), ("auto", "cuda", 64), ("16", "cuda", 16)],
)
def test_blocks_are_larger_on_cuda_unless_somebody_says(
    given: str, device: str, block_size: int
) -> None:
    resolved = resolve(ENGINE, command_line={"model": "m", "block-size": given}, environ={})
    config = build("engine", EngineConfig, ENGINE, resolved)
    assert block_size_on(torch.device(device), config.cache) == block_size


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_a_loopback_host_needs_no_secret(host: str) -> None:
    TransferConfig(kv_connector="nixl", host=host).require_secret("host", host)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.2", "::", "node7", ""])
def test_whoever_is_reached_from_elsewhere_and_hands_kv_over_needs_a_secret(host: str) -> None:
    with pytest.raises(
        ConfigError, match=f"--kv-transfer-config.host is '{host}': there is no secret"
    ):
        TransferConfig(kv_connector="nixl", host=host)
    local = TransferConfig(kv_connector="nixl")
    with pytest.raises(ConfigError, match=f"--host is '{host}': there is no secret"):
        local.require_secret("host", host)
    TransferConfig(kv_connector="nixl", host=host, secret="s").require_secret("host", host)
    TransferConfig(kv_connector="null", host=host).require_secret("host", host)


@pytest.mark.parametrize("lease_s", [0.0, 1e-9, float("nan"), float("inf"), 1e6])
def test_a_lease_that_no_peer_would_believe_is_refused(lease_s: float) -> None:
    with pytest.raises(ConfigError, match=r"--kv-transfer-config\.lease_s is"):
        TransferConfig(lease_s=lease_s)


@pytest.mark.parametrize("flag", ["prefill-replicas", "decode-replicas", "both-replicas"])
def test_more_engines_than_a_host_runs_are_refused(flag: str) -> None:
    for number in (-1, 100_000):
        with pytest.raises(ConfigError, match=f"--{flag} is {number}: use 0 to 1000"):
            UpConfig(**{flag.replace("-", "_"): number})


def test_a_prompt_with_bytes_that_were_not_decoded_is_refused() -> None:
    """As under LC_ALL=C without UTF-8 mode: no JSON can carry it."""
    with pytest.raises(ConfigError, match=r"--prompt is 'a\\udcff': .* LC_ALL=C.UTF-8"):
        UpConfig(prompt="a\udcff")
