"""Every name of vLLM's has one answer, and what is said to be taken is taken."""

from __future__ import annotations

from collections import Counter

import pytest

from pdserve.config.load import Source, build, resolve, variable
from pdserve.config.schema import EngineConfig, Role
from pdserve.config.settings import engine_flags, engine_table, proxy_table, up_table
from pdserve.config.vllm import flags, variables
from pdserve.config.vllm.answers import VllmAnswer, VllmKind, table
from pdserve.config.vllm.translate import ROLE, role_of
from pdserve.errors import ConfigError

ENGINE = engine_table(Role.BOTH)
TAKEN = {item.flag for item in (*ENGINE.settings, *ENGINE.shorthands)} | {"config"}
ROWS = table(engine_flags())


def engine(environ: dict[str, str] | None = None, **given: object) -> EngineConfig:
    named = {flag.replace("__", ".").replace("_", "-"): value for flag, value in given.items()}
    values = resolve(ENGINE, command_line={"model": "m", **named}, environ=environ or {})
    return build("engine", EngineConfig, ENGINE, values)


def test_a_name_has_one_row_and_what_is_not_the_same_a_reason() -> None:
    counted = Counter((row.kind, row.name) for row in ROWS)
    assert [name for name, number in counted.items() if number > 1] == []
    assert [row.name for row in ROWS if not row.text and row.answer is not VllmAnswer.SAME] == []
    numbers = Counter(row.kind for row in ROWS)
    assert numbers[VllmKind.FLAG] > 300
    assert numbers[VllmKind.VARIABLE] > 200
    assert numbers[VllmKind.CONNECTOR] >= 16


def test_a_flag_is_taken_unless_the_table_says_that_it_is_not_here() -> None:
    for row in ROWS:
        if row.kind is VllmKind.FLAG:
            flag = row.name.partition(",")[0].removeprefix("--")
            assert (flag in TAKEN) is (row.answer is not VllmAnswer.ABSENT), row


def test_no_reason_is_left_of_a_flag_that_is_here() -> None:
    known = engine_flags()
    elsewhere = {*flags.RENAMED, *flags.RENAMED_SWITCHES, *flags.NO_EFFECT, *flags.ONLY}
    assert sorted(known & {*elsewhere, *ENGINE.absent}) == []
    assert sorted(set(flags.SAME.split()) - known - {"config"}) == []


def test_every_value_that_changes_nothing_is_taken_and_others_are_refused() -> None:
    for flag, (words, _) in flags.ONLY.items():
        for word in words or ("anything",):
            resolve(ENGINE, command_line={flag: word}, environ={})
        if words:
            with pytest.raises(ConfigError, match=f"--{flag}: 'another' is not supported, only"):
                resolve(ENGINE, command_line={flag: "another"}, environ={})


@pytest.mark.parametrize(
    ("flag", "theirs", "ours"),
    [(flag, theirs, ours) for flag, words in flags.WORDS.items() for theirs, ours in words.items()],
)
def test_vllms_words_for_a_value_are_understood(flag: str, theirs: str, ours: str) -> None:
    one, other = (resolve(ENGINE, command_line={flag: w}, environ={}) for w in (theirs, ours))
    assert one[flag].value == other[flag].value
    by_variable = resolve(ENGINE, command_line={}, environ={variable(flag): theirs})
    assert by_variable[flag].value == other[flag].value


@pytest.mark.parametrize(
    ("given", "flag", "value"),
    [
        ({"disable-log-requests": True}, "log-requests", False),
        ({"disable-log-stats": "false"}, "log-stats", True),
        ({"enable-log-requests": False}, "log-requests", False),
        ({"max-num-queued-reqs": 7}, "max-waiting", 7),
        ({"distributed-timeout-seconds": "60"}, "step-timeout", 60.0),
        ({"device-memory-utilization": "0.5"}, "gpu-memory-utilization", 0.5),
    ],
)
def test_a_flag_of_another_name_sets_ours(
    given: dict[str, object], flag: str, value: object
) -> None:
    assert resolve(ENGINE, command_line=given, environ={})[flag].value == value


@pytest.mark.parametrize(
    ("raw", "connector", "role"),
    [
        ({"kv_connector": "NixlConnector", "kv_role": "kv_both"}, "nixl", "kv_both"),
        ({"kv_connector": "nixl"}, "nixl", ""),
        (
            {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "connectors": [
                        {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
                        {
                            "kv_connector": "LMCacheMPConnector",
                            "kv_connector_extra_config": {"lmcache.mp.port": 6555},
                        },
                    ]
                },
            },
            "nixl,lmcache",
            "kv_both",
        ),
    ],
    ids=["vllm", "ours", "several"],
)
def test_vllms_connectors_and_roles_are_understood(
    raw: dict[str, object], connector: str, role: str
) -> None:
    values = resolve(ENGINE, command_line={"kv-transfer-config": raw}, environ={})
    assert values["kv-transfer-config.kv-connector"].value == connector
    assert values[ROLE].value == role
    if "lmcache" in connector:
        assert values["kv-transfer-config.lmcache.url"].value == "tcp://localhost:6555"


def test_the_keys_of_vllms_transfer_config_are_ours() -> None:
    config = engine(
        kv_transfer_config={
            "kv_connector": "NixlConnector",
            "kv_role": "kv_producer",
            "kv_ip": "127.0.0.7",
            "kv_port": 14579,
            "kv_rank": 0,
            "kv_parallel_size": 2,
            "engine_id": "p0",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"backends": ["UCX", "GDS"], "kv_lease_duration": 60},
        }
    )
    transfer = config.transfer
    assert (transfer.host, transfer.port, config.engine_id) == ("127.0.0.7", 14579, "p0")
    assert (transfer.lease_s, config.scheduler.recompute_tokens_per_s) == (60.0, 0)
    assert transfer.settings["nixl.backends"] == ("UCX", "GDS")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (
            {"kv_connector": "MooncakeConnector"},
            "vLLM's MooncakeConnector is not supported: use nixl or ucx",
        ),
        ({"kv_connector": "MultiConnector"}, "needs a list of connectors"),
        ({"kv_connector": "NixlConnector", "kv_role": "both"}, "'both' is unknown: use kv_prod"),
        ({"kv_connector_module_path": "my.module"}, "entry point in the group pdserve.connectors"),
        ({"kv_connector_extra_config": {"num_threads": 4}}, "nixl.lanes sets the number"),
        ({"kv_connector_extra_config": {"wings": 2}}, r"nixl\.wings is not a setting"),
        ({"kv_load_failure_policy": "hope"}, "use recompute or fail"),
    ],
)
def test_what_is_not_here_of_a_transfer_config_says_why(raw: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(ENGINE, command_line={"kv-transfer-config": raw}, environ={})


@pytest.mark.parametrize(
    ("role", "said", "becomes"),
    [
        (Role.PREFILL, "kv_producer", Role.PREFILL),
        (Role.PREFILL, "kv_both", Role.PREFILL),
        (Role.DECODE, "kv_consumer", Role.DECODE),
        (Role.BOTH, "kv_producer", Role.PREFILL),
        (Role.BOTH, "kv_consumer", Role.DECODE),
        (Role.BOTH, "kv_both", Role.BOTH),
        (Role.BOTH, "", Role.BOTH),
    ],
)
def test_a_kv_role_fits_the_command_or_says_what_serve_is(
    role: Role, said: str, becomes: Role
) -> None:
    assert role_of(role, said) is becomes


@pytest.mark.parametrize(
    ("role", "said"), [(Role.PREFILL, "kv_consumer"), (Role.DECODE, "kv_producer")]
)
def test_a_kv_role_that_does_not_fit_the_command_names_the_one_that_does(
    role: Role, said: str
) -> None:
    with pytest.raises(ConfigError, match=rf"kv-role is '{said}'.*use `pdserve"):
        role_of(role, said)


def test_vllms_variables_set_what_they_mean_and_pdserves_win() -> None:
    environ = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.5",
        "VLLM_HOST_IP": "127.0.0.6",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "WARN",
        "VLLM_API_KEY": "theirs",
        "PDSERVE_API_KEY": "ours",
        "VLLM_PP_LAYER_PARTITION": "3,4",
    }
    values = resolve(ENGINE, command_line={"pipeline-parallel-size": 2}, environ=environ)
    found = {
        flag: (item.value, item.origin)
        for flag, item in values.items()
        if item.source is Source.ENVIRONMENT
    }
    assert found == {
        "kv-transfer-config.host": ("127.0.0.5", "VLLM_NIXL_SIDE_CHANNEL_HOST"),
        "kv-transfer-config.port": (5600, "VLLM_NIXL_SIDE_CHANNEL_PORT"),
        "kv-cache-memory-bytes": (2 << 30, "VLLM_CPU_KVCACHE_SPACE"),
        "log-level": ("warning", "VLLM_LOGGING_LEVEL"),
        "api-key": (("ours",), "PDSERVE_API_KEY"),
        "pipeline-layers": ((3, 4), "VLLM_PP_LAYER_PARTITION"),
    }
    with pytest.raises(ConfigError, match="VLLM_NIXL_SIDE_CHANNEL_PORT: 'x' is not a whole"):
        resolve(ENGINE, command_line={}, environ={"VLLM_NIXL_SIDE_CHANNEL_PORT": "x"})


def test_the_proxy_and_up_read_the_variables_that_they_have_settings_for() -> None:
    assert list(proxy_table().other_variables) == ["VLLM_API_KEY", "VLLM_LOGGING_LEVEL"]
    assert list(up_table().other_variables) == list(variables.VARIABLES)
